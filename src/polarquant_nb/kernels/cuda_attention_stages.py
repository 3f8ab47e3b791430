"""Stages of attention on a GPU: tokens staged in shared memory by runs, scores, sums of values.

A *run* is 8 neighbouring coordinates.  Staging a token walks its tree down to the radii of runs (or
of blocks, if those are smaller) and gathers the codes within each run into one word, alike for all
runs: from there on the run is a run-time index, and code stays short whatever the head_dim.  A
format whose rows hold the codes of one run each is stored like that already.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from polarquant_nb.codebooks import TABLE
from polarquant_nb.kernels.array_lanes import Index, Vector
from polarquant_nb.kernels.jit import Program
from polarquant_nb.kernels.radius_codes import code_reader

__all__ = [
    "LOG2_E",
    "RUN",
    "RunLayout",
    "add_runs",
    "add_up",
    "finish_score",
    "largest_score",
    "merge_range",
    "new_top",
    "reduce_sums",
    "score_runs",
    "stage_token",
    "weigh",
]

LOG2_E = 1.4426950408889634

RUN = 8
"""Coordinates of a run."""


@dataclass(frozen=True)
class RunLayout:
    """How a staged token's runs look.

    Parameters
    ----------
    program : Program
        Format.
    """

    program: Program

    @property
    def num_runs(self) -> int:
        """Runs of a vector."""
        return self.program.head_dim // RUN

    @property
    def levels(self) -> int:
        """Levels of the tree within a run."""
        return min(3, len(self.program.level_bits))

    @property
    def radii(self) -> int:
        """Radii of a run."""
        return RUN >> self.levels

    @cached_property
    def nodes(self) -> tuple[tuple[int, int], ...]:
        """Nodes of a run ``(level, number within the run's level)``, level 1 first."""
        return tuple((level, j) for level in range(1, self.levels + 1) for j in range(RUN >> level))

    def node(self, run: int, level: int, j: int) -> int:
        """A run's node, counted over the vector."""
        return self.program.layout.level_start[level - 1] + run * (RUN >> level) + j

    @cached_property
    def places(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Word and lowest bit of each node's code in a staged run."""
        first = self._stored(0)
        if self.is_stored_by_runs:
            return {node: (0, shift) for node, (_, shift) in first.items()}
        places: dict[tuple[int, int], tuple[int, int]] = {}
        word, shift, room = 0, 0, 32
        for level, j in self.nodes:
            bits = self.program.level_bits[level - 1]
            if shift + bits > room:
                word, shift = word + 1, 0
            places[level, j] = word, shift
            shift += bits
        return places

    @property
    def words(self) -> int:
        """Words of a staged run."""
        return 1 + max(word for word, _ in self.places.values())

    @cached_property
    def is_stored_by_runs(self) -> bool:
        """Whether each run's codes are in one row of their own place, at the same bits."""
        stored = [self._stored(run) for run in range(self.num_runs)]
        alike = all(
            [shift for _, shift in s.values()] == [shift for _, shift in stored[0].values()]
            for s in stored
        )
        return alike and all(len({row.word for row, _ in s.values()}) == 1 for s in stored)

    def _stored(self, run: int) -> dict[tuple[int, int], tuple[Any, int]]:
        where = {n: (row, s) for row in self.program.layout.code_rows for n, s in row.fields}
        return {(level, j): where[self.node(run, level, j)] for level, j in self.nodes}


def stage_token(
    L: Any, program: Program, words: Any, page: Index, token: Index, live: Index, cosines: Any,
    R: Any, C: Any, column: Index, *, pitch: int,
) -> None:  # fmt: skip
    """Radii and codes of a token's runs, to the token's ``column`` of R and C.

    Radius j of run i goes to ``R[(i * radii + j) * pitch + column]``, word w of its codes likewise
    to C.  A token that is not live has radii 0, whatever its page holds.
    """
    layout, plan = program.layout, RunLayout(program)
    bits = layout.node_bits()
    loaded: dict[int, Vector] = {}

    def row_of(row: Any) -> Vector:
        if row.word not in loaded:
            loaded[row.word] = L.load_lanes(words, page + row.word, token, row.width)
        return loaded[row.word]

    where = {node: (row, shift) for row in layout.code_rows for node, shift in row.fields}

    def walk(level: int, i: int, r: Vector) -> None:
        if level == plan.levels:
            L.put(R, column + i * pitch, r)
            return
        node = layout.level_start[level - 1] + i
        row, shift = where[node]
        code = row_of(row) >> L.u(shift)
        table, width = 2 * TABLE * (level - 1), program.level_bits[level - 1]
        walk(level - 1, 2 * i, r * L.lookup(cosines, table, width, code))
        walk(level - 1, 2 * i + 1, r * L.lookup(cosines, table + TABLE, width, code))

    widen = L.widen_half
    if layout.anchor_word is not None:
        widen = code_reader(L, words, page + layout.anchor_word)
    for j, word in enumerate(layout.radius_words):
        radius = widen(L.load_lanes(words, page + word, token, layout.radius_width))
        walk(len(program.level_bits), j, L.choose(live, radius, L.f(0.0)))
    for run in range(plan.num_runs):
        stored = plan._stored(run)
        if plan.is_stored_by_runs:
            L.put(C, column + run * pitch, row_of(stored[1, 0][0]))
            continue
        # codes that move by the same number of bits move together
        moves: dict[tuple[int, Any, int], int] = {}
        for (level, j), (row, shift) in stored.items():
            word, target = plan.places[level, j]
            mask = (1 << int(bits[plan.node(run, level, j)])) - 1
            key = word, row, target - shift
            moves[key] = moves.get(key, 0) | mask << target
        for w in range(plan.words):
            total = L.u(0)
            for (word, row, move), mask in moves.items():
                if word == w:
                    value = row_of(row)
                    value = value << L.u(move) if move > 0 else value >> L.u(-move)
                    total = total | (value & L.u(mask))
            L.put(C, column + (run * plan.words + w) * pitch, total)


def _run_values(
    L: Any, program: Program, run: Index, cosines: Any, R: Any, C: Any, column: Index, pitch: int
) -> list[Vector]:
    """The 8 coordinates of a staged run, without the page offset."""
    plan = RunLayout(program)
    words = [L.splat(C, run * (plan.words * pitch) + column + w * pitch) for w in range(plan.words)]
    r = [L.splat(R, run * (plan.radii * pitch) + column + j * pitch) for j in range(plan.radii)]
    for level in range(plan.levels, 0, -1):
        halves = []
        for j, radius in enumerate(r):
            word, shift = plan.places[level, j]
            code = words[word] >> L.u(shift) if shift else words[word]
            table, bits = 2 * TABLE * (level - 1), program.level_bits[level - 1]
            halves.append(radius * L.lookup(cosines, table, bits, code))
            halves.append(radius * L.lookup(cosines, table + TABLE, bits, code))
        r = halves
    return r


def score_runs(
    L: Any, program: Program, piece: Index, count: Index, cosines: Any, R: Any, C: Any,
    queries: Any, offset: Any, partial: Any, *, group: int, tokens: int, pieces: int, pitch: int,
    chunk: int,
) -> None:  # fmt: skip
    """Scores of a piece's runs, for ``tokens`` tokens of each thread and all queries of a group.

    Coordinate i of query g is ``queries[i * group + g]``; the score of a token with it goes to
    ``partial[(piece * group + g) * chunk + column]``.
    """
    lanes = chunk // tokens
    columns = [L.own + lanes * j for j in range(tokens)]

    def add_run(i: Index, sums: list[Vector]) -> list[Vector]:
        run = i * pieces + piece
        values = [_run_values(L, program, run, cosines, R, C, c, pitch) for c in columns]
        sums = list(sums)
        for k in range(RUN):
            q = L.splats(queries, (run * RUN + k) * group, group)
            for g in range(group):
                for j in range(tokens):
                    sums[j * group + g] = L.fma(values[j][k], q[g], sums[j * group + g])
                if program.offset is not None:  # the same for every token
                    share = tokens * group + g
                    sums[share] = L.fma(L.splat(offset, run * RUN + k), q[g], sums[share])
        return sums

    extra = group if program.offset is not None else 0
    sums = L.loop(count, [L.f(0.0)] * (tokens * group + extra), add_run)
    for j, column in enumerate(columns):
        for g in range(group):
            score = sums[j * group + g]
            if extra:
                score = score + sums[tokens * group + g]
            L.put(partial, piece * (group * chunk) + column + g * chunk, score)


def finish_score(
    L: Any, program: Program, partial: Any, column: Index, seen: Index, cap: Vector, bias: Any,
    bias_at: Index, has_bias: Index, scores: Any, at: Index, *, group: int, pieces: int, chunk: int,
) -> None:  # fmt: skip
    """Sum of the pieces' shares, soft cap, bias; −∞ for a token that is not seen.

    Scores and the cap (0 for none) are in units of 1/log₂ e.
    """
    total = L.f(0.0)
    for piece in range(pieces):
        total = total + L.splat(partial, column + piece * (group * chunk))
    L.put(scores, at, total)

    def soften() -> None:  # tanh x = 1 − 2 / (1 + e^2x), also where the power is 0 or ∞
        power = L.exp2(L.divide(total, cap) * L.f(2 * LOG2_E))
        L.put(scores, at, cap * (L.f(1.0) - L.divide(L.f(2.0), L.f(1.0) + power)))

    def add_bias() -> None:
        L.put(scores, at, L.fma(L.splat(bias, bias_at), L.f(LOG2_E), L.splat(scores, at)))

    L.when_set(cap > L.f(0.0), soften)
    L.when(0, has_bias, add_bias)
    L.unless(0, seen, lambda: L.put(scores, at, L.f(float("-inf"))))


def largest_score(
    L: Any, program: Program, scores: Any, first: Index, step: Index, count: Index, best: Any,
    at: Index,
) -> None:  # fmt: skip
    """The largest of ``count`` scores ``step`` apart; NaN is passed over."""

    def compare(i: Index, top: list[Vector]) -> list[Vector]:
        score = L.splat(scores, i * step + first)
        return [L.where(score > top[0], score, top[0])]

    (top,) = L.loop(count, [L.f(float("-inf"))], compare)
    L.put(best, at, top)


def new_top(
    L: Any, program: Program, best: Any, first: Index, step: Index, count: Index, top: Any,
    factor: Any, total: Any, g: Index,
) -> None:  # fmt: skip
    """The largest score so far of query g, and by which factor older sums and totals shrink.

    It is among the old one and ``count`` numbers ``step`` apart.
    """

    def compare(i: Index, largest: list[Vector]) -> list[Vector]:
        score = L.splat(best, i * step + first)
        return [L.where(score > largest[0], score, largest[0])]

    before = L.splat(top, g)
    (now,) = L.loop(count, [before], compare)
    nothing = L.f(-3.0e38)  # less than this is −∞: nothing has been seen
    shrink = L.where(before > nothing, L.exp2(before - now), L.f(0.0))
    L.put(top, g, now)
    L.put(factor, g, shrink)
    L.put(total, g, L.splat(total, g) * shrink)


def weigh(L: Any, program: Program, scores: Any, at: Index, top: Any, g: Index) -> None:
    """A score to a weight, 2^(score − top)."""
    best = L.splat(top, g)
    best = L.where(best > L.f(-3.0e38), best, L.f(0.0))
    L.put(scores, at, L.exp2(L.splat(scores, at) - best))


def add_up(
    L: Any, program: Program, numbers: Any, first: Index, step: Index, count: Index, sums: Any,
    at: Index,
) -> None:  # fmt: skip
    """Sum of ``count`` numbers ``step`` apart, added to ``sums[at]``."""

    def add(i: Index, total: list[Vector]) -> list[Vector]:
        return [total[0] + L.splat(numbers, i * step + first)]

    (total,) = L.loop(count, [L.splat(sums, at)], add)
    L.put(sums, at, total)


def add_runs(
    L: Any, program: Program, run: Index, cosines: Any, R: Any, C: Any, weights: Any,
    first: Index, offset: Any, factors: Any, fresh: Index, sums: Any, *, group: int, count: int,
    step: int, pitch: int,
) -> None:  # fmt: skip
    """Weighted values of ``count`` tokens, ``step`` apart, added to the thread's sums of a run.

    ``sums[k * group + g]`` are registers; if ``fresh``, they shrink by the queries' factors first.
    ``weights`` start at the chunk's first token, ``first``, with a group's next to each other.
    """
    totals = [L.splat(sums, i) for i in range(RUN * group)]
    for g in range(group):
        factor = L.choose(fresh, L.splat(factors, g), L.f(1.0))
        for k in range(RUN):
            totals[k * group + g] = totals[k * group + g] * factor
    mean = [L.f(0.0)] * RUN
    if program.offset is not None:
        mean = [L.splat(offset, run * RUN + k) for k in range(RUN)]

    def add_token(i: Index, totals: list[Vector]) -> list[Vector]:
        column = i * step + L.own
        values = _run_values(L, program, run, cosines, R, C, column, pitch)
        if program.offset is not None:
            values = [value + m for value, m in zip(values, mean, strict=True)]
        w = L.splats(weights, (column + first) * group, group)
        return [
            L.fma(values[k], w[g], totals[k * group + g]) for k in range(RUN) for g in range(group)
        ]

    totals = L.loop(count, totals, add_token)
    for i, total in enumerate(totals):
        L.put(sums, i, total)


def reduce_sums(
    L: Any, program: Program, thread: Index, run: Index, sums: Any, room: Any, out: Any,
    place: Index, *, group: int, step: int, threads: int,
) -> None:  # fmt: skip
    """Sums over the threads that share a run, query by query, to ``out[place + g * d + i]``."""
    d, plan = program.head_dim, RunLayout(program)
    for g in range(group):
        L.barrier()

        def offer(g: int = g) -> None:
            for k in range(RUN):
                at = run * (RUN * (step + 1)) + L.own
                L.put(room, at + k * (step + 1), L.splat(sums, k * group + g))

        L.when(run, plan.num_runs, offer)
        L.barrier()

        def collect(i: Index, nothing: list[Vector], g: int = g) -> list[Vector]:
            c = i * threads + thread

            def write() -> None:
                total = L.splat(room, c * (step + 1))
                for t in range(1, step):
                    total = total + L.splat(room, c * (step + 1) + t)
                L.put(out, c + place + g * d, total)

            L.when(c, d, write)
            return nothing

        L.loop(-(-d // threads), [], collect)


def merge_range(
    L: Any, program: Program, outs: Any, tops: Any, totals: Any, item: Index, count: Index,
    c: Index, Z: Any, at: Index, lse: Any, lse_at: Index, *, group: int,
) -> None:  # fmt: skip
    """Coordinate c of one query, merged over ``count`` ranges: ``outs / totals``, to ``Z[at]``.

    ``item`` counts ranges and queries; coordinate 0 writes the natural log-sum-exp, too.
    """
    d, nothing = program.head_dim, L.f(-3.0e38)

    def add(i: Index, state: list[Vector]) -> list[Vector]:
        top, total, value = state
        place = i * group + item
        other, weight = L.splat(tops, place), L.splat(totals, place)
        now = L.where(other > top, other, top)
        a = L.where(top > nothing, L.exp2(top - now), L.f(0.0))
        b = L.where(other > nothing, L.exp2(other - now), L.f(0.0))
        share = L.where(other > nothing, L.splat(outs, place * d + c) * b, L.f(0.0))
        return [now, total * a + weight * b, value * a + share]

    start = [L.f(float("-inf")), L.f(0.0), L.f(0.0)]
    top, total, value = L.loop(count, start, add)
    empty = total <= L.f(0.0)
    L.put(Z, at, L.where(empty, L.f(0.0), L.divide(value, total)))
    natural = (top + L.log2(total)) * L.f(0.6931471805599453)
    natural = L.where(empty, L.f(float("-inf")), natural)
    L.when(c, 1, lambda: L.put(lse, lse_at, natural))
