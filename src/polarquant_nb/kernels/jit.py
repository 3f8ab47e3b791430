"""Numba's flags, in one place, and the types that specialise kernels.

Kernels for codes must be bit-exact on every machine, so nothing here relaxes floating point:
``fastmath`` stays off, and LLVM neither contracts nor reorders.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import llvmlite.binding as llvm
import numpy as np
from numba import njit
from numba.core import config, types
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from polarquant_nb.kernels.sources import source_digest
from polarquant_nb.layout import PageLayout, plan_page

__all__ = [
    "ISA",
    "GroupProgram",
    "Program",
    "ProgramType",
    "bound",
    "cpu_isa",
    "inlined",
    "kernel",
    "machine_code",
]

ISA = Literal["avx512", "avx2", "portable"]


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """``njit`` without the GIL, cached on disk where a cache directory can be written."""
    if config.DISABLE_JIT:  # it is NumPy then, and would warn
        return np.errstate(all="ignore")(function)
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy"}
    try:
        dispatcher = njit(cache=True, **options)(function)
    except RuntimeError:  # no writable directory: compile once per process
        return njit(**options)(function)
    _name_cache_files_by_content(dispatcher)
    return dispatcher


def _name_cache_files_by_content(dispatcher: Any) -> None:
    """Make Numba's disk cache safe for processes that compile at the same time.

    Numba numbers its files, and an index tells which signature has which number.  Two processes
    that compile for different formats can take the same number; whoever reads the cache after that
    gets one format's code for the other, and silently wrong codes.  A name made of everything that
    decides the code cannot be taken twice, and needs no index.  Nor is it out of date: Numba knows
    the time of one file, and kernels are made of many.

    Without its files a kernel is compiled, so nothing that is wrong with them is an error.
    """
    disk = dispatcher._cache
    file, save_overload = disk._cache_file, disk.save_overload
    sources = source_digest()  # now: what is imported, not what an editor has written since

    def name(key: object) -> str:
        content = repr((file._version, sources, key)).encode()
        base = file._index_name.removesuffix(".nbi")
        return f"{base}.{hashlib.sha256(content).hexdigest()[:32]}.nbc"

    def load(key: object) -> object:
        try:
            return file._load_data(name(key))
        except Exception:  # not there, or damaged: pickle may raise anything
            return None

    def save(key: object, data: object) -> None:
        file._save_data(name(key), data)

    def save_where_possible(signature: object, data: object) -> None:
        with suppress(OSError):  # the disk is full, or the directory is no longer there
            save_overload(signature, data)

    file.load, file.save, disk.save_overload = load, save, save_where_possible


def bound(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """A kernel's compiled code for arguments of these types.

    Numba looks at the type of every argument at every call, which takes longer than a short kernel.
    What this returns must be called with arguments of the same types; arrays may be read-only or
    not.
    """
    if config.DISABLE_JIT:
        return function
    dispatcher: Any = function
    signature = _signature(dispatcher, arguments)
    dispatcher.compile(signature)
    entry: Callable[..., Any] = dispatcher.get_overload(signature)
    return entry


def machine_code(function: Callable[..., Any], *arguments: Any) -> tuple[int, tuple[Any, ...]]:
    """Where a kernel's machine code for arguments of these types is, and Numba's types of them."""
    dispatcher: Any = function
    signature = _signature(dispatcher, arguments)
    dispatcher.compile(signature)
    result = dispatcher.overloads[signature]
    return result.library.get_pointer_to_function(result.fndesc.llvm_func_name), signature


def _signature(dispatcher: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    kinds = [dispatcher.typeof_pyval(argument) for argument in arguments]
    return tuple(
        kind.copy(readonly=False) if isinstance(kind, types.Array) else kind for kind in kinds
    )


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """``njit`` for helpers that are compiled as part of the kernel that calls them."""
    return njit(inline="always", nogil=True, boundscheck=False, error_model="numpy")(function)


@cache
def cpu_isa() -> ISA:
    """The instruction set kernels are written for: what Numba compiles for on this machine.

    ``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` are respected.
    """
    if config.CPU_FEATURES is not None:
        features = set(config.CPU_FEATURES.split(","))
    elif config.CPU_NAME == "generic":
        features = set()
    else:
        features = {f"+{name}" for name, has in llvm.get_host_cpu_features().items() if has}
    if {"+avx512f", "+avx512vl", "+avx512dq", "+avx512bw"} <= features:
        return "avx512"
    return "avx2" if {"+avx2", "+fma"} <= features else "portable"


@dataclass(frozen=True)
class Program:
    """What the kernels of a format are specialised on; equal programs share compiled code.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.
    level_bits : tuple of int
        Bits of each level's codes.
    offset : {None, 'int8', 'float16'}
        Page offset.
    radius : {'float16', 'log8'}
        Radii.
    rotation : {'hadamard', 'haar', 'none'}
        Kind of rotation.
    fitted : bool
        Whether codebooks are fitted (thresholds read from memory) rather than analytic.
    isa : {'avx512', 'avx2', 'portable'}
        Instruction set.
    """

    head_dim: int
    level_bits: tuple[int, ...]
    offset: str | None
    radius: str
    rotation: str
    fitted: bool
    isa: ISA

    @property
    def lanes(self) -> int:
        """Tokens per vector register."""
        return 16 if self.isa == "avx512" else 8

    @property
    def layout(self) -> PageLayout:
        """Where the codes of a page are."""
        return plan_page(self.head_dim, self.level_bits, self.offset, self.radius)

    @property
    def num_groups(self) -> int:
        """Odd part of head_dim: groups that the rotation mixes densely."""
        return self.head_dim // (self.head_dim & -self.head_dim)

    def for_queries(self, group: int) -> GroupProgram:
        """The program of attention kernels for a format, and groups of so many queries."""
        return GroupProgram(**vars(self), group=group)


@dataclass(frozen=True)
class GroupProgram(Program):
    """What attention kernels are specialised on: a format and a number of queries.

    Parameters
    ----------
    group : int
        Queries that share the walk through a key's tree, and the rebuilding of a value.
    """

    group: int

    @property
    def folded(self) -> bool:
        """Whether level-1 tables cover half a circle, and bit 0 of a code is a sign."""
        return not self.fitted and self.level_bits[0] > self._register_bits

    @property
    def folded_twice(self) -> bool:
        """Whether they cover a quarter, and the highest bit is the sign of the sine."""
        return self.isa == "avx2" and self.folded and self.level_bits[0] > self._register_bits + 1

    @property
    def _register_bits(self) -> int:
        """Bits of a code whose table fits a register."""
        return 4 if self.isa == "avx512" else 3

    @property
    def pair_bits(self) -> int:
        """Bits of a level-1 code that index a table."""
        return self.level_bits[0] - self.folded - self.folded_twice

    @property
    def pair_entries(self) -> int:
        """Entries of one pair's table for one query."""
        return int(max(16, 1 << self.pair_bits))

    @property
    def by_table(self) -> bool:
        """Whether a pair's share of a score is looked up, in tables made for each query."""
        return self.isa == "avx512" and self.pair_bits <= 5


class ProgramType(types.Type):
    """Numba type of a program, which is known when a kernel is compiled."""

    def __init__(self, program: Program) -> None:
        self.program = program
        super().__init__(name=repr(program))


@typeof_impl.register(Program)
@typeof_impl.register(GroupProgram)
def _typeof_program(value: Program, _context: object) -> ProgramType:
    return _program_type(value)


@cache
def _program_type(program: Program) -> ProgramType:
    """One type a program: a kernel is typed at every call."""
    return ProgramType(program)


register_model(ProgramType)(models.OpaqueModel)


@unbox(ProgramType)
def _unbox_program(_type: ProgramType, _value: object, c: Any) -> NativeValue:
    return NativeValue(c.context.get_dummy_value())
