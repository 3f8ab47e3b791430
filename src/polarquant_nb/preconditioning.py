"""What is done to keys before their rotation, and undone wherever they are used: bias and scales.

A key is stored as ``s (k − R_i b)``.  Both parts cost no bits and drop out of the logits exactly,

    q·k = (q / s)·(s (k − R_i b)) + q·R_i b.

The scales s (*key scales*) are larger in channels where queries are large compared with keys; they
are multiplied into the signs of the rotation, the query's by their inverse.  The bias b is the
constant part that keys of some models have before the rotary embedding R_i, which turns it with the
position i (*RotaryBias*).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, widen
from polarquant_nb.bias import RotaryBias, for_rows, open_vectors
from polarquant_nb.formats import PolarFormat
from polarquant_nb.rotations import rotation_for
from polarquant_nb.storable import MAX_NORM

__all__ = ["Preconditioner", "rotary_bias", "row_signs"]

FloatArray = npt.NDArray[np.float32]

_SCALES = (1e-9, 1e9)
"""Smallest and largest scale: their products and inverses are far from the limits of float32."""


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """Key scales and rotary bias of one layer.

    Parameters
    ----------
    scales : array_like of float, shape ``(num_kv_heads, head_dim)`` or ``(batch, …)``, optional
        s, from 1e-9 to 1e9; see :func:`key_scales`.  For formats whose rotation is ``'hadamard'``.
    bias : RotaryBias, optional
        b, with as many leading axes.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If both are missing, or shapes or numbers are not as stated.

    Examples
    --------
    >>> import numpy as np
    >>> import polarquant_nb as pq
    >>> k = np.random.default_rng(0).standard_normal((1, 2, 300, 64), dtype=np.float32)
    >>> flat = pq.Preconditioner(scales=np.ones((2, 64)))
    >>> pages = pq.encode(k, pq.preset("balanced", 64).keys, preconditioner=flat)
    """

    scales: FloatArray | None = None
    bias: RotaryBias | None = None

    def __post_init__(self) -> None:
        if self.scales is None and self.bias is None:
            raise ValueError("scales and bias are both None; give one, or no Preconditioner")
        if self.scales is not None:
            scales = open_vectors("scales", self.scales)
            least, most = _SCALES
            outside = scales[~((scales >= least) & (scales <= most))]
            if outside.size:
                raise ValueError(f"scales hold {outside[0]}; they must be from {least} to {most}")
            object.__setattr__(self, "scales", scales)
        if self.bias is not None and not isinstance(self.bias, RotaryBias):
            raise TypeError(f"bias is {self.bias!r}; it must be a RotaryBias")
        shapes = [x.shape for x in self._vectors()]
        if shapes[0] != shapes[-1]:
            raise ValueError(
                f"scales have shape {shapes[0]} and the bias {shapes[1]}, not the same"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., num_kv_heads, head_dim)``."""
        return next(x.shape for x in self._vectors())

    @property
    def nbytes(self) -> int:
        """Bytes of scales and bias."""
        frequencies = self.bias.inv_freq.nbytes if self.bias else 0
        return sum(x.nbytes for x in self._vectors()) + frequencies

    @cached_property
    def longest(self) -> float:
        """Norm of vectors up to which none becomes longer than 65504."""
        largest = 1.0 if self.scales is None else max(1.0, float(self.scales.max()))
        norm = 0.0 if self.bias is None else float(np.linalg.norm(self.bias.vectors, axis=-1).max())
        return max(0.0, MAX_NORM / largest - norm)

    @property
    def without_bias(self) -> Preconditioner | None:
        """The scales alone, if there are any."""
        return None if self.scales is None else Preconditioner(self.scales)

    def check(self, fmt: PolarFormat, leading: Sequence[int | str]) -> None:
        """Refuse vectors that these are not for.

        Parameters
        ----------
        fmt : PolarFormat
            Of the vectors.
        leading : sequence of int
            Axes before ``seq_len`` of the vectors.  Numbers that are not known yet are strings, and
            fit everything.

        Raises
        ------
        ValueError
            If a shape or the format's rotation does not fit.
        """
        own = self.shape[:-1]
        expected = tuple(leading)[len(leading) - len(own) :]
        fits = len(own) <= len(leading) and all(
            isinstance(n, str) or n == m for n, m in zip(expected, own, strict=True)
        )
        if not fits or self.shape[-1] != fmt.head_dim:
            raise ValueError(
                f"preconditioner has shape {self.shape}; it must be (num_kv_heads, head_dim) = "
                f"({leading[-1] if leading else 'none'}, {fmt.head_dim}), or have more of the axes "
                "before these"
            )
        if self.scales is not None and fmt.rotation != "hadamard":
            raise ValueError(
                f"preconditioner has scales; they need rotation 'hadamard', the format has "
                f"{fmt.rotation!r}"
            )

    def same(self, other: Preconditioner | None) -> bool:
        """Whether another one has equal numbers.

        Parameters
        ----------
        other : Preconditioner, optional
            None is never equal.

        Returns
        -------
        bool
            All scales, biases and frequencies are equal.
        """
        if other is None:
            return False
        return all(map(_equal, self._numbers(), other._numbers()))

    def of_rows(self, num_rows: int, rows: slice = slice(None)) -> Preconditioner:
        """For some rows alone, a row being one batch element and kv head.

        Parameters
        ----------
        num_rows : int
            Rows that there are, a multiple of those that the scales are for.
        rows : slice
            Which of them.

        Returns
        -------
        Preconditioner
            Of shape ``(rows, head_dim)``.
        """
        return self._map(lambda x: for_rows(x, num_rows)[rows])

    def with_row(self, row: int, other: Preconditioner) -> Preconditioner:
        """With one batch row's numbers replaced.

        Parameters
        ----------
        row : int
            Which.
        other : Preconditioner
            Of one batch row, with the same parts.

        Returns
        -------
        Preconditioner
            Of the same shape.
        """

        def replaced(all_rows: FloatArray, new: FloatArray) -> FloatArray:
            changed = all_rows.copy()
            changed[row] = new[0]
            return changed

        scales, bias = self.scales, self.bias
        if scales is not None and other.scales is not None:
            scales = replaced(scales, other.scales)
        if bias is not None and other.bias is not None:
            bias = replace(bias, vectors=replaced(bias.vectors, other.bias.vectors))
        return Preconditioner(scales, bias)

    def select(self, indices: Sequence[int]) -> Preconditioner:
        """Batch rows in another order; the same object if all have one.

        Parameters
        ----------
        indices : sequence of int
            Rows.

        Returns
        -------
        Preconditioner
            Of shape ``(len(indices), num_kv_heads, head_dim)``, or the same.
        """
        return self if len(self.shape) < 3 else self._map(lambda x: x[list(indices)])

    def subtract_bias(
        self, elements: npt.NDArray[Any], kind: ArrayKind, first_position: int
    ) -> tuple[npt.NDArray[Any], ArrayKind]:
        """Vectors without their bias.

        Parameters
        ----------
        elements : ndarray, shape ``(..., num_kv_heads, seq_len, head_dim)``
            From ``arrays.open_elements``.
        kind : ArrayKind
            What they are.
        first_position : int
            Of the first token.

        Returns
        -------
        ndarray, ArrayKind
            Float32; the same ones if there is no bias.
        """
        if self.bias is None:
            return elements, kind
        turned = self.bias.at(first_position, elements.shape[-2])
        return widen(elements, kind) - turned, ArrayKind(kind.family, "float32")

    def scaled(self, elements: npt.NDArray[Any], kind: ArrayKind) -> npt.NDArray[Any]:
        """Vectors times the scales, as their rotation has them.

        Parameters
        ----------
        elements : ndarray
            From :meth:`subtract_bias`.
        kind : ArrayKind
            Likewise.

        Returns
        -------
        ndarray of float32
            Of the shape of ``elements``.
        """
        x = widen(elements, kind)
        return x if self.scales is None else x * self.scales[..., None, :]

    def _numbers(self) -> tuple[Any, ...]:
        bias = self.bias
        if bias is None:
            return self.scales, None, None, None
        return self.scales, bias.vectors, bias.inv_freq, bias.interleaved

    def _vectors(self) -> list[FloatArray]:
        both = (self.scales, self.bias.vectors if self.bias else None)
        return [x for x in both if x is not None]

    def _map(self, change: Any) -> Preconditioner:
        bias = self.bias
        return Preconditioner(
            None if self.scales is None else change(self.scales),
            None if bias is None else RotaryBias(
                change(bias.vectors), bias.inv_freq, bias.interleaved
            ),
        )  # fmt: skip


