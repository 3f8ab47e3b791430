"""Radii of 8 bits: what is stored, how far off it is, and what appending to a page does to it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cache_model import HEADS, assert_same, tokens
from hypothesis import given
from hypothesis import strategies as st
from support import (
    LOG8_FORMATS,
    NOJIT,
    exact_attention,
    gaussian,
    ident,
    radius_errors,
    squared,
    token_radii,
    worst_error,
)

import polarquant_nb as pq
from polarquant_nb import reference
from polarquant_nb.formats import FormatPair, full_depth
from polarquant_nb.layout import PAGE
from polarquant_nb.radii import Anchor, merge_radii, radii_of

PLAIN = pq.PolarFormat(32, (4, 2), rotation="none", radius="log8")
"""Eight blocks of four coordinates, which are not rotated: a block's radius can be chosen."""

VALUES = LOG8_FORMATS[0]
PAIR = FormatPair(pq.PolarFormat(64, full_depth(64, 5, 4), "int8", radius="log8"), VALUES)


def shift_of(words, fmt):
    return words[..., fmt.layout.anchor_word] >> 16 & 7


def with_radii(radii):
    """Vectors of PLAIN with these radii: float32 squares and roots of one number are exact."""
    x = np.zeros((*radii.shape[:-1], 32), np.float32)
    x[..., ::4] = radii
    return x


def span_shift(octaves):
    """How coarse a page has to be whose radii are so many octaves apart; a step less to be sure."""
    return next(shift for shift in range(6) if octaves <= 252 * 2**shift / 128)


# ---- what is stored ------------------------------------------------------------------------------


def test_sizes_at_64_coordinates():
    """What is saved of a float16, less the anchor's word for values."""
    for fmt in (PAIR.keys, PAIR.values):
        plain = pq.PolarFormat(64, fmt.level_bits, fmt.offset)
        word = 0 if fmt.offset == "int8" else 4
        assert plain.page_nbytes - fmt.page_nbytes == PAGE - word
    assert PAIR.keys.layout.anchor_word == PAIR.keys.layout.num_words - 1
    assert 8 * PAGE / (PAGE * 64) == 0.125


def test_known_numbers():
    """128 numbers in an octave, those of bfloat16; rounding is upwards in the middle."""
    radii = np.ones((6, 8))
    radii[:, 0] = 1, 1 + 1 / 128, 1 + 1 / 256, 1 + 1 / 257, 2 - 1 / 256, 3.9
    x = with_radii(radii)
    pages = pq.encode(x, PLAIN)
    assert shift_of(pages.words, PLAIN) == 0
    expected = [1, 1 + 1 / 128, 1 + 1 / 128, 1, 2, 3.90625]
    assert token_radii(pages)[:, 0].tolist() == expected
    x[0, 0] = 1 / 16  # six octaves: steps of 4/128
    pages = pq.encode(x, PLAIN)
    assert shift_of(pages.words, PLAIN) == 2
    assert token_radii(pages)[:, 0].tolist() == [1 / 16, 1, 1, 1, 2, 3.875]


magnitudes = st.one_of(
    st.floats(2.0**-60, 65504.0, width=32),
    st.builds(lambda n, e: n / 256 * 2.0**e, st.integers(256, 511), st.integers(-47, 14)),
    st.sampled_from([0.0, 2.0**-46, 2.0**-46 * (1 - 2.0**-24), 65504.0, 1e-30]),
)


