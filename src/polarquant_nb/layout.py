"""Where each code sits in a page: the only module that knows bit positions and word offsets.

A *page* holds 128 consecutive tokens of one head as a run of uint32 words.  Tokens are *lanes*: the
page is a stack of *rows*, and a row gives every lane the same number of bits,

    word rows   128 × 32 bits   several codes each, the same codes for every lane
    radii       128 × 16 bits   one float16 row per block; or 128 × 8, codes
    tail rows   128 × 16 or 8   the codes left over, where a whole word row would be wasteful
    offset      head_dim × int8 (or float16), and for int8 one word with the float16 scale
    anchor      16 bits that say what 8-bit radii mean: the upper half of that word, or of its own

so that 16 neighbouring lanes of a row are one vector register on a CPU, and 32 are one coalesced
load on a GPU.  A row narrower than 32 bits is little-endian: lane t of a 16-bit row is half t & 1
of word t >> 1.  No code straddles two rows.

Which codes share a row is decided in ``packing.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.packing import Field, choose_rows
from polarquant_nb.radii import Anchor, merge_radii, radii_of

__all__ = ["PAGE", "PageLayout", "Row", "plan_page"]

PAGE = 128
"""Tokens of a page."""


@dataclass(frozen=True)
class Row:
    """One row of a page: where it starts, how wide a lane is, and the codes in a lane.

    Parameters
    ----------
    word : int
        First word of the row, counted from the start of the page.
    width : int
        Bits of a lane: 32, 16 or 8.
    fields : tuple of Field
        The codes of a lane.
    """

    word: int
    width: int
    fields: tuple[Field, ...] = ()


@dataclass(frozen=True)
class PageLayout:
    """The plan of one page.

    *Nodes* are the codes of a vector, numbered level by level: the d/2 of level 1 first, then the
    d/4 of level 2, and so on; ``level_start[ℓ−1]`` is the first node of level ℓ.

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.
    level_bits : tuple of int
        Bits of each level's codes.
    code_rows : tuple of Row
        Rows that hold codes, the word rows first.
    radius_words : tuple of int
        First word of each block's radius row.
    offset_word : int
        First word of the offset.
    offset_words : int
        Words of the offset, 0 without.
    num_words : int
        Words of a page.
    radius_width : int
        Bits of a radius: 16, or 8.
    anchor_word : int, optional
        Word that has the anchor of 8-bit radii in its upper half.
    """

    head_dim: int
    level_bits: tuple[int, ...]
    code_rows: tuple[Row, ...] = field(repr=False)
    radius_words: tuple[int, ...] = field(repr=False)
    offset_word: int
    offset_words: int
    num_words: int
    radius_width: int = 16
    anchor_word: int | None = None

    @property
    def num_nodes(self) -> int:
        """Codes of a vector."""
        return sum(self.head_dim >> level for level in range(1, len(self.level_bits) + 1))

    @property
    def level_start(self) -> tuple[int, ...]:
        """First node of each level."""
        counts = [self.head_dim >> level for level in range(1, len(self.level_bits) + 1)]
        return tuple(sum(counts[:level]) for level in range(len(counts)))

    @property
    def words_by_part(self) -> dict[str, int]:
        """Words of codes (padding included), of radii (and their anchor), and of the offset."""
        codes = sum(PAGE * row.width // 32 for row in self.code_rows)
        radii = self.num_words - codes - self.offset_words
        return {"codes": codes, "radii": radii, "offsets": self.offset_words}

    @property
    def padding_bits(self) -> int:
        """Bits of a lane that hold nothing."""
        codes = sum(b * (self.head_dim >> level) for level, b in enumerate(self.level_bits, 1))
        return sum(row.width for row in self.code_rows) - codes

    def node_bits(self) -> npt.NDArray[np.int64]:
        """Bits of every node, ``(num_nodes,)``."""
        return np.repeat(
            self.level_bits,
            [self.head_dim >> level for level in range(1, len(self.level_bits) + 1)],
        ).astype(np.int64)

    def read_codes(self, words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
        """Codes of whole pages, for inspection and tests.

        Parameters
        ----------
        words : ndarray of uint32, shape ``(..., num_words)``
            Packed pages.

        Returns
        -------
        ndarray of uint8, shape ``(..., 128, num_nodes)``
            Codes, level 1 first.
        """
        codes = np.zeros((*words.shape[:-1], PAGE, self.num_nodes), np.uint8)
        bits = self.node_bits()
        for row in self.code_rows:
            lanes = self._row_lanes(words, row.word, row.width)
            for node, shift in row.fields:
                codes[..., node] = (lanes >> np.uint32(shift)) & np.uint32((1 << bits[node]) - 1)
        return codes

    def read_radii(
        self, words: npt.NDArray[np.uint32]
    ) -> npt.NDArray[np.float16] | npt.NDArray[np.float32]:
        """Radii of whole pages, for inspection and tests.

        Parameters
        ----------
        words : ndarray of uint32, shape ``(..., num_words)``
            Packed pages.

        Returns
        -------
        ndarray of float16, or of float32 for radii of 8 bits, shape ``(..., 128, num_blocks)``
            Radii.
        """
        if self.anchor_word is not None:
            radii = radii_of(*self._radius_codes(words))
            return np.ascontiguousarray(radii.swapaxes(-1, -2))
        rows = [self._row_lanes(words, word, 16) for word in self.radius_words]
        return np.stack(rows, -1).astype(np.uint16).view(np.float16)

    def copy_lanes(
        self, source: npt.NDArray[np.uint32], target: npt.NDArray[np.uint32], first: int
    ) -> None:
        """Copy the codes and radii of lanes ``first .. 127`` between pages; offsets stay.

        With radii of 8 bits those of the other lanes are coded anew if the page's anchor does not
        reach the ones that come; see :func:`polarquant_nb.radii.merge_radii`.

        Parameters
        ----------
        source, target : ndarray of uint32, shape ``(..., num_words)``
            Packed pages, of which ``target`` is written to.
        first : int
            First lane, 0 to 127.
        """
        rows = list(self.code_rows)
        if self.anchor_word is None:
            rows += [Row(word, 16) for word in self.radius_words]
        for row in rows:
            lanes = self._row_lanes(target, row.word, row.width)
            lanes[..., first:] = self._row_lanes(source, row.word, row.width)[..., first:]
            self._put_lanes(target, row.word, row.width, lanes)
        if self.anchor_word is not None:
            old, new = self._radius_codes(target), self._radius_codes(source)
            codes, anchor = merge_radii(*old, *new, first)
            for block, word in enumerate(self.radius_words):
                self._put_lanes(target, word, 8, codes[..., block, :])
            target[..., self.anchor_word] = anchor.write(target[..., self.anchor_word])

    def _radius_codes(
        self, words: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.uint8], Anchor]:  # fmt: skip
        """8-bit radii of pages, ``(..., num_blocks, 128)``, and their anchor."""
        rows = [self._row_lanes(words, word, 8) for word in self.radius_words]
        return np.stack(rows, -2).astype(np.uint8), Anchor.read(words[..., self.anchor_word])

    def _put_lanes(
        self, words: npt.NDArray[np.uint32], word: int, width: int, lanes: npt.NDArray[Any]
    ) -> None:
        packed = lanes.astype(f"<u{width // 8}").view("<u4")
        words[..., word : word + packed.shape[-1]] = packed

    def _row_lanes(
        self, words: npt.NDArray[np.uint32], word: int, width: int
    ) -> npt.NDArray[np.uint32]:
        row = np.ascontiguousarray(words[..., word : word + PAGE * width // 32]).astype("<u4")
        return row.view(f"<u{width // 8}").astype(np.uint32)


@cache
def plan_page(
    head_dim: int, level_bits: tuple[int, ...], offset: str | None = None, radius: str = "float16"
) -> PageLayout:
    """Plan a page of a format (whose arguments are already validated).

    Parameters
    ----------
    head_dim : int
        Coordinates of a vector.
    level_bits : tuple of int
        Bits of each level's codes.
    offset : {None, 'int8', 'float16'}
        How the page offset is stored.
    radius : {'float16', 'log8'}
        How radii are stored.

    Returns
    -------
    PageLayout
        The plan; equal arguments give the same object.
    """
    word, width_of_radii = 0, {"float16": 16, "log8": 8}[radius]
    code_rows: list[Row] = []
    radius_words: list[int] = []
    for width, fields in choose_rows(head_dim, level_bits):
        if width < 32 and not radius_words:
            word, radius_words = _radius_rows(word, head_dim >> len(level_bits), width_of_radii)
        code_rows.append(Row(word, width, fields))
        word += PAGE * width // 32
    if not radius_words:
        word, radius_words = _radius_rows(word, head_dim >> len(level_bits), width_of_radii)

    offset_words = {None: 0, "int8": head_dim // 4 + 1, "float16": head_dim // 2}[offset]
    num_words, anchor_word = word + offset_words, None
    if radius == "log8":  # int8 offsets leave half of their last word free
        num_words += 0 if offset == "int8" else 1
        anchor_word = num_words - 1
    return PageLayout(
        head_dim, level_bits, tuple(code_rows), tuple(radius_words), word, offset_words, num_words,
        width_of_radii, anchor_word,
    )  # fmt: skip


def _radius_rows(word: int, num_blocks: int, width: int) -> tuple[int, list[int]]:
    words = PAGE * width // 32
    return word + num_blocks * words, [word + block * words for block in range(num_blocks)]
