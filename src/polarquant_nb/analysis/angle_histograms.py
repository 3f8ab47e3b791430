"""The angles that a format sees, and what quantising them costs, beside the theory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.analysis.describing import coded, described, format_attrs, level_coord
from polarquant_nb.analysis.pieces import index_coords, open_dims, open_vectors, sums
from polarquant_nb.densities import (
    MAX_BITS,
    angle_cdf,
    angle_range,
    codeword_angles,
    expected_cosine,
)
from polarquant_nb.formats import PolarFormat, integer
from polarquant_nb.reference import polar_transform

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["angle_error", "angles"]


def angles(x: Any, fmt: PolarFormat, *, bins: int = 64, by: str | Iterable[str] = ()) -> xr.Dataset:
    """Histogram the angles that a format quantises, beside their theoretical density.

    Rotates, subtracts the page offset where the format has one, and takes the polar transform, all
    in float64.  With ``rotation="none"`` in the format, the angles are those of the vectors as they
    are.

    Parameters
    ----------
    x : ndarray, torch.Tensor, dask array or xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Finite vectors, for instance one layer's keys.
    fmt : PolarFormat
        Rotation, seed, offset and number of levels; the bits do not matter.
    bins : int
        Bins of each level's range, [0, 2π) at level 1 and [0, π/2] above.
    by : str or iterable of str
        Dimensions of a DataArray to keep; all others are pooled.

    Returns
    -------
    xarray.Dataset
        By ``by``, ``level`` and ``bin``: ``count``, ``density`` and, alike for all ``by``,
        ``angle`` (bin centres, rad) and ``expected_density`` (rad⁻¹; densities are means over
        bins).  By ``by`` and ``level``: ``distance``, the largest difference of the two
        distribution functions over the bins' edges (Kolmogorov–Smirnov).

    Raises
    ------
    ValueError
        If the last axis is not ``fmt.head_dim`` long, ``x`` is empty or not finite, ``bins`` is
        less than 1, or ``by`` names no leading dimension.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, Lemma 2 and figure 2.
    """
    import xarray as xr

    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    vectors = open_vectors(x, fmt.head_dim)
    kept = open_dims(by, vectors)
    levels = range(1, fmt.num_levels + 1)

    def counted(piece: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
        found, _ = polar_transform(coded(piece, fmt), fmt.num_levels)
        return np.array(
            [
                np.histogram(psi, bins, (0, angle_range(level)))[0]
                for level, psi in zip(levels, found, strict=True)
            ],
            np.int64,
        )

    count = sums(counted, vectors, kept)
    edges = np.array([np.linspace(0, angle_range(level), bins + 1) for level in levels])
    share = count / count.sum(-1, keepdims=True)
    expected = np.array([angle_cdf(level, edge) for level, edge in zip(levels, edges, strict=True)])
    width = np.diff(edges)
    distance = np.abs(np.cumsum(share, -1) - expected[:, 1:]).max(-1)
    both = ("level", "bin")
    return xr.Dataset(
        {
            "count": described((*kept, *both), count, "number of angles"),
            "density": described((*kept, *both), share / width, "observed density", "rad-1"),
            "expected_density": described(
                both,
                np.diff(expected) / width,
                "density after a uniformly random rotation",
                "rad-1",
            ),
            "distance": described(
                (*kept, "level"), distance, "Kolmogorov-Smirnov distance at the bins' edges"
            ),
        },
        coords={
            **index_coords(vectors, kept),
            "level": level_coord(levels),
            "angle": described(both, edges[:, :-1] + width / 2, "angle", "rad"),
        },
        attrs=format_attrs(fmt),
    )


def angle_error(
    x: Any,
    fmt: PolarFormat,
    *,
    bits: Iterable[int] = range(1, MAX_BITS + 1),
    by: str | Iterable[str] = (),
) -> xr.Dataset:
    """What each level's angles cost at each number of bits, all else exact.

    The error of a level is Σ r² 2(1 − cos(ψ − ψ̂)) / Σ r², with r the norm below a node, ψ its angle
    and ψ̂ the nearest of the analytic codewords.  It is the relative squared error of the vectors if
    this level alone is quantised.

    Parameters
    ----------
    x : ndarray, torch.Tensor, dask array or xarray.DataArray, shape ``(..., seq_len, head_dim)``
        Finite vectors.
    fmt : PolarFormat
        Rotation, seed, offset and number of levels; its own bits do not matter.
    bits : iterable of int
        Bits of a code, each 1 to 6.
    by : str or iterable of str
        Dimensions of a DataArray to keep; all others are pooled.

    Returns
    -------
    xarray.Dataset
        By ``by``, ``level`` and ``bits``: ``error``.  By ``level`` and ``bits``:
        ``expected_error``, 2(1 − ρ_ℓ).

    Raises
    ------
    TypeError
        If ``bits`` are no ints.
    ValueError
        If ``bits`` are none or out of range, and as :func:`angles`.
    """
    import xarray as xr

    chosen = [integer("bits", b) for b in bits]
    if not chosen or not all(1 <= b <= MAX_BITS for b in chosen):
        raise ValueError(f"bits are {chosen}; there must be some, each 1 to {MAX_BITS}")
    vectors = open_vectors(x, fmt.head_dim)
    kept = open_dims(by, vectors)
    levels = range(1, fmt.num_levels + 1)

    def errors(piece: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        r = coded(piece, fmt)
        found, _ = polar_transform(r, fmt.num_levels)
        energy = np.empty((fmt.num_levels, 1 + len(chosen)))
        weight = r**2
        for level, psi in zip(levels, found, strict=True):
            weight = weight[..., 0::2] + weight[..., 1::2]
            energy[level - 1, 0] = weight.sum()
            for i, b in enumerate(chosen, 1):
                nearest = _nearest(psi, np.sort(codeword_angles(level, b)), level)
                energy[level - 1, i] = (weight * 2 * (1 - np.cos(psi - nearest))).sum()
        return energy

    energy = sums(errors, vectors, kept)
    return xr.Dataset(
        {
            "error": described(
                (*kept, "level", "bits"),
                energy[..., 1:] / energy[..., :1],
                "relative squared error of one level",
            ),
            "expected_error": described(
                ("level", "bits"),
                np.array(
                    [[2 * (1 - expected_cosine(level, b)) for b in chosen] for level in levels]
                ),
                "closed form 2(1 - rho) of the relative squared error of one level",
            ),
        },
        coords={
            **index_coords(vectors, kept),
            "level": level_coord(levels),
            "bits": described("bits", np.array(chosen, np.int64), "bits of an angle's code", "bit"),
        },
        attrs=format_attrs(fmt),
    )


def _nearest(
    psi: npt.NDArray[np.float64], codewords: npt.NDArray[np.float64], level: int
) -> npt.NDArray[np.float64]:
    """The nearest of ascending codewords; level 1 is a circle."""
    if level == 1:
        codewords = np.append(codewords, codewords[0] + 2 * np.pi)
    borders = (codewords[1:] + codewords[:-1]) / 2
    return codewords[np.searchsorted(borders, psi)]
