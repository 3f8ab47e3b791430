"""Queries, masks and results of attention: checked and converted once, for pages and caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import (
    ArrayKind,
    from_float32,
    open_elements,
    strided,
    widen,
)
from polarquant_nb.packed_attention import Bias

__all__ = [
    "Logits",
    "Queries",
    "bias_of",
    "check_causal",
    "check_last",
    "check_query_shape",
    "mask_shape",
    "open_logits",
    "open_mask",
    "open_queries",
    "result",
]

FloatArray = npt.NDArray[np.float32]

_LEAST, _MOST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Queries:
    """Queries as kernels take them.

    Parameters
    ----------
    x : ndarray of float32, shape ``(batch, num_kv_heads, heads of a group, q_len, head_dim)``
        Contiguous; the heads of a group share a kv head.
    kind : ArrayKind
        What the user gave, and gets.
    """

    x: FloatArray
    kind: ArrayKind

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(batch, num_heads, q_len)``."""
        batch, kv_heads, group, q_len, _ = self.x.shape
        return batch, kv_heads * group, q_len


@dataclass(frozen=True)
class Logits:
    """What becomes of q·k.

    Parameters
    ----------
    scale : float
        Factor.
    softcap : float
        Logits become ``softcap * tanh(logits / softcap)``; 0 for none.
    """

    scale: float
    softcap: float


