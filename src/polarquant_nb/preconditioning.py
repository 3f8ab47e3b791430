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
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, open_elements, widen
from polarquant_nb.formats import PolarFormat, integer
from polarquant_nb.layout import PAGE
from polarquant_nb.rotations import rotation_for
from polarquant_nb.storable import MAX_NORM

__all__ = [
    "Preconditioner",
    "RotaryBias",
    "key_scales",
    "page_phases",
    "page_table",
    "page_variance",
    "rotary_bias",
    "row_signs",
    "turns",
]

FloatArray = npt.NDArray[np.float32]

_FLOOR = 1e-6
"""Mean squares below this part of the largest count as that: a channel may be all zero."""

_SCALES = (1e-9, 1e9)
"""Smallest and largest scale: their products and inverses are far from the limits of float32."""


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
        vectors = _open("vectors", self.vectors)
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
        b = _for_rows(self.vectors, rows)[:, None]
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
            scales = _open("scales", self.scales)
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
        return self._map(lambda x: _for_rows(x, num_rows)[rows])

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


def key_scales(
    q_squared: npt.ArrayLike, k_variance: npt.ArrayLike, *, alpha: float = 0.75
) -> FloatArray:
    """Scales that lower the expected error of logits, s_c = (E[q_c²] / E[(k_c − μ_c)²])^(α/4).

    The error of a logit is Σ E[q_c²] E[e_c²], and a rotation spreads a key's error e evenly over
    its channels: so it pays to make keys larger where queries are large.

    Parameters
    ----------
    q_squared : array_like of float, shape ``(..., num_kv_heads, head_dim)``
        Mean squares of queries, over tokens and the heads that share a kv head.
    k_variance : array_like of float, of the same shape
        Mean squares of keys around their page's mean; see ``preconditioning.page_variance``.
    alpha : float
        0 for no scales, to 1, which minimises the expected error if queries and keys stay as they
        were measured.  On synthetic keys of d = 256 that vary most where queries are small, 0.5,
        0.75 and 1 lower the divergence of attention 3.9, 5.4 and 6.1 times; where there is nothing
        to gain, moments that are off by a third cost 1, 3 and 6 %
        (``benchmarks/synthetic_keys.py``).

    Returns
    -------
    ndarray of float32, of the same shape
        Scales of geometric mean 1.

    Raises
    ------
    ValueError
        If shapes differ, a number is negative or not finite, or alpha is not 0 to 1.
    """
    q, k = (np.asarray(x, np.float64) for x in (q_squared, k_variance))
    if q.shape != k.shape or q.ndim < 1:
        raise ValueError(f"q_squared has shape {q.shape} and k_variance {k.shape}; they must agree")
    for name, x in (("q_squared", q), ("k_variance", k)):
        if not (np.isfinite(x).all() and (x >= 0).all()):
            raise ValueError(f"{name} holds numbers that are negative or not finite")
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it must be 0 to 1")

    def log_floored(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        largest = x.max(-1, keepdims=True)
        largest = np.where(largest > 0, largest, 1.0)  # all zero: nothing to tell channels apart
        return np.log(np.maximum(x, _FLOOR * largest))

    exponent = alpha / 4 * (log_floored(q) - log_floored(k))
    return np.exp(exponent - exponent.mean(-1, keepdims=True)).astype(np.float32)


def page_variance(k: FloatArray) -> npt.NDArray[np.float64]:
    """Mean squares of each channel around the means of pages.

    Parameters
    ----------
    k : ndarray of float32, shape ``(..., seq_len, head_dim)``
        Keys, without their bias; at least one.

    Returns
    -------
    ndarray of float64, shape ``(..., head_dim)``
        Means over all tokens.
    """
    total = np.zeros((*k.shape[:-2], k.shape[-1]))
    for start in range(0, k.shape[-2], PAGE):
        page = k[..., start : start + PAGE, :]
        total += np.square(page - page.mean(-2, keepdims=True)).sum(-2, np.float64)
    return total / k.shape[-2]


def _equal(a: Any, b: Any) -> bool:
    return (a is None) == (b is None) and np.array_equal(a, b)


def _for_rows(x: FloatArray, num_rows: int) -> FloatArray:
    flat = x.reshape(-1, x.shape[-1])
    return flat[np.arange(num_rows) % len(flat)]


def _detached(x: Any) -> Any:
    if not hasattr(x, "detach"):
        return x
    x = x.detach().cpu()
    return (x.float() if x.element_size() < 4 and x.is_floating_point() else x).numpy()


def _open(name: str, x: Any) -> FloatArray:
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
