"""Key scales and rotary bias: exact wherever codes are used, refused where they do not fit."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
import synthetic_keys
from cache_model import HEADS, PAIR, assert_same, filled, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from support import (
    NOJIT,
    RANDOM_FORMATS,
    SMALL_OFFSET,
    exact_attention,
    gaussian,
    squared,
    visible_mask,
)

import polarquant_nb as pq
from polarquant_nb.files import preconditioner_record
from polarquant_nb.layout import PAGE
from polarquant_nb.scales import page_variance

D = 64
INV_FREQ = 1e4 ** (-np.arange(D // 2) / (D // 2))

compiled = pytest.mark.skipif(NOJIT, reason="too many vectors for plain Python")


def some_bias(*shape, norm=20.0, seed=5, pairs=D // 2, interleaved=False):
    vectors = gaussian(*shape, D, seed=seed)
    vectors *= norm / np.linalg.norm(vectors, axis=-1, keepdims=True)
    return pq.RotaryBias(vectors, INV_FREQ[:pairs], interleaved)


def some_scales(*shape, seed=6):
    return np.exp(0.5 * gaussian(*shape, D, seed=seed))


def some(*shape, seed=0):
    """Scales and bias of every kv head, or of every row and kv head."""
    return pq.Preconditioner(some_scales(*shape, seed=seed), some_bias(*shape, seed=seed + 1))


def turned(x, positions, inv_freq, interleaved=False):
    """The rotary embedding, as multiplication of complex numbers in float64."""
    x = np.asarray(x, np.float64)
    pairs = len(inv_freq)
    if interleaved:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    else:
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    z = (x[..., first] + 1j * x[..., second]) * np.exp(1j * np.outer(positions, inv_freq))
    out = x.copy()
    out[..., first], out[..., second] = z.real, z.imag
    return out


# ---- the rotary bias -----------------------------------------------------------------------------

KINDS = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
PAIRS = pytest.mark.parametrize("pairs", [1, 24, D // 2])


@KINDS
@PAIRS
@pytest.mark.parametrize("first", [0, 1000, -7, 10**6])
def test_bias_turns_as_complex_numbers_do(interleaved, pairs, first):
    bias = some_bias(2, 3, pairs=pairs, interleaved=interleaved)
    positions = first + np.arange(150)
    expected = turned(
        bias.vectors[..., None, :].repeat(150, -2), positions, bias.inv_freq, interleaved
    )
    np.testing.assert_allclose(bias.at(first, 150), expected, rtol=0, atol=1e-5)


@KINDS
@PAIRS
@pytest.mark.parametrize(("first", "count"), [(0, 1), (5, 128), (10**6, 300)])
def test_logits_of_the_bias(interleaved, pairs, first, count):
    bias = some_bias(3, pairs=pairs, interleaved=interleaved)
    q = gaussian(6, 5, D, seed=1)  # two batch rows
    expected = np.tile(bias.vectors[:, None].repeat(count, 1), (2, 1, 1))
    expected = turned(expected, first + np.arange(count), bias.inv_freq, interleaved)
    expected = np.float64(q) @ expected.swapaxes(-1, -2)
    logits = bias.logits(q, first, count)
    assert logits.shape == (6, 5, count)
    # of norm 20 times 8
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


def test_the_same_as_the_embeddings_of_models():
    """Written as transformers does: rotate_half of Llama, view_as_complex of the interleaved."""
    torch = pytest.importorskip("torch")
    bias = some_bias(3)
    b = torch.from_numpy(np.array(bias.vectors))[:, None].expand(3, 200, D).double()
    angles = torch.arange(200.0, dtype=torch.float64)[:, None] * torch.from_numpy(INV_FREQ)
    cos, sin = (f(torch.cat([angles, angles], -1)) for f in (torch.cos, torch.sin))
    half = torch.cat([-b[..., D // 2 :], b[..., : D // 2]], -1)
    np.testing.assert_allclose(bias.at(0, 200), (b * cos + half * sin).numpy(), rtol=0, atol=1e-5)

    interleaved = pq.RotaryBias(bias.vectors, INV_FREQ, interleaved=True)
    z = torch.view_as_complex(b.reshape(3, 200, D // 2, 2)) * torch.polar(
        torch.ones_like(angles), angles
    )
    expected = torch.view_as_real(z).flatten(-2).numpy()
    np.testing.assert_allclose(interleaved.at(0, 200), expected, rtol=0, atol=1e-5)


@KINDS
@PAIRS
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_estimate_finds_the_bias(interleaved, pairs, dtype):
    bias = some_bias(2, 3, pairs=pairs, interleaved=interleaved)
    k = bias.at(900, 256).astype(np.float64) + turned(
        gaussian(2, 3, 256, D), 900 + np.arange(256), bias.inv_freq, interleaved
    )
    found = pq.RotaryBias.estimate(
        k.astype(dtype), bias.inv_freq, interleaved=interleaved, first_position=900
    )
    assert found.interleaved == interleaved
    assert found.vectors.shape == (2, 3, D)
    np.testing.assert_array_equal(found.inv_freq, bias.inv_freq)
    # a mean of 256 numbers of variance 1
    assert np.abs(found.vectors - bias.vectors).max() < 5 / 16
    assert squared(found.vectors - bias.vectors).mean() == pytest.approx(D / 256, rel=0.5)


def test_torch_tensors_are_taken():
    torch = pytest.importorskip("torch")
    b = torch.nn.Parameter(torch.ones(2, D, dtype=torch.bfloat16))
    inv_freq = torch.tensor(INV_FREQ, dtype=torch.bfloat16)
    bias = pq.RotaryBias(b, inv_freq)
    assert bias.vectors.dtype == np.float32
    np.testing.assert_array_equal(bias.inv_freq, inv_freq.double().numpy())
    k = torch.ones(2, 10, D, dtype=torch.bfloat16)
    assert pq.RotaryBias.estimate(k, inv_freq).vectors.shape == (2, D)
    assert pq.Preconditioner(scales=b).shape == (2, D)
    with pytest.raises(TypeError, match=r"torch|int"):
        pq.Preconditioner(scales=torch.ones(2, D, dtype=torch.int64))


# ---- codes ---------------------------------------------------------------------------------------


def test_scales_are_those_of_vectors_scaled_before():
    """Bit for bit, as powers of two round nothing."""
    k = gaussian(2, HEADS, 2 * PAGE, D) + 1
    scales = np.exp2(np.random.default_rng(0).integers(-3, 4, (HEADS, D))).astype(np.float32)
    pages = pq.encode(k, SMALL_OFFSET, preconditioner=pq.Preconditioner(scales))
    before = pq.encode(k * scales[:, None], SMALL_OFFSET)
    np.testing.assert_array_equal(pages.words, before.words)
    np.testing.assert_allclose(
        pages.decode(), before.decode() / scales[:, None], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("shape", [(HEADS,), (2, HEADS)], ids=["shared", "by row"])
def test_error_is_that_of_what_is_stored(dtype, shape):
    k = (gaussian(2, HEADS, 130, D) + 1).astype(dtype)
    scales, bias = some_scales(*shape), some_bias(*shape)
    pages = pq.encode(
        k, SMALL_OFFSET, preconditioner=pq.Preconditioner(scales, bias), first_position=11
    )
    stored = (k - bias.at(11, 130).astype(np.float64)) * scales[..., None, :]
    reference = pq.encode(stored, SMALL_OFFSET).decode() - stored
    decoded = pages.decode()
    assert decoded.dtype == dtype
    error = (decoded.astype(np.float64) - k) * scales[..., None, :]
    # float16 rounds what has a norm of 20 again
    assert squared(error).sum() == pytest.approx(squared(reference).sum(), rel=2e-2)
    part = pages.decode(40, 129)
    np.testing.assert_array_equal(part, decoded[..., 40:129, :])


def test_keys_that_are_storable_only_without_their_bias():
    norm = 50000 / np.sqrt(D)
    bias = pq.RotaryBias(np.full((HEADS, D), 4 * norm, np.float32), INV_FREQ)
    k = bias.at(0, PAGE)[None] + gaussian(1, HEADS, PAGE, D)
    with pytest.raises(ValueError, match="has norm 2e"):
        pq.encode(k, SMALL_OFFSET)
    pages = pq.encode(k, SMALL_OFFSET, preconditioner=pq.Preconditioner(bias=bias))
    assert squared(pages.decode() - k).mean() < 1  # of 64


def test_keys_that_are_storable_only_without_scales():
    k = np.zeros((1, HEADS, PAGE, D), np.float32)
    k[..., 3] = 40000
    k[..., ::2, 3] *= -1
    doubled = pq.Preconditioner(np.full((HEADS, D), 2.0))
    pq.encode(k, PAIR.values)
    with pytest.raises(ValueError, match=re.escape("has norm 4e+04")) as refused:
        pq.encode(k, PAIR.values, preconditioner=doubled)
    assert "3.275e+04 with this preconditioner" in str(refused.value)
    kept = pq.encode(k, PAIR.values, preconditioner=doubled, nan="propagate")
    assert kept.num_saturated == HEADS * PAGE
    plain, scaled = pq.KVCache(PAIR), pq.KVCache(PAIR, preconditioner=doubled)
    plain.append(k, k)
    with pytest.raises(ValueError, match=re.escape("3.275e+04 with this preconditioner")):
        scaled.append(k, np.zeros_like(k))
    assert scaled.seq_len == 0
    scaled.append(np.zeros_like(k), k)  # values have none


def test_what_scales_make_infinite_is_refused_by_its_norm():
    k = np.full((HEADS, 3, D), 1e31, np.float32)
    with pytest.raises(ValueError, match=re.escape("has norm 8e+31")):
        pq.encode(k, PAIR.values, preconditioner=pq.Preconditioner(np.full((HEADS, D), 1e9)))


def test_nan_stays_where_it_is():
    k = gaussian(1, HEADS, PAGE, D)
    bad = k.copy()
    bad[0, 1, 7, 3] = np.nan
    whole, pages = (
        pq.encode(x, PAIR.values, preconditioner=some(HEADS), nan="propagate") for x in (k, bad)
    )
    assert pages.num_nonfinite == 1
    decoded, others = pages.decode(), whole.decode()
    assert np.isnan(decoded[0, 1, 7]).all()
    decoded[0, 1, 7] = others[0, 1, 7]
    np.testing.assert_array_equal(decoded, others)
    with pytest.raises(ValueError, match=re.escape("x is nan at index (0, 1, 7, 3)")):
        pq.encode(bad, PAIR.values, preconditioner=some(HEADS))


@compiled
def test_online_codebooks_are_fitted_to_what_is_stored():
    k = gaussian(HEADS, 300, D)
    preconditioner = some(HEADS)
    biased = preconditioner.bias.at(4, 300) + k / preconditioner.scales[:, None]
    pages = pq.encode(
        biased, PAIR.values, codebooks="online", preconditioner=preconditioner, first_position=4
    )
    for found, expected in zip(
        pages.codebooks.angles,
        pq.encode(k, PAIR.values, codebooks="online").codebooks.angles,
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-3)


# ---- attention -----------------------------------------------------------------------------------


def assert_near(out, expected, rtol=2e-5):
    assert np.linalg.norm(out - expected) <= rtol * np.linalg.norm(expected)


PRECONDITIONERS = pytest.mark.parametrize(
    "preconditioner",
    [
        pq.Preconditioner(some_scales(HEADS)),
        pq.Preconditioner(bias=some_bias(HEADS)),
        some(HEADS),
        some(2, HEADS),
        pq.Preconditioner(bias=some_bias(2, HEADS, pairs=24, interleaved=True)),
    ],
    ids=["scales", "bias", "both", "by row", "partial"],
)


@PRECONDITIONERS
@pytest.mark.parametrize(
    "n", [pytest.param(1, marks=compiled), 4, pytest.param(40, marks=compiled)]
)  # × 2 heads
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "scale": 0.2}], ids=["plain", "capped"])
def test_attention_is_that_on_decoded_keys(preconditioner, n, options):
    k, v = gaussian(2, 2, HEADS, 300, D)
    k = k + (some_bias(HEADS).at(70, 300) if preconditioner.bias else 0)
    pages = pq.encode(k, PAIR.keys, preconditioner=preconditioner, first_position=70)
    values = pq.encode(v, PAIR.values)
    q = gaussian(2, 2 * HEADS, n, D, seed=3)
    decoded = pages.decode(dtype="float64"), values.decode(dtype="float64")
    mask = gaussian(2, 1, n, 300, seed=4)
    for more in ({}, {"mask": mask}, {"mask": mask[:1] > -1}):
        out, lse = pq.attention(
            q, pages, values, is_causal=True, return_lse=True, **options, **more
        )
        expected, expected_lse = exact_attention(q, *decoded, causal=True, **options, **more)
        assert_near(out, expected)
        np.testing.assert_allclose(lse, expected_lse, rtol=2e-5, atol=2e-5)


def test_values_may_be_scaled_too():
    k, v = gaussian(2, 1, HEADS, 200, D)
    pages = pq.encode(k, PAIR.keys)
    values = pq.encode(v, PAIR.values, preconditioner=pq.Preconditioner(some_scales(HEADS)))
    q = gaussian(1, 2 * HEADS, 1, D, seed=3)
    expected, _ = exact_attention(q, pages.decode(), values.decode())
    assert_near(pq.attention(q, pages, values), expected)


# ---- the cache -----------------------------------------------------------------------------------


def assert_attends(cache, n=1, **options):
    q = gaussian(cache.batch_size, 2 * HEADS, n, D, seed=9)
    out = cache.attend(q, **options)
    visible = visible_mask(cache.lengths, n)
    expected, _ = exact_attention(q, *cache.decode(), mask=visible, **options)
    assert_near(out, expected)


@PRECONDITIONERS
@pytest.mark.parametrize("padding", [None, [0, 150]], ids=["equal", "ragged"])
def test_cache_attends_as_to_decoded_keys(preconditioner, padding):
    cache = filled(400, 2, padding, preconditioner=preconditioner)
    assert_attends(cache)
    assert_attends(cache, 3)
    assert_attends(cache, 2, softcap=5.0)
    if not NOJIT:
        assert_attends(cache, 50)


@given(data=st.data())
@settings(max_examples=4 if NOJIT else min(settings().max_examples, 25))
def test_pieces_give_the_same_bytes(data):
    batch = data.draw(st.integers(1, 2))
    preconditioner = some(*([batch] if data.draw(st.booleans()) else []), HEADS)
    arguments = {
        "preconditioner": preconditioner,
        "sink": data.draw(st.integers(0, 5)),
        "recent": data.draw(st.sampled_from([0, 3, 64])),
    }
    n = data.draw(st.integers(1, 300 if NOJIT else 700))
    whole, pieces = pq.KVCache(PAIR, **arguments), pq.KVCache(PAIR, **arguments)
    k, v = tokens(batch, n)
    whole.append(k, v)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=4)))
    for start, stop in zip([0, *cuts], [*cuts, n], strict=True):
        pieces.append(k[:, :, start:stop], v[:, :, start:stop])
    assert_same(pieces, whole)
    # and the bytes are those of pages encoded at their positions
    packed = whole._state.packed[0]
    if packed:
        sink = arguments["sink"]
        pages = pq.encode(
            k[:, :, sink : sink + packed], PAIR.keys,
            preconditioner=preconditioner, first_position=sink,
        )  # fmt: skip
        held = whole._state.keys.table.to_arrays()[0].reshape(
            batch, -1, HEADS, pages.words.shape[-1]
        )
        np.testing.assert_array_equal(held.swapaxes(1, 2), pages.words)


def test_cropped_pages_are_filled_at_their_positions():
    k, v = tokens(2, 500)
    preconditioner = some(HEADS)
    cache = pq.KVCache(PAIR, preconditioner=preconditioner, recent=0)
    cache.append(k, v)
    whole = cache.decode()[0]
    cache.crop(200)  # within the second page
    cache.append(k[:, :, 200:], v[:, :, 200:])
    # the page has its offset again, and the tokens theirs
    np.testing.assert_array_equal(cache.decode()[0], whole)
    assert_attends(cache, 3)


@pytest.mark.parametrize("shape", [(HEADS,), (2, HEADS)], ids=["shared", "by row"])
def test_select_takes_each_row_with_its_own(shape):
    preconditioner = some(*shape)
    cache = filled(300, 2, preconditioner=preconditioner)
    before = cache.decode()[0]
    order = [1, 1, 0]
    cache.select(order)
    np.testing.assert_array_equal(cache.decode()[0], before[order])
    assert_attends(cache, 2)
    expected = pq.KVCache(PAIR, preconditioner=preconditioner.select(order))
    expected.append(*(x[order] for x in tokens(2, 300)))
    more = tokens(3, 200, seed=1)
    for each in (cache, expected):
        each.append(*more)
    np.testing.assert_array_equal(cache.decode()[0], expected.decode()[0])
    cache.repeat(2)
    assert_attends(cache)


def copies(cache, path):
    yield copy.deepcopy(cache)
    yield pickle.loads(pickle.dumps(cache))
    pytest.importorskip("safetensors")
    cache.save(path)
    yield pq.KVCache.load(path)


@pytest.mark.parametrize(
    "shape", [pytest.param((HEADS,), marks=compiled), (2, HEADS)], ids=["shared", "by row"]
)
@pytest.mark.parametrize(
    "order", [[1, 1, 0], *(pytest.param(rows, marks=compiled) for rows in ([0, 1], [1, 0], [0]))],
    ids=str,
)  # fmt: skip
def test_copies_go_on_alike(shape, order, tmp_path):
    """Rows that were selected are saved with the numbers that are theirs by then."""
    cache = filled(300, 2, preconditioner=some(*shape))
    cache.select(order)
    more = tokens(len(order), 150, seed=1)
    for other in copies(cache, tmp_path / "cache"):
        original = copy.deepcopy(cache)
        assert other.nbytes == original.nbytes
        for each in (other, original):
            each.append(*more)
        assert_same(other, original)
        np.testing.assert_array_equal(other.decode()[0], original.decode()[0])
        for each in (other, original):  # what comes next is as it was for the first rows
            each.reset()
            each.append(*tokens(2, 300, seed=2))
        assert_same(other, original)


def test_bytes_are_counted():
    plain, with_both = filled(300), filled(300, preconditioner=some(HEADS))
    # two vectors of 64 float32 for each head, and 32 frequencies in float64
    assert with_both.nbytes - plain.nbytes == HEADS * 2 * D * 4 + 32 * 8
    k = gaussian(HEADS, PAGE, D)
    pages = pq.encode(k, PAIR.keys, preconditioner=pq.Preconditioner(some_scales(HEADS)))
    assert pages.nbytes - pq.encode(k, PAIR.keys).nbytes == HEADS * D * 4


# ---- pages: files, concatenation -----------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, np.True_], ids=["halves", "interleaved"])
def test_pages_are_saved_with_it(tmp_path, interleaved):
    pytest.importorskip("safetensors")
    bias = some_bias(HEADS, pairs=20, interleaved=interleaved)
    given = pq.Preconditioner(some_scales(HEADS), bias)
    pages = pq.encode(gaussian(2, HEADS, 200, D), PAIR.keys, preconditioner=given, first_position=9)
    pages.save(tmp_path / "pages")
    for other in (pq.PolarPages.load(tmp_path / "pages"), pickle.loads(pickle.dumps(pages))):
        assert other.first_position == 9
        assert other.preconditioner.same(given)
        np.testing.assert_array_equal(other.decode(), pages.decode())


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("safetensors")
    from polarquant_nb.files import read_file, write_file

    pages = pq.encode(gaussian(HEADS, 200, D), PAIR.keys, preconditioner=some(HEADS))
    path = tmp_path / "pages"
    pages.save(path)
    header, arrays = read_file(path, "pages")
    for name in ("preconditioner.bias", "preconditioner.inv_freq"):
        rest = {key: array for key, array in arrays.items() if key != name}
        write_file(path, "pages", header, rest)
        with pytest.raises(ValueError, match=f"it lacks '{name}'"):
            pq.PolarPages.load(path)
    _, three = preconditioner_record(some(HEADS + 1))
    write_file(path, "pages", header, arrays | three)
    with pytest.raises(ValueError, match="preconditioner has shape"):
        pq.PolarPages.load(path)


def test_concatenate_goes_on_in_position():
    k, preconditioner = gaussian(HEADS, 400, D), some(HEADS)

    def encoded(start, stop, first, preconditioner=preconditioner):
        return pq.encode(
            k[:, start:stop], PAIR.keys, preconditioner=preconditioner, first_position=first
        )

    whole = encoded(0, 400, 50)
    joined = pq.PolarPages.concatenate(
        # equal numbers are enough
        [encoded(0, 256, 50), encoded(256, 400, 306, copy.deepcopy(preconditioner))]
    )
    np.testing.assert_array_equal(joined.words, whole.words)
    np.testing.assert_array_equal(joined.decode(), whole.decode())
    with pytest.raises(ValueError, match=re.escape("parts[1] starts at position 256; with a")):
        pq.PolarPages.concatenate([encoded(0, 256, 50), encoded(256, 400, 256)])
    for other in (None, some(HEADS, seed=1), preconditioner.without_bias):
        with pytest.raises(ValueError, match=re.escape("parts[1] was encoded with another prec")):
            pq.PolarPages.concatenate([encoded(0, 256, 50), encoded(256, 400, 306, other)])
    scales = preconditioner.without_bias  # do not depend on the position
    parts = [encoded(0, 256, 50, scales), encoded(256, 400, 0, scales)]
    np.testing.assert_array_equal(
        pq.PolarPages.concatenate(parts).words, encoded(0, 400, 0, scales).words
    )


# ---- what is refused -----------------------------------------------------------------------------

ONES = np.ones((HEADS, D), np.float32)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: pq.Preconditioner(), ValueError, "scales and bias are both None"),
        (lambda: pq.Preconditioner(-ONES), ValueError, "scales hold -1.0; they must be from 1e-09"),
        (lambda: pq.Preconditioner(0 * ONES), ValueError, "scales hold 0.0"),
        (lambda: pq.Preconditioner(ONES * 1e-30), ValueError, "scales hold 1"),
        (lambda: pq.Preconditioner(ONES * np.nan), ValueError, "scales holds numbers that are not"),
        (lambda: pq.Preconditioner(np.ones((2, 3)) * 1e300), ValueError, "are not finite"),
        (lambda: pq.Preconditioner(np.ones((2, 3), int)), TypeError, "scales has dtype int64"),
        (lambda: pq.Preconditioner("scales"), TypeError, "scales has dtype <U6"),
        (lambda: pq.Preconditioner(ONES[0]), ValueError, "scales has shape (64,); it must be (num"),
        (lambda: pq.Preconditioner(bias=ONES), TypeError, "it must be a RotaryBias"),
        (
            lambda: pq.Preconditioner(ONES, some_bias(3)), ValueError,
            "scales have shape (2, 64) and the bias (3, 64), not the same",
        ),
        (lambda: pq.RotaryBias(ONES[0], INV_FREQ), ValueError, "vectors has shape (64,)"),
        (lambda: pq.RotaryBias(ONES * np.inf, INV_FREQ), ValueError, "vectors holds numbers"),
        (lambda: pq.RotaryBias(ONES, []), ValueError, "inv_freq has shape (0,); it must be one-d"),
        (lambda: pq.RotaryBias(ONES, np.ones(33)), ValueError, "with 1 to 32 frequencies for"),
        (lambda: pq.RotaryBias(ONES, np.ones((1, 32))), ValueError, "inv_freq has shape (1, 32)"),
        (lambda: pq.RotaryBias(ONES, [np.nan]), ValueError, "inv_freq holds numbers that are not"),
        (lambda: pq.RotaryBias(ONES, "yarn"), TypeError, "inv_freq has dtype <U4"),
        (lambda: pq.RotaryBias.estimate(ONES[:0], [1.0]), ValueError, "it must hold tokens"),
        (lambda: pq.RotaryBias.estimate(ONES[None, :, :0], INV_FREQ), ValueError, "inv_freq has"),
        (lambda: pq.RotaryBias.estimate(ONES[None] * np.inf, INV_FREQ), ValueError, "k holds numb"),
        (lambda: pq.RotaryBias.estimate(ONES.astype(int), [1.0]), TypeError, "k has dtype int64"),
        (
            lambda: pq.RotaryBias.estimate(ONES[None], INV_FREQ, first_position=0.5), TypeError,
            "first_position is 0.5",
        ),
        (lambda: pq.key_scales(ONES, ONES[:1]), ValueError, "q_squared has shape (2, 64) and k_v"),
        (lambda: pq.key_scales(-ONES, ONES), ValueError, "q_squared holds numbers that are neg"),
        (lambda: pq.key_scales(ONES, ONES * np.inf), ValueError, "k_variance holds numbers that"),
        (lambda: pq.key_scales(ONES, ONES, alpha=1.5), ValueError, "alpha is 1.5; it must be 0 to"),
        (lambda: pq.key_scales(ONES, ONES, alpha=np.nan), ValueError, "alpha is nan"),
    ],
)  # fmt: skip
def test_bad_numbers_are_refused(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("shape", "fmt", "preconditioner", "message"),
    [
        ((3, 5, D), PAIR.keys, pq.Preconditioner(ONES), "(num_kv_heads, head_dim) = (3, 64)"),
        ((5, D), PAIR.keys, pq.Preconditioner(ONES), "= (none, 64)"),
        ((2, 5, 32), pq.PolarFormat(32, (4, 2)), pq.Preconditioner(ONES), "= (2, 32)"),
        ((3, 2, 5, D), PAIR.keys, some(2, 2), "preconditioner has shape (2, 2, 64)"),
        (
            (2, 5, D), pq.PolarFormat(D, (4, 2), rotation="haar"), pq.Preconditioner(ONES),
            "they need rotation 'hadamard', the format has 'haar'",
        ),
        ((2, 5, D), pq.PolarFormat(D, (4, 2), rotation="none"), some(2), "format has 'none'"),
    ],
    ids=["heads", "no heads", "head_dim", "batch", "haar", "none"],
)  # fmt: skip
def test_vectors_that_it_is_not_for_are_refused(shape, fmt, preconditioner, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pq.encode(gaussian(*shape), fmt, preconditioner=preconditioner)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="it must be a Preconditioner"):
        pq.encode(gaussian(2, 5, D), PAIR.keys, preconditioner=ONES)


def test_caches_that_it_is_not_for_are_refused():
    haar = pq.FormatPair(pq.PolarFormat(D, (4, 2), rotation="haar"), PAIR.values)
    with pytest.raises(ValueError, match="they need rotation 'hadamard'"):
        pq.KVCache(haar, preconditioner=pq.Preconditioner(ONES))
    with pytest.raises(TypeError, match="it must be a Preconditioner"):
        pq.KVCache(PAIR, preconditioner=ONES)
    with pytest.raises(ValueError, match="preconditioner has shape"):
        pq.KVCache(pq.preset("balanced", 128), preconditioner=pq.Preconditioner(ONES))
    cache = pq.KVCache(PAIR, preconditioner=some(2, HEADS))
    with pytest.raises(ValueError, match=re.escape("preconditioner has shape (2, 2, 64)")):
        cache.append(*tokens(3, 5))
    assert cache.batch_size == 0


def test_values_with_a_bias_are_refused():
    k, v = (pq.encode(gaussian(1, HEADS, 5, D), PAIR.keys, preconditioner=p)
            for p in (None, some(HEADS)))  # fmt: skip
    with pytest.raises(ValueError, match="v_pages have a preconditioner with a rotary bias"):
        pq.attention(gaussian(1, HEADS, 1, D), k, v)


def test_first_position_must_be_an_integer():
    with pytest.raises(TypeError, match=re.escape("first_position is 0.5")):
        pq.encode(gaussian(HEADS, 5, D), PAIR.keys, first_position=0.5)


def test_haar_formats_take_a_bias_alone():
    fmt = RANDOM_FORMATS[2]
    bias = pq.RotaryBias(gaussian(HEADS, fmt.head_dim), INV_FREQ[:20])
    k = bias.at(0, 5)
    pages = pq.encode(k, fmt, preconditioner=pq.Preconditioner(bias=bias))
    np.testing.assert_allclose(pages.decode(), k, atol=1e-5)


def test_numbers_cannot_be_changed_from_outside():
    given = ONES.copy()
    preconditioner = pq.Preconditioner(given)
    given[:] = 3
    assert (preconditioner.scales == 1).all()
    with pytest.raises(ValueError, match="read-only"):
        preconditioner.scales[:] = 2


# ---- key scales ----------------------------------------------------------------------------------


def test_key_scales_by_hand():
    # squares of 16 and 1: ratios of 16 and 1/16, their fourth roots 2 and 1/2
    scales = pq.key_scales([[16.0, 1.0]], [[1.0, 16.0]], alpha=1)
    np.testing.assert_allclose(scales, [[2, 0.5]], rtol=1e-6)
    scales = pq.key_scales([[16.0, 1.0]], [[1.0, 16.0]], alpha=0.5)
    np.testing.assert_allclose(scales, [[2**0.5, 0.5**0.5]], rtol=1e-6)


@given(st.integers(0, 99), st.floats(0, 1))
def test_key_scales_lower_the_expected_error(seed, alpha):
    q, k = np.exp(2 * np.random.default_rng(seed).standard_normal((2, 3, D)))
    s = pq.key_scales(q, k, alpha=alpha).astype(np.float64)
    np.testing.assert_allclose(np.log(s).mean(-1), 0, atol=1e-5)
    expected = (q / s**2).sum(-1) * (s**2 * k).sum(-1)  # but for constants
    assert (expected <= q.sum(-1) * k.sum(-1) * (1 + 1e-5)).all()
    least = np.sqrt(q * k).sum(-1) ** 2  # Cauchy–Schwarz
    assert (expected >= least * (1 - 1e-5)).all()
    if alpha == 1:
        np.testing.assert_allclose(expected, least, rtol=1e-4)


def test_key_scales_of_channels_that_are_zero_are_moderate():
    zero = np.zeros((HEADS, D))
    np.testing.assert_array_equal(pq.key_scales(zero, zero), ONES)
    some_zero = ONES.copy()
    some_zero[:, 3] = 0
    scales = pq.key_scales(ONES, some_zero, alpha=1)
    assert np.isfinite(scales).all()
    assert scales.max() < 1e6**0.25 * 1.01
    pq.Preconditioner(scales)


def test_page_variance_ignores_what_pages_have_in_common():
    steps = np.repeat(gaussian(HEADS, 3, D) * 100, PAGE, 1)[:, : 2 * PAGE + 60]
    k = gaussian(HEADS, 2 * PAGE + 60, D, seed=1)
    np.testing.assert_allclose(page_variance(k + steps), page_variance(k), rtol=1e-3)
    one = k[:, :PAGE]
    np.testing.assert_allclose(page_variance(one), one.var(1), rtol=1e-5)


# ---- what they are for: benchmarks/synthetic_keys.py ---------------------------------------------


@compiled
@pytest.mark.parametrize("norm", [300, 900])
def test_biased_keys_are_as_good_as_unbiased_ones(norm):
    seeds = range(2)
    unbiased, biased = (
        np.mean([list(synthetic_keys.biased(n, seed).values()) for seed in seeds], 0)
        for n in (0, norm)
    )
    (kl, error), offsets, others = unbiased[0], biased[0], biased[1:]
    assert (others[:, 0] <= 1.1 * kl).all()
    # a bias makes attention sharper, so that the error of logits is the stricter one
    assert (others[:, 1] <= 1.01 * error).all()
    assert offsets[0] > 10 * kl


@compiled
@pytest.mark.parametrize(
    ("name", "spectra", "drift"), synthetic_keys.CASES,
    ids=[f"{name} {spectra.rho:.2f} {drift}" for name, spectra, drift in synthetic_keys.CASES],
)  # fmt: skip
def test_key_scales_lower_the_divergence(name, spectra, drift):
    default = pq.key_scales.__kwdefaults__["alpha"]
    plain, scaled = np.mean(
        [synthetic_keys.scales_effect(spectra, drift, seed, (default,)) for seed in range(2)], 0
    )
    if spectra.rho < 0.2:
        assert scaled <= plain / 4
    else:
        assert scaled <= 1.05 * plain
