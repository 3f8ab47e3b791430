"""Caches as plain data, and as files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, element_dtype
from polarquant_nb.cache_state import CacheState, Settings
from polarquant_nb.files import (
    format_record,
    preconditioner_record,
    read_file,
    read_format,
    read_kind,
    read_preconditioner,
    reading,
    write_file,
)
from polarquant_nb.formats import FormatPair, integer
from polarquant_nb.layout import PAGE
from polarquant_nb.online import Fitting, OnlinePreconditioner
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.token_store import TokenStore

__all__ = ["from_plain", "load_cache", "save_cache", "to_plain"]

_HELD = "keys.preconditioner"
"""Names the arrays of a preconditioner that is not the settings' own."""

Arrays = Mapping[str, npt.NDArray[Any]]


def save_cache(path: str | os.PathLike[str], settings: Settings, state: CacheState | None) -> None:
    """Write a cache.

    Parameters
    ----------
    path : path-like
        File to write.
    settings : Settings
        Of the cache.
    state : CacheState, optional
        What it holds, if anything.
    """
    numbers, arrays = to_plain(state)
    online: dict[str, Any] | None = None
    record, own_arrays = preconditioner_record(None)
    if isinstance(settings.preconditioner, OnlinePreconditioner):
        online = {**vars(settings.preconditioner)}
        online["inv_freq"] = None if online["inv_freq"] is None else online["inv_freq"].tolist()
    else:
        record, own_arrays = preconditioner_record(settings.preconditioner)
    header = {
        "key_format": format_record(settings.formats.keys, settings.codebooks[0]),
        "value_format": format_record(settings.formats.values, settings.codebooks[1]),
        "sink": settings.sink,
        "recent": settings.recent,
        "nan": settings.nan,
        "preconditioner": record,
        "online": online,
        "numbers": numbers,
    }
    write_file(path, "cache", header, {**arrays, **own_arrays})


def load_cache(
    path: str | os.PathLike[str], expected: FormatPair | None
) -> tuple[Settings, CacheState | None]:
    """Read what :func:`save_cache` wrote.

    Parameters
    ----------
    path : path-like
        File to read.
    expected : FormatPair, optional
        The formats that it must have.

    Returns
    -------
    Settings, CacheState or None
        Of the cache.

    Raises
    ------
    ValueError
        If the file cannot be used; the message names it.
    """
    with reading(path, "cache"):
        header, arrays = read_file(path, "cache")
        keys, key_codebooks = read_format(header["key_format"])
        values, value_codebooks = read_format(header["value_format"])
        formats = FormatPair(keys, values)
        if expected not in (None, formats):
            raise ValueError(f"it has {formats}, not {expected}")
        preconditioner = read_preconditioner(header["preconditioner"], arrays)
        online = header["online"]
        settings = Settings(
            formats, (key_codebooks, value_codebooks), header["sink"], header["recent"],
            header["nan"], preconditioner if online is None else OnlinePreconditioner(**online),
        )  # fmt: skip
        return settings, from_plain(settings, header["numbers"], arrays)


def to_plain(state: CacheState | None) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """What a cache holds, for pickles and files.

    Parameters
    ----------
    state : CacheState, optional
        None gives nothing.

    Returns
    -------
    numbers : dict
        Can be written as JSON.
    arrays : dict of str to ndarray
        Contiguous; blocks that rows share are in it once.
    """
    if state is None:
        return {}, {}
    numbers: dict[str, Any] = {
        "kind": state.kind.record,
        "exact": list(state.exact),
        "packed": list(state.packed),
    }
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, store in (("keys", state.keys), ("values", state.values)):
        exact = store.memory.fetch(store.exact[:, :, : max(state.exact, default=0)])
        for row, held in zip(exact, state.exact, strict=True):
            row[:, held:] = 0  # what a crop has left there
        pages, index = store.table.to_arrays()
        arrays |= {f"{name}.exact": exact, f"{name}.pages": pages, f"{name}.index": index}
    preconditioner = state.keys.table.preconditioner
    if preconditioner is not state.settings.preconditioner:
        record, own_arrays = preconditioner_record(preconditioner, _HELD)
        numbers["preconditioner"] = record
        arrays |= own_arrays
    fitting = state.fitting
    if fitting is not None:
        numbers["fitting"] = {"counts": list(fitting.counts), "fixed": list(fitting.fixed)}
        arrays["fitting.q_squared"] = fitting.q_squared
    return numbers, arrays


