"""Where a cache keeps its exact tokens: what differs between NumPy arrays and a GPU's tensors.

Slices are read and written alike on both.  What is made anew is made here, by :class:`HostMemory`
or its counterpart :class:`~polarquant_nb.gpu_memory.DeviceMemory`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, element_dtype, new_array, open_elements
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.gpu_arrays import on_gpu, open_tensor
from polarquant_nb.page_table import PageTable
from polarquant_nb.preconditioning import Preconditioner

if TYPE_CHECKING:
    from polarquant_nb.gpu_memory import DeviceMemory

__all__ = ["HostMemory", "Memory", "memory_of", "open_tokens"]

Array = npt.NDArray[Any]


class HostMemory:
    """The CPU's memory; float16 and bfloat16 are uint16."""

    def table(
        self, fmt: PolarFormat, codebooks: Codebooks, num_kv_heads: int, batch: int,
        preconditioner: Preconditioner | None, first_position: int,
    ) -> PageTable:  # fmt: skip
        """A table without pages; see :meth:`PageTable.empty`."""
        return PageTable.empty(
            fmt, codebooks, num_kv_heads, batch, preconditioner, first_position
        )  # fmt: skip

    def empty(self, shape: tuple[int, ...], kind: ArrayKind) -> Array:
        """Elements of a kind, not initialised."""
        return np.empty(shape, element_dtype(kind))

    def zeros(self, shape: tuple[int, ...], kind: ArrayKind) -> tuple[Any, Array]:
        """An array to give to the user, and its elements."""
        array, flat = new_array(shape, kind)
        flat[:] = 0
        return array, flat.reshape(shape)

    def copy(self, elements: Array) -> Array:
        """The same elements in memory of their own."""
        return elements.copy()

    def select(self, elements: Array, rows: Sequence[int]) -> Array:
        """Some rows, in memory of their own."""
        chosen: Array = elements[list(rows)]
        return chosen

    def join(self, parts: Sequence[Array]) -> Array:
        """Tokens ``(rows, num_kv_heads, n, head_dim)`` after one another."""
        return np.concatenate(parts, 2)

    def fetch(self, elements: Array) -> Array:
        """A copy for a file."""
        return elements.copy()

    def take(self, elements: Array, kind: ArrayKind) -> Array:
        """Elements from a file."""
        return elements.copy()


Memory: TypeAlias = "HostMemory | DeviceMemory"

_HOST = HostMemory()


def memory_of(kind: ArrayKind) -> Memory:
    """Where arrays of a kind are.

    Parameters
    ----------
    kind : ArrayKind
        What is appended.

    Returns
    -------
    Memory
        That of its device.
    """
    if kind.device is None:
        return _HOST
    from polarquant_nb.gpu_memory import device_memory

    return device_memory(kind.device)


def open_tokens(x: Any, name: str) -> tuple[Any, ArrayKind]:
    """Look at an array in place, wherever it is.

    Parameters
    ----------
    x, name
        See :func:`polarquant_nb.arrays.open_elements`.

    Returns
    -------
    elements : ndarray or torch.Tensor
        On a GPU a tensor.
    kind : ArrayKind
        What ``x`` is.
    """
    return open_tensor(x, name) if on_gpu(x) else open_elements(x, name)
