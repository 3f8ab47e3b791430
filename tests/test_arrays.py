"""Arrays of NumPy and torch of any dtype and strides: the same codes, and what comes back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import rearranged
from support import NOJIT, SMALL, SMALL_OFFSET, gaussian

import polarquant_nb as pq
from polarquant_nb.arrays import open_array

TOKENS = 20 if NOJIT else 130
FLOATS = ("float16", "float32", "float64")
FORMATS = pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])


def words(x, fmt):
    return pq.encode(x, fmt).words


@given(data=st.data())
@settings(max_examples=20 if NOJIT else settings().max_examples)
def test_memory_layout_does_not_change_codes(data):
    """Any order of axes, gaps and directions; NaN lie in the gaps, and must not be read."""
    fmt = data.draw(st.sampled_from([SMALL, SMALL_OFFSET]))  # times the dtypes
    shape = data.draw(st.integers(1, 2)), data.draw(st.sampled_from([1, 17, 129])), fmt.head_dim
    x = gaussian(*shape, seed=30).astype(data.draw(st.sampled_from(FLOATS)))
    other = data.draw(rearranged(x))
    before = other.tobytes()
    np.testing.assert_array_equal(words(other, fmt), words(x, fmt))
    assert other.tobytes() == before


@FORMATS
def test_case_19_transposed_sliced_and_expanded_arrays(fmt):
    """CASES row 19 (tracel-ai/burn#4491): transposed heads and tokens gave errors of 500 times."""
    x = gaussian(2, TOKENS, 3, 64, seed=31)
    swapped = x.transpose(0, 2, 1, 3)
    assert not swapped.flags.c_contiguous
    np.testing.assert_array_equal(words(swapped, fmt), words(swapped.copy(), fmt))
    for view in (x[:, ::2], x[..., ::-1, :], x[:, ::-1], x[::-1], x[..., ::-1]):
        np.testing.assert_array_equal(words(view, fmt), words(view.copy(), fmt))
    one = x[0, :1, 0]
    expanded = np.broadcast_to(one, (2, TOKENS, 64))
    assert expanded.strides[:2] == (0, 0)
    np.testing.assert_array_equal(words(expanded, fmt), words(expanded.copy(), fmt))


@FORMATS
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtype_changes_codes_by_its_rounding_only(dtype, fmt):
    x = gaussian(2, 130, 64, seed=32).astype(dtype)
    pages = pq.encode(x, fmt)
    np.testing.assert_array_equal(pages.words, words(x.astype(np.float32), fmt))
    decoded = pages.decode()
    assert type(decoded) is np.ndarray
    assert decoded.dtype == dtype
    exact = pages.decode(dtype="float32")
    np.testing.assert_array_equal(decoded, exact.astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_foreign_byte_order_and_unaligned_bytes(dtype):
    x = gaussian(40, 64, seed=33).astype(dtype)
    swapped = x.astype(x.dtype.newbyteorder())
    assert not swapped.dtype.isnative
    pages = pq.encode(swapped, SMALL)
    np.testing.assert_array_equal(pages.words, words(x, SMALL))
    assert pages.decode().dtype.isnative
    unaligned = np.frombuffer(b"\0" + x.tobytes(), np.uint8)[1:].view(x.dtype).reshape(x.shape)
    record = np.zeros((40, 64), [("byte", "u1"), ("x", x.dtype)])
    record["x"] = x
    for odd in (unaligned, record["x"]):
        np.testing.assert_array_equal(words(odd, SMALL), words(x, SMALL))


def test_subclasses_lists_and_read_only_arrays():
    x = gaussian(5, 64, seed=34)
    expected = words(x, SMALL)
    np.testing.assert_array_equal(words(x.tolist(), SMALL), expected)
    np.testing.assert_array_equal(words(x.view(type("Mine", (np.ndarray,), {})), SMALL), expected)
    x.flags.writeable = False
    np.testing.assert_array_equal(words(x, SMALL), expected)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (0, 5, 64), (3, 0, 2, 64), (0, 0, 64)])
@FORMATS
def test_case_20_empty_axes(shape, fmt):
    """CASES row 20 (RobTand/prismaquant#670): an empty batch launched an empty grid."""
    pages = pq.encode(np.empty(shape, np.float16), fmt)
    assert pages.shape == shape
    assert pages.nbytes == 0
    decoded = pages.decode()
    assert decoded.shape == shape
    assert decoded.dtype == np.float16


