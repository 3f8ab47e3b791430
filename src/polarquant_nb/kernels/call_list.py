"""Kernels called one after another, and side by side, without the interpreter in between.

Between two calls for a token a model reads all of its weights, so that Python's own code and data
have left the CPU's caches: what takes a microsecond in a loop takes five there.  Here kernels'
arguments are laid out in memory once, as machine code takes them: 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba.core import config

from polarquant_nb.kernels.jit import bound, machine_code
from polarquant_nb.kernels.native import shim, words_of
from polarquant_nb.kernels.team import announce_phase, run_phase
from polarquant_nb.threads import get_num_threads

__all__ = ["Call", "CallList", "Phase"]


class Call(NamedTuple):
    """A kernel and its arguments.

    Parameters
    ----------
    kernel : callable
        From :func:`polarquant_nb.kernels.jit.kernel`; it returns nothing.
    arguments : tuple
        Arrays, ints, floats, programs, and tuples of them.
    code : dict
        Keeps what is found out about kernels; whoever calls a kernel with arguments of other types
        has another one.
    """

    kernel: Callable[..., None]
    arguments: tuple[Any, ...]
    code: dict[Any, Any]

    def __call__(self) -> None:
        """Run it."""
        name = self.kernel.__name__
        if name not in self.code:
            self.code[name] = bound(self.kernel, *self.arguments)
        self.code[name](*self.arguments)

    def entry(self) -> tuple[int, int, npt.NDArray[np.int64]]:
        """Addresses of a shim and of the kernel, and the arguments in memory."""
        words = [word for argument in self.arguments for word in words_of(argument)]
        key = self.kernel.__name__, "entry"
        if key not in self.code:
            address, kinds = machine_code(self.kernel, *self.arguments)
            self.code[key] = shim(kinds, len(words)), address
        return *self.code[key], np.array(words, np.int64)


Phase = Sequence[Sequence[Call]]
"""Lists of calls that may run side by side; one phase ends before the next begins."""


class CallList:
    """Phases of calls, to run as often as wanted.

    Arrays are used where they are: their contents may change, everything else is as it was.

    Parameters
    ----------
    phases : sequence of Phase
        What to run.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        kind = _Interpreted if config.DISABLE_JIT else _Compiled
        self._phases = [kind(phase) for phase in phases]

    def __call__(self) -> None:
        """Run all phases.

        Raises
        ------
        MemoryError
            If a kernel got no memory.
        """
        for phase in self._phases:
            phase.run()

    def announce(self) -> None:
        """Wake the threads that will help, some hundred microseconds before they are needed."""
        announce_phase(max(phase.helpers() for phase in self._phases))


class _Interpreted:
    """A phase of kernels that are plain Python."""

    def __init__(self, phase: Phase) -> None:
        self._phase = phase

    def helpers(self) -> int:
        return 0

    def run(self) -> None:
        for calls in self._phase:
            for call in calls:
                call()


class _Compiled:
    """A phase in memory, as :mod:`~polarquant_nb.kernels.team` takes it."""

    def __init__(self, phase: Phase) -> None:
        self._kept: list[Any] = [phase]
        self._words = np.array([len(phase), 0, 0, *map(self._put, phase)])
        self._address = self._words.ctypes.data

    def run(self) -> None:
        words = self._words
        words[1] = words[2] = 0
        if not run_phase(self._address, self.helpers()):
            raise MemoryError("a kernel got no memory")

    def helpers(self) -> int:
        return min(len(self._words) - 3, get_num_threads()) - 1

    def _put(self, calls: Sequence[Call]) -> int:
        """A list in memory; returns its address."""
        words = [len(calls)]
        for call in calls:
            function, kernel, arguments = call.entry()
            words += function, kernel, arguments.ctypes.data
            self._kept.append(arguments)
        memory = np.array(words, np.int64)
        self._kept.append(memory)
        return memory.ctypes.data
