"""DeviceTable: the packed part of a cache on a GPU; every page is a tensor that never changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind
from polarquant_nb.gpu_codec import DeviceRows, copied, decode_rows, encode_rows, launcher
from polarquant_nb.gpu_preconditioning import subtract_bias
from polarquant_nb.layout import PAGE
from polarquant_nb.page_table import PageTable, span

__all__ = ["DeviceTable"]

Tensor = Any


@dataclass(frozen=True, eq=False)
class DeviceTable(PageTable):
    """Where the pages of each batch row are: as :class:`PageTable`, with blocks on a GPU.

    Blocks are tensors of int32, allocated by torch.  Kernels find them as the CPU's do, by their
    distance from the block at the lowest address; a table of these distances is copied to the GPU
    whenever there are other pages, once for 128 tokens.  Addresses are in the CPU's memory.

    Parameters
    ----------
    device : torch.device
        Where.
    """

    device: Any = None

    @cached_property
    def rows(self) -> DeviceRows:  # type: ignore[override]
        """The pages as kernels take them: a row for each batch row and kv head."""
        words, starts = self._found(self.addresses, self.blocks)
        lengths = np.repeat(np.array(self.lengths, np.int64), self.num_kv_heads)
        return DeviceRows(
            self.format, self.codebooks, words, starts, copied(lengths, self.device),
            min(self.lengths, default=0), {}, self.preconditioner, self.first_position,
        )  # fmt: skip

    def encode(self, rows: slice, first: int, x: Tensor, kind: ArrayKind) -> list[list[Tensor]]:
        """New blocks of whole pages; see :meth:`PageTable.encode`."""
        import torch

        shape, options = self._block_shape, {"dtype": torch.int32, "device": self.device}
        blocks: Any
        with torch.inference_mode(False):  # as caches go on outside of it
            blocks = [[torch.empty(shape, **options) for _ in range(x.shape[2] // PAGE)] for _ in x]
        words, starts = self._found(self._addresses(blocks), blocks)
        self._encode(rows, first, x, kind, words, starts)
        return blocks

    def fill(self, rows: slice, x: Tensor, kind: ArrayKind) -> list[Tensor]:
        """Copies of partial last pages with their free lanes filled; see :meth:`PageTable.fill`.

        As only a crop leaves partial pages, lanes are put together on the CPU, which waits for the
        GPU.
        """
        import torch

        blocks: Any = self.blocks
        old = torch.stack([row[-1] for row in blocks[rows]])
        new, page_words = old.clone(), old.shape[-1]
        page = x.new_empty((*x.shape[:2], PAGE, x.shape[3]))
        first = PAGE - x.shape[2]
        page[:, :, first:] = x
        page[:, :, :first] = x[:, :, :1]
        starts = torch.arange(new.numel() // page_words, device=x.device) * page_words
        page_start = self.lengths[rows.start] - first
        self._encode(rows, page_start, page, kind, new.view(-1), starts, frozen=True)
        source, target = self._words(new), self._words(old)
        self.format.layout.copy_lanes(source, target, first)
        return list(map(self._block, target))

    def decode(self, rows: slice, kind: ArrayKind) -> Tensor:
        """Reconstruct the tokens of rows that are equally long; see :meth:`PageTable.decode`.

        Those of float64 as float32.
        """
        import torch

        dtype = torch.float32 if kind.dtype == "float64" else getattr(torch, kind.dtype)
        shape = len(self.lengths[rows]), self.num_kv_heads, self.lengths[rows][0]
        x = torch.empty((*shape, self.format.head_dim), dtype=dtype, device=self.device)
        heads = slice(rows.start * self.num_kv_heads, rows.stop * self.num_kv_heads)
        part, here = self.rows, self.preconditioner
        if here is not None:
            here = here.of_rows(len(part.starts), heads)
        part = replace(part, starts=part.starts[heads], preconditioner=here)
        decode_rows(part, 0, shape[2], x)
        return x

    def _encode(
        self, rows: slice, first: int, x: Tensor, kind: ArrayKind, words: Tensor, starts: Tensor,
        *, frozen: bool = False,
    ) -> None:  # fmt: skip
        here = self.preconditioner
        if here is not None and len(here.shape) == 3:
            here = here.select(range(rows.start, rows.stop))
        x = subtract_bias(x, here, self.first_position + first)
        encode_rows(
            x, self.format, self.codebooks, words, starts.reshape(-1), here, frozen=frozen
        )  # fmt: skip

    # ---- blocks in memory ------------------------------------------------------------------------

    @staticmethod
    def _address(block: Tensor) -> int:
        return int(block.data_ptr()) // 4

    def _words(self, block: Tensor) -> npt.NDArray[np.uint32]:
        words: npt.NDArray[np.uint32] = block.cpu().numpy().view(np.uint32)
        return words

    def _block(self, words: npt.NDArray[np.uint32]) -> Tensor:
        return copied(words.view(np.int32), self.device)

    def _found(
        self, addresses: npt.NDArray[np.int64], blocks: Sequence[Sequence[Tensor]]
    ) -> tuple[Tensor, Tensor]:
        """What kernels take for the memory of blocks, and where in it each page starts."""
        import torch

        first, num_words, starts = self._locate(addresses)
        if launcher(self.device).simulated:  # needs an array that is as long as that
            words = torch.from_numpy(span(first, num_words, blocks).view(np.int32))
        else:  # an address is enough
            lowest = [b for row in blocks for b in row if self._address(b) == first]
            words = lowest[0] if lowest else torch.empty(0, dtype=torch.int32, device=self.device)
        return words, copied(starts, self.device)
