"""Arrays of NumPy and torch, seen as flat buffers with strides: the boundary of the package."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "DTYPES",
    "ArrayKind",
    "StridedBuffer",
    "element_dtype",
    "from_float32",
    "new_array",
    "open_array",
    "open_elements",
    "open_integers",
    "strided",
    "tensor_dtype",
    "torch_name",
    "widen",
]

DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ArrayKind:
    """What a result should be.

    Parameters
    ----------
    family : str
        'numpy' or 'torch'; of a GPU, maybe another library.
    dtype : str
        Name of its dtype.
    device : torch.device, optional
        The GPU that it is on; None for the CPU.
    """

    family: str
    dtype: str
    device: Any = None

    @property
    def place(self) -> str:
        """Where arrays of this kind are, for messages."""
        return str(self.device or "cpu")

    @property
    def record(self) -> dict[str, str]:
        """Family and dtype for files, from which arrays are read on the CPU."""
        return {"family": "torch" if self.device else self.family, "dtype": self.dtype}


@dataclass(frozen=True)
class StridedBuffer:
    """An array ``(..., seq_len, head_dim)`` as kernels take it, without a copy where possible.

    Parameters
    ----------
    flat : ndarray, 1-d
        The elements that the array spans; float16 and bfloat16 as uint16.
    bases : ndarray of int64, 1-d
        Element of ``flat`` at which each leading index starts.
    strides : tuple of two ints
        Elements from token to token, and from coordinate to coordinate.
    shape : tuple of int
        Of the whole array.
    kind : ArrayKind
        Family and dtype.
    """

    flat: npt.NDArray[Any]
    bases: npt.NDArray[np.int64]
    strides: tuple[int, int]
    shape: tuple[int, ...]
    kind: ArrayKind


def open_array(x: Any, name: str = "x") -> StridedBuffer:
    """Look at an array in place, as kernels take it.

    Parameters
    ----------
    x, name
        See :func:`open_elements`.

    Returns
    -------
    StridedBuffer
        A view of what :func:`open_elements` returns.
    """
    return strided(*open_elements(x, name))


def open_elements(x: Any, name: str = "x") -> tuple[npt.NDArray[Any], ArrayKind]:
    """Look at the elements of an array in place.

    Parameters
    ----------
    x : ndarray, torch.Tensor or array_like of floats
        At least two-dimensional.  Tensors that require grad are detached.
    name : str
        For messages.

    Returns
    -------
    elements : ndarray
        Float16 and bfloat16 as uint16; a view, or a copy if the array's bytes are not laid out in
        whole, native elements.
    kind : ArrayKind
        What ``x`` is.

    Raises
    ------
    TypeError
        If ``x`` is no array of float16, bfloat16, float32 or float64, or not on the CPU.
    ValueError
        If it has fewer than two dimensions.
    """
    family = "numpy"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        family, x, dtype = "torch", *_from_torch(torch, x, name)
    else:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(f"{name} is a masked array; fill it first, as masks are not kept")
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise TypeError(f"{name} is a {type(x).__name__} that is no array: {error}") from error
        dtype = _numpy_name(x.dtype)
        if dtype in ("float16", "bfloat16"):
            x = x.astype(x.dtype.newbyteorder("="), copy=False).view(np.uint16)
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}; it must be one of {', '.join(DTYPES)}")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; it must be (..., seq_len, head_dim)")
    if family == "numpy" and (
        not x.dtype.isnative or not x.flags.aligned or any(s % x.itemsize for s in x.strides)
    ):
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    return x, _kind(family, dtype)


def open_integers(x: Any, name: str) -> list[int]:
    """A short list of integers, of any integer type.

    Parameters
    ----------
    x : ndarray, torch.Tensor or sequence of int
        One-dimensional.
    name : str
        For messages.

    Returns
    -------
    list of int
        Its elements.

    Raises
    ------
    TypeError
        If ``x`` holds anything else.
    ValueError
        If it is not one-dimensional.
    """
    try:
        array = np.asarray(x.detach().cpu().numpy() if hasattr(x, "detach") else x)
    except ValueError as error:
        raise ValueError(f"{name} is {x!r}; it must be one-dimensional") from error
    if array.size == 0:
        array = array.astype(np.int64)  # an empty list has no dtype of its own
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; it must hold integers")
    if array.ndim != 1:
        raise ValueError(f"{name} has shape {array.shape}; it must be one-dimensional")
    integers: list[int] = array.tolist()
    return integers


def strided(x: npt.NDArray[Any], kind: ArrayKind) -> StridedBuffer:
    """Elements as kernels take them.

    Parameters
    ----------
    x : ndarray, shape ``(..., seq_len, head_dim)``
        From :func:`open_elements`, or a part of it.
    kind : ArrayKind
        What they are.

    Returns
    -------
    StridedBuffer
        A view.
    """
    strides = [s // x.itemsize if n > 1 else 0 for s, n in zip(x.strides, x.shape, strict=True)]
    if x.size == 0:
        flat, lowest = np.empty(0, x.dtype), 0
    else:
        reach = [(n - 1) * s for s, n in zip(strides, x.shape, strict=True)]
        lowest = sum(r for r in reach if r < 0)
        corner = x[tuple(slice(-1, None) if r < 0 else slice(0, 1) for r in reach)]
        span = sum(abs(r) for r in reach) + 1
        flat = np.lib.stride_tricks.as_strided(corner, (span,), (x.itemsize,), writeable=False)
    bases = np.array([-lowest], np.int64)
    for n, s in zip(x.shape[:-2], strides[:-2], strict=True):
        bases = (bases[:, None] + np.arange(n) * s).ravel()
    # a single coordinate or token has no stride of its own
    return StridedBuffer(flat, bases, (strides[-2], strides[-1]), x.shape, kind)


def new_array(shape: tuple[int, ...], kind: ArrayKind) -> tuple[Any, npt.NDArray[Any]]:
    """An uninitialised array of a kind, and its elements as a flat NumPy view for kernels.

    Parameters
    ----------
    shape : tuple of int
        Shape.
    kind : ArrayKind
        Family and dtype.

    Returns
    -------
    array : ndarray or torch.Tensor
        To give to the user.
    flat : ndarray, 1-d
        The same memory; float16 and bfloat16 as uint16.
    """
    if kind.family == "torch":
        import torch

        tensor = torch.empty(shape, dtype=getattr(torch, kind.dtype), device="cpu")
        return tensor, _from_torch(torch, tensor, "out")[0].reshape(-1)
    array = np.empty(shape, np.dtype(kind.dtype))
    return array, (array.view(np.uint16) if array.itemsize == 2 else array).reshape(-1)


def element_dtype(kind: ArrayKind) -> np.dtype[Any]:
    """What elements of a kind are to NumPy.

    Parameters
    ----------
    kind : ArrayKind
        Family and dtype.

    Returns
    -------
    dtype
        uint16 for float16 and bfloat16.
    """
    return np.dtype(np.uint16 if kind.dtype in ("float16", "bfloat16") else kind.dtype)


def widen(elements: npt.NDArray[Any], kind: ArrayKind) -> npt.NDArray[np.float32]:
    """Elements as float32.

    Parameters
    ----------
    elements : ndarray
        From :func:`open_elements`.
    kind : ArrayKind
        What they are.

    Returns
    -------
    ndarray of float32, of the same shape
        The array itself if it is float32, else a copy; values beyond float32 become inf.
    """
    if kind.dtype == "float32":
        return elements
    if kind.dtype == "bfloat16":
        return (elements.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind.dtype == "float16":
        return elements.view(np.float16).astype(np.float32)
    with np.errstate(over="ignore"):
        return elements.astype(np.float32)


def from_float32(x: npt.NDArray[np.float32], kind: ArrayKind) -> Any:
    """An array of a kind with the numbers of another, rounded to nearest, ties to even.

    Parameters
    ----------
    x : ndarray of float32
        Numbers.
    kind : ArrayKind
        What to make of them.

    Returns
    -------
    ndarray or torch.Tensor, of the same shape
        In the same memory, if that is float32 already.
    """
    if kind.family == "torch":
        import torch

        return torch.from_numpy(x).to(getattr(torch, kind.dtype))
    with np.errstate(over="ignore"):
        return x.astype(kind.dtype, copy=False)


@cache
def _kind(family: str, dtype: str) -> ArrayKind:
    """One object for each kind: faster to find than to make, and to compare."""
    return ArrayKind(family, dtype)


@cache
def _numpy_name(dtype: np.dtype[Any]) -> str:
    return dtype.name


@cache
def torch_name(dtype: Any) -> str:
    """The name of a torch dtype, such as ``'float32'``."""
    return str(dtype).removeprefix("torch.")


def tensor_dtype(torch: Any, x: Any, name: str) -> str:
    """The dtype of a tensor that can be read in place.

    Parameters
    ----------
    torch : module
        Given, so that it is not looked up for every tensor.
    x : torch.Tensor
        Of any device.
    name : str
        For messages.

    Returns
    -------
    str
        One of ``DTYPES``.

    Raises
    ------
    TypeError
        If it is not dense, or of another dtype.
    """
    dtype = torch_name(x.dtype)
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; it must be a dense (strided) tensor")
    if dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {dtype}; it must be one of {', '.join(DTYPES)}")
    return dtype


def _from_torch(torch: Any, x: Any, name: str) -> tuple[npt.NDArray[Any], str]:
    if not x.is_cpu:
        raise TypeError(f"{name} is on device {x.device}; only CPU and CUDA tensors are supported")
    dtype = tensor_dtype(torch, x, name)
    if x.requires_grad or x.is_neg():
        x = x.detach().resolve_neg()
    if dtype in ("float16", "bfloat16"):
        return x.view(torch.int16).numpy().view(np.uint16), dtype
    return x.numpy(), dtype
