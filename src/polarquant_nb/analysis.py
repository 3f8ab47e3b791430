"""What vectors look like to a format, as xarray datasets: angles, densities, distortion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.densities import angle_cdf, angle_range
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.reference import page_offsets, polar_transform
from polarquant_nb.rotations import rotation_for

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["angles", "distortion"]


def angles(x: Any, fmt: PolarFormat, *, bins: int = 64) -> xr.Dataset:
    """Histogram the angles that a format quantises, beside their theoretical density.

    Rotates, subtracts the page offset where the format has one, and takes the polar transform, all
    in float64.  With ``rotation="none"`` in the format, the angles are those of the vectors as they
    are.

    Parameters
    ----------
    x : ndarray or torch.Tensor, shape ``(..., seq_len, head_dim)``
        Finite vectors, for instance one layer's keys.
    fmt : PolarFormat
        Rotation, seed, offset and number of levels; the bits do not matter.
    bins : int
        Bins of each level's range, [0, 2π) at level 1 and [0, π/2] above.

    Returns
    -------
    xarray.Dataset
        By ``level`` and ``bin``: ``angle`` (bin centres, rad), ``count``, ``density`` and
        ``expected_density`` (rad⁻¹, means over bins).  By ``level``: ``distance``, the largest
        difference of the two distribution functions over the bins' edges (Kolmogorov–Smirnov).

    Raises
    ------
    ValueError
        If the last axis is not ``fmt.head_dim`` long, ``x`` is empty or not finite, or ``bins`` is
        less than 1.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, Lemma 2 and figure 2.
    """
    import xarray as xr

    if bins < 1:
        raise ValueError(f"bins is {bins}; it must be at least 1")
    levels = range(1, fmt.num_levels + 1)
    all_angles, _ = polar_transform(_coded(_vectors(x, fmt), fmt), fmt.num_levels)
    edges = np.array([np.linspace(0, angle_range(level), bins + 1) for level in levels])
    count = np.array(
        [
            np.histogram(psi, bins, (0, angle_range(level)))[0]
            for level, psi in zip(levels, all_angles, strict=True)
        ]
    )
    share = count / count.sum(1, keepdims=True)
    expected = np.array([angle_cdf(level, edge) for level, edge in zip(levels, edges, strict=True)])
    width = np.diff(edges)
    distance = np.abs(np.cumsum(share, 1) - expected[:, 1:]).max(1)
    both = ("level", "bin")
    return xr.Dataset(
        {
            "count": (
                both,
                count.astype(np.int64),
                {"long_name": "number of angles", "units": "1"},
            ),
            "density": (both, share / width, {"long_name": "observed density", "units": "rad-1"}),
            "expected_density": (
                both,
                np.diff(expected) / width,
                {"long_name": "density after a uniformly random rotation", "units": "rad-1"},
            ),
            "distance": (
                "level",
                distance,
                {"long_name": "Kolmogorov-Smirnov distance at the bins' edges", "units": "1"},
            ),
        },
        coords={
            "level": (
                "level",
                np.array(levels),
                {"long_name": "level of the polar tree", "units": "1"},
            ),
            "angle": (both, edges[:, :-1] + width / 2, {"long_name": "angle", "units": "rad"}),
        },
        attrs=_format_attrs(fmt),
    )


def distortion(x: Any, fmt: PolarFormat) -> xr.Dataset:
    """Relative error of a round trip, measured, beside the format's closed form.

    Parameters
    ----------
    x : ndarray or torch.Tensor, shape ``(..., seq_len, head_dim)``
        Finite vectors.
    fmt : PolarFormat
        Format.

    Returns
    -------
    xarray.Dataset
        Scalars: ``error``, Σ‖x − x̂‖² / Σ‖x − μ‖² with μ the page offset where the format has one;
        ``expected_error``, its closed form; ``total_error``, Σ‖x − x̂‖² / Σ‖x‖²; and
        ``bits_per_value``, measured.

    Raises
    ------
    ValueError
        If the last axis is not ``fmt.head_dim`` long, or ``x`` is empty or not finite.

    Examples
    --------
    >>> x = np.random.default_rng(0).standard_normal((8, 1024, 128))
    >>> result = distortion(x, PolarFormat(head_dim=128, level_bits=(4, 2, 2, 2)))
    >>> round(float(result.error), 3), round(float(result.expected_error), 4)
    (0.032, 0.0321)
    """
    import xarray as xr

    from polarquant_nb.codec import encode

    vectors = _vectors(x, fmt)
    pages = encode(vectors, fmt)
    error = ((pages.decode() - vectors) ** 2).sum()
    coded = (_coded(vectors, fmt) ** 2).sum()
    return xr.Dataset(
        {
            "error": ((), error / coded, {"long_name": "relative squared error", "units": "1"}),
            "expected_error": (
                (),
                fmt.relative_error,
                {"long_name": "closed form 2(1 - rho) of the relative squared error", "units": "1"},
            ),
            "total_error": (
                (),
                error / (vectors**2).sum(),
                {
                    "long_name": "squared error relative to the vectors with their mean",
                    "units": "1",
                },
            ),
            "bits_per_value": (
                (),
                pages.bits_per_value,
                {"long_name": "bits held per stored number", "units": "bit"},
            ),
        },
        attrs=_format_attrs(fmt),
    )


def _vectors(x: Any, fmt: PolarFormat) -> npt.NDArray[np.float64]:
    """Vectors in float64, checked."""
    if hasattr(x, "detach"):
        x = x.detach().cpu().double().numpy()
    vectors = np.asarray(x, np.float64)
    if vectors.ndim < 2 or vectors.shape[-1] != fmt.head_dim:
        raise ValueError(
            f"x has shape {vectors.shape}; the format needs (..., seq_len, {fmt.head_dim})"
        )
    if vectors.size == 0:
        raise ValueError(f"x has shape {vectors.shape}; it must hold at least one vector")
    if not np.isfinite(vectors).all():
        raise ValueError("x holds numbers that are not finite")
    return vectors


def _coded(vectors: npt.NDArray[np.float64], fmt: PolarFormat) -> npt.NDArray[np.float64]:
    """What the polar transform sees: rotated vectors, minus the page offset where there is one."""
    r = rotation_for(fmt).apply(vectors)
    if fmt.offset is None:
        return r
    return r - np.repeat(page_offsets(r, fmt), PAGE, -2)[..., : r.shape[-2], :]


def _format_attrs(fmt: PolarFormat) -> dict[str, Any]:
    """The format, in types that NetCDF can hold."""
    return {
        "head_dim": fmt.head_dim,
        "level_bits": list(fmt.level_bits),
        "offset": fmt.offset or "none",
        "rotation": fmt.rotation,
        "rotation_seed": fmt.seed,
    }
