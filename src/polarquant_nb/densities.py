"""What the angles look like after a random rotation, and the codebooks that follow from it.

A vector rotated at random has angles with a known distribution (paper, Lemma 2), so codebooks can
be computed once, from the densities, and no scales or zero points need to be stored.  Everything
here is a function of the level and of a number of bits; nothing depends on the data, except the
paper's alternative: codebooks fitted to observed angles by one-dimensional k-means++.

References
----------
Han, Kacham, Karbasi, Mirrokni, Zandieh, "PolarQuant: Quantizing KV Caches with Polar
Transformation", arXiv 2502.02617, section 3 (densities) and section 4 (codebooks).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import pi

import numpy as np
import numpy.typing as npt
from scipy.special import betainc, gammaln

__all__ = [
    "MAX_LEVEL",
    "angle_cdf",
    "angle_density",
    "angle_range",
    "codeword_angles",
    "expected_cosine",
    "fit_codewords",
    "relative_error",
]

FloatArray = npt.NDArray[np.float64]

MAX_LEVEL = 9
"""Deepest level of a polar tree: blocks of 2**9 = 512 coordinates."""

MAX_BITS = 6
"""Most bits of one angle code."""

# Codewords are rounded to this grid, so that the last bits of a platform's mathematical library,
# and the order of its sums, do not enter the stored format: they come out equal to about 1e-14.
_GRID = 2.0**-30

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(96)


def angle_range(level: int) -> float:
    """Upper end of the range of a level's angles: 2π at level 1, π/2 above.

    Parameters
    ----------
    level : int
        Level, from 1.

    Returns
    -------
    float
        In radians; the lower end is 0.
    """
    return 2 * pi if level == 1 else pi / 2


def angle_density(level: int, psi: npt.ArrayLike) -> FloatArray:
    r"""Density of a level's angle for a vector rotated at random (paper, Lemma 2).

    Level 1 is uniform on ``[0, 2π)``.  For level ℓ ≥ 2, with m = 2^(ℓ−1),

    .. math:: f_\ell(\psi) = \frac{\Gamma(m)}{2^{m-2}\,\Gamma(m/2)^2} \sin^{m-1}(2\psi)

    on ``[0, π/2]``, and zero outside.  The Gamma factor is evaluated by logarithms.

    Parameters
    ----------
    level : int
        1 to 9.
    psi : array_like
        Angles in radians, any shape.

    Returns
    -------
    ndarray of float64
        Densities per radian, of the shape of ``psi``.

    Raises
    ------
    ValueError
        If ``level`` is not in 1..9.
    """
    _check_level(level)
    psi = np.asarray(psi, dtype=np.float64)
    inside = (psi >= 0) & (psi <= angle_range(level))
    if level == 1:
        return np.where(inside, 1 / (2 * pi), 0.0)
    m = 2 ** (level - 1)
    log_factor = gammaln(m) - (m - 2) * np.log(2.0) - 2 * gammaln(m / 2)
    sine = np.where(inside, np.maximum(np.sin(2 * psi), 0.0), 0.0)
    return np.exp(log_factor) * sine ** (m - 1)


def angle_cdf(level: int, psi: npt.ArrayLike) -> FloatArray:
    """Distribution function of :func:`angle_density`: sin²ψ ~ Beta(m/2, m/2) for levels ≥ 2.

    Parameters
    ----------
    level : int
        1 to 9.
    psi : array_like
        Angles in radians, any shape.

    Returns
    -------
    ndarray of float64
        Probabilities, of the shape of ``psi``.

    Raises
    ------
    ValueError
        If ``level`` is not in 1..9.
    """
    _check_level(level)
    psi = np.clip(np.asarray(psi, dtype=np.float64), 0.0, angle_range(level))
    if level == 1:
        return psi / (2 * pi)
    m = 2 ** (level - 1)
    return np.asarray(betainc(m / 2, m / 2, np.sin(psi) ** 2), dtype=np.float64)


@cache
def _codeword_angles(level: int, bits: int) -> FloatArray:
    angles = _uniform_codewords(bits) if level == 1 else _lloyd_max(level, bits)
    angles.flags.writeable = False
    return angles


def codeword_angles(level: int, bits: int) -> FloatArray:
    """Codewords that minimise the mean squared angle error: Lloyd–Max for the level's density.

    At levels ≥ 2 codeword k is the k-th in ascending order.  At level 1 the optimum is uniform,
    2^b directions at ``(m + ½) 2π/2^b``, and the code is laid out by symmetry, so that a kernel
    can read signs off it: bit 0 turns the pair by π, the highest bit mirrors the sine, and the
    bits between count m within the first quarter,

        angle = s·π + (−1)^t (m + ½) 2π/2^b,   code = s | m << 1 | t << (b−1).

    Parameters
    ----------
    level : int
        1 to 9.
    bits : int
        1 to 6.

    Returns
    -------
    ndarray of float64, shape ``(2**bits,)``
        Angles in radians, indexed by code; read-only.

    Raises
    ------
    ValueError
        If ``level`` is not in 1..9 or ``bits`` not in 1..6.
    """
    _check_level(level)
    _check_bits(bits)
    return _codeword_angles(level, bits)


@cache
def expected_cosine(level: int, bits: int) -> float:
    """ρ_ℓ = E cos(ψ − ψ̂) of a level quantised with its analytic codebook.

    Parameters
    ----------
    level : int
        1 to 9.
    bits : int
        1 to 6.

    Returns
    -------
    float
        Between 0 and 1.

    Raises
    ------
    ValueError
        If ``level`` is not in 1..9 or ``bits`` not in 1..6.
    """
    c = codeword_angles(level, bits)
    if level == 1:
        half_cell = pi / c.size
        return float(np.sin(half_cell) / half_cell)
    lower, upper = _cells(c)
    psi, weight = _quadrature(lower, upper)
    return float((np.cos(psi - c[:, None]) * angle_density(level, psi) * weight).sum())


def relative_error(level_bits: Sequence[int]) -> float:
    """Closed form of E‖x − x̂‖² / ‖x‖² = 2(1 − ∏ρ_ℓ) for one block, exact radius.

    The reconstruction keeps the norm, so the error follows from the mean cosine alone, and it is
    proportional to ‖x‖² whatever x is.

    Parameters
    ----------
    level_bits : sequence of int
        Bits of each level's codes, level 1 first.

    Returns
    -------
    float
        Relative mean squared error; .0321 for the paper's 4, 2, 2, 2.

    Raises
    ------
    ValueError
        If there are more than 9 levels, or bits outside 1..6.
    """
    rho = 1.0
    for level, bits in enumerate(level_bits, 1):
        rho *= expected_cosine(level, bits)
    return 2 * (1 - rho)


def fit_codewords(angles: npt.ArrayLike, level: int, bits: int, *, seed: int = 0) -> FloatArray:
    """Codewords fitted to observed angles: the paper's one-dimensional k-means++ (section 4.1).

    Level-1 angles live on a circle; they are clustered by arc length, so that the seam at 0 = 2π
    is like any other place.  At most 65,536 of the angles, evenly spaced, are looked at.

    Parameters
    ----------
    angles : array_like
        Observed angles in radians, any shape; NaN are left out.
    level : int
        1 to 9.
    bits : int
        1 to 6.
    seed : int
        Of the k-means++ seeding.

    Returns
    -------
    ndarray of float64, shape ``(2**bits,)``
        Ascending angles in radians.

    Raises
    ------
    ValueError
        If ``level`` or ``bits`` is out of range, or no finite angle is given.
    """
    _check_level(level)
    _check_bits(bits)
    psi = np.asarray(angles, dtype=np.float64).ravel()
    psi = psi[np.isfinite(psi)]
    if psi.size == 0:
        raise ValueError("angles holds no finite value: there is nothing to fit a codebook to")
    psi = np.sort(psi[:: -(-psi.size // 65_536)])
    distinct = psi[np.diff(psi, prepend=-1.0) > 1e-9]
    if distinct.size <= 2**bits:
        return _filled_up(distinct, level, bits)
    period = 2 * pi if level == 1 else None
    centers = _kmeans_plus_plus(psi, 2**bits, period, np.random.default_rng(seed))
    for _ in range(200):
        moved = _lloyd_step(psi, centers, period)
        done = np.abs(moved - centers).max() < 1e-9
        centers = moved
        if done:
            break
    return centers


def _check_level(level: int) -> None:
    if not 1 <= level <= MAX_LEVEL:
        raise ValueError(f"level is {level}; it must be in 1..{MAX_LEVEL}")


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}; it must be in 1..{MAX_BITS}")


def _uniform_codewords(bits: int) -> FloatArray:
    code = np.arange(2**bits)
    if bits == 1:
        return (code + 0.5) * pi
    s, m, t = code & 1, (code >> 1) & (2 ** (bits - 2) - 1), code >> (bits - 1)
    return (s * pi + np.where(t, -1, 1) * (m + 0.5) * (2 * pi / 2**bits)) % (2 * pi)


def _cells(codewords: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends of the cells of ascending codewords on [0, π/2]."""
    inner = (codewords[1:] + codewords[:-1]) / 2
    return np.r_[0.0, inner], np.r_[inner, pi / 2]


