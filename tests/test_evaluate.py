"""Scores against full forward passes, distributions made by hand and textbook attention."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from math import exp, isnan, log, sqrt
from statistics import fmean

import pytest
from language_models import VOCABULARY, random_ids, real_model, tiny_model

from polarquant_nb import FormatPair, PolarFormat, decode, encode, evaluate, preset, quality
from polarquant_nb.attention_error import Recording, record_attention

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
    assert compressed.coded_nbytes == heads * pages * (
        PAIR.keys.page_nbytes + PAIR.values.page_nbytes
    )
    assert compressed.coded_values == heads * 157 * 128
    assert compressed.exact_values == heads * 23 * 128
    assert compressed.nbytes == compressed.coded_nbytes + 2 * compressed.exact_values
    assert compressed.bits_per_value == pytest.approx(PAIR.bits_per_value * 256 / 157)
    assert evaluate.exact_nbytes(cache) == 2 * heads * 180 * 128
    assert compressed.ratio == evaluate.exact_nbytes(cache) / compressed.nbytes
    assert compressed.encode_seconds > 0


def test_compress_takes_the_name_of_a_preset(cache):
    named = evaluate.compress(cache, "tiny", recent=0)
    pair = evaluate.compress(cache, preset("tiny", 64), recent=0)
    assert named.coded_nbytes == pair.coded_nbytes
    assert torch.equal(named.cache.layers[1].keys, pair.cache.layers[1].keys)


def test_compress_takes_a_seed_of_the_rotation(cache):
    seeded = FormatPair(replace(PAIR.keys, seed=7), replace(PAIR.values, seed=7))
    keys = [
        evaluate.compress(cache, pair, seed=seed).cache.layers[0].keys
        for pair, seed in ((PAIR, 7), (seeded, None), (PAIR, None))
    ]
    assert torch.equal(keys[0], keys[1])
    assert not torch.equal(keys[0], keys[2])


def test_any_codec_can_stand_in_for_ours(cache):
    seen = []

    def double(name, x):
        seen.append((name, tuple(x.shape)))
        return 2 * x, 1000

    doubled = evaluate.compress_with(cache, double, sink=3, recent=20, multiple=32)
    assert seen == 2 * [("keys", (2, 2, 128, 64)), ("values", (2, 2, 128, 64))]
    for layer, new in zip(cache.layers, doubled.cache.layers, strict=True):
        for x, y in ((layer.keys, new.keys), (layer.values, new.values)):
            assert torch.equal(y[..., 3:131, :], 2 * x[..., 3:131, :])
            for exact in (slice(3), slice(131, None)):
                assert torch.equal(y[..., exact, :], x[..., exact, :])
    values = 2 * 2 * 2 * 2 * 128 * 64  # layers, keys and values, rows, KV heads
    assert (doubled.coded_nbytes, doubled.coded_values) == (4000, values)
    assert doubled.exact_values == values * 52 // 128
    assert doubled.bits_per_value == 8 * 4000 / values
    assert isnan(doubled.encode_seconds)
    with pytest.raises(ValueError, match=r"180 tokens; with sink=3 and recent=150.*more than 184"):
        evaluate.compress_with(cache, double, sink=3, recent=150, multiple=32)


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
    assert compressed.coded_values == 2 * 192 * 128
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


# ---- attention error -----------------------------------------------------------------------------


def layer_0_queries(model, ids):
    """Queries of the first layer, after the positional encoding."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    decoder = model.model
    x = decoder.embed_tokens(ids)
    attention = decoder.layers[0]
    q = attention.self_attn.q_proj(attention.input_layernorm(x))
    q = q.unflatten(-1, (-1, 64)).transpose(1, 2)
    cos, sin = decoder.rotary_emb(x, torch.arange(ids.shape[1])[None])
    return apply_rotary_pos_emb(q, q, cos, sin)[0]


