"""Attention over compressed keys and values: the public function and its arguments."""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from polarquant_nb.arrays import (
    ArrayKind,
    new_array,
    open_array,
    read_float32,
    write_float32,
)
from polarquant_nb.packed_attention import Bias, Problem, attend_packed
from polarquant_nb.pages import PolarPages

__all__ = ["attention"]


def attention(
    q: Any,
    k_pages: PolarPages,
    v_pages: PolarPages,
    *,
    scale: float | None = None,
    mask: Any = None,
    is_causal: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention straight on the codes: softmax(q·k̂ scale) v̂, without decoding keys or values.

    Few queries run fused on the codes: only compressed bytes are read, and no scratch grows with
    seq_len.  Many queries (a prompt on top of a packed history) decode 2,048 tokens at a time and
    multiply matrices.

    Parameters
    ----------
    q : ndarray or torch.Tensor (CPU), shape ``(batch, num_heads, q_len, head_dim)``
        Queries, after the positional encoding; float16, bfloat16, float32 or float64.  Consecutive
        runs of ``num_heads / num_kv_heads`` heads share a kv head.
    k_pages, v_pages : PolarPages
        Keys ``(batch, num_kv_heads, seq_len, head_dim)`` and values
        ``(batch, num_kv_heads, seq_len, value_head_dim)``; formats may differ.
    scale : float, optional
        Of the logits; ``head_dim ** -0.5`` by default.
    mask : array_like of bool or float, optional
        Broadcastable to ``(batch, num_heads, q_len, seq_len)``: True where a query may attend, or
        numbers that are added to the logits.
    is_causal : bool
        The queries are the last q_len tokens: query i sees the first ``seq_len − q_len + i + 1``.
    softcap : float, optional
        Logits become ``softcap * tanh(logits / softcap)``, before the mask.
    return_lse : bool
        Return the logarithm of each query's sum of exponentials too, which merges partial results.

    Returns
    -------
    out : ndarray or torch.Tensor, shape ``(batch, num_heads, q_len, value_head_dim)``
        Of the array type and dtype of ``q``.  A query that may see no token gets zeros.
    lse : ndarray or torch.Tensor of float32, shape ``(batch, num_heads, q_len)``
        Natural logarithms, only with ``return_lse``; −inf for a query that sees no token.

    Raises
    ------
    TypeError
        If pages are no PolarPages, or ``q`` or ``mask`` is no array of a supported dtype.
    ValueError
        If shapes do not fit, or scale or softcap is not a finite positive number.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, section 4; the split over tokens is flash decoding.
    """
    problem, shape, kind = _check(q, k_pages, v_pages, scale, mask, is_causal, softcap)
    out, lse = attend_packed(problem)
    result, target = new_array((*shape, v_pages.format.head_dim), kind)
    write_float32(target, kind, np.ascontiguousarray(out).reshape(-1))
    if not return_lse:
        return result
    lse_array, lse_target = new_array(shape, ArrayKind(kind.family, "float32"))
    lse_target[:] = lse.reshape(-1)
    return result, lse_array


# ---- arguments -----------------------------------------------------------------------------------


def _check(
    q: Any, keys: Any, values: Any, scale: float | None, mask: Any, is_causal: bool,
    softcap: float | None,
) -> tuple[Problem, tuple[int, int, int], ArrayKind]:  # fmt: skip
    for name, pages in (("k_pages", keys), ("v_pages", values)):
        if not isinstance(pages, PolarPages):
            raise TypeError(f"{name} is a {type(pages).__name__}; it must be a PolarPages")
        if len(pages.shape) != 4:
            raise ValueError(
                f"{name} has shape {pages.shape}; it must be (batch, num_kv_heads, seq_len, "
                "head_dim)"
            )
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"k_pages has shape {keys.shape} and v_pages {values.shape}; batch, num_kv_heads and "
            "seq_len must agree"
        )
    source = open_array(q, "q")
    batch, kv_heads, seq_len, head_dim = keys.shape
    if len(source.shape) != 4 or source.shape[0] != batch or source.shape[3] != head_dim:
        raise ValueError(
            f"q has shape {source.shape}; it must be (batch, num_heads, q_len, head_dim) with "
            f"batch {batch} and head_dim {head_dim}, as k_pages has shape {keys.shape}"
        )
    _, heads, q_len, _ = source.shape
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads; they must be a multiple of num_kv_heads = {kv_heads}"
        )
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not (isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value}; it must be a finite positive number")
    if is_causal and q_len > seq_len:
        raise ValueError(
            f"q_len is {q_len} and seq_len {seq_len}; is_causal needs q_len <= seq_len"
        )

    rows, n = batch * kv_heads, heads // kv_heads * q_len
    bias = None if mask is None else _bias(mask, (batch, heads, q_len, seq_len), kv_heads)
    last = np.arange(q_len) + seq_len - q_len + 1 if is_causal else np.full(q_len, seq_len)
    visible = np.broadcast_to(last, (rows, heads // kv_heads, q_len)).reshape(rows, n)
    problem = Problem(
        queries=read_float32(source).reshape(rows, n, head_dim),
        keys=keys.rows,
        values=values.rows,
        scale=head_dim**-0.5 if scale is None else float(scale),
        softcap=float(softcap or 0),
        bias=bias,
        visible=visible,
    )
    return problem, (batch, heads, q_len), source.kind


def _bias(mask: Any, shape: tuple[int, int, int, int], kv_heads: int) -> Bias:
    """The mask as numbers to add, without copying what is broadcast."""
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu()
        mask = (mask.float() if mask.is_floating_point() else mask).numpy()
    mask = np.asarray(mask)
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    elif mask.dtype.kind != "f":
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool or a float type")
    try:
        mask = np.broadcast_to(mask.astype(np.float32, copy=False), shape)
    except ValueError:
        raise ValueError(
            f"mask has shape {mask.shape}; it must be broadcastable to (batch, num_heads, q_len, "
            f"seq_len) = {shape}"
        ) from None
    memory = open_array(mask, "mask")
    batch, _, q_len, _ = shape
    base = memory.bases[:, None] + memory.strides[0] * np.arange(q_len)
    return Bias(memory.flat, base.reshape(batch * kv_heads, -1), memory.strides[1])
