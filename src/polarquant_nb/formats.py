"""PolarFormat: everything static that decides the bytes of a page, validated once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Real
from typing import Literal

from polarquant_nb.allotment import (
    KEY_WEIGHT,
    Part,
    best_level_bits,
    deepest_level,
    sensible_level_bits,
)
from polarquant_nb.densities import MAX_BITS, relative_error
from polarquant_nb.layout import PAGE, PageLayout, plan_page

__all__ = ["MAX_HEAD_DIM", "FormatPair", "PolarFormat", "full_depth", "integer"]

MAX_HEAD_DIM = 576

OffsetKind = Literal["int8", "float16"]
RadiusKind = Literal["float16", "log8"]
RotationKind = Literal["hadamard", "haar", "none"]


@dataclass(frozen=True)
class PolarFormat:
    """How vectors of one head are stored.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector: a multiple of 16 from 16 to 576.
    level_bits : sequence of int
        Bits (1 to 6) of the angle codes of each level, level 1 first.  L levels make blocks of
        ``2**L`` coordinates with one radius each; ``2**L`` must divide ``head_dim``.  The
        paper's setting is ``(4, 2, 2, 2)``.
    offset : {None, 'int8', 'float16'}
        Store each page's mean, and code the differences from it.  Keys carry a large, slowly
        varying mean, values do not.  ``'int8'`` has one float16 scale per page.
    rotation : {'hadamard', 'haar', 'none'}
        The random rotation before the polar transform: two rounds of random signs and Hadamard
        butterflies, a dense matrix drawn uniformly from the orthogonal group, or none.
    seed : int
        Of the rotation, 0 to 2**63 − 1.  Keys, values, layers and heads share one rotation.
    radius : {'float16', 'log8'}
        How radii are stored: as float16, or as 8 bits each and 16 for their page.  The 8 bits
        are steps of 1/128 octave where the page's radii span less than about two octaves, and of
        twice as much whenever they span twice as many.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If an argument is outside what is stated above; the message names what is allowed.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, section 4 and Algorithm 1.

    Examples
    --------
    >>> fmt = PolarFormat(head_dim=128, level_bits=(4, 2, 2, 2))
    >>> fmt.block_size, fmt.num_levels, fmt.bits_per_value
    (16, 4, 3.875)
    """

    head_dim: int
    level_bits: tuple[int, ...]
    offset: OffsetKind | None = None
    rotation: RotationKind = "hadamard"
    seed: int = 0
    radius: RadiusKind = "float16"

    def __post_init__(self) -> None:
        head_dim = integer("head_dim", self.head_dim)
        if not (16 <= head_dim <= MAX_HEAD_DIM and head_dim % 16 == 0):
            raise ValueError(
                f"head_dim is {head_dim}; it must be a multiple of 16 from 16 to {MAX_HEAD_DIM}"
            )
        if isinstance(self.level_bits, str) or not isinstance(self.level_bits, Sequence):
            raise TypeError(
                f"level_bits is {self.level_bits!r}; it must be a sequence of ints, such as "
                "(4, 2, 2, 2)"
            )
        bits = tuple(integer("level_bits", b) for b in self.level_bits)
        if not bits or not all(1 <= b <= MAX_BITS for b in bits):
            raise ValueError(
                f"level_bits is {bits}; it must hold at least one level, each 1 to {MAX_BITS} bits"
            )
        deepest = deepest_level(head_dim)
        if len(bits) > deepest:
            raise ValueError(
                f"level_bits has {len(bits)} levels, blocks of {2 ** len(bits)} coordinates, which "
                f"do not divide head_dim {head_dim}; it can have 1 to {deepest} levels"
            )
        if self.offset not in (None, "int8", "float16"):
            raise ValueError(f"offset is {self.offset!r}; it must be None, 'int8' or 'float16'")
        if self.rotation not in ("hadamard", "haar", "none"):
            raise ValueError(
                f"rotation is {self.rotation!r}; it must be 'hadamard', 'haar' or 'none'"
            )
        seed = integer("seed", self.seed)
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed is {seed}; it must be in 0..2**63 - 1")
        if self.radius not in ("float16", "log8"):
            raise ValueError(f"radius is {self.radius!r}; it must be 'float16' or 'log8'")
        for name, value in (("head_dim", head_dim), ("level_bits", bits), ("seed", seed)):
            object.__setattr__(self, name, value)

    @staticmethod
    def for_budget(
        head_dim: int,
        bits_per_value: float,
        role: Literal["key", "value"] = "key",
        *,
        radius: RadiusKind = "float16",
    ) -> PolarFormat:
        """The format of the smallest expected error within a budget.

        It is chosen by :attr:`relative_error` among formats of the whole depth of the tree whose
        bits never grow with the level, fall by three in all at most, and by one above level 1.

        Parameters
        ----------
        head_dim : int
            Coordinates of a vector.
        bits_per_value : float
            Most bits per stored number in whole pages, everything counted: codes, padding, radii
            and, for keys, the offset.
        role : {'key', 'value'}
            Keys store their page offset in int8, values have none.
        radius : {'float16', 'log8'}
            How radii are stored.

        Returns
        -------
        PolarFormat
            Its :attr:`bits_per_value` is at most the budget.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If ``head_dim``, ``role`` or ``radius`` is not supported, or no format is as small as
            the budget; the message names the smallest.

        Examples
        --------
        >>> fmt = PolarFormat.for_budget(128, 4.2, role="key")
        >>> fmt.level_bits, fmt.bits_per_value
        ((5, 3, 3, 3, 3, 3, 3), 4.189453125)
        """
        if role not in ("key", "value"):
            raise ValueError(f"role is {role!r}; it must be 'key' or 'value'")
        smallest = _smallest(head_dim, role, radius)
        budget = _budget(bits_per_value, smallest)
        found = best_level_bits([_part(smallest)], budget)
        return replace(smallest, level_bits=found[0])

    @property
    def num_levels(self) -> int:
        """Levels of the polar tree, L."""
        return len(self.level_bits)

    @property
    def block_size(self) -> int:
        """Coordinates that share a radius, 2**L."""
        return 2**self.num_levels

    @property
    def num_blocks(self) -> int:
        """Blocks, and so radii, of a vector."""
        return self.head_dim // self.block_size

    @property
    def layout(self) -> PageLayout:
        """Where the codes of a page are."""
        return plan_page(self.head_dim, self.level_bits, self.offset, self.radius)

    @property
    def page_nbytes(self) -> int:
        """Bytes of a page of 128 tokens, everything counted."""
        return 4 * self.layout.num_words

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number in a whole page: codes, padding, radii and offset."""
        return 8 * self.page_nbytes / (PAGE * self.head_dim)

    @property
    def relative_error(self) -> float:
        """Closed form of E‖x − x̂‖²/‖x‖², of x − μ where there is an offset: 2(1 − ∏ρ_ℓ).

        It takes radii to be exact.
        """
        return relative_error(self.level_bits)


