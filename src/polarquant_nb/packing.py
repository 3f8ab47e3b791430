"""Which codes share a row of a page: decided once per format, to waste few bits.

Codes of neighbouring coordinates should share rows, because whoever reads one wants the others, and
no bits should be wasted.  So rows are filled group by group: the codes of 8 coordinates (4 of level
1, 2 of level 2, 1 of level 3) are packed by themselves, alike for every group; codes of nodes that
span several groups go into the gaps.  The same is tried for groups of 16, 32, … coordinates and
for the whole vector, and the smallest group that needs the fewest bits is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Field", "choose_rows"]


class Field(NamedTuple):
    """A code within a lane of a row: which node, and its lowest bit."""

    node: int
    shift: int


class _Node(NamedTuple):
    number: int
    level: int
    coordinate: int
    bits: int


Mix = tuple[int, ...]
"""How many codes of each width share a row."""


def choose_rows(head_dim: int, level_bits: Sequence[int]) -> list[tuple[int, tuple[Field, ...]]]:
    """Rows ``(width, fields)`` for the codes of a vector, word rows (32 bits a lane) first.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.
    level_bits : sequence of int
        Bits of each level's codes.

    Returns
    -------
    list of (int, tuple of Field)
        Widths are 32, and at most one 16 and one 8.  Rows of one mix follow each other in the order
        of their coordinates.
    """
    nodes = _all_nodes(head_dim, level_bits)
    deepest = head_dim & -head_dim
    groups = [2**k for k in range(3, deepest.bit_length()) if 2**k < head_dim]
    best, fewest = None, None
    for group in [*groups, head_dim]:
        for pure in (True, False):
            rows = _rows_by_group(nodes, head_dim, group, pure)
            total = sum(width for width, _ in rows)
            if fewest is None or total < fewest:
                best, fewest = rows, total
    assert best is not None
    return best


def _all_nodes(head_dim: int, level_bits: Sequence[int]) -> list[_Node]:
    nodes: list[_Node] = []
    for level, bits in enumerate(level_bits, 1):
        for i in range(head_dim >> level):
            nodes.append(_Node(len(nodes), level, i << level, bits))
    return nodes


def _rows_by_group(
    nodes: list[_Node], head_dim: int, group: int, pure: bool
) -> list[tuple[int, tuple[Field, ...]]]:
    whole = group == head_dim
    local = [n for n in nodes if whole or (1 << n.level <= group and n.coordinate < group)]
    local.sort(key=lambda n: (n.level > 3, n.coordinate, n.level))
    pattern = _assign(local, _choose_mixes(Counter(n.bits for n in local), pure, tails=whole))

    rows: list[tuple[int, list[_Node]]] = []
    for _, same_mix in _by_mix(pattern):
        for start in range(0, head_dim, group):
            for width, members in same_mix:
                rows.append((width, [_moved(nodes, n, start) for n in members]))
    # what spans groups goes into gaps, if possible of its own coordinates, else into new rows
    left: list[_Node] = []
    for node in nodes:
        if not whole and 1 << node.level > group:
            gaps = [members for width, members in rows if _bits(members) + node.bits <= width]
            own = (
                m for m in gaps if m[0].coordinate >> node.level == node.coordinate >> node.level
            )
            next(own, gaps[0] if gaps else left).append(node)
    rows += _assign(left, _choose_mixes(Counter(n.bits for n in left), False, tails=True))
    rows.sort(key=lambda row: -row[0])
    return [(width, _fields(members)) for width, members in rows]


def _moved(nodes: list[_Node], node: _Node, start: int) -> _Node:
    """The node of the same level, ``start`` coordinates further."""
    return nodes[node.number + (start >> node.level)]


def _bits(members: list[_Node]) -> int:
    return sum(n.bits for n in members)


def _fields(members: list[_Node]) -> tuple[Field, ...]:
    shifts = np.cumsum([0, *(n.bits for n in members)])
    return tuple(Field(n.number, int(shift)) for n, shift in zip(members, shifts, strict=False))


def _by_mix(
    pattern: list[tuple[int, list[_Node]]],
) -> list[tuple[tuple[int, ...], list[tuple[int, list[_Node]]]]]:
    """Rows of a group's pattern, collected by the widths of their codes."""
    collected: dict[tuple[int, ...], list[tuple[int, list[_Node]]]] = {}
    for width, members in pattern:
        key = (width, *sorted(n.bits for n in members))
        collected.setdefault(key, []).append((width, members))
    return list(collected.items())