@pytest.mark.parametrize("shape", [(2, 0, 64), (0, 5, 64)])
def test_case_20_empty_axes_of_tensors(torch, shape):
    decoded = pq.encode(torch.empty(shape), SMALL).decode()
    assert isinstance(decoded, torch.Tensor)
    assert decoded.shape == shape


def test_arrays_are_read_in_place():
    x = gaussian(3, 130, 4, 64, seed=35)
    for view in (
        x,
        x.transpose(0, 2, 1, 3),
        x[:, ::-2, 1],
        x[0, 5:9, 2, ::2],
        x.astype(np.float16),
    ):
        buffer = open_array(view)
        assert np.shares_memory(buffer.flat, view)
        row = buffer.flat[buffer.bases[-1] + np.arange(view.shape[-1]) * buffer.strides[1]]
        np.testing.assert_array_equal(row.view(view.dtype), view[(-1,) * (view.ndim - 2)][0])


# ---- torch ---------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


@FORMATS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_torch_dtypes_go_in_and_come_back(torch, dtype, fmt):
    x = torch.tensor(gaussian(2, 130, 64, seed=36)).to(getattr(torch, dtype))
    pages = pq.encode(x, fmt)
    np.testing.assert_array_equal(pages.words, words(x.float().numpy(), fmt))
    decoded = pages.decode()
    assert isinstance(decoded, torch.Tensor)
    assert (decoded.dtype, decoded.device, decoded.shape) == (x.dtype, x.device, x.shape)
    exact = pages.decode(dtype=torch.float32)
    assert torch.equal(decoded, exact.to(x.dtype))
    assert torch.equal(pages.decode(dtype=torch.bfloat16), exact.bfloat16())


@FORMATS
def test_torch_views_are_read_in_place(torch, fmt):
    x = torch.tensor(gaussian(2, TOKENS, 3, 64, seed=37))
    for view in (
        x.transpose(1, 2),
        x[:, 1::2],
        x[:, :, 1].expand(2, TOKENS, 64),
        x[:1, :1].expand(4, 9, 3, 64),
    ):
        np.testing.assert_array_equal(words(view, fmt), words(view.contiguous(), fmt))
        half = view.bfloat16() if view.is_contiguous() else view.to(torch.bfloat16)
        np.testing.assert_array_equal(words(half, fmt), words(half.contiguous(), fmt))
    assert np.shares_memory(open_array(x[:, 3:, 1]).flat, x.numpy())
    # a negated view keeps its memory and a flag
    conjugate = torch.complex(x, x).conj().imag
    assert conjugate.is_neg()
    np.testing.assert_array_equal(words(conjugate, fmt), words(-x, fmt))


def test_tensors_that_require_grad_are_detached(torch):
    x = torch.tensor(gaussian(5, 64), requires_grad=True)
    for tensor in (x, x * 2, torch.nn.Parameter(x.detach().half())):
        pages = pq.encode(tensor, SMALL)
        np.testing.assert_array_equal(pages.words, words(tensor.detach(), SMALL))
        assert not pages.decode().requires_grad
    assert x.requires_grad
    with torch.inference_mode():
        inside = torch.tensor(gaussian(5, 64))
        assert torch.equal(pq.encode(inside, SMALL).decode(), pq.encode(x, SMALL).decode())


# ---- the dtype of the result ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", ["float16", np.float16, np.dtype("float16"), np.dtype(">f2")], ids=repr
)
def test_result_dtype_is_a_name_or_a_dtype(dtype):
    assert pq.encode(gaussian(3, 64), SMALL).decode(dtype=dtype).dtype == np.float16


def test_numpy_result_as_bfloat16():
    """NumPy has no bfloat16 of its own: float32, unless ml_dtypes has registered one."""
    pages = pq.encode(gaussian(3, 64), SMALL)
    decoded = pages.decode(dtype="bfloat16")
    assert decoded.dtype in (np.float32, getattr(np, "bfloat16", np.float32))
    np.testing.assert_allclose(decoded.astype(np.float32), pages.decode(), rtol=2**-8)


def test_narrow_results_are_rounded_to_nearest_even(torch):
    x = torch.tensor(gaussian(40, 64, seed=38)) * torch.logspace(-9, 4, 40)[:, None]
    pages = pq.encode(x, SMALL)
    exact = pages.decode()
    assert torch.equal(pages.decode(dtype="float16"), exact.half())
    assert torch.equal(pages.decode(dtype="bfloat16"), exact.bfloat16())
    assert torch.equal(pages.decode(dtype="float64"), exact.double())
