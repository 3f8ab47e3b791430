"""The arithmetic of the codec as lane programs: rotate, turn into angles, pack; and back.

One tile is as many tokens as a register has lanes.  Coordinate i of a tile is a vector at
``Z[i * lanes]``; node and radius vectors are laid out likewise.  Stages take the tile in pieces of
16 coordinates that fit into registers: *blocks* of neighbouring coordinates, and *columns* of
coordinates 16 apart.

Codes are defined by this order of float32 operations:

- signs D₁/2^p; butterflies of strides 1, 2, 4, … within groups of 2^p coordinates; Q across groups;
- the permutation P; signs D₂; Q across groups; butterflies of strides …, 4, 2, 1;
- minus the page offset; then up the tree with squared radii, x² + y².

No angle is computed: squared lengths are compared with tan² β, for the boundaries β between
codewords, and level 1 adds the signs.  The ratio of the two squares is folded at 1; a value on a
boundary belongs to the cell nearer the axis it was folded to, and zero counts as positive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import pi
from typing import Any

import numpy as np

from polarquant_nb.codebooks import TABLE
from polarquant_nb.densities import codeword_angles
from polarquant_nb.kernels.jit import Program
from polarquant_nb.kernels.lanes import Index, Mask, Vector, stage
from polarquant_nb.kernels.radius_codes import code_reader
from polarquant_nb.layout import PAGE
from polarquant_nb.radii import NAN_BITS

__all__ = [
    "MAX_RADIUS",
    "begin_second_round",
    "descend",
    "end_first_round",
    "half_to_float_lanes",
    "leaf_block",
    "load_block",
    "load_offset",
    "multiply_dense",
    "narrow_bfloat",
    "narrow_half",
    "pack",
    "radius_reader",
    "rotate_row",
    "store_block",
    "store_radii",
    "sum_rows",
    "tree_block",
    "unmix_first_round",
    "unmix_second_round",
    "unpack",
    "unrotate_row",
    "upper_tree",
    "widen_bfloat",
    "widen_half",
]

MAX_RADIUS = 65504.0
"""Largest finite float16."""


# ---- rotation ------------------------------------------------------------------------------------


@stage
def load_block(
    L: Any, program: Program, rows: Any, index: Index, stride: Index, b: Index,
    signs: Any, Z: Any, bad: Any, lane: Index,
) -> None:  # fmt: skip
    """Coordinates 16b .. 16b+15 of a tile's rows: transpose, apply D₁, butterflies 1, 2, 4, 8.

    ``bad`` accumulates x·0, which is NaN in the lanes of rows that hold NaN or inf.
    """
    x = L.load_columns(rows, index + b * 16, stride)
    # ask for the same coordinates of the next tile; with an offset the page has just been read
    ahead = L.n if program.offset is None else PAGE
    for k in range(L.n):
        L.prefetch(rows, index + b * 16 + stride * (ahead + k), 0, 32)
    if program.rotation == "hadamard":
        x = [x[k] * L.splat(signs, b * 16 + k) for k in range(16)]
        x = _butterflies(L, x, (1, 2, 4, 8))
        suspects = x[:1]  # the sum of all 16; it cannot overflow, as D₁ has scaled by 1/16 or less
    else:
        suspects = x
    nan = L.load(bad, lane)
    for suspect in suspects:
        nan = L.fma(suspect, L.f(0.0), nan)
    L.store(bad, lane, nan)
    _store_block(L, Z, b, x)


@stage
def end_first_round(L: Any, program: Program, c: Index, mix: Any, Z: Any) -> None:
    """Coordinates c, c+16, …: the butterflies that cross blocks, and Q."""
    _store_column(L, c, Z, _first_half(L, program, c, mix, Z, inverse=False))


@stage
def begin_second_round(
    L: Any, program: Program, c: Index, signs: Any, mix: Any, order: Any, Z: Any, U: Any
) -> None:
    """From Z to U, in the order P: coordinates c, c+16, …: D₂, Q, the butterflies across blocks."""
    d = program.head_dim
    x = _load_in_order(L, program, c, order, Z)
    x = [x[k] * L.splat(signs, c + (d + 16 * k)) for k in range(d // 16)]
    _store_column(L, c, U, _second_half(L, program, mix, x, inverse=False))


@stage
def unmix_second_round(L: Any, program: Program, c: Index, signs: Any, mix: Any, Z: Any) -> None:
    """Inverse of :func:`begin_second_round`, but for the order."""
    d = program.head_dim
    x = _first_half(L, program, c, mix, Z, inverse=True)
    _store_column(L, c, Z, [x[k] * L.splat(signs, c + (d + 16 * k)) for k in range(d // 16)])


@stage
def unmix_first_round(
    L: Any, program: Program, c: Index, mix: Any, order: Any, Z: Any, U: Any
) -> None:
    """Inverse of :func:`end_first_round`, from Z, in the inverse order, to U."""
    x = _load_in_order(L, program, c, order, Z)
    _store_column(L, c, U, _second_half(L, program, mix, x, inverse=True))


def _first_half(
    L: Any, program: Program, c: Index, mix: Any, Z: Any, *, inverse: bool
) -> list[Vector]:
    x = [L.load(Z, (c + 16 * k) * L.n) for k in range(program.head_dim // 16)]
    x = _butterflies(L, x, _column_strides(program))
    return _across_groups(L, program.num_groups, mix, x, transposed=inverse)


def _second_half(
    L: Any, program: Program, mix: Any, x: list[Vector], *, inverse: bool
) -> list[Vector]:
    x = _across_groups(L, program.num_groups, mix, x, transposed=inverse)
    return _butterflies(L, x, _column_strides(program)[::-1])


def _load_in_order(L: Any, program: Program, c: Index, order: Any, Z: Any) -> list[Vector]:
    places = [L.index(order, c + 16 * k) for k in range(program.head_dim // 16)]
    return [L.load(Z, place * L.n) for place in places]


def _store_column(L: Any, c: Index, Z: Any, x: list[Vector]) -> None:
    for k in range(len(x)):
        L.store(Z, (c + 16 * k) * L.n, x[k])


def _column_strides(program: Program) -> tuple[int, ...]:
    """Strides, in steps of 16 coordinates, of the butterflies that cross blocks."""
    blocks = program.head_dim // program.num_groups // 16
    return tuple(1 << i for i in range(blocks.bit_length() - 1))


@stage
def multiply_dense(L: Any, program: Program, b: Index, X: Any, S: Any, Z: Any) -> None:
    """Coordinates 16b .. 16b+15 of X S, for a dense S; sums in the order of the rows of S."""
    d = program.head_dim

    def add_row(i: Index, sums: list[Vector]) -> list[Vector]:
        x = L.load(X, i * L.n)
        return [sums[k] + x * L.splat(S, i * d + b * 16 + k) for k in range(16)]

    _store_block(L, Z, b, L.loop(d, [L.f(0.0)] * 16, add_row))


@stage
def sum_rows(
    L: Any, program: Program, rows: Any, index: Index, stride: Index, n: Index, sums: Any
) -> None:
    """Sum of ``n`` rows, each coordinate in the order of the rows; lanes are coordinates."""
    vectors = program.head_dim // L.n
    for first in range(0, vectors, 8):
        chunk = range(first, min(first + 8, vectors))

        def add_row(t: Index, total: list[Vector], chunk: range = chunk) -> list[Vector]:
            start = t * stride + index
            return [total[k - chunk[0]] + L.load(rows, start + k * L.n) for k in chunk]

        for k, total in zip(chunk, L.loop(n, [L.f(0.0)] * len(chunk), add_row), strict=True):
            L.store(sums, k * L.n, total)


@stage
def rotate_row(
    L: Any, program: Program, x: Any, signs: Any, order: Any, mix: Any, dense: Any
) -> None:
    """Rotate one vector in place, as tiles are rotated, bit for bit; lanes are coordinates."""
    _turn_row(L, program, x, signs, order, mix, dense, inverse=False)


@stage
def unrotate_row(
    L: Any, program: Program, x: Any, signs: Any, order: Any, mix: Any, dense: Any
) -> None:
    """Inverse of :func:`rotate_row`; ``order`` is the inverse one, ``dense`` transposed."""
    _turn_row(L, program, x, signs, order, mix, dense, inverse=True)


def _turn_row(
    L: Any, program: Program, x: Any, signs: Any, order: Any, mix: Any, dense: Any, *, inverse: bool
) -> None:
    d, m = program.head_dim, program.num_groups
    r = [L.load(x, k * L.n) for k in range(d // L.n)]

    def apply_signs(r: list[Vector], which: int) -> list[Vector]:
        return [r[k] * L.load(signs, which * d + k * L.n) for k in range(len(r))]

    def permute(r: list[Vector]) -> list[Vector]:
        for k, v in enumerate(r):
            L.store(x, k * L.n, v)
        return [L.gather(x, order, k * L.n) for k in range(len(r))]

    if program.rotation == "hadamard":
        within = tuple(1 << i for i in range(L.n.bit_length() - 1))
        across = tuple(1 << i for i in range((d // m // L.n).bit_length() - 1))
        r = r if inverse else apply_signs(r, 0)
        for stride in within:
            r = [L.butterfly(v, stride) for v in r]
        r = _across_groups(L, m, mix, _butterflies(L, r, across), transposed=inverse)
        r = permute(apply_signs(r, 1)) if inverse else apply_signs(permute(r), 1)
        r = _butterflies(L, _across_groups(L, m, mix, r, transposed=inverse), across[::-1])
        for stride in within[::-1]:
            r = [L.butterfly(v, stride) for v in r]
        r = apply_signs(r, 0) if inverse else r
    elif program.rotation == "haar":

        def add_row(i: Index, sums: list[Vector]) -> list[Vector]:
            weight = L.splat(x, i)
            return [sums[k] + weight * L.load(dense, i * d + k * L.n) for k in range(len(sums))]

        r = L.loop(d, [L.f(0.0)] * len(r), add_row)
    for k, v in enumerate(r):
        L.store(x, k * L.n, v)


@stage
def store_block(
    L: Any, program: Program, b: Index, signs: Any, Z: Any, rows: Any, index: Index, stride: Index
) -> None:
    """Inverse of :func:`load_block`, for the block at ``Z``."""
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    if program.rotation == "hadamard":
        x = _butterflies(L, x, (8, 4, 2, 1))
        x = [x[k] * L.splat(signs, b * 16 + k) for k in range(16)]
    L.store_columns(rows, index + b * 16, stride, x)


def _store_block(L: Any, Z: Any, b: Index, x: list[Vector]) -> None:
    for k in range(16):
        L.store(Z, (b * 16 + k) * L.n, x[k])


def _butterflies(L: Any, x: list[Vector], strides: tuple[int, ...]) -> list[Vector]:
    """(u, v) → (u + v, u − v) for the pairs ``stride`` apart, stride by stride."""
    x = list(x)
    for stride in strides:
        for k in range(len(x)):
            if not k & stride:
                x[k], x[k + stride] = x[k] + x[k + stride], L.subtract(x[k], x[k + stride])
    return x


def _across_groups(L: Any, m: int, mix: Any, x: list[Vector], *, transposed: bool) -> list[Vector]:
    """Mix m groups: y_h = Σ_g x_g Q[g, h] (or Qᵀ), in the order of g."""
    if m == 1:
        return x
    size = len(x) // m
    q = [[L.splat(mix, h * m + g if transposed else g * m + h) for h in range(m)] for g in range(m)]
    mixed = []
    for h in range(m):
        for a in range(size):
            total = x[a] * q[0][h]
            for g in range(1, m):
                total = total + x[g * size + a] * q[g][h]
            mixed.append(total)
    return mixed


# ---- angles --------------------------------------------------------------------------------------


@stage
def tree_block(
    L: Any, program: Program, b: Index, Z: Any, offset: Any, thresholds: Any, codes: Any, R: Any
) -> None:
    """Last butterflies of a block of 16 coordinates, minus the page offset, and up the tree.

    Gives the codes of levels 1 to 4, and to ``R`` the squared radii.
    """
    x = [L.load(Z, (b * 16 + k) * L.n) for k in range(16)]
    if program.rotation == "hadamard":
        x = _butterflies(L, x, (8, 4, 2, 1))
    if program.offset is not None:
        x = [x[k] - L.splat(offset, b * 16 + k) for k in range(16)]
    start = program.layout.level_start
    for level, bits in enumerate(program.level_bits[:4], 1):
        pairs = len(x) // 2
        for j in range(pairs):
            u, v = x[2 * j], x[2 * j + 1]
            code, x[j] = _code(L, program, level, bits, u, v, thresholds)
            L.store(codes, (b * pairs + (start[level - 1] + j)) * L.n, code)
        x = x[:pairs]
    for j, r in enumerate(x):
        L.store(R, (b * len(x) + j) * L.n, r)


@stage
def upper_tree(L: Any, program: Program, thresholds: Any, codes: Any, R: Any) -> None:
    """Codes of the levels above 4; the squared block radii replace those of 16 coordinates."""
    if len(program.level_bits) <= 4:
        return
    start = program.layout.level_start
    r = [L.load(R, i * L.n) for i in range(program.head_dim // 16)]
    for level, bits in list(enumerate(program.level_bits, 1))[4:]:
        for j in range(len(r) // 2):
            u, v = r[2 * j], r[2 * j + 1]
            code, r[j] = _code(L, program, level, bits, u, v, thresholds)
            L.store(codes, (start[level - 1] + j) * L.n, code)
        r = r[: len(r) // 2]
    for j, squared in enumerate(r):
        L.store(R, j * L.n, squared)


def _code(
    L: Any, program: Program, level: int, bits: int, u: Vector, v: Vector, thresholds: Any
) -> tuple[Vector, Vector]:
    """Code of a pair and its squared radius, from coordinates (level 1) or squared radii."""
    if level == 1:
        uu, vv = u * u, v * v
        if program.fitted:
            return fitted_code_1(L, bits, u, v, thresholds), uu + vv
        return code_1(L, bits, u, v, uu, vv), uu + vv
    if program.fitted:
        return fitted_code(L, program, level, bits, u, v, thresholds), u + v
    return code_above(L, level, bits, u, v), u + v


def code_1(L: Any, bits: int, x: Vector, y: Vector, xx: Vector, yy: Vector) -> Vector:
    """Level 1: s | m << 1 | t << (bits − 1), as ``densities.codeword_angles`` describes it."""
    x_negative, y_negative = x < L.f(0.0), y < L.f(0.0)
    if bits == 1:
        return L.only(y_negative, 1)
    t = 1 << (bits - 1)  # the sine's sign differs from the cosine's
    code = L.only(x_negative, 1 | t)
    code = _flip(L, code, y_negative, t)
    if bits == 2:
        return code
    cells = 1 << (bits - 2)  # within a quarter circle
    boundaries = np.tan(pi / 2 / cells * np.arange(1, cells // 2)) ** 2
    return _add_cell(L, code, 1, cells, xx, yy, list(boundaries))


def code_above(L: Any, level: int, bits: int, u: Vector, v: Vector) -> Vector:
    """Levels ≥ 2, from the squared radii u and v of the two halves."""
    c = codeword_angles(level, bits)
    boundaries = np.tan((c[1:] + c[:-1]) / 2)[: len(c) // 2 - 1] ** 2
    return _add_cell(L, None, 0, len(c), u, v, list(boundaries))


def _add_cell(
    L: Any,
    code: Vector | None,
    shift: int,
    cells: int,
    u: Vector,
    v: Vector,
    boundaries: list[float],
) -> Vector:
    """Put into ``code``, from bit ``shift``, the cell of v/u among cells symmetric about 1.

    Fold at 1, search the 2^n − 1 ascending ``boundaries`` below 1, unfold: the mirror image of
    cell c is ``cells − 1 − c``, all bits flipped.
    """
    code = _flip(L, code, v > u, (cells - 1) << shift)
    low, high = L.where(u < v, u, v), L.where(u > v, u, v)
    candidates = [boundaries]
    passed: list[Mask] = []
    while candidates[0]:
        middle = len(candidates[0]) // 2
        threshold = _choose(L, [L.f(c[middle]) for c in candidates], passed)
        passed.append(low > threshold * high)
        code = _flip(L, code, passed[-1], (middle + 1) << shift)
        candidates = [half for c in candidates for half in (c[:middle], c[middle + 1 :])]
    return code


def _flip(L: Any, code: Vector | None, mask: Mask, bits: int) -> Vector:
    """``code`` with ``bits`` flipped where the mask is set; None stands for 0."""
    return L.only(mask, bits) if code is None else L.where(mask, code ^ L.u(bits), code)


def _choose(L: Any, values: list[Vector], passed: list[Mask]) -> Vector:
    """The value whose index has the bits ``passed``, first condition highest."""
    for mask in reversed(passed):
        values = [L.where(mask, values[i + 1], values[i]) for i in range(0, len(values), 2)]
    return values[0]


def fitted_code_1(L: Any, bits: int, x: Vector, y: Vector, thresholds: Any) -> Vector:
    """Level 1 with any codebook: how many boundaries the angle lies beyond, modulo 2^bits.

    A vector of the lower half plane is turned by π; the angle is beyond β if then
    y cos β > x sin β + bias, where the bias decides when β is of the other half plane.
    """
    lower_half = y < L.f(0.0)
    x = L.where(lower_half, L.f(0.0) - x, x)
    y = L.where(lower_half, L.f(0.0) - y, y)
    count = L.u(0)
    for k in range(1 << bits):
        cosine, sine, upper_bias, lower_bias = (L.splat(thresholds, 4 * k + i) for i in range(4))
        beyond = y * cosine > x * sine + L.where(lower_half, lower_bias, upper_bias)
        count = L.where(beyond, count + L.u(1), count)
    return count & L.u((1 << bits) - 1)


def fitted_code(
    L: Any, program: Program, level: int, bits: int, u: Vector, v: Vector, thresholds: Any
) -> Vector:
    """Levels ≥ 2 with any codebook: how many boundaries have v > tan² β · u."""
    first = 4 << program.level_bits[0]
    first += sum((1 << b) - 1 for b in program.level_bits[1 : level - 1])
    count = L.u(0)
    for k in range((1 << bits) - 1):
        count = L.where(v > L.splat(thresholds, first + k) * u, count + L.u(1), count)
    return count


# ---- and back ------------------------------------------------------------------------------------


@stage
def descend(L: Any, program: Program, words: Any, page: Index, lane: Index, cosines: Any,
            codes: Any, R: Any) -> None:  # fmt: skip
    """Radii from the block radii of a page down to blocks of 16 coordinates (or the format's)."""
    layout, radius = program.layout, radius_reader(L, program, words, page, lane)
    r = [radius(word) for word in layout.radius_words]
    for level in range(len(program.level_bits), 4, -1):
        r = _split(L, program, level, r, codes, layout.level_start[level - 1], cosines)
    for j, radius in enumerate(r):
        L.store(R, j * L.n, radius)


@stage
def leaf_block(
    L: Any, program: Program, b: Index, codes: Any, R: Any, cosines: Any, offset: Any, Z: Any
) -> None:
    """Rotated coordinates 16b .. 16b+15 from their radii and codes, plus the page offset."""
    levels = min(4, len(program.level_bits))
    start = program.layout.level_start
    r = [L.load(R, (b * (16 >> levels) + j) * L.n) for j in range(16 >> levels)]
    for level in range(levels, 0, -1):
        r = _split(L, program, level, r, codes, b * (16 >> level) + start[level - 1], cosines)
    if program.offset is not None:
        r = [r[k] + L.splat(offset, b * 16 + k) for k in range(16)]
    if program.rotation == "hadamard":
        r = _butterflies(L, r, (1, 2, 4, 8))
    _store_block(L, Z, b, r)


def _split(
    L: Any, program: Program, level: int, r: list[Vector], codes: Any, node: Index, cosines: Any
) -> list[Vector]:
    """(r cos ψ, r sin ψ) for each radius of a level."""
    table, bits = 2 * TABLE * (level - 1), program.level_bits[level - 1]
    halves = []
    for j, radius in enumerate(r):
        code = L.load(codes, (node + j) * L.n)
        halves.append(radius * L.lookup(cosines, table, bits, code))
        halves.append(radius * L.lookup(cosines, table + TABLE, bits, code))
    return halves


# ---- packing -------------------------------------------------------------------------------------


@stage
def pack(
    L: Any, program: Program, codes: Any, live: Any, words: Any, page: Index, lane: Index
) -> None:
    """Codes of a tile to the rows of its page, in the lanes that are ``live``."""
    layout = program.layout
    for row in layout.code_rows:
        total = L.u(0)
        for node, shift in row.fields:
            total = total | (L.load(codes, node * L.n) << L.u(shift))
        L.store_lanes(words, page + row.word, lane, row.width, total & L.load(live, 0))
        # the line that the next page's tile will write
        L.prefetch(words, page + (layout.num_words + row.word), lane, row.width, write=True)


@stage
def unpack(L: Any, program: Program, words: Any, page: Index, lane: Index, codes: Any) -> None:
    """Inverse of :func:`pack`."""
    layout = program.layout
    bits = layout.node_bits()
    for row in layout.code_rows:
        total = L.load_lanes(words, page + row.word, lane, row.width)
        for node, shift in row.fields:
            code = (total >> L.u(shift)) & L.u((1 << int(bits[node])) - 1)
            L.store(codes, node * L.n, code)


@stage
def store_radii(
    L: Any, program: Program, R: Any, bad: Any, live: Any, words: Any, page: Index, lane: Index,
    radii: Any, counts: Any,
) -> None:  # fmt: skip
    """Square roots of the squared block radii, as float16; or their bits to ``radii``.

    Radii that float16 cannot hold become its largest value; rows that are not finite become NaN.
    ``counts`` counts, per lane, rows that are not finite and (from element 16) saturated rows.
    """
    nan = L.load(bad, lane)
    finite, within = nan <= L.f(0.0), nan <= L.f(0.0)
    for j, word in enumerate(program.layout.radius_words):
        r = L.sqrt(L.load(R, j * L.n))
        fits = r <= L.f(MAX_RADIUS)
        within = within & fits
        r = L.where(fits, r, L.f(MAX_RADIUS))
        if program.radius == "log8":
            bits = L.where(finite, L.as_uint(r), L.u(NAN_BITS)) & L.load(live, 0)
            L.store(radii, lane + j * PAGE, bits)
            continue
        half = _float_to_half(L, r)
        half = L.where(finite, half, L.u(0x7E00)) & L.load(live, 0)
        L.store_lanes(words, page + word, lane, 16, half)
    one = L.u(1) & L.load(live, 0)
    for start, event in ((0, ~finite), (16, finite ^ within)):
        before = L.load(counts, start)
        L.store(counts, start, L.where(event, before + one, before))


def radius_reader(
    L: Any, program: Program, words: Any, page: Index, lane: Index, live: Any = None
) -> Callable[[int], Vector]:
    """Reader of a tile's radii, by the row's first word; 0 in lanes that are not ``live``."""
    layout = program.layout
    widen: Callable[[Vector], Vector] = partial(half_to_float_lanes, L)
    if layout.anchor_word is not None:
        widen = code_reader(L, words, page + layout.anchor_word)

    def read(word: int) -> Vector:
        stored = L.load_lanes(words, page + word, lane, layout.radius_width)
        return widen(stored if live is None else stored & L.load(live, 0))

    return read


@stage
def load_offset(L: Any, program: Program, words: Any, start: Index, offset: Any) -> None:
    """The page offset, whose first word is ``start``, as float32."""
    if program.offset == "float16":
        for k in range(0, program.head_dim, L.n):
            L.store(offset, k, _signed_half_to_float(L, L.load_lanes(words, start, k, 16)))
    elif program.offset == "int8":
        scale = L.splat(words, start + program.head_dim // 4) & L.u(0xFFFF)
        scale = half_to_float_lanes(L, scale)
        for k in range(0, program.head_dim, L.n):
            # 2^23 + 128 + code, exactly: the integer sits in the low bits of the float
            code = L.load_lanes(words, start, k, 8) ^ L.u(0x4B000080)
            L.store(offset, k, (L.as_float(code) - L.f(2.0**23 + 128)) * scale)


# ---- 16-bit floats -------------------------------------------------------------------------------


@stage
def widen_half(L: Any, program: Program, halves: Any, index: Index, rows: Any, row: Index) -> None:
    """A vector of float16 bits to float32."""
    for k in range(0, program.head_dim, L.n):
        half = L.load_lanes(halves, index + k, 0, 16)
        L.store(rows, row + k, _signed_half_to_float(L, half))


@stage
def widen_bfloat(
    L: Any, program: Program, halves: Any, index: Index, rows: Any, row: Index
) -> None:
    """A vector of bfloat16 bits to float32."""
    for k in range(0, program.head_dim, L.n):
        bits = L.load_lanes(halves, index + k, 0, 16)
        L.store(rows, row + k, L.as_float(bits << L.u(16)))


@stage
def narrow_half(L: Any, program: Program, rows: Any, row: Index, halves: Any, index: Index) -> None:
    """A vector to float16 bits, to nearest, ties to even; beyond 65504 the largest, NaN stays."""
    for k in range(0, program.head_dim, L.n):
        x = L.load(rows, row + k)
        sign = (L.as_uint(x) >> L.u(16)) & L.u(0x8000)
        magnitude = L.absolute(x)
        nan = L.as_uint(magnitude) >= L.u(0x7F800001)
        fits = magnitude <= L.f(MAX_RADIUS)
        half = _float_to_half(L, L.where(fits, magnitude, L.f(MAX_RADIUS)))
        L.store_lanes(halves, index + k, 0, 16, L.where(nan, L.u(0x7E00), half) | sign)


@stage
def narrow_bfloat(
    L: Any, program: Program, rows: Any, row: Index, halves: Any, index: Index
) -> None:
    """A vector to bfloat16 bits, to nearest, ties to even; NaN stays."""
    for k in range(0, program.head_dim, L.n):
        bits = L.as_uint(L.load(rows, row + k))
        nan = (bits & L.u(0x7FFFFFFF)) >= L.u(0x7F800001)
        odd = (bits >> L.u(16)) & L.u(1)
        rounded = (bits + odd + L.u(0x7FFF)) >> L.u(16)
        L.store_lanes(halves, index + k, 0, 16, L.where(nan, L.u(0x7FC0), rounded))


def _float_to_half(L: Any, r: Vector) -> Vector:
    """Bits of float16(r) for 0 ≤ r ≤ 65504, to nearest, ties to even; needs no CPU support."""
    bits = L.as_uint(r)
    odd = (bits >> L.u(13)) & L.u(1)
    normal = (bits + odd + L.u(0xFFF) - L.u(112 << 23)) >> L.u(13)
    # below 2^-14 the spacing is 2^-24: let a float addition do the rounding
    subnormal = L.as_uint(r + L.f(0.5)) - L.u(0x3F000000)
    return L.where(bits >= L.u(113 << 23), normal, subnormal)


def half_to_float_lanes(L: Any, half: Vector) -> Vector:
    """Float of non-negative float16 bits; inf and NaN stay."""
    bits = half << L.u(13)
    special = bits >= L.u(0x7C00 << 13)
    return L.where(special, L.as_float(bits | L.u(0x7F800000)), L.as_float(bits) * L.f(2.0**112))


def _signed_half_to_float(L: Any, half: Vector) -> Vector:
    sign = (half & L.u(0x8000)) << L.u(16)
    magnitude = L.as_uint(half_to_float_lanes(L, half & L.u(0x7FFF)))
    return L.as_float(magnitude | sign)