def _assign(
    nodes: list[_Node], mixes: list[tuple[int, dict[int, int]]]
) -> list[tuple[int, list[_Node]]]:
    """Give every row of ``mixes`` its nodes, in order, the widest codes lowest in the lane."""
    queues = {bits: [n for n in nodes if n.bits == bits] for bits in {n.bits for n in nodes}}
    rows = []
    for width, mix in mixes:
        rows.append((width, [queues[bits].pop(0) for bits, n in mix.items() for _ in range(n)]))
    return rows


def _choose_mixes(
    counts: Counter[int], pure: bool, *, tails: bool
) -> list[tuple[int, dict[int, int]]]:
    """Rows ``(width, {bits: codes})`` that hold ``counts`` codes in few bits.

    Row after row takes the mix that wastes the fewest bits; among those, the purest (fewest
    different widths) or the one nearest to the proportions of what is left, so that full mixes last
    as long as possible.  With ``tails`` the last row may be narrower than 32 bits.  Rows rich in
    the widest codes come first: they hold the codes of level 1.
    """
    widths = tuple(sorted(counts, reverse=True))
    left = np.array([counts[bits] for bits in widths], np.int64)
    rows: list[tuple[int, Mix]] = []
    while left @ widths > 32:
        mixes = np.array(_full_mixes(32, widths, left))
        waste = 32 - mixes @ widths
        unevenness = np.abs(mixes / (mixes @ widths)[:, None] - left / (left @ widths)).sum(1)
        preference = (mixes > 0).sum(1) if pure else np.zeros(len(mixes))
        best = mixes[np.lexsort((unevenness, preference, waste))[0]]
        rows.append((32, tuple(int(n) for n in best)))
        left = left - best
    if left.any():
        last = tuple(int(n) for n in left)
        rows += _last_rows(widths, last) if tails else [(32, last)]
    rows.sort(key=lambda row: (-row[0], tuple(-n for n in row[1])))
    return [(w, {b: n for b, n in zip(widths, mix, strict=True) if n}) for w, mix in rows]


def _last_rows(widths: Mix, left: Mix) -> list[tuple[int, Mix]]:
    """The codes of the last 32 bits or fewer, in the narrowest rows that hold them."""
    bits = int(np.dot(left, widths))
    for width in (8, 16):
        if bits <= width:
            return [(width, left)]
    if bits <= 24:
        for mix in _full_mixes(8, widths, left):
            rest = tuple(int(n) for n in np.subtract(left, mix))
            if np.dot(rest, widths) <= 16:
                return [(16, rest), (8, mix)]
    return [(32, left)]


def _full_mixes(capacity: int, widths: Mix, left: npt.ArrayLike) -> list[Mix]:
    """Mixes of at most ``capacity`` bits to which no code that is left can be added."""
    have = [int(n) for n in np.asarray(left)]
    found: list[Mix] = []

    def grow(mix: Mix, room: int) -> None:
        k = len(mix)
        if k < len(widths):
            for n in range(min(room // widths[k], have[k]), -1, -1):
                grow((*mix, n), room - n * widths[k])
        elif any(mix) and all(
            room < bits or n == most for bits, n, most in zip(widths, mix, have, strict=True)
        ):
            found.append(mix)

    grow((), capacity)
    return found