@given(data=st.data())
def test_codes_are_the_references_bit_for_bit(data):
    """Of any radii, between which are up to 62 octaves, in one page or two."""
    around = 2.0 ** data.draw(st.integers(-40, 14))
    close = st.floats(0.25, 2, width=32).map(lambda m: m * around)
    some = st.lists(data.draw(st.sampled_from([magnitudes, close])), min_size=1, max_size=40)
    drawn = np.array(data.draw(some), np.float32)
    radii = np.resize(drawn, (data.draw(st.sampled_from([1, 17, PAGE + 2])), 8))
    x = with_radii(radii)
    expected = reference.encode(x, PLAIN).radii
    pages = pq.encode(x, PLAIN)
    np.testing.assert_array_equal(token_radii(pages), expected)
    # a radius is twice as large in a vector twice as long
    if radii.max() <= 32752 and radii[radii > 0].min(initial=1) >= 2.0**-46:
        np.testing.assert_array_equal(token_radii(pq.encode(2 * x, PLAIN)), 2 * expected)


def test_rows_that_cannot_be_stored():
    """NaN in all of their radii, which the page's anchor takes no notice of; or the largest."""
    radii = np.random.default_rng(0).uniform(1, 2, (40, 8))
    x = with_radii(radii)
    alone = pq.encode(x[:20], PLAIN)
    x[20:, 5] = np.inf
    x[23] = np.nan
    pages = pq.encode(x, PLAIN, nan="propagate")
    assert pages.num_nonfinite == 20
    np.testing.assert_array_equal(pages.words[..., -1], alone.words[..., -1])
    np.testing.assert_array_equal(token_radii(pages)[:20], token_radii(alone))
    assert np.isnan(token_radii(pages)[20:]).all()
    assert np.isnan(pages.decode()[20:]).all()
    with pytest.raises(ValueError, match=r"x is inf at index \(20, 5\)"):
        pq.encode(x, PLAIN)

    x = with_radii(radii)
    x[7, 4] = 1e6
    pages = pq.encode(x, PLAIN, nan="propagate")
    assert pages.num_saturated == 1
    assert token_radii(pages)[7, 1] == 65536
    assert (np.abs(token_radii(pages) / radii - 1)[np.arange(40) != 7] <= 2.0**-4).all()
    with pytest.raises(ValueError, match=r"x at index \(7,\) has norm 1e\+06; radii beyond 65504"):
        pq.encode(x, PLAIN)


# ---- how far off ---------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", LOG8_FORMATS, ids=ident)
@given(data=st.data())
def test_no_vector_is_far_off_whatever_is_in_its_page(fmt, data):
    """Norms over many octaves: the error stays below that of the codes and of the steps."""
    n = data.draw(st.sampled_from([3, 40, PAGE + 1]))
    octaves = data.draw(st.sampled_from([0.0, 1.0, 4.0, 11.0]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    x = rng.standard_normal((n, fmt.head_dim)) * 2 ** rng.uniform(-octaves, octaves, (n, 1))
    x = (x * 2.0 ** data.draw(st.integers(-20, 0))).astype(np.float32)
    pages = pq.encode(x, fmt)
    radii = token_radii(pages).astype(np.float64)
    for page in range(pages.num_pages):
        part = radii[page * PAGE : (page + 1) * PAGE]
        part = np.log2(part[part > 0])
        # no coarser than the page's radii make necessary
        assert shift_of(pages.words[page], fmt) <= span_shift(part.max() - part.min())
    if fmt.offset is None:
        decoded = pages.decode()
        coarse = radius_errors(pages)[..., 0] + 1e-6
        ratio = np.sqrt(squared(decoded) / squared(x))
        assert (np.abs(ratio - 1) <= coarse).all()
        # in x̂ = (1 + δ) x̃, where x̃ has the exact norm
        bound = np.sqrt(worst_error(fmt) + 1e-3) * (1 + coarse) + coarse
        assert (np.sqrt(squared(decoded - x)) <= bound * np.sqrt(squared(x))).all()


@pytest.mark.parametrize("fmt", [VALUES, PAIR.keys], ids=ident)
def test_error_in_the_mean_is_the_closed_form(fmt):
    """Of Gaussian vectors: steps of 1/128 octave add 3e-6."""
    x = gaussian(2 if NOJIT else 40, PAGE, 64, seed=3)
    pages = pq.encode(x, fmt)
    assert not shift_of(pages.words, fmt).any()
    error = squared(pages.decode() - x).sum() / squared(x).sum()
    assert error == pytest.approx(fmt.relative_error, rel=0.06)
    twin = pq.PolarFormat(64, fmt.level_bits, fmt.offset)
    assert error == pytest.approx(
        squared(pq.encode(x, twin).decode() - x).sum() / squared(x).sum(), rel=2e-3
    )


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 3, 70])
@pytest.mark.parametrize("keys", [PAIR.keys, *LOG8_FORMATS], ids=ident)
def test_attention_on_codes_is_attention_on_what_they_decode_to(keys, q_len):
    d = keys.head_dim
    scale = 2 ** np.random.default_rng(4).uniform(-3, 1, (1, 2, 300, 1)).astype(np.float32)
    k, v = gaussian(1, 2, 300, d, seed=5) * scale + 0.3, gaussian(1, 2, 300, 64, seed=6) * scale
    q = gaussian(1, 4, q_len, d, seed=7)
    k_pages, v_pages = pq.encode(k, keys), pq.encode(v, VALUES)
    out, lse = pq.attention(q, k_pages, v_pages, is_causal=True, return_lse=True)
    expected, expected_lse = exact_attention(q, k_pages.decode(), v_pages.decode(), causal=True)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


