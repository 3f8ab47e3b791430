"""Captures hold what the model computes, whatever its family."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from language_models import CharacterTokenizer, random_ids, real_model
from support import STORES, stored
from tiny_models import FAMILIES, tiny

import polarquant_nb as pq
from polarquant_nb.analysis import capture
from polarquant_nb.evaluate import prefill
from polarquant_nb.models import LoadedModel

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]

HYBRID = {family for family, (_, options) in FAMILIES.items() if "layer_types" in options}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_keys_and_values_are_those_of_the_cache(family):
    model, ids = tiny(family), random_ids(1, 50)
    captured = capture(model, ids[0], chunk=20)
    layers = [1] if family in HYBRID else [0, 1]
    assert captured.layer.values.tolist() == layers
    assert captured.token_id.values.tolist() == ids[0].tolist()
    cache = prefill(model, ids, chunk=20)
    for layer in layers:
        here = captured.sel(layer=layer)
        for name in ("key", "value"):
            exact = getattr(cache.layers[layer], f"{name}s")[0].float().numpy()
            np.testing.assert_array_equal(here[name], exact)
    for variable in captured.variables.values():
        assert variable.attrs["long_name"]
        assert variable.attrs["units"] == "1"


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3", "gemma2"])
def test_queries_give_the_outputs_of_the_model(family):
    """Causal attention of what was captured is what goes into the output projection."""
    model, ids = tiny(family), random_ids(1, 40)
    outputs = {}

    def note(module, args):
        outputs[module] = args[0]

    projections = [block.self_attn.o_proj for block in model.model.layers]
    handles = [projection.register_forward_pre_hook(note) for projection in projections]
    captured = capture(model, ids[0])
    for handle in handles:
        handle.remove()
    for layer in captured.layer.values:
        here = captured.sel(layer=layer)
        q, k, v = (torch.from_numpy(here[n].values) for n in ("query", "key", "value"))
        groups = len(q) // len(k)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        logits = q @ k.mT * float(here.scale)
        if family == "gemma2":
            cap = float(here.softcap)
            assert cap == 5
            logits = cap * torch.tanh(logits / cap)
        hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
        out = logits.masked_fill(hidden, -torch.inf).softmax(-1) @ v
        expected = outputs[projections[layer]][0]
        torch.testing.assert_close(out.transpose(0, 1).flatten(1), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_before_the_rotary_embedding(family):
    """Position 0 is not turned, and lengths stay; later positions are turned by the model's own."""
    model, ids = tiny(family), random_ids(1, 30).clamp(3)  # padding embeds as zeros
    captured = capture(model, ids[0], before_rope=True, chunk=16)
    for name in ("query", "key"):
        before, after = captured[f"{name}_before_rope"], captured[name]
        assert before.dims == after.dims
        scaling = getattr(model.model.rotary_emb, "attention_scaling", 1.0)
        np.testing.assert_allclose(after[:, :, 0], before[:, :, 0] * scaling, rtol=1e-5, atol=1e-6)
        norms = (np.linalg.norm(x, axis=-1) for x in (after, before * scaling))
        np.testing.assert_allclose(*norms, rtol=1e-4)
        assert np.abs(after[:, :, 1:] - before[:, :, 1:]).max() > 0.01
    if family == "qwen3":  # normalised before it
        layer = model.model.layers[0].self_attn
        norm = np.linalg.norm(captured.key_before_rope[0] / layer.k_norm.weight.numpy(force=True))
        np.testing.assert_allclose(norm**2, 2 * 30 * 32, rtol=1e-3)


def test_the_model_is_left_as_it_was():
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    model = tiny("llama")
    home = transformers.models.llama.modeling_llama
    rope, attention = home.apply_rotary_pos_emb, ALL_ATTENTION_FUNCTIONS["sdpa"]
    capture(model, [3, 4, 5], before_rope=True)
    with pytest.raises(ValueError, match="layers are"):
        capture(model, [3, 4, 5], layers=[7], before_rope=True)
    assert home.apply_rotary_pos_emb is rope
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is attention


def test_texts_are_tokenized():
    model, tokenizer = tiny("llama"), CharacterTokenizer()
    ids = tokenizer("polar codes")["input_ids"]
    expected = capture(model, ids[:6])
    assert capture(model, "polar codes", tokenizer, tokens=6).identical(expected)
    loaded = LoadedModel(model, tokenizer, "a test")
    found = capture(loaded, "polar codes", tokens=6)
    assert found.attrs["model"] == "a test"
    assert found.equals(expected)
    assert capture(model, np.array(ids), tokens=6).identical(expected)


def test_layers_are_kept_in_the_order_asked_for():
    model = tiny("llama")
    both, swapped = capture(model, [3, 4, 5]), capture(model, [3, 4, 5], layers=[1, 0])
    assert swapped.equals(both.isel(layer=[1, 0]))


