"""Lanes as LLVM vectors: instructions written into a kernel that Numba compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from polarquant_nb.kernels.array_lanes import Index, Mask, Vector
from polarquant_nb.kernels.jit import Program
from polarquant_nb.kernels.written import WrittenFloat, WrittenUint

__all__ = ["RegisterLanes"]


class _Float(WrittenFloat):
    """A float32 vector being written down."""

    def __add__(self, other: _Float) -> _Float:
        return self._new(self.lanes.b.fadd(self.value, other.value))

    def __sub__(self, other: _Float) -> _Float:
        return self._new(self.lanes.b.fsub(self.value, other.value))

    def __mul__(self, other: _Float) -> _Float:
        return self._new(self.lanes.b.fmul(self.value, other.value))


class _Index:
    """An element index: integer arithmetic on run-time values."""

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.b, self.value = builder, value

    def _lift(self, other: _Index | int) -> ir.Value:
        return other.value if isinstance(other, _Index) else ir.Constant(self.value.type, other)

    def __add__(self, other: _Index | int) -> _Index:
        return _Index(self.b, self.b.add(self.value, self._lift(other)))

    def __mul__(self, other: _Index | int) -> _Index:
        return _Index(self.b, self.b.mul(self.value, self._lift(other)))

    def __floordiv__(self, power_of_two: int) -> _Index:
        shift = power_of_two.bit_length() - 1
        return _Index(self.b, self.b.lshr(self.value, ir.Constant(self.value.type, shift)))

    def __mod__(self, power_of_two: int) -> _Index:
        mask = ir.Constant(self.value.type, power_of_two - 1)
        return _Index(self.b, self.b.and_(self.value, mask))

    __radd__ = __add__
    __rmul__ = __mul__


_F32, _I64, _I32, _I16, _I8 = ir.FloatType(), *(ir.IntType(n) for n in (64, 32, 16, 8))


class RegisterLanes:
    """Lanes as LLVM vectors; same methods as ``ArrayLanes``.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where instructions go.
    program : Program
        Its instruction set decides the number of lanes and how tables are looked up.
    """

    def __init__(self, builder: ir.IRBuilder, program: Program) -> None:
        self.b, self.isa, self.n = builder, program.isa, program.lanes
        self.float_type = ir.VectorType(_F32, self.n)
        self.uint_type = ir.VectorType(_I32, self.n)
        self._opaque_constants: dict[str, Vector] = {}

    def as_index(self, value: ir.Value) -> Index:
        """An integer argument of a stage, for arithmetic with indices."""
        return _Index(self.b, value)

    def f(self, value: float) -> Vector:
        """Float constant in every lane."""
        return _Float(self, ir.Constant(self.float_type, [float(np.float32(value))] * self.n))

    def u(self, value: int) -> Vector:
        """Unsigned constant in every lane."""
        return WrittenUint(self, ir.Constant(self.uint_type, [value] * self.n))

    def load(self, array: ir.Value, index: Index) -> Vector:
        """Lanes from consecutive elements."""
        is_float = array.type.pointee == _F32
        pointer = self._address(array, index, self.float_type if is_float else self.uint_type)
        value = self.b.load(pointer, align=4)
        return _Float(self, value) if is_float else WrittenUint(self, value)

    def store(self, array: ir.Value, index: Index, value: Vector) -> None:
        """Lanes to consecutive elements."""
        self.b.store(value.value, self._address(array, index, value.value.type), align=4)

    def splat(self, array: ir.Value, index: Index) -> Vector:
        """One element in every lane."""
        scalar = self.b.load(self._address(array, index, array.type.pointee), align=4)
        value = self._broadcast(scalar)
        return _Float(self, value) if scalar.type == _F32 else WrittenUint(self, value)

    def index(self, array: ir.Value, i: Index) -> Index:
        """An element of an array of indices."""
        kind = array.type.pointee
        element = self.b.load(self._address(array, i, kind), align=4)
        return _Index(self.b, element if kind == _I64 else self.b.zext(element, _I64))

    def gather(self, array: ir.Value, indices: ir.Value, i: Index) -> Vector:
        """Lanes from the elements at ``indices[i ..]``."""
        value = ir.Constant(self.float_type, ir.Undefined)
        for k in range(self.n):
            element = self._address(array, self.index(indices, i + k), _F32)
            value = self.b.insert_element(value, self.b.load(element, align=4), _I32(k))
        return _Float(self, value)

    def load_columns(self, rows: ir.Value, index: Index, stride: Index) -> list[Vector]:
        """16 columns of ``n`` rows that start ``stride`` apart."""
        columns = []
        quarter = ir.VectorType(_F32, 4)
        starts = [index + stride * k for k in range(self.n)]
        for first in range(0, 16, 4):
            # rows i, i+4, …: four coordinates of each, side by side
            vectors = []
            for i in range(4):
                parts = [
                    self.b.load(self._address(rows, start + first, quarter), align=4)
                    for start in starts[i::4]
                ]
                while len(parts) > 1:
                    pattern = range(2 * parts[0].type.count)
                    parts = [
                        self._shuffle(a, b, pattern)
                        for a, b in zip(parts[::2], parts[1::2], strict=True)
                    ]
                vectors.append(parts[0])
            columns += self._transpose_corners(vectors)
        return [_Float(self, column) for column in columns]

    def store_columns(
        self, rows: ir.Value, index: Index, stride: Index, columns: Sequence[Vector]
    ) -> None:
        """Inverse of :meth:`load_columns`."""
        for first in range(0, 16, self.n):
            square = self._transpose([c.value for c in columns[first : first + self.n]])
            for k, row in enumerate(square):
                self.store(rows, index + (stride * k + first), _Float(self, row))

    def load_lanes(self, words: ir.Value, word: Index, lane: Index, width: int) -> Vector:
        """Lanes ``lane ..`` of a page row of 32, 16 or 8 bits a lane, zero-extended."""
        pointer, _ = self._row_address(words, word, lane, width)
        value = self.b.load(pointer, align=width // 8)
        return WrittenUint(self, value if width == 32 else self.b.zext(value, self.uint_type))

    def store_lanes(
        self, words: ir.Value, word: Index, lane: Index, width: int, value: Vector
    ) -> None:
        """Inverse of :meth:`load_lanes`; higher bits are dropped."""
        pointer, narrow = self._row_address(words, word, lane, width)
        lanes = value.value if width == 32 else self.b.trunc(value.value, narrow)
        self.b.store(lanes, pointer, align=width // 8)

    def prefetch(
        self, words: ir.Value, word: Index, lane: Index, width: int, *, write: bool = False
    ) -> None:
        """Hint that the cache line of a row's lane, which need not exist, is used soon."""
        pointer = self.b.bitcast(self._row_address(words, word, lane, width)[0], _I8.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0")
        into_l2, data = _I32(2), _I32(1)
        self.b.call(function, [pointer, _I32(int(write)), into_l2, data])

    def as_uint(self, value: Vector) -> Vector:
        """Bits of a float."""
        return WrittenUint(self, self.b.bitcast(value.value, self.uint_type))

    def as_float(self, value: Vector) -> Vector:
        """Float of its bits."""
        return _Float(self, self.b.bitcast(value.value, self.float_type))

    def where(self, mask: Mask, a: Vector, b: Vector) -> Vector:
        """``a`` where the mask is set, else ``b``."""
        return type(a)(self, self.b.select(mask.value, a.value, b.value))

    def only(self, mask: Mask, value: int) -> Vector:
        """Unsigned constant where the mask is set, else 0."""
        zero = self.u(0)
        if self.isa == "avx512":  # one masked move, where LLVM would make a mask and shift it
            zero = self._opaque(zero)
        return self.where(mask, self.u(value), zero)

    def butterfly(self, a: Vector, stride: int) -> Vector:
        """Within a vector: lanes (i, i + stride) become (a_i + a_j, a_i − a_j)."""
        lanes = range(self.n)
        partner = _Float(self, self._shuffle(a.value, a.value, [i ^ stride for i in lanes]))
        added, taken = (a + partner).value, (partner - a).value
        pattern = [self.n + i if i & stride else i for i in lanes]
        return _Float(self, self._shuffle(added, taken, pattern))

    def total(self, a: Vector) -> Vector:
        """Sum of all lanes, in every lane; in any order."""
        kind = ir.FunctionType(_F32, [_F32, self.float_type])
        name = f"llvm.vector.reduce.fadd.v{self.n}f32"
        function = cgutils.get_or_insert_function(self.b.module, kind, name)
        zero = ir.Constant(_F32, 0.0)
        scalar = self.b.call(function, [zero, a.value], fastmath=("reassoc",))
        return _Float(self, self._broadcast(scalar))

    def sqrt(self, a: Vector) -> Vector:
        """Square root, correctly rounded."""
        return _Float(self, self._call(f"llvm.sqrt.v{self.n}f32", self.float_type, a.value))

    def absolute(self, a: Vector) -> Vector:
        """Clear the sign."""
        return _Float(self, self._call(f"llvm.fabs.v{self.n}f32", self.float_type, a.value))

    def subtract(self, a: Vector, b: Vector) -> Vector:
        """``a − b``, on a unit that additions leave idle where there is one.

        x86 adds and multiplies in separate units, and butterflies are all additions.  The fused
        (−1) b + a is the same number, rounded once; LLVM must not learn that the factor is −1.
        """
        if self.isa == "portable":
            return a - b
        return self.fma(self._opaque(self.f(-1.0)), b, a)

    def fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        """``a b + c``, rounded once or twice: fused where the CPU has the instruction."""
        if self.isa == "portable":
            return a * b + c
        name = f"llvm.fma.v{self.n}f32"
        return _Float(self, self._call(name, self.float_type, a.value, b.value, c.value))

    def lookup(self, table: ir.Value, index: Index, bits: int, code: Vector) -> Vector:
        """``table[index + code % 2**bits]``; the table has at least 16 entries."""
        if self.isa == "portable":
            return self._lookup_in_memory(table, index, bits, code)
        native = {"avx512": 5, "avx2": 3}[self.isa]
        if bits > native:  # two halves, and the highest bit chooses
            half = 1 << (bits - 1)
            low_half = self.lookup(table, index, bits - 1, code)
            high_half = self.lookup(table, index + half, bits - 1, code)
            if self.isa == "avx2":  # looks at the sign only
                name, sign = "llvm.x86.avx.blendv.ps.256", self.as_float(code << self.u(32 - bits))
                halves = low_half.value, high_half.value
                return _Float(self, self._call(name, self.float_type, *halves, sign.value))
            high = (code & self.u(half)) >= self.u(half)
            return self.where(high, high_half, low_half)
        low = self.load(table, index).value
        if self.isa == "avx2":
            name = "llvm.x86.avx2.permps"
            return _Float(self, self._call(name, self.float_type, low, code.value))
        if bits <= 4:
            name = "llvm.x86.avx512.permvar.sf.512"
            return _Float(self, self._call(name, self.float_type, low, code.value))
        name, high = "llvm.x86.avx512.vpermi2var.ps.512", self.load(table, index + 16).value
        return _Float(self, self._call(name, self.float_type, low, code.value, high))

    def loop(
        self,
        count: Index,
        start: Sequence[Vector],
        body: Callable[[Index, list[Vector]], list[Vector]],
    ) -> list[Vector]:
        """``values = body(i, values)`` for i in range(count): a loop that stays a loop."""
        slots = [cgutils.alloca_once_value(self.b, value.value) for value in start]
        end = count.value if isinstance(count, _Index) else _I64(count)
        with cgutils.for_range(self.b, end, intp=_I64) as loop:
            values = [type(v)(self, self.b.load(s)) for v, s in zip(start, slots, strict=True)]
            for value, slot in zip(body(_Index(self.b, loop.index), values), slots, strict=True):
                self.b.store(value.value, slot)
        return [type(v)(self, self.b.load(s)) for v, s in zip(start, slots, strict=True)]

    def _opaque(self, constant: Vector) -> Vector:
        """The same value, of which LLVM knows nothing: an empty instruction stands in between."""
        key = str(constant.value)
        if key not in self._opaque_constants:
            kind = ir.FunctionType(constant.value.type, [constant.value.type])
            value = self.b.asm(kind, "", "=v,0", [constant.value], side_effect=False)
            self._opaque_constants[key] = type(constant)(self, value)
        return self._opaque_constants[key]

    def _address(self, array: ir.Value, index: Index, target: ir.Type) -> ir.Value:
        position = index.value if isinstance(index, _Index) else _I64(index)
        return self.b.bitcast(self.b.gep(array, [position]), target.as_pointer())

    def _row_address(
        self, words: ir.Value, word: Index, lane: Index, width: int
    ) -> tuple[ir.Value, ir.Type]:
        element = {32: _I32, 16: _I16, 8: _I8}[width]
        row = self._address(words, word, element)
        narrow = ir.VectorType(element, self.n)
        return self._address(row, lane, narrow), narrow

    def _call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        signature = ir.FunctionType(result, [a.type for a in arguments])
        function = cgutils.get_or_insert_function(self.b.module, signature, name)
        return self.b.call(function, arguments)

    def _broadcast(self, scalar: ir.Value) -> ir.Value:
        undefined = ir.Constant(ir.VectorType(scalar.type, self.n), ir.Undefined)
        first = self.b.insert_element(undefined, scalar, _I32(0))
        return self._shuffle(first, undefined, [0] * self.n)

    def _shuffle(self, a: ir.Value, b: ir.Value, pattern: Sequence[int]) -> ir.Value:
        indices = ir.Constant(ir.VectorType(_I32, len(pattern)), list(pattern))
        return self.b.shuffle_vector(a, b, indices)

    def _transpose(self, rows: list[ir.Value]) -> list[ir.Value]:
        """Transpose a square: 4 × 4 corners within 128-bit quarters, then the quarters.

        One instruction a step on x86 (unpck, then a shuffle of quarters).
        """
        n = self.n
        corners = [c for k in range(0, n, 4) for c in self._transpose_corners(rows[k : k + 4])]
        columns: list[Any] = [None] * n
        for c in range(4):
            for q, column in enumerate(self._transpose_quarters(corners[c::4])):
                columns[4 * q + c] = column
        return columns

    def _transpose_corners(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """Transpose the 4 × 4 corner that each 128-bit quarter of four vectors makes."""
        n = self.n
        quarters = range(0, n, 4)
        single = [[q + j for q in quarters for j in (i, n + i, i + 1, n + i + 1)] for i in (0, 2)]
        double = [[q + j for q in quarters for j in (i, i + 1, n + i, n + i + 1)] for i in (0, 2)]
        pairs = [
            self._shuffle(vectors[k], vectors[k + 1], pattern) for k in (0, 2) for pattern in single
        ]
        return [
            self._shuffle(pairs[i], pairs[2 + i], pattern) for i in (0, 1) for pattern in double
        ]

    def _transpose_quarters(self, vectors: list[ir.Value]) -> list[ir.Value]:
        """Vector i, quarter j → vector j, quarter i."""
        n = self.n
        even = [q + j for q in range(0, 2 * n, 8) for j in range(4)]
        odd = [j + 4 for j in even]
        if len(vectors) == 2:
            first, second = vectors
            return [self._shuffle(first, second, even), self._shuffle(first, second, odd)]
        result: list[Any] = [None] * 4
        for parity, pattern in enumerate((even, odd)):
            a = self._shuffle(vectors[0], vectors[1], pattern)
            b = self._shuffle(vectors[2], vectors[3], pattern)
            result[parity] = self._shuffle(a, b, even)
            result[parity + 2] = self._shuffle(a, b, odd)
        return result

    def _lookup_in_memory(self, table: ir.Value, index: Index, bits: int, code: Vector) -> Vector:
        position = (code & self.u(2**bits - 1)).value
        first = self._address(table, index, _F32)
        value = ir.Constant(self.float_type, ir.Undefined)
        for k in range(self.n):
            entry = self.b.gep(first, [self.b.extract_element(position, _I32(k))])
            value = self.b.insert_element(value, self.b.load(entry), _I32(k))
        return _Float(self, value)
