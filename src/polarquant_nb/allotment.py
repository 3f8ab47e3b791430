"""Which level bits to take for a budget: the few worth considering, and the best of them.

Kernels are compiled for each format, so formats are drawn from few: the whole depth of the tree,
bits that never grow with the level, fall by three in all at most, and by one above level 1.  At
head_dim 64 these are 66 of 46,656.  For budgets of 2 to 5.4 bits a coordinate for the codes, their
error is 9 % above that of the best of all in the mean (28 % at most), as .06 bits would make up
for; with one number of bits for all levels above the first, 18 formats, it would be 28 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import NamedTuple

from polarquant_nb.densities import MAX_BITS, relative_error
from polarquant_nb.layout import PAGE, plan_page

__all__ = ["KEY_WEIGHT", "Part", "best_level_bits", "deepest_level", "sensible_level_bits"]

KEY_WEIGHT = 6.0
"""What errors of keys count by default: they enter the softmax, and cost more than of values."""


class Part(NamedTuple):
    """Vectors that take their share of a budget.

    Parameters
    ----------
    head_dim : int
        Their coordinates.
    offset : {None, 'int8', 'float16'}
        How their page offset is stored.
    radius : {'float16', 'log8'}
        How their radii are stored.
    weight : float
        What their relative error counts.
    """

    head_dim: int
    offset: str | None = None
    radius: str = "float16"
    weight: float = 1.0


def best_level_bits(parts: Sequence[Part], bits_per_value: float) -> list[tuple[int, ...]]:
    """Level bits of the smallest weighted sum of relative errors that a budget allows.

    Parameters
    ----------
    parts : sequence of Part
        What shares the budget.
    bits_per_value : float
        Most bits per stored number over all parts, everything in a whole page counted.

    Returns
    -------
    list of tuple of int
        Level bits of each part, from :func:`sensible_level_bits`.

    Raises
    ------
    ValueError
        If the budget is too small for the first of these.
    """
    values = PAGE * sum(part.head_dim for part in parts)

    def fits(words: float) -> bool:
        return 32 * words / values <= bits_per_value

    def rank(choice: tuple[_Candidate, ...]) -> tuple[float, float]:
        error = sum(p.weight * c.error for p, c in zip(parts, choice, strict=True))
        return error, sum(c.fewest_words for c in choice)

    choices = product(*(_candidates(part.head_dim, part.offset, part.radius) for part in parts))
    # Planning a page takes milliseconds: only those that would fit without padding are planned.
    for choice in sorted((c for c in choices if fits(sum(x.fewest_words for x in c))), key=rank):
        found = [candidate.level_bits for candidate in choice]
        if fits(sum(_words(part, bits) for part, bits in zip(parts, found, strict=True))):
            return found
    raise ValueError(f"bits_per_value is {bits_per_value}; no level bits fit")


def deepest_level(head_dim: int) -> int:
    """Levels of the deepest tree: the exponent of the largest power of two that divides.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.

    Returns
    -------
    int
        6 for 64, 4 for 80.
    """
    return (head_dim & -head_dim).bit_length() - 1


@cache
def sensible_level_bits(head_dim: int) -> tuple[tuple[int, ...], ...]:
    """Level bits that budgets are allotted from; see the top of this module.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.

    Returns
    -------
    tuple of tuple of int
        The fewest bits first.
    """
    levels = deepest_level(head_dim)
    found = set()
    for first, low in product(range(1, MAX_BITS + 1), repeat=2):
        if 0 <= first - low <= 3:
            for wide in range(levels if low < first else 1):  # levels that get one bit more
                found.add((first,) + (low + 1,) * wide + (low,) * (levels - 1 - wide))
    return tuple(sorted(found, key=lambda bits: (_code_bits(head_dim, bits), bits)))


class _Candidate(NamedTuple):
    level_bits: tuple[int, ...]
    error: float
    fewest_words: float  # of a page without padding


@cache
def _candidates(head_dim: int, offset: str | None, radius: str) -> tuple[_Candidate, ...]:
    layout = plan_page(head_dim, sensible_level_bits(head_dim)[0], offset, radius)
    radii = layout.radius_width * len(layout.radius_words)
    others = layout.num_words - layout.offset_word  # offset and anchor
    return tuple(
        _Candidate(
            bits, relative_error(bits), PAGE * (_code_bits(head_dim, bits) + radii) / 32 + others
        )
        for bits in sensible_level_bits(head_dim)
    )


def _words(part: Part, level_bits: tuple[int, ...]) -> int:
    return plan_page(part.head_dim, level_bits, part.offset, part.radius).num_words


def _code_bits(head_dim: int, level_bits: tuple[int, ...]) -> int:
    return sum(bits * (head_dim >> level) for level, bits in enumerate(level_bits, 1))
