"""Values of instructions being written down, as far as they are the same on every back end.

``lanes`` is what writes them: of it, only the LLVM builder ``lanes.b`` is used.
"""

from __future__ import annotations

from typing import Any, Self

from llvmlite import ir

__all__ = ["WrittenFloat", "WrittenMask", "WrittenUint"]


class _Written:
    def __init__(self, lanes: Any, value: ir.Value) -> None:
        self.lanes, self.value = lanes, value

    def _new(self, value: ir.Value) -> Self:
        return type(self)(self.lanes, value)


class WrittenMask(_Written):
    """Conditions."""

    def __and__(self, other: WrittenMask) -> WrittenMask:
        return self._new(self.lanes.b.and_(self.value, other.value))

    def __xor__(self, other: WrittenMask) -> WrittenMask:
        return self._new(self.lanes.b.xor(self.value, other.value))

    def __invert__(self) -> WrittenMask:
        return self._new(self.lanes.b.not_(self.value))


class WrittenUint(_Written):
    """Unsigned 32-bit integers."""

    def __add__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.add(self.value, other.value))

    def __sub__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.sub(self.value, other.value))

    def __and__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.and_(self.value, other.value))

    def __or__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.or_(self.value, other.value))

    def __xor__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.xor(self.value, other.value))

    def __lshift__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.shl(self.value, other.value))

    def __rshift__(self, other: WrittenUint) -> WrittenUint:
        return self._new(self.lanes.b.lshr(self.value, other.value))

    def __ge__(self, other: WrittenUint) -> WrittenMask:
        return WrittenMask(self.lanes, self.lanes.b.icmp_unsigned(">=", self.value, other.value))


class WrittenFloat(_Written):
    """Float32 numbers, but for their arithmetic, in which back ends differ."""

    def _compare(self, operator: str, other: WrittenFloat) -> WrittenMask:
        return WrittenMask(self.lanes, self.lanes.b.fcmp_ordered(operator, self.value, other.value))

    def __gt__(self, other: WrittenFloat) -> WrittenMask:
        return self._compare(">", other)

    def __lt__(self, other: WrittenFloat) -> WrittenMask:
        return self._compare("<", other)

    def __le__(self, other: WrittenFloat) -> WrittenMask:
        return self._compare("<=", other)
