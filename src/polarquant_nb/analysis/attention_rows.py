"""What formats do to attention: its rows and outputs, of each layer and head."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.analysis.describing import described
from polarquant_nb.analysis.pieces import index_coords, run
from polarquant_nb.budgets import preset, presets
from polarquant_nb.calibration import Calibration, given_calibration
from polarquant_nb.formats import FormatPair, integer

if TYPE_CHECKING:
    import xarray as xr

    from polarquant_nb.preconditioning import Preconditioner

__all__ = ["attention_error"]

FloatArray = npt.NDArray[np.float64]
Formats = str | FormatPair | Calibration | os.PathLike[str]

_DIMS = {
    "query": ("layer", "head", "token", "coord"),
    "key": ("layer", "kv_head", "token", "coord"),
    "value": ("layer", "kv_head", "token"),  # and its own width
}


def attention_error(
    captured: xr.Dataset,
    formats: Mapping[str, Formats] | Sequence[str] | None = None,
    *,
    queries: int = 32,
    sink: int = 4,
    recent: int = 64,
) -> xr.Dataset:
    """Error of attention, of each layer and head, when keys and values are coded.

    The queries of the last tokens attend causally, in float64.  Each layer is by itself: its
    queries, and the keys and values before they are coded, are those of the exact model.

    Parameters
    ----------
    captured : xarray.Dataset
        What :func:`capture` gives, or the like of another decoder: ``query`` (layer, head, token,
        coord), ``key`` (layer, kv_head, token, coord) and ``value`` (layer, kv_head, token, any).
        Consecutive runs of heads share a kv head.  Logits are scaled by ``scale`` (layer), where it
        is there, else by ``head_dim ** -0.5``; a ``softcap`` (layer) above 0 is applied.  Layers
        are read one by one.
    formats : mapping of str to str, FormatPair, Calibration or path-like; or sequence of str
        Presets, pairs of formats, or calibrations of the model or their files, under the names that
        the result gives them; by default all presets.  Layers that a calibration leaves out stay
        exact.
    queries : int
        Last tokens whose queries are asked.
    sink, recent : int
        First and last tokens that stay exact.

    Returns
    -------
    xarray.Dataset
        By ``format``, ``layer`` and ``head``: ``error``, Σ‖ô − o‖² / Σ‖o‖² of the attention outputs
        (softmax(q·k)·v, before the output projection), and ``kl``, the mean KL (nats) of attention
        rows from the exact ones, which keys alone change.  By ``format`` and ``layer``:
        ``bits_per_value``, of what is coded; NaN where nothing is.

    Raises
    ------
    TypeError
        If a format is none of the above.
    ValueError
        If a variable or dimension is missing, numbers of heads or tokens do not fit, a number is
        not finite, or a preset is unknown.

    References
    ----------
    The attention sinks of gpt-oss, which take part of each row's weight, are left out.
    """
    import xarray as xr

    _check(captured)
    named = _open_formats(formats)
    sizes = captured.sizes
    tokens, heads, layers = sizes["token"], sizes["head"], sizes["layer"]
    counts = {"queries": queries, "sink": sink, "recent": recent}
    for name, count in counts.items():
        least = 1 if name == "queries" else 0
        if integer(name, count) < least:
            raise ValueError(f"{name} is {count}; it must be at least {least}")
    if queries > tokens or sink + recent >= tokens:
        raise ValueError(
            f"captured has {tokens} tokens; with sink={sink}, recent={recent} and "
            f"queries={queries} it must have more than {max(sink + recent, queries - 1)}"
        )
    indices = captured["layer"].values.tolist() if "layer" in captured.coords else range(layers)
    asked = captured["query"].isel(token=slice(tokens - queries, tokens))
    scale = _of_layers(captured, "scale", sizes["coord"] ** -0.5)
    softcap = _of_layers(captured, "softcap", 0.0)

    def of_layer(i: int, q: Any, k: Any, v: Any) -> FloatArray:
        attend = partial(_attend, scale=scale[i], softcap=softcap[i])
        pairs = [_of_layer(given, int(indices[i]), k, v) for given in named.values()]
        return _measured(q, k, v, pairs, slice(sink, tokens - recent), attend)

    arrays = asked, captured["key"], captured["value"]
    calls = ((partial(of_layer, i), *(x.isel(layer=i) for x in arrays)) for i in range(layers))
    measured = np.stack(list(run(calls)), 1)  # format, layer, head, number
    dims = ("format", "layer", "head")
    with np.errstate(invalid="ignore"):
        bits = measured[:, :, 0, 2] / measured[:, :, 0, 3]
    return xr.Dataset(
        {
            "error": described(
                dims, measured[..., 0], "relative squared error of attention outputs"
            ),
            "kl": described(dims, measured[..., 1], "KL of attention rows", "nat"),
            "bits_per_value": described(dims[:2], bits, "bits held per coded number", "bit"),
        },
        coords={
            **index_coords(captured, ("layer", "head")),
            "format": described("format", list(named), "formats of keys and values"),
            "kv_head": described(
                "head", np.arange(heads) // (heads // sizes["kv_head"]), "kv head of a head"
            ),
        },
        attrs=counts,
    )


def _measured(
    q: Any,
    k: Any,
    v: Any,
    pairs: Sequence[tuple[FormatPair, Preconditioner | None] | None],
    middle: slice,
    attend: Any,
) -> FloatArray:
    """Error, KL, coded bits and coded numbers, ``(formats, heads, 4)``, of one layer."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    if not all(np.isfinite(x).all() for x in (q, k, v)):
        raise ValueError("captured holds numbers that are not finite")
    groups = q.reshape(len(k), -1, *q.shape[1:])
    exact = [attend(*head) for head in zip(groups, k, v, strict=True)]
    result = np.zeros((len(pairs), len(q), 4))
    for i, pair in enumerate(pairs):
        if pair is None:
            continue
        coded_k, coded_v, bits = _coded(k, v, *pair, middle)
        numbers = k[:, middle].size + v[:, middle].size
        inexact = [attend(*head) for head in zip(groups, coded_k, coded_v, strict=True)]
        compared = [_compare(*a, *b) for a, b in zip(exact, inexact, strict=True)]
        result[i, :, :2] = np.concatenate(compared)
        result[i, :, 2:] = bits, numbers
    return result


