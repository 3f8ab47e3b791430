"""Where the package keeps files of its own from process to process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["cache_dir", "cuda_cache_dir"]


def cache_dir() -> Path:
    """Where converted models and machine code for GPUs are kept.

    Returns
    -------
    Path
        ``$POLARQUANT_CACHE`` if set; else ``polarquant-nb`` in the user's cache directory, which is
        ``$XDG_CACHE_HOME`` or ``~/.cache``, ``~/Library/Caches`` on macOS and ``%LOCALAPPDATA%`` on
        Windows.  It may not exist.
    """
    chosen = os.environ.get("POLARQUANT_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "polarquant-nb"


def cuda_cache_dir() -> Path | None:
    """Where the machine code of CUDA kernels is kept.

    Returns
    -------
    Path or None
        ``cuda`` in :func:`cache_dir`; None, for nowhere, if ``$POLARQUANT_CUDA_CACHE`` is 0.
    """
    return None if os.environ.get("POLARQUANT_CUDA_CACHE") == "0" else cache_dir() / "cuda"