def test_nan_keys_and_values_give_nan():
    k, v = gaussian(1, 2, 150, 64), gaussian(1, 2, 150, 64, seed=1)
    k[0, 0, 17, 3] = np.nan
    q = gaussian(1, 2, 1, 64, seed=2)
    for keys, values in ((k, v), (v, k)):
        pages = [
            pq.encode(x, fmt, nan="propagate")
            for x, fmt in ((keys, PAIR.keys), (values, PAIR.values))
        ]
        out = pq.attention(q, *pages)
        assert np.isnan(out[0, 0]).all()
        assert np.isfinite(out[0, 1]).all()


def test_bytes_in_lanes_without_tokens_do_not_leak():
    q, k, v = gaussian(1, 4, 1, 64), gaussian(1, 2, 200, 64), gaussian(1, 2, 200, 64, seed=1)
    keys, values = pq.encode(k, PAIR.keys), pq.encode(v, PAIR.values)
    before = pq.attention(q, keys, values)
    for pages in (keys, values):
        for word in pages.format.layout.radius_words:
            pages.words.view(np.uint8)[..., -1, 4 * word + 72 : 4 * word + PAGE] = 255  # NaN
    np.testing.assert_array_equal(pq.attention(q, keys, values), before)


# ---- pages that are filled up --------------------------------------------------------------------


def refilled(more):
    """A cache of 128 tokens in pages, cropped to 100, with 28 others; and its state before."""
    cache = pq.KVCache(PAIR, sink=0, recent=0)
    cache.append(*tokens(1, PAGE))
    cache.crop(100)
    before = cache._state
    cache.append(*more)
    return cache, before


def block(state, side):
    return getattr(state, side).table.blocks[0][0]


def test_tokens_that_the_anchor_reaches_change_no_other():
    cache, before = refilled([x[:, :, 50:78] for x in tokens(1, PAGE)])
    for side, fmt in (("keys", PAIR.keys), ("values", PAIR.values)):
        old, new = block(before, side), block(cache._state, side)
        layout = fmt.layout
        (word,) = layout.radius_words
        old_codes, new_codes = (b.view(np.uint8)[:, 4 * word :][:, :PAGE] for b in (old, new))
        np.testing.assert_array_equal(new_codes[:, :100], old_codes[:, :100])
        np.testing.assert_array_equal(new[:, layout.anchor_word], old[:, layout.anchor_word])


