"""Colours and axes that all figures share."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["COLOURS", "EXPECTED", "MARKERS", "OBSERVED", "angle_axis", "new_axes", "panels"]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
OBSERVED = "#56B4E9"
EXPECTED = "#D55E00"
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442",
)  # fmt: skip

MARKERS = "os^Dv<>PX"  # one more than colours, so that a ninth series looks like none before it


def new_axes(rows: int, columns: int, size: tuple[float, float]) -> Any:
    """Axes of a new figure of pyplot.

    Parameters
    ----------
    rows, columns : int
        How many.
    size : tuple of float
        Of the figure, in inches.

    Returns
    -------
    ndarray of Axes, shape ``(rows, columns)``
        Laid out so that labels do not overlap.
    """
    from matplotlib import pyplot as plt

    return plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)[1]


def panels(ax: Any, rows: int, columns: int, size: tuple[float, float], what: str) -> Any:
    """The axes that a caller gave, or new ones.

    Parameters
    ----------
    ax : Axes, an array of them, or None
        Given.
    rows, columns, size
        Of a new figure; see :func:`new_axes`.  There must be ``rows * columns`` axes.
    what : str
        What there is one for each of, for the message.

    Returns
    -------
    ndarray of Axes
        One-dimensional.

    Raises
    ------
    ValueError
        If there are more or fewer.
    """
    given = new_axes(rows, columns, size) if ax is None else ax
    axes = np.atleast_1d(np.asarray(given, dtype=object)).ravel()
    if len(axes) != rows * columns:
        raise ValueError(f"ax holds {len(axes)} axes; {what}")
    return axes


def angle_axis(ax: Any, level: int, end: float) -> None:
    """Label an axis of a level's angles.

    Parameters
    ----------
    ax : Axes
        Its x axis.
    level : int
        Of the polar tree.
    end : float
        Upper end of the level's range, in radians.
    """
    ax.set_title(f"level {level}")
    ax.set_xlabel("angle (rad)")
    ax.set_xlim(0, end)
    ax.set_xticks(np.linspace(0, end, 3), ["0", "π", "2π"] if level == 1 else ["0", "π/4", "π/2"])
