"""What formats do to given vectors: angles, errors of layers and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from polarquant_nb.plot.style import (
    COLOURS,
    EXPECTED,
    MARKERS,
    OBSERVED,
    angle_axis,
    new_axes,
    panels,
)

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["angles", "layer_error"]


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
    n = len(levels)
    axes = panels(ax, 1, n, (2.6 * n, 2.4), f"the dataset has {n} levels")
    for level, axis in zip(levels, axes, strict=True):
        _draw_level(ds if ds["level"].ndim == 0 else ds.sel(level=level), int(level), axis)
    axes[0].set_ylabel("density (rad⁻¹)")
    axes[-1].legend(loc="upper left", fontsize="x-small", frameon=False, handlelength=1)
    return axes[0] if len(axes) == 1 else axes


def layer_error(ds: xr.Dataset, variable: str = "error", ax: Any = None) -> Any:
    """Draw an error over layers: the mean of its heads as a line, each head as a dot.

    Parameters
    ----------
    ds : xarray.Dataset
        From :func:`polarquant_nb.analysis.attention_error`, or any with the dimension ``layer`` and
        maybe ``format``, which have a colour each; all other dimensions are heads.
    variable : str
        Which variable: ``'error'``, ``'kl'`` or another.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    Axes
        What was drawn on.

    Raises
    ------
    ValueError
        If the dataset has no such variable, or it has no dimension ``layer``.
    """
    if variable not in ds or "layer" not in ds[variable].dims:
        layered = [str(name) for name in ds if "layer" in ds[name].dims]
        raise ValueError(
            f"variable is {variable!r}; it must be one with a dimension 'layer': "
            f"{', '.join(layered) or 'the dataset has none'}"
        )
    if ax is None:
        ax = new_axes(1, 1, (8, 4))[0, 0]
    drawn = ds[variable]
    if "format" not in drawn.dims:
        drawn = drawn.expand_dims("format")
    heads = [name for name in drawn.dims if name not in ("format", "layer")]
    drawn = drawn.stack(heads=heads) if heads else drawn.expand_dims("heads")
    drawn = drawn.transpose("format", "layer", "heads")
    layers = drawn["layer"].values
    names = drawn["format"].values if "format" in ds.coords else [variable]
    for i, name in enumerate(names):
        colour, values = COLOURS[i % len(COLOURS)], drawn[i].values
        if values.shape[1] > 1:
            ax.plot(layers, values, ".", color=colour, alpha=0.4, markersize=4, linestyle="none")
        marker = MARKERS[i % len(MARKERS)]
        ax.plot(layers, values.mean(1), marker + "-", color=colour, label=str(name), markersize=5)
    ax.set_yscale("log")
    ax.set_xlabel("layer")
    ax.xaxis.get_major_locator().set_params(integer=True)
    units = drawn.attrs.get("units", "1")
    ax.set_ylabel(drawn.attrs.get("long_name", variable) + ("" if units == "1" else f" ({units})"))
    if len(names) > 1:
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return ax


def _draw_level(one: xr.Dataset, level: int, ax: Any) -> None:
    center = one["angle"].values
    half = (center[1] - center[0]) / 2 if len(center) > 1 else center[0]
    edges = np.append(center - half, center[-1] + half)
    ax.stairs(one["density"].values, edges, fill=True, color=OBSERVED, label="observed")
    ax.plot(center, one["expected_density"].values, color=EXPECTED, label="theory")
    angle_axis(ax, level, edges[-1])
