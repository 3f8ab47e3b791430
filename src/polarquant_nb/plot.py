"""Figures of what :mod:`polarquant_nb.analysis` returns, drawn on the axes that are given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["angles"]

# Two colours of Okabe and Ito's palette, which colour-blind readers can tell apart.
_OBSERVED = "#56B4E9"
_EXPECTED = "#D55E00"


def angles(ds: xr.Dataset, ax: Any = None) -> Any:
    """Draw the histogram of each level's angles, and their theoretical density as a line.

    Parameters
    ----------
    ds : xarray.Dataset
        From :func:`polarquant_nb.analysis.angles`; ``ds.sel(level=2)`` draws one level.
    ax : matplotlib Axes, or an array of one for each level, optional
        Where to draw; by default a new figure with the levels side by side.

    Returns
    -------
    Axes, or ndarray of Axes
        What was drawn on: one Axes for one level, else as many as there are levels.

    Raises
    ------
    ValueError
        If the number of axes is not the number of levels.
    """
    levels = np.atleast_1d(ds["level"].values)
    if ax is None:
        from matplotlib import pyplot as plt

        size = (2.6 * len(levels), 2.4)
        _, ax = plt.subplots(1, len(levels), figsize=size, layout="constrained", squeeze=False)
    axes = np.atleast_1d(np.asarray(ax, dtype=object)).ravel()
    if len(axes) != len(levels):
        raise ValueError(f"ax holds {len(axes)} axes; the dataset has {len(levels)} levels")
    for level, axis in zip(levels, axes, strict=True):
        _draw_level(ds if ds["level"].ndim == 0 else ds.sel(level=level), int(level), axis)
    return axes[0] if len(axes) == 1 else axes


def _draw_level(one: xr.Dataset, level: int, ax: Any) -> None:
    center = one["angle"].values
    half = (center[1] - center[0]) / 2 if len(center) > 1 else center[0]
    edges = np.append(center - half, center[-1] + half)
    ax.stairs(one["density"].values, edges, fill=True, color=_OBSERVED, label="observed")
    ax.plot(center, one["expected_density"].values, color=_EXPECTED, label="theory")
    ax.set_title(f"level {level}")
    ax.set_xlabel("angle (rad)")
    ax.set_xlim(edges[0], edges[-1])
    ticks = np.linspace(0, edges[-1], 3)
    ax.set_xticks(ticks, ["0", "π", "2π"] if level == 1 else ["0", "π/4", "π/2"])
