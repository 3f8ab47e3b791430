"""Machine code of CUDA kernels on disk: what one process has compiled, no other one has to.

A file holds a kernel.  Its name is a digest of everything that decides the code: so a file is never
out of date, and two processes can only write the same.  It begins with a digest of the rest: what
is damaged is compiled anew.  Where nothing can be written, every process compiles.
"""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from polarquant_nb.kernels.cuda_compile import KernelSpec, compile_cubin
from polarquant_nb.kernels.sources import source_digest
from polarquant_nb.outputs import write_atomically
from polarquant_nb.places import cuda_cache_dir

__all__ = ["MOST_BYTES", "kept_cubin"]

MOST_BYTES = 2**28
"""Size of the directory, some 2,500 kernels; what was not used for longest makes room."""

_DIGEST_BYTES = 32


def kept_cubin(spec: KernelSpec, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Machine code of a kernel, from disk if it is there, else compiled and kept there.

    Parameters
    ----------
    spec : KernelSpec
        Which.
    capability : tuple of two ints
        Compute capability, such as (9, 0).

    Returns
    -------
    cubin : bytes
        For the driver to load.
    name : str
        Of the kernel in it.
    """
    directory = cuda_cache_dir()
    if directory is None:
        return compile_cubin(spec, capability)
    path = directory / f"{_key(spec, capability)}.cubin"
    found = _read(path)
    if found is None:
        found = compile_cubin(spec, capability)
        with suppress(OSError):  # a full disk, a directory that is not ours: compile once a process
            _write(path, *found)
    return found


def _read(path: Path) -> tuple[bytes, str] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    with suppress(OSError):  # one that others may only read
        os.utime(path)
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(payload).digest() != digest:
        return None
    name, _, cubin = payload.partition(b"\n")
    return cubin, name.decode()


def _write(path: Path, cubin: bytes, name: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    payload = name.encode() + b"\n" + cubin
    write_atomically(path, lambda file: file.write(hashlib.sha256(payload).digest() + payload))
    _make_room(path.parent)


def _make_room(directory: Path) -> None:
    """Remove what was not used for longest, where there is too much."""
    files = []
    for path in directory.iterdir():
        with suppress(OSError):  # another process makes room, too
            files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            with suppress(OSError):
                path.unlink()


# ---- what decides the code -----------------------------------------------------------------------


def _key(spec: KernelSpec, capability: tuple[int, int]) -> str:
    parts = repr((spec, capability, source_digest(), _compilers()))
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@cache
def _compilers() -> tuple[Any, ...]:
    """Versions, the libraries that compile and link as they lie on disk, and what steers Numba."""
    from numba.core import config

    packages = ("numba", "llvmlite", "numba-cuda", "numpy", "cuda-core", "cuda-bindings")
    return (
        sys.version_info[:3],
        [(name, _version(name)) for name in packages],
        [_library(name) for name in ("nvvm", "nvJitLink")],
        _driver(),
        (config.OPT, config.CUDA_DEBUGINFO_DEFAULT),
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _library(name: str) -> tuple[str, int, int] | None:
    """A library of CUDA's, which need not come from a package with a version."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    try:
        path = load_nvidia_dynamic_lib(name).abs_path
    except DynamicLibNotFoundError:  # compiling tells
        return None
    if path is None:
        return None
    found = os.stat(path)
    return path, found.st_size, found.st_mtime_ns


def _driver() -> int | None:
    """Version of the driver, which links where nvJitLink cannot."""
    from cuda.bindings import driver

    try:
        _, number = driver.cuDriverGetVersion()
    except RuntimeError:  # there is none
        return None
    return int(number)
