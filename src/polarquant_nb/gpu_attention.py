"""Attention over pages on a GPU: few queries on the codes, many by decoding page groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from polarquant_nb.arrays import torch_name
from polarquant_nb.gpu_bias import BiasLogits
from polarquant_nb.gpu_codec import (
    DeviceRows,
    Launcher,
    Tables,
    decode_rows,
    launcher,
    program_for,
    simulated_threads,
    tables,
)
from polarquant_nb.gpu_exact import SCORES
from polarquant_nb.kernels.attention_cpu import LOG2_E
from polarquant_nb.layout import PAGE
from polarquant_nb.preconditioning import rotary_bias

if TYPE_CHECKING:
    from polarquant_nb.queries import Logits

__all__ = ["FEW_QUERIES", "attend_rows"]

Tensor = Any

FEW_QUERIES = 64
"""With more queries to a kv head, decoding pages and multiplying matrices is faster."""

_BLOCKS_PER_PROCESSOR = 4
"""Blocks of 128 threads and 128 registers that a multiprocessor holds."""

_PREFILL_TOKENS = 2048
"""Tokens decoded at a time."""


def attend_rows(
    q: Tensor, keys: DeviceRows, values: DeviceRows, logits: Logits, mask: Tensor | None,
    causal: int, *, longest: int, dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention over pages; arguments are not checked.

    Parameters
    ----------
    q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries, of any strides; float16, bfloat16 or float32.
    keys, values : DeviceRows
        Rows are batch elements and kv heads; values without a bias.
    logits : Logits
        Scale and softcap.
    mask : torch.Tensor of float32, optional
        Of four axes, each as long as in ``(batch, num_heads, q_len, tokens)`` or 1: numbers added
        to the logits.
    causal : int
        0 if queries see all tokens.  1 if they are the last tokens of their rows; more if every row
        has more tokens after its pages: how many, and 1.
    longest : int
        Tokens of the longest row.
    dtype : torch.dtype, optional
        Of the result, float32 or the queries'; the latter by default.

    Returns
    -------
    out : torch.Tensor, shape ``(batch, num_heads, q_len, value_head_dim)``
        Zeros for a query that sees nothing.
    lse : torch.Tensor of float32, shape ``(batch, num_heads, q_len)``
        Natural logarithm of each query's sum of exponentials; −inf if it sees nothing.
    """
    batch, heads, q_len, _ = q.shape
    rows, dtype = keys.starts.shape[0], dtype or q.dtype
    if not q.numel() or not longest:
        out = q.new_zeros((*q.shape[:-1], values.format.head_dim), dtype=dtype)
        return out, q.new_full(q.shape[:-1], -float("inf"), dtype=_torch(q).float32)
    per_row = batch * heads * q_len // rows
    rotary = rotary_bias(keys.preconditioner)
    # decoded keys have their bias again, to which a soft cap applies as to all of the logit
    if per_row > FEW_QUERIES or (rotary is not None and logits.softcap):
        out, lse = _by_page_groups(q, keys, values, logits, mask, causal, longest)
        return out.to(dtype), lse
    key = id(values), per_row, q.dtype, dtype, longest
    plan = keys.prepared.get(key)
    if plan is None or plan.values() is not values:
        plan = keys.prepared[key] = _Plan.make(q, keys, values, per_row, longest, dtype)
    return plan.run(q, keys, values, logits, mask, causal)


def _torch(tensor: Tensor) -> Any:
    import torch

    return torch


