"""Key scales: channels of keys made larger where queries are, for no bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polarquant_nb.layout import PAGE

__all__ = ["key_scales", "page_variance"]

FloatArray = npt.NDArray[np.float32]

_FLOOR = 1e-6
"""Mean squares below this part of the largest count as that: a channel may be all zero."""


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
        Mean squares of keys around their page's mean; see ``scales.page_variance``.
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
