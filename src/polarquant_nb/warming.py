"""Compile kernels before they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from polarquant_nb.arrays import ArrayKind, element_dtype, strided
from polarquant_nb.budgets import format_pair
from polarquant_nb.cache import KVCache
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.codec import decode_rows, encode_into
from polarquant_nb.formats import FormatPair, PolarFormat, integer
from polarquant_nb.layout import PAGE
from polarquant_nb.packed_attention import Problem, attend_packed
from polarquant_nb.rows import PackedRows

__all__ = ["warmup"]

_DTYPES = ("float16", "bfloat16", "float32", "float64")


def warmup(
    key_format: str | FormatPair | PolarFormat,
    value_format: PolarFormat | None = None,
    *,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    queries: int | Iterable[int] = 1,
    dtype: str = "float32",
) -> float:
    """Compile the kernels of a format, so that no request has to wait for them.

    A format's kernels take some seconds to compile.  They are kept in Numba's cache on disk, from
    which later processes read them; a server calls this when it starts, and its first request is as
    fast as the others.

    Parameters
    ----------
    key_format : str, FormatPair or PolarFormat
        As of :class:`KVCache`.
    value_format : PolarFormat, optional
        As of :class:`KVCache`.
    head_dim, value_head_dim : int, optional
        As of :class:`KVCache`.
    queries : int or iterable of int
        Queries that share a kv head: ``num_heads / num_kv_heads * q_len``, for every q_len that
        will come.  From 8 on all numbers up to 64 share kernels, and above 64 attention has none of
        its own.
    dtype : {'float32', 'float16', 'bfloat16', 'float64'}
        What will be appended or encoded; float16 and bfloat16 share kernels.

    Returns
    -------
    float
        Seconds it took.

    Raises
    ------
    TypeError
        If formats or ``queries`` have the wrong type.
    ValueError
        If ``queries`` is less than 1, a preset is unknown, or a head_dim or dtype is not supported.

    Examples
    --------
    >>> import polarquant_nb as pq
    >>> seconds = pq.warmup("balanced", head_dim=64, queries=9 // 3)
    """
    formats = format_pair(
        key_format, value_format, head_dim=head_dim, value_head_dim=value_head_dim
    )
    several = queries if isinstance(queries, Iterable) else [queries]
    counts = [integer("queries", n) for n in several]
    if any(n < 1 for n in counts):
        raise ValueError(f"queries is {queries}; it must be at least 1")
    if dtype not in _DTYPES:
        raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    start = time.perf_counter()
    kind = ArrayKind("numpy", dtype)
    keys, values = _token(formats.keys, kind), _token(formats.values, kind)
    for n in counts:
        q = np.zeros((1, n, formats.keys.head_dim), np.float32)
        attend_packed(Problem(q, keys, values, 1.0, 0.0, None, np.ones((1, n), np.int64)))
        _step(formats, n, "float16" if dtype == "bfloat16" else dtype)  # the same kernels
    return time.perf_counter() - start


def _token(fmt: PolarFormat, kind: ArrayKind) -> PackedRows:
    """A row of one token, encoded and decoded."""
    codebooks = Codebooks.analytic(fmt)
    words, starts = np.empty(fmt.layout.num_words, np.uint32), np.zeros((1, 1), np.int64)
    source = np.zeros((1, PAGE, fmt.head_dim), element_dtype(kind))
    encode_into(strided(source, kind), fmt, codebooks, words, starts[0])
    rows = PackedRows(fmt, codebooks, words, starts, np.ones(1, np.int64))
    decode_rows(rows, 0, 1, source.reshape(-1)[: fmt.head_dim], kind)
    return rows


def _step(formats: FormatPair, n: int, dtype: str) -> None:
    """What a decoder does, for the first time and as it is prepared then."""
    cache = KVCache(formats, sink=0, recent=0)
    q = np.zeros((1, n, 1, formats.keys.head_dim), dtype)
    k, v = (np.zeros((1, 1, PAGE, fmt.head_dim), dtype) for fmt in (formats.keys, formats.values))
    cache.append(k, v)
    for _ in range(2):
        cache.step(q, k[:, :, :1], v[:, :, :1])
