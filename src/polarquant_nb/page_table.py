"""PageTable: the packed part of a cache; every page is a block of its own that never changes.

A *block* is one page of all kv heads of one batch row.  It is written once, and shared from then
on: rows that were selected twice, copies of a cache and its snapshots hold the same blocks.  A
table does not change either; every operation makes a new one, which costs pointers.

:class:`~polarquant_nb.gpu_page_table.DeviceTable` is the same with blocks on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, element_dtype, strided
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.codec import decode_rows, encode_into
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.rows import PackedRows

__all__ = ["PageTable", "span"]

_PAGES = 64
"""Pages of a row that lose their bias at a time."""

Block = npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class PageTable:
    """Where the pages of each batch row are.

    Parameters
    ----------
    format : PolarFormat
        Of all pages.
    codebooks : Codebooks
        Of all pages.
    num_kv_heads : int
        Pages of a block.
    blocks : tuple of tuples of ndarray of uint32, shape ``(num_kv_heads, page words)``
        The blocks of each batch row.
    addresses : ndarray of int64, shape ``(batch, pages)``
        Where each block is in memory, in words; 0 where a row has fewer pages than another.
    lengths : tuple of int
        Tokens of each batch row; only its last page may be partial.
    prepared : dict
        See :class:`~polarquant_nb.rows.PackedRows`; it depends on format and codebooks only, and is
        handed on from table to table.
    preconditioner : Preconditioner, optional
        Of shape ``(num_kv_heads, head_dim)`` or ``(batch, num_kv_heads, head_dim)``.
    first_position : int
        Position of each row's first token.
    """

    format: PolarFormat
    codebooks: Codebooks
    num_kv_heads: int
    blocks: tuple[tuple[Block, ...], ...]
    addresses: npt.NDArray[np.int64]
    lengths: tuple[int, ...]
    prepared: dict[Any, Any]
    preconditioner: Preconditioner | None
    first_position: int

    @classmethod
    def empty(
        cls, fmt: PolarFormat, codebooks: Codebooks, num_kv_heads: int, batch: int,
        preconditioner: Preconditioner | None = None, first_position: int = 0,
    ) -> Self:  # fmt: skip
        """A table without pages.

        Parameters
        ----------
        fmt : PolarFormat
            Of the pages to come.
        codebooks : Codebooks
            Of the pages to come.
        num_kv_heads, batch : int
            Kv heads, and batch rows.
        preconditioner, first_position
            See :class:`PageTable`.

        Returns
        -------
        PageTable
            With no token.
        """
        addresses = np.empty((batch, 0), np.int64)
        return cls(
            fmt, codebooks, num_kv_heads, ((),) * batch, addresses, (0,) * batch, {},
            preconditioner, first_position,
        )  # fmt: skip

    @cached_property
    def rows(self) -> PackedRows:
        """The pages as kernels take them: a row for each batch row and kv head."""
        first, num_words, starts = self._locate(self.addresses)
        words = span(first, num_words, self.blocks)
        lengths = np.repeat(np.array(self.lengths, np.int64), self.num_kv_heads)
        return PackedRows(
            self.format, self.codebooks, words, starts, lengths, self.prepared,
            self.preconditioner, self.first_position,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, and of the tables that tell where they are."""
        return self.blocks_nbytes + self.addresses.nbytes + self.rows.starts.nbytes

    @property
    def blocks_nbytes(self) -> int:
        """Bytes of all blocks, each counted once."""
        return sum({id(block): block.nbytes for row in self.blocks for block in row}.values())

    def changed(
        self, keep: Sequence[int], more: Sequence[Sequence[Block]], lengths: Sequence[int]
    ) -> Self:
        """Each row with its first pages only, and other blocks after them.

        Parameters
        ----------
        keep : sequence of int
            Pages that each row keeps.
        more : sequence of sequences of blocks
            What follows them.
        lengths : sequence of int
            Tokens that each row has then.

        Returns
        -------
        PageTable
            The new table.
        """
        kept = zip(self.blocks, keep, more, strict=True)
        blocks = tuple((*row[:n], *new) for row, n, new in kept)
        addresses = np.zeros((len(blocks), max(map(len, blocks), default=0)), np.int64)
        for row, (n, new) in enumerate(zip(keep, more, strict=True)):
            addresses[row, :n] = self.addresses[row, :n]
            addresses[row, n : n + len(new)] = list(map(self._address, new))
        return self._with(blocks, addresses, lengths)

    def select(self, indices: Sequence[int]) -> Self:
        """Batch rows in another order, each as often as wanted.

        Parameters
        ----------
        indices : sequence of int
            Rows.

        Returns
        -------
        PageTable
            The new table; blocks are shared.
        """
        lengths = [self.lengths[i] for i in indices]
        width = -(-max(lengths, default=0) // PAGE)
        addresses = self.addresses[list(indices), :width]
        chosen = self._with(tuple(self.blocks[i] for i in indices), addresses, lengths)
        if self.preconditioner is None:
            return chosen
        return replace(chosen, preconditioner=self.preconditioner.select(indices))

    def encode(
        self, rows: slice, first: int, x: npt.NDArray[Any], kind: ArrayKind
    ) -> list[list[Block]]:
        """New blocks of whole pages, for :meth:`changed`.

        Parameters
        ----------
        rows : slice
            Batch rows.
        first : int
            Tokens of each before ``x``.
        x : ndarray, shape ``(rows, num_kv_heads, n * 128, head_dim)``
            Elements of vectors that can be stored; read in place.
        kind : ArrayKind
            What they are.

        Returns
        -------
        list of lists of blocks
            ``n`` for each row.
        """
        shape = self._block_shape
        blocks = [[np.empty(shape, np.uint32) for _ in range(x.shape[2] // PAGE)] for _ in x]
        place, num_words, starts = self._locate(self._addresses(blocks))
        self._encode(rows, first, x, kind, span(place, num_words, blocks), starts)
        return [[_frozen(block) for block in row] for row in blocks]

    def fill(self, rows: slice, x: npt.NDArray[Any], kind: ArrayKind) -> list[Block]:
        """Copies of partial last pages with their free lanes filled, for :meth:`changed`.

        The tokens are coded as differences from the offset that the page has already.

        Parameters
        ----------
        rows : slice
            Batch rows, equally long.
        x : ndarray, shape ``(rows, num_kv_heads, free lanes, head_dim)``
            Elements of vectors that can be stored.
        kind : ArrayKind
            What they are.

        Returns
        -------
        list of blocks
            One for each row.
        """
        old = np.stack([row[-1] for row in self.blocks[rows]])
        new, page_words = old.copy(), old.shape[-1]  # with the offsets
        page = np.empty((*x.shape[:2], PAGE, x.shape[3]), x.dtype)
        first = PAGE - x.shape[2]
        page[:, :, first:] = x
        page[:, :, :first] = x[:, :, :1]  # not used, but seen by what is chosen for a whole page
        starts = np.arange(new.size // page_words) * page_words
        page_start = self.lengths[rows.start] - first
        self._encode(rows, page_start, page, kind, new.reshape(-1), starts, frozen=True)
        self.format.layout.copy_lanes(new, old, first)
        return [_frozen(block.copy()) for block in old]

    def decode(self, rows: slice, kind: ArrayKind) -> npt.NDArray[Any]:
        """Reconstruct the tokens of rows that are equally long.

        Parameters
        ----------
        rows : slice
            Batch rows.
        kind : ArrayKind
            What to return.

        Returns
        -------
        ndarray, shape ``(rows, num_kv_heads, tokens, head_dim)``
            Elements; float16 and bfloat16 as uint16.
        """
        batch, length = len(self.lengths[rows]), self.lengths[rows][0]
        x = np.empty((batch, self.num_kv_heads, length, self.format.head_dim), element_dtype(kind))
        heads = slice(rows.start * self.num_kv_heads, rows.stop * self.num_kv_heads)
        decode_rows(self.rows.part(heads), 0, length, x.reshape(-1), kind)
        return x

    def to_arrays(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The contents, for files.

        Returns
        -------
        pages : ndarray of uint32, shape ``(blocks, num_kv_heads, page words)``
            Each block once.
        index : ndarray of int64, shape ``(batch, pages)``
            Which block is where; −1 where a row has fewer pages than another.
        """
        distinct = {id(block): block for row in self.blocks for block in row}
        number = {key: i for i, key in enumerate(distinct)}
        index = np.full(self.addresses.shape, -1, np.int64)
        for row, blocks in zip(index, self.blocks, strict=True):
            row[: len(blocks)] = [number[id(block)] for block in blocks]
        pages = np.empty((len(distinct), *self._block_shape), np.uint32)
        for page, block in zip(pages, distinct.values(), strict=True):
            page[:] = self._words(block)
        return pages, index

    def with_arrays(
        self, pages: npt.NDArray[np.uint32], index: npt.NDArray[np.int64], lengths: Sequence[int]
    ) -> Self:
        """An empty table with the contents that :meth:`to_arrays` gave.

        Parameters
        ----------
        pages, index
            See :meth:`to_arrays`.
        lengths : sequence of int
            Tokens of each batch row.

        Returns
        -------
        PageTable
            The new table.
        """
        blocks = [self._block(page) for page in pages]
        rows = [[blocks[i] for i in row if i >= 0] for row in index.tolist()]
        return self.changed([0] * len(rows), rows, lengths)

    def _encode(
        self, rows: slice, first: int, x: npt.NDArray[Any], kind: ArrayKind,
        words: npt.NDArray[np.uint32], starts: npt.NDArray[np.int64], *, frozen: bool = False,
    ) -> None:  # fmt: skip
        """Encode tokens of batch rows, of which ``first`` are before them."""
        here = self.preconditioner
        if here is None:
            source = strided(x, kind)
            encode_into(source, self.format, self.codebooks, words, starts.ravel(), frozen=frozen)
            return
        if len(here.shape) == 3:
            here = here.select(range(rows.start, rows.stop))
        # a bias is subtracted from a copy in float32: of some pages at a time
        pages = starts.reshape(x.shape[0] * x.shape[1], -1)
        step = _PAGES if here.bias is not None else pages.shape[1]
        for page in range(0, pages.shape[1], step):
            tokens = slice(page * PAGE, (page + step) * PAGE)
            position = self.first_position + first + tokens.start
            part = here.subtract_bias(x[:, :, tokens], kind, position)
            encode_into(
                strided(*part), self.format, self.codebooks, words,
                pages[:, page : page + step].ravel(), here, frozen=frozen,
            )  # fmt: skip

    # ---- blocks in memory ------------------------------------------------------------------------

    @staticmethod
    def _address(block: Block) -> int:
        """Where a block is, in words."""
        return int(block.__array_interface__["data"][0]) // 4

    def _words(self, block: Block) -> Block:
        """A block for a file."""
        return block

    def _block(self, words: Block) -> Block:
        """Inverse of :meth:`_words`, in memory of its own."""
        return _frozen(words.copy())

    @property
    def _block_shape(self) -> tuple[int, int]:
        return self.num_kv_heads, self.format.layout.num_words

    def _with(
        self,
        blocks: tuple[tuple[Block, ...], ...],
        addresses: npt.NDArray[np.int64],
        lengths: Sequence[int],
    ) -> Self:
        return replace(self, blocks=blocks, addresses=addresses, lengths=tuple(lengths))

    def _addresses(self, blocks: Sequence[Sequence[Block]]) -> npt.NDArray[np.int64]:
        """Of as many blocks for each row."""
        return np.array([list(map(self._address, row)) for row in blocks], np.int64)

    def _locate(
        self, addresses: npt.NDArray[np.int64]
    ) -> tuple[int, int, npt.NDArray[np.int64]]:  # fmt: skip
        """First word and length of the memory that spans all blocks; each page's place in it."""
        heads, page_words = self._block_shape
        used = addresses[addresses > 0]
        first, last = (int(used.min()), int(used.max())) if used.size else (0, 0)
        num_words = last - first + heads * page_words if used.size else 0
        pages = np.maximum(addresses - first, 0)  # a page that is not there is never read
        starts = pages[:, None] + np.arange(heads)[:, None] * page_words
        return first, num_words, starts.reshape(len(addresses) * heads, addresses.shape[1])


_NOTHING = np.empty(0, np.uint32)


class _Memory:
    """A range of memory, for NumPy to look at; it holds on to those who own what is used of it."""

    def __init__(self, first: int, num_words: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {
            "data": (4 * first, False),
            "shape": (num_words,),
            "typestr": np.dtype(np.uint32).str,
            "version": 3,
        }


def span(first: int, num_words: int, owner: object) -> npt.NDArray[np.uint32]:
    """Memory as an array.

    Parameters
    ----------
    first : int
        Its first word: an address divided by 4.
    num_words : int
        How long it is.
    owner : object
        Holds on to whatever is used of it.

    Returns
    -------
    ndarray of uint32, shape ``(num_words,)``
        What is there.
    """
    return np.asarray(_Memory(first, num_words, owner)) if num_words else _NOTHING


def _frozen(block: Block) -> Block:
    block.flags.writeable = False
    return block
