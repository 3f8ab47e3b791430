"""Attention of last tokens to the exact tokens of a cache, merged with that to its pages."""

from __future__ import annotations

import math

import numpy as np

from polarquant_nb.kernels.attention_cpu import LOG2_E
from polarquant_nb.kernels.jit import kernel

__all__ = ["add_exact"]


@kernel
def add_exact(queries, keys, values, counts, scale, softcap, out, lse):
    """Add exact tokens to a softmax over others; every query sees all tokens of its row.

    Parameters
    ----------
    queries : array of float32, shape ``(rows, n, head_dim)``
        A row is a batch element and kv head.
    keys, values : arrays of float32, ``(rows, slots, head_dim)``, ``(rows, slots, value_head_dim)``
        Exact tokens.
    counts : 1-d array of int64
        How many of a row's slots hold tokens.
    scale, softcap : float
        Of the logits; no softcap if 0.
    out : array of float32, shape ``(rows, n, value_head_dim)``
        The result over the others, and then over all.
    lse : array of float32, shape ``(rows, n)``
        Natural logarithm of the sum of exponentials of the others, −inf without any; then of all.
    """
    log2_e = np.float32(LOG2_E)
    for row in range(len(queries)):
        if counts[row] == 0:
            continue
        k, v = keys[row][: counts[row]], values[row][: counts[row]]
        weights = np.dot(queries[row], k.T)
        for q in range(len(weights)):
            # the others count as one more token, of logit lse and value out
            others = lse[row, q] * log2_e
            top = others
            for t in range(len(k)):
                logit = weights[q, t] * np.float32(scale)
                if softcap > 0:
                    logit = np.float32(softcap * math.tanh(logit / softcap))
                weights[q, t] = logit * log2_e
                top = max(top, weights[q, t])
            if top == -np.inf:
                top = np.float32(0)  # any finite number will do
            others = np.exp2(others - top)
            total = others
            for t in range(len(k)):
                weights[q, t] = np.exp2(weights[q, t] - top)
                total += weights[q, t]
            lse[row, q] = (top + np.log2(total)) / log2_e
            share = np.float32(0) if total == 0 else 1 / total
            for t in range(len(k)):
                weights[q, t] *= share
            for i in range(out.shape[2]):
                out[row, q, i] *= others * share
        out[row] += np.dot(weights, v)
