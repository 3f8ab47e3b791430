"""Threads that help with a phase of calls: whoever has time takes the next list.

The thread that has the work does not wait for helpers that have not come yet: to wake a thread can
take as long as a kernel, and much longer where other programs use the cores.  It waits only for
lists that a helper has begun.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from threading import Lock, Thread
from time import perf_counter
from typing import Any

import numpy as np
from numba import cfunc, njit, types

from polarquant_nb.kernels.native import add_word, ask, call_shim, load_word, store_word

__all__ = ["announce_phase", "run_phase"]

# words of a phase: how many lists it has, how many are taken, whether one failed, where each is
_TAKEN, _FAILED, _LISTS = 8, 16, 24
# words of a team: the phase to help with or 0, and how many threads look at it
_LOOKING = 8

_PATIENCE = 500
"""How often a helper that was woken looks for a phase, letting others run in between."""

_LEAST_ALONE, _MOST_ALONE = 32, 1024
"""Phases that a thread runs alone after a helper was late: the more often, the more."""


def run_phase(phase: int, helpers: int) -> bool:
    """Run the lists of a phase.

    Parameters
    ----------
    phase : int
        Address of its words, of which none is taken or failed.
    helpers : int
        Most other threads that are worth waking.

    Returns
    -------
    bool
        Whether all went well.
    """
    team = _team()
    if helpers <= 0 or not team.busy.acquire(blocking=False):
        return not _code().run(phase)
    try:
        return not team.run(phase, helpers)
    finally:
        team.busy.release()


def announce_phase(helpers: int) -> None:
    """Wake helpers for a phase that is run within some hundred microseconds.

    Parameters
    ----------
    helpers : int
        As :func:`run_phase` will be told.
    """
    if helpers > 0:
        _team().announce(helpers)


class _Team:
    """Helpers, made as they are wanted; they help one thread at a time.

    Where other programs want the cores, a helper that has begun a list may be stopped for
    milliseconds.  After having waited for one longer than it worked, a thread works alone for a
    while.
    """

    def __init__(self) -> None:
        self.busy = Lock()
        self._alone, self._next_alone = 0, _LEAST_ALONE
        self._is_announced = False
        self._bells: list[Any] = []
        self._words = np.zeros(2, np.int64)
        self._address = self._words.ctypes.data
        self._code = _code()

    def announce(self, helpers: int) -> None:
        if not self._alone and self.busy.acquire(blocking=False):
            self._ring(helpers)
            self._is_announced = True
            self.busy.release()

    def run(self, phase: int, helpers: int) -> int:
        if self._alone:
            self._alone -= 1
            return int(self._code.run(phase))
        start = perf_counter()
        self._code.offer(self._address, phase)
        if not self._is_announced:
            self._ring(helpers)
        self._is_announced = False
        self._code.take(phase)
        middle = perf_counter()
        failed: int = self._code.finish(self._address, phase, self._code.yield_)
        if perf_counter() - middle > middle - start:
            self._alone = self._next_alone = min(2 * self._next_alone, _MOST_ALONE)
        else:
            self._next_alone = _LEAST_ALONE
        return failed

    def _ring(self, helpers: int) -> None:
        while len(self._bells) < helpers:
            bell = Lock()
            self._bells.append(bell)
            Thread(target=self._wait, args=(bell,), name="polarquant", daemon=True).start()
        for bell in self._bells[:helpers]:
            if bell.locked():  # else it has rung, and nobody has come yet
                bell.release()

    def _wait(self, bell: Any) -> None:
        help_, address, yield_ = self._code.help, self._address, self._code.yield_
        while True:
            bell.acquire()
            help_(address, yield_)


# ---- without the interpreter ---------------------------------------------------------------------


def _run_list(calls: int) -> int:
    """Run a list: how many calls, and of each the shim, the kernel and its arguments."""
    failed = 0
    for i in range(load_word(calls)):
        call = calls + 8 + 24 * i
        failed |= call_shim(load_word(call), load_word(call + 8), load_word(call + 16))
    return failed


_run_any_list = njit(_run_list)


def _take(phase: int) -> None:
    """Run lists until all are taken."""
    count = load_word(phase)
    i = add_word(phase + _TAKEN, 1)
    while i < count:
        if _run_any_list(load_word(phase + _LISTS + 8 * i)):
            store_word(phase + _FAILED, 1)
        i = add_word(phase + _TAKEN, 1)


_take_any = njit(_take)


def _run(phase: int) -> int:
    """Run all lists; returns whether one failed."""
    _take_any(phase)
    return load_word(phase + _FAILED)


def _offer(team: int, phase: int) -> None:
    """Let helpers see a phase, and everything that was written before."""
    store_word(team, phase)


def _finish(team: int, phase: int, yield_: int) -> int:
    """Wait for those who help with a phase of which all lists are taken; see :func:`_run`."""
    store_word(team, 0)
    # who looks at the team from now on finds nothing to do
    while load_word(team + _LOOKING):
        if yield_:
            ask(yield_)
    return load_word(phase + _FAILED)


def _help(team: int, yield_: int) -> None:
    """Help with what there is, or will be soon."""
    patience = _PATIENCE if yield_ else 0
    while patience and load_word(team) == 0:
        ask(yield_)
        patience -= 1
    add_word(team + _LOOKING, 1)
    phase = load_word(team)
    if phase:
        _take_any(phase)
    add_word(team + _LOOKING, -1)


class _Code:
    """The functions above, compiled; calling them releases the GIL."""

    def __init__(self) -> None:
        word = types.int64
        self._functions = (
            cfunc(word(word))(_run),
            cfunc(types.void(word))(_take),
            cfunc(types.void(word, word))(_offer),
            cfunc(word(word, word, word))(_finish),
            cfunc(types.void(word, word))(_help),
        )
        self.run, self.take, self.offer, self.finish, self.help = (
            function.ctypes for function in self._functions
        )
        self.yield_ = 0
        if os.name == "posix":
            function = ctypes.CDLL(None).sched_yield
            self.yield_ = ctypes.cast(function, ctypes.c_void_p).value or 0


_code = cache(_Code)
_team = cache(_Team)

if hasattr(os, "register_at_fork"):  # threads do not survive a fork
    os.register_at_fork(after_in_child=_team.cache_clear)
