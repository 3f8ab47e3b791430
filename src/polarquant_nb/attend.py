"""Attention over compressed keys and values: arguments, work items, threads."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import (
    ArrayKind,
    new_array,
    open_array,
    read_float32,
    write_float32,
)
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.codec import Factors, decode, prepared
from polarquant_nb.kernels import attention_cpu
from polarquant_nb.kernels.attention_stages import GROUP_TOKENS
from polarquant_nb.kernels.jit import GroupProgram
from polarquant_nb.layout import PAGE
from polarquant_nb.pages import PolarPages
from polarquant_nb.threads import get_num_threads, run_ranges

__all__ = ["attention"]

_MAX_GROUP = 8
"""Most queries that share a walk: their sums have to stay in registers."""

_FUSED_QUERIES = 64
"""With more queries to a kv head, decoding pages and multiplying matrices is faster."""

_WEIGHT_BYTES = 2**20
"""Weights held at a time by the fused path, over all rows."""

_PREFILL_TOKENS = 2048
"""Tokens decoded at a time for many queries."""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class _Problem:
    """Validated arguments: queries ``(rows, n, head_dim)``, a row per batch element and kv head.

    ``bias`` is None or a view ``(batch, num_heads, q_len, seq_len)`` of what is added to logits;
    ``visible`` says how many tokens each of the n queries may see.
    """

    queries: FloatArray
    keys: PolarPages
    values: PolarPages
    scale: float
    softcap: float
    bias: FloatArray | None
    visible: npt.NDArray[np.int64]


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
    rows, n, _ = problem.queries.shape
    if problem.keys.seq_len == 0 or rows * n == 0:
        out = np.zeros((rows, n, v_pages.format.head_dim), np.float32)
        lse = np.full((rows, n), -np.inf, np.float32)
    elif n <= _FUSED_QUERIES:
        out, lse = _fused(problem)
    else:
        out, lse = _by_page_groups(problem)
    result, target = new_array((*shape, v_pages.format.head_dim), kind)
    write_float32(target, kind, np.ascontiguousarray(out).reshape(-1))
    if not return_lse:
        return result
    lse_array, lse_target = new_array(shape, ArrayKind(kind.family, "float32"))
    lse_target[:] = lse.reshape(-1)
    return result, lse_array


# ---- few queries: fused --------------------------------------------------------------------------


def _fused(problem: _Problem) -> tuple[FloatArray, FloatArray]:
    keys, values = problem.keys, problem.values
    rows, n, head_dim = problem.queries.shape
    group = min(n, _MAX_GROUP)
    groups = -(-n // group)
    padded = np.zeros((rows, groups * group, head_dim), np.float32)
    padded[:, :n] = problem.queries
    visible = np.zeros((rows, groups * group), np.int64)
    visible[:, :n] = problem.visible

    key_codec, key_shape, forward, _ = prepared(keys.format, keys.codebooks.is_analytic)
    value_codec, value_shape, _, back = prepared(values.format, values.codebooks.is_analytic)
    key_program, value_program = key_codec.for_queries(group), value_codec.for_queries(group)
    key_tables = _tables(forward, keys.codebooks, key_program)
    value_tables = _tables(back, values.codebooks, value_program)

    shape = group, groups, *_split(keys.num_pages, rows * groups, group)
    _, _, ranges, range_pages, span_pages = shape
    items = rows * groups * ranges
    S = np.empty(items * group * (span_pages * PAGE + 16), np.float32)
    sums = np.empty(items * group * values.format.head_dim * value_codec.lanes, np.float32)
    top, totals, factors = np.empty((3, items * group), np.float32)
    bias, base, stride = _flat_bias(problem.bias, rows, n, groups * group)
    key_words, value_words = keys.words.reshape(-1), values.words.reshape(-1)
    for span in range(-(-range_pages // span_pages)):

        def weigh(first: int, last: int, span: int = span) -> None:
            attention_cpu.weigh_keys(
                key_program, key_codec, shape, key_shape, padded.reshape(-1), key_words, key_tables,
                problem.scale, problem.softcap, bias, base, stride, visible.reshape(-1),
                keys.seq_len, span, S, top, totals, factors, first, last,
            )  # fmt: skip

        def add(first: int, last: int, span: int = span) -> None:
            attention_cpu.add_values(
                value_program, shape, value_shape, value_words, value_tables, keys.seq_len, span, S,
                factors, sums, first, last,
            )  # fmt: skip

        run_ranges(weigh, items, 1)
        run_ranges(add, items, 1)
    out = np.empty((rows, groups * group, values.format.head_dim), np.float32)
    lse = np.empty((rows, groups * group), np.float32)
    attention_cpu.merge_ranges(
        value_codec, shape, value_shape, value_tables, sums, top, totals, out.reshape(-1),
        lse.reshape(-1),
    )  # fmt: skip
    return out[:, :n], lse[:, :n]


def _split(num_pages: int, rows: int, group: int) -> tuple[int, int, int]:
    """Ranges of a row, pages of a range, and pages of a span.

    There are enough ranges to keep every thread busy, and spans so long that all weights held at a
    time take a mebibyte; all in whole page groups.
    """
    per_group = GROUP_TOKENS // PAGE
    page_groups = -(-num_pages // per_group)
    threads = get_num_threads()
    ranges = 1 if threads == 1 else min(page_groups, max(1, -(-2 * threads // rows)))
    range_pages = -(-page_groups // ranges) * per_group
    ranges = -(-num_pages // range_pages)
    weights = _WEIGHT_BYTES // (4 * group * rows * ranges)
    span_pages = min(range_pages, max(1, weights // GROUP_TOKENS) * per_group)
    return ranges, range_pages, span_pages


def _tables(rotation: Factors, codebooks: Codebooks, program: GroupProgram) -> Factors:
    """What kernels look up: the rotation's factors, cosines, and those of level 1 once more."""
    pairs = codebooks.half_circle_cosines if program.folded else codebooks.cosines
    return (*rotation, codebooks.cosines, pairs)


