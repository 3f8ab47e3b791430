"""Attention straight on the codes, as lane programs: scores, softmax, weighted values.

Queries are rotated once, keys never: q·k̂ = (q S)·(k̂ S).  Keys are walked depth first, from the
block radius down to pairs, and the part of the tree that gives a pair's radius is shared by all
queries of the group.  Values are rebuilt a few coordinates at a time and added up in registers, one
sum per lane.  Results are within float32 rounding of the exact ones, and need not agree bit for bit
between machines.

Scores of query q stand at ``S[s + q * stride + token]``, and become weights in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from polarquant_nb.codebooks import TABLE
from polarquant_nb.kernels.jit import GroupProgram
from polarquant_nb.kernels.lanes import Index, Vector, stage
from polarquant_nb.kernels.polar import radius_reader
from polarquant_nb.layout import PAGE, Row

__all__ = [
    "GROUP_TOKENS",
    "RADIUS_STRIDE",
    "accumulate_values",
    "add_sums",
    "query_tables",
    "rescale_sums",
    "row_maxima",
    "score_tile",
    "softmax_rows",
    "start_scores",
    "total_sums",
    "value_radii",
]

GROUP_TOKENS = 512
"""Tokens whose values are added up at a time."""

RADIUS_STRIDE = GROUP_TOKENS + 16
"""Elements between the radii of runs; no power of two, which would crowd sets of the cache."""

_LOW = 3  # values are rebuilt from radii of 2**3 coordinates


# ---- keys ----------------------------------------------------------------------------------------


@stage
def query_tables(
    L: Any, program: GroupProgram, queries: Any, pair_cosines: Any, tables: Any
) -> None:
    """Per pair and query, q₁ cos θ + q₂ sin θ over the codes, where a table fits registers."""
    if not program.by_table:
        return
    for k in range(0, program.pair_entries, L.n):
        cosine, sine = L.load(pair_cosines, k), L.load(pair_cosines, TABLE + k)

        def write_pair(
            pair: Index, nothing: list[Vector], c: Vector = cosine, s: Vector = sine, k: int = k
        ) -> list[Vector]:
            for q in range(program.group):
                first = L.splat(queries, pair * 2 + q * program.head_dim)
                second = L.splat(queries, pair * 2 + (q * program.head_dim + 1))
                at = (pair * program.group + q) * program.pair_entries + k
                L.store(tables, at, L.fma(first, c, second * s))
            return nothing

        L.loop(program.head_dim // 2, [], write_pair)


@stage
def start_scores(
    L: Any, program: GroupProgram, words: Any, ahead: Index, offset: Any, queries: Any, S: Any,
    s: Index, stride: Index,
) -> None:  # fmt: skip
    """Scores of a page, before its codes count: q·μ for every token (0 without an offset).

    Meanwhile the offset of the page that starts at ``ahead`` is fetched.
    """
    layout = program.layout
    for word in range(0, layout.offset_words, 16):
        L.prefetch(words, ahead + (layout.offset_word + word), 0, 32)
    for q in range(program.group):
        share = L.f(0.0)
        if program.offset is not None:
            for k in range(0, program.head_dim, L.n):
                q_k = L.load(queries, q * program.head_dim + k)
                share = L.fma(L.load(offset, k), q_k, share)
            share = L.total(share)
        for t in range(0, PAGE, L.n):
            L.store(S, s + stride * q + t, share)


@stage
def score_tile(
    L: Any, program: GroupProgram, words: Any, page: Index, ahead: Index, lane: Index, cosines: Any,
    pair_cosines: Any, queries: Any, tables: Any, S: Any, s: Index, stride: Index,
) -> None:  # fmt: skip
    """Add q·(k̂ − μ) of a tile's keys to the scores of every query, in rotated space.

    Meanwhile the same tile of the page that starts at ``ahead`` is fetched.
    """
    code = _code_reader(L, program, words, page, lane, ahead)
    scores = [L.load(S, s + stride * q) for q in range(program.group)]
    level_start = program.layout.level_start

    def walk(level: int, i: int, r: Vector) -> None:
        index = code(level_start[level - 1] + i)
        if level > 1:
            table, bits = 2 * TABLE * (level - 1), program.level_bits[level - 1]
            cosine = L.lookup(cosines, table, bits, index)
            sine = L.lookup(cosines, table + TABLE, bits, index)
            walk(level - 1, 2 * i, r * cosine)
            walk(level - 1, 2 * i + 1, r * sine)
            return
        if program.by_table:
            r, index = _fold_half_circle(L, program, r, index)
            for q in range(program.group):
                at = (i * program.group + q) * program.pair_entries
                entry = L.lookup(tables, at, program.pair_bits, index)
                scores[q] = L.fma(entry, r, scores[q])
            return
        x, y = _pair(L, program, pair_cosines, r, index)
        for q in range(program.group):
            first = L.splat(queries, q * program.head_dim + 2 * i)
            second = L.splat(queries, q * program.head_dim + 2 * i + 1)
            scores[q] = L.fma(first, x, L.fma(second, y, scores[q]))

    layout, radius = program.layout, radius_reader(L, program, words, page, lane)
    for j, word in enumerate(layout.radius_words):
        L.prefetch(words, ahead + word, lane, layout.radius_width)
        walk(len(program.level_bits), j, radius(word))
    for q in range(program.group):
        L.store(S, s + stride * q, scores[q])


def _fold_half_circle(
    L: Any, program: GroupProgram, r: Vector, index: Vector
) -> tuple[Vector, Vector]:
    """Level-1 codes of many bits: bit 0 negates the pair, the rest indexes half a circle."""
    if not program.folded:
        return r, index
    sign = index << L.u(31)
    return L.as_float(L.as_uint(r) ^ sign), index >> L.u(1)


def _pair(
    L: Any, program: GroupProgram, pair_cosines: Any, r: Vector, index: Vector
) -> tuple[Vector, Vector]:
    """The two coordinates of a pair of radius ``r``, by its level-1 code."""
    r, index = _fold_half_circle(L, program, r, index)
    x = r * L.lookup(pair_cosines, 0, program.pair_bits, index)
    y = r * L.lookup(pair_cosines, TABLE, program.pair_bits, index)
    if program.folded_twice:
        sign = (index << L.u(31 - program.pair_bits)) & L.u(1 << 31)
        y = L.as_float(L.as_uint(y) ^ sign)
    return x, y


def _code_reader(
    L: Any, program: GroupProgram, words: Any, page: Index, lane: Index, ahead: Index | None = None
) -> Callable[[int], Vector]:
    """Reader of codes, by node; higher bits are left as they are, as tables ignore them.

    Every row is loaded once, and fetched from the page at ``ahead`` too.
    """
    where = {node: (row, shift) for row in program.layout.code_rows for node, shift in row.fields}
    loaded: dict[Row, Vector] = {}

    def read(node: int) -> Vector:
        row, shift = where[node]
        if row not in loaded:
            loaded[row] = L.load_lanes(words, page + row.word, lane, row.width)
            if ahead is not None:
                L.prefetch(words, ahead + row.word, lane, row.width)
        return loaded[row] >> L.u(shift) if shift else loaded[row]

    return read


# ---- softmax -------------------------------------------------------------------------------------


@stage
def row_maxima(
    L: Any, program: GroupProgram, S: Any, s: Index, stride: Index, tokens: Index, largest: Any
) -> None:
    """Per query and lane, the largest of ``tokens`` scores, a multiple of the lanes."""
    for q in range(program.group):

        def compare(i: Index, best: list[Vector], q: int = q) -> list[Vector]:
            score = L.load(S, s + stride * q + i * L.n)
            return [L.where(score > best[0], score, best[0])]

        (best,) = L.loop(tokens // L.n, [L.f(float("-inf"))], compare)
        L.store(largest, q * L.n, best)


@stage
def softmax_rows(
    L: Any, program: GroupProgram, S: Any, s: Index, stride: Index, tokens: Index, top: Any,
    totals: Any,
) -> None:  # fmt: skip
    """Scores, in units of 1/log₂ e, to weights 2^(score − top), and per lane their sums."""
    for q in range(program.group):
        top_q = L.splat(top, q)

        def weigh(i: Index, sums: list[Vector], q: int = q, top_q: Vector = top_q) -> list[Vector]:
            at = s + stride * q + i * L.n
            weight = exp2(L, L.load(S, at) - top_q)
            L.store(S, at, weight)
            return [sums[0] + weight]

        (sums,) = L.loop(tokens // L.n, [L.f(0.0)], weigh)
        L.store(totals, q * L.n, sums)


def exp2(L: Any, x: Vector) -> Vector:
    """2^x for x ≤ 0, relative error 2·10⁻⁷; 0 below −126."""
    x = L.where(x < L.f(-126.0), L.f(-127.0), x)
    shifted = x + L.f(12582912.0)  # 1.5 · 2^23: rounds x to an integer, in the low bits
    f = x - (shifted - L.f(12582912.0))
    y = L.f(1.5403530e-4)
    for c in (1.3333558e-3, 9.6181291e-3, 5.5504109e-2, 2.4022651e-1, 6.9314718e-1, 1.0):
        y = L.fma(y, f, L.f(c))
    exponent = (L.as_uint(shifted) + L.u(127)) << L.u(23)
    return y * L.as_float(exponent)


# ---- values --------------------------------------------------------------------------------------


@stage
def value_radii(
    L: Any, program: GroupProgram, words: Any, page: Index, ahead: Index, lane: Index, cosines: Any,
    live: Any, R: Any, token: Index,
) -> None:  # fmt: skip
    """Radii of runs of 8 coordinates (or the blocks, if smaller) of a tile, in its live lanes.

    Run i of token t goes to ``R[i * RADIUS_STRIDE + t]``.  Meanwhile the radii of the same tile of
    the page that starts at ``ahead`` are fetched.
    """
    code = _code_reader(L, program, words, page, lane)
    low = min(_LOW, len(program.level_bits))
    level_start = program.layout.level_start

    def walk(level: int, i: int, r: Vector) -> None:
        if level == low:
            L.store(R, token + i * RADIUS_STRIDE, r)
            return
        index = code(level_start[level - 1] + i)
        table, bits = 2 * TABLE * (level - 1), program.level_bits[level - 1]
        walk(level - 1, 2 * i, r * L.lookup(cosines, table, bits, index))
        walk(level - 1, 2 * i + 1, r * L.lookup(cosines, table + TABLE, bits, index))

    layout, radius = program.layout, radius_reader(L, program, words, page, lane, live)
    if layout.anchor_word is not None:
        L.prefetch(words, ahead + layout.anchor_word, 0, 32)
    for j, word in enumerate(layout.radius_words):
        L.prefetch(words, ahead + word, lane, layout.radius_width)
        walk(len(program.level_bits), j, radius(word))


@stage
def accumulate_values(
    L: Any, program: GroupProgram, words: Any, starts: Any, page: Index, ahead: Index, tiles: Index,
    cosines: Any, pair_cosines: Any, R: Any, S: Any, s: Index, stride: Index, sums: Any, a: Index,
) -> None:  # fmt: skip
    """Add the weighted values of ``tiles`` tiles, from a page's first, to ``sums``, lane by lane.

    Page i starts at ``starts[i]``.  Meanwhile the codes of as many tiles from page
    ``ahead`` are fetched.

    Coordinate i of query q has its vector of sums at ``sums[a + (i * group + q) * lanes]``.
    """
    low = min(_LOW, len(program.level_bits))
    # as many sums as leave half of the registers free
    width = 4 if program.isa == "avx512" and program.group <= 4 and low > 1 else 2
    passes, rows = program.head_dim // width, program.layout.code_rows
    for i in range(passes):
        # each row is fetched in one pass, spread over all of them: memory takes its time
        fetched = rows[-(-i * len(rows) // passes) : -(-(i + 1) * len(rows) // passes)]
        _accumulate_run(
            L, program, i * width, width, low, fetched, words, starts, page, ahead, tiles, cosines,
            pair_cosines, R, S, s, stride, sums, a,
        )  # fmt: skip


def _accumulate_run(
    L: Any, program: GroupProgram, first: int, width: int, low: int, fetched: Sequence[Row],
    words: Any, starts: Any, page: Index, ahead: Index, tiles: Index, cosines: Any,
    pair_cosines: Any, R: Any, S: Any, s: Index, stride: Index, sums: Any, a: Index,
) -> None:  # fmt: skip
    """Coordinates ``first .. first + width − 1``: their sums stay in registers over all tiles."""
    level_start = program.layout.level_start
    places = [
        a + ((first + c) * program.group + q) * L.n
        for q in range(program.group)
        for c in range(width)
    ]

    def add_tile(t: Index, totals: list[Vector]) -> list[Vector]:
        token, per_page = t * L.n, PAGE // L.n
        for row in fetched:
            next_page = L.index(starts, ahead + t // per_page)
            L.prefetch(words, next_page + row.word, t % per_page * L.n, row.width)
        start = L.index(starts, page + t // per_page)
        code = _code_reader(L, program, words, start, t % per_page * L.n)
        values: dict[int, Vector] = {}

        def walk(level: int, i: int, r: Vector) -> None:
            """Down to the coordinates wanted, and to no others."""
            span = 1 << level
            if (i + 1) * span <= first or i * span >= first + width:
                return
            index = code(level_start[level - 1] + i)
            if level > 1:
                table, bits = 2 * TABLE * (level - 1), program.level_bits[level - 1]
                for half in (0, 1):
                    child = 2 * i + half
                    if child * span // 2 < first + width and (child + 1) * span // 2 > first:
                        factor = L.lookup(cosines, table + half * TABLE, bits, index)
                        walk(level - 1, child, r * factor)
                return
            values[2 * i], values[2 * i + 1] = _pair(L, program, pair_cosines, r, index)

        run = first >> low
        walk(low, run, L.load(R, token + run * RADIUS_STRIDE))
        totals = list(totals)
        for q in range(program.group):
            weight = L.load(S, s + stride * q + token)
            for c in range(width):
                k = q * width + c
                totals[k] = L.fma(weight, values[first + c], totals[k])
        return totals

    start = [L.load(sums, place) for place in places]
    for place, total in zip(places, L.loop(tiles, start, add_tile), strict=True):
        L.store(sums, place, total)


# ---- sums of values ------------------------------------------------------------------------------


@stage
def rescale_sums(L: Any, program: GroupProgram, sums: Any, a: Index, factors: Any) -> None:
    """Multiply each query's sums, which start at ``sums[a]``, by its factor."""
    by_query = [L.splat(factors, q) for q in range(program.group)]

    def rescale(i: Index, nothing: list[Vector]) -> list[Vector]:
        for q, factor in enumerate(by_query):
            at = a + (i * program.group + q) * L.n
            L.store(sums, at, L.load(sums, at) * factor)
        return nothing

    L.loop(program.head_dim, [], rescale)


@stage
def add_sums(L: Any, program: GroupProgram, sums: Any, a: Index, b: Index, factors: Any) -> None:
    """Add each query's sums from ``sums[b]`` on, times its factor, to those from ``sums[a]`` on."""
    by_query = [L.splat(factors, q) for q in range(program.group)]

    def add(i: Index, nothing: list[Vector]) -> list[Vector]:
        for q, factor in enumerate(by_query):
            place = (i * program.group + q) * L.n
            total = L.fma(L.load(sums, b + place), factor, L.load(sums, a + place))
            L.store(sums, a + place, total)
        return nothing

    L.loop(program.head_dim, [], add)


@stage
def total_sums(L: Any, program: GroupProgram, sums: Any, a: Index, out: Any) -> None:
    """Sums over the lanes, a vector for each query; ``out`` has a register's worth more."""
    for q in range(program.group):

        def total(i: Index, nothing: list[Vector], q: int = q) -> list[Vector]:
            lanes = L.load(sums, a + (i * program.group + q) * L.n)
            # all lanes are written, and all but one overwritten by the next coordinate's
            L.store(out, i + q * program.head_dim, L.total(lanes))
            return nothing

        L.loop(program.head_dim, [], total)
