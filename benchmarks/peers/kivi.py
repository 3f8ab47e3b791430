"""KIVI: keys quantised per channel, values per token (Liu et al., arXiv 2402.02750, section 3).

Keys have channels that are large in every token, so a key's group is 32 tokens of one channel; a
value's is 32 channels of one token.  A group stores its smallest number and its step in 16 bits,
and its numbers as integers.  Tokens that do not fill a group, and the most recent ones, stay exact.
KIVI has no sinks; here it gets the same as all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

GROUP = 32


def code(name: str, x: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Vectors ``(batch, num_kv_heads, tokens, head_dim)`` decoded, and the bytes stored."""
    axis = -2 if name == "keys" else -1
    groups = x.unflatten(axis, (-1, GROUP))
    decoded, nbytes = quantise(groups, bits, axis)
    return decoded.reshape(x.shape), nbytes


def quantise(groups: torch.Tensor, bits: int, axis: int) -> tuple[torch.Tensor, int]:
    """Asymmetric integers along ``axis``, decoded, and the bytes stored."""
    import torch

    low, high = (x.to(torch.float16) for x in torch.aminmax(groups, dim=axis, keepdim=True))
    levels = 2**bits - 1
    step = ((high.float() - low.float()) / levels).to(torch.float16)
    safe = torch.where(step == 0, 1, step.float())  # a group of equal numbers
    codes = ((groups - low.float()) / safe).round().clamp(0, levels)
    nbytes = bits * codes.numel() // 8 + low.nbytes + step.nbytes
    return codes * step.float() + low.float(), nbytes
