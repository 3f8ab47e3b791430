"""Sums over arrays that need not fit into memory: a head's tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.layout import PAGE

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["index_coords", "open_dims", "open_vectors", "run", "sums"]

_NUMBERS = 2**22
"""Numbers of a piece: 32 MiB in float64."""


def open_vectors(x: Any, head_dim: int) -> xr.DataArray:
    """Vectors as a DataArray; what is in a file, or dask's, stays there.

    Parameters
    ----------
    x : ndarray, torch.Tensor, dask array or xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Vectors.
    head_dim : int
        Coordinates that they must have.

    Returns
    -------
    xarray.DataArray
        Not looked at.

    Raises
    ------
    ValueError
        If the shape is another, or there is no vector.
    """
    import xarray as xr

    if isinstance(x, xr.DataArray):
        array = x
    else:
        if hasattr(x, "detach"):
            x = x.detach().cpu()
            x = (x.float() if str(x.dtype) == "torch.bfloat16" else x).numpy()
        elif not hasattr(x, "chunks"):  # which dask arrays have
            x = np.asarray(x)
        array = xr.DataArray(x)
    if array.ndim < 2 or array.shape[-1] != head_dim:
        raise ValueError(f"x has shape {array.shape}; the format needs (..., seq_len, {head_dim})")
    if array.size == 0:
        raise ValueError(f"x has shape {array.shape}; it must hold at least one vector")
    return array


def open_dims(by: str | Iterable[str], array: xr.DataArray) -> tuple[str, ...]:
    """Named dimensions that a result keeps.

    Parameters
    ----------
    by : str or iterable of str
        What the caller named.
    array : xarray.DataArray
        Vectors.

    Returns
    -------
    tuple of str
        The same.

    Raises
    ------
    ValueError
        If the array has no such dimension before its last two, or one is named twice.
    """
    names = (by,) if isinstance(by, str) else tuple(by)
    allowed = [str(name) for name in array.dims[:-2]]
    if not set(names) <= set(allowed) or len(set(names)) < len(names):
        raise ValueError(
            f"by is {by!r}; it must name dimensions before the last two of x, each once: "
            f"{', '.join(allowed) or 'there are none'}"
        )
    return names


def sums(
    function: Callable[[npt.NDArray[np.float64]], npt.NDArray[Any]],
    array: xr.DataArray,
    by: Sequence[str] = (),
) -> npt.NDArray[Any]:
    """Σ of a function's arrays over pieces: some whole pages of one index of the leading axes.

    Parameters
    ----------
    function : callable
        Takes finite vectors ``(tokens, head_dim)`` in float64; returns an array of fixed shape.
    array : xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Vectors.
    by : sequence of str
        Dimensions that are not summed over.

    Returns
    -------
    ndarray, shape ``(*by, ...)``
        Sums.

    Raises
    ------
    ValueError
        If a number is not finite.
    """

    def of_piece(piece: Any) -> npt.NDArray[Any]:
        vectors = np.asarray(piece, np.float64)
        if not np.isfinite(vectors).all():
            raise ValueError("x holds numbers that are not finite")
        return function(vectors)

    places = list(_places(array))
    parts = run((of_piece, array.isel(place)) for place in places)
    total: Any = None
    for place, part in zip(places, parts, strict=True):
        if total is None:
            shape = [array.sizes[name] for name in by]
            total = np.zeros((*shape, *part.shape), part.dtype)
        total[tuple(place[name] for name in by)] += part
    return np.asarray(total)


def run(calls: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
    """Call functions of DataArrays; dask's are computed in parallel, by the scheduler in use.

    Parameters
    ----------
    calls : iterable of tuples
        A function, and the DataArrays that it takes, which it gets as something that
        ``np.asarray`` reads.  None is kept: one that is read from a file holds what it has read.

    Yields
    ------
    Any
        What the functions return, in order.
    """
    later = []
    for function, *arrays in calls:
        if all(x.chunks is None for x in arrays):
            yield function(*arrays)
        else:
            import dask

            # what is not dask's may be in a file, and stays there until its call
            given = (x if x.chunks is None else x.data for x in arrays)
            later.append(dask.delayed(function, pure=False)(*given))
    if later:  # then all are: arrays are alike in all calls
        yield from dask.compute(*later)


def index_coords(array: xr.DataArray | xr.Dataset, names: Iterable[str]) -> dict[str, Any]:
    """The coordinates of dimensions, where they have any, for a result that keeps these."""
    return {name: array.coords[name].variable for name in names if name in array.coords}


def _places(array: xr.DataArray) -> Iterator[dict[str, Any]]:
    """Where each piece is: an index of every leading dimension, and a range of tokens."""
    *leading, tokens, _ = (str(name) for name in array.dims)
    step = max(1, _NUMBERS // array.shape[-1] // PAGE) * PAGE
    for places in product(*(range(array.sizes[name]) for name in leading)):
        place = dict(zip(leading, places, strict=True))
        for start in range(0, array.sizes[tokens], step):
            yield place | {tokens: slice(start, start + step)}
