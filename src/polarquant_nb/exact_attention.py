"""Attention over a few hundred exact tokens, and merging it with attention over pages."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from polarquant_nb.kernels.attention_cpu import LOG2_E
from polarquant_nb.queries import Logits

__all__ = ["attend_exact", "merge"]

FloatArray = npt.NDArray[np.float32]

_SCORES = 2**20
"""Scores held at a time."""


def attend_exact(
    q: FloatArray,
    k: FloatArray,
    v: FloatArray,
    logits: Logits,
    mask: FloatArray | None,
    positions: npt.NDArray[np.int64],
    visible: npt.NDArray[np.int64] | None,
    out: FloatArray,
    lse: FloatArray,
) -> None:
    """Textbook attention in float32; arguments are not checked.

    Scores are in units of 1/log₂ e, as in the kernels, so that a mask's numbers vanish alike.

    Parameters
    ----------
    q : ndarray of float32, shape ``(batch, num_kv_heads, group, q_len, head_dim)``
        Queries.
    k, v : ndarray of float32, shape ``(batch, num_kv_heads, tokens, head_dim)``
        Keys and values.
    logits : Logits
        Scale and softcap.
    mask : ndarray of float32, optional
        Four axes, batch, num_heads, q_len and tokens, the first three maybe of length 1: numbers
        added to the logits.
    positions : ndarray of int64, shape ``(tokens,)``
        Places of the tokens within their row.
    visible : ndarray of int64, shape ``(q_len,)``, optional
        How many places each query sees; all of them by default.
    out : ndarray of float32, shape ``(batch, num_kv_heads, group, q_len, value_head_dim)``
        Where results go: zeros for a query that sees nothing.
    lse : ndarray of float32, shape ``(batch, num_kv_heads, group, q_len)``
        Where natural logarithms of sums of exponentials go; −inf for a query that sees nothing.
    """
    batch, kv_heads, group, q_len, head_dim = q.shape
    tokens = len(positions)
    if not tokens:
        out[:], lse[:] = 0, -np.inf
        return
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], kv_heads, group, *mask.shape[2:])
    elif mask is not None:
        mask = mask[:, :, None]
    step = max(1, _SCORES // max(1, batch * kv_heads * group * tokens))
    for first in range(0, q_len, step):
        here = slice(first, min(first + step, q_len))
        n = here.stop - here.start
        scaled = q[..., here, :] * np.float32(logits.scale * LOG2_E)
        scores = scaled.reshape(batch, kv_heads, group * n, head_dim) @ k.swapaxes(-1, -2)
        if logits.softcap:
            cap = np.float32(logits.softcap * LOG2_E)
            scores = cap * np.tanh(scores / cap)
        scores = scores.reshape(batch, kv_heads, group, n, tokens)
        if mask is not None:
            scores += (mask[..., here, :] if mask.shape[3] > 1 else mask) * np.float32(LOG2_E)
        if visible is not None:
            np.copyto(scores, -np.inf, where=positions >= visible[here, None])
        top = scores.max(-1, keepdims=True)
        top[top == -np.inf] = 0  # sees nothing: any finite number will do
        weights = np.exp2(np.subtract(scores, top, out=scores), out=scores)
        total = weights.sum(-1, keepdims=True)
        lse[..., here] = ((top + np.log2(total)) / np.float32(LOG2_E))[..., 0]
        sums = weights.reshape(batch, kv_heads, group * n, tokens) @ v
        total[total == 0] = 1
        out[..., here, :] = sums.reshape(batch, kv_heads, group, n, v.shape[-1]) / total


def merge(
    a: tuple[FloatArray, FloatArray], b: tuple[FloatArray, FloatArray]
) -> tuple[FloatArray, FloatArray]:
    """Attention over two sets of tokens from attention over each.

    Parameters
    ----------
    a, b : tuple of two ndarrays of float32, shapes ``(..., head_dim)`` and ``(...)``
        Results and their log-sum-exp, −inf where a query saw nothing.

    Returns
    -------
    out, lse : ndarrays of float32
        Likewise, of both together.
    """
    (out_a, lse_a), (out_b, lse_b) = a, b
    share = 1 / (1 + np.exp(lse_b - lse_a))  # of the first set in all weights
    share[np.isnan(share)] = 0  # both saw nothing, or are NaN themselves
    share = share[..., None]
    return out_a * share + out_b * (1 - share), np.logaddexp(lse_a, lse_b)
