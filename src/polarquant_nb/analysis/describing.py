"""What datasets say of themselves, and what a format sees of vectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.reference import page_offsets
from polarquant_nb.rotations import rotation_for

__all__ = ["coded", "described", "format_attrs", "level_coord"]


def described(
    dims: str | Iterable[str], data: Any, long_name: str, units: str = "1"
) -> tuple[Any, ...]:
    """A variable as xarray takes it.

    Parameters
    ----------
    dims : str or iterable of str
        Dimensions.
    data : array_like
        Numbers.
    long_name : str
        What they are.
    units : str
        As the CF conventions write them; ``'1'`` for none.

    Returns
    -------
    tuple
        Dimensions, numbers and attributes.
    """
    dims = dims if isinstance(dims, str) else tuple(dims)
    return dims, data, {"long_name": long_name, "units": units}


def level_coord(levels: Iterable[int]) -> tuple[Any, ...]:
    """The coordinate ``level``."""
    return described("level", np.array(list(levels), np.int64), "level of the polar tree")


def format_attrs(fmt: PolarFormat) -> dict[str, Any]:
    """The format, in types that NetCDF can hold."""
    return {
        "head_dim": fmt.head_dim,
        "level_bits": list(fmt.level_bits),
        "offset": fmt.offset or "none",
        "radius": fmt.radius,
        "rotation": fmt.rotation,
        "rotation_seed": fmt.seed,
    }


def coded(vectors: npt.NDArray[np.float64], fmt: PolarFormat) -> npt.NDArray[np.float64]:
    """What the polar transform sees: rotated vectors, minus the page offset where there is one.

    Parameters
    ----------
    vectors : ndarray of float64, shape ``(..., seq_len, head_dim)``
        Whole pages, but for the last.
    fmt : PolarFormat
        Rotation and offset.

    Returns
    -------
    ndarray of float64, of the same shape
        Rotated vectors.
    """
    r = rotation_for(fmt).apply(vectors)
    if fmt.offset is None:
        return r
    return r - np.repeat(page_offsets(r, fmt), PAGE, -2)[..., : r.shape[-2], :]
