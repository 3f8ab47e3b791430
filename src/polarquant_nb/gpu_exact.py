"""Attention over a few hundred exact tokens on a GPU, and merging it with attention over pages.

One query a row is a kernel's, :func:`add_exact`.  The rest is as ``exact_attention.py`` does it,
with torch's matrix products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polarquant_nb.arrays import torch_name
from polarquant_nb.gpu_codec import copied_integers, launcher
from polarquant_nb.kernels.attention_cpu import LOG2_E

if TYPE_CHECKING:
    from polarquant_nb.cache_state import CacheState
    from polarquant_nb.queries import Logits

__all__ = ["SCORES", "add_exact", "attend_exact", "merge"]

Tensor = Any

SCORES = 2**26
"""Scores held at a time."""


def add_exact(
    state: CacheState, q: Tensor, logits: Logits, others: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Attention of each row's last token, from that to the tokens in pages; in one launch.

    Parameters
    ----------
    state : CacheState
        Keys and values, of which the exact ones are added.
    q : torch.Tensor, shape ``(batch, num_heads, 1, head_dim)``
        Queries, of any strides.
    logits : Logits
        Scale and softcap.
    others : tuple of two torch.Tensors of float32, optional
        Result and log-sum-exp over the pages, contiguous; none if there are none.

    Returns
    -------
    out : torch.Tensor, shape ``(batch, num_heads, 1, value_head_dim)``
        Of the dtype of ``q``.
    lse : torch.Tensor of float32, shape ``(batch, num_heads, 1)``
        Natural logarithms.
    """
    keys: Any = state.keys.exact
    values: Any = state.values.exact
    dtype = q.dtype
    if keys.dtype != dtype or q.element_size() == 8:
        q, keys, values = (x.float() for x in (q, keys, values))
    batch, heads, _, _ = q.shape
    here, kernel = _kernel(state, q)
    out = q.new_empty((batch, heads, 1, values.shape[3]))
    lse = q.new_empty((batch, heads, 1), dtype=here.torch.float32)
    most = max(state.exact)
    fewer = copied_integers(tuple(most - n for n in state.exact), q.device)
    other, other_lse = others or (lse, lse)  # any address, if there are none
    strides = q.stride()
    with here.active():
        kernel.launch(
            (batch * heads, 1), here.stream(),
            *map(here.address, (q, keys, values, fewer, other, other_lse, out, lse)),
            most, keys.shape[2], heads // keys.shape[1], heads, logits.scale * LOG2_E,
            logits.softcap * LOG2_E, int(others is not None), strides[0], strides[1], strides[3],
        )  # fmt: skip
    return out.to(dtype), lse


def _kernel(state: CacheState, q: Tensor) -> tuple[Any, Any]:
    """Launcher and kernel, looked up once for the cache and the dtype."""
    prepared, key = state.keys.table.prepared, ("exact", q.dtype)
    found = prepared.get(key)
    if found is None:
        from polarquant_nb.kernels.cuda_compile import program_of
        from polarquant_nb.kernels.cuda_exact import EXACT_THREADS

        here = launcher(q.device)
        k, v = (program_of(s.table.format, bare=True) for s in (state.keys, state.values))
        kernel = here.kernel("exact", k, torch_name(q.dtype), values=v, threads=EXACT_THREADS)
        found = prepared[key] = here, kernel
    return found


def attend_exact(
    q: Tensor, k: Tensor, v: Tensor, logits: Logits, mask: Tensor | None, positions: Tensor,
    visible: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Textbook attention in float32; see :func:`polarquant_nb.exact_attention.attend_exact`.

    Parameters
    ----------
    q : torch.Tensor of float32, shape ``(batch, num_kv_heads, group, q_len, head_dim)``
        Queries.
    k, v : torch.Tensor of float32, shape ``(batch, num_kv_heads, tokens, head_dim)``
        Keys and values.
    logits : Logits
        Scale and softcap.
    mask : torch.Tensor of float32, optional
        Four axes, batch, num_heads, q_len and tokens, the first three maybe of length 1.
    positions : torch.Tensor of int64, shape ``(tokens,)``
        Places of the tokens within their row.
    visible : torch.Tensor of int64, shape ``(q_len,)``, optional
        How many places each query sees; all of them by default.

    Returns
    -------
    out : torch.Tensor of float32, shape ``(batch, num_kv_heads, group, q_len, value_head_dim)``
        Zeros for a query that sees nothing.
    lse : torch.Tensor of float32, shape ``(batch, num_kv_heads, group, q_len)``
        Natural logarithms; −inf for a query that sees nothing.
    """
    import torch

    batch, kv_heads, group, q_len, _ = q.shape
    tokens = k.shape[2]
    if not tokens:
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        return out, q.new_full(q.shape[:-1], -torch.inf)
    if mask is not None and mask.shape[1] > 1:
        mask = mask.reshape(mask.shape[0], kv_heads, group, *mask.shape[2:])
    elif mask is not None:
        mask = mask[:, :, None]
    step = max(1, SCORES // max(1, batch * kv_heads * group * tokens))
    parts = []
    for first in range(0, max(1, q_len), step):
        here = slice(first, min(first + step, q_len))
        scaled = (q[..., here, :] * (logits.scale * LOG2_E)).flatten(2, 3)
        scores = scaled @ k.transpose(-1, -2)
        if logits.softcap:
            cap = logits.softcap * LOG2_E
            scores = cap * torch.tanh(scores / cap)
        scores = scores.unflatten(2, (group, -1))
        if mask is not None:
            scores = scores + (mask[..., here, :] if mask.shape[3] > 1 else mask) * LOG2_E
        if visible is not None:
            scores = scores.masked_fill(positions >= visible[here, None], -torch.inf)
        top = scores.amax(-1, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0)  # sees nothing: any finite number will do
        weights = torch.exp2(scores - top)
        total = weights.sum(-1, keepdim=True)
        lse = ((top + torch.log2(total)) / LOG2_E)[..., 0]
        sums = (weights.flatten(2, 3) @ v).unflatten(2, (group, -1))
        parts.append((sums / total.masked_fill(total == 0, 1), lse))
    if len(parts) == 1:
        return parts[0]
    outs, sizes = zip(*parts, strict=True)
    return torch.cat(outs, 3), torch.cat(sizes, 3)


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of tokens; see :func:`polarquant_nb.exact_attention.merge`.

    Parameters
    ----------
    a, b : tuple of two torch.Tensors of float32, shapes ``(..., head_dim)`` and ``(...)``
        Results and their log-sum-exp, −inf where a query saw nothing.

    Returns
    -------
    out, lse : torch.Tensor of float32
        Likewise, of both together.
    """
    import torch

    (out_a, lse_a), (out_b, lse_b) = a, b
    share = 1 / (1 + torch.exp(lse_b - lse_a))  # of the first set in all weights
    share = share.nan_to_num(0.0)[..., None]  # both saw nothing, or are NaN themselves
    return out_a * share + out_b * (1 - share), torch.logaddexp(lse_a, lse_b)
