"""What KVCache does with arrays on a GPU: which vectors it refuses, and attention.

Appending itself is ``cache_state.py``'s, on any device: where tokens go depends on numbers of
tokens alone, which are the CPU's.  Nothing here waits for the GPU but :func:`check_storable`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polarquant_nb import storable
from polarquant_nb.arrays import ArrayKind
from polarquant_nb.cache_state import CacheState, runs
from polarquant_nb.gpu import open_mask
from polarquant_nb.gpu_arrays import as_tensor, give_back, on_gpu, same_device
from polarquant_nb.gpu_attention import FEW_QUERIES, attend_rows
from polarquant_nb.gpu_codec import copied_integers
from polarquant_nb.gpu_exact import add_exact, attend_exact, merge
from polarquant_nb.layout import PAGE
from polarquant_nb.queries import Logits, check_last, check_query_shape

__all__ = ["attend", "check_storable"]

Tensor = Any


def check_storable(state: CacheState, k: Tensor, v: Tensor, padding: Sequence[int]) -> None:
    """Refuse NaN, inf and vectors too long for a float16 radius.

    An append of a page or more waits for the GPU.  Those of fewer tokens are taken as they are, and
    looked at when the first of them go to a page.

    Parameters
    ----------
    state : CacheState
        Before the append.
    k, v : torch.Tensor, shape ``(batch, num_kv_heads, n, head_dim)``
        New keys and values.
    padding : sequence of int
        How many first tokens of each batch row are not looked at.

    Raises
    ------
    ValueError
        If a vector is not finite or too long; the message names the first.
    """
    import torch

    if k.shape[2] < PAGE and not state.makes_pages(k.shape[2], padding):
        return
    sides = (("k", k, state.keys, state.longest_key), ("v", v, state.values, storable.MAX_NORM))
    bad = []
    for _, x, store, longest in sides:
        parts = [x[rows, :, padded:] for rows, (padded,) in runs(padding)]
        parts += [store.exact[rows, :, :n] for rows, (n,) in runs(state.exact)]
        bad += [_too_long(part, longest) for part in parts if part.numel()]
    if not bad or not bool(torch.stack(bad).any()):
        return
    for name, x, store, longest in sides:
        kind = ArrayKind("torch", state.kind.dtype)
        storable.check_storable(store.memory.fetch(x), kind, name, padding, longest)
        for rows, (n,) in runs(state.exact):
            held = store.memory.fetch(store.exact[rows, :, :n])
            what = f"{name} of an earlier append, among the exact tokens of rows from {rows.start},"
            storable.check_storable(held, kind, what, [0] * len(held), longest)


def _too_long(x: Tensor, longest: float) -> Tensor:
    """Whether a vector cannot be stored: 0-d."""
    import torch

    wide = x.float() if x.element_size() == 8 else x
    norms = torch.linalg.vector_norm(wide, dim=-1, dtype=torch.float32)
    return ~(norms.amax() <= longest)  # NaN compares as False


def attend(
    state: CacheState, q: Any, mask: Any, logits: Logits, held: tuple[int, ...], return_lse: bool
) -> Any:
    """Causal attention of the last tokens of each row; see :meth:`KVCache.attend`.

    Parameters
    ----------
    state : CacheState
        Keys and values.
    q, mask
        As the user gave them.
    logits : Logits
        Scale and softcap.
    held : tuple of int
        Shape of the keys, ``(batch, num_kv_heads, seq_len, head_dim)``.
    return_lse : bool
        As there.

    Returns
    -------
    out, or out and lse
        As there.

    Raises
    ------
    TypeError, ValueError
        If queries or mask do not fit, or something is on another device.
    """
    if not on_gpu(q) or state.kind.device is None:
        place = getattr(q, "device", "cpu")
        raise ValueError(f"q is on {place}; the cache holds {state.kind.place}: move it there")
    q, family = as_tensor(q, "q")
    same_device("q", q, state.kind.device, "the cache")
    check_query_shape(tuple(q.shape), held, "the cache")
    check_last(tuple(q.shape), state.seq_len)
    numbers = None if mask is None else open_mask(mask, q, state.seq_len)
    if not q.numel():
        out = q.new_zeros((*q.shape[:-1], state.values.exact.shape[3]))
        lse = q.new_zeros(q.shape[:-1]).float()
    elif numbers is None and q.shape[2] == 1 and q.shape[1] <= state.num_kv_heads * FEW_QUERIES:
        out, lse = _attend_last(state, q, logits)
    else:
        wide = q.float() if q.element_size() == 8 else q
        parts = [_attend_exact(state, wide.float(), logits, numbers)]
        if any(state.packed):
            parts.append(_attend_packed(state, wide, logits, numbers))
        out, lse = parts[0] if len(parts) == 1 else merge(parts[1], parts[0])
        out = out.to(q.dtype)
    out = give_back(out, family)
    return (out, give_back(lse, family)) if return_lse else out


def _attend_last(state: CacheState, q: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
    """Each row's last token to all tokens of its row, which hides none: four launches."""
    others = None
    if any(state.packed):
        import torch

        wide = q.float() if q.element_size() == 8 else q
        others = attend_rows(
            wide, *_rows(state), logits, None, 0,
            longest=max(state.packed), dtype=torch.float32,
        )  # fmt: skip
    return add_exact(state, q, logits, others)


