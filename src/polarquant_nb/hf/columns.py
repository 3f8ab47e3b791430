"""Which columns of a model's masks are tokens that a cache holds, and what masks say of them.

transformers counts padding as tokens: a mask has a column for every position of the batch.
:class:`~polarquant_nb.KVCache` holds no padding, so a row of it is shorter than its mask, and
masks have to be read before tokens can be appended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar
from weakref import ref

import torch

from polarquant_nb.gpu_arrays import on_gpu

__all__ = ["Columns", "leading_padding", "token_mask"]

Tensor = torch.Tensor
Result = TypeVar("Result")


@dataclass(frozen=True)
class Columns:
    """Positions of a batch, and which of them are padding.

    Parameters
    ----------
    length : int
        Positions, padding included.
    padding : tuple of (int, tuple of int)
        Where appended tokens begin with padding: the position of the first, and how many there are
        in each row.
    """

    length: int = 0
    padding: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def appended(self, n: int, counts: tuple[int, ...] | None) -> Columns:
        """With ``n`` more positions, of which the first ``counts`` are padding.

        Parameters
        ----------
        n : int
            Positions.
        counts : tuple of int, optional
            Padding of each row; none by default.

        Returns
        -------
        Columns
            The next ones.
        """
        more = () if counts is None else ((self.length, counts),)
        return Columns(self.length + n, self.padding + more)

    def cropped(self, length: int) -> Columns:
        """The first ``length`` positions.

        Parameters
        ----------
        length : int
            At most as many as there are.

        Returns
        -------
        Columns
            The next ones.
        """
        return _columns(
            length,
            (
                (first, tuple(min(count, length - first) for count in counts))
                for first, counts in self.padding
                if first < length
            ),
        )

    def select(self, rows: Sequence[int]) -> Columns:
        """Those of some rows.

        Parameters
        ----------
        rows : sequence of int
            Rows.

        Returns
        -------
        Columns
            The next ones.
        """
        return _columns(
            self.length,
            ((first, tuple(counts[row] for row in rows)) for first, counts in self.padding),
        )

    def tokens(self, batch: int) -> list[int]:
        """How many positions of each row are tokens.

        Parameters
        ----------
        batch : int
            Rows.

        Returns
        -------
        list of int
            Numbers.
        """
        return [self.length - sum(counts[b] for _, counts in self.padding) for b in range(batch)]

    def are_tokens(self, batch: int) -> Tensor:
        """Which positions are tokens.

        Parameters
        ----------
        batch : int
            Rows.

        Returns
        -------
        torch.Tensor of bool, shape ``(batch, length)``
            False for padding.
        """
        tokens = torch.ones(batch, self.length, dtype=torch.bool)
        for first, counts in self.padding:
            for row, count in enumerate(counts):
                tokens[row, first : first + count] = False
        return tokens

    def columns_of_tokens(self, mask: Tensor, batch: int) -> Tensor:
        """The columns of a mask that are tokens; those of a shorter row come last.

        Parameters
        ----------
        mask : torch.Tensor, shape ``(batch or 1, heads or 1, n, length)``
            Any mask.
        batch : int
            Rows.

        Returns
        -------
        torch.Tensor, shape ``(batch or 1, heads or 1, n, seq_len)``
            ``mask`` itself if there is no padding.
        """
        if not self.padding:
            return mask
        tokens = self.are_tokens(batch)
        seq_len = int(tokens.sum(1).max())
        out = mask.new_zeros(batch, *mask.shape[1:3], seq_len)
        for row, where in enumerate(tokens):
            mine = mask[row if len(mask) > 1 else 0][..., where]
            out[row, ..., seq_len - mine.shape[-1] :] = mine
        return out

    def spread(self, x: Tensor) -> Tensor:
        """Vectors of tokens at their positions, with zeros for padding.

        Parameters
        ----------
        x : torch.Tensor, shape ``(batch, num_kv_heads, seq_len, head_dim)``
            Vectors, as :meth:`KVCache.decode` returns them.

        Returns
        -------
        torch.Tensor, shape ``(batch, num_kv_heads, length, head_dim)``
            ``x`` itself if there is no padding.
        """
        if not self.padding:
            return x
        out = x.new_zeros(*x.shape[:2], self.length, x.shape[3])
        for row, where in enumerate(self.are_tokens(len(x))):
            out[row, :, where] = x[row, :, x.shape[2] - int(where.sum()) :]
        return out


def _remember_last(function: Callable[..., Result]) -> Callable[..., Result]:
    """Keep the last result of a function whose first argument is a mask.

    Every layer is given the same mask.

    Parameters
    ----------
    function : callable
        Takes a mask, and what can be compared.

    Returns
    -------
    callable
        The same function.
    """
    last: list[tuple[ref[Tensor], tuple[Any, ...], Result]] = []

    @wraps(function)
    def remembering(mask: Tensor, *arguments: Any) -> Result:
        if mask.is_inference():  # there is no telling whether it was written to
            return function(mask, *arguments)
        given = mask._version, *arguments
        for mask_was, given_then, result in last:
            if mask_was() is mask and given_then == given:
                return result
        result = function(mask, *arguments)
        last[:] = [(ref(mask, lambda _: last.clear()), given, result)]
        return result

    return remembering


@_remember_last
def leading_padding(mask: Tensor, length: int, batch: int) -> tuple[int, ...]:
    """How many of the new positions of each row are padding, from the first on.

    Padding are first new positions that no query attends to.  Others that are hidden become tokens,
    which the mask goes on hiding; on a GPU so does a position that comes alone, as its mask is not
    waited for.

    Parameters
    ----------
    mask : torch.Tensor of bool or float, shape ``(batch or 1, heads or 1, n, kv_len)``
        Of the queries of ``n`` new positions: True where they may attend, or numbers that are added
        to logits.  Columns beyond the positions are ignored.
    length : int
        Positions, the new ones included.
    batch : int
        Rows.

    Returns
    -------
    tuple of int
        One number for each row.

    Raises
    ------
    ValueError
        If the mask does not have this shape.
    """
    shown = _shown(mask, length)
    if mask.shape[2] == 1 and on_gpu(mask):  # no step of one token waits for a GPU
        return (0,) * batch
    hidden = ~shown[..., length - mask.shape[2] :].any(1).expand(batch, -1)
    return tuple(hidden.long().cumprod(1).sum(1).tolist())


@_remember_last
def token_mask(mask: Tensor, columns: Columns, batch: int) -> tuple[Tensor | None, bool]:
    """The mask of the last positions as :meth:`KVCache.attend` takes it.

    Parameters
    ----------
    mask : torch.Tensor of bool or float, shape ``(batch or 1, heads or 1, n, kv_len)``
        As above.
    columns : Columns
        All positions.
    batch : int
        Rows.

    Returns
    -------
    mask : torch.Tensor or None
        Columns of tokens alone; None if it says nothing but what is causal.
    is_causal : bool
        False if a query may attend to a token after it.

    Raises
    ------
    ValueError
        If the mask does not have this shape, or shows padding.
    """
    n, length = mask.shape[2], columns.length
    shown = _shown(mask, length).expand(batch, -1, -1)
    tokens = columns.are_tokens(batch).to(mask.device)
    causal = torch.ones(n, length, dtype=torch.bool, device=mask.device).tril(length - n)
    # queries at padding are nobody's: what they see does not matter
    asking = tokens[:, length - n :, None]
    plain = causal & tokens[:, None]
    faults = shown & ~tokens[:, None], shown & ~causal & asking, (shown ^ plain) & asking
    # together, so that a GPU is waited for once
    shows_padding, sees_ahead, hides_more = torch.stack([f.any() for f in faults]).tolist()
    if shows_padding:
        raise ValueError(
            "the mask shows positions that were padding when they came; padding is not stored"
        )
    mask = mask[..., :length]
    if mask.dtype == torch.bool and mask.shape[1] == 1 and not hides_more:
        return None, True
    return columns.columns_of_tokens(mask, batch), not sees_ahead


def _shown(mask: Tensor, length: int) -> Tensor:
    """Where any head may attend, ``(batch or 1, n, length)``."""
    if mask.ndim != 4 or mask.shape[3] < length:
        raise ValueError(
            f"the mask has shape {tuple(mask.shape)}; it must be (batch, heads, q_len, {length}), "
            "as the cache holds so many positions, padding included"
        )
    mask = mask[..., :length]
    return (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min).any(1)


def _columns(length: int, padding: Iterable[tuple[int, tuple[int, ...]]]) -> Columns:
    return Columns(length, tuple((first, counts) for first, counts in padding if any(counts)))