def textbook_attention(q, k, v):
    """Causal, of the last tokens; heads of a group beside one another."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    logits = q.double() @ k.transpose(-1, -2) / 8
    n, tokens = logits.shape[-2:]
    hidden = torch.ones(n, tokens, dtype=torch.bool).triu(tokens - n + 1)
    return torch.softmax(logits.masked_fill(hidden, -torch.inf), -1) @ v


@pytest.mark.parametrize("chunk", [256, 7])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_error_is_that_of_textbook_attention(model, ids, cache, implementation, chunk):
    model.set_attn_implementation(implementation)
    try:
        with record_attention(model) as recording:
            evaluate.score(model, cache, ids[:, 180:], chunk=chunk)
        compressed = evaluate.compress(cache, PAIR).cache
        errors = recording.errors(compressed)
    finally:
        model.set_attn_implementation("sdpa")
    whole = evaluate.prefill(model, ids).layers[0]
    with torch.no_grad():
        q = layer_0_queries(model, ids)[..., 180:, :]
    exact = textbook_attention(q, whole.keys, whole.values)
    mixed = [
        torch.cat([getattr(compressed.layers[0], name), getattr(whole, name)[..., 180:, :]], -2)
        for name in ("keys", "values")
    ]
    expected = (textbook_attention(q, *mixed) - exact).square().sum() / exact.square().sum()
    assert len(errors) == 2
    assert errors[0] == pytest.approx(expected.item(), rel=1e-3)
    assert compressed.get_seq_length() == 180


def test_attention_error_is_a_layers_own(model, ids, cache):
    with record_attention(model) as recording:
        evaluate.score(model, cache, ids[:, 180:])
    assert recording.errors(cache) == (0, 0)
    assert recording.errors(lambda: copy.deepcopy(cache)) == (0, 0)
    louder = copy.deepcopy(cache)
    louder.layers[0].values *= 1.25
    first, second = recording.errors(louder)
    # attention is linear in the values; those of the queries' own tokens are as they were
    assert 0 < first < 0.0625
    assert second == 0


def test_recording_leaves_no_trace(model, ids, cache):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    other = tiny_model()
    before = dict(ALL_ATTENTION_FUNCTIONS)
    plain = evaluate.score(model, cache, ids[:, 180:])
    with record_attention(model) as outer:
        with record_attention(model) as inner:
            recorded = evaluate.score(model, cache, ids[:, 180:])
        evaluate.score(other, cache, ids[:, 180:])
        evaluate.score(model, cache, ids[:, 180:])
    evaluate.score(model, cache, ids[:, 180:])
    assert torch.equal(recorded, plain)
    assert dict(ALL_ATTENTION_FUNCTIONS) == before
    assert (len(inner.calls), len(outer.calls)) == (2, 4)


def test_a_recording_of_nothing_is_refused(cache):
    with pytest.raises(ValueError, match="no attention was recorded"):
        Recording().errors(cache)


# ---- several windows -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judgements(model):
    windows = [random_ids(1, 121, seed)[0].tolist() for seed in (1, 2)]
    contenders = [
        evaluate.Contender("mine", partial(evaluate.compress, formats=PAIR), "ours"),
        evaluate.Contender("again", partial(evaluate.compress, formats=PAIR)),
    ]
    return windows, contenders, list(quality.judge(model, windows, 100, contenders))


def test_judge_looks_at_each_window_on_its_own(model, judgements):
    windows, _, found = judgements
    assert [(one.contender, one.family, one.window) for one in found] == [
        (name, family, window)
        for window in (0, 1)
        for name, family in (("exact", "exact"), ("mine", "ours"), ("again", "polarquant_nb"))
    ]
    for window, token_ids in enumerate(windows):
        ids = torch.tensor([token_ids])
        cache = evaluate.prefill(model, ids[:, :100])
        reference = evaluate.score(model, cache, ids[:, 100:-1])
        compressed = evaluate.compress(cache, PAIR)
        log_probs = evaluate.score(model, compressed.cache, ids[:, 100:-1])
        expected = evaluate.compare(log_probs, reference, ids[:, 101:])
        exact, mine, again = found[3 * window : 3 * window + 3]
        assert (mine.kl, mine.top1, mine.perplexity, mine.tokens) == (
            expected.kl, expected.top1, expected.perplexity, 20,
        )  # fmt: skip
        assert (mine.bits_per_value, mine.nbytes, mine.ratio) == (
            compressed.bits_per_value, compressed.nbytes, compressed.ratio,
        )  # fmt: skip
        assert len(mine.attention_errors) == 2
        assert min(mine.attention_errors) > 0
        assert again.kl == mine.kl
        assert (exact.kl, exact.top1, exact.attention_errors) == (0, 1, (0, 0))
        assert (exact.bits_per_value, exact.ratio) == (16, 1)
        assert exact.nbytes == evaluate.exact_nbytes(cache)


def test_judge_leaves_out_what_is_known(model, judgements, monkeypatch):
    windows, contenders, found = judgements
    known = {(one.contender, one.window) for one in found}
    (one,) = quality.judge(model, windows, 100, contenders, skip=known - {("mine", 1)})
    assert (one.contender, one.window, one.kl) == ("mine", 1, found[4].kl)
    monkeypatch.setattr(quality, "prefill", lambda *_: pytest.fail("nothing is left to do"))
    assert list(quality.judge(model, windows, 100, contenders, skip=known)) == []


def test_summaries_are_means_and_their_spread_over_windows():
    def judgement(window, **numbers):
        return quality.Judgement("x", "f", window, 4.0, 100, 4.0, tokens=10, **numbers)

    found = [
        judgement(0, kl=1.0, top1=0.5, perplexity=10, attention_errors=(0.1, 0.3)),
        judgement(1, kl=4.0, top1=0.7, perplexity=1000, attention_errors=(0.3, 0.9)),
    ]
    (one,) = quality.summarise(found)
    assert (one.contender, one.family, one.windows, one.tokens) == ("x", "f", 2, 20)
    assert (one.kl, one.kl_stderr) == (2.5, pytest.approx(1.5))
    assert (one.top1, one.top1_stderr) == (pytest.approx(0.6), pytest.approx(0.1))
    assert one.perplexity == pytest.approx(100)
    assert one.attention_errors == pytest.approx((0.2, 0.6))
    assert one.attention_error == pytest.approx(fmean((0.2, 0.6)))
    assert one.attention_error_stderr == pytest.approx(0.2)
    (alone,) = quality.summarise(found[:1])
    assert alone.kl_stderr is alone.top1_stderr is alone.attention_error_stderr is None


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
