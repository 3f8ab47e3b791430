"""Kernels by what they are for, and their machine code: NVVM and nvJitLink, without a driver.

numba-cuda serves as a compiler only.  Arguments are bare pointers and numbers, so that a launch
need not look at types; a kernel is compiled once for what it depends on and a compute capability.
``python -m polarquant_nb.kernels.cuda_compile`` prints the registers and the shared memory of the
kernels of every preset, from ptxas.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from polarquant_nb.kernels.cuda_attention import make_attend, make_merge, make_rotate
from polarquant_nb.kernels.cuda_bias import make_bias
from polarquant_nb.kernels.cuda_codec import THREADS, make_decode, make_encode
from polarquant_nb.kernels.cuda_exact import EXACT_THREADS, make_exact
from polarquant_nb.kernels.jit import Program

__all__ = [
    "ARGUMENTS",
    "BARE",
    "KernelSpec",
    "Resources",
    "compile_cubin",
    "compile_ptx",
    "resources",
]

Capability = tuple[int, int]

# One letter an argument: pointers to *E*lements, *F*loats, *U*ints, *I*nt64, *C*ounts (int32);
# numbers i (int32), l (int64) and f (float32).
ARGUMENTS = {
    "encode": "EUIFUFFFCiiiilllli",
    "decode": "UIFUFFFEiiiiii",
    "rotate": "EFFUFFfiiiillll",
    "bias": "EFFFFfiiiiiiiillll",
    "attend": "FUIFUIFIFFFFiiiiifiiilllli",
    "merge": "FFFEFFUFFiiii",
    "exact": "EEEIFFEFiiiiffilll",
}

BARE = ("rotate", "bias", "merge", "exact")
"""Kernels that do not depend on the bits; see :func:`program_of`."""


@dataclass(frozen=True)
class KernelSpec:
    """What decides a kernel's code.

    Parameters
    ----------
    name : {'encode', 'decode', 'rotate', 'bias', 'attend', 'merge', 'exact'}
        Which kernel.
    program : Program
        Format; of the keys for 'attend' and 'exact'.
    element : {'float32', 'float16', 'bfloat16'}
        What vectors outside of pages are; 'attend' sees none.
    values : Program, optional
        Format of the values, for 'attend' and 'exact'.
    group : int
        Queries that share a walk, for 'bias', 'attend' and 'merge'.
    threads : int
        Threads of a block.
    """

    name: str
    program: Program
    element: str = "float32"
    values: Program | None = None
    group: int = 1
    threads: int = THREADS

    @property
    def launch_bounds(self) -> tuple[int, ...]:
        """Threads of a block, and how many blocks a multiprocessor has to hold at least.

        ptxas finds by itself what most kernels need.  Attention to a few queries, and encoders that
        make offsets, it squeezes too much, and spills, unless it is told that four blocks are
        enough: 128 registers a thread.  Columns of many coordinates and codes of 6 bits take more,
        and so does attention to long columns, or of 8 queries.  Of the 256 threads for exact
        tokens, two blocks are as many registers.
        """
        programs = (self.program,) if self.values is None else (self.program, self.values)
        is_long = max(program.head_dim for program in programs) > 128
        if self.name == "exact" or (self.name == "attend" and is_long):
            return self.threads, 2
        if self.name == "attend" and self.group <= 4:
            return self.threads, 4
        if self.name != "encode" or self.program.offset is None:
            return (self.threads,)
        return self.threads, 2 if is_long or max(self.program.level_bits) > 5 else 4

    def make(self) -> Callable[..., Any]:
        """The kernel: a function to compile, or the simulator's."""
        if self.name == "encode":
            return make_encode(self.program, self.element, self.threads)
        if self.name == "decode":
            return make_decode(self.program, self.element, self.threads)
        if self.name == "rotate":
            return make_rotate(self.program, self.element, self.threads)
        if self.name == "bias":
            return make_bias(self.program, self.element, self.group, self.threads)
        if self.name == "merge":
            return make_merge(self.program, self.element, self.group, self.threads)
        assert self.values is not None
        if self.name == "exact":
            return make_exact(self.program, self.values, self.element, self.threads)
        return make_attend(self.program, self.values, self.group, self.threads)


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers of a thread; bytes of shared memory, stack, spills."""

    registers: int
    shared: int
    stack: int
    spills: int


def compile_ptx(spec: KernelSpec, capability: Capability) -> str:
    """PTX of a kernel.

    Parameters
    ----------
    spec : KernelSpec
        Which.
    capability : tuple of two ints
        Compute capability, such as (9, 0).

    Returns
    -------
    str
        PTX.
    """
    from numba import cuda

    ptx: str
    ptx, _ = cuda.compile(
        spec.make(), _signature(spec), cc=capability, device=False, abi="numba",
        output="ptx", launch_bounds=spec.launch_bounds,
    )  # fmt: skip
    return ptx


def _signature(spec: KernelSpec) -> Any:
    from numba.cuda import types

    element = types.float32 if spec.element == "float32" else types.uint16
    pointers = {
        "E": element, "F": types.float32, "U": types.uint32, "I": types.int64, "C": types.int32,
    }  # fmt: skip
    numbers = {"i": types.int32, "l": types.int64, "f": types.float32}
    return types.void(
        *(
            numbers[letter] if letter in numbers else types.CPointer(pointers[letter])
            for letter in ARGUMENTS[spec.name]
        )
    )


def compile_cubin(spec: KernelSpec, capability: Capability) -> tuple[bytes, str]:
    """Machine code of a kernel.

    Parameters
    ----------
    spec, capability
        See :func:`compile_ptx`.

    Returns
    -------
    cubin : bytes
        For the driver to load.
    name : str
        Of the kernel in it.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    ptx = compile_ptx(spec, capability)
    options = LinkerOptions(arch="sm_{}{}".format(*capability))
    linker = Linker(ObjectCode.from_ptx(ptx.encode(), name="polarquant"), options=options)
    cubin = bytes(linker.link("cubin").code)
    return cubin, entry_name(ptx)


