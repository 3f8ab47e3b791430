"""Encode and decode pages on the CPU: the loops around the lane programs of ``polar.py``.

A call works on a range of pages and touches nothing else, so that callers can split the pages over
threads.  Vectors are one flat buffer, with the element at which each row of pages (one batch
element and head) starts, and the strides of tokens and coordinates: any strided array is read and
written in place.
"""

from __future__ import annotations

import math

import numpy as np

from polarquant_nb.kernels.jit import inlined, kernel
from polarquant_nb.kernels.polar import (
    MAX_RADIUS,
    begin_second_round,
    descend,
    end_first_round,
    leaf_block,
    load_block,
    load_offset,
    multiply_dense,
    narrow_bfloat,
    narrow_half,
    pack,
    rotate_row,
    store_block,
    store_radii,
    sum_rows,
    tree_block,
    unmix_first_round,
    unmix_second_round,
    unpack,
    upper_tree,
    widen_bfloat,
    widen_half,
)
from polarquant_nb.kernels.radius_codes import choose_anchor, radius_range, store_radius_codes
from polarquant_nb.layout import PAGE

__all__ = ["BFLOAT", "FLOAT", "HALF", "decode_pages", "encode_pages", "row_signs"]

FLOAT, HALF, BFLOAT = 0, 1, 2
"""Kinds of elements: float32 or float64 as they are; float16 and bfloat16 as uint16."""

HADAMARD, HAAR = 1, 2


