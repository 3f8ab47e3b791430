"""PolarCache in everything that a generation does."""

from __future__ import annotations

import copy
import pickle
import tracemalloc
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from language_models import random_ids, real_model
from support import NOJIT
from tiny_models import FAMILIES, tiny
from transformers import DynamicCache

import polarquant_nb as pq
from polarquant_nb.hf import heap
from polarquant_nb.hf.layer import Handle, PolarLayer
from polarquant_nb.hf.versions import CACHE_ARGUMENT, CROP_TAKES_LENGTH

# What transformers itself warns of is not ours to repair.
pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
]
packed = pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1")

LOSSLESS = {"recent": 512}
"""Nothing is packed: as a cache would be whose codec loses nothing."""


@pytest.fixture
def enabled():
    """A tiny model, enabled for one test."""
    models = []

    def get(family: str = "llama", **options):
        models.append(pq.hf.enable(tiny(family, **options)))
        return models[-1]

    yield get
    for model in models:
        pq.hf.disable(model)


def polar(model, **options):
    return pq.hf.PolarCache(model.config, **{**LOSSLESS, **options})


def dynamic(model):
    return DynamicCache(config=model.config)


def generate(model, cache, ids, **options):
    options = {
        "max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids), **options,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return model.generate(ids, **{CACHE_ARGUMENT: cache}, **options)


def forward(model, cache, ids, **options):
    with torch.no_grad():
        return model(ids, use_cache=True, **{CACHE_ARGUMENT: cache}, **options)


def prompts(*lengths, seed=0):
    """Left-padded token ids and their mask."""
    longest = max(lengths)
    ids = random_ids(len(lengths), longest, seed).clamp(3)
    mask = torch.stack([torch.arange(longest) >= longest - n for n in lengths]).long()
    return ids * mask, mask


# ---- every scenario, with a cache that loses nothing ---------------------------------------------


def greedy(model, cache):
    ids = random_ids(2, 17)
    return generate(model, cache, ids)


def left_padded(model, cache):
    ids, mask = prompts(17, 4, 11)
    return generate(model, cache, ids, attention_mask=mask)


def beams(model, cache):
    ids, mask = prompts(17, 9)
    return generate(model, cache, ids, attention_mask=mask, num_beams=4, num_return_sequences=3)


def samples(model, cache):
    ids, mask = prompts(17, 9)
    return generate(
        model, cache, ids, attention_mask=mask, do_sample=True, num_return_sequences=3, top_k=0
    )


def prompt_lookup(model, cache):
    ids = random_ids(1, 17).repeat(1, 2)
    return generate(
        model, cache, ids, prompt_lookup_num_tokens=3, max_new_tokens=30, eos_token_id=[2]
    )


def assisted(model, cache):
    """By a model of other weights, most of whose drafts are rejected."""
    draft = tiny(model.config.model_type.removesuffix("_text"), seed=1)
    return generate(model, cache, random_ids(1, 17), assistant_model=draft, max_new_tokens=40)


def assisted_by_itself(model, cache):
    """All drafts are accepted."""
    draft = pq.hf.disable(copy.deepcopy(model))
    return generate(model, cache, random_ids(1, 17), assistant_model=draft, max_new_tokens=40)


def turns(model, cache):
    """A conversation, in which every turn is padded on the left."""
    ids, mask = prompts(17, 4, 11)
    for seed, lengths in enumerate([(2, 9, 5), (6, 1, 3)], 1):
        ids = generate(model, cache, ids, attention_mask=mask, max_new_tokens=8)
        answered = torch.ones(3, 8, dtype=mask.dtype)
        more, more_mask = prompts(*lengths, seed=seed)
        ids = torch.cat([ids, more], 1)
        mask = torch.cat([mask, answered, more_mask], 1)
    return generate(model, cache, ids, attention_mask=mask)


def chunked_prefill(model, cache):
    ids, mask = prompts(17, 4)
    return generate(model, cache, ids, attention_mask=mask, prefill_chunk_size=5)


def prefix_reuse(model, cache):
    """One prefix, copied for two questions."""
    prefix = random_ids(1, 12)
    forward(model, cache, prefix)
    answers = []
    for seed in (1, 2):
        ids = torch.cat([prefix, random_ids(1, 5, seed)], 1)
        answers.append(generate(model, copy.deepcopy(cache), ids))
    return torch.cat(answers)


SCENARIOS = [
    greedy, left_padded, beams, samples, prompt_lookup, assisted, assisted_by_itself, turns,
    chunked_prefill, prefix_reuse,
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_a_dynamic_cache(family, scenario, enabled):
    model = tiny(family)
    rolls_back = scenario in (prompt_lookup, assisted, assisted_by_itself)
    if rolls_back and CROP_TAKES_LENGTH and FAMILIES[family][1].get("sliding_window"):
        pytest.skip("layers with a sliding window cannot be cropped up to transformers 5.14")
    want = scenario(model, dynamic(model))
    enabled(family)
    cache = polar(model)
    got = scenario(model, cache)
    assert torch.equal(got, want)
    report = cache.report()
    assert report.decoded == 0
    assert report.exact > 0
    # most new tokens would not stay exact, so they attend to one another before they are appended
    assert torch.equal(scenario(model, polar(model, recent=1)), want)
    if scenario is not prefix_reuse:  # where copies are used
        assert report.coded > 0


# ---- with the codec ------------------------------------------------------------------------------

CODED = {"sink": 4, "recent": 16}


@pytest.fixture
def coded(enabled):
    """An enabled Llama with head_dim 64."""
    return enabled("llama", head_dim=64)


def long_prompt(n=330, seed=0):
    return random_ids(1, n, seed).clamp(3)


def long_greedy(model, cache):
    return generate(model, cache, long_prompt(), max_new_tokens=8)


def long_beams(model, cache):
    return generate(model, cache, long_prompt(), max_new_tokens=8, num_beams=3)


def long_chunks(model, cache):
    return generate(model, cache, long_prompt(), max_new_tokens=8, prefill_chunk_size=100)


def long_lookup(model, cache):
    return generate(
        model, cache, long_prompt(), max_new_tokens=24, prompt_lookup_num_tokens=4, eos_token_id=[2]
    )


def long_turns(model, cache):
    ids = generate(model, cache, long_prompt(), max_new_tokens=8)
    ids = torch.cat([ids, long_prompt(150, 1)], 1)
    return generate(model, cache, ids, max_new_tokens=8)


@packed
@pytest.mark.parametrize(
    "scenario", [long_greedy, long_beams, long_chunks, long_lookup, long_turns],
    ids=lambda f: f.__name__,
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:keys and values of a PolarCache")
def test_attention_on_codes_gives_what_attention_on_decoded_codes_gives(scenario, coded):
    cache = polar(coded, **CODED)
    got = scenario(coded, cache)
    assert cache.counts.decoded == 0
    assert cache.counts.coded >= 14
    other = polar(coded, **CODED)
    pq.hf.disable(coded)
    want = scenario(coded, other)
    assert other.counts.coded == 0
    assert torch.equal(got, want)
    assert cache.get_seq_length() == other.get_seq_length()
    for a, b in zip(cache.layers, other.layers, strict=True):
        for x, y in zip(a.cache.decode(), b.cache.decode(), strict=True):
            # float32 sums differ in order, and that may move a later token to the next codeword
            assert (x - y).norm() < 0.01 * y.norm()


@packed
def test_rows_of_a_left_padded_batch_are_what_they_are_alone(coded):
    lengths = 330, 97, 201
    ids, mask = prompts(*lengths)
    cache = polar(coded, **CODED)
    together = generate(coded, cache, ids, attention_mask=mask)[:, 330:]
    assert cache.counts.decoded == 0
    assert cache.get_seq_length() == 330 + 19
    for row, n in enumerate(lengths):
        alone = polar(coded, **CODED)
        tokens = generate(coded, alone, ids[row : row + 1, 330 - n :])[:, n:]
        assert torch.equal(tokens[0], together[row])
        for a, b in zip(cache.layers, alone.layers, strict=True):
            assert a.cache.lengths[row] == b.cache.lengths[0] == n + 19
            for x, y in zip(a.cache.decode(), b.cache.decode(), strict=True):
                torch.testing.assert_close(x[row : row + 1, :, -n - 19 :], y, rtol=0, atol=2e-5)


@packed
def test_decoding_builds_nothing_as_long_as_the_cache(coded, monkeypatch):
    monkeypatch.setattr(pq.KVCache, "decode", lambda self: pytest.fail("decoded"))
    ids = long_prompt(2000)
    forward(coded, polar(coded, **CODED), ids)
    cache = polar(coded, **CODED)
    forward(coded, cache, ids[:, :-2])
    forward(coded, cache, ids[:, -2:-1])
    whole = 2000 * 2 * 64 * 4  # keys of one layer
    sizes = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                if isinstance(x, torch.Tensor) and not isinstance(x, Handle):
                    sizes.append(x.numel() * x.element_size())
            return out

    tracemalloc.start()
    with Spy():
        forward(coded, cache, ids[:, -1:])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(sizes) < whole / 4
    assert peak < whole / 4  # NumPy's arrays are traced


@packed
def test_bytes_of_8000_tokens_are_less_than_three_tenths_of_fp16():
    from polarquant_nb.hf.handle import Counts

    # 8,000 tokens are 61 pages of 4.03 bits of 16, and 192 exact ones: three more than that, and
    # there is a page more and 128 exact ones less
    for dtype, limit, mean_limit in ((torch.float32, 0.295, 0.29), (torch.bfloat16, 0.2708, 0.266)):
        layer = PolarLayer("balanced", {}, Counts())
        for _ in range(8):
            x = torch.randn(1, 3, 1000, 64, dtype=dtype)
            layer.update(x, x)
        ratios = []
        for n in range(8000, 8128):
            assert layer.get_seq_length() == n
            ratios.append(layer.nbytes / (2 * 2 * n * 3 * 64))
            layer.update(x[:, :, :1], x[:, :, :1])
        assert ratios[0] <= limit
        assert sum(ratios) / len(ratios) <= mean_limit


@packed
def test_report(enabled):
    model = enabled("gemma3", head_dim=64)
    cache = polar(model, **CODED)
    generate(model, cache, long_prompt())
    report = cache.report()
    assert [layer.kind for layer in report.layers] == [
        "DynamicSlidingWindowLayer", "balanced", "DynamicSlidingWindowLayer",
    ]  # fmt: skip
    assert [layer.tokens for layer in report.layers] == [7, 349, 7]
    assert report.nbytes == cache.nbytes == sum(layer.nbytes for layer in report.layers)
    assert report.layers[0].nbytes == 2 * report.layers[0].fp16_nbytes == 2 * 2 * 7 * 2 * 64 * 4 / 2
    assert report.layers[1].nbytes == cache.layers[1].cache.nbytes
    assert report.layers[1].fp16_nbytes == 2 * 2 * 349 * 2 * 64
    table = str(report).splitlines()
    assert len(table) == 6
    assert table[2].split()[:3] == ["1", "balanced", "349"]
    assert table[4].split() == ["all", f"{report.nbytes:,}", f"{report.ratio:.2f}"]
    assert table[5].startswith(f"attention on codes {report.coded} times, on a first prefill 1,")


# ---- what else a model may do --------------------------------------------------------------------


def test_a_model_that_is_not_enabled_warns_once():
    model = tiny("llama")
    ids, mask = prompts(17, 9)
    want = generate(model, dynamic(model), ids, attention_mask=mask)
    cache = polar(model)
    with pytest.warns(UserWarning, match="Call polarquant_nb.hf.enable") as caught:
        got = generate(model, cache, ids, attention_mask=mask)
    assert torch.equal(got, want)
    assert sum("PolarCache" in str(one.message) for one in caught) == 1
    assert cache.counts.coded == 0
    assert cache.counts.decoded == 2 * 19
    assert cache.layers[0].cache.lengths.tolist() == [36, 36]  # padding is stored


@pytest.mark.filterwarnings("ignore:keys and values of a PolarCache")
def test_eager_attention_of_a_model_that_is_not_enabled():
    model = tiny("gemma2")
    want = turns(model, dynamic(model))
    assert torch.equal(turns(model, polar(model)), want)


@pytest.mark.filterwarnings("ignore:keys and values of a PolarCache")
def test_enabling_in_the_middle_of_a_conversation(enabled):
    model = tiny("llama")
    ids, mask = prompts(17, 9)
    want = generate(model, dynamic(model), ids, attention_mask=mask)
    cache = polar(model)
    got = generate(model, cache, ids, attention_mask=mask, max_new_tokens=5)
    enabled()
    mask = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], 1)
    got = generate(model, cache, got, attention_mask=mask, max_new_tokens=10)
    pq.hf.disable(model)
    mask = torch.cat([mask, torch.ones(2, 10, dtype=mask.dtype)], 1)
    got = generate(model, cache, got, attention_mask=mask, max_new_tokens=5)
    assert torch.equal(got, want)


def test_enabled_models_work_with_other_caches(enabled):
    model = tiny("gemma3")
    want = turns(model, dynamic(model))
    enabled("gemma3")
    assert torch.equal(turns(model, dynamic(model)), want)


def last_logits(model, cache, ids, more, **options):
    forward(model, cache, ids)
    return forward(model, cache, more, **options).logits


def check_mask(model, mask):
    """Logits under a mask of four axes, on top of 12 tokens, for 3 more."""
    ids, more = random_ids(2, 12), random_ids(2, 3, 1)
    want = last_logits(model, dynamic(model), ids, more, attention_mask=mask)
    pq.hf.enable(model)
    try:
        cache = polar(model)
        got = last_logits(model, cache, ids, more, attention_mask=mask)
    finally:
        pq.hf.disable(model)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return cache.counts


def test_masks_of_four_axes():
    model = tiny("llama")
    shown = torch.ones(3, 15, dtype=torch.bool).tril(12)
    assert check_mask(model, shown[None, None]).coded == 2
    shown[1:, 5:9] = False
    assert check_mask(model, shown.expand(2, 1, 3, 15)).coded == 2
    numbers = torch.zeros(3, 15).masked_fill(~shown, torch.finfo(torch.float32).min)
    numbers[:, 3] = 1.5  # a bias
    assert check_mask(model, numbers.expand(2, 1, 3, 15)).coded == 2


def test_a_mask_that_is_not_causal_falls_back_to_decoded_keys():
    counts = check_mask(tiny("llama"), torch.ones(1, 1, 3, 15, dtype=torch.bool))
    assert (counts.coded, counts.decoded) == (0, 2)


def test_padding_on_the_right_is_stored_and_masked(enabled):
    model = tiny("llama")
    ids = random_ids(2, 17)
    mask = torch.ones_like(ids)
    mask[0, 11:] = 0
    want = generate(model, dynamic(model), ids, attention_mask=mask)
    enabled()
    cache = polar(model)
    assert torch.equal(generate(model, cache, ids, attention_mask=mask), want)
    assert cache.layers[0].cache.lengths.tolist() == [36, 36]


def test_padding_cannot_be_shown_later(enabled):
    model = enabled()
    ids, mask = prompts(7, 4)
    cache = polar(model)
    forward(model, cache, ids, attention_mask=mask)
    mask = torch.ones(2, 8)
    mask[0, 3] = 0
    with pytest.raises(ValueError, match="padding is not stored"):
        forward(model, cache, ids[:, :1], attention_mask=mask)


@pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported")  # up to 4.57
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_output_attentions(family, enabled):
    model = tiny(family)
    was = model.config._attn_implementation
    model.set_attn_implementation("eager")
    ids, more = random_ids(2, 12), random_ids(2, 3, 1)
    cache = dynamic(model)
    forward(model, cache, ids)
    want = forward(model, cache, more, output_attentions=True)
    model.set_attn_implementation(was)
    enabled(family)
    cache = polar(model)
    forward(model, cache, ids)
    got = forward(model, cache, more, output_attentions=True)
    assert len(got.attentions) == len(want.attentions) > 0
    for a, b in zip(got.attentions, want.attentions, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_16_bits(dtype):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    ids, more = random_ids(2, 30), random_ids(2, 3, 1)
    want = last_logits(model, dynamic(model), ids, more)
    pq.hf.enable(model)
    got = last_logits(model, polar(model), ids, more)
    assert got.dtype == dtype
    scale = want.float().abs().max()
    assert (got - want).float().abs().max() < 8 * torch.finfo(dtype).eps * scale


def test_compiled_models_break_the_graph(enabled):
    model = enabled()
    ids = random_ids(2, 12)
    cache, other = polar(model), polar(model)
    forward(model, cache, ids)
    forward(model, other, ids)
    compiled = torch.compile(model, backend="eager")
    for seed in range(1, 4):
        more = random_ids(2, 1, seed)
        want = forward(model, cache, more).logits
        assert torch.equal(forward(compiled, other, more).logits, want)
    assert other.counts == cache.counts
    assert other.counts.coded == 6


def test_a_config_with_a_nested_text_config():
    transformers = pytest.importorskip("transformers")
    text = tiny("gemma3").config
    config = transformers.Gemma3Config(text_config=text.to_dict())
    assert set(pq.hf.PolarCache(config).polar_layers) == {1}


def test_forward_with_gradients_and_deepcopy(enabled):
    model = enabled()
    cache = polar(model)
    model(random_ids(1, 5), **{CACHE_ARGUMENT: cache})
    out = model(random_ids(1, 2), **{CACHE_ARGUMENT: copy.deepcopy(cache)}).logits
    assert torch.isfinite(out).all()


def test_keys_and_values_of_different_widths(enabled):
    model = tiny("llama")
    attend = transformers_attention(pq.hf.enable(model))
    pq.hf.disable(model)
    exact = transformers_attention(model)
    config = copy.deepcopy(model.config)
    config.v_head_dim = 16
    cache = pq.hf.PolarCache(config, **LOSSLESS)
    held = dynamic(model)
    module = model.model.layers[0].self_attn
    for n in (9, 1):
        q, k, v = torch.randn(1, 4, n, 32), torch.randn(1, 2, n, 32), torch.randn(1, 2, n, 16)
        got, _ = attend(module, q, *cache.update(k, v, 0), None, scaling=0.2)
        want, _ = exact(module, q, *held.update(k, v, 0), None, scaling=0.2)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert cache.layers[0].keys.shape == (1, 2, 10, 32)
    assert cache.layers[0].values.shape == (1, 2, 10, 16)


def transformers_attention(model):
    from transformers import AttentionInterface

    return AttentionInterface()[model.config._attn_implementation]


# ---- mutators, copies, handles -------------------------------------------------------------------


def filled(*lengths, **options):
    """A cache of a padded batch, enabled or not, and the same as a DynamicCache."""
    model = pq.hf.enable(tiny("llama"))
    ids, mask = prompts(*lengths)
    cache, other = polar(model, **options), dynamic(model)
    forward(model, cache, ids, attention_mask=mask)
    forward(model, other, ids, attention_mask=mask)
    pq.hf.disable(model)
    return cache, other, mask.bool()


def check_same(cache, other, mask, layers=(0, 1)):
    """Tokens are equal; where there is padding, ours are zeros."""
    assert cache.get_seq_length() == other.get_seq_length()
    for ours, theirs in ((cache.layers[i], other.layers[i]) for i in layers):
        assert ours.get_mask_sizes(3) == (cache.get_seq_length() + 3, 0)
        for x, y in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            assert x.shape == y.shape
            torch.testing.assert_close(x + 0, y * mask[:, None, :, None], rtol=1e-5, atol=1e-5)


def test_mutators():
    cache, other, mask = filled(9, 4, 7)
    assert cache.is_initialized
    check_same(cache, other, mask)
    for each in (cache, other):
        each.reorder_cache(torch.tensor([2, 0, 2]))
        each.batch_repeat_interleave(2)
        each.batch_select_indices(torch.tensor([0, 3, 4]))
        each.crop(-2)
    mask = mask[[2, 0, 2]][:, :-2]
    check_same(cache, other, mask)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    check_same(cache, other, mask)
    if not CROP_TAKES_LENGTH:
        cache.crop(0)
        check_same(cache, other, mask)
        with pytest.raises(ValueError, match="crop was given 1"):
            cache.crop(1)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    assert cache.layers[0].cache.batch_size == 2
    cache.crop(-100)
    assert cache.get_seq_length() == 0
    cache.reset()
    assert not cache.is_initialized
    assert cache.layers[0].keys is None


@pytest.mark.skipif(CROP_TAKES_LENGTH, reason="crop counts what is removed from 5.15 on")
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_call_that_ended_midway(tokens, error, enabled, monkeypatch):
    """One layer had a token more than the next, and later tokens were wrong without a word."""
    model = tiny("llama")
    cache, other, more = polar(model), dynamic(model), random_ids(1, 4, seed=1)
    forward(model, other, random_ids(1, 20))
    want = forward(model, other, more).logits
    enabled("llama")
    forward(model, cache, random_ids(1, 20))
    with monkeypatch.context() as patch:
        if error is ValueError:
            weight = model.model.layers[1].self_attn.k_proj.weight
            patch.setattr(weight, "data", torch.full_like(weight, torch.nan))
        else:
            patch.setattr(PolarLayer, "update", interrupted_at(2))
        with pytest.raises(error):
            forward(model, cache, more[:, :tokens])
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(ValueError, match=r"layer 1 holds .* ended midway.*crop\(0\)"):
        forward(model, cache, more)
    cache.crop(0)
    assert [layer.get_seq_length() for layer in cache.layers] == [min(lengths)] * 2
    cache.crop(20 - min(lengths))
    torch.testing.assert_close(forward(model, cache, more).logits, want, rtol=1e-4, atol=1e-4)


def interrupted_at(n):
    calls, update = [], PolarLayer.update

    def call(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == n:
            raise KeyboardInterrupt
        return update(self, *args, **kwargs)

    return call


def test_a_crop_that_a_layer_refuses_removes_nothing():
    model = tiny("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    cache = polar(model)
    forward(pq.hf.enable(model), cache, random_ids(1, 20))
    assert [layer.is_sliding for layer in cache.layers] == [False, True]
    with pytest.raises((RuntimeError, ValueError)):
        cache.crop(-2)
    assert [layer.get_seq_length() for layer in cache.layers] == [20, 20]


def test_what_could_not_be_stored_decides_on_nothing():
    cache = polar(tiny("llama"))
    x = torch.full((2, 2, 3, 64), torch.nan)
    cache.update(x, x, 0)
    with pytest.raises(ValueError, match="k is nan"):
        cache.report()
    assert cache.get_seq_length() == 0
    cache.update(x[:1] * 0, x[:1] * 0, 0)
    assert cache.get_seq_length() == 3


def test_crop_into_padding_between_turns():
    """Rows lose different numbers of tokens where they are padded."""
    model = pq.hf.enable(tiny("llama"))
    ids, mask = prompts(6, 4)
    more, more_mask = prompts(2, 5, seed=1)
    cache, other = polar(model), dynamic(model)
    whole = torch.cat([mask, more_mask], 1)
    for each in (cache, other):
        forward(model, each, ids, attention_mask=mask)
        forward(model, each, more, attention_mask=whole)
    pq.hf.disable(model)
    assert cache.layers[0].cache.lengths.tolist() == [8, 9]
    for n in (1, 3, 2, 2):
        for each in (cache, other):
            each.crop(-n)
        length = cache.get_seq_length()
        assert cache.layers[0].cache.lengths.tolist() == whole[:, :length].sum(1).tolist()
        check_same(cache, other, whole[:, :length].bool())


def test_an_exact_cache_is_copied(enabled):
    model = tiny("gemma3")
    exact = dynamic(model)
    ids, more = random_ids(2, 21), random_ids(2, 3, 1)
    forward(model, exact, ids)
    cache = polar(model).copy_from(exact)
    check_same(cache, exact, torch.ones(2, 21, dtype=torch.bool), layers=[1])
    want = forward(model, exact, more).logits
    enabled("gemma3")
    torch.testing.assert_close(forward(model, cache, more).logits, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="3 layers and 24 tokens, the other one 3 layers"):
        cache.copy_from(exact)


def test_masks_that_are_written_to_are_read_again():
    from polarquant_nb.hf.columns import leading_padding

    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    assert leading_padding(mask, 9, 2) == (0, 0)
    mask[1] = False
    assert leading_padding(mask, 9, 2) == (0, 1)
    with torch.inference_mode():
        mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
        assert leading_padding(mask, 9, 2) == (0, 0)
        mask[1] = False
        assert leading_padding(mask, 9, 2) == (0, 1)


def test_flags():
    cache = polar(tiny("llama"))
    assert not cache.is_compileable
    assert cache.is_sliding == [False, False]
    assert getattr(cache, "is_croppable", True)
    assert cache.get_seq_length() == 0
    assert all(
        layer.get_max_length() == layer.get_max_cache_shape() == -1 for layer in cache.layers
    )
    assert cache.nbytes == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_are_independent(copied):
    cache, other, mask = filled(9, 4)
    twin = copied(cache)
    assert twin.counts == cache.counts
    check_same(twin, other, mask)
    cache.crop(-3)
    check_same(twin, other, mask)
    assert twin.counts is twin.layers[0].counts is twin.layers[1].counts


def test_handles_do_not_outlive_a_change():
    cache, _, _ = filled(9)
    keys = cache.layers[0].keys
    kept = keys.clone()
    assert "keys" in repr(keys)
    cache.crop(-1)
    with pytest.raises(RuntimeError, match="after the cache had changed"):
        keys.clone()
    assert torch.equal(kept[:, :, :-1], cache.layers[0].keys + 0)


def test_tokens_that_nobody_attended_to_are_kept():
    cache = polar(tiny("llama"))
    x = torch.randn(1, 2, 5, 32)
    cache.update(x, x, 0)
    assert cache.get_seq_length() == 5
    cache.update(x, x, 0)
    assert cache.layers[0].cache.lengths.tolist() == [10]


# ---- formats of layers ---------------------------------------------------------------------------


def test_layers_of_their_own_formats(enabled):
    model = enabled()
    pair = pq.preset("compact", 32)
    cache = polar(model, layers={0: "accurate", -1: pair})
    assert [layer.formats for layer in cache.layers] == ["accurate", pair]
    cache = polar(model, layers={0: None})
    assert type(cache.layers[0]) is type(dynamic(model).layers[0])
    assert set(cache.polar_layers) == {1}
    generate(model, cache, random_ids(1, 9))
    assert cache.report().layers[0].fp16_nbytes == 2 * 2 * 28 * 2 * 32


# ---- bad input -----------------------------------------------------------------------------------


def config_without_head_dim():
    config = copy.deepcopy(tiny("llama").config)
    del config.head_dim, config.num_attention_heads
    return config


def config_of(name, **options):
    import transformers

    return getattr(transformers, name)(**options)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pq.hf.PolarCache({}), TypeError, "config is dict"),
        (lambda: pq.hf.PolarCache(config_of("T5Config")), ValueError, "encoder-decoder"),
        (lambda: pq.hf.PolarCache(config_of("DeepseekV3Config")), ValueError, "kv_lora_rank"),
        (
            lambda: pq.hf.PolarCache(config_of("MistralConfig", sliding_window=8)),
            ValueError,
            "none is of full attention",
        ),
        (lambda: polar(tiny("llama"), formats="huge"), ValueError, "preset is 'huge'"),
        (lambda: polar(tiny("llama"), formats=3), TypeError, "formats are 3"),
        (
            lambda: polar(tiny("llama"), formats=pq.preset("balanced", 64)),
            ValueError,
            "for head_dim 64 of keys and 64 of values; the model has 32 and 32",
        ),
        (lambda: polar(tiny("llama"), layers={2: None}), ValueError, "layer 2; the model has 2"),
        (
            lambda: polar(tiny("gemma3"), layers={0: "tiny"}),
            ValueError,
            r"those of full attention can be compressed: \[1\]",
        ),
        (lambda: polar(tiny("llama"), recent=-1), ValueError, "recent is -1"),
        (lambda: polar(tiny("llama")).early_initialization(), ValueError, "cannot be static"),
        (lambda: pq.hf.enable(3), TypeError, "model is int"),
    ],
)  # fmt: skip
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_config_without_head_dim():
    class Config(config_of("LlamaConfig").__class__):
        head_dim = hidden_size = None

        @property
        def per_layer_config(self):
            return [self] * self.num_hidden_layers

    config = copy.deepcopy(tiny("llama").config)
    config.__class__ = Config
    config.__dict__.pop("head_dim", None)
    config.__dict__.pop("hidden_size", None)
    with pytest.raises(ValueError, match="neither head_dim nor hidden_size"):
        pq.hf.PolarCache(config)


def test_a_cache_of_another_batch_or_model(enabled):
    model = enabled()
    cache = polar(model)
    generate(model, cache, random_ids(2, 9))
    with pytest.raises(ValueError, match="another batch or another model"):
        forward(model, cache, random_ids(3, 1))
    wide = enabled("llama", head_dim=64)
    with pytest.raises(ValueError, match="another batch or another model"):
        forward(wide, cache, random_ids(2, 1))
    with pytest.raises(ValueError, match="made for 2 layers"):
        forward(enabled("llama", num_hidden_layers=3), polar(model), random_ids(2, 1))


@pytest.mark.parametrize("filled_first", [False, True])
def test_a_cache_made_for_a_model_of_the_same_shapes(enabled, filled_first):
    """As with a DynamicCache: the cache is what was put into it, whoever it was made for."""
    first, second = tiny("llama"), tiny("llama", seed=1)
    ids, more = random_ids(2, 9), random_ids(2, 14)

    def continued(make):
        cache = make(first)
        if filled_first:
            forward(first, cache, ids)
        return generate(second, cache, more)

    want = continued(dynamic)
    enabled("llama")
    enabled("llama", seed=1)
    assert torch.equal(continued(polar), want)


def test_tensors_on_another_device():
    x = torch.zeros(1, 2, 1, 32, device="meta")
    with pytest.raises(TypeError, match="PolarCache supports models on the CPU"):
        polar(tiny("llama")).update(x, x, 0)


def test_models_that_cannot_be_enabled():
    import transformers

    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        pq.hf.enable(t5)
    model = copy.deepcopy(tiny("llama"))
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="attention is 'flex_attention'; it must be 'sdpa' or"):
        pq.hf.enable(model)


