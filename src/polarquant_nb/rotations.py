"""Random rotations: the same on every platform, and one for keys, values, layers and heads.

A rotation S is orthogonal, r = x S.  ``hadamard`` is two rounds of random signs and butterflies,
with a random permutation in between,

    S = D₁ H P D₂ H / 2^p        (head_dim = 2^p)

Two rounds, because one sends vectors with few non-zero coordinates onto the boundaries of cells,
where the error is several times the expected one.  The permutation, because signs alone keep some
of H's structure: two equal coordinates would give pairs of results of equal size, whose angle is a
cell boundary, whatever the signs (3 times the expected error; 1.4 with P).  For head_dim = m·2^p
with odd m > 1, H becomes H ⊗ Q, where Q is a small dense rotation that mixes the m groups of 2^p
coordinates.  ``haar`` is a dense matrix, uniform over the orthogonal group.

Signs and normal variates come from a counter-based integer generator (Philox), and the dense
matrices from sums in a fixed order, so that neither BLAS, LAPACK nor the number of threads
enters; :attr:`Rotation.fingerprint` identifies the result.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from polarquant_nb.formats import PolarFormat

__all__ = ["Rotation", "rotation_for"]


@dataclass(frozen=True, eq=False)
class Rotation:
    """An orthogonal matrix S, r = x S, in the form in which kernels apply it.

    Parameters
    ----------
    kind : {'hadamard', 'haar', 'none'}
        See :class:`~polarquant_nb.PolarFormat`.
    head_dim : int
        Coordinates, d.
    seed : int
        The rotation is a function of kind, head_dim and seed.
    """

    kind: str
    head_dim: int
    seed: int
    signs: npt.NDArray[np.float32] = field(init=False, repr=False)
    """The diagonals ``(2, d)`` of D₁/2^p and D₂ (ones for ``haar`` and ``none``)."""
    order: npt.NDArray[np.uint32] = field(init=False, repr=False)
    """P, ``(d,)``: coordinate i of the second round is coordinate ``order[i]`` of the first."""
    mix: npt.NDArray[np.float32] = field(init=False, repr=False)
    """Q, ``(m, m)``: groups are mixed by ``group @ Q``."""
    dense: npt.NDArray[np.float32] = field(init=False, repr=False)
    """S of ``haar``, ``(d, d)``; ``(0, 0)`` otherwise."""

    def __post_init__(self) -> None:
        d, m = self.head_dim, self.num_groups
        signs = np.ones((2, d), np.float32)
        if self.kind == "hadamard":
            signs = _random_signs(self.seed, 2 * d).reshape(2, d)
            signs[0] *= np.float32(m / d)
        mix = _haar(m, self.seed) if self.kind == "hadamard" else np.eye(m)
        dense = _haar(d, self.seed) if self.kind == "haar" else np.empty((0, 0))
        order = np.arange(d)
        if self.kind == "hadamard":
            order = np.argsort(_stream(self.seed, 3, d), kind="stable")
        for name, factor, dtype in (
            ("signs", signs, np.float32), ("order", order, np.uint32), ("mix", mix, np.float32),
            ("dense", dense, np.float32),
        ):  # fmt: skip
            value = factor.astype(dtype)
            value.flags.writeable = False
            object.__setattr__(self, name, value)

    @property
    def num_groups(self) -> int:
        """m: the odd part of head_dim; butterflies run within groups of ``head_dim / m``."""
        return self.head_dim // (self.head_dim & -self.head_dim)

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the rotation, over its factors; equal on every platform."""
        digest = hashlib.sha256(f"{self.kind} {self.head_dim}".encode())
        for factor in (self.signs, self.order, self.mix, self.dense):
            digest.update(factor.astype(factor.dtype.newbyteorder("<")).tobytes())
        return digest.hexdigest()

    def apply(self, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Rotate, r = x S, in float64.

        Parameters
        ----------
        x : array_like, shape ``(..., head_dim)``
            Vectors.

        Returns
        -------
        ndarray of float64, shape ``(..., head_dim)``
            Rotated vectors.
        """
        x = np.asarray(x, np.float64)
        if self.kind == "none":
            return x.copy()
        if self.kind == "haar":
            return x @ self.dense.astype(np.float64)
        first, second = self.signs.astype(np.float64)
        return self._round(self._round(x * first)[..., self.order] * second)

    def invert(self, r: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Rotate back, x = r Sᵀ, in float64.

        Parameters
        ----------
        r : array_like, shape ``(..., head_dim)``
            Rotated vectors.

        Returns
        -------
        ndarray of float64, shape ``(..., head_dim)``
            Vectors.
        """
        r = np.asarray(r, np.float64)
        if self.kind == "none":
            return r.copy()
        if self.kind == "haar":
            return r @ self.dense.astype(np.float64).T
        first, second = self.signs.astype(np.float64)
        y = self._round(r, inverse=True) * second
        return self._round(y[..., np.argsort(self.order)], inverse=True) * first

    def _round(self, x: npt.NDArray[np.float64], inverse: bool = False) -> npt.NDArray[np.float64]:
        """One round, without its signs: H within groups, Q (or Qᵀ) across them; not normalised."""
        m = self.num_groups
        y = x.reshape(*x.shape[:-1], m, -1)
        stride = 1
        while stride < y.shape[-1]:
            pairs = y.reshape(*y.shape[:-1], -1, 2, stride)
            low, high = pairs[..., 0, :], pairs[..., 1, :]
            y = np.stack([low + high, low - high], -2).reshape(y.shape)
            stride *= 2
        q = self.mix.astype(np.float64)
        return np.einsum("...gj,gh->...hj", y, q.T if inverse else q).reshape(x.shape)


@lru_cache(maxsize=256)
def _cached(kind: str, head_dim: int, seed: int) -> Rotation:
    return Rotation(kind, head_dim, seed)


def rotation_for(fmt: PolarFormat) -> Rotation:
    """The rotation of a format.

    Parameters
    ----------
    fmt : PolarFormat
        Its rotation kind, head_dim and seed decide.

    Returns
    -------
    Rotation
        Cached; equal arguments give the same object.
    """
    return _cached(fmt.rotation, fmt.head_dim, fmt.seed)


def _stream(seed: int, purpose: int, n: int) -> npt.NDArray[np.uint64]:
    """Words of a counter-based generator; ``purpose`` keeps signs and matrices independent."""
    return np.random.Philox(key=[seed, purpose]).random_raw(n).astype(np.uint64)


def _random_signs(seed: int, n: int) -> npt.NDArray[np.float32]:
    top_bit = _stream(seed, 1, n) >> np.uint64(63)
    return (1 - 2 * top_bit.astype(np.int8)).astype(np.float32)


def _haar(d: int, seed: int) -> npt.NDArray[np.float64]:
    """Orthogonal matrix uniform over O(d): a product of Householder reflections (Stewart 1980)."""
    normal = _normal(seed, d * (d + 1) // 2)
    q = np.eye(d)
    for n in range(1, d + 1):  # reflections that act on the last n coordinates
        v, normal = normal[:n].copy(), normal[n:]
        sign = -1.0 if v[0] < 0 else 1.0
        v[0] += sign * np.sqrt(np.add.accumulate(v * v)[-1])
        corner = q[d - n :, d - n :]
        weight = 2 / np.add.accumulate(v * v)[-1]
        # accumulate adds in the order of its terms: no BLAS, no pairwise sums
        projection = np.add.accumulate(v[:, None] * corner, axis=0)[-1]
        corner -= (weight * v)[:, None] * projection
        corner[0] *= -sign
    return q


def _normal(seed: int, n: int) -> npt.NDArray[np.float64]:
    """Box–Muller variates, rounded to 2^-20 so that no library's last bit is visible."""
    raw = _stream(seed, 2, 2 * n).reshape(2, n) >> np.uint64(11)
    u = (raw.astype(np.float64) + 0.5) * 2.0**-53
    z = np.sqrt(-2 * np.log(u[0])) * np.cos(2 * np.pi * u[1])
    return np.round(z * 2.0**20) * 2.0**-20
