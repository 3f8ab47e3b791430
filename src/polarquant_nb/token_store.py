"""TokenStore: the keys, or the values, of a cache: first and last tokens exact, the rest in pages.

A batch row is ``sinks | pages | recent``.  Its sinks and recent tokens are neighbours in one
buffer, so that the exact tokens of a row are the first slots of that buffer, however many there
are: there is no recent token before there are all sinks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.memory import Memory, memory_of
from polarquant_nb.page_table import Block, PageTable
from polarquant_nb.preconditioning import Preconditioner

__all__ = ["Placement", "TokenStore", "most_exact"]

Array = npt.NDArray[Any]

_SLOTS = 16
"""Slots that the buffer grows by: a copy for so many appends of a token, and as few unused."""


class Placement(NamedTuple):
    """Where the tokens of an append go, for rows that hold equally many tokens.

    Parameters
    ----------
    rows : slice
        The batch rows.
    new : int
        Tokens to append; each row's last ones of the append, the ones before are padding.
    exact, packed : int
        Tokens that each row holds, exact and in pages.
    sink : int
        Of the cache.
    sinks : int
        New tokens that become sinks.
    held : int
        Recent tokens that are there already: the head of what follows the pages.
    free : int
        Free lanes of a partial last page.
    moved : int
        Tokens, oldest first, that go to pages.
    """

    rows: slice
    new: int
    exact: int
    packed: int
    sink: int
    sinks: int
    held: int
    free: int
    moved: int

    @staticmethod
    def of(
        rows: slice, new: int, exact: int, packed: int, sink: int, recent: int
    ) -> Placement:  # fmt: skip
        """Fill the sinks, then move as many whole pages as leave ``recent`` tokens.

        Parameters
        ----------
        rows, new, exact, packed, sink
            See above.
        recent : int
            Of the cache.

        Returns
        -------
        Placement
            The plan.
        """
        sinks = max(0, min(new, sink - exact))
        held = max(0, exact - sink)
        free = -packed % PAGE
        spare = exact + new - 1 - most_exact(packed, sink, recent)
        moved = (free or PAGE) + spare // PAGE * PAGE if spare >= 0 else 0
        return Placement(rows, new, exact, packed, sink, sinks, held, free, moved)

    @property
    def exact_after(self) -> int:
        """Tokens that each row holds exact then."""
        return self.exact + self.new - self.moved


def most_exact(packed: int, sink: int, recent: int) -> int:
    """Most tokens of a row that are exact before some go to a page.

    Parameters
    ----------
    packed : int
        Tokens of the row in pages.
    sink, recent : int
        Of the cache.

    Returns
    -------
    int
        One token less than fills the next page, or what is free of the last one.
    """
    return sink + recent + (-packed % PAGE or PAGE) - 1


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Keys or values of all rows; how many of them are exact is the cache's to know.

    Operations make new stores.  They may share the buffer, in which :meth:`appended` writes to
    slots that hold no token: of stores that share one, only the last made may be appended to.

    Parameters
    ----------
    kind : ArrayKind
        What was appended.
    exact : ndarray or torch.Tensor, shape ``(batch, num_kv_heads, slots, head_dim)``
        Exact tokens as elements, the sinks first; slots beyond a row's number hold anything.  There
        are as many slots as tokens need, but for the last few.  On a GPU a tensor.
    table : PageTable
        The pages.
    """

    kind: ArrayKind
    exact: Array
    table: PageTable

    @staticmethod
    def empty(
        kind: ArrayKind, fmt: PolarFormat, codebooks: Codebooks, batch: int, num_kv_heads: int,
        preconditioner: Preconditioner | None = None, sink: int = 0,
    ) -> TokenStore:  # fmt: skip
        """A store without tokens.

        Parameters
        ----------
        kind : ArrayKind
            What will be appended.
        fmt : PolarFormat
            Of the pages.
        codebooks : Codebooks
            Of the pages.
        batch, num_kv_heads : int
            Rows, and kv heads.
        preconditioner : Preconditioner, optional
            Of the pages.
        sink : int
            Tokens of each row before those in pages.

        Returns
        -------
        TokenStore
            A store that owns its buffer, which has no slot yet.
        """
        shape = batch, num_kv_heads, 0, fmt.head_dim
        memory = memory_of(kind)
        table = memory.table(fmt, codebooks, num_kv_heads, batch, preconditioner, sink)
        return TokenStore(kind, memory.empty(shape, kind), table)

    @property
    def memory(self) -> Memory:
        """Where the exact tokens are."""
        return memory_of(self.kind)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, pages and their table, fitted codebooks, and the preconditioner."""
        preconditioner = self.table.preconditioner
        extra = preconditioner.nbytes if preconditioner is not None else 0
        return self.exact.nbytes + self.table.nbytes + self.table.codebooks.nbytes + extra

    def with_preconditioner(self, preconditioner: Preconditioner) -> TokenStore:
        """The same store with another preconditioner, of rows that have no pages yet."""
        table = replace(self.table, preconditioner=preconditioner)
        return TokenStore(self.kind, self.exact, table)

    def copy(self, slots: int) -> TokenStore:
        """Another store with the same tokens, in so many slots; blocks are shared."""
        return TokenStore(self.kind, self.memory.copy(self.exact[:, :, :slots]), self.table)

    def select(self, indices: Sequence[int], slots: int) -> TokenStore:
        """Another store with some of the rows, in so many slots; see :meth:`PageTable.select`."""
        exact = self.memory.select(self.exact[:, :, :slots], indices)
        return TokenStore(self.kind, exact, self.table.select(indices))

    def cropped(self, packed: Sequence[int]) -> TokenStore:
        """The store with only so many tokens of each row in pages; the buffer is shared."""
        pages = [-(-n // PAGE) for n in packed]
        nothing: list[list[Block]] = [[] for _ in packed]
        return TokenStore(self.kind, self.exact, self.table.changed(pages, nothing, packed))

    def appended(self, x: Array, placements: Sequence[Placement]) -> TokenStore:
        """The store after an append.

        Parameters
        ----------
        x : ndarray or torch.Tensor, shape ``(batch, num_kv_heads, n, head_dim)``
            Elements that are appended, of the store's kind.
        placements : sequence of Placement
            For runs of rows that cover the batch.

        Returns
        -------
        TokenStore
            The next store; this one's tokens are as they were.
        """
        store, needed = self, max((p.exact_after for p in placements), default=0)
        if any(p.moved for p in placements):
            table = self._packed_with(x, placements)
            store = TokenStore(self.kind, self._buffer(needed), table)
        elif needed > self.exact.shape[2]:
            store = TokenStore(self.kind, self._buffer(needed), self.table)
        for p in placements:
            slots, first = store.exact[p.rows], x.shape[2] - p.new  # of the new tokens
            if p.sinks:
                slots[:, :, p.exact : p.exact + p.sinks] = x[p.rows, :, first : first + p.sinks]
            if p.moved < p.held and p.moved:  # the recent tokens that are left move up
                left = slice(p.sink + p.moved, p.exact)
                slots[:, :, p.sink : p.exact - p.moved] = self.exact[p.rows, :, left]
            fresh = min(p.new - p.sinks, p.exact_after - p.sink)
            if fresh > 0:
                end = p.exact_after
                slots[:, :, end - fresh : end] = x[p.rows, :, x.shape[2] - fresh :]
        return store

    def _buffer(self, needed: int) -> Array:
        """Another buffer, of a few slots more than are needed, with the same tokens."""
        batch, num_kv_heads, slots, head_dim = self.exact.shape
        shape = batch, num_kv_heads, -(-needed // _SLOTS) * _SLOTS, head_dim
        buffer = self.memory.empty(shape, self.kind)
        same = min(slots, shape[2])
        buffer[:, :, :same] = self.exact[:, :, :same]
        return buffer

    def _packed_with(self, x: Array, placements: Sequence[Placement]) -> PageTable:
        """The table with what an append moves to pages."""
        table = self.table
        keep = [len(blocks) for blocks in table.blocks]
        more: list[list[Block]] = [[] for _ in keep]
        for p in placements:
            if not p.moved:
                continue
            if p.free:
                tokens = self._waiting(x, p, 0, p.free)
                for row, block in enumerate(table.fill(p.rows, tokens, self.kind), p.rows.start):
                    keep[row] -= 1
                    more[row].append(block)
            # pages that start among the tokens held already are gathered, the others are in place
            gathered = min(p.moved, p.free + -(-max(0, p.held - p.free) // PAGE) * PAGE)
            for start, stop in ((p.free, gathered), (gathered, p.moved)):
                if start < stop:
                    tokens = self._waiting(x, p, start, stop)
                    new = table.encode(p.rows, p.packed + start, tokens, self.kind)
                    for row, blocks in enumerate(new, p.rows.start):
                        more[row].extend(blocks)
        lengths = [p.packed + p.moved for p in placements for _ in range(p.rows.start, p.rows.stop)]
        return table.changed(keep, more, lengths)

    def _waiting(self, x: Array, p: Placement, start: int, stop: int) -> Array:
        """Tokens of what follows the pages: recent ones, and then new ones; a view if it can be."""
        held = self.exact[p.rows, :, p.sink + start : p.sink + min(stop, p.held)]
        if stop <= p.held:
            return held
        first = x.shape[2] - p.new + p.sinks - p.held  # of x, if all of them were in x
        new = x[p.rows, :, first + max(start, p.held) : first + stop]
        return new if start >= p.held else self.memory.join([held, new])
