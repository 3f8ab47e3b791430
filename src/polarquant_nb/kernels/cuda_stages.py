"""Stages of the codec that a GPU cuts differently: in place in shared memory, work split by pieces.

A tile is ``lanes`` tokens in shared memory, coordinate i of lane t at ``Z[i * n + t]``; n is one
more than the number of lanes, so that reading a row and reading a column both reach all banks.
A block of threads is as many *pieces* of ``lanes`` threads; blocks and columns of coordinates are
dealt out to the pieces.  The arithmetic is that of ``polar.py``, in its order.
"""

from __future__ import annotations

from typing import Any

from polarquant_nb.kernels import polar
from polarquant_nb.kernels.array_lanes import Index, Vector
from polarquant_nb.kernels.jit import Program
from polarquant_nb.kernels.radius_codes import anchor_of, code_writer, empty_range, widen_range
from polarquant_nb.radii import NAN_BITS

__all__ = [
    "begin_second_round",
    "choose_anchor",
    "divide_sum",
    "end_rotation",
    "finish_rows",
    "half_bits",
    "judge_row",
    "load_scaled",
    "load_tile",
    "multiply_dense",
    "offset_value",
    "pack_rows",
    "round_offset",
    "start_block",
    "start_leaves",
    "start_range",
    "store_radii",
    "store_tile",
    "sum_column",
    "unmix_first_round",
    "unmix_second_round",
    "unpack_rows",
    "widened",
]


# ---- elements ------------------------------------------------------------------------------------