def _attend(
    q: FloatArray, k: FloatArray, v: FloatArray, *, scale: float, softcap: float
) -> tuple[FloatArray, FloatArray]:
    """Log-weights ``(heads, queries, tokens)``, −inf where causality hides, and outputs."""
    logits = q @ k.T * scale
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    n, tokens = logits.shape[1:]
    logits = np.where(np.tri(n, tokens, tokens - n, dtype=bool), logits, -np.inf)
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return log_p, np.exp(log_p) @ v


def _compare(
    log_p: FloatArray, out: FloatArray, log_coded: FloatArray, coded_out: FloatArray
) -> FloatArray:
    """Error of outputs and KL of rows, ``(heads, 2)``."""
    seen = log_p > -np.inf  # of coded keys, too
    differences = np.subtract(log_p, log_coded, where=seen, out=np.zeros_like(log_p))
    kl = (np.exp(log_p) * differences).sum(-1).mean(-1)
    error = ((coded_out - out) ** 2).sum((1, 2)) / (out**2).sum((1, 2))
    return np.stack([error, kl], -1)


def _coded(
    k: FloatArray,
    v: FloatArray,
    pair: FormatPair,
    preconditioner: Preconditioner | None,
    middle: slice,
) -> tuple[FloatArray, FloatArray, int]:
    """Keys and values with their middle coded, and the bits that it takes."""
    from polarquant_nb.codec import encode

    k, v = k.copy(), v.copy()
    keys = encode(
        k[:, middle], pair.keys, preconditioner=preconditioner, first_position=middle.start
    )
    values = encode(v[:, middle], pair.values)
    k[:, middle], v[:, middle] = keys.decode(), values.decode()
    return k, v, 8 * (keys.nbytes + values.nbytes)


def _of_layer(
    given: Formats, layer: int, k: Any, v: Any
) -> tuple[FormatPair, Preconditioner | None] | None:
    """Formats and preconditioner of one layer; None if it stays exact."""
    if isinstance(given, Calibration):
        own = given[layer]
        return None if own is None else (own.formats, own.preconditioner)
    if isinstance(given, FormatPair):
        return given, None
    return preset(str(given), k.shape[-1], value_head_dim=v.shape[-1]), None


def _of_layers(captured: xr.Dataset, name: str, default: float) -> FloatArray:
    given = captured[name].to_numpy() if name in captured else default
    return np.broadcast_to(np.asarray(given, np.float64), captured.sizes["layer"])


def _open_formats(formats: Any) -> dict[str, Formats]:
    if formats is None:
        formats = presets()
    if isinstance(formats, (str, FormatPair)):
        raise TypeError(f"formats are {formats!r}; they must be a mapping or a sequence of presets")
    named = dict(formats) if isinstance(formats, Mapping) else {name: name for name in formats}
    if not named:
        raise ValueError("formats are none; there must be at least one")
    for name, given in named.items():
        calibration = given_calibration(given) if not isinstance(given, FormatPair) else None
        if calibration is not None:
            named[name] = calibration
        elif isinstance(given, str):
            preset(given)  # raises if it is unknown
        elif not isinstance(given, FormatPair):
            raise TypeError(
                f"formats[{name!r}] is {given!r}; it must be the name of a preset, a FormatPair, a "
                "Calibration or its path"
            )
    return named


def _check(captured: xr.Dataset) -> None:
    for name, dims in _DIMS.items():
        if name not in captured:
            raise ValueError(
                f"captured has no {name!r}; it needs {', '.join(_DIMS)}, as capture() gives them"
            )
        found = captured[name].dims
        if found[: len(dims)] != dims or len(found) != 4:
            raise ValueError(
                f"captured[{name!r}] has dimensions {found}; it must have {(*dims, 'coord')[:4]}"
            )
    heads, kv_heads = captured.sizes["head"], captured.sizes["kv_head"]
    if heads % kv_heads:
        raise ValueError(f"captured has {heads} heads, which {kv_heads} kv heads cannot share")
