"""Attention of many new tokens: to one another exactly, to the tokens before them on the codes.

Appended first, most of them would be in pages when their own queries come, though it is the nearest
tokens that queries attend to most.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from polarquant_nb.cache import KVCache
from polarquant_nb.exact_attention import attend_exact, merge
from polarquant_nb.queries import open_logits

__all__ = ["attend_chunk"]

Tensor = torch.Tensor
FloatArray = npt.NDArray[np.float32]

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
    keys, values = (x.detach().float().numpy() for x in (k, v))
    added = None if new_mask is None else _added(new_mask).numpy()
    out, lse = q.new_empty(batch, heads, n, width), torch.empty(batch, heads, n)
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
        new_out, new_lse = np.empty((*shape, width), np.float32), np.empty(shape, np.float32)
        seen = rows.stop  # of the new tokens, by the last of these queries
        with np.errstate(all="ignore"):
            attend_exact(
                part.float().contiguous().numpy().reshape(*shape, head_dim),
                keys[:, :, :seen],
                values[:, :, :seen],
                logits,
                None if added is None else _of_rows(added, rows)[..., :seen],
                np.arange(seen),
                np.arange(first, seen) + 1,
                new_out,
                new_lse,
            )
            held = held_out.float().numpy().reshape(*shape, width), held_lse.numpy().reshape(shape)
            both_out, both_lse = merge(held, (new_out, new_lse))
        out[:, :, rows] = torch.from_numpy(both_out).reshape(batch, heads, m, width).to(q.dtype)
        lse[:, :, rows] = torch.from_numpy(both_lse).reshape(batch, heads, m)
    return out, lse


def _added(mask: Tensor) -> Tensor:
    """A mask as numbers to add."""
    if mask.dtype != torch.bool:
        return mask.float()
    return torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)


def _of_rows(mask: FloatArray, rows: slice) -> FloatArray:
    return mask[:, :, rows] if mask.shape[2] > 1 else mask
