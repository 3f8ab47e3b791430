"""A small pool of threads for kernels that release the GIL.

Work is cut into ranges.  Numba's own thread layers are not used: one of them aborts the process
when two Python threads call a parallel kernel, another kills forked children, and a third shares
its thread count with torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise
from threading import Lock
from typing import SupportsIndex

__all__ = ["get_num_threads", "run_ranges", "set_num_threads", "threads_by_environment"]

_lock = Lock()
_pool: ThreadPoolExecutor | None = None
_num_threads: int | None = None


def get_num_threads() -> int:
    """Threads that kernels use.

    Returns
    -------
    int
        What :func:`set_num_threads` was given last; else the environment variable
        ``POLARQUANT_NUM_THREADS`` or ``OMP_NUM_THREADS``; else the number of CPUs that this process
        may run on.  Both are looked up once.
    """
    return _num_threads if _num_threads is not None else _default_num_threads()


@cache
def _default_num_threads() -> int:
    return threads_by_environment("POLARQUANT_NUM_THREADS", "OMP_NUM_THREADS")


def threads_by_environment(*names: str) -> int:
    """Threads that environment variables ask for.

    Parameters
    ----------
    *names : str
        Variables; the first that holds a positive integer counts.

    Returns
    -------
    int
        If there is none, the number of CPUs that this process may run on.
    """
    for name in names:
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_num_threads(n: int) -> None:
    """Set how many threads kernels use.

    Codes do not depend on it; attention to many pages does by rounding in float32.

    Parameters
    ----------
    n : int
        At least 1.

    Raises
    ------
    TypeError
        If ``n`` is no int.
    ValueError
        If ``n`` is less than 1.
    """
    global _num_threads, _pool
    if not isinstance(n, SupportsIndex):
        raise TypeError(f"n is {n!r}; it must be an int")
    if n < 1:
        raise ValueError(f"n is {n}; it must be at least 1")
    with _lock:
        _num_threads = n
        _pool = None  # running work keeps the old pool until it is done


def run_ranges(function: Callable[[int, int], None], total: int, grain: int) -> None:
    """Call ``function(first, last)`` for ranges that cover ``range(total)``, in parallel.

    Parameters
    ----------
    function : callable
        Releases the GIL, and may be called from several threads at once.
    total : int
        Items; with 0 nothing is called.
    grain : int
        Fewest items that are worth a thread.
    """
    parts = min(get_num_threads(), total // grain)
    if parts <= 1:
        if total:
            function(0, total)
        return
    edges = [total * i // parts for i in range(parts + 1)]
    futures = [_executor().submit(function, a, b) for a, b in pairwise(edges[1:])]
    try:
        function(edges[0], edges[1])
    finally:  # after an error or an interrupt, too: they write to memory of the caller's
        for future in futures:
            future.exception()
    for future in futures:
        future.result()


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            workers = max(1, get_num_threads() - 1)
            _pool = ThreadPoolExecutor(workers, thread_name_prefix="polarquant")
        return _pool


def _after_fork() -> None:
    """A forked child has the pool object but not its threads."""
    global _pool, _lock
    _pool, _lock = None, Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
