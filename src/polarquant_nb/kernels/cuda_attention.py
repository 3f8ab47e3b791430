"""Attention straight on the codes, on a GPU: rotate queries, attend by ranges of pages, merge.

Flash decoding.  A block of threads takes a range of pages of one row and one group of queries, and
goes through it page by page with a running softmax.  Per page: keys are staged, a thread a token;
each piece of the block scores its share of the runs of 8 coordinates; weights are powers of two;
values are staged and added up, a thread for each run and a few tokens.  Ranges merge by their
log-sum-exp in another kernel, which rotates the results back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from polarquant_nb.codebooks import TABLE
from polarquant_nb.kernels import cuda_attention_stages as attend
from polarquant_nb.kernels import cuda_stages as stages
from polarquant_nb.kernels import polar
from polarquant_nb.kernels.cuda_attention_stages import RUN, RunLayout
from polarquant_nb.kernels.cuda_codec import SHARED_BYTES, THREADS, Tile
from polarquant_nb.kernels.cuda_lanes import ALIGNMENT, compiled_kernel, device_stage
from polarquant_nb.kernels.jit import Program
from polarquant_nb.layout import PAGE

__all__ = ["AttentionPlan", "make_attend", "make_merge", "make_rotate", "query_group"]

float32 = np.float32

QUERY_LANES = 8
"""Lanes of a query's tile, of which it is the first: as few as a tile can have."""


@dataclass(frozen=True)
class AttentionPlan:
    """Sizes of the attention kernel of two formats and a group of queries.

    Parameters
    ----------
    keys, values : Program
        Formats.
    group : int
        Queries that share a walk.
    threads : int
        Threads of a block; at least a thread for each run of 8 coordinates.
    """

    keys: Program
    values: Program
    group: int
    threads: int = THREADS

    @property
    def chunk(self) -> int:
        """Tokens staged at a time: as many as shared memory takes, a page at most; 0 for none."""
        fitting = [n for n in (128, 64, 32, 16, 8) if self.nbytes(n) <= SHARED_BYTES]
        return max((n for n in fitting if n <= 4 * self.threads), default=0)

    def step(self, program: Program) -> int:
        """Threads that share the tokens of a run of values, a power of two."""
        threads = self.threads // RunLayout(program).num_runs
        return min(32, 1 << (threads.bit_length() - 1)) if threads else 0

    def pitch(self, program: Program, chunk: int) -> int:
        """Elements from run to run: threads of different runs reach different banks."""
        return chunk + max(1, self.step(program))

    def staged(self, chunk: int) -> tuple[int, int]:
        """Radii and code words held at a time."""
        plans = [(RunLayout(p), self.pitch(p, chunk)) for p in (self.keys, self.values)]
        return (
            max(plan.num_runs * plan.radii * pitch for plan, pitch in plans),
            max(plan.num_runs * plan.words * pitch for plan, pitch in plans),
        )

    def partial(self, chunk: int) -> int:
        """Floats of the pieces' scores, and of the sums that are reduced at the end."""
        pieces = self.threads // min(32, chunk)
        runs, step = RunLayout(self.values).num_runs, self.step(self.values)
        return max(pieces * self.group * chunk, runs * RUN * (step + 1))

    def nbytes(self, chunk: int) -> int:
        """Shared memory of a block, bytes, at most."""
        tables = 2 * TABLE * (len(self.keys.level_bits) + len(self.values.level_bits))
        floats = self.keys.head_dim * (self.group + 1) + self.values.head_dim
        floats += tables + self.group * (PAGE + 16) + 3 * self.group + 64
        return 4 * (floats + sum(self.staged(chunk)) + self.partial(chunk))


def query_group(keys: Program, values: Program, queries: int, threads: int = THREADS) -> int:
    """How many queries share a walk: 1 to 4, or 8, as far as shared memory goes.

    Parameters
    ----------
    keys, values : Program
        Formats.
    queries : int
        Queries of a kv head; more than a group are several groups.
    threads : int
        Threads of a block.

    Returns
    -------
    int
        The group.
    """
    wanted = queries if queries <= 4 else 4 if queries % 8 else 8
    sizes = [g for g in (1, 2, 3, 4, 8) if g <= wanted]
    fitting = [g for g in sizes if AttentionPlan(keys, values, g, threads).chunk >= min(32, PAGE)]
    return max(fitting or [1])


