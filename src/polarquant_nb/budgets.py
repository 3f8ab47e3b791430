"""Presets: named pairs of formats, each a budget of bits.

All but ``paper`` use the whole depth of the tree (one radius per vector costs a quarter of a bit
at head_dim 64, where the paper's blocks of 16 cost a whole one), give keys more bits than values,
and give keys their page offset.  Two numbers describe the efficient layouts: b₁ bits at level 1
and b₂ at every level above.
"""

from __future__ import annotations

from functools import cache
from itertools import product

from polarquant_nb.densities import relative_error
from polarquant_nb.formats import FormatPair, PolarFormat, full_depth

__all__ = ["DEFAULT_PRESET", "format_pair", "preset", "presets"]

DEFAULT_PRESET = "balanced"

# name: ((b₁, b₂) of keys, (b₁, b₂) of values)
_CHAIN = {
    "tiny": ((4, 2), (3, 1)),
    "compact": ((4, 3), (3, 2)),
    "balanced": ((5, 4), (4, 2)),
    "accurate": ((5, 4), (5, 3)),
}

# Key errors enter the attention logits and cost more than value errors of the same size.
_KEY_WEIGHT = 6.0


def presets() -> tuple[str, ...]:
    """Names of the presets, from the paper's own setting to the most accurate.

    Returns
    -------
    tuple of str
        ``('paper', 'tiny', 'compact', 'balanced', 'accurate')``.
    """
    return ("paper", *_CHAIN)


def preset(
    name: str = DEFAULT_PRESET, head_dim: int = 128, *, value_head_dim: int | None = None
) -> FormatPair:
    """The formats of a preset for a head_dim.

    A preset is a budget of bits per number: about 2.8 (``tiny``), 3.3 (``compact``), 4.0
    (``balanced``) and 4.5 (``accurate``), keys and values together.  At head_dim 64, 128 and 256
    the level bits are fixed; elsewhere, where more or fewer radii have to be paid for, the bits are
    chosen for the smallest expected error within 3 % of the budget.  ``paper`` is the published
    setting, 4, 2, 2, 2 in blocks of 16 for keys and values alike, 3.875 bits, without offset.

    Parameters
    ----------
    name : str
        One of :func:`presets`.
    head_dim : int
        Coordinates of keys, and of values unless ``value_head_dim`` is given.
    value_head_dim : int, optional
        Coordinates of values.

    Returns
    -------
    FormatPair
        Key and value format.

    Raises
    ------
    ValueError
        If the name is unknown or a head_dim is not supported.

    Examples
    --------
    >>> pair = preset("balanced", head_dim=128)
    >>> pair.keys.level_bits, pair.values.level_bits
    ((5, 4, 4, 4, 4, 4, 4), (4, 2, 2, 2, 2, 2, 2))
    """
    _check_name(name)
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    for width in (head_dim, value_head_dim):
        PolarFormat(width, (1,))  # raises if it is not supported
    if name == "paper":
        paper = (4, 2, 2, 2)
        return FormatPair(PolarFormat(head_dim, paper), PolarFormat(value_head_dim, paper))
    return FormatPair(
        PolarFormat(head_dim, _level_bits(name, head_dim)[0], offset="int8"),
        PolarFormat(value_head_dim, _level_bits(name, value_head_dim)[1]),
    )


def format_pair(
    key_format: str | FormatPair | PolarFormat,
    value_format: PolarFormat | None = None,
    *,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
) -> FormatPair:
    """The pair that formats are given as: a preset's name, a pair, or one or two formats.

    Parameters
    ----------
    key_format : str, FormatPair or PolarFormat
        The name of a preset, with ``head_dim``; a pair; or the format of keys.
    value_format : PolarFormat, optional
        The format of values, where ``key_format`` is a PolarFormat; by default the same.
    head_dim, value_head_dim : int, optional
        See :func:`preset`; for names only.

    Returns
    -------
    FormatPair
        Key and value format.

    Raises
    ------
    TypeError
        If they are given in any other way.
    ValueError
        If a preset is unknown or a head_dim is not supported.
    """
    if isinstance(key_format, str):
        _check_name(key_format)
        if head_dim is None:
            raise TypeError(f"key_format is {key_format!r}, a preset, which needs head_dim too")
        if value_format is not None:
            raise TypeError(f"value_format is {value_format!r}; a preset has one already")
        return preset(key_format, head_dim, value_head_dim=value_head_dim)
    if head_dim is not None or value_head_dim is not None:
        raise TypeError(
            f"head_dim is {head_dim} and value_head_dim {value_head_dim}; they go with the name of "
            "a preset, while formats have their own"
        )
    if isinstance(key_format, FormatPair):
        if value_format is not None:
            raise TypeError(f"value_format is {value_format!r}; a FormatPair has one already")
        return key_format
    value_format = key_format if value_format is None else value_format
    for name, fmt in (("key_format", key_format), ("value_format", value_format)):
        if not isinstance(fmt, PolarFormat):
            raise TypeError(
                f"{name} is {fmt!r}; formats are given as two PolarFormat, a FormatPair, or the "
                f"name of a preset: {', '.join(presets())}"
            )
    return FormatPair(key_format, value_format)


def _check_name(name: str) -> None:
    if name not in presets():
        raise ValueError(f"preset is {name!r}; it must be one of {', '.join(presets())}")


@cache
def _level_bits(name: str, head_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Level bits of keys and values."""
    keys, values = _CHAIN[name]
    if head_dim in (64, 128, 256):
        return full_depth(head_dim, *keys), full_depth(head_dim, *values)
    budget = preset(name, 64).bits_per_value

    def within_budget(key_bits: tuple[int, ...], value_bits: tuple[int, ...]) -> bool:
        key_format = PolarFormat(head_dim, key_bits, offset="int8")
        exact = FormatPair(key_format, PolarFormat(head_dim, value_bits)).bits_per_value
        return abs(exact / budget - 1) <= 0.03

    candidates = [
        (_code_bits(head_dim, bits), relative_error(bits), bits) for bits in _sensible(head_dim)
    ]
    radii_and_offset = 2 * 16 * head_dim / (head_dim & -head_dim) + head_dim / 16
    ranked = sorted(
        (_KEY_WEIGHT * key_error + value_error, key_bits, value_bits)
        for key_cost, key_error, key_bits in candidates
        for value_cost, value_error, value_bits in candidates
        if key_error <= value_error
        and 0.9 <= (key_cost + value_cost + radii_and_offset) / (2 * head_dim) / budget <= 1.03
    )
    return next((keys, values) for _, keys, values in ranked if within_budget(keys, values))


def _sensible(head_dim: int) -> list[tuple[int, ...]]:
    """Bits that never grow with the level, and above level 1 differ by one at most."""
    levels = len(full_depth(head_dim, 1, 1))
    found = []
    for first, low in product(range(1, 7), repeat=2):
        if 0 <= first - low <= 3:
            for wide in range(levels if low < first else 1):  # levels that get one bit more
                found.append((first,) + (low + 1,) * wide + (low,) * (levels - 1 - wide))
    return found


def _code_bits(head_dim: int, level_bits: tuple[int, ...]) -> int:
    return sum(bits * (head_dim >> level) for level, bits in enumerate(level_bits, 1))