def _flat_bias(
    bias: FloatArray | None, rows: int, n: int, padded: int
) -> tuple[FloatArray, npt.NDArray[np.int64], int]:
    """The bias as a flat buffer, each query's first element in it, and the stride of tokens."""
    base = np.zeros((rows, padded), np.int64)
    if bias is None:
        return np.empty(0, np.float32), base.reshape(-1), 0
    memory = open_array(bias, "mask")
    queries = memory.bases[:, None] + memory.strides[0] * np.arange(bias.shape[2])
    base[:, :n] = queries.reshape(rows, n)
    return memory.flat, base.reshape(-1), memory.strides[1]


# ---- many queries: by page groups ----------------------------------------------------------------


def _by_page_groups(problem: _Problem) -> tuple[FloatArray, FloatArray]:
    """Running softmax over tokens decoded 2,048 at a time."""
    q = problem.queries * np.float32(problem.scale)
    rows, n, _ = q.shape
    value_dim = problem.values.format.head_dim
    out = np.zeros((rows, n, value_dim), np.float32)
    total = np.zeros((rows, n, 1), np.float32)
    top = np.full((rows, n, 1), -np.inf, np.float32)
    seq_len = problem.keys.seq_len
    for start in range(0, seq_len, _PREFILL_TOKENS):
        stop = min(start + _PREFILL_TOKENS, seq_len)
        k = _decoded(problem.keys, start, stop, rows)
        v = _decoded(problem.values, start, stop, rows)
        scores = np.matmul(q, k.transpose(0, 2, 1))
        if problem.softcap:
            scores = np.float32(problem.softcap) * np.tanh(scores / np.float32(problem.softcap))
        if problem.bias is not None:
            scores += problem.bias[..., start:stop].reshape(scores.shape)
        hidden = np.arange(start, stop) >= problem.visible[..., None]
        if hidden.any():
            scores[np.broadcast_to(hidden, scores.shape)] = -np.inf
        now = np.maximum(top, scores.max(-1, keepdims=True))
        safe = np.where(np.isneginf(now), np.float32(0), now)
        scores -= safe
        np.exp(scores, out=scores)
        keep = np.exp(top - safe)
        total = total * keep + scores.sum(-1, keepdims=True)
        out = out * keep + np.matmul(scores, v)
        top = now
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total == 0, np.float32(0), out / total)
        return out, (top + np.log(total))[..., 0]


def _decoded(pages: PolarPages, start: int, stop: int, rows: int) -> FloatArray:
    return np.asarray(decode(pages, start, stop, dtype="float32")).reshape(rows, stop - start, -1)


# ---- arguments -----------------------------------------------------------------------------------


def _check(
    q: Any, keys: Any, values: Any, scale: float | None, mask: Any, is_causal: bool,
    softcap: float | None,
) -> tuple[_Problem, tuple[int, int, int], ArrayKind]:  # fmt: skip
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
    bias = None if mask is None else _bias(mask, (batch, heads, q_len, seq_len))
    last = np.arange(q_len) + seq_len - q_len + 1 if is_causal else np.full(q_len, seq_len)
    visible = np.broadcast_to(last, (rows, heads // kv_heads, q_len)).reshape(rows, n)
    problem = _Problem(
        queries=read_float32(source).reshape(rows, n, head_dim),
        keys=keys,
        values=values,
        scale=head_dim**-0.5 if scale is None else float(scale),
        softcap=float(softcap or 0),
        bias=bias,
        visible=visible,
    )
    return problem, (batch, heads, q_len), source.kind


def _bias(mask: Any, shape: tuple[int, ...]) -> FloatArray:
    """The mask as numbers to add, broadcast to ``shape`` without copying what is broadcast."""
    if hasattr(mask, "detach"):
        mask = mask.detach().cpu()
        mask = (mask.float() if mask.is_floating_point() else mask).numpy()
    mask = np.asarray(mask)
    if mask.dtype == bool:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    elif mask.dtype.kind != "f":
        raise TypeError(f"mask has dtype {mask.dtype}; it must be bool or a float type")
    try:
        return np.broadcast_to(mask.astype(np.float32, copy=False), shape)
    except ValueError:
        raise ValueError(
            f"mask has shape {mask.shape}; it must be broadcastable to (batch, num_heads, q_len, "
            f"seq_len) = {shape}"
        ) from None
