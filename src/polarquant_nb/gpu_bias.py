"""The logits of keys' bias on a GPU, in one launch; see ``kernels.cuda_bias``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polarquant_nb.arrays import torch_name
from polarquant_nb.bias import RotaryBias
from polarquant_nb.gpu_codec import DeviceRows, Launcher, launcher
from polarquant_nb.gpu_preconditioning import bias_tables
from polarquant_nb.layout import PAGE

__all__ = ["BiasLogits"]

Tensor = Any


@dataclass(frozen=True, eq=False)
class BiasLogits:
    """One launch for calls that differ in the queries' numbers only; made by :meth:`make`."""

    here: Launcher
    kernel: Any
    grid: tuple[int, int]
    tables: tuple[Tensor, ...]  # whose addresses are launched with
    addresses: tuple[Any, ...]
    numbers: tuple[int, ...]

    @staticmethod
    def make(
        q: Tensor, keys: DeviceRows, bias: RotaryBias, per_row: int, group: int, pages: int
    ) -> BiasLogits:
        """Move tables, compile the kernel.

        Parameters
        ----------
        q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
            Queries like those that will come.
        keys : DeviceRows
            Keys that were encoded without their bias.
        bias : RotaryBias
            That bias.
        per_row, group : int
            Queries of a row, and how many share a block.
        pages : int
            Pages of the longest row.

        Returns
        -------
        BiasLogits
            For such queries and these keys.
        """
        from polarquant_nb.kernels.cuda_compile import program_of

        here, groups = launcher(q.device), -(-per_row // group)
        tables = bias_tables(bias, keys.first_position, pages, q.device)
        pairs = len(bias.inv_freq)
        pair_step, second = (2, 1) if bias.interleaved else (1, pairs)
        program = program_of(keys.format, bare=True)
        return BiasLogits(
            here, here.kernel("bias", program, torch_name(q.dtype), group=group),
            (keys.starts.shape[0] * groups, pages), tables, tuple(map(here.address, tables)),
            (per_row, groups, len(tables[0]), pairs, pair_step, second),
        )  # fmt: skip

    def run(self, q: Tensor, scale: float) -> Tensor:
        """Launch.

        Parameters
        ----------
        q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
            Queries, of any strides; float16, bfloat16 or float32.
        scale : float
            Of the logits.

        Returns
        -------
        torch.Tensor of float32, shape ``(batch, num_heads, q_len, 128 * pages)``
            Numbers to add to the logits.
        """
        dtype = self.tables[0].dtype
        out = q.new_empty((*q.shape[:-1], self.grid[1] * PAGE), dtype=dtype)
        with self.here.active():
            self.kernel.launch(
                self.grid, self.here.stream(), self.here.address(q), *self.addresses,
                self.here.address(out), scale, q.shape[1], q.shape[2], *self.numbers, *q.stride(),
            )  # fmt: skip
        return out
