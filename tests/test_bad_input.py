"""Bad input: refused at the boundary with its name, or kept within its row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import (
    LOG8_FORMATS,
    RANDOM_FORMATS,
    SMALL,
    SMALL_OFFSET,
    gaussian,
    ident,
    page_offsets,
    same_rows,
    squared,
)

import polarquant_nb as pq
from polarquant_nb.layout import PAGE

FORMATS = pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])
ALLOWED = "it must be one of float16, bfloat16, float32, float64"


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((3, 32), np.float32), ValueError, r"x has shape \(3, 32\); its last axis .* 64"),
        (np.zeros((64, 3), np.float32), ValueError, r"x has shape \(64, 3\); its last axis .* 64"),
        (np.zeros((5, 0), np.float32), ValueError, r"x has shape \(5, 0\); its last axis .* 64"),
        (np.zeros(64, np.float32), ValueError, r"x has shape \(64,\); .* seq_len, head_dim\)"),
        (np.float32(3), ValueError, r"x has shape \(\); .* seq_len, head_dim\)"),
        (np.zeros((3, 64), np.int32), TypeError, f"x has dtype int32; {ALLOWED}"),
        (np.zeros((3, 64), np.uint8), TypeError, f"x has dtype uint8; {ALLOWED}"),
        (np.zeros((3, 64), bool), TypeError, f"x has dtype bool; {ALLOWED}"),
        (np.zeros((3, 64), np.complex64), TypeError, f"x has dtype complex64; {ALLOWED}"),
        (np.zeros((3, 64), object), TypeError, f"x has dtype object; {ALLOWED}"),
        (np.zeros((3, 64), "S4"), TypeError, f"x has dtype bytes32; {ALLOWED}"),
        (np.zeros((3, 64), "M8[s]"), TypeError, rf"x has dtype datetime64\[s\]; {ALLOWED}"),
        (np.zeros((3, 64), [("a", "f4")]), TypeError, f"x has dtype void32; {ALLOWED}"),
        ([[1] * 64], TypeError, f"x has dtype int64; {ALLOWED}"),
        (None, TypeError, f"x has dtype object; {ALLOWED}"),
        ("keys", TypeError, "x has dtype str"),
        ([[1.0], [1.0, 2.0]], (TypeError, ValueError), "^x "),
        (np.ma.masked_array(np.zeros((3, 64))), TypeError, "x is a masked array; fill it first"),
    ],
    ids=[
        "head_dim", "transposed", "no coordinates", "one axis", "no axis", "int32", "uint8", "bool",
        "complex64", "object", "bytes", "datetime", "record", "ints", "None", "str", "ragged",
        "masked",
    ],
)  # fmt: skip
def test_arrays_that_cannot_be_encoded(x, error, message):
    with pytest.raises(error, match=message):
        pq.encode(x, SMALL)


@pytest.mark.skipif(
    np.finfo(np.longdouble).bits == 64, reason="long double is double on this platform"
)
def test_long_double_is_refused():
    with pytest.raises(TypeError, match=f"x has dtype float.*; {ALLOWED}"):
        pq.encode(np.zeros((3, 64), np.longdouble), SMALL)


TENSORS = {
    "int64": (lambda t: t.zeros(3, 64, dtype=t.int64), f"x has dtype int64; {ALLOWED}"),
    "bool": (lambda t: t.zeros(3, 64, dtype=t.bool), f"x has dtype bool; {ALLOWED}"),
    "complex": (lambda t: t.zeros(3, 64, dtype=t.complex64), f"x has dtype complex64; {ALLOWED}"),
    "conjugate": (
        lambda t: t.zeros(3, 64, dtype=t.complex64).conj(),
        f"x has dtype complex64; {ALLOWED}",
    ),
    "float8": (
        lambda t: t.zeros(3, 64).to(t.float8_e4m3fn),
        f"x has dtype float8_e4m3fn; {ALLOWED}",
    ),
    "sparse": (lambda t: t.eye(64).to_sparse(), "x has layout torch.sparse_coo; .* dense"),
    "sparse rows": (lambda t: t.eye(64).to_sparse_csr(), "x has layout torch.sparse_csr; .* dense"),
    "meta": (lambda t: t.empty(3, 64, device="meta"), "x is on device meta; only CPU"),
}


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # torch's own, of its beta state
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_cannot_be_encoded(name):
    torch = pytest.importorskip("torch")
    make, message = TENSORS[name]
    with pytest.raises(TypeError, match=message):
        pq.encode(make(torch), SMALL)


@pytest.mark.parametrize("shape", [(64,), ()], ids=str)
def test_tensors_of_too_few_axes(shape):
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="x has shape"):
        pq.encode(torch.zeros(shape), SMALL)


@pytest.mark.parametrize(
    ("fmt", "message"),
    [
        (pq.preset("paper", 64), "fmt is a FormatPair; .* pair.keys or pair.values"),
        ("balanced", "fmt is 'balanced'; it must be a PolarFormat"),
        (None, "fmt is None; it must be a PolarFormat"),
        ((4, 2, 2, 2), r"fmt is \(4, 2, 2, 2\); it must be a PolarFormat"),
    ],
)
def test_what_is_no_format(fmt, message):
    with pytest.raises(TypeError, match=message):
        pq.encode(gaussian(3, 64), fmt)


@pytest.mark.parametrize("nan", ["ignore", None, True])
def test_unknown_nan_policy(nan):
    with pytest.raises(ValueError, match=f"nan is {nan!r}; it must be 'raise' or 'propagate'"):
        pq.encode(gaussian(3, 64), SMALL, nan=nan)


@pytest.mark.parametrize("pages", [None, np.zeros((3, 64)), "pages"], ids=["None", "array", "str"])
def test_what_is_no_pages(pages):
    message = f"pages is a {type(pages).__name__}; it must be a PolarPages"
    with pytest.raises(TypeError, match=message):
        pq.decode(pages)


@pytest.mark.parametrize("dtype", ["int8", np.int32, "complex64", float, "double", 3])
def test_unknown_result_dtype(dtype):
    pages = pq.encode(gaussian(3, 64), SMALL)
    with pytest.raises(ValueError, match=r"dtype is .*; it must be float16, bfloat16, float32 or"):
        pages.decode(dtype=dtype)


# ---- rows that are not finite --------------------------------------------------------------------


@FORMATS
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_the_first_bad_number_is_named(value, dtype, fmt):
    x = gaussian(2, 3, 200, 64, seed=60).astype(dtype)
    x[1, 2, 150, 7:9] = value
    x[1, 2, 151] = np.nan
    message = rf"x is {value} at index \(1, 2, 150, 7\); pass nan='propagate'"
    with pytest.raises(ValueError, match=message):
        pq.encode(x, fmt)
    with pytest.raises(ValueError, match=r"at index \(150, 7\)"):
        pq.encode(x[1, 2], fmt)
    with pytest.raises(ValueError, match=r"at index \(2, 1, 150, 7\)"):
        pq.encode(x.swapaxes(0, 1), fmt)


def test_bad_numbers_of_bfloat16_are_named():
    torch = pytest.importorskip("torch")
    x = torch.zeros(2, 5, 64, dtype=torch.bfloat16)
    x[1, 4, 63] = float("inf")
    with pytest.raises(ValueError, match=r"x is inf at index \(1, 4, 63\)"):
        pq.encode(x, SMALL)


def test_numbers_beyond_float32_are_named_as_they_are():
    """1e300 is finite where it stands; float32, in which codes are made, cannot hold it."""
    x = gaussian(5, 64, seed=61).astype(np.float64)
    x[3, 2] = 1e300
    with pytest.raises(ValueError, match=r"x is 1e\+300 at index \(3, 2\)"):
        pq.encode(x, SMALL)
    pages = pq.encode(x, SMALL, nan="propagate")
    assert pages.num_nonfinite + pages.num_saturated == 1
    kept = np.arange(5) != 3
    assert same_rows(pages, pq.encode(np.where(kept[:, None], x, 0), SMALL), kept)


POISON = {
    "NaN": np.nan,
    "inf": np.inf,
    "-inf": -np.inf,
}


@pytest.mark.parametrize("value", POISON.values(), ids=POISON)
@pytest.mark.parametrize("fmt", [*RANDOM_FORMATS[:11], *LOG8_FORMATS], ids=ident)
def test_case_10_a_bad_row_changes_only_itself(fmt, value):
    """CASES row 10 (stumpy's suite): NaN in one row contaminated its neighbours in a block.

    Nor does it enter the page offset: the other rows are as if it were not there.
    """
    x = gaussian(2, PAGE + 9, fmt.head_dim, seed=62) + 1
    poisoned = x.copy()
    bad = [5, 17, PAGE + 2]
    poisoned[0, bad[0], 3] = value
    poisoned[0, bad[1]] = value
    poisoned[0, bad[2], -1] = value
    pages = pq.encode(poisoned, fmt, nan="propagate")
    assert (pages.num_nonfinite, pages.num_saturated) == (3, 0)
    good = np.setdiff1d(np.arange(PAGE + 9), bad)

    decoded = pages.decode()
    assert np.isnan(decoded[0, bad]).all()
    assert np.isfinite(decoded[0, good]).all()
    # the other row of pages does not know of it
    np.testing.assert_array_equal(pages.words[1], pq.encode(x, fmt).words[1])

    alike = fmt.offset is None and fmt.radius == "float16"  # nothing of a page is shared
    for replacement in (0, x[0, 0], 100.0) if alike else ():
        other = x.copy()
        other[0, bad] = replacement
        assert same_rows(pages, pq.encode(other, fmt), good)
    if fmt.offset is not None:
        for page, last in ((0, PAGE), (1, PAGE + 9)):
            kept = good[(good >= page * PAGE) & (good < last)]
            alone = pq.encode(x[0, kept], fmt)
            np.testing.assert_array_equal(page_offsets(pages)[0, page], page_offsets(alone)[0])
            np.testing.assert_array_equal(decoded[0, kept], alone.decode())


def test_a_page_without_a_finite_row_has_no_offset():
    pages = pq.encode(np.full((PAGE + 1, 64), np.nan, np.float32), SMALL_OFFSET, nan="propagate")
    assert pages.num_nonfinite == PAGE + 1
    assert not page_offsets(pages).any()
    assert np.isnan(pages.decode()).all()


@FORMATS
def test_nan_of_any_dtype_comes_back_as_nan(fmt):
    torch = pytest.importorskip("torch")
    x = torch.tensor(gaussian(20, 64, seed=63))
    x[3, 3] = float("nan")
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        decoded = pq.encode(x.to(dtype), fmt, nan="propagate").decode()
        assert decoded.dtype == dtype
        assert torch.isnan(decoded).any(-1).nonzero().flatten().tolist() == [3]
        assert torch.isnan(decoded[3]).all()


@given(data=st.data())
def test_counts_are_exact(data):
    """Wherever bad rows are, in whatever tile, page or lane."""
    seq_len = data.draw(st.sampled_from([1, 16, 33, 130]))
    x = gaussian(3, seq_len, 64, seed=64)
    places = st.tuples(st.integers(0, 2), st.integers(0, seq_len - 1))
    bad = data.draw(st.sets(places, max_size=6))
    large = data.draw(st.sets(places, max_size=6)) - bad
    for place in bad:
        x[place][data.draw(st.integers(0, 63))] = data.draw(st.sampled_from([np.nan, np.inf]))
    for place in large:
        x[place] = data.draw(st.sampled_from([1e5, -3e38]))
    pages = pq.encode(x, SMALL, nan="propagate")
    assert (pages.num_nonfinite, pages.num_saturated) == (len(bad), len(large))
    if bad or large:
        with pytest.raises(ValueError, match=r"x (is|at index)"):
            pq.encode(x, SMALL)


# ---- zeros ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [*RANDOM_FORMATS[:11], *LOG8_FORMATS], ids=ident)
def test_case_1_zero_vectors_are_exact(fmt):
    """CASES row 1 (unum-cloud/USearch#758): 0/0, NaN, and garbage codes."""
    zero = pq.encode(np.zeros((2, 130, fmt.head_dim), np.float32), fmt)
    assert not zero.words.any()
    assert not zero.decode().any()
    negative = pq.encode(np.full((2, 130, fmt.head_dim), -0.0, np.float32), fmt)
    assert not negative.words.any()

    x = gaussian(40, fmt.head_dim, seed=65)
    mixed = x.copy()
    mixed[7] = 0
    pages = pq.encode(mixed, fmt)
    if fmt.offset is None:
        assert not pages.decode()[7].any()
        others = np.arange(40) != 7
        assert same_rows(pages, pq.encode(x, fmt), others)


@pytest.mark.parametrize("codebooks", ["online", "fitted"])
def test_zero_vectors_are_exact_with_fitted_codebooks(codebooks):
    if codebooks == "fitted":
        codebooks = pq.Codebooks.fit(gaussian(50, 64), SMALL)
    pages = pq.encode(np.zeros((5, 64), np.float32), SMALL, codebooks=codebooks)
    assert not pages.words.any()
    assert not pages.decode().any()


# ---- the ends of the range -----------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [RANDOM_FORMATS[2], SMALL], ids=ident)
@pytest.mark.parametrize("size", [1e38, 3e38, 1e20, 1e6])
def test_case_3_large_rows_are_refused_or_saturate(size, fmt):
    """CASES row 3 (workglow-dev/libs#814): a norm overflowed, in a record no reader accepted."""
    x = gaussian(20, fmt.head_dim, seed=66)
    x[4] = np.sign(x[4]) * np.float32(size)
    message = r"x at index \(4,\) .*beyond 65504"
    with pytest.raises(ValueError, match=message):
        pq.encode(x, fmt)
    pages = pq.encode(x, fmt, nan="propagate")
    assert (pages.num_nonfinite, pages.num_saturated) == (0, 1)
    decoded = pages.decode()
    assert np.isfinite(decoded).all()
    others = np.arange(20) != 4
    assert same_rows(pages, pq.encode(np.where(others[:, None], x, 1), fmt), others)
    assert squared(decoded[4]) <= fmt.num_blocks * 65504.0**2 * 1.0001
    assert squared(decoded[4]) >= 0.999 * 65504.0**2


@pytest.mark.parametrize("fmt", [RANDOM_FORMATS[2], SMALL], ids=ident)
@pytest.mark.parametrize("size", [1e-38, 1e-45, 1e-20, 1e-8])
def test_case_3_small_rows_round_trip_to_what_float16_radii_hold(size, fmt):
    x = (gaussian(20, fmt.head_dim, seed=67) * np.float32(size)).astype(np.float32)
    decoded = pq.decode(pq.encode(x, fmt))
    assert np.isfinite(decoded).all()
    # a radius below float16's smallest step, 2^-24, becomes 0 or one step
    assert (squared(decoded - x) <= squared(x) + fmt.num_blocks * 2.0**-48).all()


@FORMATS
def test_rows_that_saturate_leave_the_others_alone(fmt):
    """Also where they share an offset, from which they are left out like rows that are not finite.

    Their mean is not what other tokens have in common: it would drown them.
    """
    x = gaussian(PAGE, 64, seed=68)
    x[9] = 1e38
    x[10] *= np.float32(1e6)
    pages = pq.encode(x, fmt, nan="propagate")
    assert (pages.num_nonfinite, pages.num_saturated) == (0, 2)
    others = np.setdiff1d(np.arange(PAGE), [9, 10])
    decoded = pages.decode()
    assert np.isfinite(decoded).all()
    error = squared(decoded - x.astype(np.float64))[others].sum() / squared(x)[others].sum()
    assert error == pytest.approx(fmt.relative_error, rel=0.1)


def test_case_4_bfloat16_outliers_beyond_float16():
    """CASES row 4 (vllm-project/vllm#53334): fp16 scales overflowed for bf16 values over 65504."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(gaussian(20, 64, seed=69)).bfloat16()
    x[6, 1] = 1e5
    with pytest.raises(ValueError, match=r"x at index \(6,\) .*beyond 65504"):
        pq.encode(x, pq.preset("balanced", 64).values)
    for fmt in (SMALL, SMALL_OFFSET):
        pages = pq.encode(x, fmt, nan="propagate")
        for dtype in ("float16", "bfloat16", "float32"):
            assert torch.isfinite(pages.decode(dtype=dtype)).all()


def test_the_row_that_saturates_is_named_not_one_that_just_fits():
    fmt = RANDOM_FORMATS[4]
    assert fmt.rotation == "none"
    x = np.zeros((2, 300, 64), np.float32)
    x[0, 3, 0] = 65500  # rounds to 65504, the largest float16
    assert pq.encode(x, fmt, nan="propagate").num_saturated == 0
    x[1, 200, 5] = 70000
    with pytest.raises(ValueError, match=r"x at index \(1, 200\) .*beyond 65504"):
        pq.encode(x, fmt)


@pytest.mark.parametrize("fmt", [RANDOM_FORMATS[4], SMALL], ids=ident)
def test_the_largest_that_fits_is_kept(fmt):
    x = np.zeros((3, 64), np.float32)
    x[:, 1] = 60000
    pages = pq.encode(x, fmt)
    assert pages.num_saturated == 0
    assert np.isfinite(pages.decode(dtype="float16")).all()
    np.testing.assert_allclose(np.sqrt(squared(pages.decode())), 60000, rtol=2**-11)


@FORMATS
def test_encoding_warns_of_nothing(fmt):
    """The suite makes warnings errors: none may come from overflow or NaN on any path."""
    x = gaussian(PAGE + 2, 64, seed=70)
    x[1], x[2], x[3], x[4] = np.nan, np.inf, 3e38, 1e-38
    x[5, ::2] = -np.inf
    pages = pq.encode(x, fmt, nan="propagate")
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        if dtype != "bfloat16":
            pages.decode(dtype=dtype)
    pq.encode(x.astype(np.float64) * 1e200, fmt, nan="propagate")