def make_rotate(program: Program, element: str, threads: int = THREADS) -> Callable[..., Any]:
    """The kernel that rotates and scales queries, for formats with this rotation.

    Parameters
    ----------
    program : Program
        Format of the keys.
    element : {'float32', 'float16', 'bfloat16'}
        What queries are.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; a block for each query.
    """
    tile = Tile(program, threads, QUERY_LANES)
    D, N, LANES, PIECES = program.head_dim, tile.n, tile.lanes, tile.pieces
    BLOCKS, TILE, BAD = D // 16, D * N, PIECES * N
    HADAMARD, HAAR = program.rotation == "hadamard", program.rotation == "haar"

    stage = partial(device_stage, program=program, stride=N)

    load = stage(stages.load_scaled, element=element)
    start_block, end_first = stage(stages.start_block), stage(polar.end_first_round)
    second = stage(stages.begin_second_round, pieces=PIECES)
    dense_rows = stage(stages.multiply_dense, pieces=PIECES)
    end_rotation = stage(stages.end_rotation)

    def rotate_queries(q, out, signs, order, mix, dense, scale, num_heads, q_len, per_row, heads,
                       batch_stride, head_stride, query_stride, coordinate_stride):  # fmt: skip
        """Queries ``(batch, num_heads, q_len, d)`` of any strides, to neighbouring vectors."""
        T = cuda.shared.array(TILE, float32, alignment=ALIGNMENT)
        bad = cuda.shared.array(BAD, float32, alignment=ALIGNMENT)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        lane, piece = thread % LANES, thread // LANES
        query = cuda.blockIdx.x
        batch, rest = query // (num_heads * q_len), query % (num_heads * q_len)
        index = batch * batch_stride + rest // q_len * head_stride + rest % q_len * query_stride
        for i in range(thread, D, step):
            load(0, q, index + i * coordinate_stride, scale, T, i * N)
        bad[piece * N + lane] = float32(0)
        sign = query // per_row % heads * (2 * D)
        cuda.syncthreads()
        for b in range(piece, BLOCKS, PIECES):
            start_block(lane, b, signs, sign, T, bad, piece * N)
        cuda.syncthreads()
        if HADAMARD:
            for c in range(piece, 16, PIECES):
                end_first(lane, c, mix, T)
            cuda.syncthreads()
            second(lane, piece, signs, sign, mix, order, T)
            cuda.syncthreads()
            for b in range(piece, BLOCKS, PIECES):
                end_rotation(lane, b, T)
        elif HAAR:
            dense_rows(lane, piece, dense, T)
        cuda.syncthreads()
        for i in range(thread, D, step):
            out[query * D + i] = T[i * N]

    return compiled_kernel(rotate_queries)


