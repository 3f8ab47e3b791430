"""Attention of last tokens to a cache's exact ones, on a GPU, merged with that to its pages.

A block of threads takes one query.  Tokens come by tiles of some 256 with a running softmax, in
nearly every cache one tile.  For scores, sixteen neighbouring threads share a token, so that they
read whole sectors of its key; for sums, neighbouring threads have neighbouring coordinates.  Loops
are unrolled so far that a thread has 32 numbers on their way from memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from polarquant_nb.kernels import cuda_attention_stages as attend
from polarquant_nb.kernels import cuda_stages as stages
from polarquant_nb.kernels.array_lanes import Index, Vector
from polarquant_nb.kernels.cuda_lanes import ALIGNMENT, compiled_kernel, device_stage
from polarquant_nb.kernels.jit import Program

__all__ = ["EXACT_THREADS", "make_exact"]

float32 = np.float32

EXACT_THREADS = 256
"""Threads of a block."""

SHARE = 16
"""Threads that share a token's key: 32 bytes of float16."""

MANY = 32
"""Numbers that a thread loads at a time."""

TOKENS = 256
"""Tokens of a tile, about."""


def make_exact(
    keys: Program, values: Program, element: str, threads: int = EXACT_THREADS
) -> Callable[..., Any]:
    """The kernel for two head_dims.

    Parameters
    ----------
    keys, values : Program
        Formats, of which the head_dim counts.
    element : {'float32', 'float16', 'bfloat16'}
        What queries, exact tokens and results are.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; a block for each query.
    """
    D, DV = keys.head_dim, values.head_dim
    PARTS = min(SHARE, threads)
    SLOTS = threads // PARTS  # tokens that are scored side by side
    OWN = D // PARTS  # coordinates of a thread, by as many at a time as divide them
    AT_ONCE = max(n for n in range(1, 9) if OWN % n == 0)
    TURNS = min(MANY // AT_ONCE, TOKENS // SLOTS)  # tokens of a thread
    WIDTH = min(DV, threads)
    PIECES = threads // WIDTH  # threads that share a coordinate of values
    COLUMNS = -(-DV // WIDTH)  # coordinates of a thread
    UNROLL = max(1, MANY // (2 * COLUMNS))
    TILE = max(1, TOKENS // (PIECES * UNROLL)) * PIECES * UNROLL
    PITCH = -(-TILE // (SLOTS * TURNS)) * SLOTS * TURNS + 1  # odd: sixteen rows, sixteen banks
    PARTIAL, ROOM = PARTS * PITCH, PIECES * DV
    BEST = min(16, threads)

    stage, of_values = (partial(device_stage, program=p, stride=1) for p in (keys, values))
    load = stage(stages.load_scaled, element=element)
    score = stage(score_tokens, element=element, parts=PARTS, own=OWN, at_once=AT_ONCE,
                  slots=SLOTS, turns=TURNS, pitch=PITCH)  # fmt: skip
    finish = stage(attend.finish_score, group=1, pieces=PARTS, chunk=PITCH)
    largest, new_top = stage(attend.largest_score), stage(attend.new_top)
    weigh, add_up = stage(attend.weigh), stage(attend.add_up)
    add = of_values(add_tokens, element=element, pieces=PIECES, unroll=UNROLL, columns=COLUMNS,
                    width=WIDTH)  # fmt: skip
    offer = of_values(offer_sums, columns=COLUMNS, width=WIDTH)
    write = of_values(write_result, element=element, pieces=PIECES)

    def add_exact(q, k, v, fewer, others, others_lse, out, lse, most, slots, per_row, num_heads,
                  scale, softcap, has_others, batch_stride, head_stride,
                  coordinate_stride):  # fmt: skip
        """Add the first ``most - fewer[batch row]`` of ``slots`` tokens to a softmax over others.

        Queries ``(batch, num_heads, d)`` are of any strides; scale and softcap are in units of
        1/log2 e.  ``others`` are results and ``others_lse`` their natural log-sum-exp.
        """
        Q = cuda.shared.array(D, float32, alignment=ALIGNMENT)
        S = cuda.shared.array(TILE, float32, alignment=ALIGNMENT)
        partial = cuda.shared.array(PARTIAL, float32, alignment=ALIGNMENT)
        room = cuda.shared.array(ROOM, float32, alignment=ALIGNMENT)
        best = cuda.shared.array(BEST, float32, alignment=ALIGNMENT)
        top = cuda.shared.array(1, float32, alignment=ALIGNMENT)
        total = cuda.shared.array(1, float32, alignment=ALIGNMENT)
        factor = cuda.shared.array(1, float32, alignment=ALIGNMENT)
        sums = cuda.local.array(COLUMNS, float32)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        query = cuda.blockIdx.x
        batch, head = query // num_heads, query % num_heads
        count = most - fewer[batch]
        row = query // per_row * slots
        for i in range(thread, D, step):
            place = batch * batch_stride + head * head_stride + i * coordinate_stride
            load(0, q, place, scale, Q, i)
        if thread == 0:
            top[0] = float32(-np.inf)
            total[0] = float32(0)
        for i in range(COLUMNS):
            sums[i] = float32(0)
        for first in range(0, count, TILE):
            n = min(TILE, count - first)
            cuda.syncthreads()
            for t in range(thread // PARTS, n, SLOTS * TURNS):
                score(0, thread % PARTS, k, (row + first) * D, t, n - 1, Q, partial)
            cuda.syncthreads()
            for t in range(thread, TILE, step):
                finish(0, partial, t, t < n, softcap, lse, 0, 0, S, t)
            cuda.syncthreads()
            if thread < BEST:  # by scores next to each other, which are in different banks
                largest(0, S, thread, BEST, (TILE - thread + BEST - 1) // BEST, best, thread)
            cuda.syncthreads()
            if thread == 0:
                new_top(0, best, 0, 1, BEST, top, factor, total, 0)
            cuda.syncthreads()
            for t in range(thread, TILE, step):
                weigh(0, S, t, top, 0)
            cuda.syncthreads()
            if thread < BEST:
                best[thread] = float32(0)
                add_up(0, S, thread, BEST, (TILE - thread + BEST - 1) // BEST, best, thread)
            if thread < PIECES * WIDTH:
                steps = (n + PIECES * UNROLL - 1) // (PIECES * UNROLL)
                add(0, thread % WIDTH, thread // WIDTH, v, (row + first) * DV, steps, n - 1, S,
                    factor, sums)  # fmt: skip
            cuda.syncthreads()
            if thread == 0:
                add_up(0, best, 0, 1, BEST, total, 0)
        if thread < PIECES * WIDTH:
            offer(0, thread % WIDTH, thread // WIDTH, sums, room)
        cuda.syncthreads()
        for i in range(thread, DV, step):
            other = query * DV + i if has_others else 0
            write(0, room, i, top, total, others, other, others_lse, query, has_others, out,
                  query * DV + i, lse)  # fmt: skip

    return compiled_kernel(add_exact)


# ---- stages --------------------------------------------------------------------------------------


def score_tokens(
    L: Any, program: Program, part: Index, keys: Any, first: Index, token: Index, last: Index,
    queries: Any, partial: Any, *, element: str, parts: int, own: int, at_once: int, slots: int,
    turns: int, pitch: int,
) -> None:  # fmt: skip
    """A thread's share of the scores of ``turns`` tokens, ``slots`` apart.

    Token 0 is at ``keys[first]``; tokens after the last are read as the last one.  The share of
    token t goes to ``partial[part * pitch + t]``.
    """
    places = [
        L.smaller(token + slots * turn, last) * program.head_dim + first for turn in range(turns)
    ]

    def multiply(i: Index, sums: list[Vector]) -> list[Vector]:
        start = i * (at_once * parts) + part
        columns = [start + j * parts for j in range(at_once)]
        loaded = [[stages.widened(L, keys, place + c, element) for c in columns]
                  for place in places]  # fmt: skip
        q = [L.splat(queries, c) for c in columns]
        for j in range(at_once):
            sums = [L.fma(row[j], q[j], s) for row, s in zip(loaded, sums, strict=True)]
        return sums

    sums = L.loop(own // at_once, [L.f(0.0)] * turns, multiply)
    for turn, total in enumerate(sums):
        L.put(partial, part * pitch + token + slots * turn, total)


def add_tokens(
    L: Any, program: Program, column: Index, piece: Index, values: Any, first: Index,
    steps: Index, last: Index, weights: Any, factor: Any, sums: Any, *, element: str, pieces: int,
    unroll: int, columns: int, width: int,
) -> None:  # fmt: skip
    """Weighted values of a thread's tokens, ``pieces`` apart, added to its coordinates' sums.

    Coordinates are ``width`` apart; those beyond the head_dim are read as its last one.  Weights of
    tokens after the last are 0.
    """
    d = program.head_dim
    coordinates = [L.smaller(column + r * width, d - 1) for r in range(columns)]
    shrink = L.splat(factor, 0)

    def add(i: Index, totals: list[Vector]) -> list[Vector]:
        tokens = [i * (unroll * pieces) + piece + u * pieces for u in range(unroll)]
        rows = [L.smaller(token, last) * d + first for token in tokens]
        loaded = [[stages.widened(L, values, row + c, element) for c in coordinates]
                  for row in rows]  # fmt: skip
        for token, row in zip(tokens, loaded, strict=True):
            weight = L.splat(weights, token)
            totals = [L.fma(x, weight, total) for x, total in zip(row, totals, strict=True)]
        return totals

    start = [L.splat(sums, r) * shrink for r in range(columns)]
    for r, total in enumerate(L.loop(steps, start, add)):
        L.put(sums, r, total)


def offer_sums(
    L: Any, program: Program, column: Index, piece: Index, sums: Any, room: Any, *, columns: int,
    width: int,
) -> None:  # fmt: skip
    """A thread's sums, to where the pieces of a coordinate meet."""
    d = program.head_dim
    for r in range(columns):
        c = column + r * width

        def put(r: int = r, c: Index = c) -> None:
            L.put(room, piece * d + c, L.splat(sums, r))

        L.when(c, d, put)


def write_result(
    L: Any, program: Program, room: Any, c: Index, top: Any, total: Any, others: Any,
    other: Index, others_lse: Any, query: Index, has_others: Index, out: Any, at: Index, lse: Any,
    *, element: str, pieces: int,
) -> None:  # fmt: skip
    """Coordinate c of a query's result over all tokens; coordinate 0 writes log-sum-exp, too."""
    value = L.splat(room, c)
    for piece in range(1, pieces):
        value = value + L.splat(room, c + piece * program.head_dim)
    nothing, zero = L.f(-3.0e38), L.f(0.0)
    best = L.splat(top, 0)
    # the others count as one more token; if they are NaN, so is the result
    logit = L.splat(others_lse, query) * L.f(attend.LOG2_E)
    logit = L.choose(has_others, logit, L.f(float("-inf")))
    now = L.where(logit > best, logit, best)
    share = L.where(best > nothing, L.exp2(best - now), zero)
    rest = L.where(logit <= nothing, zero, L.exp2(logit - now))
    whole = L.splat(total, 0) * share + rest
    value = value * share + L.where(logit <= nothing, zero, L.splat(others, other) * rest)
    empty = whole <= zero
    stages._narrow(L, L.where(empty, zero, L.divide(value, whole)), out, at, element)
    natural = (now + L.log2(whole)) * L.f(1 / attend.LOG2_E)
    natural = L.where(empty, L.f(float("-inf")), natural)
    L.when(c, 1, lambda: L.put(lse, query, natural))