@kernel
def encode_pages(program, shape, source, kind, direct, bases, strides, seq_len, tables, words,
                 starts, frozen, first, last, counts):  # fmt: skip
    """Encode pages ``first .. last−1``, counted over rows and then pages.

    Parameters
    ----------
    program : Program
        Format, rotation and instruction set.
    shape : tuple of int
        See :func:`polarquant_nb.codec.kernel_shape`.
    source : 1-d array of float32, float64 or uint16
        The vectors' buffer.
    kind : int
        What its elements are: FLOAT, HALF or BFLOAT.
    direct : 1-d array of float32
        ``source`` again if it is float32 with neighbouring coordinates, else empty.
    bases : 1-d array of int64
        Element at which each row starts.
    strides : tuple of two ints
        Elements from token to token, and from coordinate to coordinate.
    seq_len : int
        Tokens of a row.
    tables : tuple of 1-d arrays
        Signs (see :func:`row_signs`), order, mix, dense matrix, thresholds; flat.
    words : 1-d array of uint32
        Memory that holds the pages, uninitialised.
    starts : 1-d array of int64
        Each page's first word.
    frozen : bool
        Whether the pages' offsets are there already, and to be kept.
    first, last : int
        Range of pages.
    counts : array of int64, shape ``(2,)``
        Increased by the number of rows that are not finite, and of saturated rows.
    """
    lanes, d, num_nodes, page_words, offset_word, offset_kind, anchor_word, rotation = shape
    all_signs, order, mix, dense, thresholds = tables
    T, U = np.empty(d * lanes, np.float32), np.empty(d * lanes, np.float32)
    rows = np.empty(d * PAGE, np.float32)
    codes = np.empty(num_nodes * lanes, np.uint32)
    R = np.empty(d // 2 * lanes, np.float32)
    radii = np.zeros(d // 2 * PAGE if anchor_word else 0, np.uint32)
    extremes, anchor = np.empty(2 * lanes, np.uint32), np.empty(lanes, np.uint32)
    bad = np.empty(PAGE, np.float32)
    live = np.empty(lanes, np.uint32)
    offset = np.zeros(d, np.float32)
    events = np.zeros(32, np.uint32)
    pages_per_row = (seq_len + PAGE - 1) // PAGE
    for page in range(first, last):
        start = page % pages_per_row * PAGE
        tokens = min(PAGE, seq_len - start)
        base = bases[page // pages_per_row] + start * strides[0]
        word = starts[page]
        signs = row_signs(all_signs, page // pages_per_row, d)
        bad[:] = np.float32(0)
        if tokens < PAGE:
            words[word : word + page_words] = np.uint32(0)
            radii[:] = np.uint32(0)
        # the page's rows: in place, or copied where they are not float32 or not all there
        if direct.size and tokens == PAGE:
            X, index, stride = direct, base, strides[0]
        else:
            _read_rows(program, source, kind, base, strides, tokens, d, rows)
            rows[tokens * d :] = np.float32(0)
            X, index, stride = rows, 0, d
        before = events.copy()
        without_long_rows = False
        while True:
            if frozen:
                if offset_kind:
                    load_offset(program, words, word + offset_word, offset)
            elif offset_kind:
                sum_rows(program, X, index, stride, tokens, offset)
                _finish_mean(X, index, stride, tokens, without_long_rows, offset)
                rotate_row(program, offset, signs, order, mix, dense)
                _store_offset(offset, words, word + offset_word, offset_kind)
            for lane in range(0, tokens, lanes):
                for b in range(d // 16):
                    load_block(program, X, index + lane * stride, stride, b, signs, T, bad, lane)
                Z = T
                if rotation == HADAMARD:
                    for c in range(16):
                        end_first_round(program, c, mix, T)
                    for c in range(16):
                        begin_second_round(program, c, signs, mix, order, T, U)
                    Z = U
                elif rotation == HAAR:
                    for b in range(d // 16):
                        multiply_dense(program, b, T, dense, U)
                    Z = U
                for t in range(lanes):
                    live[t] = np.uint32(0xFFFFFFFF) if lane + t < tokens else np.uint32(0)
                for b in range(d // 16):
                    tree_block(program, b, Z, offset, thresholds, codes, R)
                upper_tree(program, thresholds, codes, R)
                store_radii(program, R, bad, live, words, word, lane, radii, events)
                pack(program, codes, live, words, word, lane)
            # a row too long to store must not spoil the others' offset: once more without it
            saturated = False
            for t in range(16, 32):
                saturated |= events[t] != before[t]
            if frozen or not offset_kind or not saturated or without_long_rows:
                break
            without_long_rows = True
            for t in range(32):  # by hand: events[:] = before compiles Numba's message for seconds
                events[t] = before[t]
        if anchor_word:
            radius_range(program, radii, extremes)
            for t in range(1, lanes):
                extremes[0] = min(extremes[0], extremes[t])
                extremes[lanes] = max(extremes[lanes], extremes[lanes + t])
            choose_anchor(program, extremes, anchor)
            scale = words[word + anchor_word] if offset_kind == 1 else np.uint32(0)
            words[word + anchor_word] = anchor[0] << np.uint32(16) | scale & np.uint32(0xFFFF)
            store_radius_codes(program, radii, words, word)
    for t in range(16):
        counts[0] += np.int64(events[t])
        counts[1] += np.int64(events[16 + t])


@inlined
def row_signs(signs, row, d):
    """The signs of both rounds for a row: there are as many as kv heads with scales, or one."""
    first = row % (signs.size // (2 * d)) * 2 * d
    return signs[first : first + 2 * d]


@kernel
def decode_pages(program, shape, words, starts, tables, target, kind, direct, begin, end,
                 first, last):  # fmt: skip
    """Decode the part of pages ``first .. last−1`` that lies in tokens ``begin .. end−1``.

    Parameters
    ----------
    program : Program
        Format, rotation and instruction set.
    shape : tuple of int
        See :func:`polarquant_nb.codec.kernel_shape`.
    words : 1-d array of uint32
        Memory that holds the pages.
    starts : array of int64, shape ``(rows, pages)``
        Each page's first word.
    tables : tuple of 1-d arrays
        Signs (see :func:`row_signs`), inverse order, mix, dense matrix transposed, cosines; flat.
    target : 1-d array of float32, float64 or uint16
        The vectors, contiguous: rows, tokens ``begin .. end−1``, coordinates.
    kind : int
        What its elements are: FLOAT, HALF or BFLOAT.
    direct : 1-d array of float32
        ``target`` again if it is float32, else empty.
    begin, end : int
        Range of tokens.
    first, last : int
        Range of pages, counted over rows and then the pages that the tokens touch.
    """
    lanes, d, num_nodes, _, offset_word, offset_kind, _, rotation = shape
    all_signs, order, mix, dense, cosines = tables
    T, U = np.empty(d * lanes, np.float32), np.empty(d * lanes, np.float32)
    rows = np.empty(d * lanes, np.float32)
    codes = np.empty(num_nodes * lanes, np.uint32)
    R = np.empty(d // 2 * lanes, np.float32)
    offset = np.zeros(d, np.float32)
    first_page = begin // PAGE
    touched = (end + PAGE - 1) // PAGE - first_page
    for item in range(first, last):
        row, page = item // touched, first_page + item % touched
        word = starts[row, page]
        signs = row_signs(all_signs, row, d)
        if offset_kind:
            load_offset(program, words, word + offset_word, offset)
        for lane in range(0, PAGE, lanes):
            token = page * PAGE + lane
            low, high = max(begin, token), min(end, token + lanes)
            if low >= high:
                continue
            unpack(program, words, word, lane, codes)
            descend(program, words, word, lane, cosines, codes, R)
            for b in range(d // 16):
                leaf_block(program, b, codes, R, cosines, offset, T)
            Z = T
            if rotation == HADAMARD:
                for c in range(16):
                    unmix_second_round(program, c, signs, mix, T)
                for c in range(16):
                    unmix_first_round(program, c, mix, order, T, U)
                Z = U
            elif rotation == HAAR:
                for b in range(d // 16):
                    multiply_dense(program, b, T, dense, U)
                Z = U
            index = (row * (end - begin) + low - begin) * d
            if direct.size and high - low == lanes:
                for b in range(d // 16):
                    store_block(program, b, signs, Z, direct, index, d)
            else:
                for b in range(d // 16):
                    store_block(program, b, signs, Z, rows, 0, d)
                _write_rows(program, rows, (low - token) * d, high - low, d, target, kind, index)


# ---- page offsets --------------------------------------------------------------------------------


@kernel
def _finish_mean(X, index, stride, n, without_long_rows, sums):
    """Mean of ``n`` rows from their sums; where those are not finite, of the finite rows.

    ``without_long_rows`` leaves out the rows, too, whose norm is beyond float16.
    """
    d = sums.size
    finite = True
    for i in range(d):
        finite &= math.isfinite(sums[i])
    if not finite or without_long_rows:
        limit = np.float32(MAX_RADIUS**2) if without_long_rows else np.float32(np.inf)
        n = _sum_good_rows(X, index, stride, n, limit, sums)
        for i in range(d):  # if the sum itself overflows, so will the radii
            sums[i] = sums[i] if math.isfinite(sums[i]) else np.float32(0)
    for i in range(d):
        sums[i] /= np.float32(n)


@kernel
def _sum_good_rows(X, index, stride, n, limit, sums):
    """Sum of the finite rows with a squared norm up to ``limit``; their number, at least 1."""
    d, count = sums.size, 0
    for i in range(d):
        sums[i] = np.float32(0)
    for t in range(n):
        finite, squared = True, np.float32(0)
        for i in range(d):
            x = X[index + t * stride + i]
            finite &= math.isfinite(x)
            squared += x * x
        if finite and squared <= limit:
            count += 1
            for i in range(d):
                sums[i] += X[index + t * stride + i]
    return max(count, 1)


@kernel
def _store_offset(offset, words, word, kind):
    """Round the offset as it is stored, and store it: int8 and a float16 scale, or float16."""
    d = offset.size
    if kind == 2:
        for i in range(0, d, 2):
            low, high = float_to_half(offset[i]), float_to_half(offset[i + 1])
            words[word + i // 2] = np.uint32(low) | np.uint32(high) << np.uint32(16)
            offset[i], offset[i + 1] = half_to_float(low), half_to_float(high)
        return
    largest = np.float32(0)
    for i in range(d):
        largest = max(largest, abs(offset[i]))
    half = float_to_half(largest / np.float32(127))
    scale = half_to_float(half)
    for i in range(0, d, 4):
        packed = np.uint32(0)
        for k in range(4):
            code = np.float32(0)
            if scale > 0:
                code = np.rint(offset[i + k] / scale)
                code = min(max(code, np.float32(-127)), np.float32(127))
            offset[i + k] = code * scale
            packed |= np.uint32(np.uint32(np.int32(code)) & np.uint32(0xFF)) << np.uint32(8 * k)
        words[word + i // 4] = packed
    words[word + d // 4] = np.uint32(half)


# ---- elements of other types ---------------------------------------------------------------------


@inlined
def half_to_float(half):
    """Float32 of float16 bits."""
    magnitude = (np.uint32(half) & np.uint32(0x7FFF)) << np.uint32(13)
    if magnitude >= np.uint32(0x7C00 << 13):
        value = np.uint32(magnitude | np.uint32(0x7F800000)).view(np.float32)
    else:
        value = np.uint32(magnitude).view(np.float32) * np.float32(2.0**112)
    return -value if half & np.uint16(0x8000) else value


@inlined
def float_to_half(value):
    """Float16 bits of a float32, to nearest, ties to even; beyond 65504 the largest, NaN stays."""
    bits = np.float32(value).view(np.uint32)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    bits &= np.uint32(0x7FFFFFFF)
    if bits > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)
    elif bits >= np.uint32(0x477FF000):
        half = np.uint32(0x7BFF)
    elif bits >= np.uint32(113 << 23):
        odd = (bits >> np.uint32(13)) & np.uint32(1)
        half = (bits + odd + np.uint32(0xFFF) - np.uint32(112 << 23)) >> np.uint32(13)
    else:
        shifted = np.float32(np.uint32(bits).view(np.float32) + np.float32(0.5))
        half = np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000)
    return np.uint16(sign | half)


@inlined
def _bfloat_to_float(bits):
    return np.uint32(np.uint32(bits) << np.uint32(16)).view(np.float32)


@kernel
def _read_rows(program, source, kind, index, strides, n, d, rows):
    """``n`` rows of any kind and stride to float32, one after another."""
    for t in range(n):
        start, row = index + t * strides[0], t * d
        if strides[1] == 1 and kind == HALF:
            widen_half(program, source, start, rows, row)
        elif strides[1] == 1 and kind == BFLOAT:
            widen_bfloat(program, source, start, rows, row)
        elif kind == HALF:
            for i in range(d):
                rows[row + i] = half_to_float(np.uint16(source[start + i * strides[1]]))
        elif kind == BFLOAT:
            for i in range(d):
                rows[row + i] = _bfloat_to_float(np.uint16(source[start + i * strides[1]]))
        else:
            for i in range(d):
                rows[row + i] = np.float32(source[start + i * strides[1]])


@kernel
def _write_rows(program, rows, first, n, d, target, kind, index):
    """Rows of float32 to neighbouring elements of any kind."""
    for t in range(n):
        start, row = index + t * d, first + t * d
        if kind == HALF:
            narrow_half(program, rows, row, target, start)
        elif kind == BFLOAT:
            narrow_bfloat(program, rows, row, target, start)
        else:
            for i in range(d):
                target[start + i] = rows[row + i]
