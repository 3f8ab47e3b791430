"""Caches to test, and a plain model of one: lists of tokens, pages that are encoded apart."""

from __future__ import annotations

import numpy as np
from support import gaussian

from polarquant_nb import FormatPair, KVCache, PolarFormat, PolarPages, encode, preset
from polarquant_nb.arrays import ArrayKind, open_array
from polarquant_nb.cache_files import to_plain
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.codec import encode_into
from polarquant_nb.layout import PAGE

FLOAT32 = ArrayKind("numpy", "float32")
PAIR = preset("balanced", 64)
HEADS = 2


def tokens(batch, n, seed=0, heads=HEADS):
    """Keys, which have a mean as real ones do, and values; a row's do not depend on the batch."""
    rows = [gaussian(2, heads, n, 64, seed=(seed, row)) for row in range(batch)]
    k, v = np.stack(rows, 1) if rows else gaussian(2, 0, heads, n, 64)
    return k + np.float32(0.5), v


def filled(n, batch=1, padding=None, formats=PAIR, seed=0, **arguments):
    cache = KVCache(formats, **arguments)
    cache.append(*tokens(batch, n, seed), padding)
    return cache


def assert_same(a, b):
    """Two caches hold the same bytes, and go on alike."""
    assert a.formats == b.formats
    (numbers, arrays), (others, other_arrays) = to_plain(a._state), to_plain(b._state)
    assert numbers == others
    assert arrays.keys() == other_arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, other_arrays[name], err_msg=name)


class ModelPage:
    """A page of one row, keys or values; of all kv heads.

    A crop forgets lanes, and tokens that fill them again are encoded against the same offset: each
    lane is read from the last of ``parts``, (first lane, words), that has it.
    """

    def __init__(self, fmt: PolarFormat, tokens: list[np.ndarray]) -> None:
        self.format, self.count = fmt, PAGE
        self.parts = [(0, encode(np.stack(tokens, 1), fmt).words[:, 0])]

    def crop(self, count: int) -> None:
        self.count = count
        self.parts = [part for part in self.parts if part[0] < count]

    def fill(self, tokens: list[np.ndarray]) -> None:
        words = self.parts[0][1].copy()  # with the offset
        lanes = [np.zeros_like(tokens[0])] * self.count + tokens
        starts = np.arange(len(words)) * words.shape[1]
        source = open_array(np.stack(lanes, 1))
        codebooks = Codebooks.analytic(self.format)
        encode_into(source, self.format, codebooks, words.reshape(-1), starts, frozen=True)
        self.parts.append((self.count, words))
        self.count = PAGE

    def copy(self) -> ModelPage:
        new = object.__new__(ModelPage)
        new.format, new.count, new.parts = self.format, self.count, list(self.parts)
        return new

    def _by_lane(self, read) -> np.ndarray:
        """``read(words)``, whose axis 1 are lanes, of the part that has each lane."""
        result = read(self.parts[0][1]).copy()
        for first, words in self.parts[1:]:
            result[:, first:] = read(words)[:, first:]
        return result[:, : self.count]

    def codes(self) -> np.ndarray:
        return self._by_lane(self.format.layout.read_codes)

    def radii(self) -> np.ndarray:
        return self._by_lane(self.format.layout.read_radii)

    def offset(self) -> np.ndarray:
        first = self.format.layout.offset_word
        return self.parts[0][1][:, first : first + self.format.layout.offset_words]

    def decode(self) -> np.ndarray:
        def read(words: np.ndarray) -> np.ndarray:
            books = Codebooks.analytic(self.format)
            return PolarPages(self.format, words[:, None], PAGE, books, FLOAT32).decode()

        return self._by_lane(read)


class ModelRow:
    """One row: sinks, pages, recent tokens; each token is its key and value of all heads."""

    def __init__(self, formats: FormatPair, sink: int, recent: int) -> None:
        self.formats, self.sink, self.recent = formats, sink, recent
        self.sinks: list[tuple[np.ndarray, np.ndarray]] = []
        self.pages: list[tuple[ModelPage, ModelPage]] = []
        self.last: list[tuple[np.ndarray, np.ndarray]] = []

    @property
    def packed(self) -> int:
        return sum(keys.count for keys, _ in self.pages)

    @property
    def length(self) -> int:
        return len(self.sinks) + self.packed + len(self.last)

    def append(self, k: np.ndarray, v: np.ndarray) -> None:
        if len(self.sinks) < self.sink:
            self.sinks.append((k, v))
            return
        self.last.append((k, v))
        partial = bool(self.pages) and self.pages[-1][0].count < PAGE
        need = PAGE - self.pages[-1][0].count if partial else PAGE
        if len(self.last) < self.recent + need:
            return
        old, self.last = self.last[:need], self.last[need:]
        keys, values = (list(side) for side in zip(*old, strict=True))
        if partial:
            self.pages[-1] = tuple(page.copy() for page in self.pages[-1])
            self.pages[-1][0].fill(keys)
            self.pages[-1][1].fill(values)
        else:
            pair = self.formats
            self.pages.append((ModelPage(pair.keys, keys), ModelPage(pair.values, values)))

    def crop(self, n: int) -> None:
        if n < len(self.sinks) + self.packed:
            packed, pages = max(0, n - self.sink), []
            for page in self.pages:
                if packed > 0:
                    page = tuple(side.copy() for side in page)
                    for side in page:
                        side.crop(min(PAGE, side.count, packed))
                    pages.append(page)
                    packed -= PAGE
            self.pages, self.last, self.sinks = pages, [], self.sinks[:n]
        else:
            self.last = self.last[: n - len(self.sinks) - self.packed]

    def copy(self) -> ModelRow:
        new = ModelRow(self.formats, self.sink, self.recent)
        new.sinks, new.pages, new.last = list(self.sinks), list(self.pages), list(self.last)
        return new

    def decode(self, side: int) -> np.ndarray:
        """Keys (0) or values (1), ``(num_kv_heads, length, head_dim)``; there is at least one."""
        exact = [[token[side][:, None] for token in tokens] for tokens in (self.sinks, self.last)]
        return np.concatenate(
            [*exact[0], *(page[side].decode() for page in self.pages), *exact[1]], 1
        )


def assert_holds(cache: KVCache, rows: list[ModelRow]) -> None:
    """The cache holds what the model does: numbers, exact tokens, codes, radii, offsets."""
    assert cache.lengths.tolist() == [row.length for row in rows]
    state = cache._state
    assert list(state.packed) == [row.packed for row in rows]
    assert list(state.exact) == [len(row.sinks) + len(row.last) for row in rows]
    decoded = cache.decode()
    for side, store in enumerate((state.keys, state.values)):
        layout = store.table.format.layout
        for i, row in enumerate(rows):
            assert len(store.table.blocks[i]) == len(row.pages)
            for block, page in zip(store.table.blocks[i], row.pages, strict=True):
                assert not block.flags.writeable
                expected = page[side]
                codes, radii = layout.read_codes(block), layout.read_radii(block)
                np.testing.assert_array_equal(codes[:, : expected.count], expected.codes())
                np.testing.assert_array_equal(radii[:, : expected.count], expected.radii())
                first = layout.offset_word
                offset = block[:, first : first + layout.offset_words]
                np.testing.assert_array_equal(offset, expected.offset())
            start = cache.seq_len - row.length
            assert not decoded[side][i, :, :start].any()
            if row.length:
                np.testing.assert_array_equal(decoded[side][i, :, start:], row.decode(side))
