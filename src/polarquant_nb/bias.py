"""The constant part that keys of some models have before the rotary embedding turns it.

A key is ``k = R_i b + …``: b is taken off before a key is stored, and comes back as the logits
``q·R_i b``, which need no key.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import open_elements, widen
from polarquant_nb.formats import integer
from polarquant_nb.layout import PAGE

__all__ = ["RotaryBias", "for_rows", "open_vectors", "page_phases", "page_table", "turns"]

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class RotaryBias:
    """The constant part b that keys have before the rotary embedding (RoPE) turns it, R_i b.

    R_i turns the pair of coordinates j by ``i * inv_freq[j]`` radians; i is the token's position.
    Positions that are all off by one number give the same logits, only codes of another error.

    Parameters
    ----------
    vectors : array_like of float, shape ``(num_kv_heads, head_dim)`` or ``(batch, …)``
        b of each kv head: a model's ``k_proj.bias``, or see :meth:`estimate`.
    inv_freq : array_like of float, 1-d
        Radians per token of each pair, at most head_dim / 2 of them; coordinates beyond the pairs
        are not turned.
    interleaved : bool
        Pairs are ``(2j, 2j+1)``; by default ``(j, j + len(inv_freq))``, as in Llama and Qwen.

    Raises
    ------
    TypeError
        If an array is not of floats.
    ValueError
        If a shape is not as stated, or a number is not finite.

    References
    ----------
    Su et al., "RoFormer", arXiv 2104.09864, equation 34.
    """

    vectors: FloatArray
    inv_freq: npt.NDArray[np.float64]
    interleaved: bool = False

    def __post_init__(self) -> None:
        vectors = open_vectors("vectors", self.vectors)
        inv_freq = np.array(_detached(self.inv_freq))
        if inv_freq.dtype.kind not in "fiu":
            raise TypeError(f"inv_freq has dtype {inv_freq.dtype}; it must be a float type")
        inv_freq = inv_freq.astype(np.float64)
        if inv_freq.ndim != 1 or not 0 < 2 * inv_freq.size <= vectors.shape[-1]:
            raise ValueError(
                f"inv_freq has shape {inv_freq.shape}; it must be one-dimensional, with 1 to "
                f"{vectors.shape[-1] // 2} frequencies for head_dim {vectors.shape[-1]}"
            )
        if not np.isfinite(inv_freq).all():
            raise ValueError("inv_freq holds numbers that are not finite")
        inv_freq.flags.writeable = False
        object.__setattr__(self, "vectors", vectors)
        object.__setattr__(self, "inv_freq", inv_freq)
        object.__setattr__(self, "interleaved", bool(self.interleaved))  # JSON knows no NumPy bool

    @staticmethod
    def estimate(
        k: Any, inv_freq: npt.ArrayLike, *, interleaved: bool = False, first_position: int = 0
    ) -> RotaryBias:
        """Estimate b from keys: their mean after the rotary embedding is undone.

        Parameters
        ----------
        k : ndarray or torch.Tensor (CPU), shape ``(..., num_kv_heads, seq_len, head_dim)``
            Keys after the rotary embedding; some hundred tokens are enough.
        inv_freq : array_like, shape ``(n,)``
            See :class:`RotaryBias`.
        interleaved : bool
            Likewise.
        first_position : int
            Position of the first token.

        Returns
        -------
        RotaryBias
            For the leading axes that ``k`` has.

        Raises
        ------
        TypeError, ValueError
            As in :class:`RotaryBias`; ValueError too if there is no token, or one is not finite.
        """
        elements, kind = open_elements(k, "k")
        if elements.shape[-2] == 0:
            raise ValueError(f"k has shape {elements.shape}; it must hold tokens")
        keys = widen(elements, kind)
        if not np.isfinite(keys).all():
            raise ValueError("k holds numbers that are not finite")
        shape = (*elements.shape[:-2], elements.shape[-1])
        like = RotaryBias(np.zeros(shape, np.float32), inv_freq, interleaved)  # type: ignore[arg-type]
        back = like._turned(keys, integer("first_position", first_position), -1)
        return RotaryBias(back.mean(-2, np.float64), like.inv_freq, interleaved)

    def at(self, first_position: int, count: int) -> FloatArray:
        """R_i b of consecutive positions.

        Parameters
        ----------
        first_position, count : int
            Which.

        Returns
        -------
        ndarray of float32, shape ``(..., count, head_dim)``
            Vectors.
        """
        still = np.broadcast_to(
            self.vectors[..., None, :], (*self.vectors.shape[:-1], count, self.vectors.shape[-1])
        )
        return self._turned(still, first_position, 1)

    def logits(self, q: FloatArray, first_position: int, count: int) -> FloatArray:
        """q·R_i b of consecutive positions, unscaled.

        As the angle of position 128 P + t is the sum of those of 128 P and t, coefficients are
        turned page by page, and meet one table of 128 positions.

        Parameters
        ----------
        q : ndarray of float32, shape ``(rows, n, head_dim)``
            Queries; a row is a batch element and kv head.
        first_position, count : int
            Which positions.

        Returns
        -------
        ndarray of float32, shape ``(rows, n, count)``
            Numbers.
        """
        rows, n, _ = q.shape
        frequencies = self.inv_freq.tobytes()
        b = for_rows(self.vectors, rows)[:, None]
        (q_first, q_second, q_rest), (b_first, b_second, b_rest) = self.parts(q), self.parts(b)
        # q·R b = Σ cos φ (q₁b₁ + q₂b₂) + sin φ (q₂b₁ − q₁b₂), as the real part of z e^{−iφ}
        z = (q_first + 1j * q_second) * (b_first - 1j * b_second)
        pages = -(-count // PAGE)
        turned = z[:, :, None] * page_phases(frequencies, first_position, pages)
        coefficients = turned.reshape(-1, self.inv_freq.size).view(np.float32)
        both = (coefficients @ page_table(frequencies).T).reshape(rows, n, pages * PAGE)
        if b_rest.size:
            both += (q_rest * b_rest).sum(-1, keepdims=True)
        return both[..., :count]

    def parts(self, x: Any) -> tuple[Any, Any, Any]:
        """First and second coordinates of the pairs, and those beyond them.

        Parameters
        ----------
        x : ndarray or torch.Tensor, shape ``(..., head_dim)``
            Vectors.

        Returns
        -------
        three of the same
            Views.
        """
        pairs = self.inv_freq.size
        rest = x[..., 2 * pairs :]
        if self.interleaved:
            return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2], rest
        return x[..., :pairs], x[..., pairs : 2 * pairs], rest

    def _turned(self, x: FloatArray, first_position: int, sign: int) -> FloatArray:
        """Vectors ``(..., n, head_dim)`` of consecutive positions, turned forward or back."""
        cos, sin = turns((sign * self.inv_freq).tobytes(), first_position, x.shape[-2])
        turned = np.array(x, np.float32)
        (first, second, _), (to_first, to_second, _) = self.parts(x), self.parts(turned)
        to_first[...] = first * cos - second * sin
        to_second[...] = second * cos + first * sin
        return turned


def turns(frequencies: bytes, first_position: int, count: int) -> tuple[FloatArray, FloatArray]:
    """Cosine and sine of the angle by which each position turns each pair.

    Parameters
    ----------
    frequencies : bytes
        Of ``inv_freq``.
    first_position, count : int
        Consecutive positions.

    Returns
    -------
    two ndarrays of float32, shape ``(count, pairs)``
        Rounded from float64.
    """
    angles = (first_position + np.arange(count))[:, None] * np.frombuffer(frequencies)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _phases(frequencies: bytes, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.complex64]:
    """e^{−iφ} of each position and pair."""
    angles = positions[:, None] * np.frombuffer(frequencies)
    return np.exp(-1j * angles).astype(np.complex64)


@lru_cache(maxsize=8)
def page_table(frequencies: bytes) -> FloatArray:
    """What the positions of a page do to a pair's complex number z: one table for all layers.

    Parameters
    ----------
    frequencies : bytes
        Of ``inv_freq``.

    Returns
    -------
    ndarray of float32, shape ``(128, 2 pairs)``
        Coefficients of Re z and Im z, in turn, whose sum is Re(z e^{−iφ}).
    """
    # Re(z w) is the product of (Re z, Im z) and (Re w̄, Im w̄), which is how they lie in memory
    return np.conj(_phases(frequencies, np.arange(PAGE))).view(np.float32)


@lru_cache(maxsize=4)
def page_phases(frequencies: bytes, first: int, pages: int) -> npt.NDArray[np.complex64]:
    """e^{−iφ} of the first positions of pages: in one decoding step, the same in all layers.

    Parameters
    ----------
    frequencies : bytes
        Of ``inv_freq``.
    first, pages : int
        Position of the first page, and how many there are.

    Returns
    -------
    ndarray of complex64, shape ``(pages, pairs)``
        Numbers.
    """
    return _phases(frequencies, first + PAGE * np.arange(pages))


def for_rows(x: FloatArray, num_rows: int) -> FloatArray:
    """Vectors of each row, a row being one batch element and kv head.

    Parameters
    ----------
    x : ndarray of float32, shape ``(num_kv_heads, head_dim)`` or ``(batch, …)``
        Of a layer.
    num_rows : int
        Rows that there are, a multiple of those that ``x`` has.

    Returns
    -------
    ndarray of float32, shape ``(num_rows, head_dim)``
        A copy.
    """
    flat = x.reshape(-1, x.shape[-1])
    return flat[np.arange(num_rows) % len(flat)]


def _detached(x: Any) -> Any:
    if not hasattr(x, "detach"):
        return x
    x = x.detach().cpu()
    return (x.float() if x.element_size() < 4 and x.is_floating_point() else x).numpy()


def open_vectors(name: str, x: Any) -> FloatArray:
    """A caller's vectors for each kv head, as a read-only array of our own.

    Parameters
    ----------
    name : str
        Of the argument, for messages.
    x : array_like of float or torch.Tensor, shape ``(num_kv_heads, head_dim)`` or ``(batch, …)``
        Numbers.

    Returns
    -------
    ndarray of float32
        Contiguous.

    Raises
    ------
    TypeError, ValueError
        As in :class:`RotaryBias`.
    """
    array = np.asarray(_detached(x))
    if array.dtype.kind != "f":
        raise TypeError(f"{name} has dtype {array.dtype}; it must be a float type")
    with np.errstate(over="ignore"):  # what overflows is refused
        array = np.array(array, np.float32, order="C")
    if array.ndim < 2:
        raise ValueError(f"{name} has shape {array.shape}; it must be (num_kv_heads, head_dim)")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} holds numbers that are not finite")
    array.flags.writeable = False
    return array