@dataclass(eq=False)
class _Plan:
    """Three launches, or four, for calls that differ in the queries' numbers only.

    The keys hold on to it, so it must not hold on to them, or to values that may be the same:
    a cycle keeps their memory from torch until Python looks for cycles.
    """

    here: Launcher
    values: ref[DeviceRows]
    k_tables: Tables
    v_tables: Tables
    rotate: Any
    attend: Any
    merge: Any
    dtype: Any
    per_row: int
    group: int
    groups: int
    ranges: int
    range_pages: int
    longest: int
    addresses: tuple[tuple[Any, ...], ...]
    bias: BiasLogits | None

    @staticmethod
    def make(
        q: Tensor, keys: DeviceRows, values: DeviceRows, per_row: int, longest: int, dtype: Any
    ) -> _Plan:  # fmt: skip
        from polarquant_nb.kernels.cuda_attention import query_group
        from polarquant_nb.kernels.cuda_compile import program_of

        here = launcher(q.device)
        k, v = (program_for(side.format, side.codebooks) for side in (keys, values))
        threads = {"threads": simulated_threads(k, v)} if here.simulated else {}
        group = query_group(k, v, per_row, **threads)
        groups = -(-per_row // group)
        pages, items = -(-longest // PAGE), keys.starts.shape[0] * groups
        wanted = max(1, _BLOCKS_PER_PROCESSOR * here.processors // items)
        range_pages = -(-pages // min(wanted, pages))
        element, result = torch_name(q.dtype), torch_name(dtype)
        rotary = rotary_bias(keys.preconditioner)
        k_tables, v_tables = (
            tables(s.format, s.codebooks, q.device, s.preconditioner, inverse=True)
            for s in (keys, values)
        )
        address = here.address
        # the rotations' kernels do not depend on the bits
        return _Plan(
            here, ref(values), k_tables, v_tables,
            here.kernel("rotate", program_of(keys.format, bare=True), element),
            here.kernel("attend", k, values=v, group=group),
            here.kernel("merge", program_of(values.format, bare=True), result, group=group),
            dtype, per_row, group, groups, -(-pages // range_pages), range_pages, longest,
            (
                tuple(map(address, (k_tables.signs, k_tables.order, k_tables.mix, k_tables.dense))),
                (*map(address, (keys.words, keys.starts, k_tables.cosines, values.words,
                                values.starts, v_tables.cosines, keys.lengths)),),
                (*map(address, (v_tables.signs, v_tables.inverse_order, v_tables.mix,
                                v_tables.back)),),
            ),
            None if rotary is None else BiasLogits.make(q, keys, rotary, per_row, group, pages),
        )  # fmt: skip

    def run(
        self, q: Tensor, keys: DeviceRows, values: DeviceRows, logits: Logits,
        mask: Tensor | None, causal: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        batch, heads, q_len, d = q.shape
        rows, width = keys.starts.shape[0], values.format.head_dim
        if self.bias is not None:
            logits_of_bias = self.bias.run(q, logits.scale)
            if mask is not None:
                logits_of_bias[..., : self.longest].add_(mask)
            mask = logits_of_bias
        num_queries, vectors = batch * heads * q_len, rows * self.groups * self.ranges * self.group
        float32 = self.k_tables.cosines.dtype
        # one piece of scratch: rotated queries, and what each range gives
        scratch = q.new_empty(num_queries * d + vectors * (width + 2), dtype=float32)
        out = q.new_empty((batch, heads, q_len, width), dtype=self.dtype)
        lse = q.new_empty((batch, heads, q_len), dtype=float32)
        address = self.here.address
        if self.here.simulated:
            sizes = (num_queries * d, vectors * width, vectors, vectors)
            rotated, outs, tops, totals = map(address, scratch.split(sizes))
        else:
            rotated = scratch.data_ptr()
            outs = rotated + 4 * num_queries * d
            tops = outs + 4 * vectors * width
            totals = tops + 4 * vectors
        rotation, pages, back = self.addresses
        k_columns, v_columns = keys.starts.shape[1], values.starts.shape[1]
        bias: Tensor = lse  # any address, if there is none
        bias_strides: tuple[int, ...] = (0, 0, 0, 0)
        if mask is not None:
            bias = mask
            bias_strides = tuple(
                s if n > 1 else 0 for n, s in zip(mask.shape, mask.stride(), strict=True)
            )
        with self.here.active():
            stream = self.here.stream()
            blocks = num_queries, 1
            self.rotate.launch(
                blocks, stream, address(q), rotated, *rotation, logits.scale * LOG2_E, heads, q_len,
                self.per_row, self.k_tables.heads, *q.stride(),
            )  # fmt: skip
            self.attend.launch(
                (rows * self.groups, self.ranges), stream, rotated, *pages, address(bias), outs,
                tops, totals, self.per_row, self.groups, k_columns, v_columns, self.range_pages,
                logits.softcap * LOG2_E, rows // batch, q_len, int(mask is not None),
                *bias_strides, causal,
            )  # fmt: skip
            self.merge.launch(
                blocks, stream, outs, tops, totals, address(out), address(lse), *back,
                self.per_row, self.groups, self.ranges, self.v_tables.heads,
            )  # fmt: skip
        return out, lse


# ---- many queries: by page groups ----------------------------------------------------------------


def _by_page_groups(
    q: Tensor, keys: DeviceRows, values: DeviceRows, logits: Logits, mask: Tensor | None,
    causal: int, length: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Flash attention: decode tokens, multiply matrices, rescale what was added up."""
    torch = _torch(q)
    batch, heads, q_len, d = q.shape
    rows, width = keys.starts.shape[0], values.format.head_dim
    # rows, heads that share one, their queries
    scaled = q.float().reshape(rows, -1, q_len, d) * (logits.scale * LOG2_E)
    group = scaled.shape[1]
    cap = logits.softcap * LOG2_E
    out = scaled.new_zeros((rows, group, q_len, width))
    top = scaled.new_full((rows, group, q_len, 1), -float("inf"))
    total = scaled.new_zeros((rows, group, q_len, 1))
    lengths = keys.lengths[:, None, None, None]
    place = torch.arange(1 - q_len, 1, device=q.device)[:, None]
    last = lengths + place + (causal - 2)  # token that each query sees, if causal
    step = max(1, SCORES // (rows * group * min(length, _PREFILL_TOKENS)))
    for start in range(0, length, _PREFILL_TOKENS):
        stop = min(start + _PREFILL_TOKENS, length)
        k = scaled.new_empty((rows, stop - start, d))
        v = scaled.new_empty((rows, stop - start, width))
        decode_rows(keys, start, stop, k)
        decode_rows(values, start, stop, v)
        token = torch.arange(start, stop, device=q.device)
        beyond = token >= lengths if stop > keys.shortest else None
        if beyond is not None:  # what is decoded beyond a row's end is anything
            v = v.masked_fill(beyond[:, 0].transpose(1, 2), 0)
        for first in range(0, q_len, step):
            part = slice(first, min(first + step, q_len))
            scores = scaled[:, :, part].flatten(1, 2) @ k.transpose(1, 2)
            scores = scores.unflatten(1, (group, -1))
            if cap:
                scores = cap * torch.tanh(scores / cap)
            if mask is not None:
                added = mask.expand(batch, heads, q_len, length)[:, :, part, start:stop]
                scores = scores + added.reshape(scores.shape) * LOG2_E
            if causal:
                scores = scores.masked_fill(token > last[:, :, part], -float("inf"))
            if beyond is not None:
                scores = scores.masked_fill(beyond, -float("inf"))
            before = top[:, :, part]
            now = torch.maximum(before, scores.amax(-1, keepdim=True))
            base = now.masked_fill(now == -float("inf"), 0.0)
            factor, weights = torch.exp2(before - base), torch.exp2(scores - base)
            total[:, :, part] = total[:, :, part] * factor + weights.sum(-1, keepdim=True)
            sums = (weights.flatten(1, 2) @ v).unflatten(1, (group, -1))
            out[:, :, part] = out[:, :, part] * factor + sums
            top[:, :, part] = now
    lse = (top + torch.log2(total)) / LOG2_E
    out = torch.where(total == 0, 0.0, out / total)
    shape = batch, heads, q_len
    return out.reshape(*shape, width), lse.reshape(shape)
