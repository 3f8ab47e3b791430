"""The whole algorithm in plain NumPy float64, with the paper's symbols: the oracle of the tests.

Nothing here is fast and nothing is clever: angles by ``atan2``, codes by comparing with every
codeword.  The kernels must give the same codes, except within about 1e-6 of a cell boundary, where
float32 and float64 may fall on different sides.

References
----------
Han et al., "PolarQuant", arXiv 2502.02617: Definition 1 (polar transform), Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from polarquant_nb.densities import codeword_angles
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.rotations import rotation_for

__all__ = [
    "ReferenceCodes",
    "decode",
    "encode",
    "inverse_polar_transform",
    "page_offsets",
    "polar_transform",
    "round_radii",
]

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReferenceCodes:
    """What a format stores of ``(..., seq_len, head_dim)`` vectors.

    Parameters
    ----------
    codes : list of ndarray of int64
        Per level ℓ, ``(..., seq_len, head_dim / 2**ℓ)``.
    radii : ndarray of float16 or float64, shape ``(..., seq_len, num_blocks)``
        Block norms, rounded as the format stores them.
    offsets : ndarray of float64, shape ``(..., num_pages, head_dim)``, or None
        Page means as they are stored, in rotated space.
    """

    codes: list[npt.NDArray[np.int64]]
    radii: npt.NDArray[np.float16] | FloatArray
    offsets: FloatArray | None


def polar_transform(r: npt.ArrayLike, num_levels: int) -> tuple[list[FloatArray], FloatArray]:
    """Definition 1: the angles of every level, and the radius of every block.

    With r⁽⁰⁾ = r, for ℓ = 1..L:
    ψ_j⁽ℓ⁾ = atan2(r⁽ℓ⁻¹⁾_{2j}, r⁽ℓ⁻¹⁾_{2j−1}) and r_j⁽ℓ⁾ = ‖(r⁽ℓ⁻¹⁾_{2j−1}, r⁽ℓ⁻¹⁾_{2j})‖.

    Parameters
    ----------
    r : array_like, shape ``(..., d)``
        Rotated vectors; 2**num_levels divides d.
    num_levels : int
        L.

    Returns
    -------
    angles : list of ndarray of float64
        Level ℓ has shape ``(..., d / 2**ℓ)``; radians in [0, 2π) at level 1, [0, π/2] above.
    radii : ndarray of float64, shape ``(..., d / 2**L)``
        Norms of the blocks.

    Examples
    --------
    >>> angles, radii = polar_transform([3.0, 4.0, 4.0, 3.0], 2)
    >>> [psi.round(3).tolist() for psi in angles], radii.round(3).tolist()
    ([[0.927, 0.644], [0.785]], [7.071])
    """
    rest = np.asarray(r, np.float64)
    angles = []
    for level in range(1, num_levels + 1):
        first, second = rest[..., 0::2], rest[..., 1::2]
        psi = np.arctan2(second, first)
        if level == 1:
            psi = psi % (2 * np.pi)
            psi = np.where(psi < 2 * np.pi, psi, 0.0)  # a tiny negative angle is rounded to 2π
        angles.append(psi)
        rest = np.hypot(first, second)
    return angles, rest


def inverse_polar_transform(angles: Sequence[npt.ArrayLike], radii: npt.ArrayLike) -> FloatArray:
    """Undo :func:`polar_transform`: r⁽ℓ⁻¹⁾ = (r⁽ℓ⁾ cos ψ, r⁽ℓ⁾ sin ψ), for ℓ = L..1.

    Parameters
    ----------
    angles : sequence of array_like
        Level ℓ of shape ``(..., d / 2**ℓ)``, radians.
    radii : array_like, shape ``(..., d / 2**L)``
        Norms of the blocks.

    Returns
    -------
    ndarray of float64, shape ``(..., d)``
        Rotated vectors.
    """
    r = np.asarray(radii, np.float64)
    for psi in reversed([np.asarray(level, np.float64) for level in angles]):
        r = np.stack([r * np.cos(psi), r * np.sin(psi)], -1).reshape(*r.shape[:-1], -1)
    return r


def page_offsets(r: FloatArray, fmt: PolarFormat) -> FloatArray:
    """Mean of each page's rotated tokens, rounded as the format stores it.

    Parameters
    ----------
    r : ndarray of float64, shape ``(..., seq_len, head_dim)``
        Rotated vectors.
    fmt : PolarFormat
        Its ``offset`` decides on the rounding.

    Returns
    -------
    ndarray of float64, shape ``(..., num_pages, head_dim)``
        Offsets.
    """
    starts = range(0, r.shape[-2], PAGE)
    mean = np.stack([r[..., start : start + PAGE, :].mean(-2) for start in starts], -2)
    if fmt.offset == "float16":
        return mean.astype(np.float16).astype(np.float64)
    scale = (np.abs(mean).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    codes = np.clip(np.round(mean / np.where(scale > 0, scale, 1)), -127, 127)
    return codes * scale


def round_radii(radii: FloatArray) -> FloatArray:
    """Radii as 8 bits of each and an anchor of each page give them back.

    A radius is rounded to one of 128 numbers in an octave, 1 + i/128 times a power of two, or, if a
    page's 254 codes do not reach from its smallest radius to its largest, to every second of them,
    every fourth, and so on.  Below 2⁻⁴⁶ it is 0.

    Parameters
    ----------
    radii : ndarray of float64, shape ``(..., seq_len, num_blocks)``
        Block norms, finite.

    Returns
    -------
    ndarray of float64, of the same shape
        Block norms as they are stored.
    """
    rounded = np.zeros_like(radii)
    for row in np.ndindex(radii.shape[:-2]):
        for start in range(0, radii.shape[-2], PAGE):
            page = radii[row][start : start + PAGE]
            stored = page >= 2.0**-46
            mantissas, exponents = np.frexp(page[stored])  # mantissas are in [½, 1)
            numbers = 128 * (exponents + 46) + 128 * (2 * mantissas - 1)
            for step in (1, 2, 4, 8, 16, 32):
                codes = np.floor(numbers / step + 0.5)
                if not stored.any() or codes.max() - codes.min() < 254:
                    break
            octaves, numbers = np.divmod(codes * step, 128)
            rounded[row][start : start + PAGE][stored] = (1 + numbers / 128) * 2 ** (octaves - 47)
    return rounded


def encode(
    x: npt.ArrayLike, fmt: PolarFormat, codebooks: Sequence[npt.ArrayLike] | None = None
) -> ReferenceCodes:
    """Rotate, subtract the page offset, transform, and take the nearest codewords (Algorithm 1).

    Parameters
    ----------
    x : array_like, shape ``(..., seq_len, head_dim)``
        Finite vectors.
    fmt : PolarFormat
        Format.
    codebooks : sequence of array_like, optional
        Codeword angles of each level; by default the analytic ones.

    Returns
    -------
    ReferenceCodes
        Codes, rounded radii and offsets.
    """
    r = rotation_for(fmt).apply(x)
    offsets = None
    if fmt.offset is not None:
        offsets = page_offsets(r, fmt)
        r = r - np.repeat(offsets, PAGE, -2)[..., : r.shape[-2], :]
    angles, radii = polar_transform(r, fmt.num_levels)
    codes = []
    for level, (psi, codewords) in enumerate(zip(angles, _angles(fmt, codebooks), strict=True), 1):
        distance = np.abs(psi[..., None] - codewords)
        if level == 1:
            distance = np.minimum(distance, 2 * np.pi - distance)
        codes.append(distance.argmin(-1))
    stored = radii.astype(np.float16) if fmt.radius == "float16" else round_radii(radii)
    return ReferenceCodes(codes, stored, offsets)


def decode(
    encoded: ReferenceCodes, fmt: PolarFormat, codebooks: Sequence[npt.ArrayLike] | None = None
) -> FloatArray:
    """Vectors from codes, radii and offsets.

    Parameters
    ----------
    encoded : ReferenceCodes
        Of the same format.
    fmt : PolarFormat
        Format.
    codebooks : sequence of array_like, optional
        As in :func:`encode`.

    Returns
    -------
    ndarray of float64, shape ``(..., seq_len, head_dim)``
        Reconstruction x̂.
    """
    tables = _angles(fmt, codebooks)
    angles = [table[code] for table, code in zip(tables, encoded.codes, strict=True)]
    r = inverse_polar_transform(angles, encoded.radii)
    if encoded.offsets is not None:
        r = r + np.repeat(encoded.offsets, PAGE, -2)[..., : r.shape[-2], :]
    return rotation_for(fmt).invert(r)


def _angles(fmt: PolarFormat, codebooks: Sequence[npt.ArrayLike] | None) -> list[FloatArray]:
    if codebooks is None:
        return [codeword_angles(level, bits) for level, bits in enumerate(fmt.level_bits, 1)]
    return [np.asarray(codewords, np.float64) for codewords in codebooks]
