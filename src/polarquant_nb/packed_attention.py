"""Attention over pages alone: few queries on the codes, many by decoding a few pages at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind
from polarquant_nb.bias import RotaryBias
from polarquant_nb.codec import Factors, Shape, decode_rows, prepared
from polarquant_nb.kernels import attention_cpu
from polarquant_nb.kernels.attention_cpu import LOG2_E
from polarquant_nb.kernels.attention_stages import GROUP_TOKENS
from polarquant_nb.kernels.call_list import Call, Phase
from polarquant_nb.kernels.jit import GroupProgram, Program, cpu_isa
from polarquant_nb.layout import PAGE
from polarquant_nb.rows import PackedRows
from polarquant_nb.threads import get_num_threads, run_ranges

__all__ = [
    "PAGES_PER_HELPER",
    "Bias",
    "FusedAttention",
    "Problem",
    "attend_packed",
    "every_token",
    "fills_groups",
]

_MAX_GROUP = 8
"""Most queries that share a walk: their sums have to stay in registers."""

_FUSED_QUERIES = 64
"""With more queries to a kv head, decoding pages and multiplying matrices is faster."""

_PAGES_PER_THREAD = 128
"""Fewest pages, of any row, that are worth a thread that Python starts."""

PAGES_PER_HELPER = 24
"""Fewest that are worth one of a :class:`~polarquant_nb.kernels.call_list.CallList`."""

_WEIGHT_BYTES = 2**20
"""Weights held at a time by the fused path, over all rows."""

_KEPT_BYTES = 2**22
"""Largest scratch array that is kept between calls."""

_PREFILL_TOKENS = 2048
_PREFILL_QUERIES = 256
"""Tokens decoded, and queries that meet them, at a time."""

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bias:
    """What is added to logits.

    Parameters
    ----------
    flat : 1-d array of float32
        The elements.
    base : array of int64, shape ``(rows, n)``
        Element of ``flat`` for each query's first packed token.
    stride : int
        Elements from token to token.
    """

    flat: FloatArray
    base: npt.NDArray[np.int64]
    stride: int


@dataclass(frozen=True)
class Problem:
    """Arguments of attention over pages; a row is a batch element and kv head.

    Parameters
    ----------
    queries : array of float32, shape ``(rows, n, head_dim)``
        Queries of all heads and positions that share a kv head.
    keys, values : PackedRows
        Of equal lengths; values without a bias.
    scale, softcap : float
        Of the logits; no softcap if 0.
    bias : Bias, optional
        Added to the logits.
    visible : array of int64, shape ``(rows, n)``
        How many tokens each query may see: the first ones.
    """

    queries: FloatArray
    keys: PackedRows
    values: PackedRows
    scale: float
    softcap: float
    bias: Bias | None
    visible: npt.NDArray[np.int64]

    def __post_init__(self) -> None:
        # compiled code is called without a look at types and strides
        for name, kind in (("queries", np.float32), ("visible", np.int64)):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), kind))


def attend_packed(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Attention over pages; arguments are not checked.

    Parameters
    ----------
    problem : Problem
        Queries, pages and what hides them.

    Returns
    -------
    out : array of float32, shape ``(rows, n, value_head_dim)``
        Zeros for a query that sees nothing.
    lse : array of float32, shape ``(rows, n)``
        Natural logarithm of each query's sum of exponentials; −inf if it sees nothing.
    """
    rows, n, _ = problem.queries.shape
    if rows * n == 0 or problem.keys.num_pages == 0:
        out = np.zeros((rows, n, problem.values.format.head_dim), np.float32)
        return out, np.full((rows, n), -np.inf, np.float32)
    rotary = problem.keys.rotary_bias
    # decoded keys have their bias again, to which a soft cap applies as to all of the logit
    if n > _FUSED_QUERIES or (rotary is not None and problem.softcap):
        return _by_page_groups(problem)
    if rotary is not None:
        problem = replace(problem, bias=_with_rotary(problem, rotary))
    fused = FusedAttention(problem.keys, problem.values, n)
    return fused(problem)