def from_plain(
    settings: Settings, numbers: Mapping[str, Any], arrays: Arrays, device: Any = None
) -> CacheState | None:
    """What :func:`to_plain` was given.

    Parameters
    ----------
    settings : Settings
        Of the cache.
    numbers, arrays : mappings
        See :func:`to_plain`; they may come from a damaged file.
    device : torch.device, optional
        A GPU to put it on; the CPU by default.

    Returns
    -------
    CacheState or None
        A state that goes on as that one does.

    Raises
    ------
    ValueError
        If they contradict each other.
    """
    if not numbers:
        return None
    kind = read_kind(numbers["kind"])
    exact, packed = ([integer(name, n) for n in numbers[name]] for name in ("exact", "packed"))
    if device is not None:
        kind = ArrayKind("torch", kind.dtype, device)
    if len(exact) != len(packed):
        raise ValueError(f"it has {len(exact)} rows of exact tokens and {len(packed)} of packed")
    for e, p in zip(exact, packed, strict=True):
        if not (0 <= e <= settings.capacity and p >= 0 and (p == 0 or e >= settings.sink)):
            raise ValueError(f"it has a row of {e} exact tokens and {p} in pages")
    batch, num_kv_heads = len(exact), arrays["keys.exact"].shape[1]
    held, selected = None, settings
    if "preconditioner" in numbers:
        held = read_preconditioner(numbers["preconditioner"], arrays, _HELD)
        if isinstance(settings.preconditioner, Preconditioner):
            selected = replace(settings, preconditioner=held)
    state = CacheState.empty(selected, kind, batch, num_kv_heads)
    keys, fitting = state.keys, state.fitting
    if fitting is not None:
        keys, fitting = _with_fitting(keys, held, fitting, numbers["fitting"], arrays)
    stores = []
    for name, store in (("keys", keys), ("values", state.values)):
        tokens, pages, index = (arrays[f"{name}.{part}"] for part in ("exact", "pages", "index"))
        most, most_pages = max(exact, default=0), -(-max(packed, default=0) // PAGE)
        head_dim, page_words = store.exact.shape[3], store.table.format.layout.num_words
        for part, array, shape, dtype in (
            ("exact", tokens, (batch, num_kv_heads, most, head_dim), element_dtype(kind)),
            ("pages", pages, (len(pages), num_kv_heads, page_words), np.dtype(np.uint32)),
            ("index", index, (batch, most_pages), np.dtype(np.int64)),
        ):
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{name}.{part} is {array.dtype} of shape {array.shape}; it should be {dtype} "
                    f"of shape {shape}"
                )
        used = np.arange(index.shape[1]) < -(-np.array(packed)[:, None] // PAGE)
        if ((index < 0) == used).any() or (index >= len(pages)).any():
            raise ValueError(f"{name}.index does not fit {packed} tokens and {len(pages)} pages")
        table = store.table.with_arrays(pages, index, packed)
        stores.append(TokenStore(kind, store.memory.take(tokens, kind), table))
    return CacheState(settings, stores[0], stores[1], tuple(exact), fitting)


def _with_fitting(
    keys: TokenStore,
    fitted: Preconditioner | None,
    fitting: Fitting,
    numbers: Mapping[str, Any],
    arrays: Arrays,
) -> tuple[TokenStore, Fitting]:
    """What an OnlinePreconditioner has found out."""
    neutral = keys.table.preconditioner
    q_squared = arrays["fitting.q_squared"]
    counts, fixed = tuple(numbers["counts"]), tuple(numbers["fixed"])
    assert neutral is not None
    if (
        fitted is None
        or fitted.shape != neutral.shape
        or (fitted.scales is None, fitted.bias is None)
        != (neutral.scales is None, neutral.bias is None)
        or q_squared.shape != fitting.q_squared.shape
        or len(counts) != len(fitting.counts)
        or len(fixed) != len(counts)
    ):
        raise ValueError("what was fitted does not fit the cache")
    new = replace(fitting, q_squared=q_squared.copy(), counts=counts, fixed=fixed)
    return keys.with_preconditioner(fitted), new
