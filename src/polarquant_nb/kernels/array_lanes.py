"""Lanes as NumPy arrays: what runs when Numba's JIT is disabled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ArrayLanes", "Index", "Mask", "Vector"]

# Vectors, masks and indices of either back end; `lanes.py` says which operators they have.
Vector = Any
Mask = Any
Index = Any


class ArrayLanes:
    """Lanes as NumPy arrays.

    Parameters
    ----------
    n : int
        Number of lanes.
    """

    def __init__(self, n: int) -> None:
        self.n = n

    def f(self, value: float) -> Vector:
        """Float constant in every lane."""
        return np.full(self.n, value, np.float32)

    def u(self, value: int) -> Vector:
        """Unsigned constant in every lane."""
        return np.full(self.n, value, np.uint32)

    def load(self, array: npt.NDArray[Any], index: int) -> Vector:
        """Lanes from consecutive elements."""
        return array[index : index + self.n].copy()

    def store(self, array: npt.NDArray[Any], index: int, value: Vector) -> None:
        """Lanes to consecutive elements."""
        array[index : index + self.n] = value

    def splat(self, array: npt.NDArray[Any], index: int) -> Vector:
        """One element in every lane."""
        return np.full(self.n, array[index])

    def index(self, array: npt.NDArray[Any], i: int) -> Index:
        """An element of an array of indices."""
        return int(array[i])

    def gather(self, array: npt.NDArray[Any], indices: npt.NDArray[np.uint32], i: int) -> Vector:
        """Lanes from the elements at ``indices[i ..]``."""
        return array[indices[i : i + self.n]]

    def load_columns(self, rows: npt.NDArray[Any], index: int, stride: int) -> list[Vector]:
        """16 columns of ``n`` rows that start ``stride`` apart."""
        return [rows[index + k + stride * np.arange(self.n)] for k in range(16)]

    def store_columns(
        self, rows: npt.NDArray[Any], index: int, stride: int, columns: Sequence[Vector]
    ) -> None:
        """Inverse of :meth:`load_columns`."""
        for k, column in enumerate(columns):
            rows[index + k + stride * np.arange(self.n)] = column

    def load_lanes(self, words: npt.NDArray[np.uint32], word: int, lane: int, width: int) -> Vector:
        """Lanes ``lane ..`` of a page row of 32, 16 or 8 bits a lane, zero-extended."""
        narrow = words[word:].view(f"<u{width // 8}")
        return narrow[lane : lane + self.n].astype(np.uint32)

    def store_lanes(
        self, words: npt.NDArray[np.uint32], word: int, lane: int, width: int, value: Vector
    ) -> None:
        """Inverse of :meth:`load_lanes`; higher bits are dropped."""
        narrow = words[word:].view(f"<u{width // 8}")
        narrow[lane : lane + self.n] = value.astype(narrow.dtype)

    def prefetch(
        self, words: npt.NDArray[Any], word: int, lane: int, width: int, *, write: bool = False
    ) -> None:
        """Hint that the cache line of a row's lane, which need not exist, is used soon."""

    def as_uint(self, value: Vector) -> Vector:
        """Bits of a float."""
        return value.view(np.uint32)

    def as_float(self, value: Vector) -> Vector:
        """Float of its bits."""
        return value.view(np.float32)

    def where(self, mask: Mask, a: Vector, b: Vector) -> Vector:
        """``a`` where the mask is set, else ``b``."""
        return np.where(mask, a, b)

    def only(self, mask: Mask, value: int) -> Vector:
        """Unsigned constant where the mask is set, else 0."""
        return np.where(mask, np.uint32(value), np.uint32(0))

    def butterfly(self, a: Vector, stride: int) -> Vector:
        """Within a vector: lanes (i, i + stride) become (a_i + a_j, a_i − a_j)."""
        lane = np.arange(self.n)
        partner = a[lane ^ stride]
        return np.where(lane & stride, partner - a, a + partner)

    def total(self, a: Vector) -> Vector:
        """Sum of all lanes, in every lane; in any order."""
        return np.full(self.n, a.sum(), np.float32)

    def sqrt(self, a: Vector) -> Vector:
        """Square root, correctly rounded."""
        return np.sqrt(a)

    def absolute(self, a: Vector) -> Vector:
        """Clear the sign."""
        return np.abs(a)

    def subtract(self, a: Vector, b: Vector) -> Vector:
        """``a − b``, on a unit that additions leave idle where there is one."""
        return a - b

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        """``a b + c``, rounded once or twice."""
        return a * b + c

    def lookup(self, table: npt.NDArray[np.float32], index: int, bits: int, code: Vector) -> Vector:
        """``table[index + code % 2**bits]``; the table has at least 16 entries."""
        return table[index + (code & np.uint32(2**bits - 1)).astype(np.int64)]

    def loop(
        self,
        count: Index,
        start: Sequence[Vector],
        body: Callable[[Index, list[Vector]], list[Vector]],
    ) -> list[Vector]:
        """``values = body(i, values)`` for i in range(count): a loop that stays a loop."""
        values = list(start)
        for i in range(count):
            values = body(i, values)
        return values