def _with_rotary(problem: Problem, rotary: RotaryBias) -> Bias:
    """The logits of the keys' bias, and what is added to logits anyway."""
    keys = problem.keys
    rows, n, _ = problem.queries.shape
    count = keys.num_pages * PAGE
    queries = problem.queries * np.float32(problem.scale)
    logits = rotary.logits(queries, keys.first_position, count)
    if problem.bias is not None:
        at = np.arange(count) * problem.bias.stride
        for row, length in enumerate(keys.lengths):
            logits[row, :, :length] += problem.bias.flat[
                problem.bias.base[row][:, None] + at[:length]
            ]
    return Bias(logits.reshape(-1), np.arange(rows * n).reshape(rows, n) * count, 1)


# ---- few queries: fused --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Side:
    """Keys or values, as kernels for a number of queries take them."""

    program: GroupProgram
    codec: Program
    sizes: Shape
    tables: Factors  # but for the signs, which depend on the rows
    code: dict[Any, Any]

    def call(self, kernel: Callable[..., None], *arguments: Any) -> Call:
        """A call of a kernel, which is looked up once."""
        return Call(kernel, arguments, self.code)


def _side(rows: PackedRows, group: int, *, back: bool) -> _Side:
    key = group, back
    if key not in rows.prepared:
        codec, sizes, *rotations = prepared(rows.format, rows.codebooks.is_analytic)
        _, *rotation = rotations[back]
        program = codec.for_queries(group)
        pairs = rows.codebooks.half_circle_cosines if program.folded else rows.codebooks.cosines
        tables = (*rotation, rows.codebooks.cosines, pairs)
        rows.prepared[key] = _Side(program, codec, sizes, tables, {})
    side: _Side = rows.prepared[key]
    return side


