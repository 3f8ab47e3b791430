"""Attention over compressed keys and values: the public function and its arguments."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarquant_nb.gpu_arrays import on_gpu
from polarquant_nb.packed_attention import Problem, attend_packed
from polarquant_nb.pages import PolarPages
from polarquant_nb.preconditioning import rotary_bias
from polarquant_nb.queries import (
    bias_of,
    check_causal,
    open_logits,
    open_mask,
    open_queries,
    result,
)
from polarquant_nb.tracing import traced_by

__all__ = ["attention"]


@traced_by("traced_attention")
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
    q : ndarray or torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries, after the positional encoding; float16, bfloat16, float32 or float64.  Consecutive
        runs of ``num_heads / num_kv_heads`` heads share a kv head.  Where pages are on a GPU,
        queries and mask must be there too.
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
    _check_pages(k_pages, v_pages)
    if on_gpu(q) or k_pages.device != "cpu" or v_pages.device != "cpu":
        from polarquant_nb import gpu

        return gpu.attention(q, k_pages, v_pages, scale, mask, is_causal, softcap, return_lse)
    queries = open_queries(q, k_pages.shape, "k_pages")
    logits = open_logits(scale, softcap, k_pages.format.head_dim)
    batch, kv_heads, group, q_len, head_dim = queries.x.shape
    seq_len = k_pages.seq_len
    if is_causal:
        check_causal(q_len, seq_len)
    bias = None
    if mask is not None:
        numbers = open_mask(mask, (*queries.shape, seq_len))
        bias = bias_of(numbers, queries, seq_len, np.zeros(batch, np.int64))
    last = np.arange(q_len) + seq_len - q_len + 1 if is_causal else np.full(q_len, seq_len)
    problem = Problem(
        queries=queries.x.reshape(batch * kv_heads, group * q_len, head_dim),
        keys=k_pages.rows,
        values=v_pages.rows,
        scale=logits.scale,
        softcap=logits.softcap,
        bias=bias,
        visible=np.tile(last, (batch * kv_heads, group)),
    )
    out, lse = attend_packed(problem)
    return result(queries, out, lse if return_lse else None)


def _check_pages(keys: Any, values: Any) -> None:
    for name, pages in (("k_pages", keys), ("v_pages", values)):
        if not isinstance(pages, PolarPages):
            raise TypeError(f"{name} is a {type(pages).__name__}; it must be a PolarPages")
        if len(pages.shape) != 4:
            raise ValueError(
                f"{name} has shape {pages.shape}; it must be (batch, num_kv_heads, seq_len, "
                "head_dim)"
            )
    if rotary_bias(values.preconditioner) is not None:
        raise ValueError("v_pages have a preconditioner with a rotary bias; only keys can have one")
    if keys.shape[:3] != values.shape[:3]:
        raise ValueError(
            f"k_pages has shape {keys.shape} and v_pages {values.shape}; batch, num_kv_heads and "
            "seq_len must agree"
        )
