"""Attention over the tokens of a cache: its exact ones and its pages, merged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import widen
from polarquant_nb.cache_state import CacheState, runs
from polarquant_nb.codec import element_kind
from polarquant_nb.exact_attention import attend_exact, merge
from polarquant_nb.kernels.exact_cpu import add_exact
from polarquant_nb.kernels.jit import bound
from polarquant_nb.packed_attention import Problem, attend_packed, every_token
from polarquant_nb.queries import Logits, Queries, bias_of

__all__ = ["attend"]

FloatArray = npt.NDArray[np.float32]


def attend(
    state: CacheState, queries: Queries, logits: Logits, mask: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Causal attention of the last tokens of each row; arguments are not checked.

    Parameters
    ----------
    state : CacheState
        Keys and values.
    queries : Queries
        At most as many as the longest row has tokens.
    logits : Logits
        Scale and softcap.
    mask : ndarray of float32, optional
        See :func:`polarquant_nb.queries.open_mask`; the last column is each row's last token.

    Returns
    -------
    out : ndarray of float32, shape ``(batch, num_kv_heads, group, q_len, value_head_dim)``
        Zeros for a query that sees nothing.
    lse : ndarray of float32, shape ``(batch, num_kv_heads, group, q_len)``
        −inf for a query that sees nothing.
    """
    with np.errstate(all="ignore"):
        if mask is None and queries.x.shape[3] == 1 and state.exact:
            return _attend_last(state, queries, logits)
        exact = _attend_exact(state, queries, logits, mask)
        if not any(state.packed):
            return exact
        return merge(_attend_packed(state, queries, logits, mask), exact)


def _attend_last(
    state: CacheState, queries: Queries, logits: Logits
) -> tuple[FloatArray, FloatArray]:
    """Each row's last token to all tokens of its row, which hides none: the pages, and the rest."""
    batch, kv_heads, group, _, head_dim = queries.x.shape
    keys, values, kind = state.keys.exact, state.values.exact, state.kind
    rows, width = batch * kv_heads, values.shape[-1]
    if any(state.packed):
        # compiled code is called without a look at strides, and writes in place
        out, lse = map(np.ascontiguousarray, _attend_packed(state, queries, logits, None))
    else:
        out = np.zeros((batch, kv_heads, group, 1, width), np.float32)
        lse = np.full(out.shape[:-1], -np.inf, np.float32)
    _add_exact(keys.dtype)(
        queries.x.reshape(rows, group, head_dim),
        keys.reshape(rows, -1, head_dim),
        values.reshape(rows, -1, width),
        element_kind(kind),
        np.repeat(np.array(state.exact), kv_heads),
        logits.scale,
        logits.softcap,
        out.reshape(rows, group, width),
        lse.reshape(rows, group),
    )
    return out, lse


@cache
def _add_exact(dtype: np.dtype[Any]) -> Callable[..., None]:
    x, n = np.zeros((1, 1, 1), np.float32), np.zeros(1, np.int64)
    exact = x.astype(dtype)
    return bound(add_exact, x, exact, exact, 0, n, 1.0, 0.0, x, x[0])


def _attend_exact(
    state: CacheState, queries: Queries, logits: Logits, mask: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Over sinks and recent tokens: rows of equal lengths together."""
    keys, values, kind = state.keys.exact, state.values.exact, state.kind
    q_len, seq_len = queries.x.shape[3], state.seq_len
    out = np.empty((*queries.x.shape[:-1], values.shape[-1]), np.float32)
    lse = np.empty(queries.x.shape[:-1], np.float32)
    for rows, (exact, packed) in runs(state.exact, state.packed):
        length = exact + packed
        positions = np.arange(exact)
        positions[state.settings.sink :] += packed
        attend_exact(
            queries.x[rows],
            widen(keys[rows, :, :exact], kind),
            widen(values[rows, :, :exact], kind),
            logits,
            None if mask is None else _columns(mask, rows, positions + seq_len - length, seq_len),
            positions,
            np.arange(q_len) + (length - q_len + 1) if q_len > 1 else None,
            out[rows],
            lse[rows],
        )
    return out, lse


def _columns(
    mask: FloatArray, rows: slice, columns: npt.NDArray[np.int64], seq_len: int
) -> FloatArray:
    mask = np.broadcast_to(mask, (*mask.shape[:3], seq_len))
    return (mask[rows] if len(mask) > 1 else mask)[..., columns]


def _attend_packed(
    state: CacheState, queries: Queries, logits: Logits, mask: FloatArray | None
) -> tuple[FloatArray, FloatArray]:
    """Over pages: all rows at once."""
    batch, num_kv_heads, group, q_len, head_dim = queries.x.shape
    rows, n, seq_len = batch * num_kv_heads, group * q_len, state.seq_len
    after_sinks = [max(0, length - state.settings.sink) for length in state.lengths]
    bias = None
    if mask is not None:
        bias = bias_of(mask, queries, seq_len, seq_len - np.array(after_sinks))
    shape = batch, num_kv_heads, group, q_len
    if min(state.exact) >= state.settings.sink + q_len:  # all pages are in the past
        visible = every_token(rows, n).reshape(shape)
    else:
        visible = np.empty(shape, np.int64)
        visible[:] = np.array(after_sinks)[:, None, None, None] + np.arange(1 - q_len, 1)
    problem = Problem(
        queries=queries.x.reshape(rows, n, head_dim),
        keys=state.keys.table.rows,
        values=state.values.table.rows,
        scale=logits.scale,
        softcap=logits.softcap,
        bias=bias,
        visible=visible.reshape(rows, n),
    )
    out, lse = attend_packed(problem)
    return out.reshape(*visible.shape, out.shape[-1]), lse.reshape(visible.shape)
