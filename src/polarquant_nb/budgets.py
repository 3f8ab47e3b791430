"""Presets: named pairs of formats, each a budget of bits.

All but ``paper`` use the whole depth of the tree (one radius per vector costs a quarter of a bit
at head_dim 64, where the paper's blocks of 16 cost a whole one), give keys more bits than values,
and give keys their page offset.  Two numbers describe the efficient layouts: b₁ bits at level 1
and b₂ at every level above.
"""

from __future__ import annotations

from functools import cache

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
    those of :meth:`FormatPair.for_budget`, within 3 % of the budget.  ``paper`` is the published
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
    found = FormatPair.for_budget(head_dim, 1.03 * preset(name, 64).bits_per_value)
    return found.keys.level_bits, found.values.level_bits
