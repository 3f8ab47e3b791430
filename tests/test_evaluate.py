"""Scores against full forward passes and hand-made distributions; bytes against the formats."""

from __future__ import annotations

import copy
from math import exp, isnan, log, sqrt

import pytest
from language_models import VOCABULARY, random_ids, real_model, tiny_model

from polarquant_nb import FormatPair, PolarFormat, decode, encode, evaluate, preset

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PAIR = FormatPair(PolarFormat(64, (4, 5)), PolarFormat(64, (5, 4, 4, 4, 4, 4), "int8"))


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def ids():
    return random_ids(2, 200)


@pytest.fixture(scope="module")
def cache(model, ids):
    return evaluate.prefill(model, ids[:, :180], chunk=64)


def test_prefill_in_chunks_is_one_forward_pass(model, ids, cache):
    whole = evaluate.prefill(model, ids[:, :180], chunk=1000)
    assert cache.get_seq_length() == 180
    for chunked, once in zip(cache.layers, whole.layers, strict=True):
        assert chunked.keys.shape == (2, 2, 180, 64)
        torch.testing.assert_close(chunked.keys, once.keys, atol=1e-5, rtol=0)
        torch.testing.assert_close(chunked.values, once.values, atol=1e-5, rtol=0)


def test_score_of_the_exact_cache_is_a_full_forward_pass(model, ids, cache):
    log_probs = evaluate.score(model, cache, ids[:, 180:], chunk=7)
    with torch.no_grad():
        full = torch.log_softmax(model(ids).logits, -1)[:, 180:]
    assert log_probs.shape == (2, 20, VOCABULARY)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, full, atol=1e-4, rtol=0)


def test_score_and_greedy_leave_a_cache_alone_and_use_up_a_callables(model, ids, cache):
    mine = copy.deepcopy(cache)
    first = evaluate.score(model, mine, ids[:, 180:])
    evaluate.greedy(model, mine, ids[:, 180:181], 3)
    assert mine.get_seq_length() == 180
    assert torch.equal(evaluate.score(model, lambda: mine, ids[:, 180:]), first)
    assert mine.get_seq_length() == 200


def test_greedy_is_the_argmax_of_full_forward_passes(model, ids, cache):
    produced = evaluate.greedy(model, cache, ids[:, 180:183], 5)
    known = ids[:, :183]
    for _ in range(5):
        with torch.no_grad():
            known = torch.cat([known, model(known).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(produced, known[:, 183:])


def test_compress_keeps_sinks_and_recent_and_decodes_the_rest(cache):
    before = copy.deepcopy(cache)
    compressed = evaluate.compress(cache, PAIR, sink=3, recent=20)
    for layer, new, old in zip(cache.layers, compressed.cache.layers, before.layers, strict=True):
        for name, fmt in (("keys", PAIR.keys), ("values", PAIR.values)):
            x, mixed = getattr(layer, name), getattr(new, name)
            assert torch.equal(x, getattr(old, name))
            assert torch.equal(mixed[..., :3, :], x[..., :3, :])
            assert torch.equal(mixed[..., -20:, :], x[..., -20:, :])
            middle = x[..., 3:-20, :]
            assert torch.equal(mixed[..., 3:-20, :], decode(encode(middle, fmt)))
            assert not torch.equal(mixed[..., 3:-20, :], middle)


def test_compress_counts_every_byte(cache):
    compressed = evaluate.compress(cache, PAIR, sink=3, recent=20)
    heads = 2 * 2 * 2  # layers, rows, KV heads
    pages = 2  # 157 tokens
    assert compressed.page_nbytes == heads * pages * (
        PAIR.keys.page_nbytes + PAIR.values.page_nbytes
    )
    assert compressed.page_values == heads * 157 * 128
    assert compressed.exact_values == heads * 23 * 128
    assert compressed.nbytes == compressed.page_nbytes + 2 * compressed.exact_values
    assert compressed.bits_per_value == pytest.approx(PAIR.bits_per_value * 256 / 157)
    assert evaluate.exact_nbytes(cache) == 2 * heads * 180 * 128
    assert compressed.ratio == evaluate.exact_nbytes(cache) / compressed.nbytes
    assert compressed.encode_seconds > 0


def test_compress_takes_the_name_of_a_preset(cache):
    named = evaluate.compress(cache, "tiny", recent=0)
    pair = evaluate.compress(cache, preset("tiny", 64), recent=0)
    assert named.page_nbytes == pair.page_nbytes
    assert torch.equal(named.cache.layers[1].keys, pair.cache.layers[1].keys)


def test_sliding_window_layers_stay_exact(ids):
    layer_types = ["sliding_attention", "full_attention"]
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, use_sliding_window=True, sliding_window=32,
        layer_types=layer_types,
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config).eval()
    cache = evaluate.prefill(model, ids)
    compressed = evaluate.compress(cache, PAIR, sink=4, recent=4)
    assert compressed.page_values == 2 * 192 * 128
    window = cache.layers[0].keys
    assert torch.equal(compressed.cache.layers[0].keys, window)
    assert compressed.exact_values == 2 * 8 * 128 + 2 * window.numel()


def test_more_bits_mean_less_divergence_and_a_peer_is_judged_alike(model, ids, cache):
    further, targets = ids[:, 180:-1], ids[:, 181:]
    reference = evaluate.score(model, cache, further)
    kl = {
        name: evaluate.compare(
            evaluate.score(model, evaluate.compress(cache, name).cache, further), reference, targets
        ).kl
        for name in ("tiny", "accurate")
    }
    assert 0 < 5 * kl["accurate"] < kl["tiny"]

    def peer():
        cast = copy.deepcopy(cache)
        for layer in cast.layers:
            layer.keys = layer.keys.bfloat16().float()
            layer.values = layer.values.bfloat16().float()
        return cast

    rounded = evaluate.compare(evaluate.score(model, peer, further), reference, targets)
    assert 0 < rounded.kl < kl["accurate"]
    assert rounded.tokens == 2 * 19


def test_compare_on_distributions_worked_out_by_hand():
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]]])
    q = torch.tensor([[[0.25, 0.5, 0.25], [0.25, 0.5, 0.25]]])
    result = evaluate.compare(q.log(), p.log(), torch.tensor([[1, 2]]))
    assert result.kl == pytest.approx(0.25 * log(2))
    assert result.kl_stderr == pytest.approx(0.25 * log(2))  # of 0.5 log 2 and 0
    assert result.top1 == 0.5
    assert result.perplexity == pytest.approx(sqrt(2 * 4))
    assert result.tokens == 2


