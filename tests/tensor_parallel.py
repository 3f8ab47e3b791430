"""Attention whose heads are split over processes; docs/how-to/distributed.md shows this file.

Run it with ``torchrun --nproc-per-node 2 tensor_parallel.py``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

import polarquant_nb as pq

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
WIDTH = NUM_HEADS * HEAD_DIM


def share(weight: Tensor, dim: int, rank: int, ranks: int) -> Tensor:
    """What one process holds of a weight that is split along ``dim``."""
    return weight.chunk(ranks, dim)[rank]


class Attention:
    """The heads of one process, and their cache.  With one process: all heads."""

    def __init__(self, weights: dict[str, Tensor], rank: int, ranks: int) -> None:
        self.q, self.k, self.v = (share(weights[name], 0, rank, ranks) for name in "qkv")
        self.out = share(weights["out"], 1, rank, ranks)
        self.cache = pq.KVCache("balanced", head_dim=HEAD_DIM)
        self.ranks = ranks

    def __call__(self, x: Tensor) -> Tensor:
        """Of tokens ``(batch, n, width)``, which all processes have."""
        q, k, v = (
            (x @ weight.T).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
            for weight in (self.q, self.k, self.v)
        )
        self.cache.append(k, v)
        part = self.cache.attend(q).transpose(1, 2).flatten(2) @ self.out.T
        if self.ranks > 1:
            dist.all_reduce(part)  # the sum over all heads
        return part


def main() -> None:
    """Compare the processes' heads with those of one cache for all."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    pq.set_num_threads(1)  # each process has a pool of threads of its own

    torch.manual_seed(0)  # the same weights and tokens everywhere
    rows = {"q": NUM_HEADS, "k": NUM_KV_HEADS, "v": NUM_KV_HEADS, "out": NUM_HEADS}
    weights = {
        name: torch.randn(heads * HEAD_DIM, WIDTH) / WIDTH**0.5 for name, heads in rows.items()
    }
    prompt, token = torch.randn(2, 300, WIDTH), torch.randn(2, 1, WIDTH)

    layer, whole = Attention(weights, rank, ranks), Attention(weights, 0, 1)
    for x in (prompt, token):
        out, expected = layer(x), whole(x)
        assert (out - expected).norm() < 1e-3 * expected.norm()

    # Keys that are equal bit for bit are stored as equal codes, whoever else is in the cache.
    k, v = torch.randn(2, 1, NUM_KV_HEADS, 300, HEAD_DIM)
    scales = 0.5 + torch.rand(NUM_KV_HEADS, HEAD_DIM)
    ours, everybody = (
        pq.KVCache("balanced", head_dim=HEAD_DIM, preconditioner=pq.Preconditioner(each))
        for each in (share(scales, 0, rank, ranks), scales)
    )
    ours.append(share(k, 1, rank, ranks), share(v, 1, rank, ranks))
    everybody.append(k, v)
    for mine, all_heads in zip(ours.decode(), everybody.decode(), strict=True):
        assert torch.equal(mine, share(all_heads, 1, rank, ranks))

    nbytes = torch.tensor(layer.cache.nbytes)
    dist.all_reduce(nbytes)
    if rank == 0:
        print(f"{ranks} processes: {layer.cache.num_kv_heads} kv heads each, {nbytes} bytes in all")
        print(f"one cache of all heads: {whole.cache.nbytes} bytes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
