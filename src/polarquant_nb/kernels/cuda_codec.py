"""Encode and decode pages on a GPU: a block of threads for each page, a thread for each token.

A page goes through shared memory tile by tile.  Threads read and write global memory next to each
other: vectors by coordinate, page rows by token.  Kernels are made for a format and an element
type; their sizes are constants of the code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numba import cuda

from polarquant_nb.kernels import cuda_stages as stages
from polarquant_nb.kernels import polar
from polarquant_nb.kernels.cuda_lanes import ALIGNMENT, compiled_kernel, device_stage
from polarquant_nb.kernels.jit import Program
from polarquant_nb.layout import PAGE

__all__ = ["SHARED_BYTES", "THREADS", "Tile", "make_decode", "make_encode"]

THREADS = 128
"""Threads of a block."""

SHARED_BYTES = 48 * 1024
"""Shared memory that a block may have without asking for more."""

uint8, uint32, float32 = np.uint8, np.uint32, np.float32


@dataclass(frozen=True)
class Tile:
    """Sizes of a tile: as many tokens as shared memory takes, of 32, 16 and 8.

    Parameters
    ----------
    program : Program
        Format.
    threads : int
        Threads of a block; fewer in the simulator, where each costs time.
    most : int
        Tokens at most.
    """

    program: Program
    threads: int = THREADS
    most: int = 32

    @property
    def lanes(self) -> int:
        """Tokens of a tile."""
        fitting = [n for n in (32, 16, 8) if n <= self.most and self._nbytes(n) <= SHARED_BYTES]
        return max(n for n in fitting if self.threads // n <= 16)

    @property
    def n(self) -> int:
        """Elements from one vector of the tile to the next."""
        return self.lanes + 1

    @property
    def pieces(self) -> int:
        """Groups of threads that share out the work on a tile."""
        return self.threads // self.lanes

    @property
    def num_nodes(self) -> int:
        """Codes of a vector."""
        return self.program.layout.num_nodes

    @property
    def radii(self) -> int:
        """Radii that are there at a time: of blocks of 16 coordinates, or of the format's."""
        return self.program.head_dim >> min(4, len(self.program.level_bits))

    def _nbytes(self, lanes: int) -> int:
        d = self.program.head_dim
        return (4 * d + 4 * self.radii + self.num_nodes) * (lanes + 1) + 8 * d + 2048


