"""Lane programs on a GPU: a thread is a lane.  The only module with instructions of its own.

A stage that the CPU runs on vectors of 8 or 16 tokens is, on a GPU, the code of one thread, which
holds one token: what ``L.load`` loads is the thread's own element.  So the arithmetic of
``polar.py`` serves both, operation for operation, and codes are equal bit for bit.

Additions and multiplications are written with their rounding (``add.rn``), as neither NVVM nor
ptxas may then contract them to a fused multiply-add; nothing flushes subnormal numbers.  Every
instruction has a twin in plain Python, :class:`SimulatedLanes`, for Numba's CUDA simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core import config

from polarquant_nb.kernels.array_lanes import ArrayLanes, Index, Mask, Vector
from polarquant_nb.kernels.written import WrittenFloat, WrittenUint

__all__ = ["ALIGNMENT", "SIMULATED", "ThreadLanes", "compiled_kernel", "device_stage"]

SIMULATED = bool(config.ENABLE_CUDASIM)
"""Whether kernels run in Numba's CUDA simulator (``NUMBA_ENABLE_CUDASIM=1``)."""

ALIGNMENT = None if SIMULATED else 16
"""Of shared arrays, bytes: vector loads need it, and the simulator takes no other than None."""

_F32, _I64, _I32, _I16, _I8 = ir.FloatType(), *(ir.IntType(n) for n in (64, 32, 16, 8))


def compiled_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for the simulator to launch, or the function itself for ``cuda_compile`` to compile.

    Parameters
    ----------
    function : callable
        Kernel in Numba's CUDA dialect.

    Returns
    -------
    callable
        What ``cuda_launch`` takes.
    """
    return cuda.jit(function) if SIMULATED else function


def device_stage(
    function: Callable[..., None], program: Any, stride: int, **constants: Any
) -> Callable[..., None]:
    """Make ``function(L, program, *arguments, **constants)`` callable from kernels.

    The kernel's call has the thread's lane in the place of L and program, then arrays and integers.

    Parameters
    ----------
    function : callable
        A lane program, or a stage made of one.
    program : Program
        Format.
    stride : int
        Elements from one vector of a tile to the next; ``L.n`` of the stage.
    **constants
        Further arguments that are known when the kernel is compiled.

    Returns
    -------
    callable
        For kernels.
    """
    body = getattr(function, "lane_program", function)
    if SIMULATED:

        def run(lane: int, *arguments: Any) -> None:
            with np.errstate(all="ignore"):
                plain = [_plain_argument(a) for a in arguments]
                body(SimulatedLanes(int(lane), stride), program, *plain, **constants)

        return run
    return _intrinsic(body, program, stride, constants)


def _intrinsic(
    body: Callable[..., None], program: Any, stride: int, constants: dict[str, Any]
) -> Any:
    import inspect

    from numba.cuda import types
    from numba.cuda.extending import intrinsic

    def write(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> ir.Value:
        values: list[Any] = []
        for kind, value in zip(signature.args, arguments, strict=True):
            if isinstance(kind, types.Array):
                values.append(context.make_array(kind)(context, builder, value).data)
            elif isinstance(kind, types.CPointer):
                values.append(value)
            else:
                to = types.float32 if isinstance(kind, types.Float) else types.int64
                values.append(context.cast(builder, value, kind, to))
        L = ThreadLanes(builder, values[0], stride)
        body(L, program, *(L.as_argument(value) for value in values[1:]), **constants)
        return context.get_dummy_value()

    def typed(_context: Any, *kinds: Any) -> Any:
        return types.void(*kinds), write

    # Numba matches calls by signature and takes no *arguments: show it the stage's own, in which
    # the typing context takes the place of L, and the lane that of the program.
    parameters = [p for p in inspect.signature(body).parameters.values() if p.name not in constants]
    parameters = [p.replace(kind=p.POSITIONAL_OR_KEYWORD) for p in parameters]
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__name__ = body.__name__
    return intrinsic(typed)


# ---- the simulator's twin ------------------------------------------------------------------------


def _plain_argument(argument: Any) -> Any:
    """NumPy's array inside of the simulator's; integers as Python's, floats as float32."""
    array = getattr(argument, "_ary", getattr(argument, "_item", argument))
    array = getattr(array, "_ary", array)
    if isinstance(array, float | np.floating):
        return np.float32(array)
    return array if isinstance(array, np.ndarray) else int(array)