def test_half_precision_is_kept_in_float32():
    import copy

    model = copy.deepcopy(tiny("llama")).bfloat16()
    captured = capture(model, [3, 4, 5])
    assert {captured[name].dtype for name in ("query", "key", "value")} == {np.dtype("float32")}
    exact = prefill(model, torch.tensor([[3, 4, 5]])).layers[0].keys[0]
    assert torch.equal(torch.from_numpy(captured.key[0].values).bfloat16(), exact)


@pytest.mark.parametrize("store", STORES)
def test_captures_survive_files(tmp_path, store):
    captured = capture(tiny("gemma2"), [3, 4, 5], before_rope=True)
    with stored(captured, tmp_path / "c", store) as back:
        assert back.identical(captured)
        assert {name: x.dtype for name, x in back.items()} == {
            name: x.dtype for name, x in captured.items()
        }
        fmt = pq.preset("balanced", 32).keys
        found, expected = (pq.analysis.angles(ds.key, fmt, by="layer") for ds in (back, captured))
        assert found.identical(expected)


def test_what_was_captured_can_be_analysed():
    captured = capture(tiny("llama"), random_ids(1, 90)[0])
    fmt = pq.preset("balanced", 32).keys
    ds = pq.analysis.angles(captured.key, fmt, by=("layer", "kv_head"))
    assert dict(ds.sizes) == {"layer": 2, "kv_head": 2, "level": 5, "bin": 64}


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        (("no model", [1]), {}, TypeError, "model is a str"),
        ((None, "text"), {}, TypeError, "tokenizer is None"),
        ((None, []), {}, ValueError, "text has 0"),
        ((None, [1, 2]), {"tokens": 3}, ValueError, "tokens is 3 and text has 2"),
        ((None, [1, 2]), {"tokens": 0}, ValueError, "tokens is 0"),
        ((None, [[1, 2]]), {}, ValueError, "1-d"),
        ((None, [1.5]), {}, TypeError, "text is 1.5; it must be an int"),
        ((None, [1, 2]), {"chunk": 0}, ValueError, "chunk is 0"),
        ((None, [1, 2]), {"layers": [0, 0]}, ValueError, r"layers are \[0, 0\].*: \[0, 1\]"),
        ((None, [1, 2]), {"layers": []}, ValueError, r"layers are \[\]"),
    ],
    ids=[
        "model", "tokenizer", "empty", "few", "none", "2-d", "float", "chunk", "twice", "no layer",
    ],
)  # fmt: skip
def test_capture_refuses(arguments, options, error, message):
    model, text = arguments
    with pytest.raises(error, match=message):
        capture(tiny("llama") if model is None else model, text, **options)


def test_layers_of_different_shapes_are_refused():
    from polarquant_nb.analysis.capturing import _Recorder

    recorder = _Recorder(3, None, False)
    for layer, width in ((0, 16), (1, 32)):
        for name in ("query", "key", "value"):
            recorder.keep(layer, name, 0, torch.zeros(1, 2, 3, width))
        recorder.scales[layer] = 1.0, 0.0
    with pytest.raises(ValueError, match="layers differ in the shape of their query"):
        recorder.dataset([0, 1], [1, 2, 3], {})


def test_what_a_model_hides_is_said(monkeypatch):
    import transformers

    monkeypatch.delattr(transformers.models.llama.modeling_llama, "apply_rotary_pos_emb")
    with pytest.raises(ValueError, match="LlamaForCausalLM has no apply_rotary_pos_emb"):
        capture(tiny("llama"), [3, 4], before_rope=True)


@pytest.mark.model
def test_the_error_of_captures_is_that_of_the_model_itself():
    """The recording of attention_error asks the model; the analysis computes it from the arrays."""
    from functools import partial

    from polarquant_nb.attention_error import record_attention
    from polarquant_nb.evaluate import compress, score

    loaded = real_model()
    text = "The rotation comes first, and then the tree. " * 30
    ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:264]])
    captured = capture(loaded, ids[0], layers=[0, 11, 29])
    ds = pq.analysis.attention_error(captured, ["balanced"], queries=8, sink=4, recent=60 + 8)
    cache = prefill(loaded.model, ids[:, :-8])
    with record_attention(loaded.model) as recording:
        score(loaded.model, cache, ids[:, -8:])
    compressed = partial(compress, formats="balanced", sink=4, recent=60)(cache)
    expected = np.array(recording.errors(compressed.cache))[[0, 11, 29]]
    # there heads are pooled; here each has its own norm
    low, high = ds.error.min("head")[0], ds.error.max("head")[0]
    assert (low <= expected).all()
    assert (expected <= high).all()
