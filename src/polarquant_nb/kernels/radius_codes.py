"""Radii of 8 bits as lane programs; what codes and anchors mean is said in ``radii.py``.

The anchor depends on all radii of a page.  So the encoder holds their float32 bits until it has
all of them, ``radii[block * 128 + lane]``, and codes them then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from polarquant_nb.kernels.jit import Program
from polarquant_nb.kernels.lanes import Index, Vector, stage
from polarquant_nb.layout import PAGE
from polarquant_nb.radii import (
    GRID_START,
    LARGEST_SHIFT,
    LARGEST_SPAN,
    NAN_BITS,
    NAN_CODE,
    SMALLEST_BITS,
)

__all__ = [
    "anchor_of",
    "choose_anchor",
    "code_reader",
    "code_writer",
    "empty_range",
    "radius_range",
    "store_radius_codes",
    "widen_range",
]


def code_reader(L: Any, words: Any, anchor_at: Index) -> Callable[[Vector], Vector]:
    """What turns codes of a page into radii."""
    index, shift = _anchor(L, words, anchor_at)
    bits_of_0 = (index << L.u(16)) + L.u(GRID_START)

    def read(code: Vector) -> Vector:
        bits = L.where(code >= L.u(1), bits_of_0 + (code << shift), L.u(0))
        return L.as_float(L.where(code >= L.u(NAN_CODE), L.u(NAN_BITS), bits))

    return read


@stage
def radius_range(L: Any, program: Program, radii: Any, extremes: Any) -> None:
    """Least and greatest of a page's radii in each lane; see :func:`widen_range`."""

    def compare(i: Index, best: list[Vector]) -> list[Vector]:
        return widen_range(L, best, L.load(radii, i * L.n))

    vectors = (program.head_dim >> len(program.level_bits)) * PAGE // L.n
    least, greatest = L.loop(vectors, empty_range(L), compare)
    L.store(extremes, 0, least)
    L.store(extremes, L.n, greatest)


def empty_range(L: Any) -> list[Vector]:
    """The range of no radius."""
    return [L.u(0xFFFFFFFF), L.u(0)]


def widen_range(L: Any, extremes: list[Vector], bits: Vector) -> list[Vector]:
    """Least and greatest bits of radii that get a code from 1 to 254.

    The least count from ``SMALLEST_BITS``; the greatest are below that where there is no such
    radius at all.
    """
    above = bits - L.u(SMALLEST_BITS)  # what is smaller wraps round, and is never the least
    number = L.where(bits >= L.u(NAN_BITS), L.u(0), bits)
    least, greatest = extremes
    least = L.where(least >= above, above, least)
    return [least, L.where(number >= greatest, number, greatest)]


def anchor_of(L: Any, extremes: list[Vector]) -> Vector:
    """The anchor with the smallest steps that reach from the least to the greatest radius."""
    least, greatest = extremes[0] + L.u(SMALLEST_BITS), extremes[1]
    anchor = L.u(0)
    for shift in range(LARGEST_SHIFT, -1, -1):
        half_step, bits = L.u(1 << (15 + shift)), L.u(16 + shift)
        first, last = ((end - L.u(GRID_START) + half_step) >> bits for end in (least, greatest))
        reaches = L.u(LARGEST_SPAN) >= last - first
        anchor = L.where(reaches, (first - L.u(1)) << L.u(shift + 3) | L.u(shift), anchor)
    return L.where(greatest >= L.u(SMALLEST_BITS), anchor, L.u(0))


@stage
def choose_anchor(L: Any, program: Program, extremes: Any, anchor: Any) -> None:
    """The anchor of a page, in every lane, from the extremes of all lanes in the first."""
    L.store(anchor, 0, anchor_of(L, [L.splat(extremes, 0), L.splat(extremes, L.n)]))


@stage
def store_radius_codes(L: Any, program: Program, radii: Any, words: Any, page: Index) -> None:
    """Codes of a page's radii, by the anchor that the page has already."""
    layout = program.layout
    code_of = code_writer(L, words, page + layout.anchor_word)
    for block, word in enumerate(layout.radius_words):

        def store(i: Index, nothing: list[Vector], block: int = block, word: int = word) -> Any:
            lane = i * L.n
            code = code_of(L.load(radii, lane + block * PAGE))
            L.store_lanes(words, page + word, lane, 8, code)
            return nothing

        L.loop(PAGE // L.n, [], store)


def code_writer(L: Any, words: Any, anchor_at: Index) -> Callable[[Vector], Vector]:
    """What turns the bits of radii into codes of a page; rounds to nearest, upwards in the middle.

    The bits are of radii up to 65504, of which the anchor reaches all, or ``NAN_BITS``.
    """
    index, shift = _anchor(L, words, anchor_at)
    half_step = L.u(1) << (shift - L.u(1))
    code_0 = index >> (shift - L.u(16))

    def write(bits: Vector) -> Vector:
        code = ((bits - L.u(GRID_START) + half_step) >> shift) - code_0
        code = L.where(bits >= L.u(SMALLEST_BITS), code, L.u(0))
        return L.where(bits >= L.u(NAN_BITS), L.u(NAN_CODE), code)

    return write


def _anchor(L: Any, words: Any, at: Index) -> tuple[Vector, Vector]:
    """The grid's index of code 0, and by how many bits codes are shifted."""
    anchor = L.splat(words, at) >> L.u(16)
    return anchor >> L.u(3), (anchor & L.u(7)) + L.u(16)