def make_encode(program: Program, element: str, threads: int = THREADS) -> Callable[..., Any]:
    """The encoder of a format.

    Parameters
    ----------
    program : Program
        Format; its instruction set does not matter.
    element : {'float32', 'float16', 'bfloat16'}
        What is encoded.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; a block for each page.
    """
    tile = Tile(program, threads)
    layout = program.layout
    D, N, LANES, PIECES = program.head_dim, tile.n, tile.lanes, tile.pieces
    BLOCKS = D // 16
    TILE, CODES, RADII, BAD = D * N, tile.num_nodes * N, tile.radii * N, PIECES * N
    EVENTS, LIVE = 2 * N, N
    PAGE_WORDS, OFFSET_WORD = layout.num_words, layout.offset_word
    OFFSET, HADAMARD = program.offset is not None, program.rotation == "hadamard"
    HAAR, ANCHOR = program.rotation == "haar", layout.anchor_word is not None

    stage = partial(device_stage, program=program, stride=N)

    load = stage(stages.load_tile, element=element, lanes=LANES, threads=threads)
    start_block = stage(stages.start_block)
    end_first = stage(polar.end_first_round)
    second = stage(stages.begin_second_round, pieces=PIECES)
    dense_rows = stage(stages.multiply_dense, pieces=PIECES)
    end_rotation = stage(stages.end_rotation)
    tree_block, upper_tree = stage(polar.tree_block), stage(polar.upper_tree)
    store_radii = stage(stages.store_radii, pieces=PIECES)
    pack_rows = stage(stages.pack_rows, pieces=PIECES)
    sum_column = stage(stages.sum_column, element=element)
    judge_row = stage(stages.judge_row, element=element)
    divide, round_offset = stage(stages.divide_sum), stage(stages.round_offset)
    offset_value = stage(stages.offset_value)
    start_range = stage(stages.start_range)
    choose_anchor = stage(stages.choose_anchor, lanes=LANES)

    def encode_pages(source, words, starts, signs, order, mix, dense, thresholds, events, seq_len,
                     pages_per_row, heads, inner, outer_stride, inner_stride, token_stride,
                     coordinate_stride, frozen):  # fmt: skip
        """Encode ``gridDim.x`` pages, counted over rows and then pages.

        Row r starts at element ``r // inner * outer_stride + r % inner * inner_stride`` of
        ``source``, and takes the signs of head ``r % heads``; events are rows that are not finite
        and saturated rows, two numbers for each page.
        """
        T = cuda.shared.array(TILE, float32, alignment=ALIGNMENT)
        R = cuda.shared.array(RADII, float32, alignment=ALIGNMENT)
        C = cuda.shared.array(CODES, uint8, alignment=ALIGNMENT)
        bad = cuda.shared.array(BAD, float32, alignment=ALIGNMENT)
        live = cuda.shared.array(LIVE, uint32, alignment=ALIGNMENT)
        counts = cuda.shared.array(EVENTS, uint32, alignment=ALIGNMENT)
        extremes = cuda.shared.array(EVENTS if ANCHOR else 1, uint32, alignment=ALIGNMENT)
        sums = cuda.shared.array(D, float32, alignment=ALIGNMENT)
        offset = cuda.shared.array(D, float32, alignment=ALIGNMENT)
        good = cuda.shared.array(PAGE, uint32, alignment=ALIGNMENT)
        flags = cuda.shared.array(1, uint32, alignment=ALIGNMENT)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        lane, piece = thread % LANES, thread // LANES
        page = cuda.blockIdx.x
        row, first = page // pages_per_row, page % pages_per_row * PAGE
        tokens = min(PAGE, seq_len - first)
        base = row // inner * outer_stride + row % inner * inner_stride + first * token_stride
        sign = row % heads * (2 * D)
        word = starts[page]
        if tokens < PAGE:
            for i in range(thread, PAGE_WORDS, step):
                words[word + i] = uint32(0)
        for i in range(thread, EVENTS, step):
            counts[i] = uint32(0)
        if ANCHOR and piece == 0:
            start_range(lane, extremes)
        if OFFSET and frozen:
            for i in range(thread, D, step):
                offset_value(0, words, word + OFFSET_WORD, i, offset)
        # the mean is rotated as tokens are, as the first lane of a tile of its own
        begin = -LANES if OFFSET and not frozen else 0
        tile_start, without_long_rows = begin, 0
        # what 8-bit radii become depends on all of a page's: a first pass sees their range
        measuring = ANCHOR
        while True:
            cuda.syncthreads()
            if OFFSET and tile_start < 0:
                for t in range(thread, PAGE, step):
                    good[t] = uint32(1)
                for i in range(thread, TILE, step):
                    T[i] = float32(0)
                if thread == 0:
                    flags[0] = uint32(0)
                cuda.syncthreads()
                for i in range(thread, D, step):
                    sum_column(0, source, base + i * coordinate_stride, token_stride, tokens,
                               good, 0, sums, i, flags)  # fmt: skip
                cuda.syncthreads()
                if without_long_rows or flags[0] > uint32(0):
                    for t in range(thread, tokens, step):
                        judge_row(0, source, base + t * token_stride, coordinate_stride,
                                  without_long_rows, good, t)  # fmt: skip
                    cuda.syncthreads()
                    for i in range(thread, D, step):
                        sum_column(0, source, base + i * coordinate_stride, token_stride, tokens,
                                   good, 1, sums, i, flags)  # fmt: skip
                    cuda.syncthreads()
                number = 0
                for t in range(tokens):
                    number += int(good[t])
                for i in range(thread, D, step):
                    divide(0, sums, i, max(number, 1), T)
            else:
                load(0, thread, source, base + tile_start * token_stride, token_stride,
                     coordinate_stride, tokens - tile_start, T)  # fmt: skip
                bad[piece * N + lane] = float32(0)
                if piece == 0:
                    live[lane] = uint32(0xFFFFFFFF) if tile_start + lane < tokens else uint32(0)
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
            elif HAAR:
                dense_rows(lane, piece, dense, T)
                cuda.syncthreads()
            if OFFSET and tile_start < 0:
                if HADAMARD:
                    for b in range(piece, BLOCKS, PIECES):
                        end_rotation(lane, b, T)
                    cuda.syncthreads()
                for i in range(thread, D, step):
                    round_offset(0, T, i, words, word + OFFSET_WORD, offset)
            else:
                for b in range(piece, BLOCKS, PIECES):
                    tree_block(lane, b, T, offset, thresholds, C, R)
                cuda.syncthreads()
                if piece == 0:
                    upper_tree(lane, thresholds, C, R)
                    store_radii(lane, R, bad, live, words, word, tile_start, counts, extremes)
                cuda.syncthreads()
                pack_rows(lane, piece, live, C, words, word, tile_start)
            tile_start += LANES
            if tile_start >= tokens:
                saturated = 0
                for t in range(LANES):
                    saturated += int(counts[N + t])
                if OFFSET and not frozen and not without_long_rows and saturated > 0:
                    # a row too long to store must not spoil the others' offset: again without it
                    tile_start, without_long_rows = begin, 1
                elif ANCHOR and measuring:
                    tile_start, measuring = 0, False
                    if thread == 0:
                        choose_anchor(0, extremes, words, word)
                else:
                    break
                cuda.syncthreads()
                for i in range(thread, EVENTS, step):
                    counts[i] = uint32(0)
                if ANCHOR and piece == 0:
                    start_range(lane, extremes)
        if thread < 2:
            total = 0
            for t in range(LANES):
                total += int(counts[thread * N + t])
            events[2 * page + thread] = total

    return compiled_kernel(encode_pages)