def test_compare_with_itself():
    log_probs = torch.log_softmax(torch.randn(3, 100, 50, generator=torch.Generator()), -1)
    targets = log_probs.argmax(-1)
    result = evaluate.compare(log_probs, log_probs, targets)
    assert (result.kl, result.top1) == (0, 1)
    assert result.perplexity == pytest.approx(exp(-log_probs.max(-1).values.double().mean()))
    assert isnan(evaluate.compare(log_probs[:1, :1], log_probs[:1, :1], targets[:1, :1]).kl_stderr)


def test_compare_refuses_shapes_that_do_not_fit():
    log_probs = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match=r"log_probs has shape \(1, 4, 8\).*\(1, 3, 8\)"):
        evaluate.compare(log_probs, log_probs[:, :3], torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"targets \(1, 3\)"):
        evaluate.compare(log_probs, log_probs, torch.zeros(1, 3, dtype=torch.int64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sink": -1}, "sink is -1"),
        ({"recent": -1}, "recent is -1"),
        ({"sink": 100, "recent": 80}, "holds 180 tokens.*more than 180"),
    ],
    ids=str,
)
def test_compress_refuses(cache, arguments, message):
    with pytest.raises(ValueError, match=message):
        evaluate.compress(cache, PAIR, **arguments)


def test_compress_refuses_an_empty_cache_and_an_unknown_preset(model, cache):
    with pytest.raises(ValueError, match="no layer of full attention"):
        evaluate.compress(transformers.DynamicCache(config=model.config), PAIR)
    with pytest.raises(ValueError, match="preset is 'best'"):
        evaluate.compress(cache, "best")


@pytest.mark.model
def test_default_preset_on_the_real_model():
    """Far fewer tokens than the demo, so the bound on KL is looser than what it shows."""
    from polarquant_nb.models import load_text, token_window

    loaded = real_model()
    text, _ = load_text()
    ids = torch.tensor([token_window(text, loaded.tokenizer, 385, seed=1)])
    cache = evaluate.prefill(loaded.model, ids[:, :320])
    reference = evaluate.score(loaded.model, cache, ids[:, 320:-1])
    scores, sizes = {}, {}
    for name in ("paper", "balanced"):
        compressed = evaluate.compress(cache, name, recent=60)  # 256 tokens: two whole pages
        log_probs = evaluate.score(loaded.model, compressed.cache, ids[:, 320:-1])
        scores[name] = evaluate.compare(log_probs, reference, ids[:, 321:])
        sizes[name] = compressed.nbytes
        assert compressed.bits_per_value == preset(name, 64).bits_per_value
    assert scores["balanced"].kl < 0.003
    assert scores["balanced"].kl < scores["paper"].kl / 4
    assert scores["balanced"].top1 > 0.9
    assert sizes["balanced"] < 1.05 * sizes["paper"]
    assert evaluate.compare(reference, reference, ids[:, 321:]).perplexity < 60