def rotary_bias(preconditioner: Preconditioner | None) -> RotaryBias | None:
    """The bias of a preconditioner, where there are both."""
    return None if preconditioner is None else preconditioner.bias


def row_signs(
    fmt: PolarFormat, preconditioner: Preconditioner | None, *, inverse: bool
) -> FloatArray:
    """The signs of a rotation with the scales of each row multiplied in, as kernels take them.

    Parameters
    ----------
    fmt : PolarFormat
        Decides on the rotation.
    preconditioner : Preconditioner, optional
        Its scales, if any.
    inverse : bool
        Divide by the scales, for queries and to decode.

    Returns
    -------
    ndarray of float32, 1-d
        ``(rows, 2, head_dim)`` flat; one row for all without scales.
    """
    signs = rotation_for(fmt).signs
    if preconditioner is None or preconditioner.scales is None:
        return signs.ravel()
    scales = preconditioner.scales.reshape(-1, fmt.head_dim)
    table = np.empty((len(scales), 2, fmt.head_dim), np.float32)
    table[:, 0] = signs[0] / scales if inverse else signs[0] * scales
    table[:, 1] = signs[1]
    return table.ravel()


def _equal(a: Any, b: Any) -> bool:
    return (a is None) == (b is None) and np.array_equal(a, b)
