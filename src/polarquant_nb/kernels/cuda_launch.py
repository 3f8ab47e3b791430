"""Launch kernels on torch's current stream: bare pointers, one driver call, no waiting.

Machine code is compiled, or found on disk, and loaded at a kernel's first launch for a compute
capability, which is not possible while a CUDA graph is captured: launch once before.  Arguments are
packed into memory that a thread keeps; ``cuLaunchKernel`` copies them.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from polarquant_nb.kernels.cuda_compile import ARGUMENTS, KernelSpec
from polarquant_nb.kernels.cuda_cubins import kept_cubin
from polarquant_nb.kernels.cuda_lanes import SIMULATED

__all__ = ["Kernel", "kernel_for"]

_FORMATS = {"i": "i", "l": "q", "f": "f"}  # pointers are P


class Kernel:
    """A loaded kernel.

    Parameters
    ----------
    function : object
        What the driver launches.
    letters : str
        Its arguments; see ``cuda_compile.ARGUMENTS``.
    threads : int
        Threads of a block.
    call : callable
        ``cuLaunchKernel``.
    enter : callable
        Called in each thread before its first launch.
    """

    def __init__(
        self, function: Any, letters: str, threads: int, call: Callable[..., Any],
        enter: Callable[[], None],
    ) -> None:  # fmt: skip
        self.function, self.threads, self.call, self.enter = function, threads, call, enter
        self.layout = struct.Struct("@" + "".join(_FORMATS.get(c, "P") for c in letters))
        formats = ["@" + "".join(_FORMATS.get(c, "P") for c in letters[:n]) for n in
                   range(1, len(letters) + 1)]  # fmt: skip
        sizes = [struct.calcsize("@" + _FORMATS.get(c, "P")) for c in letters]
        self.offsets = [struct.calcsize(f) - size for f, size in zip(formats, sizes, strict=True)]
        self.local = threading.local()

    def launch(self, grid: tuple[int, int], stream: int, *arguments: Any) -> None:
        """Launch, without waiting.

        Parameters
        ----------
        grid : tuple of two ints
            Blocks, x and y; nothing is launched if there are none.
        stream : int
            The stream's handle.
        *arguments
            Addresses and numbers.

        Raises
        ------
        RuntimeError
            If the driver refuses.
        """
        if not (grid[0] and grid[1]):
            return
        try:
            memory, places = self.local.memory
        except AttributeError:
            self.enter()
            memory, places = self.local.memory = self._new_memory()
        self.layout.pack_into(memory, 0, *arguments)
        (error,) = self.call(
            self.function, grid[0], grid[1], 1, self.threads, 1, 1, 0, stream, places[1], 0
        )
        if error:
            raise RuntimeError(f"CUDA refused to launch a kernel: {error}")

    def _new_memory(self) -> tuple[Any, tuple[Any, int]]:
        memory = ctypes.create_string_buffer(self.layout.size)
        start = ctypes.addressof(memory)
        places = (ctypes.c_void_p * len(self.offsets))(*(start + at for at in self.offsets))
        return memory, (places, ctypes.addressof(places))


class SimulatedKernel:
    """A kernel in Numba's CUDA simulator: the same calls, with arrays for addresses.

    Parameters
    ----------
    spec : KernelSpec
        Which.
    """

    def __init__(self, spec: KernelSpec) -> None:
        self.kernel: Any = spec.make()
        self.letters, self.threads = ARGUMENTS[spec.name], spec.threads

    def launch(self, grid: tuple[int, int], stream: int, *arguments: Any) -> None:
        """Run, at once."""
        from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

        if not (grid[0] and grid[1]):
            return
        plain: list[Any] = []
        for letter, argument in zip(self.letters, arguments, strict=True):
            if letter in _FORMATS:
                plain.append(np.float32(argument) if letter == "f" else argument)
            else:
                array = argument.reshape(-1)
                if letter in "UE" and array.dtype in (np.int32, np.int16):
                    array = array.view(f"u{array.itemsize}")
                # what is in device memory is not copied there and back: an array may span others
                plain.append(FakeCUDAArray(array if array.size else np.zeros(1, array.dtype)))
        self.kernel[grid, self.threads](*plain)


@cache
def kernel_for(spec: KernelSpec, capability: tuple[int, int]) -> Any:
    """A kernel, compiled and loaded at the first call.

    Parameters
    ----------
    spec : KernelSpec
        Which.
    capability : tuple of two ints
        Of the device.

    Returns
    -------
    Kernel or SimulatedKernel
        To launch on any device of this capability.
    """
    if SIMULATED:
        return SimulatedKernel(spec)
    return _loaded(spec, capability)


def _loaded(spec: KernelSpec, capability: tuple[int, int]) -> Kernel:
    from cuda.bindings import driver

    cubin, name = kept_cubin(spec, capability)
    error, library = driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0)
    if not error:
        error, function = driver.cuLibraryGetKernel(library, name.encode())
    if error:
        raise RuntimeError(f"CUDA refused to load a kernel: {error}")
    # a library's kernel takes the place of a function in any context
    function = driver.CUfunction(int(function))
    return Kernel(
        function, ARGUMENTS[spec.name], spec.threads, driver.cuLaunchKernel, _enter_context
    )


def _enter_context() -> None:
    """Give a thread that has no context yet that of torch's current device.

    CUDA's runtime does so by itself, the driver does not: a thread that has only allocated memory,
    which torch often has at hand, could not launch.
    """
    import torch
    from cuda.bindings import driver

    error, context = driver.cuCtxGetCurrent()
    if not error and not int(context):
        error, device = driver.cuDeviceGet(torch.cuda.current_device())
        if not error:
            error, context = driver.cuDevicePrimaryCtxRetain(device)
        if not error:
            (error,) = driver.cuCtxSetCurrent(context)
    if error:
        raise RuntimeError(f"CUDA has no context for this thread: {error}")
