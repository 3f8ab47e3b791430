"""Attention of many new tokens: to one another exactly, to the tokens before them on the codes.

Appended first, most of them would be in pages when their own queries come, though it is the nearest
tokens that queries attend to most.
"""

from __future__ import annotations

import numpy as np
import torch

from polarquant_nb.cache import KVCache
from polarquant_nb.exact_attention import attend_exact, merge
from polarquant_nb.gpu_arrays import on_gpu
from polarquant_nb.queries import Logits, open_logits

__all__ = ["attend_chunk"]

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_QUERIES = 256
"""Queries at a time; bounds the memory of scores."""


def attend_chunk(
    cache: KVCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    held_mask: Tensor | None,
    new_mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend to what a cache holds, and causally to what will be appended to it.

    Parameters
    ----------
    cache : KVCache
        Tokens before the new ones.
    q : torch.Tensor, shape ``(batch, num_heads, n, head_dim)``
        Queries of the new tokens.
    k, v : torch.Tensor, shapes ``(batch, num_kv_heads, n, head_dim)``
        New keys and values.
    held_mask : torch.Tensor, optional
        Of the tokens that are held, ``(batch or 1, num_heads or 1, n, seq_len)``.
    new_mask : torch.Tensor, optional
        Of the new ones, ``(batch or 1, num_heads or 1, n or 1, n)``.
    scale, softcap
        See :meth:`KVCache.attend`.

    Returns
    -------
    out : torch.Tensor, shape ``(batch, num_heads, n, value_head_dim)``
        Of the dtype of ``q``.
    lse : torch.Tensor of float32, shape ``(batch, num_heads, n)``
        Natural logarithms of the sums of exponentials.
    """
    batch, heads, n, head_dim = q.shape
    kv_heads, width = k.shape[1], v.shape[3]
    logits = open_logits(scale, softcap, head_dim)
    keys, values = (x.detach().float() for x in (k, v))
    added = None if new_mask is None else _added(new_mask)
    add_new = _add_on_gpu if on_gpu(q) else _add_on_cpu
    out = q.new_empty(batch, heads, n, width)
    lse = q.new_empty(batch, heads, n, dtype=torch.float32)
    for first in range(0, n, _QUERIES):
        rows = slice(first, min(first + _QUERIES, n))
        part = q[:, :, rows].detach()
        m = part.shape[2]
        # as heads of one query each, for which all that is held is in the past
        mask = None if held_mask is None else held_mask[:, :, rows].expand(batch, heads, m, -1)
        held_out, held_lse = cache.attend(
            part.reshape(batch, heads * m, 1, head_dim),
            None if mask is None else mask.reshape(batch, heads * m, 1, -1),
            scale=scale,
            softcap=softcap,
            return_lse=True,
        )
        shape = batch, kv_heads, heads // kv_heads, m
        seen = rows.stop  # of the new tokens, by the last of these queries
        both_out, both_lse = add_new(
            (held_out.float().reshape(*shape, width), held_lse.reshape(shape)),
            part.float().contiguous().reshape(*shape, head_dim),
            keys[:, :, :seen],
            values[:, :, :seen],
            logits,
            None if added is None else _of_rows(added, rows)[..., :seen],
            first,
        )
        out[:, :, rows] = both_out.reshape(batch, heads, m, width).to(q.dtype)
        lse[:, :, rows] = both_lse.reshape(batch, heads, m)
    return out, lse


def _add_on_cpu(
    held: Pair, q: Tensor, k: Tensor, v: Tensor, logits: Logits, mask: Tensor | None, first: int
) -> Pair:
    """Add the new tokens up to the last query's, of which query 0 is number ``first``."""
    seen = k.shape[2]
    out = np.empty((*q.shape[:-1], v.shape[3]), np.float32)
    lse = np.empty(q.shape[:-1], np.float32)
    with np.errstate(all="ignore"):
        attend_exact(
            q.numpy(), k.numpy(), v.numpy(), logits, None if mask is None else mask.numpy(),
            np.arange(seen), np.arange(first, seen) + 1, out, lse,
        )  # fmt: skip
        both = merge((held[0].numpy(), held[1].numpy()), (out, lse))
    return torch.from_numpy(both[0]), torch.from_numpy(both[1])


def _add_on_gpu(
    held: Pair, q: Tensor, k: Tensor, v: Tensor, logits: Logits, mask: Tensor | None, first: int
) -> Pair:
    """The same in tensors."""
    from polarquant_nb import gpu_exact

    positions = torch.arange(k.shape[2], device=q.device)
    visible = positions[first:] + 1
    return gpu_exact.merge(held, gpu_exact.attend_exact(q, k, v, logits, mask, positions, visible))


def _added(mask: Tensor) -> Tensor:
    """A mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, -torch.inf)


def _of_rows(mask: Tensor, rows: slice) -> Tensor:
    return mask[:, :, rows] if mask.shape[2] > 1 else mask
