"""PolarPages: what they weigh, ranges of tokens, and joining."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import NOJIT, SMALL, SMALL_OFFSET, gaussian

import polarquant_nb as pq
from polarquant_nb.layout import PAGE

FORMATS = pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])


@FORMATS
@pytest.mark.parametrize(
    ("shape", "num_pages"),
    [((1, 64), 1), ((128, 64), 1), ((129, 64), 2), ((3, 300, 64), 3), ((2, 1, 2, 256, 64), 2)],
)
def test_sizes_are_those_of_the_buffers(fmt, shape, num_pages):
    pages = pq.encode(np.zeros(shape, np.float32), fmt)
    assert pages.shape == shape
    assert pages.num_pages == num_pages
    assert pages.words.dtype == np.uint32
    assert pages.words.shape == (*shape[:-2], num_pages, fmt.page_nbytes // 4)
    assert pages.nbytes == pages.words.nbytes
    assert pages.bits_per_value == 8 * pages.words.nbytes / np.prod(shape)
    if shape[-2] % PAGE == 0:
        assert pages.bits_per_value == fmt.bits_per_value
    else:
        assert pages.bits_per_value > fmt.bits_per_value


def test_bits_of_nothing_are_no_number():
    assert np.isnan(pq.encode(np.zeros((0, 64), np.float32), SMALL).bits_per_value)


@pytest.fixture(scope="module", params=[SMALL, SMALL_OFFSET], ids=["plain", "offset"])
def pages_and_all(request):
    pages = pq.encode(gaussian(2, 2, (2 if NOJIT else 4) * PAGE + 7, 64, seed=50), request.param)
    return pages, pages.decode()


@given(data=st.data())
def test_any_range_of_tokens_is_decoded_as_within_the_whole(pages_and_all, data):
    pages, everything = pages_and_all
    stop = data.draw(st.integers(0, pages.seq_len))
    start = data.draw(st.integers(0, stop))
    part = pages.decode(start, stop)
    np.testing.assert_array_equal(part, everything[..., start:stop, :])
    np.testing.assert_array_equal(pq.decode(pages, np.int64(start), np.int32(stop)), part)


@pytest.mark.parametrize(
    ("start", "stop"), [(-1, 5), (5, 4), (0, 301), (301, None), (-2, -1)], ids=str
)
def test_ranges_outside_are_refused(start, stop):
    pages = pq.encode(gaussian(300, 64), SMALL)
    message = rf"start is {start} and stop {stop or 300}; .* 0 <= start <= stop <= seq_len = 300"
    with pytest.raises(ValueError, match=message):
        pages.decode(start, stop)


@pytest.mark.parametrize("bounds", [(1.0, 5), (0, "5")])
def test_ranges_are_of_integers(bounds):
    with pytest.raises(TypeError, match=r"st(art|op) is .*; it must be an int"):
        pq.encode(gaussian(30, 64), SMALL).decode(*bounds)


@FORMATS
def test_decoding_does_not_change_pages_and_copies_are_equal(fmt):
    pages = pq.encode(gaussian(2, 130, 64, seed=51), fmt)
    before = pages.words.copy()
    decoded = pages.decode()
    decoded[:] = 0
    np.testing.assert_array_equal(pages.words, before)
    for copied in (copy.deepcopy(pages), pickle.loads(pickle.dumps(pages)), copy.copy(pages)):
        np.testing.assert_array_equal(copied.decode(), pages.decode())
        assert copied.format == fmt
        assert copied.nbytes == pages.nbytes


@FORMATS
def test_words_need_not_be_contiguous(fmt):
    """Pages may be a slice of a larger buffer."""
    pages = pq.encode(gaussian(4, 130, 64, seed=52), fmt)
    part = pq.PolarPages(fmt, pages.words[::2], 130, pages.codebooks, pages.kind)
    np.testing.assert_array_equal(part.decode(), pages.decode()[::2])


def test_joining_adds_up():
    a = pq.encode(np.zeros((2, PAGE, 64), np.float16), SMALL)
    x = np.full((2, 5, 64), 1e5, np.float32)
    x[0, 3] = np.nan
    b = pq.encode(x, SMALL, nan="propagate")
    joined = pq.PolarPages.concatenate([a, a, b])
    assert joined.shape == (2, 2 * PAGE + 5, 64)
    assert joined.kind == a.kind
    assert joined.nbytes == 2 * a.nbytes + b.nbytes
    assert (joined.num_nonfinite, joined.num_saturated) == (1, 9)
    np.testing.assert_array_equal(joined.words[:, 2], b.words[:, 0])
    # a copy: the parts may go on changing
    assert not np.shares_memory(joined.words, a.words)
    assert pq.PolarPages.concatenate([b]).seq_len == 5


WHOLE = pq.encode(gaussian(2, PAGE, 64), SMALL)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        (
            [pq.encode(gaussian(2, PAGE, 64), SMALL_OFFSET)],
            r"parts\[1\] has PolarFormat.*parts\[0\]",
        ),
        (
            [pq.encode(gaussian(2, PAGE, 64), pq.PolarFormat(64, SMALL.level_bits, seed=1))],
            r"parts\[1\] has PolarFormat.*seed=1.*parts\[0\] has .*seed=0",
        ),
        ([pq.encode(gaussian(3, PAGE, 64), SMALL)], r"parts\[1\] has leading shape \(3,\).*\(2,\)"),
        ([pq.encode(gaussian(PAGE, 64), SMALL)], r"parts\[1\] has leading shape \(\).*\(2,\)"),
        (
            [pq.encode(gaussian(2, 5, 64), SMALL), WHOLE],
            r"parts\[1\] has 5 tokens; .* multiple of 128",
        ),
        (
            [pq.encode(gaussian(2, PAGE, 64), SMALL, codebooks="online")],
            r"parts\[1\] was encoded with other codebooks than parts\[0\]",
        ),
    ],
    ids=["format", "seed", "leading shape", "fewer axes", "partial page", "codebooks"],
)
def test_parts_that_do_not_fit_are_refused(others, message):
    with pytest.raises(ValueError, match=message):
        pq.PolarPages.concatenate([WHOLE, *others])


def test_nothing_to_join():
    with pytest.raises(ValueError, match="parts is empty"):
        pq.PolarPages.concatenate([])
