"""What is compared: named functions from an exact cache to a compressed one, with its bytes."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from polarquant_nb.budgets import preset
from polarquant_nb.calibration import Calibration, given_calibration
from polarquant_nb.codec import encode
from polarquant_nb.formats import FormatPair
from polarquant_nb.preconditioning import Preconditioner

if TYPE_CHECKING:
    import torch

__all__ = [
    "EXACT",
    "CompressedCache",
    "Contender",
    "compress",
    "compress_with",
    "exact_nbytes",
    "fresh",
]

Code = Callable[[str, "torch.Tensor"], "tuple[torch.Tensor, int]"]
"""Codes ``'keys'`` or ``'values'``: returns them decoded, and the bytes that are stored."""

_EXACT_NBYTES = 2  # per number kept exact: models store keys and values in 16 bits


@dataclass(frozen=True)
class CompressedCache:
    """A cache after compression: what a model reads from it, and what it costs.

    Parameters
    ----------
    cache : transformers.Cache, or callable that returns a new one
        What the model reads.  Of ours a DynamicCache: sinks and recent tokens as they were, the
        others decoded from their pages.
    coded_nbytes : int
        Bytes of everything that is stored for the coded numbers, scales and the like included,
        measured from the buffers.  Of ours those of all pages; a last page that is partly empty
        counts whole.
    coded_values : int
        Numbers stored in codes.
    exact_values : int
        Numbers kept exact: sinks, recent tokens, and layers that are not compressed.
    encode_seconds : float
        Time spent in :func:`polarquant_nb.encode`; NaN where it was not measured.
    """

    cache: Any
    coded_nbytes: int
    coded_values: int
    exact_values: int
    encode_seconds: float = float("nan")

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache; numbers kept exact count 2 bytes each, as models store them."""
        return self.coded_nbytes + _EXACT_NBYTES * self.exact_values

    @property
    def ratio(self) -> float:
        """How many times larger the cache is in 16 bits."""
        return _EXACT_NBYTES * (self.coded_values + self.exact_values) / self.nbytes

    @property
    def bits_per_value(self) -> float:
        """Bits per number stored in codes, keys and values together; 16 if all are exact."""
        if not self.coded_values:
            return 8.0 * _EXACT_NBYTES
        return 8 * self.coded_nbytes / self.coded_values


@dataclass(frozen=True)
class Contender:
    """A way to compress a cache, under the name that tables give it.

    Parameters
    ----------
    name : str
        Unique among those compared.
    compress : callable
        Takes the exact transformers.DynamicCache, which it leaves as it is, and returns a
        :class:`CompressedCache`.
    family : str
        Contenders that differ only in their bits; figures join them.

    Examples
    --------
    >>> from functools import partial
    >>> ours = Contender("tiny, no sinks", partial(compress, formats="tiny", sink=0))
    """

    name: str
    compress: Callable[[Any], CompressedCache]
    family: str = "polarquant_nb"