def make_decode(program: Program, element: str, threads: int = THREADS) -> Callable[..., Any]:
    """The decoder of a format.

    Parameters
    ----------
    program : Program
        Format; its instruction set does not matter.
    element : {'float32', 'float16', 'bfloat16'}
        What vectors become.
    threads : int
        Threads of a block.

    Returns
    -------
    callable
        Kernel; a block for each page that the tokens touch.
    """
    tile = Tile(program, threads)
    layout = program.layout
    D, N, LANES, PIECES = program.head_dim, tile.n, tile.lanes, tile.pieces
    BLOCKS = D // 16
    TILE, CODES, RADII = D * N, tile.num_nodes * N, tile.radii * N
    OFFSET_WORD, OFFSET = layout.offset_word, program.offset is not None
    HADAMARD, HAAR = program.rotation == "hadamard", program.rotation == "haar"

    stage = partial(device_stage, program=program, stride=N)

    unpack_rows = stage(stages.unpack_rows, pieces=PIECES)
    descend, leaf_block = stage(polar.descend), stage(polar.leaf_block)
    unmix_second = stage(stages.unmix_second_round)
    unmix_first = stage(stages.unmix_first_round, pieces=PIECES)
    dense_rows = stage(stages.multiply_dense, pieces=PIECES)
    finish_rows, offset_value = stage(stages.finish_rows), stage(stages.offset_value)
    store = stage(stages.store_tile, element=element, lanes=LANES, threads=threads)

    def decode_pages(words, starts, signs, inverse_order, mix, dense, cosines, target, begin, end,
                     first_page, touched, columns, heads):  # fmt: skip
        """Decode tokens ``begin .. end−1``, to rows, tokens, coordinates of ``target``.

        Blocks are counted over rows and then the ``touched`` pages from ``first_page`` on;
        ``starts`` has ``columns`` pages a row.
        """
        T = cuda.shared.array(TILE, float32, alignment=ALIGNMENT)
        R = cuda.shared.array(RADII, float32, alignment=ALIGNMENT)
        C = cuda.shared.array(CODES, uint8, alignment=ALIGNMENT)
        offset = cuda.shared.array(D, float32, alignment=ALIGNMENT)
        # blockDim, not a constant: NVVM would unroll loops, and hoist what fills all registers
        thread, step = cuda.threadIdx.x, cuda.blockDim.x
        lane, piece = thread % LANES, thread // LANES
        row, page = cuda.blockIdx.x // touched, first_page + cuda.blockIdx.x % touched
        word = starts[row * columns + page]
        sign = row % heads * (2 * D)
        if OFFSET:
            for i in range(thread, D, step):
                offset_value(0, words, word + OFFSET_WORD, i, offset)
        for tile_start in range(0, PAGE, LANES):
            token = page * PAGE + tile_start
            if token + LANES > begin and token < end:
                unpack_rows(lane, piece, words, word, tile_start, C)
                cuda.syncthreads()
                if piece == 0:
                    descend(lane, words, word, tile_start, cosines, C, R)
                cuda.syncthreads()
                for b in range(piece, BLOCKS, PIECES):
                    leaf_block(lane, b, C, R, cosines, offset, T)
                cuda.syncthreads()
                if HADAMARD:
                    for c in range(piece, 16, PIECES):
                        unmix_second(lane, c, signs, sign, mix, T)
                    cuda.syncthreads()
                    unmix_first(lane, piece, mix, inverse_order, T)
                    cuda.syncthreads()
                    for b in range(piece, BLOCKS, PIECES):
                        finish_rows(lane, b, signs, sign, T)
                    cuda.syncthreads()
                elif HAAR:
                    dense_rows(lane, piece, dense, T)
                    cuda.syncthreads()
                place = (row * (end - begin) + token - begin) * D
                store(0, thread, T, begin - token, end - token, target, place)
                cuda.syncthreads()

    return compiled_kernel(decode_pages)