def test_enable_and_disable_are_undone_and_done_once():
    for family in ("llama", "gpt_oss"):
        model = tiny(family)
        was = model.config._attn_implementation
        assert pq.hf.disable(model) is model
        assert pq.hf.enable(pq.hf.enable(model)) is model
        assert model.config._attn_implementation != was
        pq.hf.disable(model)
        assert model.config._attn_implementation == was


def test_a_static_cache_is_refused():
    model = tiny("llama")
    with pytest.raises(ValueError, match="cache_implementation"):
        generate(model, polar(model), random_ids(1, 5), cache_implementation="static")


# ---- the real model ------------------------------------------------------------------------------


@pytest.mark.model
def test_the_real_model_says_what_it_says_with_an_exact_cache():
    from polarquant_nb import evaluate
    from polarquant_nb.models import load_text, token_window

    loaded = real_model()
    model = loaded.model
    ids = torch.tensor([token_window(load_text()[0], loaded.tokenizer, 600 + 101)])
    context, fed, targets = ids[:, :600], ids[:, 600:-1], ids[:, 601:]
    exact = evaluate.prefill(model, context)
    reference = evaluate.score(model, exact, fed)
    want = evaluate.greedy(model, exact, fed[:, :1], 12)
    pq.hf.enable(model)
    try:
        cache = pq.hf.PolarCache(model.config)
        forward(model, cache, context, logits_to_keep=1)
        assert cache.counts == type(cache.counts)(exact=30)
        for chunk in (100, 1):  # more than stay exact, and one by one
            score = evaluate.score(model, cache, fed, chunk=chunk)
            score = evaluate.compare(score, reference, targets)
            assert score.kl < 0.003
            assert score.top1 > 0.9
        assert torch.equal(evaluate.greedy(model, cache, fed[:, :1], 12), want)
    finally:
        pq.hf.disable(model)


