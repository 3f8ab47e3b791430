"""Whether kernels can run on a GPU here, and if not, why and what to do about it."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

__all__ = ["check", "missing", "unusable"]

_INSTALL = "pip install 'polarquant-nb[cuda13]' (or [cuda12], for drivers older than r580)"
_TORCH = "install a build for CUDA, see https://pytorch.org/get-started"


def missing() -> str | None:
    """What of the software is missing, without importing numba.cuda or touching a GPU.

    Returns
    -------
    str or None
        A sentence that says what to install or change; None if nothing is missing.
    """
    if os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0"):
        return "NUMBA_ENABLE_CUDASIM is set, so that Numba simulates CUDA; unset it"
    if find_spec("torch") is None:
        return "torch, which allocates results, is not installed: pip install torch"
    torch, installed = _version("torch"), _version("numba-cuda")
    if torch and torch.endswith("+cpu"):
        return f"torch {torch} is built without CUDA: {_TORCH}"
    if installed is None:
        return f"numba-cuda is not installed: {_INSTALL}"
    if _release("numpy") >= (2, 5) and _release("numba-cuda") < (0, 31):
        return (
            f"numba-cuda {installed} does not work with NumPy {version('numpy')}: "
            "pip install 'numpy<2.5'"
        )
    for module, package in (("cuda.bindings", "cuda-bindings"), ("cuda.core", "cuda-core")):
        if not _exists(module):
            return f"{package} is not installed: {_INSTALL}"
    return None


@cache  # of what went well: looking at packages takes longer than a launch
def check() -> None:
    """Make sure that kernels can be compiled and launched.

    Raises
    ------
    ImportError
        If a package is missing, or another one is in its way; the message says what to do.
    RuntimeError
        If the driver is older than the CUDA that numba-cuda compiles with.
    """
    problem = missing() or _shadowed()
    if problem:
        raise ImportError(f"arrays on a GPU cannot be used: {problem}")
    problem = _old_driver()
    if problem:
        raise RuntimeError(f"arrays on a GPU cannot be used: {problem}")


def unusable() -> str | None:
    """Why there can be no arrays on a GPU, or kernels cannot run on them; imports torch.

    Returns
    -------
    str or None
        A sentence that says what to install or change; None if all is well.
    """
    problem = missing() or _shadowed()
    if problem:
        return problem
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: {_TORCH}"
    if not torch.cuda.is_available():
        return (
            "torch finds no NVIDIA GPU: there is none, CUDA_VISIBLE_DEVICES hides it, or its "
            f"driver is missing or too old for CUDA {torch.version.cuda}, which torch is built for"
        )
    return _old_driver()


def _old_driver() -> str | None:
    """Machine code of a later CUDA than the driver's may not load."""
    from cuda.bindings import driver

    try:
        _, number = driver.cuDriverGetVersion()
    except RuntimeError:
        return "there is no NVIDIA driver: libcuda cannot be loaded"
    supported, compiler = int(number) // 1000, _release("cuda-bindings")[0]
    if supported >= compiler:
        return None
    older = ", or pip install 'polarquant-nb[cuda12]'" if supported == 12 else ""
    return (
        f"the NVIDIA driver supports CUDA {supported}.{int(number) % 1000 // 10}, but numba-cuda "
        f"compiles with CUDA {compiler}: install a newer driver{older}"
    )


@cache
def _shadowed() -> str | None:
    """Numba has a CUDA target of its own, which numba-cuda replaces as Python starts."""
    from numba import cuda

    if getattr(cuda, "implementation", "Built-in") == "NVIDIA":
        return None
    return (
        f"Numba's built-in CUDA target was imported from {os.path.dirname(cuda.__file__)} instead "
        f"of numba-cuda: its _numba_cuda_redirector.pth is not in effect, as with python -S or -I; "
        f"reinstall it with {_INSTALL}"
    )


def _exists(module: str) -> bool:
    try:
        return module in sys.modules or find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _release(package: str) -> tuple[int, int]:
    major, minor, *_ = version(package).split(".")
    return int(major), int(minor)
