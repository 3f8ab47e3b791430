"""Which vectors can be stored, and what to say about those that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, widen

__all__ = ["MAX_NORM", "check_storable", "nonfinite_message", "too_long_message"]

MAX_NORM = 65504.0
"""The largest float16: radii are stored as such."""

_CHUNK = 2**20
"""Numbers looked at at a time: bounds the float32 copies of other types."""

_PROPAGATE = "pass nan='propagate' to store such"


def check_storable(
    x: npt.NDArray[Any],
    kind: ArrayKind,
    name: str,
    padding: Sequence[int],
    longest: float = MAX_NORM,
) -> None:
    """Refuse NaN, inf and vectors too long for a float16 radius.

    Parameters
    ----------
    x : ndarray, shape ``(batch, num_kv_heads, n, head_dim)``
        Elements, from :func:`~polarquant_nb.arrays.open_elements`.
    kind : ArrayKind
        What they are.
    name : str
        For messages.
    padding : sequence of int
        How many first tokens of each batch row are not looked at.
    longest : float
        The largest norm that can be stored: less where a preconditioner makes vectors longer.

    Raises
    ------
    ValueError
        If a vector is not finite or its norm is beyond ``longest``; the message names the first.
    """
    limit = np.float32(longest**2)
    if x.size <= _CHUNK and not any(padding):
        flat = widen(x, kind).reshape(-1)
        if np.dot(flat, flat) <= limit:  # all together are no longer than one may be
            return
        parts = [((0, 0, 0), x)]
    else:
        tokens = max(1, _CHUNK // x.shape[-1])
        parts = [
            ((row, head, start), x[row : row + 1, head : head + 1, start : start + tokens])
            for row, head in np.ndindex(x.shape[:2])
            for start in range(padding[row], x.shape[2], tokens)
        ]
    for first, part in parts:
        wide = widen(part, kind)
        with np.errstate(over="ignore", invalid="ignore"):  # what overflows is found
            squared = np.vecdot(wide, wide)
        if not squared.max(initial=0) <= limit:  # NaN compares as False
            at = np.argwhere(~(squared <= limit))[0]
            index = tuple(int(i) for i in at + first)
            vector = x[index]
            raise ValueError(
                nonfinite_message(vector, kind, name, index)
                or too_long_message(vector, kind, name, index, longest)
            )


def nonfinite_message(
    vector: npt.NDArray[Any], kind: ArrayKind, name: str, index: tuple[int, ...]
) -> str | None:
    """What to say about a vector's first number that is not finite in float32, if there is one.

    Parameters
    ----------
    vector : ndarray, 1-d
        Elements.
    kind : ArrayKind
        What they are.
    name : str
        Of the array.
    index : tuple of int
        Of the vector.

    Returns
    -------
    str or None
        A message that names the number as it was given.
    """
    bad = np.flatnonzero(~np.isfinite(widen(vector, kind)))
    if not bad.size:
        return None
    i = int(bad[0])
    value = vector[i] if kind.dtype == "float64" else widen(vector, kind)[i]
    reason = ", beyond float32" if np.isfinite(value) else ""
    return f"{name} is {value} at index {(*index, i)}{reason}; {_PROPAGATE} rows as NaN and go on"


def too_long_message(
    vector: npt.NDArray[Any], kind: ArrayKind, name: str, index: tuple[int, ...],
    longest: float = MAX_NORM,
) -> str:  # fmt: skip
    """What to say about a vector that is too long.

    Parameters
    ----------
    vector, kind, name, index
        See :func:`nonfinite_message`.
    longest : float
        The largest norm that can be stored whatever the vector.

    Returns
    -------
    str
        A message that names its norm.
    """
    norm = float(np.linalg.norm(widen(vector, kind).astype(np.float64)))
    reduced = "" if longest == MAX_NORM else f" ({longest:.4g} with this preconditioner)"
    return (
        f"{name} at index {index} has norm {norm:.4g}; radii beyond 65504, the largest float16"
        f"{reduced}, cannot be stored: scale {name} down, or {_PROPAGATE} radii as 65504 and go on"
    )