def _attend_exact(
    state: CacheState, q: Tensor, logits: Logits, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Over sinks and recent tokens: rows of equal lengths together."""
    import torch

    keys: Any = state.keys.exact
    values: Any = state.values.exact
    seq_len, sink = state.seq_len, state.settings.sink
    batch, heads, q_len, d = q.shape
    queries = q.reshape(batch, state.num_kv_heads, -1, q_len, d)
    parts = []
    for rows, (exact, packed) in runs(state.exact, state.packed):
        length = exact + packed
        positions = torch.arange(exact, device=q.device)
        positions[sink:] += packed
        part = None
        if mask is not None:
            part = _columns(mask, rows, positions + (seq_len - length), seq_len)
        visible = None
        if q_len > 1:
            visible = torch.arange(length - q_len + 1, length + 1, device=q.device)
        parts.append(attend_exact(
            queries[rows], keys[rows, :, :exact].float(), values[rows, :, :exact].float(), logits,
            part, positions, visible,
        ))  # fmt: skip
    out, lse = parts[0] if len(parts) == 1 else map(torch.cat, zip(*parts, strict=True))
    return out.reshape(batch, heads, q_len, values.shape[3]), lse.reshape(batch, heads, q_len)


def _columns(mask: Tensor, rows: slice, columns: Tensor, seq_len: int) -> Tensor:
    mask = mask.expand(*mask.shape[:3], seq_len)
    return (mask[rows] if len(mask) > 1 else mask)[..., columns]


def _attend_packed(
    state: CacheState, q: Tensor, logits: Logits, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Over pages: all rows at once."""
    import torch

    sink, q_len, longest = state.settings.sink, q.shape[2], max(state.packed)
    causal, hidden = 0, None
    if min(state.exact) < sink + q_len:  # not all pages are in the past
        recent = [n - sink for n in state.exact]  # of rows with pages, which have all sinks
        if len({n for n, p in zip(recent, state.packed, strict=True) if p}) == 1:
            causal = 1 + max(n for n, p in zip(recent, state.packed, strict=True) if p)
        else:
            last = tuple(map(sum, zip(recent, state.packed, strict=True)))
            ends = copied_integers(last, q.device)[:, None, None, None]
            place = torch.arange(1 - q_len, 1, device=q.device)[:, None]
            token = torch.arange(longest, device=q.device)
            hidden = torch.where(token >= ends + place, -torch.inf, 0.0)
    if mask is not None:
        mask = _packed_columns(state, mask, longest)
    if hidden is not None:
        mask = hidden if mask is None else mask + hidden
    return attend_rows(
        q, *_rows(state), logits, mask, causal, longest=longest, dtype=torch.float32
    )  # fmt: skip


def _rows(state: CacheState) -> tuple[Any, Any]:
    """Keys' and values' pages."""
    return state.keys.table.rows, state.values.table.rows


def _packed_columns(state: CacheState, mask: Tensor, longest: int) -> Tensor:
    """The columns of a mask that are tokens in pages, row by row; anything beyond a row's end."""
    if mask.shape[3] == 1:
        return mask
    seq_len, sink = state.seq_len, state.settings.sink
    firsts = [seq_len - max(0, length - sink) for length in state.lengths]
    if len(set(firsts)) == 1:
        return mask[..., firsts[0] : firsts[0] + longest]
    import torch

    token = torch.arange(longest, device=mask.device)
    columns = copied_integers(tuple(firsts), mask.device)[:, None] + token
    columns = columns.clamp(max=seq_len - 1)[:, None, None]
    shape = len(firsts), *mask.shape[1:3]
    return mask.expand(*shape, seq_len).gather(3, columns.expand(*shape, longest))
