"""Error and bits of formats on given vectors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.analysis.describing import coded, described, format_attrs
from polarquant_nb.analysis.pieces import index_coords, open_dims, open_vectors, sums
from polarquant_nb.formats import PolarFormat

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["distortion", "rate_distortion"]


def distortion(x: Any, fmt: PolarFormat, *, by: str | Iterable[str] = ()) -> xr.Dataset:
    """Relative error of a round trip, measured, beside the format's closed form.

    Parameters
    ----------
    x : ndarray, torch.Tensor, dask array or xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Finite vectors.
    fmt : PolarFormat
        Format.
    by : str or iterable of str
        Dimensions of a DataArray to keep; all others are pooled.

    Returns
    -------
    xarray.Dataset
        By ``by``: ``error``, Σ‖x − x̂‖² / Σ‖x − μ‖² with μ the page offset where the format has one;
        ``total_error``, Σ‖x − x̂‖² / Σ‖x‖²; and ``bits_per_value``, measured.  ``expected_error`` is
        the closed form of ``error``.

    Raises
    ------
    ValueError
        If the last axis is not ``fmt.head_dim`` long, ``x`` is empty or not finite, or ``by`` names
        no leading dimension.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((8, 1024, 128))
    >>> result = distortion(x, PolarFormat(head_dim=128, level_bits=(4, 2, 2, 2)))
    >>> round(float(result.error), 3), round(float(result.expected_error), 4)
    (0.032, 0.0321)
    """
    table = rate_distortion(x, {"": fmt}, by=by).isel(format=0, drop=True)
    return table.assign_attrs(format_attrs(fmt))


def rate_distortion(
    x: Any,
    formats: Mapping[str, PolarFormat] | Sequence[PolarFormat],
    *,
    by: str | Iterable[str] = (),
) -> xr.Dataset:
    """Relative error and bits of several formats on the same vectors.

    Parameters
    ----------
    x : ndarray, torch.Tensor, dask array or xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Finite vectors.  Each piece is read once for all formats.
    formats : mapping of str to PolarFormat, or sequence of PolarFormat
        Formats; those without names are called by level bits, offset and radii.
    by : str or iterable of str
        Dimensions of a DataArray to keep; all others are pooled.

    Returns
    -------
    xarray.Dataset
        By ``by`` and ``format``: ``error``, ``total_error`` and ``bits_per_value``; by ``format``:
        ``expected_error``; see :func:`distortion`.  ``level_bits``, ``offset`` and ``radius`` say
        what the formats are.  ``.to_dataframe()`` shows a table.

    Raises
    ------
    TypeError
        If ``formats`` are none of PolarFormat.
    ValueError
        If there is no format, two have one name or they differ in ``head_dim``; and as
        :func:`distortion`.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((8, 1024, 64))
    >>> formats = [PolarFormat(64, (b + 1, b, b, b, b, b)) for b in (2, 3, 4)]
    >>> rate_distortion(x, formats).error.round(3).values.tolist()
    [0.072, 0.019, 0.005]
    """
    import xarray as xr

    named = _open_formats(formats)
    chosen = list(named.values())
    vectors = open_vectors(x, chosen[0].head_dim)
    kept = open_dims(by, vectors)

    def coding(piece: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.array([_coding(piece, fmt) for fmt in chosen])

    error, about, whole, nbytes, numbers = np.moveaxis(sums(coding, vectors, kept), -1, 0)
    each = (*kept, "format")
    return xr.Dataset(
        {
            "error": described(each, error / about, "relative squared error"),
            "expected_error": described(
                "format",
                np.array([fmt.relative_error for fmt in chosen]),
                "closed form 2(1 - rho) of the relative squared error",
            ),
            "total_error": described(
                each, error / whole, "squared error relative to the vectors with their mean"
            ),
            "bits_per_value": described(
                each, 8 * nbytes / numbers, "bits held per stored number", "bit"
            ),
        },
        coords={
            **index_coords(vectors, kept),
            "format": described("format", list(named), "format"),
            "level_bits": described(
                "format", [_bits(fmt) for fmt in chosen], "bits of each level's codes"
            ),
            "offset": described(
                "format", [fmt.offset or "none" for fmt in chosen], "how page offsets are stored"
            ),
            "radius": described("format", [fmt.radius for fmt in chosen], "how radii are stored"),
        },
        attrs={"head_dim": chosen[0].head_dim},
    )


def _coding(vectors: npt.NDArray[np.float64], fmt: PolarFormat) -> tuple[float, ...]:
    """Squared error, squares of what is coded and of all, bytes, numbers."""
    from polarquant_nb.codec import encode

    pages = encode(vectors, fmt)
    whole = (vectors**2).sum()
    return (
        ((pages.decode() - vectors) ** 2).sum(),
        whole if fmt.offset is None else (coded(vectors, fmt) ** 2).sum(),
        whole,
        pages.nbytes,
        vectors.size,
    )


def _open_formats(
    formats: Mapping[str, PolarFormat] | Sequence[PolarFormat],
) -> dict[str, PolarFormat]:
    if isinstance(formats, Mapping):
        named = dict(formats)
    else:
        named = {}
        for i, fmt in enumerate(formats):
            name = _name(fmt) if isinstance(fmt, PolarFormat) else str(i)
            if name in named:
                raise ValueError(f"formats hold {name!r} twice; give a mapping of names to formats")
            named[name] = fmt
    for name, fmt in named.items():
        if not isinstance(fmt, PolarFormat):
            raise TypeError(f"formats[{name}] is {fmt!r}; it must be a PolarFormat")
    widths = sorted({fmt.head_dim for fmt in named.values()})
    if len(widths) != 1:
        raise ValueError(f"formats have head_dim {widths}; there must be some, all of one head_dim")
    return named


def _name(fmt: PolarFormat) -> str:
    offset = f" {fmt.offset} offset" if fmt.offset else ""
    return _bits(fmt) + offset + (" log8 radii" if fmt.radius == "log8" else "")


def _bits(fmt: PolarFormat) -> str:
    return ",".join(map(str, fmt.level_bits))
