"""Numba's CUDA simulator with another scheduler: threads take turns instead of racing for the GIL.

The simulator's own threads are threads of the system, of which a manager asks all the time whether
they wait; a block of 128 takes seconds.  Here they are greenlets, which run until their next
barrier, in an order that can be chosen: results that depend on it tell of a missing barrier.
"""

import sys

import numpy as np
from greenlet import getcurrent, greenlet
from numba.cuda.simulator import kernel, kernelapi
from numba.cuda.simulator.kernelapi import Dim3, FakeCUDAModule

order = list
"""What turns the threads of a block into the order in which they run: ``list`` or ``reversed``."""


class _Thread(greenlet):
    threadIdx: Dim3
    blockIdx: Dim3


class _Block:
    """Takes the place of the simulator's BlockManager."""

    def __init__(self, function, grid_dim, block_dim, debug):
        self.function, self.block_dim = function, block_dim

    def run(self, grid_point, *args):
        threads = []
        for place in np.ndindex(*self.block_dim):
            thread = _Thread(lambda: self.function(*args))
            thread.threadIdx, thread.blockIdx = Dim3(*place), Dim3(*grid_point)
            threads.append(thread)
        while threads:  # to the next barrier, or the end
            for thread in order(threads):
                thread.switch()
            running = [t for t in threads if not t.dead]
            assert len(running) in (0, len(threads)), "a barrier that some threads do not reach"
            threads = running


def _shared_array(self, shape, dtype, alignment=None):
    assert alignment is None
    caller = sys._getframe(1)
    key = caller.f_code, caller.f_lineno
    if key not in self._allocations:
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xFF)  # NaN: on a GPU it is what the last block has left there
        self._allocations[key] = array
    return self._allocations[key]


kernel.BlockManager = _Block
kernelapi.FakeCUDAShared.array = _shared_array
FakeCUDAModule.threadIdx = property(lambda self: getcurrent().threadIdx)
FakeCUDAModule.blockIdx = property(lambda self: getcurrent().blockIdx)
FakeCUDAModule.syncthreads = lambda self: getcurrent().parent.switch()
