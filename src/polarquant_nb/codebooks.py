"""Codebooks: the codeword angles of every level, analytic (the default) or fitted to data."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import pi
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.densities import codeword_angles, fit_codewords
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.reference import page_offsets, polar_transform
from polarquant_nb.rotations import rotation_for

__all__ = ["TABLE", "Codebooks"]

_FILE = "polarquant_nb codebooks"  # its value is the version of the file format

TABLE = 64
"""Entries of one level's cosine or sine table, whatever its number of bits."""


@dataclass(frozen=True, eq=False)
class Codebooks:
    """Codeword angles by level and code.

    The analytic codebooks (:meth:`analytic`) follow from the angles' distribution after a random
    rotation and are used wherever no others are given.  Fitting codebooks to data is the paper's
    "online" variant when done per call, and its "offline" variant when done once and saved.

    Parameters
    ----------
    angles : sequence of array_like
        Level ℓ holds ``2**bits`` distinct codeword angles in radians, in [0, 2π) at level 1 and
        [0, π/2] above; they are sorted.

    Raises
    ------
    ValueError
        If a level has a number of codewords that is no power of two up to 64, equal codewords, or
        angles out of range.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, section 4.1.
    """

    angles: tuple[npt.NDArray[np.float64], ...]
    is_analytic: bool = False

    def __init__(self, angles: Sequence[npt.ArrayLike]) -> None:
        levels = [_checked(level, codewords) for level, codewords in enumerate(angles, 1)]
        object.__setattr__(self, "angles", tuple(levels))

    @staticmethod
    def analytic(fmt: PolarFormat) -> Codebooks:
        """Codebooks computed from the angle densities, without data.

        Parameters
        ----------
        fmt : PolarFormat
            Its level bits decide.

        Returns
        -------
        Codebooks
            Cached; equal level bits give the same object.
        """
        return _analytic(fmt.level_bits)

    @staticmethod
    def fit(x: Any, fmt: PolarFormat, *, seed: int = 0) -> Codebooks:
        """Codebooks fitted by one-dimensional k-means++ to the angles of ``x``.

        Parameters
        ----------
        x : array_like, shape ``(..., seq_len, head_dim)``
            Vectors, NumPy or torch; pages of at most 64 heads, 8 of each, are looked at, and rows
            that are not finite are left out.
        fmt : PolarFormat
            The format that they will be encoded with: rotation, offset and level bits.
        seed : int
            Of the k-means++ seeding.

        Returns
        -------
        Codebooks
            For ``pq.encode(..., codebooks=...)``.

        Raises
        ------
        ValueError
            If the last axis is not ``fmt.head_dim`` long, or no row is finite.
        """
        if hasattr(x, "detach"):
            x = x.detach().float().cpu().numpy()
        x = np.asarray(x)
        if x.ndim < 2 or x.shape[-1] != fmt.head_dim:
            raise ValueError(
                f"x has shape {x.shape}; it must be (..., seq_len, {fmt.head_dim}) for this format"
            )
        picked = []
        heads = x.reshape(-1, *x.shape[-2:]) if x.size else []
        for head in heads[:: -(-len(heads) // 64) or 1]:  # at most 64 heads
            starts = range(0, head.shape[0], PAGE)
            for start in starts[:: -(-len(starts) // 8)]:  # and 8 pages of each
                page = np.asarray(head[start : start + PAGE], np.float64)
                page = page[np.isfinite(page).all(-1)]
                if len(page):
                    r = rotation_for(fmt).apply(page)
                    picked.append(r - page_offsets(r, fmt)[0] if fmt.offset else r)
        if not picked:
            raise ValueError("x holds no finite row: there is nothing to fit a codebook to")
        rows = np.concatenate(picked)
        angles, _ = polar_transform(rows[:: -(-len(rows) // 8192)], fmt.num_levels)
        return Codebooks(
            [
                fit_codewords(psi, level, bits, seed=seed)
                for level, (psi, bits) in enumerate(zip(angles, fmt.level_bits, strict=True), 1)
            ]
        )

    @property
    def level_bits(self) -> tuple[int, ...]:
        """Bits of each level's codes."""
        return tuple(len(codewords).bit_length() - 1 for codewords in self.angles)

    @property
    def nbytes(self) -> int:
        """Bytes to store beside the pages: float32 angles if fitted, nothing if analytic."""
        return 0 if self.is_analytic else sum(4 * len(codewords) for codewords in self.angles)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON.

        Parameters
        ----------
        path : path-like
            File to write.
        """
        content: dict[str, Any] = {_FILE: 1, "angles": [a.tolist() for a in self.angles]}
        if self.is_analytic:
            content = {_FILE: 1, "analytic": self.level_bits}
        text = json.dumps(content)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Codebooks:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : path-like
            File to read.

        Returns
        -------
        Codebooks
            Equal to the saved ones.

        Raises
        ------
        ValueError
            If the file is of another kind.
        """
        place = os.fspath(path)
        try:
            with open(place, encoding="utf-8") as file:
                content = json.load(file)
            if content[_FILE] != 1:
                raise ValueError(f"version {content[_FILE]} is not known")
            if "analytic" in content:
                return _analytic(tuple(content["analytic"]))
            return Codebooks(content["angles"])
        except (ValueError, KeyError, TypeError) as error:
            message = f"path is {place!r}; that file does not hold codebooks: {error}"
            raise ValueError(message) from error

    @cached_property
    def cosines(self) -> npt.NDArray[np.float32]:
        """Cosine and sine tables for kernels: entry ``(2 (ℓ−1) + sine) · 64 + code``, flat."""
        return np.concatenate([_table(codewords) for codewords in self.angles])

    @cached_property
    def half_circle_cosines(self) -> npt.NDArray[np.float32]:
        """Cosines and sines of level-1 codes with bit 0 clear, entry ``64 sine + code / 2``."""
        return _table(self.angles[0][::2])

    def thresholds(self) -> npt.NDArray[np.float32]:
        """Cell boundaries for kernels that encode with fitted codebooks, flat.

        Level 1, per boundary β in ascending order: cosine and sine of β mod π, and the biases with
        which a vector of the upper and of the lower half plane is compared (see
        ``kernels.polar.fitted_code_1``).  Levels ≥ 2: the squared tangent of each boundary.

        Returns
        -------
        ndarray of float32
            Four numbers for each boundary of level 1, then one for each boundary above.
        """
        first, *upper = self.angles
        boundary = np.sort(
            (first + np.roll(first, -1) + 2 * pi * (np.roll(first, -1) < first)) / 2 % (2 * pi)
        )
        in_lower_half = boundary >= pi
        level1 = np.stack(
            [
                np.cos(boundary % pi),
                np.sin(boundary % pi),
                np.where(in_lower_half, np.inf, 0),
                np.where(in_lower_half, 0, -np.inf),
            ],
            1,
        )
        tangents = [np.tan((c[1:] + c[:-1]) / 2) ** 2 for c in upper]
        return np.concatenate([level1.ravel(), *tangents]).astype(np.float32)


def _table(angles: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    repeated = angles[np.arange(TABLE) % len(angles)]
    return np.concatenate([np.cos(repeated), np.sin(repeated)]).astype(np.float32)


@cache
def _analytic(level_bits: tuple[int, ...]) -> Codebooks:
    codebooks = object.__new__(Codebooks)
    angles = tuple(codeword_angles(level, bits) for level, bits in enumerate(level_bits, 1))
    object.__setattr__(codebooks, "angles", angles)
    object.__setattr__(codebooks, "is_analytic", True)
    return codebooks


def _checked(level: int, codewords: npt.ArrayLike) -> npt.NDArray[np.float64]:
    angles = np.sort(np.asarray(codewords, np.float64).ravel())
    n = len(angles)
    if n not in (2, 4, 8, 16, 32, 64):
        raise ValueError(
            f"angles has {n} codewords at level {level}; it must be 2, 4, 8, 16, 32 or 64"
        )
    top = 2 * pi if level == 1 else pi / 2
    in_range = angles[0] >= 0 and (angles[-1] < top if level == 1 else angles[-1] <= top)
    if not (in_range and (np.diff(angles) > 0).all()):
        raise ValueError(
            f"angles at level {level} run from {angles[0]} to {angles[-1]}; they must be distinct "
            f"and within [0, {top:.6f}{')' if level == 1 else ']'}"
        )
    if level == 1 and (angles[-1] + angles[0] + 2 * pi) / 2 >= 2 * pi:
        angles = np.roll(angles, 1)  # code 0 is the cell that angle 0 falls into
    angles.flags.writeable = False
    return angles