def entry_name(ptx: str) -> str:
    """Name of the one kernel in PTX."""
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    return str(name)


# ---- what ptxas says -----------------------------------------------------------------------------


@cache
def find_ptxas() -> str | None:
    """The ptxas of the same packages as NVVM: an older one refuses its PTX."""
    for root in map(Path, sys.path):
        for place in ("nvidia/cu13/bin/ptxas", "nvidia/cuda_nvcc/bin/ptxas"):
            if (root / place).exists():
                return str(root / place)
    return shutil.which("ptxas")


def resources(ptx: str, capability: Capability) -> Resources:
    """Compile PTX by ptxas and read its report.

    Parameters
    ----------
    ptx : str
        From :func:`compile_ptx`.
    capability : tuple of two ints
        Compute capability.

    Returns
    -------
    Resources
        Of the one kernel.

    Raises
    ------
    RuntimeError
        If there is no ptxas, or it fails.
    """
    program = find_ptxas()
    if program is None:
        raise RuntimeError("ptxas is missing: pip install 'cuda-toolkit[nvcc]==13.*'")
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory, "kernel.ptx")
        source.write_text(ptx)
        arch = "sm_{}{}".format(*capability)
        command = [program, "-v", f"-arch={arch}", str(source), "-o", f"{directory}/kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = done.stderr
    if done.returncode:
        raise RuntimeError(f"ptxas failed: {report}")

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared=number(r"(\d+) bytes smem"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
    )


def preset_kernels(
    head_dim: int = 128, groups: Sequence[int] = (1, 4)
) -> Iterator[tuple[str, Any]]:
    """The kernels of all presets, each once, with a name: encoders and decoders of bfloat16 too.

    Parameters
    ----------
    head_dim : int
        Of keys and values.
    groups : sequence of int
        Queries that share a walk.

    Yields
    ------
    str, KernelSpec
        Name and kernel.
    """
    from polarquant_nb.budgets import preset, presets

    seen = set()
    for name in presets():
        pair = preset(name, head_dim)
        keys, values = (program_of(fmt) for fmt in (pair.keys, pair.values))
        specs = [
            *(
                KernelSpec(kind, p, "bfloat16")
                for kind in ("encode", "decode")
                for p in (keys, values)
            ),
            KernelSpec("rotate", keys, "bfloat16"),
            *(KernelSpec("bias", keys, "bfloat16", group=g) for g in groups),
            KernelSpec("exact", keys, "bfloat16", values, threads=EXACT_THREADS),
            *(KernelSpec("attend", keys, values=values, group=g) for g in groups),
            *(KernelSpec("merge", values, "bfloat16", group=g) for g in groups),
        ]
        for spec in specs:
            if spec.name in BARE:
                bare = program_of(pair.values, bare=True)
                spec = replace(spec, program=bare, values=spec.values and bare)
            if spec not in seen:
                seen.add(spec)
                yield _title(spec, name), spec


def program_of(fmt: Any, analytic: bool = True, *, bare: bool = False) -> Program:
    """The program of a format on GPUs, where the CPU's instruction set does not count.

    Parameters
    ----------
    fmt : PolarFormat
        Format.
    analytic : bool
        Whether the codebooks are.
    bare : bool
        For the kernels of ``BARE``: without what does not matter to them.

    Returns
    -------
    Program
        Equal for equal code.
    """
    bits, offset, radius = fmt.level_bits, fmt.offset, fmt.radius
    if bare:
        bits, offset, radius, analytic = (1,), None, "float16", True
    return Program(fmt.head_dim, bits, offset, radius, fmt.rotation, not analytic, "portable")


def _title(spec: KernelSpec, name: str) -> str:
    bits = ",".join(map(str, spec.program.level_bits))
    if spec.name in BARE:
        return f"{spec.name}{f', group {spec.group}' if spec.name in ('bias', 'merge') else ''}"
    if spec.name == "attend":
        return f"attend {name}, group {spec.group}"
    return f"{spec.name} {bits}{' with offset' if spec.program.offset else ''}"


def main() -> None:
    """Print a table for the documentation: registers and shared memory by compute capability."""
    capabilities = ((8, 0), (8, 6), (8, 9), (9, 0))
    print("| kernel |", " | ".join("registers, sm_{}{}".format(*c) for c in capabilities),
          "| shared, bytes |")  # fmt: skip
    print("|---" * (len(capabilities) + 2) + "|")
    for title, spec in preset_kernels(groups=(1, 2, 3, 4, 8)):
        found = [resources(compile_ptx(spec, c), c) for c in capabilities]
        registers = " | ".join(str(r.registers) + "*" * (r.spills > 0) for r in found)
        print(f"| {title} | {registers} | {max(r.shared for r in found)} |", flush=True)


if __name__ == "__main__":
    main()
