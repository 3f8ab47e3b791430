"""Colours and axes that all figures share."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "COLOURS",
    "EXPECTED",
    "MARKERS",
    "OBSERVED",
    "angle_axis",
    "label_points",
    "new_axes",
    "panels",
]

# Okabe and Ito's palette, which colour-blind readers can tell apart; and grey.
OBSERVED = "#56B4E9"
EXPECTED = "#D55E00"
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442",
    "#777777",
)  # fmt: skip

MARKERS = "os^Dv<>PXp"  # one more than colours, so that a tenth series looks like none before it

# Where a name may be: its offset from what it names, in points, and which of its edges is there.
_SIDES = [
    ((dx, dy), {"ha": "left" if dx > 0 else "right", "va": "bottom" if dy > 0 else "top"})
    for dx, dy in ((4, 3), (-4, -3), (4, -3), (-4, 3))
]


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


def label_points(ax: Any, labels: list[tuple[float, float, str]]) -> None:
    """Write names next to points, each on the side where it hides the least.

    Parameters
    ----------
    ax : Axes
        With all else on it, and its scales set.
    labels : list of (x, y, name)
        In data coordinates.
    """
    from matplotlib.transforms import Bbox

    ax.figure.canvas.figure.draw_without_rendering()  # a layout moves the axes
    points = ax.transData.transform([(x, y) for x, y, _ in labels])
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in points]  # markers, in pixels
    for i, (x, y, name) in enumerate(labels):
        others = [box for j, box in enumerate(taken) if j != i]
        drawn = [
            ax.annotate(name, (x, y), offset, textcoords="offset points", fontsize="small", **sides)
            for offset, sides in _SIDES
        ]
        boxes = [text.get_window_extent() for text in drawn]
        hidden = [sum(_overlap(box, other) for other in others) for box in boxes]
        best = int(np.argmin(hidden))
        taken.append(boxes[best])
        for text in drawn[:best] + drawn[best + 1 :]:
            text.remove()


def _overlap(a: Any, b: Any) -> float:
    """Area that two rectangles share."""
    width = min(a.x1, b.x1) - max(a.x0, b.x0)
    height = min(a.y1, b.y1) - max(a.y0, b.y0)
    return max(width, 0) * max(height, 0)
