"""What the machine code that is kept on disk was compiled from."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__all__ = ["source_digest"]

_DECISIVE = ("kernels/*.py", "codebooks.py", "densities.py", "layout.py", "packing.py", "radii.py")
"""Kernels, and the modules that tell them where codes are and what they stand for."""


@cache
def source_digest() -> str:
    """Changes when anything does that decides a kernel's code, on the CPU or a GPU.

    Numba's own cache on disk watches the file in which a kernel is, and neither the helpers that
    are inlined into it nor the layout of a page.

    Returns
    -------
    str
        32 hexadecimal digits.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for pattern in _DECISIVE:
        for path in sorted(package.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:32]