@pytest.mark.model
def test_the_real_model_finds_a_needle_on_the_codes():
    from polarquant_nb import contenders, needle
    from polarquant_nb.models import load_text

    loaded = real_model()
    model = pq.hf.enable(loaded.model)
    caches = []

    def compress(exact):
        caches.append(pq.hf.PolarCache(model.config).copy_from(exact))
        return contenders.CompressedCache(caches[-1], 0, 0, 0)

    hidden = needle.hide(loaded.tokenizer, load_text()[0], 500, 0.25)
    ours = contenders.Contender("PolarCache", compress)
    try:
        exact, coded = needle.search(model, [hidden], loaded.tokenizer, [ours])
    finally:
        pq.hf.disable(model)
    assert caches[0].layers[0].cache.formats == pq.preset("balanced", 64)
    assert caches[0].report().ratio < 0.75
    assert exact.hit
    assert coded.hit
    assert abs(coded.nll - exact.nll) < 0.2


def test_memory_is_given_back_at_one_call_in_eight(monkeypatch):
    """Every time would make a prefill a fifth slower; never would let the process grow."""
    trims = []
    monkeypatch.setattr(heap, "_libc", lambda: SimpleNamespace(malloc_trim=trims.append))
    for _ in range(16):
        heap.give_back_at_times()
    assert trims == [0, 0]
    monkeypatch.setattr(heap, "_libc", lambda: None)  # another libc
    heap.give_back_at_times()