@dataclass(frozen=True)
class FormatPair:
    """The formats of a cache: one for keys, one for values.

    Parameters
    ----------
    keys, values : PolarFormat
        Their head_dims may differ.
    """

    keys: PolarFormat
    values: PolarFormat

    @staticmethod
    def for_budget(
        head_dim: int,
        bits_per_value: float,
        value_head_dim: int | None = None,
        *,
        key_weight: float = KEY_WEIGHT,
        radius: RadiusKind = "float16",
    ) -> FormatPair:
        """The formats of the smallest expected error whose mean is within a budget.

        The relative error of keys counts more than that of values, as it acts through the softmax.
        What is chosen from is described at :meth:`PolarFormat.for_budget`.

        Parameters
        ----------
        head_dim : int
            Coordinates of keys, and of values unless ``value_head_dim`` is given.
        bits_per_value : float
            Most bits per stored number over keys and values together, everything counted.
        value_head_dim : int, optional
            Coordinates of values.
        key_weight : float
            How many times the error of keys counts that of values, above 0.  Models differ: 6 is
            cautious, for keys that are hard to quantise; on SmolLM2-135M 3 is best
            (``docs/explanation/accuracy.md``).
        radius : {'float16', 'log8'}
            How radii of keys and values are stored.

        Returns
        -------
        FormatPair
            Its :attr:`bits_per_value` is at most the budget.

        Raises
        ------
        TypeError
            If an argument has the wrong type.
        ValueError
            If a head_dim, ``key_weight`` or ``radius`` is not supported, or no pair is as small as
            the budget; the message names the smallest.

        Examples
        --------
        >>> pair = FormatPair.for_budget(128, 3.3)
        >>> pair.keys.level_bits, pair.values.level_bits, pair.bits_per_value
        ((5, 3, 3, 3, 3, 3, 3), (3, 2, 1, 1, 1, 1, 1), 3.2822265625)
        """
        smallest = FormatPair(
            _smallest(head_dim, "key", radius),
            _smallest(head_dim if value_head_dim is None else value_head_dim, "value", radius),
        )
        weight = _number("key_weight", key_weight)
        if not 0 < weight < inf:
            raise ValueError(f"key_weight is {key_weight}; it must be above 0 and finite")
        keys, values = smallest.keys, smallest.values
        parts = [_part(keys, weight), _part(values)]
        found = best_level_bits(parts, _budget(bits_per_value, smallest))
        return FormatPair(replace(keys, level_bits=found[0]), replace(values, level_bits=found[1]))

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number over keys and values together, in whole pages."""
        nbytes = self.keys.page_nbytes + self.values.page_nbytes
        return 8 * nbytes / (PAGE * (self.keys.head_dim + self.values.head_dim))


def full_depth(head_dim: int, first: int, rest: int) -> tuple[int, ...]:
    """Level bits of the deepest tree: ``first`` at level 1, ``rest`` at every level above.

    Parameters
    ----------
    head_dim : int
        A multiple of 16.
    first, rest : int
        Bits, b₁ and b₂.

    Returns
    -------
    tuple of int
        As many levels as the largest power of two that divides ``head_dim`` has.
    """
    return (first,) + (rest,) * (deepest_level(head_dim) - 1)


def integer(name: str, value: object) -> int:
    """An argument that must be an int, of any integer type.

    Parameters
    ----------
    name : str
        For the message.
    value : object
        The argument.

    Returns
    -------
    int
        Its value.

    Raises
    ------
    TypeError
        If it is no int.
    """
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be an int") from None


def _smallest(head_dim: int, role: str, radius: RadiusKind) -> PolarFormat:
    """The format of the fewest bits for a budget; raises if an argument is not supported."""
    offset: OffsetKind | None = "int8" if role == "key" else None
    fmt = PolarFormat(head_dim, (1,), offset=offset, radius=radius)
    return replace(fmt, level_bits=sensible_level_bits(fmt.head_dim)[0])


def _part(fmt: PolarFormat, weight: float = 1.0) -> Part:
    return Part(fmt.head_dim, fmt.offset, fmt.radius, weight)


def _budget(bits_per_value: object, smallest: PolarFormat | FormatPair) -> float:
    """A budget that the smallest format or pair fits in."""
    budget = _number("bits_per_value", bits_per_value)
    if not budget >= smallest.bits_per_value:  # so that NaN is refused, too
        raise ValueError(
            f"bits_per_value is {bits_per_value}; it must be at least {smallest.bits_per_value}, "
            "the bits of the smallest format"
        )
    return budget


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    return float(value)
