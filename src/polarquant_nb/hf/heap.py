"""Memory that a prefill leaves unused, given back to the system."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from itertools import count
from typing import Any

__all__ = ["give_back_at_times"]

_PARTS = 8
"""Layers' parts of a prompt after which memory is given back; whoever is next to use it has to wait
until the system has cleared it again, so that every part would make a prefill a fifth slower."""

_parts = count(1)


def give_back_at_times() -> None:
    """Return what is free to the system, at one call in eight, where malloc can (glibc).

    The temporaries of a prefill are large, aligned, and of several sizes.  glibc leaves holes among
    them that it finds no use for, and the process would grow with every layer.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None and next(_parts) % _PARTS == 0:
        trim(0)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform == "linux" else None
