"""The plan of a page: every bit has one meaning, and few bits have none."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import formats
from support import RANDOM_FORMATS, ident

from polarquant_nb import PolarFormat, preset, presets
from polarquant_nb.layout import PAGE, PageLayout, plan_page


def assert_plan_is_sound(layout: PageLayout) -> None:
    """Every node once, no two codes on one bit, and rows, radii and offset tile the page."""
    bits = layout.node_bits()
    nodes = []
    runs = []
    for row in layout.code_rows:
        assert row.width in (8, 16, 32)
        used = 0
        for node, shift in row.fields:
            mask = ((1 << int(bits[node])) - 1) << shift
            assert mask < 1 << row.width
            assert not used & mask
            used |= mask
            nodes.append(node)
        runs.append((row.word, PAGE * row.width // 32))
    assert sorted(nodes) == list(range(layout.num_nodes))
    # no row but the last ones is narrow: 16 lanes of a row are one register
    assert sum(row.width == 16 for row in layout.code_rows) <= 1
    assert sum(row.width == 8 for row in layout.code_rows) <= 1

    runs += [(word, PAGE * layout.radius_width // 32) for word in layout.radius_words]
    runs.append((layout.offset_word, layout.offset_words))
    if layout.anchor_word == layout.offset_word + layout.offset_words:  # else within the offset
        runs.append((layout.anchor_word, 1))
    end = 0
    for word, length in sorted(runs):
        assert word == end
        end += length
    assert end == layout.num_words


def write_codes(layout: PageLayout, codes: np.ndarray) -> np.ndarray:
    """Words of a page ``(num_words,)`` from codes ``(128, num_nodes)``, bit by bit in uint64."""
    words = np.zeros(layout.num_words, np.uint32)
    for row in layout.code_rows:
        lanes = np.zeros(PAGE, np.uint64)
        for node, shift in row.fields:
            lanes += codes[:, node].astype(np.uint64) << np.uint64(shift)
        # lane t takes the bits t·width .. of the row, counted from the lowest bit of its first word
        per_word = 32 // row.width
        shifts = np.arange(per_word, dtype=np.uint64) * np.uint64(row.width)
        row_words = (lanes.reshape(-1, per_word) << shifts).sum(1)
        words[row.word : row.word + len(row_words)] = row_words
    return words


def test_plan_is_sound_for_every_combination_of_bits():
    """All of 1 to 6 bits at one to four levels; exhaustive at head_dim 16."""
    for num_levels in range(1, 5):
        for level_bits in product(range(1, 7), repeat=num_levels):
            assert_plan_is_sound(plan_page(16, level_bits))


@given(formats())
def test_plan_is_sound_for_any_format(fmt):
    assert_plan_is_sound(fmt.layout)
    parts = fmt.layout.words_by_part
    anchor = fmt.radius == "log8" and fmt.offset != "int8"  # in a word of its own
    assert parts["radii"] == PAGE * fmt.num_blocks * fmt.layout.radius_width // 32 + anchor
    assert sum(parts.values()) == fmt.layout.num_words
    assert fmt.layout.num_nodes == fmt.head_dim - fmt.num_blocks
    assert len(fmt.layout.radius_words) == fmt.num_blocks


@given(formats(st.sampled_from([16, 32, 48, 64, 80, 128])), st.integers(0, 2**32 - 1))
def test_packing_is_a_bijection(fmt, seed):
    """Codes survive, and the bits that hold them are all the bits but the padding."""
    layout = fmt.layout
    limit = 1 << layout.node_bits()
    codes = np.random.default_rng(seed).integers(0, limit, (PAGE, layout.num_nodes), np.uint8)
    np.testing.assert_array_equal(layout.read_codes(write_codes(layout, codes)), codes)
    full = np.broadcast_to((limit - 1).astype(np.uint8), codes.shape)
    ones = int(np.bitwise_count(write_codes(layout, full)).sum())
    assert ones == PAGE * int(layout.node_bits().sum())
    rows = sum(row.width for row in layout.code_rows)
    assert ones == PAGE * (rows - layout.padding_bits)


@pytest.mark.parametrize("fmt", RANDOM_FORMATS, ids=ident)
def test_codes_and_radii_are_read_from_pages_of_any_leading_shape(fmt):
    layout = fmt.layout
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, (2, 3, layout.num_words), np.uint32)
    codes, radii = layout.read_codes(words), layout.read_radii(words)
    assert codes.shape == (2, 3, PAGE, layout.num_nodes)
    assert radii.shape == (2, 3, PAGE, fmt.num_blocks)
    assert radii.dtype == np.float16
    np.testing.assert_array_equal(layout.read_codes(words[1, 2]), codes[1, 2])
    # token t's radius of block b is half t & 1 of word t >> 1 of its row
    for block, word in enumerate(layout.radius_words):
        halves = words[..., word : word + PAGE // 2].copy().view(np.uint16)
        np.testing.assert_array_equal(radii[..., block].copy().view(np.uint16), halves)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", presets())
def test_presets_waste_little_on_padding(name, head_dim):
    pair = preset(name, head_dim)
    for fmt in (pair.keys, pair.values):
        assert fmt.layout.padding_bits <= 0.015 * 32 * fmt.layout.num_words / PAGE


@given(formats())
def test_rows_are_aligned(fmt):
    """CASES row 17 (vllm-project/vllm#38662): odd row sizes misaligned the radii after them."""
    layout = fmt.layout
    assert fmt.page_nbytes == 4 * layout.num_words
    pages = np.zeros((2, layout.num_words), np.uint32)
    rows = [(row.word, row.width // 8) for row in layout.code_rows]
    rows += [(word, layout.radius_width // 8) for word in layout.radius_words]
    for page in pages:
        for word, nbytes in rows:
            # a register of 8 lanes is read at once; whole words keep it aligned to its lanes
            view = page[word:].view(f"u{nbytes}")
            assert view.flags.aligned
            assert isinstance(word, int)


@pytest.mark.parametrize("fmt", RANDOM_FORMATS, ids=ident)
@pytest.mark.parametrize("first", [0, 1, 100, 127])
def test_lanes_are_copied_whole_and_nothing_else(fmt, first):
    layout = fmt.layout
    rng = np.random.default_rng(first)
    shape = 2, layout.num_words
    source, old = (rng.integers(0, 2**32, shape, np.uint32) for _ in range(2))
    target = old.copy()
    layout.copy_lanes(source, target, first)
    for read in (layout.read_codes, lambda words: layout.read_radii(words).view(np.uint16)):
        np.testing.assert_array_equal(read(target)[:, :first], read(old)[:, :first])
        np.testing.assert_array_equal(read(target)[:, first:], read(source)[:, first:])
    offset = slice(layout.offset_word, layout.offset_word + layout.offset_words)
    np.testing.assert_array_equal(target[:, offset], old[:, offset])


def test_equal_formats_share_a_plan():
    assert PolarFormat(64, (4, 2), seed=1).layout is PolarFormat(64, [4, 2], seed=2).layout
    assert PolarFormat(64, (4, 2)).layout is not PolarFormat(64, (4, 2), "int8").layout
