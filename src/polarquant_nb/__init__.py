"""Polar quantisation of key-value caches: about 4 bits a number, computed on where it lies.

Start with :func:`preset`, :func:`encode` and :func:`decode`.  Names are imported on first use, so
that importing the package compiles nothing and loads neither Numba nor torch.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polarquant_nb import analysis, evaluate, hf, plot
    from polarquant_nb.attend import attention
    from polarquant_nb.bias import RotaryBias
    from polarquant_nb.budgets import preset, presets
    from polarquant_nb.cache import KVCache
    from polarquant_nb.calibration import Calibration, LayerCalibration
    from polarquant_nb.codebooks import Codebooks
    from polarquant_nb.codec import decode, encode
    from polarquant_nb.formats import FormatPair, PolarFormat
    from polarquant_nb.online import OnlinePreconditioner
    from polarquant_nb.pages import PolarPages
    from polarquant_nb.preconditioning import Preconditioner
    from polarquant_nb.scales import key_scales
    from polarquant_nb.threads import get_num_threads, set_num_threads
    from polarquant_nb.warming import warmup

__all__ = [
    "Calibration",
    "Codebooks",
    "FormatPair",
    "KVCache",
    "LayerCalibration",
    "OnlinePreconditioner",
    "PolarFormat",
    "PolarPages",
    "Preconditioner",
    "RotaryBias",
    "analysis",
    "attention",
    "decode",
    "encode",
    "evaluate",
    "get_num_threads",
    "hf",
    "key_scales",
    "plot",
    "preset",
    "presets",
    "set_num_threads",
    "warmup",
]

_HOME = {
    "Calibration": "calibration",
    "Codebooks": "codebooks",
    "FormatPair": "formats",
    "KVCache": "cache",
    "LayerCalibration": "calibration",
    "OnlinePreconditioner": "online",
    "PolarFormat": "formats",
    "PolarPages": "pages",
    "Preconditioner": "preconditioning",
    "RotaryBias": "bias",
    "attention": "attend",
    "decode": "codec",
    "encode": "codec",
    "get_num_threads": "threads",
    "key_scales": "scales",
    "preset": "budgets",
    "presets": "budgets",
    "set_num_threads": "threads",
    "warmup": "warming",
}

try:
    __version__ = version("polarquant-nb")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(f"polarquant_nb.{_HOME[name]}"), name)
    elif name in ("analysis", "evaluate", "hf", "plot"):
        value = import_module(f"polarquant_nb.{name}")
    else:
        raise AttributeError(f"module 'polarquant_nb' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
