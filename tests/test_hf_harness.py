"""lm-evaluation-harness on a compressed cache, offline, on tasks made up here."""

from __future__ import annotations

import json
import string

import pytest
from support import NOJIT

pytest.importorskip("lm_eval")

import lm_eval
from tiny_models import tiny
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from polarquant_nb.hf.harness import PolarLM

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1"),
]


@pytest.fixture
def tokenizer():
    """A token per character."""
    alphabet = ["<pad>", "<s>", "</s>", *string.ascii_letters, *" .,:?\n"]
    made = Tokenizer(models.WordLevel(dict(zip(alphabet, range(96), strict=False)), "<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


@pytest.fixture
def tasks(tmp_path):
    """One task of each kind: text to generate, and choices to score."""
    words = "The quick brown fox jumps over the lazy dog. " * 6
    rows = [{"question": words[i:] + "What is it?", "answer": i % 2} for i in range(4)]
    file = tmp_path / "rows.json"
    file.write_text("\n".join(map(json.dumps, rows)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(tmp_path)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    generated = {
        **common,
        "task": "generated",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 8, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    chosen = {
        **common,
        "task": "chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": [" a dog", " a fox"],
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}],
    }
    return [generated, chosen]


def test_tasks_run_on_a_compressed_cache(tokenizer, tasks, monkeypatch):
    caches = []
    new_cache = PolarLM.new_cache

    def remember(self):
        caches.append(new_cache(self))
        return caches[-1]

    monkeypatch.setattr(PolarLM, "new_cache", remember)
    model = tiny("llama", head_dim=64)
    judge = PolarLM(model, formats="balanced", recent=16, tokenizer=tokenizer, batch_size=2)
    result = lm_eval.simple_evaluate(judge, tasks=tasks, bootstrap_iters=0)
    assert set(result["results"]) == {"generated", "chosen"}
    used = [cache.report() for cache in caches if cache.get_seq_length()]
    assert len(used) >= 4  # batches of two
    assert all(report.coded and not report.decoded for report in used)
    assert all(report.layers[0].kind == "balanced" for report in used)


def test_a_preset_that_does_not_exist(tokenizer):
    with pytest.raises(ValueError, match="preset is 'huge'"):
        PolarLM(tiny("llama", head_dim=64), formats="huge", tokenizer=tokenizer)
