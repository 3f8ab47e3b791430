"""Tiny random models of several families, for tests with transformers."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from language_models import VOCABULARY

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.25,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_HYBRID = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {"head_dim": 16}),  # hidden_size / num_attention_heads
    "qwen3": ("Qwen3", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "gemma2": ("Gemma2", {**_HYBRID, "sliding_window": 8, "attn_logit_softcapping": 5.0}),
    "gemma3": ("Gemma3", {**_HYBRID, "sliding_window": 8}),
    "phi3": ("Phi3", {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "gpt_oss": (
        "GptOss",
        {**_HYBRID, "sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""The family's name in transformers, and what its configuration has beside the common."""


@cache
def tiny(family: str, seed: int = 0, **options: Any) -> Any:
    """A model; made once for each family and options."""
    name, more = FAMILIES[family]
    settings = {**_COMMON, **more, **options}
    if family in ("phi3", "qwen2"):
        del settings["head_dim"]
    config_class = f"{name}{'Text' if family == 'gemma3' else ''}Config"
    config = getattr(transformers, config_class)(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        if family == "gemma2":  # up to 4.57 the default leaves out the soft cap
            model.set_attn_implementation("eager")
        # random sinks: transformers leaves them at a constant, or uninitialised
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("sinks"):
                parameter.data.normal_()
    return model