def test_a_large_offset_does_not_make_steps_coarser():
    """While a page is filled up, its other lanes hold no zeros, far from the mean."""
    cache = pq.KVCache(PAIR, sink=0, recent=0)
    k, v = tokens(1, PAGE)
    k += 20
    cache.append(k, v)
    assert not shift_of(block(cache._state, "keys"), PAIR.keys).any()
    cache.crop(100)
    cache.append(k[:, :, 100:], v[:, :, 100:])
    assert not shift_of(block(cache._state, "keys"), PAIR.keys).any()


@pytest.mark.parametrize("scale", [0.4, 2.0, 2.0**-6, 64.0, 2.0**-20, 2.0**10])
def test_tokens_beyond_the_anchor_are_not_clipped(scale):
    """Shorter or longer by octaves; the others stay where steps do, and else near."""
    more = [scale * x for x in tokens(1, 28, seed=1)]
    cache, before = refilled(more)
    for side, fmt in (("keys", PAIR.keys), ("values", PAIR.values)):
        old, now = block(before, side), block(cache._state, side)
        radii, kept = (fmt.layout.read_radii(b)[:, :100, 0] for b in (old, now))
        was, shift = shift_of(old, fmt), shift_of(now, fmt)
        assert (shift >= was).all()
        if scale in (0.4, 2.0):
            np.testing.assert_array_equal(kept[was == shift], radii[was == shift])
        elif side == "values" or scale > 1:  # short keys are as far from the offset as that is long
            assert (shift > was).all()
        assert (np.abs(kept / radii - 1) <= 2.0 ** (shift[:, None] - 8.0)).all()
    # values have no offset: their own norm, at most rounded twice
    _, v = cache.decode()
    ratio = np.sqrt(squared(v[:, :, 100:]) / squared(more[1]))
    assert (np.abs(ratio - 1)[0] <= 1.5 * 2.0 ** (shift[:, None] - 8.0) + 1e-6).all()


def test_a_page_that_is_cropped_and_filled_again_and_again():
    """Steps only ever grow, and what is stored stays within them."""
    cache = pq.KVCache(PAIR, sink=0, recent=0)
    k, v = tokens(1, PAGE)
    cache.append(k, v)
    rng = np.random.default_rng(8)
    for first in (120, 90, 100, 60, 127, 3):
        cache.crop(first)
        scale = np.float32(2.0 ** rng.integers(-8, 8))
        k[:, :, first:], v[:, :, first:] = (scale * x for x in tokens(1, PAGE - first, seed=first))
        cache.append(k[:, :, first:], v[:, :, first:])
        ratio = np.sqrt(squared(cache.decode()[1]) / squared(v))
        shift = shift_of(block(cache._state, "values"), VALUES)
        assert (np.abs(ratio - 1)[0] <= 2 * 2.0 ** (shift[:, None] - 8.0)).all()


@given(data=st.data())
def test_merged_pages_hold_the_radii_of_both(data):
    """Any codes and anchors that an encoder can have written."""

    def page(seed):
        rng = np.random.default_rng(seed)
        shift = data.draw(st.integers(0, 5))
        least = (128 >> shift) - 1  # code 1 is 2**-46 then, the smallest radius that is stored
        start = data.draw(st.integers(least, max(least, (8064 >> shift) - 254))) << shift
        low, high = sorted(data.draw(st.tuples(st.integers(1, 254), st.integers(1, 254))))
        codes = rng.integers(low, high + 1, (3, PAGE)).astype(np.uint8)
        codes[rng.random(codes.shape) < 0.1] = 0
        codes[rng.random(codes.shape) < 0.1] = 255
        return codes, Anchor(np.array(start), np.array(shift))

    old, new = page(data.draw(st.integers(0, 99))), page(data.draw(st.integers(100, 199)))
    first = data.draw(st.integers(0, PAGE - 1))
    codes, anchor = merge_radii(*old, *new, first)
    found = radii_of(codes, anchor)
    expected = np.where(np.arange(PAGE) < first, radii_of(*old), radii_of(*new))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(found == 0, expected == 0)
    some = expected > 0
    coarsest = max(int(old[1].shift), int(new[1].shift))
    assert coarsest <= anchor.shift <= 5
    assert 0 <= anchor.start < 1 << 13
    if anchor.shift == coarsest == min(int(old[1].shift), int(new[1].shift)):
        np.testing.assert_array_equal(found[some], expected[some])
    assert (np.abs(found[some] / expected[some] - 1) <= 2.0 ** (anchor.shift - 8.0)).all()


