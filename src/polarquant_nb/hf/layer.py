"""PolarLayer: one layer of a PolarCache."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from polarquant_nb.arrays import open_integers
from polarquant_nb.budgets import preset
from polarquant_nb.cache import KVCache
from polarquant_nb.formats import FormatPair
from polarquant_nb.gpu_arrays import on_gpu
from polarquant_nb.hf.chunks import attend_chunk
from polarquant_nb.hf.columns import Columns, leading_padding, token_mask
from polarquant_nb.hf.handle import Counts, Handle, HandlePair
from polarquant_nb.hf.heap import give_back_at_times
from polarquant_nb.hf.versions import query_length, tokens_to_remove
from polarquant_nb.online import OnlinePreconditioner

__all__ = ["PolarLayer"]

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_MANY = 1024
"""Tokens from which on a part of a prompt leaves large holes in memory."""


class PolarLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """The keys and values of a layer in a :class:`KVCache`.

    New tokens wait, exact, until attention has told which of them are padding; at the latest until
    something else is done with the layer, which takes all of them as tokens.

    Parameters
    ----------
    formats : str or FormatPair
        Formats, or the name of a preset.
    options : dict
        What else the :class:`KVCache` is made with.
    counts : Counts
        Of the whole cache.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    def __init__(self, formats: str | FormatPair, options: dict[str, Any], counts: Counts) -> None:
        self.formats, self.options, self.counts = formats, options, counts
        self._cache: KVCache | None = None
        self._columns = Columns()
        self._waiting: Pair | None = None
        self._changes = 0
        # batch, kv heads, head_dim of keys and values; and their dtypes
        self._held: tuple[int, int, int, int] | None = None
        self._dtypes: tuple[torch.dtype, ...] = ()
        self._device = torch.device("cpu")

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def cache(self) -> KVCache | None:
        """What holds the tokens; None before there are any."""
        self.settle()
        return self._cache

    @property
    def is_initialized(self) -> bool:  # type: ignore[override]
        """Whether there were tokens since the last reset."""
        return self._cache is not None or self._waiting is not None

    @property
    def keys(self) -> Tensor | None:  # type: ignore[override]
        """Stands for the keys, ``(batch, num_kv_heads, length, head_dim)``; decoded when used."""
        return self._handles(None, None)[0] if self.cache else None

    @property
    def values(self) -> Tensor | None:  # type: ignore[override]
        """Stands for the values; decoded when used."""
        return self._handles(None, None)[1] if self.cache else None

    def get_seq_length(self) -> int:
        """Positions, padding included."""
        return self._columns.length + (self._waiting[0].shape[2] if self._waiting else 0)

    def get_mask_sizes(self, query_length_or_positions: Any) -> tuple[int, int]:
        """Columns of the next mask, and the position of the first.

        Parameters
        ----------
        query_length_or_positions : int or torch.Tensor
            See :func:`polarquant_nb.hf.versions.query_length`.

        Returns
        -------
        kv_length, offset : int
            The offset is 0.
        """
        return self.get_seq_length() + query_length(query_length_or_positions), 0

    def get_max_length(self) -> int:
        """−1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # up to 5.14

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.cache.nbytes if self.cache else 0

    def __repr__(self) -> str:
        formats = self.formats if isinstance(self.formats, str) else "formats of its own"
        return f"PolarLayer({formats}, {self.get_seq_length()} positions)"

    # ---- new tokens ------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make the KVCache.

        Parameters
        ----------
        key_states, value_states : torch.Tensor
            Tell head_dim.

        Raises
        ------
        ValueError
            If the head_dim is not supported, or not that of the formats.
        """
        self._cache = self._new_cache(key_states, value_states)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take new tokens.

        Parameters
        ----------
        key_states, value_states : torch.Tensor, shape ``(batch, num_kv_heads, n, head_dim)``
            Keys and values.
        *args, **kwargs : Any
            Ignored.

        Returns
        -------
        keys, values : Handle
            Stand for all keys and values.

        Raises
        ------
        TypeError
            If the tensors are neither on the CPU nor on an NVIDIA GPU, or not both on one.
        ValueError
            If they are those of another batch or model.
        """
        self.settle()
        batch, heads, _, head_dim = key_states.shape
        held = batch, heads, head_dim, value_states.shape[3]
        device = key_states.device
        if device.type not in ("cpu", "cuda") or value_states.device != device:
            raise TypeError(
                f"keys are on {device} and values on {value_states.device}; PolarCache supports "
                'models on the CPU and on NVIDIA GPUs: model.to("cpu")'
            )
        if self.is_initialized and self._held is not None and self._held != held:
            raise ValueError(
                f"keys have shape {tuple(key_states.shape)} and values "
                f"{tuple(value_states.shape)}; this cache holds {self._held[0]} rows, "
                f"{self._held[1]} kv heads, head_dim {self._held[2]} and {self._held[3]}: it is "
                "that of another batch or another model.  Make a new PolarCache for each, or "
                "reset() it"
            )
        first = self._columns.length == 0
        self._held, self._dtypes = held, (key_states.dtype, value_states.dtype)
        self._device = device
        self._waiting = key_states.detach(), value_states.detach()
        self._changes += 1
        if self._is_step and self._cache is not None and self._cache._step is not None:
            self._cache._step.announce()  # attention comes next
        return self._handles(*((key_states, value_states) if first else (None, None)))

    def settle(self, mask: Tensor | None = None, q: Tensor | None = None) -> None:
        """Append what waits, if anything does.

        Parameters
        ----------
        mask : torch.Tensor, optional
            Mask of the queries of these tokens, which tells padding; without it there is none.
        q : torch.Tensor, optional
            These queries, which an OnlinePreconditioner wants.

        Raises
        ------
        ValueError
            If queries are wanted and not there, the mask has another shape, or the tokens cannot be
            stored.
        """
        if self._waiting is None:
            return
        padding = self._padding(mask)
        k, v = self._waiting
        cache = self._cache or self._new_cache(k, v)
        is_online = isinstance(self.options.get("preconditioner"), OnlinePreconditioner)
        wants_queries = is_online and cache.wants_queries
        if q is None and wants_queries:
            raise ValueError(
                "a PolarCache with an OnlinePreconditioner needs the queries of its first tokens, "
                "which attention gives it after polarquant_nb.hf.enable(model)"
            )
        self._waiting = None
        cache.append(k, v, padding, q=q if wants_queries else None)
        self._cache, self._columns = cache, self._columns.appended(k.shape[2], padding)
        if k.shape[2] >= _MANY and not on_gpu(k):
            give_back_at_times()

    def attend(
        self,
        q: Tensor,
        mask: Tensor | None,
        scale: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor | None:
        """Append what waits, and attend on the codes.

        New tokens, of which there are more than stay exact, attend to one another before they are
        appended.

        Parameters
        ----------
        q : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
            Queries of the last positions.
        mask : torch.Tensor, optional
            See :func:`polarquant_nb.hf.columns.token_mask`.
        scale, softcap
            See :meth:`KVCache.attend`.
        sinks : torch.Tensor of shape ``(num_heads,)``, optional
            One more logit for every query of each head, without a value.

        Returns
        -------
        torch.Tensor of shape ``(batch, num_heads, q_len, value_head_dim)``, or None
            None if a query may attend to a token after it: codes cannot do that, and nothing has
            been appended.
        """
        padding = self._padding(mask)
        columns = self._columns
        if self._waiting is not None:
            columns = columns.appended(self._waiting[0].shape[2], padding)
        shown, is_causal = (None, True)
        if mask is not None:
            shown, is_causal = token_mask(mask, columns, q.shape[0])
        if not is_causal:
            return None
        if shown is None and padding is None and sinks is None and self._is_step:
            return self._step(q, scale, softcap, columns)
        if self._waiting is not None and self._is_long:
            out, lse = self._attend_before_append(
                q, None if shown is None else mask, padding, scale, softcap
            )
            self.settle(mask, q)
        else:
            self.settle(mask, q)
            assert self._cache is not None
            attend, lse = partial(self._cache.attend, q, shown, scale=scale, softcap=softcap), None
            if sinks is None:
                out = attend()
            else:
                out, lse = attend(return_lse=True)
        self.counts.coded += 1
        if sinks is not None:
            assert lse is not None
            out = out * torch.sigmoid(lse - sinks[None, :, None])[..., None].to(out.dtype)
        return out

    def decode(self, mask: Tensor | None = None, q: Tensor | None = None) -> Pair:
        """Append what waits, and return all keys and values: as long as the cache.

        New tokens, of which there are more than stay exact, are returned exact.

        Parameters
        ----------
        mask, q
            As for :meth:`settle`.

        Returns
        -------
        k, v : torch.Tensor, shape ``(batch, num_kv_heads, length, head_dim)``
            Of the dtype that was appended; anything for padding.
        """
        self.counts.decoded += 1
        new = self._waiting if self._is_long else None
        if new is None:
            self.settle(mask, q)
        assert self._cache is not None
        k, v = map(self._columns.spread, self._cache.decode())
        if new is None:
            return k, v
        self.settle(mask, q)
        return torch.cat([k, new[0]], 2), torch.cat([v, new[1]], 2)

    # ---- what changes it otherwise ---------------------------------------------------------------

    def crop(self, tokens_to_remove_or_keep: int) -> None:
        """Remove last positions of every row.

        Parameters
        ----------
        tokens_to_remove_or_keep : int
            See :func:`polarquant_nb.hf.versions.tokens_to_remove`.

        Raises
        ------
        ValueError
            As there.
        """
        length = self.get_seq_length()
        less = tokens_to_remove(tokens_to_remove_or_keep, length)
        cache = self.cache
        if cache is not None and less:
            self._columns = self._columns.cropped(length - less)
            cache.crop(self._columns.tokens(cache.batch_size))
            self._changes += 1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows in another order; see :meth:`batch_select_indices`.

        Parameters
        ----------
        beam_idx : torch.Tensor of int64
            Rows.
        """
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take some rows.

        Parameters
        ----------
        indices : torch.Tensor of int64 or bool
            Rows, or which of them.
        """
        cache = self.cache
        if cache is not None:
            is_mask = getattr(indices, "dtype", None) == torch.bool
            rows = open_integers(indices.nonzero()[:, 0] if is_mask else indices, "indices")
            cache.select(rows)
            assert self._held is not None
            self._held = len(rows), *self._held[1:]
            self._columns = self._columns.select(rows)
            self._changes += 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each row several times, one after another.

        Parameters
        ----------
        repeats : int
            How often.
        """
        cache = self.cache
        if cache is not None:
            rows = [row for row in range(cache.batch_size) for _ in range(repeats)]
            self.batch_select_indices(torch.tensor(rows))

    def reset(self) -> None:
        """Forget everything, batch and dtype included."""
        self._cache, self._columns, self._waiting, self._held = None, Columns(), None, None
        self._changes += 1

    def to(self, device: Any) -> None:
        """Move the tokens.

        Parameters
        ----------
        device : str or torch.device
            See :meth:`KVCache.to`.
        """
        cache = self.cache
        if cache is not None:
            self._cache, self._device = cache.to(device), torch.empty(0, device=device).device
            self._changes += 1

    def offload(self) -> None:
        """Nothing: the cache is small, and where its layer is."""

    def prefetch(self) -> None:
        """Nothing: attention runs where the cache is."""

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        return dict(self.__dict__)

    # ---- helpers ---------------------------------------------------------------------------------

    def _new_cache(self, k: Tensor, v: Tensor) -> KVCache:
        formats = self.formats
        if isinstance(formats, str):
            formats = preset(formats, k.shape[-1], value_head_dim=v.shape[-1])
        return KVCache(formats, **self.options)

    def _padding(self, mask: Tensor | None) -> tuple[int, ...] | None:
        """Padding among what waits."""
        if mask is None or self._waiting is None:
            return None
        counts = leading_padding(mask, self.get_seq_length(), self._waiting[0].shape[0])
        return counts if any(counts) else None

    @property
    def _is_step(self) -> bool:
        """Whether one token waits behind others."""
        waiting = self._waiting
        return waiting is not None and waiting[0].shape[2] == 1 and self._cache is not None

    def _step(
        self, q: Tensor, scale: float | None, softcap: float | None, columns: Columns
    ) -> Tensor:
        """Append a token, and attend to all of its row: what most calls do."""
        assert self._cache is not None
        assert self._waiting is not None
        (k, v), self._waiting = self._waiting, None
        out: Tensor = self._cache.step(q, k, v, scale=scale, softcap=softcap)
        self._columns = columns
        self.counts.coded += 1
        return out

    @property
    def _is_long(self) -> bool:
        """Whether more tokens wait than stay exact, behind others."""
        if self._waiting is None or not self._columns.length:
            return False
        return bool(self._waiting[0].shape[2] > self.options["recent"])

    def _attend_before_append(
        self,
        q: Tensor,
        mask: Tensor | None,
        padding: tuple[int, ...] | None,
        scale: float | None,
        softcap: float | None,
    ) -> Pair:
        assert self._cache is not None
        assert self._waiting is not None
        k, v = self._waiting
        held = new = None
        if mask is not None:
            length = self._columns.length
            held = self._columns.columns_of_tokens(mask[..., :length], len(k))
            new = mask[..., length : length + k.shape[2]]
        elif padding is not None:
            first = torch.tensor(padding, device=k.device)[:, None, None, None]
            new = torch.arange(k.shape[2], device=k.device) >= first
        return attend_chunk(self._cache, q, k, v, held, new, scale, softcap)

    def _handles(self, k: Tensor | None, v: Tensor | None) -> tuple[Handle, Handle]:
        assert self._held is not None
        batch, heads, k_dim, v_dim = self._held
        shape, pair = (batch, heads, self.get_seq_length()), HandlePair(self, self._changes)
        return (
            Handle(pair, 0, (*shape, k_dim), self._dtypes[0], self._device, k),
            Handle(pair, 1, (*shape, v_dim), self._dtypes[1], self._device, v),
        )
