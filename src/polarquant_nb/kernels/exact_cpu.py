"""The exact tokens of a cache on the CPU: storing one, and attention of last tokens to them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from polarquant_nb.kernels.attention_cpu import LOG2_E
from polarquant_nb.kernels.cpu import BFLOAT, half_to_float
from polarquant_nb.kernels.jit import kernel

__all__ = ["add_exact", "start_empty", "store_token"]


@kernel
def store_token(k, v, keys, values, kind, counts, longest, good):
    """Put a token into the next slot of each row.

    Parameters
    ----------
    k, v : arrays, shape ``(rows, head_dim)``, ``(rows, value_head_dim)``
        Elements of the token; a row is a batch element and kv head.
    keys, values : arrays, ``(rows, slots, head_dim)``, ``(rows, slots, value_head_dim)``
        Elements of exact tokens.
    kind : int
        What elements are; see :func:`~polarquant_nb.kernels.cpu.encode_pages`.
    counts : 1-d array of int64
        How many of a row's slots hold tokens; increased by one.
    longest : tuple of two floats
        Largest norms of a key and of a value.
    good : array of bool, shape ``(1,)``
        Becomes whether no norm is larger, and all numbers are finite.
    """
    good[0] = True
    for row in range(len(k)):
        for x, limit in ((k[row], longest[0]), (v[row], longest[1])):
            wide = _widened(x, kind)
            good[0] &= np.dot(wide, wide) <= np.float32(limit * limit)
        slot = counts[row]
        for i in range(k.shape[1]):  # by hand, as in encode_pages
            keys[row, slot, i] = k[row, i]
        for i in range(v.shape[1]):
            values[row, slot, i] = v[row, i]
        counts[row] += 1


@kernel
def start_empty(out, lse):
    """What :func:`add_exact` adds to where there is nothing else."""
    out[:] = np.float32(0)
    lse[:] = np.float32(-np.inf)


@kernel
def add_exact(queries, keys, values, kind, counts, scale, softcap, out, lse):
    """Add exact tokens to a softmax over others; every query sees all tokens of its row.

    Parameters
    ----------
    queries : array of float32, shape ``(rows, n, head_dim)``
        A row is a batch element and kv head.
    keys, values : arrays, ``(rows, slots, head_dim)``, ``(rows, slots, value_head_dim)``
        Elements of exact tokens.
    kind : int
        What elements are; see :func:`~polarquant_nb.kernels.cpu.encode_pages`.
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
        k = _widened(keys[row][: counts[row]], kind)
        v = _widened(values[row][: counts[row]], kind)
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


def _widened(x: Any, kind: int) -> Any:
    """Elements as float32; no copy of those that are."""
    if x.dtype != np.uint16:
        return x.astype(np.float32, copy=False)
    if kind == BFLOAT:
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x.view(np.float16).astype(np.float32)


@overload(_widened)
def _compiled_widened(x, kind):
    if x.dtype == types.float32:
        return lambda x, kind: x
    if x.dtype == types.float64:
        return lambda x, kind: x.astype(np.float32)

    def widened(x, kind):
        wide = np.empty(x.shape, np.float32)
        from_, to = x.reshape(x.size), wide.reshape(x.size)
        if kind == BFLOAT:
            for i in range(x.size):
                to[i] = np.uint32(np.uint32(from_[i]) << np.uint32(16)).view(np.float32)
        else:
            for i in range(x.size):
                to[i] = half_to_float(from_[i])
        return wide

    return widened