# ---- files, budgets ------------------------------------------------------------------------------


def test_files(tmp_path):
    safetensors = pytest.importorskip("safetensors")
    path = tmp_path / "some.safetensors"

    def header():
        with safetensors.safe_open(path, framework="numpy") as file:
            return json.loads(file.metadata()["polarquant_nb"])

    def rewrite(content):
        with safetensors.safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        safetensors.numpy.save_file(tensors, path, {"polarquant_nb": json.dumps(content)})

    cache = pq.KVCache(PAIR, sink=2, recent=10)
    cache.append(*tokens(2, 400), [0, 30])
    cache.crop(200)
    cache.save(path)
    other = pq.KVCache.load(path, PAIR)
    assert other.formats == PAIR
    assert_same(cache, other)
    for one in (cache, other):
        one.append(*tokens(2, 300, seed=2))
    assert_same(cache, other)
    q = gaussian(2, 2 * HEADS, 1, 64)
    np.testing.assert_array_equal(cache.attend(q), other.attend(q))

    x = gaussian(2, 200, 64)
    pages = pq.encode(x, VALUES)
    pages.save(path)
    np.testing.assert_array_equal(pq.PolarPages.load(path, VALUES).decode(), pages.decode())
    plain = pq.PolarFormat(64, VALUES.level_bits)
    with pytest.raises(ValueError, match=r"it has PolarFormat\(.*radius='log8'\), not PolarFormat"):
        pq.PolarPages.load(path, plain)
    content = header()
    del content["format"]["radius"]
    rewrite(content)
    with pytest.raises(ValueError, match="its layout of PolarFormat"):
        pq.PolarPages.load(path)

    # files from before there were such radii say nothing of them, and nor do those of today
    pages = pq.encode(x, plain)
    pages.save(path)
    assert header()["format"].keys() == {
        "head_dim", "level_bits", "offset", "rotation", "seed", "codebooks", "sha256",
    }  # fmt: skip
    assert header()["format"]["sha256"]["layout"] == LAYOUT_BEFORE
    np.testing.assert_array_equal(pq.PolarPages.load(path, plain).words, pages.words)


LAYOUT_BEFORE = "9403486fa5646c317b283b50106fbeb8db25d811442e9f6fd5f4705e47da23a5"
"""SHA-256 of the layout 4,2,2,2,2,2 at head_dim 64, as version 0.1 wrote it."""


def test_budgets():
    """The bits that are saved go to codes; without being asked for, nothing changes."""
    plain, log8 = FormatPair.for_budget(64, 3.9), FormatPair.for_budget(64, 3.9, radius="log8")
    assert (plain.keys.radius, plain.values.radius) == ("float16", "float16")
    assert (log8.keys.radius, log8.values.radius) == ("log8", "log8")
    assert log8.bits_per_value <= 3.9
    assert 6 * log8.keys.relative_error + log8.values.relative_error < (
        6 * plain.keys.relative_error + plain.values.relative_error
    )
    for role in ("key", "value"):
        fmt = pq.PolarFormat.for_budget(64, 3.2, role, radius="log8")
        assert fmt.radius == "log8"
        assert fmt.bits_per_value <= 3.2
        assert fmt.relative_error <= pq.PolarFormat.for_budget(64, 3.2, role).relative_error
    with pytest.raises(ValueError, match="radius is 'int8'; it must be 'float16' or 'log8'"):
        pq.PolarFormat.for_budget(64, 3.2, radius="int8")