class SimulatedLanes(ArrayLanes):
    """What one thread does, with NumPy's scalars; the methods of :class:`ThreadLanes`.

    What works on arrays and on scalars alike is that of ``ArrayLanes``.

    Parameters
    ----------
    lane : int
        The thread's place in its tile.
    n : int
        Elements from one vector of a tile to the next.
    """

    def __init__(self, lane: int, n: int) -> None:
        super().__init__(n)
        self.lane = self.own = lane

    def f(self, value: float) -> Vector:
        return np.float32(value)

    def u(self, value: int) -> Vector:
        return np.uint32(value)

    def load(self, array: Any, index: Index) -> Vector:
        return self.splat(array, index + self.lane)

    def store(self, array: Any, index: Index, value: Vector) -> None:
        if array.dtype == np.uint8:
            value = np.uint8(value & np.uint32(0xFF))
        array[index + self.lane] = value

    def splat(self, array: Any, index: Index) -> Vector:
        value = array[index]
        return np.uint32(value) if array.dtype == np.uint8 else value

    def splats(self, array: Any, index: Index, count: int) -> list[Vector]:
        return [array[index + k] for k in range(count)]

    def put(self, array: Any, index: Index, value: Vector) -> None:
        array[index] = value

    def smaller(self, a: Index, b: Index) -> Index:
        return min(a, b)

    def divided(self, a: Index, divisor: int) -> tuple[Index, Index]:
        return divmod(a, divisor)

    def when(self, a: Index, below: Index, body: Callable[[], None]) -> None:
        if a < below:
            body()

    def unless(self, a: Index, below: Index, body: Callable[[], None]) -> None:
        if a >= below:
            body()

    def when_equal(self, a: Index, b: int, body: Callable[[], None]) -> None:
        if a == b:
            body()

    def when_set(self, mask: Mask, body: Callable[[], None]) -> None:
        if mask:
            body()

    def choose(self, flag: Index, a: Vector, b: Vector) -> Vector:
        return a if flag else b

    def load_lanes(self, words: Any, word: Index, lane: Index, width: int) -> Vector:
        narrow = words.view(f"<u{width // 8}")
        return np.uint32(narrow[word * (32 // width) + lane + self.lane])

    def store_lanes(self, words: Any, word: Index, lane: Index, width: int, value: Vector) -> None:
        narrow = words.view(f"<u{width // 8}")
        narrow[word * (32 // width) + lane + self.lane] = value & np.uint32(2**width - 1)

    def where(self, mask: Mask, a: Vector, b: Vector) -> Vector:
        return a if mask else b

    def only(self, mask: Mask, value: int) -> Vector:
        return np.uint32(value if mask else 0)

    def divide(self, a: Vector, b: Vector) -> Vector:
        return a / b

    def exp2(self, a: Vector) -> Vector:
        return np.exp2(a)

    def log2(self, a: Vector) -> Vector:
        return np.log2(a)

    def widen_half(self, bits: Vector) -> Vector:
        return np.float32(np.uint16(bits).view(np.float16))

    def from_index(self, i: Index) -> Vector:
        return np.float32(i)

    def as_bits(self, i: Index) -> Vector:
        return np.uint32(i)

    def lookup(self, table: Any, index: Index, bits: int, code: Vector) -> Vector:
        return table[index + (int(code) & (2**bits - 1))]

    def barrier(self) -> None:
        from numba.cuda.simulator import kernel

        kernel._get_kernel_context().syncthreads()


# ---- a thread's instructions ---------------------------------------------------------------------


class _Float(WrittenFloat):
    """A float32 being written down."""

    def _rounded(self, name: str, *values: ir.Value) -> _Float:
        return self._new(self.lanes.call(f"llvm.nvvm.{name}.rn.f", _F32, *values))

    def __add__(self, other: _Float) -> _Float:
        return self._rounded("add", self.value, other.value)

    def __sub__(self, other: _Float) -> _Float:
        return self._rounded("add", self.value, self.lanes.negated(other.value))

    def __mul__(self, other: _Float) -> _Float:
        return self._rounded("mul", self.value, other.value)


class _Index:
    """An element index: a run-time value and a constant, which becomes part of instructions."""

    def __init__(self, builder: ir.IRBuilder, variable: ir.Value, constant: int = 0) -> None:
        self.b, self.variable, self.constant = builder, variable, constant

    @property
    def value(self) -> ir.Value:
        return self.b.add(self.variable, _I64(self.constant)) if self.constant else self.variable

    def __add__(self, other: _Index | int) -> _Index:
        if not isinstance(other, _Index):
            return _Index(self.b, self.variable, self.constant + int(other))
        variable = self.b.add(self.variable, other.variable)
        return _Index(self.b, variable, self.constant + other.constant)

    def __mul__(self, other: _Index | int) -> _Index:
        if isinstance(other, _Index):
            return _Index(self.b, self.b.mul(self.value, other.value))
        factor = int(other)
        return _Index(self.b, self.b.mul(self.variable, _I64(factor)), self.constant * factor)

    __radd__ = __add__
    __rmul__ = __mul__


class ThreadLanes:
    """One thread's instructions, written into a kernel that numba-cuda compiles.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where instructions go.
    lane : llvmlite.ir.Value
        The thread's place in its tile, int64; ``own`` is the same as an index.
    n : int
        Elements from one vector of a tile to the next.
    """

    def __init__(self, builder: ir.IRBuilder, lane: ir.Value, n: int) -> None:
        self.b, self.n = builder, n
        self.lane = self.own = _Index(builder, lane)

    def as_argument(self, value: ir.Value) -> Any:
        """An argument of a stage: arrays are pointers, integers indices."""
        if value.type == _F32:
            return _Float(self, value)
        return _Index(self.b, value) if value.type == _I64 else value

    def f(self, value: float) -> Vector:
        """Float constant."""
        return _Float(self, ir.Constant(_F32, float(np.float32(value))))

    def u(self, value: int) -> Vector:
        """Unsigned constant."""
        return WrittenUint(self, ir.Constant(_I32, value))

    def load(self, array: ir.Value, index: Index) -> Vector:
        """The thread's element of consecutive ones."""
        return self.splat(array, self.lane + index)

    def store(self, array: ir.Value, index: Index, value: Vector) -> None:
        """The thread's element of consecutive ones."""
        self.put(array, self.lane + index, value)

    def splat(self, array: ir.Value, index: Index) -> Vector:
        """The element at an index of the thread's own, which need not be the same for others."""
        value = self.b.load(self._address(array, index))
        if value.type == _I8:
            value = self.b.zext(value, _I32)
        return _Float(self, value) if value.type == _F32 else WrittenUint(self, value)

    def splats(self, array: ir.Value, index: Index, count: int) -> list[Vector]:
        """``count`` floats from an index that is a multiple of ``count``, in a 16-aligned array.

        Four are one load.
        """
        if count % 4:
            return [self.splat(array, index + k) for k in range(count)]
        values: list[Vector] = []
        for first in range(0, count, 4):
            quarter = ir.VectorType(_F32, 4).as_pointer()
            pointer = self.b.bitcast(self._address(array, index + first), quarter)
            loaded = self.b.load(pointer, align=16)
            values += [_Float(self, self.b.extract_element(loaded, _I32(k))) for k in range(4)]
        return values

    def put(self, array: ir.Value, index: Index, value: Vector) -> None:
        """The element at an index of the thread's own."""
        pointer = self._address(array, index)
        narrow = value.value
        if pointer.type.pointee == _I8:
            narrow = self.b.trunc(narrow, _I8)
        self.b.store(narrow, pointer)

    def index(self, array: ir.Value, i: Index) -> Index:
        """An element of an array of indices."""
        element = self.b.load(self._address(array, i))
        return _Index(self.b, element if element.type == _I64 else self.b.zext(element, _I64))

    def smaller(self, a: Index, b: Index) -> Index:
        """The smaller of two indices."""
        other = b.value if isinstance(b, _Index) else _I64(b)
        return _Index(self.b, self.b.select(self._below(a, b), a.value, other))

    def divided(self, a: Index, divisor: int) -> tuple[Index, Index]:
        """Quotient and remainder of an index below 2^31."""
        narrow, by = self.b.trunc(a.value, _I32), _I32(divisor)
        parts = self.b.udiv(narrow, by), self.b.urem(narrow, by)
        quotient, remainder = (_Index(self.b, self.b.zext(part, _I64)) for part in parts)
        return quotient, remainder

    def when(self, a: Index, below: Index, body: Callable[[], None]) -> None:
        """Do something if an index is below another, both not negative."""
        with self.b.if_then(self._below(a, below)):
            body()

    def unless(self, a: Index, below: Index, body: Callable[[], None]) -> None:
        """Do something if an index is not below another."""
        with self.b.if_then(self.b.not_(self._below(a, below))):
            body()

    def when_equal(self, a: Index, b: int, body: Callable[[], None]) -> None:
        """Do something if an index is a constant."""
        with self.b.if_then(self.b.icmp_signed("==", a.value, _I64(b))):
            body()

    def when_set(self, mask: Mask, body: Callable[[], None]) -> None:
        """Do something if the condition holds."""
        with self.b.if_then(mask.value):
            body()

    def choose(self, flag: Index, a: Vector, b: Vector) -> Vector:
        """``a`` if the flag is not zero, else ``b``."""
        truth = self.b.icmp_signed("!=", flag.value, _I64(0))
        return type(a)(self, self.b.select(truth, a.value, b.value))

    def load_lanes(self, words: ir.Value, word: Index, lane: Index, width: int) -> Vector:
        """Lane ``lane + self.lane`` of a page row of 32, 16 or 8 bits a lane, zero-extended."""
        pointer = self._row_address(words, word, lane, width)
        value = self.b.load(pointer, align=width // 8)
        return WrittenUint(self, value if width == 32 else self.b.zext(value, _I32))

    def store_lanes(
        self, words: ir.Value, word: Index, lane: Index, width: int, value: Vector
    ) -> None:
        """Inverse of :meth:`load_lanes`; higher bits are dropped."""
        pointer = self._row_address(words, word, lane, width)
        narrow = value.value if width == 32 else self.b.trunc(value.value, pointer.type.pointee)
        self.b.store(narrow, pointer, align=width // 8)

    def prefetch(self, *_: Any, write: bool = False) -> None:
        """Nothing: other warps compute while one waits for memory."""

    def as_uint(self, value: Vector) -> Vector:
        """Bits of a float."""
        return WrittenUint(self, self.b.bitcast(value.value, _I32))

    def as_float(self, value: Vector) -> Vector:
        """Float of its bits."""
        return _Float(self, self.b.bitcast(value.value, _F32))

    def where(self, mask: Mask, a: Vector, b: Vector) -> Vector:
        """``a`` where the mask is set, else ``b``."""
        return type(a)(self, self.b.select(mask.value, a.value, b.value))

    def only(self, mask: Mask, value: int) -> Vector:
        """Unsigned constant where the mask is set, else 0."""
        return self.where(mask, self.u(value), self.u(0))

    def sqrt(self, a: Vector) -> Vector:
        """Square root, correctly rounded."""
        return _Float(self, self.call("llvm.nvvm.sqrt.rn.f", _F32, a.value))

    def absolute(self, a: Vector) -> Vector:
        """Clear the sign."""
        return self.as_float(self.as_uint(a) & self.u(0x7FFFFFFF))

    def subtract(self, a: Vector, b: Vector) -> Vector:
        """``a − b``."""
        return a - b

    def divide(self, a: Vector, b: Vector) -> Vector:
        """``a / b``, correctly rounded."""
        return _Float(self, self.call("llvm.nvvm.div.rn.f", _F32, a.value, b.value))

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        """``a b + c``, rounded once."""
        return _Float(self, self.call("llvm.fma.f32", _F32, a.value, b.value, c.value))

    def exp2(self, a: Vector) -> Vector:
        """2^a within 2^-22; what is subnormal is 0."""
        return self._approximate("ex2.approx.ftz.f32", a)

    def log2(self, a: Vector) -> Vector:
        """Binary logarithm within 2^-22."""
        return self._approximate("lg2.approx.ftz.f32", a)

    def widen_half(self, bits: Vector) -> Vector:
        """Float of float16 bits."""
        half = self.b.bitcast(self.b.trunc(bits.value, _I16), ir.HalfType())
        return _Float(self, self.b.fpext(half, _F32))

    def from_index(self, i: Index) -> Vector:
        """Float of an index that float32 holds exactly."""
        return _Float(self, self.b.sitofp(self.b.trunc(i.value, _I32), _F32))

    def as_bits(self, i: Index) -> Vector:
        """The lower 32 bits of an index."""
        return WrittenUint(self, self.b.trunc(i.value, _I32))

    def lookup(self, table: ir.Value, index: Index, bits: int, code: Vector) -> Vector:
        """``table[index + code % 2**bits]``.

        In shared memory, tables of up to 32 entries lie in different banks: no two threads collide.
        """
        position = self.b.zext((code & self.u(2**bits - 1)).value, _I64)
        return _Float(self, self.b.load(self._address(table, _Index(self.b, position) + index)))

    def loop(
        self,
        count: Index,
        start: Sequence[Vector],
        body: Callable[[Index, list[Vector]], list[Vector]],
    ) -> list[Vector]:
        """``values = body(i, values)`` for i in range(count): a loop that stays a loop."""
        from numba.cuda import cgutils

        slots = [cgutils.alloca_once_value(self.b, value.value) for value in start]
        end = count.value if isinstance(count, _Index) else self._opaque(count)
        with cgutils.for_range(self.b, end, intp=_I64) as loop:
            values = [type(v)(self, self.b.load(s)) for v, s in zip(start, slots, strict=True)]
            for value, slot in zip(body(_Index(self.b, loop.index), values), slots, strict=True):
                self.b.store(value.value, slot)
        return [type(v)(self, self.b.load(s)) for v, s in zip(start, slots, strict=True)]

    def barrier(self) -> None:
        """Wait for the whole block, and see what it wrote."""
        self.call("llvm.nvvm.barrier0", ir.VoidType())

    def negated(self, value: ir.Value) -> ir.Value:
        """The same number with the other sign."""
        return self.b.fsub(ir.Constant(_F32, -0.0), value)

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        """A call of an LLVM intrinsic."""
        from numba.cuda import cgutils

        signature = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        return self.b.call(function, arguments)

    def _approximate(self, instruction: str, a: Vector) -> Vector:
        kind = ir.FunctionType(_F32, [_F32])
        text = f"{instruction} $0, $1;"
        return _Float(self, self.b.asm(kind, text, "=f,f", [a.value], side_effect=False))

    def _opaque(self, count: int) -> ir.Value:
        """A constant that NVVM does not know, lest it unrolls the loop and fills all registers."""
        kind = ir.FunctionType(_I64, [])
        return self.b.asm(kind, f"mov.u64 $0, {count};", "=l", [], side_effect=False)

    def _below(self, a: Index, b: Index) -> ir.Value:
        left, right = (i.value if isinstance(i, _Index) else _I64(i) for i in (a, b))
        return self.b.icmp_signed("<", left, right)

    def _address(self, array: ir.Value, index: Index) -> ir.Value:
        if not isinstance(index, _Index):
            return self.b.gep(array, [_I64(int(index))])
        start = self.b.gep(array, [index.variable])
        return self.b.gep(start, [_I64(index.constant)]) if index.constant else start

    def _row_address(self, words: ir.Value, word: Index, lane: Index, width: int) -> ir.Value:
        element = {32: _I32, 16: _I16, 8: _I8}[width]
        row = self.b.bitcast(self._address(words, word), element.as_pointer())
        return self._address(row, self.lane + lane)