def load_tile(
    L: Any, program: Program, thread: Index, source: Any, index: Index, token_stride: Index,
    coordinate_stride: Index, tokens: Index, Z: Any, *, element: str, lanes: int, threads: int,
) -> None:  # fmt: skip
    """A tile's tokens, of which the first is at ``index``; zeros beyond ``tokens``.

    Threads next to each other read numbers next to each other.
    """
    d = program.head_dim

    def load(k: Index, nothing: list[Vector]) -> list[Vector]:
        token, c = L.divided(k * threads + thread, d)
        at = c * L.n + token
        L.put(Z, at, L.f(0.0))
        place = token * token_stride + c * coordinate_stride + index
        L.when(token, tokens, lambda: L.put(Z, at, widened(L, source, place, element)))
        return nothing

    L.loop(d * lanes // threads, [], load)


def load_scaled(
    L: Any, program: Program, source: Any, index: Index, scale: Vector, Z: Any, at: Index, *,
    element: str,
) -> None:  # fmt: skip
    """One number of the source, as float32, times ``scale``, to ``Z[at]``."""
    L.put(Z, at, widened(L, source, index, element) * scale)


def widened(L: Any, source: Any, index: Index, element: str) -> Vector:
    """One number of the source, as float32."""
    if element == "float32":
        return L.splat(source, index)
    bits = L.load_lanes(source, 0, index, 16)
    return L.widen_half(bits) if element == "float16" else L.as_float(bits << L.u(16))


def store_tile(
    L: Any, program: Program, thread: Index, Z: Any, first: Index, last: Index, target: Any,
    index: Index, *, element: str, lanes: int, threads: int,
) -> None:  # fmt: skip
    """Tokens ``first .. last−1`` of a tile, of which token 0 goes to ``index``."""
    d = program.head_dim

    def store(k: Index, nothing: list[Vector]) -> list[Vector]:
        token, c = L.divided(k * threads + thread, d)
        L.when(token, last, lambda: L.unless(token, first, lambda: put(token, c)))
        return nothing

    def put(token: Index, c: Index) -> None:
        _narrow(L, L.splat(Z, c * L.n + token), target, token * d + c + index, element)

    L.loop(d * lanes // threads, [], store)


def _narrow(L: Any, x: Vector, target: Any, index: Index, element: str) -> None:
    if element == "float32":
        L.put(target, index, x)
    elif element == "float16":
        L.store_lanes(target, 0, index, 16, half_bits(L, x))
    else:
        bits = L.as_uint(x)
        nan = (bits & L.u(0x7FFFFFFF)) >= L.u(0x7F800001)
        rounded = (bits + ((bits >> L.u(16)) & L.u(1)) + L.u(0x7FFF)) >> L.u(16)
        L.store_lanes(target, 0, index, 16, L.where(nan, L.u(0x7FC0), rounded))


def half_bits(L: Any, x: Vector) -> Vector:
    """Float16 bits, to nearest, ties to even; beyond 65504 the largest, NaN stays."""
    sign = (L.as_uint(x) >> L.u(16)) & L.u(0x8000)
    magnitude = L.absolute(x)
    nan = L.as_uint(magnitude) >= L.u(0x7F800001)
    fits = magnitude <= L.f(polar.MAX_RADIUS)
    half = polar._float_to_half(L, L.where(fits, magnitude, L.f(polar.MAX_RADIUS)))
    return L.where(nan, L.u(0x7E00), half) | sign


# ---- rotation ------------------------------------------------------------------------------------


def start_block(
    L: Any, program: Program, b: Index, signs: Any, first_sign: Index, Z: Any, bad: Any, at: Index
) -> None:
    """``polar.load_block`` on a tile that is in shared memory already."""
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    suspects = x
    if program.rotation == "hadamard":
        x = [x[k] * L.splat(signs, first_sign + b * 16 + k) for k in range(16)]
        x = polar._butterflies(L, x, (1, 2, 4, 8))
        suspects = x[:1]
    nan = L.load(bad, at)
    for suspect in suspects:
        nan = L.fma(suspect, L.f(0.0), nan)
    L.store(bad, at, nan)
    polar._store_block(L, Z, b, x)


def begin_second_round(
    L: Any, program: Program, piece: Index, signs: Any, first_sign: Index, mix: Any, order: Any,
    Z: Any, *, pieces: int,
) -> None:  # fmt: skip
    """``polar.begin_second_round`` in place: all columns are read before one is written."""
    d = program.head_dim
    columns = [piece + j * pieces for j in range(16 // pieces)]
    held = []
    for c in columns:
        x = polar._load_in_order(L, program, c, order, Z)
        x = [x[k] * L.splat(signs, first_sign + c + (d + 16 * k)) for k in range(d // 16)]
        held.append(polar._second_half(L, program, mix, x, inverse=False))
    L.barrier()
    for c, x in zip(columns, held, strict=True):
        polar._store_column(L, c, Z, x)


def unmix_first_round(
    L: Any, program: Program, piece: Index, mix: Any, order: Any, Z: Any, *, pieces: int
) -> None:
    """``polar.unmix_first_round`` in place."""
    columns = [piece + j * pieces for j in range(16 // pieces)]
    held = []
    for c in columns:
        x = polar._load_in_order(L, program, c, order, Z)
        held.append(polar._second_half(L, program, mix, x, inverse=True))
    L.barrier()
    for c, x in zip(columns, held, strict=True):
        polar._store_column(L, c, Z, x)


def unmix_second_round(
    L: Any, program: Program, c: Index, signs: Any, first_sign: Index, mix: Any, Z: Any
) -> None:
    """``polar.unmix_second_round`` with signs that start anywhere."""
    d = program.head_dim
    x = polar._first_half(L, program, c, mix, Z, inverse=True)
    x = [x[k] * L.splat(signs, first_sign + c + (d + 16 * k)) for k in range(d // 16)]
    polar._store_column(L, c, Z, x)


def multiply_dense(L: Any, program: Program, piece: Index, S: Any, Z: Any, *, pieces: int) -> None:
    """``polar.multiply_dense`` in place: a piece's blocks are summed up before one is written."""
    d = program.head_dim
    blocks = [piece + j * pieces for j in range(-(-d // (16 * pieces)))]
    reached = [L.smaller(b, d // 16 - 1) for b in blocks]

    def add_row(i: Index, sums: list[Vector]) -> list[Vector]:
        x = L.load(Z, i * L.n)
        entries = [L.splat(S, i * d + b * 16 + k) for b in reached for k in range(16)]
        return [total + x * entry for total, entry in zip(sums, entries, strict=True)]

    sums = L.loop(d, [L.f(0.0)] * 16 * len(blocks), add_row)
    L.barrier()
    for j, b in enumerate(blocks):
        x = sums[16 * j : 16 * j + 16]
        L.when(b, d // 16, lambda b=b, x=x: polar._store_block(L, Z, b, x))


def end_rotation(L: Any, program: Program, b: Index, Z: Any) -> None:
    """The last butterflies of a block, which ``polar.tree_block`` does for tokens."""
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    polar._store_block(L, Z, b, polar._butterflies(L, x, (8, 4, 2, 1)))


def start_leaves(L: Any, program: Program, b: Index, Z: Any) -> None:
    """The first butterflies of a block on the way back, which ``polar.leaf_block`` does."""
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    polar._store_block(L, Z, b, polar._butterflies(L, x, (1, 2, 4, 8)))


def finish_rows(L: Any, program: Program, b: Index, signs: Any, first_sign: Index, Z: Any) -> None:
    """``polar.store_block`` on a tile that stays in shared memory."""
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    x = polar._butterflies(L, x, (8, 4, 2, 1))
    x = [x[k] * L.splat(signs, first_sign + b * 16 + k) for k in range(16)]
    polar._store_block(L, Z, b, x)


# ---- page offsets --------------------------------------------------------------------------------


def sum_column(
    L: Any, program: Program, source: Any, index: Index, stride: Index, n: Index, good: Any,
    picky: Index, sums: Any, i: Index, flags: Any, *, element: str,
) -> None:  # fmt: skip
    """Sum of a coordinate over the good ones of ``n`` rows, in their order, to ``sums[i]``.

    A sum that is not finite sets ``flags[0]``; if ``picky``, it counts as 0.
    """

    def add_row(t: Index, total: list[Vector]) -> list[Vector]:
        x = widened(L, source, index + t * stride, element)
        return [L.where(L.splat(good, t) >= L.u(1), total[0] + x, total[0])]

    (total,) = L.loop(n, [L.f(0.0)], add_row)
    infinite = (L.as_uint(total) & L.u(0x7FFFFFFF)) >= L.u(0x7F800000)
    L.put(sums, i, L.choose(picky, L.where(infinite, L.f(0.0), total), total))
    L.when_set(infinite, lambda: L.put(flags, 0, L.u(1)))


def judge_row(
    L: Any, program: Program, source: Any, index: Index, stride: Index, without_long: Index,
    good: Any, t: Index, *, element: str,
) -> None:  # fmt: skip
    """Whether a row is finite, and if so asked, short enough for a float16 radius."""

    def add_square(i: Index, state: list[Vector]) -> list[Vector]:
        x = widened(L, source, index + i * stride, element)
        return [state[0] + x * x, L.fma(x, L.f(0.0), state[1])]

    squared, nan = L.loop(program.head_dim, [L.f(0.0), L.f(0.0)], add_square)
    limit = L.choose(without_long, L.f(polar.MAX_RADIUS**2), L.f(float("inf")))
    L.put(good, t, L.only((nan <= L.f(0.0)) & (squared <= limit), 1))


def divide_sum(L: Any, program: Program, sums: Any, i: Index, n: Index, Z: Any) -> None:
    """A mean, to coordinate i of the tile's first lane."""
    L.put(Z, i * L.n, L.divide(L.splat(sums, i), L.from_index(n)))


def round_offset(
    L: Any, program: Program, Z: Any, i: Index, words: Any, start: Index, offset: Any
) -> None:
    """Coordinate i of the first lane, rounded as it is stored, to ``offset`` and to the page."""
    d = program.head_dim
    x = L.splat(Z, i * L.n)
    if program.offset == "float16":
        half = half_bits(L, x)
        L.put(offset, i, polar._signed_half_to_float(L, half))
        L.store_lanes(words, start, i, 16, half)
        return

    def compare(k: Index, best: list[Vector]) -> list[Vector]:
        size = L.absolute(L.splat(Z, k * L.n))
        return [L.where(size > best[0], size, best[0])]

    (largest,) = L.loop(d, [L.f(0.0)], compare)
    half = half_bits(L, L.divide(largest, L.f(127.0)))
    scale = polar.half_to_float_lanes(L, half)
    shift = L.f(12582912.0)  # 1.5 · 2^23: rounds to an integer, ties to even
    code = (L.divide(x, scale) + shift) - shift
    code = L.where(code > L.f(127.0), L.f(127.0), L.where(code < L.f(-127.0), L.f(-127.0), code))
    code = L.where(scale > L.f(0.0), code, L.f(0.0))
    L.put(offset, i, code * scale)
    L.store_lanes(words, start, i, 8, L.as_uint(code + shift))
    L.store_lanes(words, start + d // 4, 0, 32, half)


def offset_value(L: Any, program: Program, words: Any, start: Index, i: Index, offset: Any) -> None:
    """Coordinate i of a stored page offset, to ``offset[i]``."""
    if program.offset == "float16":
        half = L.load_lanes(words, start, i, 16)
        L.put(offset, i, polar._signed_half_to_float(L, half))
        return
    scale = L.splat(words, start + program.head_dim // 4) & L.u(0xFFFF)
    code = L.load_lanes(words, start, i, 8) ^ L.u(0x4B000080)
    value = (L.as_float(code) - L.f(2.0**23 + 128)) * polar.half_to_float_lanes(L, scale)
    L.put(offset, i, value)


# ---- packing -------------------------------------------------------------------------------------


def pack_rows(
    L: Any, program: Program, piece: Index, live: Any, codes: Any, words: Any, page: Index,
    lane: Index, *, pieces: int,
) -> None:  # fmt: skip
    """``polar.pack``, the rows dealt out to the pieces."""

    def pack(rows: Any) -> None:
        for row in rows:
            total = L.u(0)
            for node, shift in row.fields:
                total = total | (L.load(codes, node * L.n) << L.u(shift))
            L.store_lanes(words, page + row.word, lane, row.width, total & L.load(live, 0))

    _dealt_out(L, piece, pieces, program.layout.code_rows, pack)


def unpack_rows(
    L: Any, program: Program, piece: Index, words: Any, page: Index, lane: Index, codes: Any, *,
    pieces: int,
) -> None:  # fmt: skip
    """``polar.unpack``, the rows dealt out to the pieces."""
    layout = program.layout
    bits = layout.node_bits()

    def unpack(rows: Any) -> None:
        for row in rows:
            total = L.load_lanes(words, page + row.word, lane, row.width)
            for node, shift in row.fields:
                code = (total >> L.u(shift)) & L.u((1 << int(bits[node])) - 1)
                L.store(codes, node * L.n, code)

    _dealt_out(L, piece, pieces, layout.code_rows, unpack)


def _dealt_out(L: Any, piece: Index, pieces: int, rows: Any, work: Any) -> None:
    for k in range(min(pieces, len(rows))):
        L.when_equal(piece, k, lambda k=k: work(rows[k::pieces]))


def start_range(L: Any, program: Program, extremes: Any) -> None:
    """No radius is known of a lane's yet."""
    for k, end in enumerate(empty_range(L)):
        L.store(extremes, k * L.n, end)


def choose_anchor(
    L: Any, program: Program, extremes: Any, words: Any, page: Index, *, lanes: int
) -> None:
    """The anchor of a page from the extremes of all lanes, to its place."""

    def compare(t: Index, best: list[Vector]) -> list[Vector]:
        least, greatest = L.splat(extremes, t), L.splat(extremes, t + L.n)
        least = L.where(best[0] >= least, least, best[0])
        return [least, L.where(greatest >= best[1], greatest, best[1])]

    anchor = anchor_of(L, L.loop(lanes, empty_range(L), compare)) << L.u(16)
    at = page + program.layout.anchor_word
    scale = L.splat(words, at) & L.u(0xFFFF) if program.offset == "int8" else L.u(0)
    L.put(words, at, anchor | scale)


def store_radii(
    L: Any, program: Program, R: Any, bad: Any, live: Any, words: Any, page: Index, lane: Index,
    counts: Any, extremes: Any, *, pieces: int,
) -> None:  # fmt: skip
    """``polar.store_radii``; ``bad`` has a vector for each piece, ``counts`` two vectors.

    Radii of 8 bits are stored by the anchor that the page has, and ``extremes`` widened to them.
    """
    layout = program.layout
    nan = L.f(0.0)
    for piece in range(pieces):
        nan = nan + L.load(bad, piece * L.n)
    finite, within = nan <= L.f(0.0), nan <= L.f(0.0)
    if layout.anchor_word is not None:
        code_of = code_writer(L, words, page + layout.anchor_word)
        found = [L.load(extremes, 0), L.load(extremes, L.n)]
    for j, word in enumerate(layout.radius_words):
        r = L.sqrt(L.load(R, j * L.n))
        fits = r <= L.f(polar.MAX_RADIUS)
        within = within & fits
        r = L.where(fits, r, L.f(polar.MAX_RADIUS))
        if layout.anchor_word is not None:
            bits = L.where(finite, L.as_uint(r), L.u(NAN_BITS)) & L.load(live, 0)
            found = widen_range(L, found, bits)
            L.store_lanes(words, page + word, lane, 8, code_of(bits))
            continue
        half = polar._float_to_half(L, r)
        half = L.where(finite, half, L.u(0x7E00)) & L.load(live, 0)
        L.store_lanes(words, page + word, lane, 16, half)
    if layout.anchor_word is not None:
        for k, end in enumerate(found):
            L.store(extremes, k * L.n, end)
    one = L.u(1) & L.load(live, 0)
    for start, event in ((0, ~finite), (L.n, finite ^ within)):
        before = L.load(counts, start)
        L.store(counts, start, L.where(event, before + one, before))
