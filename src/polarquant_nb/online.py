"""Key scales and bias from a row's own first tokens, for caches that come without calibration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, widen
from polarquant_nb.bias import RotaryBias
from polarquant_nb.formats import integer
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.scales import key_scales, page_variance
from polarquant_nb.storable import MAX_NORM

__all__ = ["Fitting", "OnlinePreconditioner"]

_MOST = 4096
"""First tokens of a row that are looked at; bounds the float32 copies."""


@dataclass(frozen=True, eq=False)
class OnlinePreconditioner:
    """Fit a :class:`Preconditioner` to each row of a cache, from its own first tokens.

    A row's tokens stay exact until there are ``min_tokens`` of them.  Then its scales and bias are
    fitted, for each kv head, to the tokens that it has; from then on they are fixed, and stay with
    the row in ``select``, ``repeat``, copies and files.  A cache on a GPU refuses one.

    Parameters
    ----------
    scales : bool
        Fit key scales, for which appends must be given the queries; see :func:`key_scales`.
    inv_freq : array_like of float, 1-d, optional
        Fit a rotary bias too; see :meth:`RotaryBias.estimate`.
    interleaved : bool
        Of the rotary embedding; see :class:`RotaryBias`.
    min_tokens : int
        At least 256: fewer tell too little.
    alpha : float
        See :func:`key_scales`.

    Raises
    ------
    TypeError
        If min_tokens is no int.
    ValueError
        If there is nothing to fit, or an argument is not as stated.

    Examples
    --------
    >>> import numpy as np
    >>> import polarquant_nb as pq
    >>> cache = pq.KVCache("balanced", head_dim=64, preconditioner=pq.OnlinePreconditioner())
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 2, 500, 64), dtype=np.float32)
    >>> q = rng.standard_normal((1, 6, 500, 64), dtype=np.float32)
    >>> cache.append(k, v, q=q)
    """

    scales: bool = True
    inv_freq: npt.NDArray[np.float64] | None = None
    interleaved: bool = False
    min_tokens: int = 256
    alpha: float = 0.5

    def __post_init__(self) -> None:
        if not self.scales and self.inv_freq is None:
            raise ValueError("scales is False and inv_freq None: there is nothing to fit")
        tokens = integer("min_tokens", self.min_tokens)
        if tokens < 256:
            raise ValueError(f"min_tokens is {tokens}; it must be at least 256")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; it must be 0 to 1")
        object.__setattr__(self, "min_tokens", tokens)
        if self.inv_freq is not None:
            inv_freq = np.array(self.inv_freq, np.float64)
            RotaryBias(np.zeros((1, 2 * max(1, inv_freq.size)), np.float32), inv_freq)  # checks it
            object.__setattr__(self, "inv_freq", inv_freq)

    def neutral(self, shape: tuple[int, ...]) -> Preconditioner:
        """One that changes nothing.

        Parameters
        ----------
        shape : tuple of int
            ``(batch, num_kv_heads, head_dim)``.

        Returns
        -------
        Preconditioner
            Scales of 1 and a bias of 0, where they are to be fitted.
        """
        scales = np.ones(shape, np.float32) if self.scales else None
        bias = None
        if self.inv_freq is not None:
            bias = RotaryBias(np.zeros(shape, np.float32), self.inv_freq, self.interleaved)
        return Preconditioner(scales, bias)

    def fit(self, k: npt.NDArray[np.float32], q_squared: npt.NDArray[np.float64]) -> Preconditioner:
        """The preconditioner of one row.

        Parameters
        ----------
        k : ndarray of float32, shape ``(num_kv_heads, n, head_dim)``
            Its first keys, from position 0; those that are not finite are left out.
        q_squared : ndarray of float64, shape ``(num_kv_heads, head_dim)``
            Mean squares of queries.

        Returns
        -------
        Preconditioner
            Of shape ``(1, num_kv_heads, head_dim)``.
        """
        finite = np.asarray(np.isfinite(k).all((0, 2)))
        k = np.where(finite[:, None], k, np.float32(0))
        bias = None
        if self.inv_freq is not None:
            bias = RotaryBias.estimate(k, self.inv_freq, interleaved=self.interleaved)
            k = k - bias.at(0, k.shape[1])
        scales = None
        if self.scales:
            scales = key_scales(q_squared, page_variance(k[:, finite]), alpha=self.alpha)
            # half of what can be stored is left to the keys to come
            longest = np.linalg.norm(k * scales[:, None], axis=-1).max(-1, keepdims=True)
            scales = np.where(longest < MAX_NORM / 2, scales, np.float32(1))[None]
        return Preconditioner(
            scales,
            None if bias is None else replace(bias, vectors=bias.vectors[None]),
        )


@dataclass(frozen=True, eq=False)
class Fitting:
    """What a cache knows for fitting its rows.

    Parameters
    ----------
    online : OnlinePreconditioner
        What is fitted.
    q_squared : ndarray of float64, shape ``(batch, num_kv_heads, head_dim)``
        Sums of squares of queries.
    counts : tuple of int
        Queries of each row that were summed.
    fixed : tuple of bool
        Which rows are fitted.
    """

    online: OnlinePreconditioner
    q_squared: npt.NDArray[np.float64]
    counts: tuple[int, ...]
    fixed: tuple[bool, ...]

    @staticmethod
    def empty(online: OnlinePreconditioner, shape: tuple[int, int, int]) -> Fitting:
        """Before the first token.

        Parameters
        ----------
        online : OnlinePreconditioner
            What is to be fitted.
        shape : tuple of int
            ``(batch, num_kv_heads, head_dim)``.

        Returns
        -------
        Fitting
            With no row fixed.
        """
        return Fitting(online, np.zeros(shape), (0,) * shape[0], (False,) * shape[0])

    @property
    def wants_queries(self) -> bool:
        """Whether the next append must be given queries."""
        return self.online.scales and not all(self.fixed)

    @property
    def nbytes(self) -> int:
        """Bytes of the sums."""
        return self.q_squared.nbytes

    def select(self, indices: Sequence[int]) -> Fitting:
        """Rows in another order."""
        return Fitting(
            self.online,
            self.q_squared[list(indices)],
            tuple(self.counts[i] for i in indices),
            tuple(self.fixed[i] for i in indices),
        )

    def observed(
        self, q: npt.NDArray[Any], kind: ArrayKind, padding: Sequence[int]
    ) -> Fitting:  # fmt: skip
        """With the queries of an append.

        Parameters
        ----------
        q : ndarray, shape ``(batch, num_heads, n, head_dim)``
            Elements.
        kind : ArrayKind
            What they are.
        padding : sequence of int
            First tokens of each row that are none.

        Returns
        -------
        Fitting
            Those of rows that are not fixed are added; what is not finite is not.
        """
        sums, counts = self.q_squared.copy(), list(self.counts)
        heads = sums.shape[1]
        for row, fixed in enumerate(self.fixed):
            if fixed:
                continue
            x = widen(q[row, :, padding[row] : padding[row] + _MOST], kind)
            x = x.reshape(heads, -1, x.shape[-1])
            x = x[:, np.isfinite(x).all((0, 2))]
            sums[row] += np.square(x, dtype=np.float64).sum(1)
            counts[row] += x.shape[1]
        return replace(self, q_squared=sums, counts=tuple(counts))

    def ready(self, lengths: Sequence[int]) -> list[int]:
        """Rows that can be fitted now.

        Parameters
        ----------
        lengths : sequence of int
            Tokens of each row.

        Returns
        -------
        list of int
            Rows.
        """
        least = self.online.min_tokens
        return [
            row
            for row, (n, fixed) in enumerate(zip(lengths, self.fixed, strict=True))
            if n >= least and not fixed
        ]

    def fitted(
        self, row: int, k: npt.NDArray[np.float32], before: Preconditioner
    ) -> tuple[Fitting, Preconditioner]:
        """With one row fixed.

        Parameters
        ----------
        row : int
            Which.
        k : ndarray of float32, shape ``(num_kv_heads, n, head_dim)``
            All its keys, or the first some thousand.
        before : Preconditioner
            Of all rows, so far.

        Returns
        -------
        Fitting, Preconditioner
            And that of all rows then.
        """
        own = self.online.fit(k[:, :_MOST], self.q_squared[row] / max(1, self.counts[row]))
        fixed = tuple(is_fixed or i == row for i, is_fixed in enumerate(self.fixed))
        return replace(self, fixed=fixed), before.with_row(row, own)