def _keep(cache: Any) -> CompressedCache:
    return CompressedCache(cache, 0, 0, exact_nbytes(cache) // _EXACT_NBYTES)


EXACT = Contender("exact", _keep, "exact")
"""The exact cache itself, which everything is judged against."""


def compress(
    cache: Any,
    formats: FormatPair | str | Calibration | os.PathLike[str],
    *,
    sink: int = 4,
    recent: int = 64,
    seed: int | None = None,
) -> CompressedCache:
    """Encode a cache into pages and decode it again; the original is left as it is.

    Layers of full attention are compressed, layers with a sliding window stay exact, and so do
    those that a calibration leaves out.

    Parameters
    ----------
    cache : transformers.DynamicCache
        From :func:`prefill`; all rows of one length, without padding.
    formats : FormatPair, str, Calibration or path-like
        Formats, the name of a preset, or a calibration or its file (a string that ends in
        ``.json``).
    sink, recent : int
        First and last tokens that stay exact.
    seed : int, optional
        Of the rotation, instead of the formats' own.

    Returns
    -------
    CompressedCache
        The reconstructed cache, bytes and time.

    Raises
    ------
    ValueError
        If ``sink`` or ``recent`` is negative, they leave nothing to compress, the preset is
        unknown, a head_dim is not the format's, or the calibration is for another model.
    """
    seconds = 0.0
    calibration = given_calibration(formats)
    if calibration is not None and len(calibration) != len(cache.layers):
        raise ValueError(
            f"the calibration is for a model of {len(calibration)} layers, {calibration.model}; "
            f"the cache has {len(cache.layers)}"
        )

    def choose(index: int, layer: Any) -> Code | None:
        own = None if calibration is None else calibration[index]
        if own is not None:
            pair, preconditioner = own.formats, own.preconditioner
        elif calibration is not None:
            return None
        else:
            preconditioner = None
            widths = layer.keys.shape[-1], layer.values.shape[-1]
            pair = formats  # type: ignore[assignment]
            if isinstance(formats, str):
                pair = preset(formats, widths[0], value_head_dim=widths[1])
        return partial(code, pair, preconditioner)

    def code(
        pair: FormatPair, preconditioner: Preconditioner | None, name: str, x: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        nonlocal seconds
        is_keys = name == "keys"
        fmt = pair.keys if is_keys else pair.values
        if seed is not None:
            fmt = replace(fmt, seed=seed)
        start_time = time.perf_counter()
        pages = encode(
            x, fmt, preconditioner=preconditioner if is_keys else None, first_position=sink
        )
        seconds += time.perf_counter() - start_time
        return pages.decode(), pages.nbytes

    return replace(_replace(cache, choose, sink, recent, 1), encode_seconds=seconds)


def compress_with(
    cache: Any,
    code: Callable[[str, torch.Tensor], tuple[torch.Tensor, int]],
    *,
    sink: int = 4,
    recent: int = 64,
    multiple: int = 1,
) -> CompressedCache:
    """Pass a cache through any codec, as :func:`compress` does through ours.

    Parameters
    ----------
    cache : transformers.DynamicCache
        As in :func:`compress`.
    code : callable
        Takes ``'keys'`` or ``'values'`` and a layer's vectors, shape ``(batch, num_kv_heads, n,
        head_dim)``; returns them decoded and the bytes of all that is stored for them.
    sink, recent : int
        As in :func:`compress`.
    multiple : int
        The codec takes whole groups of so many tokens; what is over stays exact, beside the recent
        ones.

    Returns
    -------
    CompressedCache
        The reconstructed cache and bytes.

    Raises
    ------
    ValueError
        If ``sink`` or ``recent`` is negative, or they leave nothing to compress.
    """
    return _replace(cache, lambda *_: code, sink, recent, multiple)


def exact_nbytes(cache: Any) -> int:
    """Bytes of a cache's keys and values in 16 bits, whatever they are held in here.

    Parameters
    ----------
    cache : transformers.DynamicCache
        From :func:`prefill`.

    Returns
    -------
    int
        Bytes.
    """
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return _EXACT_NBYTES * sum(x.numel() for x in tensors if x is not None)


def fresh(cache: Any | Callable[[], Any]) -> Any:
    """A cache that may be changed.

    Parameters
    ----------
    cache : transformers.Cache, or callable that returns one
        Any cache.

    Returns
    -------
    transformers.Cache
        A copy, or what the callable returns.
    """
    return cache() if callable(cache) else copy.deepcopy(cache)


def _replace(
    cache: Any,
    choose: Callable[[int, Any], Code | None],
    sink: int,
    recent: int,
    multiple: int,
) -> CompressedCache:
    """Another cache, with the middle of layers of full attention coded, as is chosen for each."""
    from transformers.cache_utils import DynamicLayer

    if sink < 0 or recent < 0:
        raise ValueError(f"sink is {sink} and recent is {recent}; both must be at least 0")
    restored = copy.copy(cache)
    restored.layers = [copy.copy(layer) for layer in cache.layers]
    coded_nbytes = coded_values = 0
    for i, (exact, layer) in enumerate(zip(cache.layers, restored.layers, strict=True)):
        if type(layer) is not DynamicLayer or layer.keys is None:
            continue
        code = choose(i, exact)
        if code is None:
            continue
        tokens = layer.keys.shape[-2]
        stop = sink + (tokens - recent - sink) // multiple * multiple
        if stop <= sink:
            raise ValueError(
                f"the cache holds {tokens} tokens; with sink={sink} and recent={recent} it must "
                f"hold more than {sink + recent + multiple - 1}"
            )
        for name in ("keys", "values"):
            x = getattr(exact, name)
            middle = x[..., sink:stop, :]
            decoded, nbytes = code(name, middle)
            mixed = x.clone()
            mixed[..., sink:stop, :] = decoded
            setattr(layer, name, mixed)
            coded_nbytes += nbytes
            coded_values += middle.numel()
    if not coded_values:
        raise ValueError("the cache has no layer of full attention: there is nothing to compress")
    exact_values = exact_nbytes(cache) // _EXACT_NBYTES - coded_values
    return CompressedCache(restored, coded_nbytes, coded_values, exact_values)
