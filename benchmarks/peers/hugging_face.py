"""transformers' own QuantizedCache, with its two integer back ends.

It quantises the whole prefill when it first sees it: no sinks, no recent window.  What comes later
is exact until 128 tokens have gathered; then everything is decoded and quantised again.  Groups are
64 numbers of one token, for keys and values alike, as its documentation advises.
"""

from __future__ import annotations

import copy
from functools import partial
from importlib import import_module
from typing import Any

from polarquant_nb.evaluate import CompressedCache

PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}
MODULES = {"quanto": "optimum.quanto", "hqq": "hqq.core.quantize"}
AXES = {"quanto": 0, "hqq": 1}  # along which a group is 64 numbers of one token
GROUP = 64


def missing(backend: str) -> str:
    """Why a back end cannot be used; an empty text if it can."""
    package = PACKAGES[backend]
    try:
        import_module(MODULES[backend])
    except Exception as error:  # whatever keeps it from being imported
        reason = str(error).splitlines()[0]
        return f"{package} cannot be imported ({reason}): python -m pip install {package}"
    return ""


def compress(cache: Any, backend: str, bits: int) -> CompressedCache:
    """Feed an exact cache to a QuantizedCache, as a prefill would."""
    from transformers import PretrainedConfig, QuantizedCache

    axis = AXES[backend]
    quantised = QuantizedCache(
        backend,
        PretrainedConfig(num_hidden_layers=len(cache.layers)),
        nbits=bits,
        axis_key=axis,
        axis_value=axis,
        q_group_size=GROUP,
        residual_length=128,
    )
    nbytes = values = 0
    for i, layer in enumerate(cache.layers):
        quantised.update(layer.keys, layer.values, i)
        stored = quantised.layers[i]
        nbytes += _nbytes(stored._quantized_keys) + _nbytes(stored._quantized_values)
        values += layer.keys.numel() + layer.values.numel()
    return CompressedCache(partial(_copy, quantised), nbytes, values, 0)


def _nbytes(quantised: Any) -> int:
    """Packed codes, and 2 bytes for each step and zero point, whatever they are held in here."""
    if isinstance(quantised, tuple):  # HQQ
        packed, meta = quantised
        return packed.nbytes + 2 * (meta["scale"].numel() + meta["zero"].numel())
    return quantised._data._data.nbytes + 2 * (quantised._scale.numel() + quantised._shift.numel())


def _copy(cache: Any) -> Any:
    """Its tensors cannot be copied, but it never changes one in place."""
    shallow = copy.copy(cache)
    shallow.layers = [copy.copy(layer) for layer in cache.layers]
    return shallow