def make_attend(
    keys: Program, values: Program, group: int, threads: int = THREADS
) -> Callable[..., Any]:
    """The attention kernel of two formats.

    Parameters
    ----------
    keys, values : Program
        Formats.
    group : int
        From :func:`query_group`.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; blocks for rows and groups, and for ranges.
    """
    plan = AttentionPlan(keys, values, group, threads)
    CHUNK = plan.chunk
    LANES = min(32, CHUNK)
    PIECES, G = threads // LANES, group
    D, DV = keys.head_dim, values.head_dim
    K_RUNS, STEP = RunLayout(keys).num_runs, plan.step(values)
    RADII, CODES = plan.staged(CHUNK)
    PARTIAL, QUERIES, SCORES = plan.partial(CHUNK), D * G, PAGE * G
    K_TABLE, V_TABLE = (2 * TABLE * len(p.level_bits) for p in (keys, values))
    PARTS = min(16, threads // G)
    BEST, SUMS = PARTS * G, RUN * G
    K_OFFSET, V_OFFSET = keys.offset is not None, values.offset is not None
    K_OFFSET_WORD, V_OFFSET_WORD = (p.layout.offset_word for p in (keys, values))

    def stage(program: Program, function: Callable[..., None], **constants: Any) -> Any:
        return device_stage(function, program, 1, **constants)

    k_pitch, v_pitch = plan.pitch(keys, CHUNK), plan.pitch(values, CHUNK)
    stage_key = stage(keys, attend.stage_token, pitch=k_pitch)
    stage_value = stage(values, attend.stage_token, pitch=v_pitch)
    k_offset, v_offset = stage(keys, stages.offset_value), stage(values, stages.offset_value)
    score_runs = stage(keys, attend.score_runs, group=G, tokens=CHUNK // LANES, pieces=PIECES,
                       pitch=k_pitch, chunk=CHUNK)  # fmt: skip
    finish_score = stage(keys, attend.finish_score, group=G, pieces=PIECES, chunk=CHUNK)
    largest, new_top = stage(keys, attend.largest_score), stage(keys, attend.new_top)
    weigh, add_up = stage(keys, attend.weigh), stage(keys, attend.add_up)
    add_runs = stage(values, attend.add_runs, group=G, count=CHUNK // STEP, step=STEP,
                     pitch=v_pitch)  # fmt: skip
    reduce_sums = stage(values, attend.reduce_sums, group=G, step=STEP, threads=threads)

    def attend_pages(queries, k_words, k_starts, k_cosines, v_words, v_starts, v_cosines, lengths,
                     bias, outs, tops, totals, per_row, groups, k_columns, v_columns, range_pages,
                     softcap, kv_heads, q_len, has_bias, batch_stride, head_stride, query_stride,
                     token_stride, causal):  # fmt: skip
        """Attention of ``per_row`` queries a row to a range of pages.

        Block x is a row's group of queries, block y a range.  ``queries`` are rotated and scaled,
        rows, queries, coordinates; ``lengths`` are tokens of rows.  With ``causal`` the queries are
        the last ``q_len`` of these and of ``causal - 1`` tokens after them.  For each item and
        query: a vector, and what it merges by.
        """
        Q = cuda.shared.array(QUERIES, float32, alignment=ALIGNMENT)
        k_table = cuda.shared.array(K_TABLE, float32, alignment=ALIGNMENT)
        v_table = cuda.shared.array(V_TABLE, float32, alignment=ALIGNMENT)
        R = cuda.shared.array(RADII, float32, alignment=ALIGNMENT)
        C = cuda.shared.array(CODES, np.uint32, alignment=ALIGNMENT)
        partial = cuda.shared.array(PARTIAL, float32, alignment=ALIGNMENT)
        S = cuda.shared.array(SCORES, float32, alignment=ALIGNMENT)
        k_mean = cuda.shared.array(D, float32, alignment=ALIGNMENT)
        v_mean = cuda.shared.array(DV, float32, alignment=ALIGNMENT)
        best = cuda.shared.array(BEST, float32, alignment=ALIGNMENT)
        top = cuda.shared.array(G, float32, alignment=ALIGNMENT)
        total = cuda.shared.array(G, float32, alignment=ALIGNMENT)
        factor = cuda.shared.array(G, float32, alignment=ALIGNMENT)
        sums = cuda.local.array(SUMS, float32)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        lane, piece = thread % LANES, thread // LANES
        run, own = thread // STEP, thread % STEP
        row, first_query = cuda.blockIdx.x // groups, cuda.blockIdx.x % groups * G
        item = cuda.blockIdx.x * cuda.gridDim.y + cuda.blockIdx.y
        seq_len = lengths[row]
        for i in range(thread, QUERIES, step):
            coordinate, g = i // G, i % G
            Q[i] = float32(0)
            if first_query + g < per_row:
                Q[i] = queries[(row * per_row + first_query + g) * D + coordinate]
        for i in range(thread, K_TABLE, step):
            k_table[i] = k_cosines[i]
        for i in range(thread, V_TABLE, step):
            v_table[i] = v_cosines[i]
        if thread < G:
            top[thread] = float32(-np.inf)
            total[thread] = float32(0)
        for i in range(SUMS):
            sums[i] = float32(0)
        begin = cuda.blockIdx.y * range_pages
        end = min(begin + range_pages, (seq_len + PAGE - 1) // PAGE)
        for page in range(begin, end):
            k_word = k_starts[row * k_columns + page]
            v_word = v_starts[row * v_columns + page]
            tokens = min(PAGE, seq_len - page * PAGE)
            if K_OFFSET:
                for i in range(thread, D, step):
                    k_offset(0, k_words, k_word + K_OFFSET_WORD, i, k_mean)
            if V_OFFSET:
                for i in range(thread, DV, step):
                    v_offset(0, v_words, v_word + V_OFFSET_WORD, i, v_mean)
            for chunk in range(0, PAGE, CHUNK):
                cuda.syncthreads()
                for t in range(thread, CHUNK, step):
                    stage_key(0, k_words, k_word, chunk + t, chunk + t < tokens, k_table, R, C, t)
                cuda.syncthreads()
                score_runs(lane, piece, (K_RUNS - piece + PIECES - 1) // PIECES, k_table, R, C, Q,
                           k_mean, partial)  # fmt: skip
                cuda.syncthreads()
                for i in range(thread, CHUNK * G, step):
                    g, t = i // CHUNK, i % CHUNK
                    query, token = first_query + g, page * PAGE + chunk + t
                    limit = seq_len
                    if causal:
                        limit = seq_len - q_len + query % q_len + causal
                    seen = query < per_row and token < min(limit, seq_len)
                    head = row % kv_heads * (per_row // q_len) + query // q_len
                    place = (row // kv_heads * batch_stride + head * head_stride
                             + query % q_len * query_stride + token * token_stride)  # fmt: skip
                    finish_score(0, partial, i, seen, softcap, bias, place, has_bias and seen, S,
                                 (chunk + t) * G + g)  # fmt: skip
            cuda.syncthreads()
            if thread < BEST:
                # threads take scores next to each other, which are in different banks
                count = (SCORES - thread + BEST - 1) // BEST
                largest(0, S, thread, BEST, count, best, thread)
            cuda.syncthreads()
            if thread < G:
                new_top(0, best, thread, G, PARTS, top, factor, total, thread)
            cuda.syncthreads()
            for i in range(thread, SCORES, step):
                weigh(0, S, i, top, i % G)
            for chunk in range(0, PAGE, CHUNK):
                cuda.syncthreads()
                for t in range(thread, CHUNK, step):
                    stage_value(0, v_words, v_word, chunk + t, chunk + t < tokens, v_table, R, C, t)
                cuda.syncthreads()
                if chunk == 0 and thread < BEST:
                    count = (SCORES - thread + BEST - 1) // BEST
                    best[thread] = float32(0)
                    add_up(0, S, thread, BEST, count, best, thread)
                if run < DV // RUN:
                    add_runs(own, run, v_table, R, C, S, chunk, v_mean, factor, chunk == 0, sums)
            cuda.syncthreads()
            if thread < G:
                add_up(0, best, thread, G, PARTS, total, thread)
        cuda.syncthreads()
        if thread < G:
            tops[item * G + thread] = top[thread]
            totals[item * G + thread] = total[thread]
        reduce_sums(own, thread, run, sums, partial, outs, item * (G * DV))

    return compiled_kernel(attend_pages)


def make_merge(
    program: Program, element: str, group: int, threads: int = THREADS
) -> Callable[..., Any]:
    """The kernel that merges ranges and rotates results back.

    Parameters
    ----------
    program : Program
        Format of the values.
    element : {'float32', 'float16', 'bfloat16'}
        What results are.
    group : int
        Queries of a group.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; a block for each query.
    """
    tile = Tile(program, threads, QUERY_LANES)
    D, N, LANES, PIECES = program.head_dim, tile.n, tile.lanes, tile.pieces
    BLOCKS, TILE, G = D // 16, D * N, group
    HADAMARD, HAAR = program.rotation == "hadamard", program.rotation == "haar"

    stage = partial(device_stage, program=program, stride=N)

    merge = stage(attend.merge_range, group=G)
    start_leaves = stage(stages.start_leaves)
    unmix_second = stage(stages.unmix_second_round)
    unmix_first = stage(stages.unmix_first_round, pieces=PIECES)
    dense_rows = stage(stages.multiply_dense, pieces=PIECES)
    finish_rows = stage(stages.finish_rows)
    store = stage(stages.store_tile, element=element, lanes=LANES, threads=threads)

    def merge_ranges(outs, tops, totals, out, lse, signs, inverse_order, mix, dense, per_row,
                     groups, ranges, heads):  # fmt: skip
        """Results of queries, rows of ``per_row`` one after another.

        A block for each, as ranges have to be gone through one by one.
        """
        T = cuda.shared.array(TILE, float32, alignment=ALIGNMENT)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        lane, piece = thread % LANES, thread // LANES
        query = cuda.blockIdx.x
        row, n = query // per_row, query % per_row
        item = (row * groups + n // G) * ranges * G + n % G
        for i in range(thread, D, step):
            merge(0, outs, tops, totals, item, ranges, i, T, i * N, lse, query)
        sign = query // per_row % heads * (2 * D)
        cuda.syncthreads()
        if HADAMARD:
            for b in range(piece, BLOCKS, PIECES):
                start_leaves(lane, b, T)
            cuda.syncthreads()
            for c in range(piece, 16, PIECES):
                unmix_second(lane, c, signs, sign, mix, T)
            cuda.syncthreads()
            unmix_first(lane, piece, mix, inverse_order, T)
            cuda.syncthreads()
            for b in range(piece, BLOCKS, PIECES):
                finish_rows(lane, b, signs, sign, T)
        elif HAAR:
            dense_rows(lane, piece, dense, T)
        cuda.syncthreads()
        store(0, thread, T, 0, 1, out, query * D)

    return compiled_kernel(merge_ranges)
