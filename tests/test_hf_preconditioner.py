"""Key bias and online key scales in a PolarCache."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
import transformers
from language_models import VOCABULARY, random_ids
from test_hf import dynamic, forward, generate, packed, prompts
from tiny_models import tiny

import polarquant_nb as pq
from polarquant_nb.hf.key_bias import key_biases

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]


@pytest.fixture
def biased():
    """A Qwen2 whose keys have a bias far longer than the rest of them; enabled."""
    model = copy.deepcopy(tiny("qwen2"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(50 * torch.randn(bias.shape, generator=generator))
    return pq.hf.enable(model)


def key_errors(cache, exact):
    return [
        ((cache.layers[i].cache.decode()[0] - layer.keys).norm() / layer.keys.norm()).item()
        for i, layer in enumerate(exact.layers)
    ]


@packed
def test_the_bias_of_the_model_is_taken_off(biased):
    ids = random_ids(1, 600)
    caches = [
        pq.hf.PolarCache(biased.config),
        pq.hf.PolarCache.from_model(biased),
        dynamic(biased),
    ]
    for cache in caches:
        forward(biased, cache, ids)
    plain, own, exact = caches
    for ours, without in zip(key_errors(own, exact), key_errors(plain, exact), strict=True):
        assert ours < 0.02
        assert ours < 0.2 * without


@packed
def test_attention_is_that_of_the_decoded_keys(biased):
    """A model that is not enabled attends to decoded keys; both say the same."""
    ids, mask = prompts(400, 330)
    options = {"attention_mask": mask, "max_new_tokens": 12}
    coded = generate(biased, pq.hf.PolarCache.from_model(biased), ids, **options)
    cache = pq.hf.PolarCache.from_model(biased)
    generate(biased, cache, ids, **options | {"max_new_tokens": 1})
    pq.hf.disable(biased)
    with pytest.warns(UserWarning, match="do not|does not know"):
        decoded = generate(biased, cache, coded[:, : ids.shape[1] + 1], **{
            "attention_mask": torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1),
            "max_new_tokens": 11,
        })  # fmt: skip
    assert torch.equal(coded, decoded)


def test_layers_without_a_bias_have_none():
    assert key_biases(tiny("llama")) == {}
    model = tiny("llama")
    cache = pq.hf.PolarCache.from_model(model, "compact", recent=32)
    assert all(layer.options["preconditioner"] is None for layer in cache.layers)
    assert cache.layers[0].formats == "compact"


@pytest.mark.parametrize(("name", "interleaved"), [("Qwen2", False), ("Glm", True)])
def test_the_rotary_embedding_is_the_models_own(name, interleaved):
    config = getattr(transformers, f"{name}Config")(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, attention_bias=True,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    torch.nn.init.normal_(model.model.layers[0].self_attn.k_proj.bias)
    (found,) = key_biases(model).values()
    assert found.bias.interleaved is interleaved
    assert found.shape == (2, 16)


def test_an_embedding_that_is_not_known_is_refused(biased):
    rotary = biased.model.rotary_emb
    turn = rotary.forward
    rotary.forward = lambda x, positions: turn(x, positions * positions)
    with pytest.raises(ValueError, match="Qwen2Attention have a bias that is turned neither"):
        pq.hf.PolarCache.from_model(biased)


@packed
def test_scales_fitted_online(biased):
    ids, mask = prompts(420, 300)
    online = pq.OnlinePreconditioner()
    cache = pq.hf.PolarCache(biased.config, preconditioner=online)
    out = generate(biased, cache, ids, attention_mask=mask, max_new_tokens=8)
    assert out.shape == (2, 428)
    held = [layer.cache for layer in cache.layers]
    assert not any(one.wants_queries for one in held)
    assert all(one.lengths.tolist() == [427, 307] for one in held)
    scales = held[0]._state.keys.table.preconditioner.scales
    assert not (scales[0] == scales[1]).all()


def test_online_needs_an_enabled_model():
    model = tiny("llama")
    cache = pq.hf.PolarCache(model.config, preconditioner=pq.OnlinePreconditioner())
    with (
        pytest.warns(UserWarning, match="does not know"),
        pytest.raises(ValueError, match=r"polarquant_nb\.hf\.enable"),
    ):
        forward(model, cache, random_ids(1, 8))


@pytest.mark.parametrize(
    ("preconditioner", "error", "message"),
    [
        (3, TypeError, "preconditioner is 3"),
        ({5: None}, ValueError, "preconditioner names layer 5; the model has 2"),
        ({0: "scales"}, TypeError, "preconditioner is 'scales'"),
    ],
)
def test_bad_preconditioners(preconditioner, error, message):
    with pytest.raises(error, match=message):
        pq.hf.PolarCache(tiny("llama").config, preconditioner=preconditioner)


def test_from_what_is_no_model():
    with pytest.raises(TypeError, match="model is dict"):
        pq.hf.PolarCache.from_model({})
