"""Machine words, addresses and functions: what kernels are called with when Python is not there."""

from __future__ import annotations

import struct
from functools import cache
from itertools import count
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from polarquant_nb.kernels.jit import Program

__all__ = ["add_word", "ask", "call_shim", "load_word", "shim", "store_word", "words_of"]

WORD = ir.IntType(64)


def words_of(argument: Any) -> list[int]:
    """An argument of a kernel as Numba's calling convention has it.

    Parameters
    ----------
    argument : ndarray, int, float, Program or tuple
        Float64 for a float; arrays are named by their address, and have to be kept.

    Returns
    -------
    list of int
        Signed 64-bit words.
    """
    if isinstance(argument, tuple):
        return [word for part in argument for word in words_of(part)]
    if isinstance(argument, np.ndarray):
        # the first two are for counting references, which kernels do not outlive
        return [
            0, 0, argument.size, argument.itemsize, argument.ctypes.data, *argument.shape,
            *argument.strides,
        ]  # fmt: skip
    if isinstance(argument, float):
        return list(struct.unpack("q", struct.pack("d", argument)))
    if isinstance(argument, Program):
        return [0]
    return [int(argument)]


@cache
@global_compiler_lock
def shim(kinds: tuple[Any, ...], num_words: int) -> int:
    """A function that takes a kernel's arguments from memory.

    Parameters
    ----------
    kinds : tuple
        Numba's types of the arguments.
    num_words : int
        Words of all of them.

    Returns
    -------
    int
        Address of ``int32 shim(kernel, memory)``, which returns 0 if all went well.
    """
    context = cpu_target.target_context
    function_type = context.call_conv.get_function_type(types.none, kinds)
    result, error, *parameters = function_type.args
    if len(parameters) != num_words:
        raise AssertionError(f"{kinds} are {len(parameters)} words, not {num_words}")
    name = f"polarquant_shim_{next(_numbers)}"
    library = context.codegen().create_library(name)
    module = library.create_ir_module(name)
    function = ir.Function(module, ir.FunctionType(ir.IntType(32), [WORD, WORD]), name)
    builder = ir.IRBuilder(function.append_basic_block())
    # kernels return nothing, and of their errors the status is enough
    arguments = [builder.alloca(kind.pointee) for kind in (result, error)]
    memory = builder.inttoptr(function.args[1], WORD.as_pointer())
    for i, kind in enumerate(parameters):
        word = builder.load(builder.gep(memory, [ir.Constant(WORD, i)]))
        arguments.append(_cast(builder, word, kind))
    kernel = builder.inttoptr(function.args[0], function_type.as_pointer())
    builder.ret(builder.call(kernel, arguments))
    library.add_ir_module(module)
    library.finalize()
    _libraries.append(library)
    address: int = library.get_pointer_to_function(name)
    return address


_numbers = count()
_libraries: list[Any] = []
"""Kept, as code goes with its library."""


def _cast(builder: Any, word: Any, kind: Any) -> Any:
    if isinstance(kind, ir.PointerType):
        return builder.inttoptr(word, kind)
    if kind == ir.DoubleType():
        return builder.bitcast(word, kind)
    if kind != WORD:
        raise AssertionError(f"an argument is {kind}, which is no word")
    return word


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, WORD.as_pointer())


@intrinsic
def load_word(_typing: Any, address: Any) -> Any:
    """The word at an address; no access moves past it."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_pointer(builder, arguments[0]), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def store_word(_typing: Any, address: Any, word: Any) -> Any:
    """Set the word at an address; no access moves past it."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, word = arguments
        builder.store_atomic(word, _pointer(builder, address), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add_word(_typing: Any, address: Any, word: Any) -> Any:
    """Add to the word at an address at once; returns what it was."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, word = arguments
        return builder.atomic_rmw("add", _pointer(builder, address), word, "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def ask(_typing: Any, function: Any) -> Any:
    """Call ``int32 function()`` at an address."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.int32(types.int64), generate


@intrinsic
def call_shim(_typing: Any, function: Any, kernel: Any, memory: Any) -> Any:
    """Call a :func:`shim`."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [WORD, WORD])
        function, *rest = arguments
        return builder.call(builder.inttoptr(function, kind.as_pointer()), rest)

    return types.int32(types.int64, types.int64, types.int64), generate
