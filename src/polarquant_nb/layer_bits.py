"""Which layer gets how many bits: the least expected divergence that a budget allows.

Layers differ a hundredfold and more in how much their errors change what a model says next, and
keys differ from values.  The divergence (KL) adds up over layers, keys and values, and where errors
are small each is nearly proportional to its relative error; so measuring each at one or two formats
tells what every format would do, and the best choice for a budget can be worked out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, inf
from typing import Literal

import numpy as np

from polarquant_nb.formats import FormatPair, PolarFormat, full_depth, integer

__all__ = ["LayerNeeds", "allot", "chain", "expected_kl"]

_CHAIN = ((2, 1), (3, 1), (3, 2), (4, 2), (4, 3), (5, 3), (5, 4), (6, 4), (6, 5))
"""b₁ and b₂.  At head_dim 64 and 128, where padding is small, each costs half a bit more than the
one before (the last one .6), and none in between is better: few formats, few kernels to compile."""


_LEAST_KL = 1e-12


@dataclass(frozen=True)
class LayerNeeds:
    """A layer's sizes, and what its errors cost.

    Parameters
    ----------
    num_kv_heads : int
        Kv heads.
    head_dim, value_head_dim : int
        Coordinates of keys and of values.
    key_kl, value_kl : tuple of (float, float)
        Relative errors of formats (:attr:`polarquant_nb.PolarFormat.relative_error`), in ascending
        order, and the KL (nats) measured with keys, or values, in this format and all else exact.

    Raises
    ------
    TypeError
        If a size is no int.
    ValueError
        If a size is not positive, or a number is missing, negative, not finite or out of order.
    """

    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    key_kl: tuple[tuple[float, float], ...]
    value_kl: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "value_head_dim"):
            if integer(name, getattr(self, name)) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("key_kl", "value_kl"):
            points = tuple((float(error), float(kl)) for error, kl in getattr(self, name))
            errors = [error for error, _ in points]
            if not (
                points
                and all(0 < error < inf and 0 <= kl < inf for error, kl in points)
                and errors == sorted(set(errors))
            ):
                raise ValueError(
                    f"{name} is {points}; it must hold relative errors, above 0 and ascending, "
                    "each with a KL that is not negative"
                )
            object.__setattr__(self, name, points)

    def expected_kl(self, formats: FormatPair) -> float:
        """What errors of keys and of values are expected to change, together.

        Parameters
        ----------
        formats : FormatPair
            Of this layer.

        Returns
        -------
        float
            KL, nats; see :func:`expected_kl`.
        """
        keys, values = formats.keys.relative_error, formats.values.relative_error
        return expected_kl(self.key_kl, keys) + expected_kl(self.value_kl, values)


def expected_kl(measured: Sequence[tuple[float, float]], relative_error: float) -> float:
    """KL at an error that was not measured.

    Between errors that were, it follows a power law through the two; beyond, it is proportional
    to the error.

    Parameters
    ----------
    measured : sequence of (float, float)
        See :class:`LayerNeeds`.
    relative_error : float
        Of a format.

    Returns
    -------
    float
        KL, nats.
    """
    errors = [error for error, _ in measured]
    nearest = min(max(relative_error, errors[0]), errors[-1])
    # a side that changes nothing at all has no logarithm
    logs = np.log([max(kl, _LEAST_KL) for _, kl in measured])
    kl = float(np.exp(np.interp(np.log(nearest), np.log(errors), logs)))
    return kl * relative_error / nearest


@cache
def chain(head_dim: int, role: Literal["key", "value"]) -> tuple[PolarFormat, ...]:
    """The formats that bits are allotted from.

    Their radii are of 8 bits, which costs nothing that shows (``docs/explanation/accuracy.md``).

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
    formats = [
        PolarFormat(head_dim, full_depth(head_dim, *bits), offset, radius="log8") for bits in _CHAIN
    ]
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
            (chain(layer.head_dim, "key"), layer.num_kv_heads, layer.key_kl),
            (chain(layer.value_head_dim, "value"), layer.num_kv_heads, layer.value_kl),
        )
    ]
    options = [
        [(heads * fmt.page_nbytes, expected_kl(kl, fmt.relative_error)) for fmt in formats]
        for formats, heads, kl in sides
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
