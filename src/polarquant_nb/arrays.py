"""Arrays of NumPy and torch, seen as flat buffers with strides: the boundary of the package."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayKind", "StridedBuffer", "new_array", "open_array", "read_float32", "write_float32"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ArrayKind:
    """What a result should be: ``family`` 'numpy' or 'torch', and the name of its ``dtype``."""

    family: str
    dtype: str


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
    """Look at an array in place.

    Parameters
    ----------
    x : ndarray, torch.Tensor or array_like of floats
        At least two-dimensional.  Tensors that require grad are detached.
    name : str
        For messages.

    Returns
    -------
    StridedBuffer
        A view, or a copy if the array's bytes are not laid out in whole, native elements.

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
        dtype = x.dtype.name
        if dtype in ("float16", "bfloat16"):
            x = x.astype(x.dtype.newbyteorder("="), copy=False).view(np.uint16)
    if dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {dtype}; it must be one of {', '.join(_DTYPES)}")
    if x.ndim < 2:
        raise ValueError(f"{name} has shape {x.shape}; it must be (..., seq_len, head_dim)")
    item = x.itemsize
    if not x.dtype.isnative or not x.flags.aligned or any(s % item for s in x.strides):
        x = np.ascontiguousarray(x, x.dtype.newbyteorder("="))
    return _strided(x, ArrayKind(family, dtype))


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

        tensor = torch.empty(shape, dtype=getattr(torch, kind.dtype))
        return tensor, _from_torch(torch, tensor, "out")[0].reshape(-1)
    array = np.empty(shape, np.dtype(kind.dtype))
    return array, (array.view(np.uint16) if array.itemsize == 2 else array).reshape(-1)


def read_float32(buffer: StridedBuffer) -> npt.NDArray[np.float32]:
    """A float32 copy of an array, of its shape; for arrays that are small.

    Parameters
    ----------
    buffer : StridedBuffer
        From :func:`open_array`.

    Returns
    -------
    ndarray of float32, of ``buffer.shape``
        Values beyond float32 become inf.
    """
    seq_len, head_dim = buffer.shape[-2:]
    rows = buffer.bases[:, None, None] + buffer.strides[0] * np.arange(seq_len)[:, None]
    x = buffer.flat[rows + buffer.strides[1] * np.arange(head_dim)]
    if buffer.kind.dtype == "bfloat16":
        x = (x.astype(np.uint32) << 16).view(np.float32)
    elif buffer.kind.dtype == "float16":
        x = x.view(np.float16)
    with np.errstate(over="ignore"):
        return x.astype(np.float32).reshape(buffer.shape)


def write_float32(flat: npt.NDArray[Any], kind: ArrayKind, x: npt.NDArray[np.float32]) -> None:
    """Store float32 numbers as another kind, to nearest, ties to even.

    Parameters
    ----------
    flat : ndarray, 1-d
        From :func:`new_array`.
    kind : ArrayKind
        What ``flat`` holds.
    x : ndarray of float32, 1-d
        As many numbers.
    """
    if kind.dtype == "bfloat16":
        bits = x.view(np.uint32)
        rounded = (bits + ((bits >> 16) & 1) + np.uint32(0x7FFF)) >> 16
        flat[:] = np.where(np.isnan(x), 0x7FC0, rounded)
    elif kind.dtype == "float16":
        with np.errstate(over="ignore"):
            flat[:] = x.astype(np.float16).view(np.uint16)
    else:
        flat[:] = x


def _from_torch(torch: Any, x: Any, name: str) -> tuple[npt.NDArray[Any], str]:
    dtype = str(x.dtype).removeprefix("torch.")
    if x.device.type != "cpu":
        raise TypeError(f"{name} is on device {x.device}; only CPU tensors are supported so far")
    if x.layout != torch.strided:
        raise TypeError(f"{name} has layout {x.layout}; it must be a dense (strided) tensor")
    if dtype not in _DTYPES:
        raise TypeError(f"{name} has dtype {dtype}; it must be one of {', '.join(_DTYPES)}")
    x = x.detach().resolve_neg()
    if dtype in ("float16", "bfloat16"):
        return x.view(torch.int16).numpy().view(np.uint16), dtype
    return x.numpy(), dtype


def _strided(x: npt.NDArray[Any], kind: ArrayKind) -> StridedBuffer:
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