class FusedAttention:
    """A number of queries for each row to the same pages: what all of them share, worked out once.

    Parameters
    ----------
    keys, values : PackedRows
        Of equal lengths.
    n : int
        Queries of a row.
    pages_per_thread : int
        How work is cut.
    """

    def __init__(
        self,
        keys: PackedRows,
        values: PackedRows,
        n: int,
        pages_per_thread: int = _PAGES_PER_THREAD,
    ) -> None:
        rows, group = len(keys.starts), min(n, _MAX_GROUP)
        groups = -(-n // group)
        k, v = _side(keys, group, back=False), _side(values, group, back=True)
        k_tables, v_tables = (keys.inverse_signs, *k.tables), (values.inverse_signs, *v.tables)
        work = rows * groups * keys.num_pages
        self._threads = max(1, min(get_num_threads(), work // pages_per_thread))
        ranges, range_pages, span_pages = _split(
            keys.num_pages, rows * groups, group, self._threads
        )
        shape = group, groups, ranges, range_pages, span_pages
        self._n, self._group, self._k, self._v = n, group, k, v
        self._out_shape = rows, groups * group, values.format.head_dim
        self._items, self._spans = rows * groups * ranges, -(-range_pages // span_pages)
        self._weights_size = self._items * group * (span_pages * PAGE + 16)
        self._sums_size = self._items * group * values.format.head_dim * v.codec.lanes
        self._of_keys = k.program, k.codec, shape, k.sizes
        self._key_pages = keys.words, keys.starts, keys.lengths, k_tables
        self._of_values = (
            v.program, shape, v.sizes, values.words, values.starts, values.lengths, v_tables
        )  # fmt: skip
        self._of_sums = v.program, v.codec, shape, v.sizes, v_tables

    def __call__(self, problem: Problem) -> tuple[FloatArray, FloatArray]:
        """Attention; arguments are not checked.

        Parameters
        ----------
        problem : Problem
            With these keys and values.

        Returns
        -------
        out : array of float32, shape ``(rows, n, value_head_dim)``
            See :func:`attend_packed`.
        lse : array of float32, shape ``(rows, n)``
            Likewise.
        """
        (rows, padded, _), n = self._out_shape, self._n
        queries, visible, bias = problem.queries, problem.visible, problem.bias or _no_bias(rows, n)
        base = bias.base
        if padded > n:
            extra = ((0, 0), (0, padded - n))
            queries = np.pad(queries, (*extra, (0, 0)))
            # the queries that fill the group up see nothing, but their bias is read
            visible, base = np.pad(visible, extra), np.pad(base, extra, mode="edge")
        bias, sums = Bias(bias.flat, base, bias.stride), self._sums()
        out, lse = np.empty(self._out_shape, np.float32), np.empty((rows, padded), np.float32)

        def attend(first: int, last: int) -> None:
            calls = self._attending(
                queries, problem.scale, problem.softcap, bias, visible, sums, first, last
            )
            for call in calls:
                call()

        run_ranges(attend, self._items, max(1, self._items // self._threads))
        self._merging(sums, out, lse)()
        return (out, lse) if padded == n else (out[:, :n], lse[:, :n])

    def phases(
        self, queries: FloatArray, scale: float, softcap: float, out: FloatArray, lse: FloatArray
    ) -> list[Phase]:
        """The same for a :class:`~polarquant_nb.kernels.call_list.CallList`, of all tokens.

        It is to be run by the thread that asks for it, which lends its scratch memory.

        Parameters
        ----------
        queries : array of float32, shape ``(rows, n, head_dim)``
            Contiguous; see :func:`fills_groups`.
        scale, softcap
            See :class:`Problem`.
        out, lse : arrays of float32, shapes ``(rows, n, value_head_dim)``, ``(rows, n)``
            What to write to.

        Returns
        -------
        list of Phase
            To run one after the other.
        """
        rows, n, _ = queries.shape
        sums, visible, bias = self._sums(), every_token(rows, n), _no_bias(rows, n)
        # with threads to help, each item is a list: whoever has time takes the next
        step = self._items if self._threads == 1 else 1
        attending = [
            self._attending(queries, scale, softcap, bias, visible, sums, first, first + step)
            for first in range(0, self._items, step)
        ]
        return [attending, [[self._merging(sums, out, lse)]]]

    def _sums(self) -> _Sums:
        top, totals, factors = np.empty((3, self._items * self._group), np.float32)
        S, sums = _scratch("S", self._weights_size), _scratch("sums", self._sums_size)
        return _Sums(S, sums, top, totals, factors)

    def _attending(
        self, queries: FloatArray, scale: float, softcap: float, bias: Bias,
        visible: npt.NDArray[np.int64], sums: _Sums, first: int, last: int,
    ) -> list[Call]:  # fmt: skip
        """What turns pages to sums, for some items."""
        S, vectors, top, totals, factors = sums
        calls = []
        for span in range(self._spans):
            calls += [
                self._k.call(
                    attention_cpu.weigh_keys, *self._of_keys, queries.reshape(-1),
                    *self._key_pages, scale, softcap, bias.flat, bias.base.reshape(-1),
                    bias.stride, visible.reshape(-1), span, S, top, totals, factors, first, last,
                ),
                self._v.call(
                    attention_cpu.add_values, *self._of_values, span, S, factors, vectors, first,
                    last,
                ),
            ]  # fmt: skip
        return calls

    def _merging(self, sums: _Sums, out: FloatArray, lse: FloatArray) -> Call:
        _, vectors, top, totals, _ = sums
        return self._v.call(
            attention_cpu.merge_ranges, *self._of_sums, vectors, top, totals, out.reshape(-1),
            lse.reshape(-1),
        )  # fmt: skip


def fills_groups(n: int) -> bool:
    """Whether so many queries of a row are walked over pages in groups that are full."""
    return n <= _MAX_GROUP or n % _MAX_GROUP == 0


class _Sums(NamedTuple):
    """What kernels write down on the way: weights, sums of values, and what goes with them."""

    S: FloatArray
    vectors: FloatArray
    top: FloatArray
    totals: FloatArray
    factors: FloatArray


_local = threading.local()


def _scratch(name: str, size: int) -> FloatArray:
    """Memory that a thread keeps from call to call, as the system hands out new memory slowly."""
    if size * 4 > _KEPT_BYTES:
        return np.empty(size, np.float32)
    kept: FloatArray | None = getattr(_local, name, None)
    if kept is None or kept.size < size:
        kept = np.empty(size, np.float32)
        setattr(_local, name, kept)
    return kept


@lru_cache(maxsize=4)  # nearly always the numbers of the call before
def _no_bias(rows: int, n: int) -> Bias:
    return Bias(np.empty(0, np.float32), np.zeros((rows, n), np.int64), 0)


@lru_cache(maxsize=4)  # nearly always the numbers of the call before
def every_token(rows: int, n: int) -> npt.NDArray[np.int64]:
    """What queries see that see every token, however many there are: ``Problem.visible``."""
    return np.full((rows, n), np.iinfo(np.int64).max)


def _split(num_pages: int, rows: int, group: int, threads: int) -> tuple[int, int, int]:
    """Ranges of a row, pages of a range, and pages of a span.

    There are enough ranges to keep every thread busy, and spans so long that all weights held at a
    time take a mebibyte; all in whole page groups.
    """
    per_group = GROUP_TOKENS // PAGE
    page_groups = -(-num_pages // per_group)
    ranges = 1 if threads == 1 else min(page_groups, max(1, -(-2 * threads // rows)))
    range_pages = -(-page_groups // ranges) * per_group
    ranges = -(-num_pages // range_pages)
    weights = _WEIGHT_BYTES // (4 * group * rows * ranges)
    span_pages = min(range_pages, max(1, weights // GROUP_TOKENS) * per_group)
    return ranges, range_pages, span_pages


# ---- many queries: by page groups ----------------------------------------------------------------


def _by_page_groups(problem: Problem) -> tuple[FloatArray, FloatArray]:
    """Flash attention: decode tokens of a row, multiply matrices, rescale what was added up."""
    rows, n, _ = problem.queries.shape
    out = np.zeros((rows, n, problem.values.format.head_dim), np.float32)
    top = np.full((rows, n), -np.inf, np.float32)
    totals = np.zeros((rows, n), np.float32)
    bias = problem.bias or _no_bias(rows, n)
    scores = np.empty(_PREFILL_QUERIES * _PREFILL_TOKENS, np.float32)
    for row in range(rows):
        q = problem.queries[row] * np.float32(problem.scale * LOG2_E)
        # a query sees a prefix of the tokens: what is hidden from all need not be decoded
        length = min(int(problem.keys.lengths[row]), int(problem.visible[row].max()))
        for start in range(0, length, _PREFILL_TOKENS):
            stop = min(start + _PREFILL_TOKENS, length)
            k = _decoded(problem.keys.part(slice(row, row + 1)), start, stop)
            v = _decoded(problem.values.part(slice(row, row + 1)), start, stop)
            for first in range(0, n, _PREFILL_QUERIES):
                here = slice(first, min(first + _PREFILL_QUERIES, n))
                weights, factors = _weigh_block(
                    q[here], k, scores, problem, bias, (row, here), start, top, totals
                )
                block = out[row, here]
                block *= factors[:, None]
                block += weights @ v
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(totals[..., None] == 0, np.float32(0), out / totals[..., None])
        return out, (top + np.log2(totals)) / np.float32(LOG2_E)


def _weigh_block(
    q: FloatArray, k: FloatArray, scores: FloatArray, problem: Problem, bias: Bias,
    where: tuple[int, slice], start: int, top: FloatArray, totals: FloatArray,
) -> tuple[FloatArray, FloatArray]:  # fmt: skip
    """Weights ``(queries, tokens)`` of a block, and the factors of what was added up before."""
    n, tokens = len(q), len(k)
    lanes_program = _bare_program()
    stride = -(-tokens // lanes_program.lanes) * lanes_program.lanes
    block = scores[: n * stride].reshape(n, stride)
    np.matmul(q, k.T, out=block[:, :tokens])
    factors = np.empty(n, np.float32)

    def weigh(first: int, last: int) -> None:
        attention_cpu.weigh_scores(
            lanes_program, lanes_program.lanes, block.reshape(-1), stride, start, tokens,
            problem.softcap, bias.flat, bias.base[where], bias.stride, problem.visible[where],
            start == 0, top[where], totals[where], factors, first, last,
        )  # fmt: skip

    run_ranges(weigh, n, 16)
    return block[:, :tokens], factors


@cache
def _bare_program() -> GroupProgram:
    """For kernels that depend on no format, only on the instruction set; one query at a time."""
    return Program(16, (1,), None, "float16", "none", False, cpu_isa()).for_queries(1)


def _decoded(row: PackedRows, start: int, stop: int) -> FloatArray:
    flat = np.empty((stop - start) * row.format.head_dim, np.float32)
    decode_rows(row, start, stop, flat, ArrayKind("numpy", "float32"))
    return flat.reshape(stop - start, -1)