def _quadrature(lower: FloatArray, upper: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Gauss–Legendre nodes and weights, one row a cell, cut to where the densities live."""
    half = (upper - lower)[:, None] / 2
    return lower[:, None] + half * (_NODES + 1), half * _WEIGHTS


def _lloyd_max(level: int, bits: int) -> FloatArray:
    """Newton's method on the centroid conditions c_k = E[ψ | cell k]; the optimum is unique.

    The density is log-concave, so there is one stationary point (Fleischer 1964); each condition
    involves the neighbouring codewords only, and the Jacobian is tridiagonal.
    """
    n = 2**bits
    grid = np.linspace(0, pi / 2, 20_001)
    c = np.interp((np.arange(n) + 0.5) / n, angle_cdf(level, grid), grid)
    for step in range(60):
        lower, upper = _cells(c)
        psi, weight = _quadrature(lower, upper)
        weight = weight * angle_density(level, psi)
        mass = weight.sum(1)
        centroid = (weight * psi).sum(1) / mass
        if step < 10:  # a few Lloyd steps first: they cannot diverge
            c = centroid
            continue
        to_lower = angle_density(level, lower) * (centroid - lower) / mass / 2
        to_upper = angle_density(level, upper) * (upper - centroid) / mass / 2
        to_lower[0] = to_upper[-1] = 0.0
        jacobian = (
            np.diag(1 - to_lower - to_upper) - np.diag(to_lower[1:], -1) - np.diag(to_upper[:-1], 1)
        )
        change = np.linalg.solve(jacobian, centroid - c)
        c = np.sort(c + change)
        if np.abs(change).max() < 1e-15:
            break
    c = (c + (pi / 2 - c[::-1])) / 2
    lower = np.round(c[: n // 2] / _GRID) * _GRID
    return np.concatenate([lower, pi / 2 - lower[::-1]])


def _filled_up(angles: FloatArray, level: int, bits: int) -> FloatArray:
    """No more angles than codewords: those, and analytic codewords that are far from them."""
    codewords = list(angles)
    period = 2 * pi if level == 1 else None
    spare = _codeword_angles(level, bits)
    while len(codewords) < 2**bits:
        nearest = np.min([_distance(spare, c, period) for c in codewords], 0)
        codewords.append(spare[nearest.argmax()])
    return np.sort(codewords)


def _kmeans_plus_plus(
    psi: FloatArray, n: int, period: float | None, rng: np.random.Generator
) -> FloatArray:
    """Seeds drawn with probability proportional to the squared distance to those before."""
    centers = np.empty(n)
    centers[0] = psi[rng.integers(psi.size)]
    nearest = _distance(psi, centers[0], period) ** 2
    for k in range(1, n):
        total = nearest.sum()
        centers[k] = psi[min(np.searchsorted(nearest.cumsum(), rng.random() * total), psi.size - 1)]
        nearest = np.minimum(nearest, _distance(psi, centers[k], period) ** 2)
    return np.sort(centers)


def _distance(a: FloatArray, b: FloatArray | np.float64, period: float | None) -> FloatArray:
    difference = np.abs(a - b)
    return difference if period is None else np.minimum(difference, period - difference)


def _lloyd_step(psi: FloatArray, centers: FloatArray, period: float | None) -> FloatArray:
    """One Lloyd step on sorted angles; an empty cluster keeps its centre."""
    boundaries = (centers[1:] + centers[:-1]) / 2
    if period is not None:  # cut the circle between the last and the first centre
        cut = (centers[-1] + centers[0] + period) / 2 - period
        shifted = (psi - cut) % period
        order = np.argsort(shifted)
        moved = cut + _lloyd_step(shifted[order], centers - cut, None)
        return np.sort(moved % period)
    edges = np.r_[0, np.searchsorted(psi, boundaries), psi.size]
    sums = np.r_[0.0, psi.cumsum()][edges]
    count = np.diff(edges)
    return np.where(count > 0, np.diff(sums) / np.maximum(count, 1), centers)
