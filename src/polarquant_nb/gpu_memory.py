"""Where a cache on a GPU keeps its exact tokens; see ``memory.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.gpu_arrays import give_back
from polarquant_nb.gpu_codec import copied
from polarquant_nb.gpu_page_table import DeviceTable
from polarquant_nb.gpu_status import check
from polarquant_nb.preconditioning import Preconditioner

__all__ = ["DeviceMemory", "device_memory"]

Tensor = Any


class DeviceMemory:
    """Memory of a GPU: torch tensors of the dtype that was appended.

    Nothing here waits for the GPU, but for :meth:`fetch`.

    Parameters
    ----------
    device : torch.device
        Where.
    """

    def __init__(self, device: Any) -> None:
        import torch

        check()
        self.torch, self.device = torch, device

    def table(
        self, fmt: PolarFormat, codebooks: Codebooks, num_kv_heads: int, batch: int,
        preconditioner: Preconditioner | None, first_position: int,
    ) -> DeviceTable:  # fmt: skip
        """A table without pages; see :meth:`PageTable.empty`."""
        table = DeviceTable.empty(
            fmt, codebooks, num_kv_heads, batch, preconditioner, first_position
        )  # fmt: skip
        return replace(table, device=self.device)

    def empty(self, shape: tuple[int, ...], kind: ArrayKind) -> Tensor:
        """A tensor of a kind, not initialised."""
        # appends write to it, inside and outside of inference mode
        with self.torch.inference_mode(False):
            return self.torch.empty(shape, dtype=self._dtype(kind), device=self.device)

    def zeros(self, shape: tuple[int, ...], kind: ArrayKind) -> tuple[Any, Tensor]:
        """An array to give to the user, and a tensor in the same memory."""
        tensor = self.torch.zeros(shape, dtype=self._dtype(kind), device=self.device)
        return give_back(tensor, kind.family), tensor

    def copy(self, elements: Tensor) -> Tensor:
        """The same elements in memory of their own."""
        with self.torch.inference_mode(False):
            return elements.clone(memory_format=self.torch.contiguous_format)

    def select(self, elements: Tensor, rows: Sequence[int]) -> Tensor:
        """Some rows, in memory of their own."""
        with self.torch.inference_mode(False):
            return elements.index_select(0, copied(np.array(rows, np.int64), self.device))

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Tokens ``(rows, num_kv_heads, n, head_dim)`` after one another."""
        return self.torch.cat(list(parts), 2)

    def fetch(self, elements: Tensor) -> npt.NDArray[Any]:
        """A copy in the CPU's memory, float16 and bfloat16 as uint16."""
        if elements.element_size() == 2:
            elements = elements.contiguous().view(self.torch.int16)
        array: npt.NDArray[Any] = elements.cpu().numpy().copy()
        return array.view(np.uint16) if array.itemsize == 2 else array

    def take(self, elements: npt.NDArray[Any], kind: ArrayKind) -> Tensor:
        """Inverse of :meth:`fetch`."""
        signed = elements.view(np.int16) if elements.itemsize == 2 else elements
        return copied(signed, self.device).view(self._dtype(kind))

    def _dtype(self, kind: ArrayKind) -> Any:
        return getattr(self.torch, kind.dtype)


@lru_cache(maxsize=64)
def device_memory(device: Any) -> DeviceMemory:
    """The memory of a device.

    Parameters
    ----------
    device : torch.device
        Which.

    Returns
    -------
    DeviceMemory
        Made once.

    Raises
    ------
    ImportError
        If kernels cannot run there: see ``gpu_status.check``.
    """
    return DeviceMemory(device)
