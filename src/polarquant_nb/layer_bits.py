"""Which layer gets how many bits: the least expected divergence that a budget allows.

Layers differ fifty-fold in how much their errors change what a model says next, and so do keys
from values.  The divergence (KL) adds up over layers, keys and values, and is nearly proportional
to the relative error of each; so measuring each once, at one format, tells what every format would
do, and the best choice for a budget can be worked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, inf
from typing import Literal

import numpy as np

from polarquant_nb.formats import FormatPair, PolarFormat, full_depth, integer

__all__ = ["LayerNeeds", "allot", "chain"]

_CHAIN = ((2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (5, 4), (6, 4), (6, 5))
"""b₁ and b₂.  At head_dim 64 and 128, where padding is small, each costs half a bit more than the
one before (the last one .6), and none in between is better: few formats, few kernels to compile."""


@dataclass(frozen=True)
class LayerNeeds:
    """A layer's sizes, and what its errors cost.

    Parameters
    ----------
    num_kv_heads : int
        Kv heads.
    head_dim, value_head_dim : int
        Coordinates of keys and of values.
    key_sensitivity, value_sensitivity : float
        KL (nats) per unit of relative error, :attr:`PolarFormat.relative_error`.

    Raises
    ------
    TypeError
        If a size is no int, or a sensitivity no number.
    ValueError
        If there is no kv head, or a sensitivity is negative or not finite.
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    key_sensitivity: float
    value_sensitivity: float

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "value_head_dim"):
            if integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("key_sensitivity", "value_sensitivity"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name} is {value!r}; it must be a number")
            if not 0 <= value < inf:
                raise ValueError(f"{name} is {value}; it must be at least 0 and finite")


@cache
def chain(head_dim: int, role: Literal["key", "value"]) -> tuple[PolarFormat, ...]:
    """The formats that bits are allotted from.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.
    role : {'key', 'value'}
        Keys store their page offset in int8, values have none.

    Returns
    -------
    tuple of PolarFormat
        The fewest bits and largest error first; what costs more and is no better is left out.

    Raises
    ------
    ValueError
        If ``head_dim`` is not supported.
    """
    offset: Literal["int8"] | None = "int8" if role == "key" else None
    formats = [PolarFormat(head_dim, full_depth(head_dim, *bits), offset) for bits in _CHAIN]
    kept: list[PolarFormat] = []
    for fmt in sorted(formats, key=lambda fmt: (fmt.page_nbytes, fmt.relative_error)):
        if not kept or fmt.relative_error < kept[-1].relative_error:
            kept.append(fmt)
    return tuple(kept)


def allot(layers: Sequence[LayerNeeds], bits_per_value: float) -> list[FormatPair]:
    """The formats of all layers with the least sum of KL within a budget.

    Parameters
    ----------
    layers : sequence of LayerNeeds
        The layers that are compressed; at least one.
    bits_per_value : float
        Most bits per stored number, the mean over the keys and values of all layers in whole pages,
        everything counted: codes, padding, radii, offsets.

    Returns
    -------
    list of FormatPair
        Of each layer, from :func:`chain`.

    Raises
    ------
    ValueError
        If no choice is as small as the budget; the message names the smallest.
    """
    sides = [
        side
        for layer in layers
        for side in (
            (chain(layer.head_dim, "key"), layer.num_kv_heads, layer.key_sensitivity),
            (chain(layer.value_head_dim, "value"), layer.num_kv_heads, layer.value_sensitivity),
        )
    ]
    options = [
        [(heads * fmt.page_nbytes, sensitivity * fmt.relative_error) for fmt in formats]
        for formats, heads, sensitivity in sides
    ]
    # A page holds 128 tokens: head_dim · 128 numbers, so head_dim · 16 bytes for each bit of them.
    bytes_per_bit = 16 * sum(n.num_kv_heads * (n.head_dim + n.value_head_dim) for n in layers)
    smallest = sum(side[0][0] for side in options)
    if not bits_per_value * bytes_per_bit >= smallest:  # so that NaN is refused, too
        raise ValueError(
            f"bits_per_value is {bits_per_value}; it must be at least "
            f"{smallest / bytes_per_bit:.3f}, the bits of the smallest formats"
        )
    largest = sum(side[-1][0] for side in options)
    chosen = _least_cost(options, int(min(bits_per_value * bytes_per_bit, largest)))
    picked = [formats[i] for (formats, *_), i in zip(sides, chosen, strict=True)]
    return [FormatPair(k, v) for k, v in zip(picked[::2], picked[1::2], strict=True)]


def _least_cost(options: Sequence[Sequence[tuple[int, float]]], capacity: int) -> list[int]:
    """One option of each group, for the least sum of costs whose sum of sizes fits.

    Exact, by dynamic programming over the size that is used beyond the smallest, in units of its
    greatest common divisor.

    Parameters
    ----------
    options : sequence of sequences of (int, float)
        Size and cost; the smallest first.  The smallest of all fit.
    capacity : int
        Of all sizes.

    Returns
    -------
    list of int
        Index of each group's option.
    """
    extras = [[size - group[0][0] for size, _ in group] for group in options]
    unit = gcd(*(extra for group in extras for extra in group)) or 1
    room = (capacity - sum(group[0][0] for group in options)) // unit
    best = np.zeros(room + 1)  # least cost of the groups so far that use at most so much
    choices = []
    for group, extra in zip(options, extras, strict=True):
        costs = np.full((len(group), room + 1), np.inf)
        for i, ((_, cost), size) in enumerate(zip(group, extra, strict=True)):
            used = size // unit
            costs[i, used:] = best[: max(room + 1 - used, 0)] + cost
        choices.append(costs.argmin(0))  # of equal costs the smallest option
        best = costs.min(0)
    chosen = []
    for choice, extra in zip(reversed(choices), reversed(extras), strict=True):
        chosen.append(int(choice[room]))
        room -= extra[chosen[-1]] // unit
    return chosen[::-1]