def open_queries(q: Any, held: tuple[int, ...], holder: str) -> Queries:
    """Check queries against the keys that they will meet.

    Parameters
    ----------
    q : ndarray or torch.Tensor (CPU), shape ``(batch, num_heads, q_len, head_dim)``
        What the user gave.
    held : tuple of int
        Shape of the keys, ``(batch, num_kv_heads, seq_len, head_dim)``.
    holder : str
        What holds the keys, for messages.

    Returns
    -------
    Queries
        As float32.

    Raises
    ------
    TypeError
        If ``q`` is no float array on the CPU.
    ValueError
        If its shape does not fit.
    """
    elements, kind = open_elements(q, "q")
    shape = elements.shape
    check_query_shape(shape, held, holder)
    batch, kv_heads = held[:2]
    x = widen(elements, kind)
    if not (x.flags.c_contiguous and x.flags.writeable):
        x = x.copy()
    return Queries(x.reshape(batch, kv_heads, shape[1] // kv_heads, *shape[2:]), kind)


def check_query_shape(shape: tuple[int, ...], held: tuple[int, ...], holder: str) -> None:
    """Refuse queries that do not fit the keys.

    Parameters
    ----------
    shape : tuple of int
        Of the queries.
    held, holder
        See :func:`open_queries`.

    Raises
    ------
    ValueError
        If it does not fit.
    """
    batch, kv_heads, _, head_dim = held
    if len(shape) != 4 or shape[0] != batch or shape[3] != head_dim:
        raise ValueError(
            f"q has shape {shape}; it must be (batch, num_heads, q_len, head_dim) with batch "
            f"{batch} and head_dim {head_dim}, as {holder} has shape {held}"
        )
    if kv_heads == 0 or shape[1] % kv_heads:
        raise ValueError(
            f"q has {shape[1]} heads; they must be a multiple of num_kv_heads = {kv_heads}"
        )


def check_causal(q_len: int, seq_len: int) -> None:
    """Refuse more queries than there are tokens that they could be the last of.

    Parameters
    ----------
    q_len, seq_len : int
        Queries, and tokens.

    Raises
    ------
    ValueError
        If there are more.
    """
    if q_len > seq_len:
        raise ValueError(
            f"q_len is {q_len} and seq_len {seq_len}; is_causal needs q_len <= seq_len"
        )


def check_last(shape: tuple[int, ...], seq_len: int) -> None:
    """Refuse more queries than a cache has tokens that they could be the last of.

    Parameters
    ----------
    shape : tuple of int
        Of the queries, ``(batch, num_heads, q_len, ...)``; of no rows there are none.
    seq_len : int
        Tokens.

    Raises
    ------
    ValueError
        If there are more.
    """
    batch, _, q_len = shape[:3]
    if batch and q_len > seq_len:
        raise ValueError(
            f"q_len is {q_len} and seq_len {seq_len}; queries are those of the last q_len tokens "
            "of the cache"
        )


def open_logits(scale: float | None, softcap: float | None, head_dim: int) -> Logits:
    """Check scale and softcap, and fill in the default.

    Parameters
    ----------
    scale : float, optional
        ``head_dim ** -0.5`` by default.
    softcap : float, optional
        None by default.
    head_dim : int
        Of queries.

    Returns
    -------
    Logits
        The two numbers.

    Raises
    ------
    TypeError
        If one is no number.
    ValueError
        If one is not a finite positive number, in float32 too.
    """
    return Logits(
        head_dim**-0.5 if scale is None else _positive(scale, "scale"),
        0.0 if softcap is None else _positive(softcap, "softcap"),
    )


def _positive(value: Any, name: str) -> float:
    try:
        number, is_good = float(value), bool(_LEAST <= value <= _MOST)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is {value!r}; it must be a number") from error
    if not is_good:
        raise ValueError(f"{name} is {value}; it must be a finite positive number of float32")
    return number


def open_mask(mask: Any, shape: tuple[int, int, int, int]) -> FloatArray:
    """The mask as numbers to add, without copying what is broadcast.

    Parameters
    ----------
    mask : array_like of bool or float
        What the user gave.
    shape : tuple of int
        ``(batch, num_heads, q_len, seq_len)``.

    Returns
    -------
    ndarray of float32, of four axes
        Each as long as in ``shape``, or 1.

    Raises
    ------
    TypeError
        If the dtype is not bool or a float type.
    ValueError
        If the mask cannot be broadcast.
    """
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu()
        mask = (mask.float() if mask.is_floating_point() else mask).numpy()
    mask = np.asarray(mask)
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    elif mask.dtype.kind != "f":
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool or a float type")
    mask = mask.reshape(mask_shape(mask.shape, shape))
    with np.errstate(over="ignore"):
        return mask.astype(np.float32, copy=False)


def mask_shape(given: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a mask, with axes of length 1 before it so that there are four.

    Parameters
    ----------
    given : tuple of int
        Shape that it has.
    shape : tuple of int
        ``(batch, num_heads, q_len, seq_len)``.

    Returns
    -------
    tuple of four ints
        Each as in ``shape``, or 1.

    Raises
    ------
    ValueError
        If the mask cannot be broadcast.
    """
    axes = (1,) * (4 - len(given)) + given
    if len(axes) > 4 or any(n not in (1, want) for n, want in zip(axes, shape, strict=True)):
        raise ValueError(
            f"mask has shape {given}; it must be broadcastable to (batch, num_heads, q_len, "
            f"seq_len) = {shape}"
        )
    return axes


def bias_of(mask: FloatArray, queries: Queries, seq_len: int, first: npt.NDArray[np.int64]) -> Bias:
    """The mask as kernels take it.

    Parameters
    ----------
    mask : ndarray of float32
        From :func:`open_mask`.
    queries : Queries
        What it is for.
    seq_len : int
        Columns.
    first : ndarray of int64, shape ``(batch,)``
        Column of each batch row's first packed token.

    Returns
    -------
    Bias
        Views of the mask.
    """
    batch, kv_heads, group, q_len, _ = queries.x.shape
    whole = np.broadcast_to(mask, (*queries.shape, seq_len))
    memory = strided(whole, ArrayKind("numpy", "float32"))
    base = memory.bases[:, None] + memory.strides[0] * np.arange(q_len)
    base = base.reshape(batch, kv_heads * group * q_len) + memory.strides[1] * first[:, None]
    return Bias(memory.flat, base.reshape(batch * kv_heads, group * q_len), memory.strides[1])


def result(queries: Queries, out: FloatArray, lse: FloatArray | None) -> Any:
    """What attention returns, of the array type and dtype of the queries.

    Parameters
    ----------
    queries : Queries
        From :func:`open_queries`.
    out : ndarray of float32
        As many vectors as there are queries.
    lse : ndarray of float32, optional
        As many numbers, where they are asked for.

    Returns
    -------
    out : ndarray or torch.Tensor, shape ``(batch, num_heads, q_len, value_head_dim)``
        Vectors.
    lse : ndarray or torch.Tensor of float32, shape ``(batch, num_heads, q_len)``
        Only if given.
    """
    array = from_float32(out.reshape(*queries.shape, out.shape[-1]), queries.kind)
    if lse is None:
        return array
    kind = ArrayKind(queries.kind.family, "float32")
    return array, from_float32(lse.reshape(queries.shape), kind)
