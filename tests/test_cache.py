"""KVCache: what it holds, what it weighs, what its attention sees."""

from __future__ import annotations

import copy
import pickle
import re
from itertools import pairwise

import numpy as np
import pytest
from cache_model import HEADS, PAIR, ModelRow, assert_holds, assert_same, filled, tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from support import NOJIT, SMALL, SMALL_OFFSET, exact_attention, gaussian, visible_mask

import polarquant_nb as pq
from polarquant_nb import packed_attention
from polarquant_nb.cache_files import to_plain
from polarquant_nb.layout import PAGE

PAPER = pq.preset("paper", 64)


def assert_attends(cache, q, *, mask=None, rtol=1e-5, **arguments):
    """Attention equals textbook attention on what the cache decodes to."""
    out, lse = cache.attend(q, mask, return_lse=True, **arguments)
    visible = visible_mask(cache.lengths, q.shape[2])
    if mask is not None:
        visible = visible & mask if mask.dtype == bool else np.where(visible, mask, -np.inf)
    k, v = (np.asarray(x, np.float64) for x in cache.decode())
    expected, expected_lse = exact_attention(q, k, v, mask=visible, **arguments)
    assert out.dtype == q.dtype
    assert out.shape == expected.shape
    assert np.linalg.norm(out - expected) <= rtol * np.linalg.norm(expected)
    np.testing.assert_allclose(lse, expected_lse, rtol=rtol, atol=1e-5)


# ---- attention -----------------------------------------------------------------------------------

# (queries of a kv head, q_len): groups of 2, 4 and 8 queries share a walk, and each is compiled
SHAPES = st.sampled_from([(2, 1), (4, 1), (1, 2), (2, 2), (3, 3), (1, 4), (2, 5), (8, 2)])


@given(data=st.data())
@settings(max_examples=5 if NOJIT else settings().max_examples)
def test_equals_exact_attention(data):
    group, q_len = data.draw(SHAPES)
    batch = data.draw(st.integers(1, 3))
    formats = data.draw(st.sampled_from([PAIR, PAPER]))
    recent = data.draw(st.sampled_from([0, 5, 64]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cache = pq.KVCache(formats, sink=data.draw(st.integers(0, 4)), recent=recent)
    for n in data.draw(st.lists(st.integers(1, 200 if NOJIT else 400), min_size=1, max_size=3)):
        padding = None
        if data.draw(st.booleans()):
            padding = [data.draw(st.integers(0, n)) for _ in range(batch)]
        cache.append(*tokens(batch, n, seed=n), padding)
    if data.draw(st.booleans()):
        cache.crop(data.draw(st.integers(0, cache.seq_len)))
    q_len = min(q_len, cache.seq_len)
    q = rng.standard_normal((batch, HEADS * group, q_len, 64), dtype=np.float32)
    arguments = {}
    if data.draw(st.booleans()):
        whole = batch, HEADS * group, q_len, cache.seq_len
        shape = [n if data.draw(st.booleans()) else 1 for n in whole]
        numbers = rng.standard_normal(shape).astype(np.float32)
        arguments["mask"] = numbers > -1 if data.draw(st.booleans()) else numbers
    if data.draw(st.booleans()):
        arguments |= {"scale": 0.4, "softcap": 3.0}
    if cache.seq_len:
        assert_attends(cache, q, **arguments)


@pytest.mark.parametrize("padding", [None, [0, 150]], ids=["equal", "ragged"])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_prompts_equal_exact_attention(padding, masked):
    """More than 64 queries to a kv head decode pages and multiply matrices."""
    n = 300
    cache = filled(n, 2, padding)
    q = gaussian(2, 2 * HEADS, n, 64, seed=1)
    mask = np.random.default_rng(2).random((2, 1, n, n)) < 0.8 if masked else None
    assert_attends(cache, q, mask=mask)
    assert_attends(cache, q[:, :, -40:], mask=None if mask is None else mask[:, :, -40:])


def test_long_prompts_are_gone_through_in_blocks(monkeypatch):
    from polarquant_nb import exact_attention as module

    cache, q = filled(150, 2, [0, 70]), gaussian(2, 2 * HEADS, 150, 64, seed=1)
    mask = gaussian(1, 2 * HEADS, 150, 150, seed=2)
    whole = cache.attend(q, mask)
    monkeypatch.setattr(module, "_SCORES", 2000)
    np.testing.assert_allclose(cache.attend(q, mask), whole, rtol=1e-5, atol=1e-5)
    assert_attends(cache, q, mask=mask)


def test_fused_and_decoding_paths_agree():
    cache = filled(400)
    q = gaussian(1, 2 * HEADS, 70, 64, seed=1)
    one_by_one = []
    for i in range(70):
        part = copy.deepcopy(cache)
        part.crop(400 - 69 + i)
        if part._state.packed == cache._state.packed:  # the same codes
            one_by_one.append((i, part.attend(q[:, :, i : i + 1])))
    together = cache.attend(q)
    assert len(one_by_one) > 30
    for i, out in one_by_one:
        np.testing.assert_allclose(together[:, :, i : i + 1], out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [8, 12])
def test_more_heads_than_share_a_walk(group):
    """The last walk of a kv head is shared by fewer than 8 queries."""
    assert_attends(filled(400), gaussian(1, group * HEADS, 1, 64, seed=1))


def test_chunks_see_their_own_past_only():
    """Query i of a chunk gets what it would get if the later tokens did not exist."""
    cache = filled(190)
    q = gaussian(1, 2 * HEADS, 4, 64, seed=1)
    out = cache.attend(q)
    for i in range(4):
        shorter = copy.deepcopy(cache)
        shorter.crop(190 - 3 + i)
        np.testing.assert_allclose(
            out[:, :, i : i + 1], shorter.attend(q[:, :, i : i + 1]), rtol=1e-5, atol=1e-6
        )


def test_queries_of_padding_get_zeros():
    cache = filled(4, 2, [0, 3])
    out, lse = cache.attend(gaussian(2, 2 * HEADS, 4, 64, seed=1), return_lse=True)
    assert not out[1, :, :3].any()
    assert np.isneginf(lse[1, :, :3]).all()
    assert np.isfinite(lse[1, :, 3]).all()
    assert np.isfinite(lse[0]).all()


@pytest.mark.parametrize("n", [3, 300])
def test_query_that_sees_nothing_gets_zeros(n):
    cache, q = filled(n), gaussian(1, 2 * HEADS, 2, 64, seed=1)
    for mask in np.zeros(n, bool), np.full(n, -np.inf), np.full(n, np.finfo(np.float32).min):
        out, lse = cache.attend(q, mask, return_lse=True)
        assert not out.any()
        assert np.isneginf(lse).all()


def test_long_caches_are_split_and_merged(monkeypatch):
    monkeypatch.setattr(packed_attention, "_PAGES_PER_THREAD", 1)
    cache = filled(300 if NOJIT else 3000)
    q = gaussian(1, 2 * HEADS, 1, 64, seed=1)
    before = pq.get_num_threads()
    try:
        for threads in (1, 4):
            pq.set_num_threads(threads)
            assert_attends(cache, q)
    finally:
        pq.set_num_threads(before)


def test_key_and_value_head_dims_may_differ():
    cache = pq.KVCache(SMALL, pq.PolarFormat(32, (5, 3, 2)))
    cache.append(gaussian(1, 2, 200, 64), gaussian(1, 2, 200, 32, seed=1))
    assert cache.attend(gaussian(1, 4, 1, 64, seed=2)).shape == (1, 4, 1, 32)
    assert_attends(cache, gaussian(1, 4, 1, 64, seed=2))
    assert [x.shape for x in cache.decode()] == [(1, 2, 200, 64), (1, 2, 200, 32)]


def test_fitted_codebooks():
    k, v = tokens(1, 400)
    books = pq.Codebooks.fit(k, PAIR.keys), pq.Codebooks.fit(v, PAIR.values)
    cache = pq.KVCache(PAIR, key_codebooks=books[0], value_codebooks=books[1])
    cache.append(k, v)
    assert cache.nbytes == filled(400).nbytes + books[0].nbytes + books[1].nbytes
    page = pq.encode(k[0, :, 4:132], PAIR.keys, codebooks=books[0]).words[:, 0]
    np.testing.assert_array_equal(cache._state.keys.table.blocks[0][0], page)
    assert_attends(cache, gaussian(1, 2 * HEADS, 1, 64, seed=1))
    again = pickle.loads(pickle.dumps(cache))
    again.append(*tokens(1, 300, seed=1))
    cache.append(*tokens(1, 300, seed=1))
    assert_same(again, cache)


# ---- what it holds -------------------------------------------------------------------------------


@given(cuts=st.lists(st.integers(0, 700), max_size=6), recent=st.sampled_from([0, 64, 200]))
@settings(max_examples=3 if NOJIT else 25)
def test_bytes_do_not_depend_on_the_chunks(cuts, recent):
    n = 300 if NOJIT else 700
    k, v = tokens(2, n)
    whole, parts = pq.KVCache(PAIR, recent=recent), pq.KVCache(PAIR, recent=recent)
    whole.append(k, v)
    edges = [0, *sorted(min(cut, n) for cut in cuts), n]
    for start, stop in pairwise(edges):
        parts.append(k[:, :, start:stop], v[:, :, start:stop])
    # the bound of recent tokens is met by both, and pages are made as soon as they can be
    assert_same(whole, parts)
    pages = pq.encode(k[:, :, 4 : 4 + whole._state.packed[0]], PAIR.keys).words
    for row in range(2):
        for page, block in enumerate(whole._state.keys.table.blocks[row]):
            np.testing.assert_array_equal(block, pages[row, :, page])


@pytest.mark.parametrize("sink", [0, 4])
@pytest.mark.parametrize("recent", [0, 64, 150])
def test_token_by_token_is_what_the_model_holds(sink, recent):
    n = 150 if NOJIT else 600
    k, v = tokens(2, n)
    cache = pq.KVCache(SMALL_OFFSET, SMALL, sink=sink, recent=recent)
    rows = [ModelRow(cache.formats, sink, recent) for _ in range(2)]
    for t in range(n):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        for i, row in enumerate(rows):
            row.append(k[i, :, t], v[i, :, t])
    assert_holds(cache, rows)


def test_strided_prompts_give_the_same_bytes():
    k, v = tokens(2, 300)
    cache = filled(300, 2)
    for change in (
        lambda x: np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
        lambda x: np.repeat(x, 2, 2)[:, :, ::2],
        lambda x: np.ascontiguousarray(x[..., ::-1])[..., ::-1],
    ):
        other = pq.KVCache(PAIR)
        other.append(change(k), change(v))
        assert_same(cache, other)


def test_prompts_are_read_in_place(monkeypatch):
    """Only the page that begins among the recent tokens is put together first."""
    from polarquant_nb.page_table import PageTable

    encode, copied = PageTable.encode, []
    k, v = tokens(2, 700, seed=1)

    def watch(self, rows, first, x, kind):
        copied.append(0 if np.shares_memory(x, k) or np.shares_memory(x, v) else x.shape[2])
        return encode(self, rows, first, x, kind)

    monkeypatch.setattr(PageTable, "encode", watch)
    cache = pq.KVCache(PAIR)
    cache.append(k[:, :, :100], v[:, :, :100])
    assert copied == []
    cache.append(k[:, :, 100:], v[:, :, 100:])
    assert copied == [PAGE, 0] * 2
    cache.append(k, v, [0, 600])
    assert max(copied) <= 2 * PAGE


@pytest.mark.parametrize("padding", [[0, 0, 7], [299, 150, 0], [300, 1, 300]])
def test_ragged_rows_equal_themselves_alone(padding):
    n, more = 300, 70
    k, v = tokens(3, n)
    k2, v2 = tokens(3, more, seed=1)
    for row, padded in enumerate(padding):
        k[row, :, :padded], v[row, :, :padded] = np.nan, np.inf
    q = gaussian(3, 2 * HEADS, 1, 64, seed=2)
    before = pq.get_num_threads()
    pq.set_num_threads(1)  # results are added up in an order that depends on it
    try:
        together = pq.KVCache(PAIR)
        together.append(k, v, np.array(padding))
        together.append(k2, v2)
        out = together.attend(q)
        assert together.lengths.tolist() == [n - p + more for p in padding]
        for row, padded in enumerate(padding):
            alone = pq.KVCache(PAIR)
            one = slice(row, row + 1)
            alone.append(k[one, :, padded:], v[one, :, padded:])
            alone.append(k2[one], v2[one])
            np.testing.assert_array_equal(alone.attend(q[one]), out[one])
            for x, y in zip(together.decode(), alone.decode(), strict=True):
                np.testing.assert_array_equal(x[one, :, together.seq_len - alone.seq_len :], y)
            together_alone = copy.deepcopy(together)
            together_alone.select([row])
            assert_same(together_alone, alone)
    finally:
        pq.set_num_threads(before)


def test_padding_within_a_conversation():
    """Rows that have different numbers of new tokens, later too."""
    k, v = tokens(2, 40, seed=1)
    cache = filled(200, 2, [0, 60])
    cache.append(k, v, [30, 0])
    assert cache.lengths.tolist() == [210, 180]
    assert_attends(cache, gaussian(2, 2 * HEADS, 2, 64, seed=2))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_exact_tokens_stay_as_they_are(dtype):
    k, v = (x.astype(dtype) for x in tokens(1, 250))
    cache = pq.KVCache(PAIR)
    cache.append(k, v)
    decoded, _ = cache.decode()
    packed = cache._state.packed[0]
    assert packed == PAGE
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded[:, :, :4], k[:, :, :4])
    np.testing.assert_array_equal(decoded[:, :, 4 + packed :], k[:, :, 4 + packed :])
    error = decoded[:, :, 4 : 4 + packed] - k[:, :, 4 : 4 + packed].astype(np.float64)
    assert 0 < np.square(error).sum() < 0.02 * np.square(k.astype(np.float64)).sum()
    # decode() rounds what the codes stand for, attention does not
    rtol = 1e-3 if dtype == "float16" else 1e-5
    assert_attends(cache, gaussian(1, 2 * HEADS, 1, 64, seed=1), rtol=rtol)


def test_stale_slots_and_lanes_do_not_leak():
    cache = filled(500, 2, [0, 90])
    cache.crop(250)
    poisoned = copy.deepcopy(cache)
    state = poisoned._state
    for store in (state.keys, state.values):
        for row, exact in enumerate(state.exact):
            store.exact[row, :, exact:] = np.nan
        layout = store.table.format.layout
        for row, length in zip(store.table.blocks, store.table.lengths, strict=True):
            block, lanes = row[-1], length % PAGE
            assert lanes
            block = block.copy()
            assert all(place.width == 32 for place in layout.code_rows)
            for place in layout.code_rows:
                block[:, place.word + lanes : place.word + PAGE] = 0xFFFFFFFF
            for word in layout.radius_words:
                block.view("<u2")[:, 2 * word + lanes : 2 * word + PAGE] = 0x7E00  # NaN
            row[-1].flags.writeable = True  # the copy of a cache shares its blocks
            row[-1][:] = block
    q = gaussian(2, 2 * HEADS, 3, 64, seed=1)
    clean = filled(500, 2, [0, 90])
    clean.crop(250)
    for x, y in zip(poisoned.decode(), clean.decode(), strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(poisoned.attend(q), clean.attend(q))
    # and not when the lanes are filled again
    for one in (poisoned, clean):
        one.append(*tokens(2, 300, seed=3))
    assert_same(poisoned, clean)
    np.testing.assert_array_equal(poisoned.attend(q), clean.attend(q))


def test_single_tokens_grow_at_the_compressed_slope():
    n = 200 if NOJIT else 1000
    cache, sizes = pq.KVCache(PAIR), []
    k, v = tokens(1, n)
    for t in range(n):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        held = cache._state.exact[0]
        assert held <= 4 + 64 + 127
        slots = cache._state.keys.exact.shape[2]
        assert held <= slots < held + 16
        sizes.append(cache.nbytes)
    page = HEADS * (PAIR.keys.page_nbytes + PAIR.values.page_nbytes)
    table = 2 * 8 * (1 + HEADS)  # an address, and where each head's page starts
    pages = (n - 4 - 64) // PAGE
    assert cache._state.packed == (pages * PAGE,)
    buffers = 2 * 4 * HEADS * 64 * slots
    assert sizes[-1] == buffers + pages * (page + table)
    # what is not full yet goes up and down with a period of a page
    growth = np.array(sizes[PAGE:]) - sizes[:-PAGE]
    assert (growth[64 + 4 :] == page + table).all()
    per_token = (page + table) / PAGE
    assert per_token / (2 * HEADS * 64) * 8 == pytest.approx(PAIR.bits_per_value, rel=0.03)
    assert cache.bits_per_value == 8 * cache.nbytes / (n * HEADS * 128)


# ---- crop, select, repeat, reset -----------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 4, 5, 130, 132, 133, 300, 388, 389, 499, 500])
def test_crop_keeps_the_first_tokens(n):
    cache = filled(500, 2, [0, 20])
    before = [x.copy() for x in cache.decode()]
    bytes_before = cache.nbytes
    cache.crop(n)
    assert cache.lengths.tolist() == [n, max(0, n - 20)]
    assert cache.seq_len == n
    for x, y in zip(cache.decode(), before, strict=True):
        np.testing.assert_array_equal(x, y[:, :, :n])
    assert cache.nbytes <= bytes_before
    pages = [-(-max(0, min(384, length - 4)) // PAGE) for length in cache.lengths]
    assert [len(row) for row in cache._state.keys.table.blocks] == pages


def test_crop_of_recent_tokens_is_undone_by_appending_them():
    k, v = tokens(1, 500)
    cache, whole = filled(500), filled(500)
    cache.crop(400)
    cache.append(k[:, :, 400:], v[:, :, 400:])
    assert_same(cache, whole)


def test_crop_into_a_page_keeps_codes_and_offset():
    cache = filled(500)
    old = cache._state.keys.table.blocks[0][1]
    cache.crop(200)
    block = cache._state.keys.table.blocks[0][1]
    assert block is old
    assert cache._state.exact == (4,)
    k, v = tokens(1, 200, seed=1)
    rows = [ModelRow(PAIR, 4, 64)]
    first_k, first_v = tokens(1, 500)
    for t in range(500):
        rows[0].append(first_k[0, :, t], first_v[0, :, t])
    rows[0].crop(200)
    for t in range(200):
        cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        rows[0].append(k[0, :, t], v[0, :, t])
        assert cache._state.exact[0] - 4 <= 64 + 127
    assert_holds(cache, rows)
    filled_block = cache._state.keys.table.blocks[0][1]
    assert filled_block is not old
    layout = PAIR.keys.layout
    np.testing.assert_array_equal(
        filled_block[:, layout.offset_word :], old[:, layout.offset_word :]
    )


def test_sinks_are_refilled_after_a_crop():
    cache, whole = filled(300), filled(300)
    cache.crop(2)
    k, v = tokens(1, 300)
    cache.append(k[:, :, 2:], v[:, :, 2:])
    assert_same(cache, whole)


def test_selected_and_repeated_rows_share_pages():
    cache = filled(500, 2, [0, 130])
    one_row = filled(500)
    q = gaussian(2, 2 * HEADS, 1, 64, seed=1)
    out = cache.attend(q)
    pages = {id(block) for row in cache._state.keys.table.blocks for block in row}
    cache.select([1, 0, 0])
    assert cache.batch_size == 3
    assert cache.lengths.tolist() == [370, 500, 500]
    assert {id(block) for row in cache._state.keys.table.blocks for block in row} == pages
    order = [1, 0, 0]
    np.testing.assert_allclose(cache.attend(q[order]), out[order], rtol=1e-5, atol=1e-5)
    cache.repeat(2)
    assert cache.lengths.tolist() == [370, 370, 500, 500, 500, 500]
    cache.select(np.array([2], np.int32))
    assert_same(cache, one_row)
    one_row.select([0])  # in as many slots as there are tokens
    assert cache.nbytes == one_row.nbytes  # of unused rows, all is released
    cache.repeat(50)
    pages = sum(block.nbytes for block in one_row._state.keys.table.blocks[0])
    pages += sum(block.nbytes for block in one_row._state.values.table.blocks[0])
    assert cache.nbytes == 50 * (one_row.nbytes - pages) + pages


def test_beams_go_their_own_ways():
    """Rows that share pages, a partial one among them, do not disturb each other."""
    cache = filled(300)
    cache.crop(100)
    cache.repeat(2)
    k, v = tokens(2, 250, seed=1)
    cache.append(k, v)
    for row in range(2):
        alone = filled(300)
        alone.crop(100)
        alone.append(k[row : row + 1], v[row : row + 1])
        mine = copy.deepcopy(cache)
        mine.select([row])
        assert_same(mine, alone)


def test_reset_forgets_everything():
    cache = filled(300, 2)
    cache.reset()
    assert (cache.batch_size, cache.num_kv_heads, cache.seq_len, cache.nbytes) == (0, 0, 0, 0)
    assert cache.lengths.tolist() == []
    assert np.isnan(cache.bits_per_value)
    cache.append(*(x.astype(np.float64) for x in tokens(1, 5, heads=3)))
    assert (cache.batch_size, cache.num_kv_heads, cache.seq_len) == (1, 3, 5)


# ---- copies --------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy], ids=["deepcopy", "copy"])
def test_copies_share_pages_and_nothing_else(again):
    cache = filled(500, 2, [0, 90])
    other = again(cache)
    assert_same(cache, other)
    assert other._state.keys.table.blocks[0][0] is cache._state.keys.table.blocks[0][0]
    before = to_plain(cache._state)
    other.crop(490)
    other.append(*tokens(2, 5, seed=1))  # into slots that were in use
    other.append(*tokens(2, 300, seed=2))
    other.crop(100)
    for name, array in to_plain(cache._state)[1].items():
        np.testing.assert_array_equal(array, before[1][name])
    cache.append(*tokens(2, 1, seed=2))
    assert (cache.seq_len, other.seq_len) == (501, 100)


def test_copies_and_pickles_of_an_empty_cache():
    cache = pq.KVCache(PAIR, sink=1, recent=2, nan="propagate")
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert (other.formats, other.sink, other.recent) == (PAIR, 1, 2)
        assert other.batch_size == 0
        other.append(*tokens(1, 3))
        assert cache.seq_len == 0


def test_pickles_go_on_bit_for_bit():
    cache = filled(500, 2, [0, 90])
    cache.crop(300)
    cache.repeat(2)
    other = pickle.loads(pickle.dumps(cache))
    assert_same(cache, other)
    for name in ("keys", "values"):  # shared pages are shared again
        ours, theirs = (getattr(one._state, name).table.nbytes for one in (cache, other))
        assert ours == theirs
    for one in (cache, other):
        one.append(*tokens(4, 200, seed=1))
    assert_same(cache, other)
    q = gaussian(4, 2 * HEADS, 1, 64, seed=2)
    np.testing.assert_array_equal(cache.attend(q), other.attend(q))


def test_repr_says_what_there_is():
    assert repr(filled(7, 2)).startswith("KVCache(batch_size=2, num_kv_heads=2, seq_len=7, nbytes=")


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named", "pair"),
    [
        (("balanced",), {"head_dim": 64}, PAIR),
        (("balanced",), {"head_dim": 64, "value_head_dim": 32},
         pq.preset("balanced", 64, value_head_dim=32)),
        ((PAIR,), {}, PAIR),
        ((PAIR.keys, PAIR.values), {}, PAIR),
        ((SMALL,), {}, pq.FormatPair(SMALL, SMALL)),
    ],
    ids=["preset", "preset of two head_dims", "pair", "two formats", "one format"],
)  # fmt: skip
def test_formats_are_given_in_any_way(arguments, named, pair):
    assert pq.KVCache(*arguments, **named).formats == pair


@pytest.mark.parametrize(
    ("arguments", "named", "error", "message"),
    [
        (("best",), {"head_dim": 64}, ValueError, "preset is 'best'; it must be one of paper"),
        (("best",), {}, ValueError, "preset is 'best'; it must be one of paper"),
        (("paper",), {}, TypeError, "key_format is 'paper', a preset, which needs head_dim"),
        (("paper",), {"head_dim": 63}, ValueError, "head_dim is 63; it must be a multiple of 16"),
        (("paper", SMALL), {"head_dim": 64}, TypeError, "value_format is .*; a preset has one"),
        ((PAIR, SMALL), {}, TypeError, "value_format is .*; a FormatPair has one already"),
        ((PAIR,), {"head_dim": 64}, TypeError, "head_dim is 64 .* formats have their own"),
        ((None,), {}, TypeError, "key_format is None; formats are given as two PolarFormat"),
        ((SMALL, "paper"), {}, TypeError, "value_format is 'paper'; formats are given as"),
        ((SMALL,), {"sink": -1}, ValueError, "sink is -1; it must be at least 0"),
        ((SMALL,), {"recent": -5}, ValueError, "recent is -5; it must be at least 0"),
        ((SMALL,), {"recent": 6.5}, TypeError, "recent is 6.5; it must be an int"),
        ((SMALL,), {"nan": "ignore"}, ValueError, "nan is 'ignore'; it must be 'raise' or"),
        ((SMALL,), {"key_codebooks": "online"}, TypeError, "key_codebooks is 'online'; it must"),
        (
            (SMALL,),
            {"value_codebooks": pq.Codebooks.analytic(PAIR.keys)},
            ValueError,
            r"value_codebooks have \(5, 4, .* bits by level; the format has \(4, 5\)",
        ),
    ],
)
def test_bad_settings(arguments, named, error, message):
    with pytest.raises(error, match=message):
        pq.KVCache(*arguments, **named)


def numbers(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def with_value(x, value, *index):
    x = x.copy()
    x[index] = value
    return x


GOOD = numbers(2, 2, 5, 64)
LONG = with_value(GOOD, 6e4, 1, 0, 3, slice(0, 2))

BAD_APPENDS = {
    "three axes": ((GOOD[0], GOOD), ValueError, r"k has shape \(2, 5, 64\); .* \(2, 2, n, 64\)"),
    "batch": ((GOOD[:1], GOOD), ValueError, r"k has shape \(1, 2, 5, 64\); .* \(2, 2, n, 64\)"),
    "heads": ((GOOD, GOOD[:, :1]), ValueError, r"v has shape \(2, 1, 5, 64\); .* \(2, 2, n, 64\)"),
    "head_dim": ((numbers(2, 2, 5, 32), GOOD), ValueError, r"k has shape .* \(2, 2, n, 64\)"),
    "tokens": ((GOOD, GOOD[:, :, :4]), ValueError, r"k has shape .* and v .*must agree"),
    "dtype": ((GOOD.astype("f2"), GOOD), TypeError, "k is numpy float16; .* numpy float32, as the"),
    "dtype of v": ((GOOD, GOOD.astype("f8")), TypeError, "v is numpy float64; it must be numpy fl"),
    "integers": ((GOOD.astype(int), GOOD), TypeError, "k has dtype int64; it must be one of float"),
    "nan": (
        (GOOD, with_value(GOOD, np.nan, 1, 1, 4, 63)),
        ValueError,
        r"v is nan at index \(1, 1, 4, 63\); pass nan='propagate'",
    ),
    "inf": (
        (with_value(GOOD, -np.inf, 0, 1, 2, 0), GOOD),
        ValueError,
        r"k is -inf at index \(0, 1, 2, 0\); pass nan='propagate'",
    ),
    "norm": ((LONG, GOOD), ValueError, r"k at index \(1, 0, 3\) has norm 8.485e\+04; .* scale k"),
    "padded nan": (
        (with_value(GOOD, np.nan, 1, 1, 4, 63), GOOD, [0, 4]),
        ValueError,
        r"k is nan at index \(1, 1, 4, 63\)",
    ),
    "padding": ((GOOD, GOOD, [0, 6]), ValueError, r"padding is \[0, 6\]; .* of 2 rows, 0 to 5"),
    "negative": ((GOOD, GOOD, [-1, 0]), ValueError, r"padding is \[-1, 0\]; .* 2 rows, 0 to 5"),
    "few paddings": ((GOOD, GOOD, [1]), ValueError, r"padding is \[1\]; .* each of 2 rows"),
    "padding mask": ((GOOD, GOOD, [True, False]), TypeError, "padding has dtype bool"),
    "padding axes": ((GOOD, GOOD, [[1, 0]]), ValueError, r"padding has shape \(1, 2\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_APPENDS)
@pytest.mark.parametrize("n", [5, 195], ids=["few", "many"])
def test_appends_that_fail_change_nothing(name, n):
    arguments, error, message = BAD_APPENDS[name]
    cache, untouched = filled(n, 2, [0, 3]), filled(n, 2, [0, 3])
    with pytest.raises(error, match=message):
        cache.append(*arguments)
    assert_same(cache, untouched)
    # a first append decides on nothing if it fails
    if not re.search("as the|n, 64", message):
        new = pq.KVCache(PAIR)
        with pytest.raises(error):
            new.append(*arguments)
        assert (new.batch_size, new.nbytes) == (0, 0)


def test_bad_values_deep_in_a_prompt():
    k, v = tokens(2, 300)
    for token in (0, 150, 299):  # sink, page, recent
        cache = filled(10, 2)
        with pytest.raises(ValueError, match=rf"v is nan at index \(1, 0, {token}, 7\)"):
            cache.append(k, with_value(v, np.nan, 1, 0, token, 7))
        assert_same(cache, filled(10, 2))


def test_an_encoder_that_fails_changes_nothing(monkeypatch):
    from polarquant_nb import page_table

    cache = filled(500, 2)
    cache.crop(200)
    cache.append(*tokens(2, 100, seed=1))
    before = copy.deepcopy(cache)
    encode_into, calls = page_table.encode_into, []

    def fail_later(*arguments, **named):
        calls.append(1)
        if len(calls) > 3:
            raise MemoryError
        return encode_into(*arguments, **named)

    monkeypatch.setattr(page_table, "encode_into", fail_later)
    with pytest.raises(MemoryError):
        cache.append(*tokens(2, 300, seed=2))
    assert len(calls) == 4
    monkeypatch.undo()
    assert_same(cache, before)
    for one in (cache, before):
        one.append(*tokens(2, 300, seed=2))
    assert_same(cache, before)


def test_first_append_with_k_and_v_of_two_kinds():
    with pytest.raises(TypeError, match="v is numpy float64; it must be numpy float32, as k is"):
        pq.KVCache(PAIR).append(GOOD, GOOD.astype(np.float64))
    with pytest.raises(ValueError, match=r"k has shape \(2, 0, 5, 64\); .* \(batch, num_kv_heads"):
        pq.KVCache(PAIR).append(GOOD[:, :0], GOOD[:, :0])


def test_nan_is_stored_where_that_is_asked_for():
    k, v = tokens(1, 300)
    k[0, 1, 50], v[0, 0, 299, 3], k[0, 0, 60] = np.nan, np.inf, 1e5
    cache = pq.KVCache(PAIR, nan="propagate")
    cache.append(k, v)
    decoded = cache.decode()
    assert np.isnan(decoded[0][0, 1, 50]).all()
    assert np.isfinite(decoded[0][0, 1, 51]).all()
    assert np.isinf(decoded[1][0, 0, 299, 3])
    assert np.isfinite(cache.decode()[0][0, 0]).all()


def test_no_tokens_and_no_rows():
    cache = pq.KVCache(PAIR)
    cache.append(*tokens(2, 0))
    assert (cache.batch_size, cache.seq_len) == (2, 0)
    assert cache.attend(np.zeros((2, 4, 0, 64), np.float32)).shape == (2, 4, 0, 64)
    assert cache.decode()[0].shape == (2, 2, 0, 64)
    cache.append(*tokens(2, 3), [3, 3])
    assert cache.lengths.tolist() == [0, 0]
    cache.crop(0)
    cache.append(*tokens(2, 200), [0, 200])
    assert cache.lengths.tolist() == [200, 0]
    out = cache.attend(gaussian(2, 4, 1, 64))
    assert out[0].any()
    assert not out[1].any()
    cache.select([])
    assert (cache.batch_size, cache.seq_len) == (0, 0)
    cache.append(*tokens(0, 5))
    assert cache.attend(np.zeros((0, 4, 0, 64), np.float32)).shape == (0, 4, 0, 64)
    assert pickle.loads(pickle.dumps(cache)).batch_size == 0


def test_crop_select_and_repeat_of_an_empty_cache():
    cache = pq.KVCache(PAIR)
    cache.crop(0)
    cache.select([])
    cache.repeat(3)
    assert cache.batch_size == 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.crop(301), ValueError, "n is 301; it must be 0 to seq_len = 300"),
        (lambda c: c.crop(-1), ValueError, "n is -1; it must be 0 to seq_len = 300"),
        (lambda c: c.crop(1.0), TypeError, "n is 1.0; it must be an int"),
        (lambda c: c.repeat(0), ValueError, "n is 0; it must be at least 1"),
        (lambda c: c.repeat("2"), TypeError, "n is '2'; it must be an int"),
        (lambda c: c.select([0, 2]), ValueError, r"indices are \[0, 2\]; .* batch_size is 2"),
        (lambda c: c.select([-1]), ValueError, r"indices are \[-1\]; each must be 0 to"),
        (lambda c: c.select([True, False]), TypeError, "indices has dtype bool"),
        (lambda c: c.select([0.0]), TypeError, "indices has dtype float64; .* integers"),
        (lambda c: c.select([[0], [0, 1]]), ValueError, r"indices is \[\[0\], .* one-dimensional"),
        (lambda c: c.select(0), ValueError, r"indices has shape \(\); it must be one-dim"),
        (lambda c: c.attend(numbers(2, 3, 1, 64)), ValueError, "q has 3 heads; .*kv_heads = 2"),
        (lambda c: c.attend(numbers(1, 4, 1, 64)), ValueError, "q has shape .* batch 2 .*cache"),
        (lambda c: c.attend(numbers(2, 4, 1, 32)), ValueError, "q has shape .* head_dim 64"),
        (lambda c: c.attend(numbers(2, 4, 64)), ValueError, "q has shape"),
        (lambda c: c.attend(numbers(2, 4, 1, 64, dtype=int)), TypeError, "q has dtype int64"),
        (lambda c: c.attend(numbers(2, 4, 301, 64)), ValueError, "q_len is 301 and seq_len 300"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), np.ones(299, bool)), ValueError,
         r"mask has shape \(299,\); .* \(2, 4, 1, 300\)"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), np.ones(300, int)), TypeError, "mask has dtype"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), numbers(1, 2, 4, 1, 300)), ValueError,
         r"mask has shape \(1, 2, 4, 1, 300\)"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), scale=-1), ValueError, "scale is -1; .*positive"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), softcap=0), ValueError, "softcap is 0; .*posit"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), softcap=1e39), ValueError,
         r"softcap is 1e\+39; .*float32"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), scale=1e-50), ValueError, "scale is 1e-50; .*32"),
        (lambda c: c.attend(numbers(2, 4, 1, 64), scale="1"), TypeError, "scale is '1'; .*number"),
    ],
)  # fmt: skip
def test_bad_calls_change_nothing(call, error, message):
    cache = filled(300, 2, [0, 9])
    with pytest.raises(error, match=message):
        call(cache)
    assert_same(cache, filled(300, 2, [0, 9]))


def test_nothing_to_attend_to():
    with pytest.raises(ValueError, match="the cache is empty: nothing has been appended"):
        pq.KVCache(PAIR).attend(numbers(1, 2, 1, 64))
    with pytest.raises(ValueError, match="the cache is empty: nothing has been appended"):
        pq.KVCache(PAIR).decode()
    with pytest.raises(ValueError, match="q_len is 1 and seq_len 0"):
        filled(0).attend(numbers(1, 2, 1, 64))


# ---- torch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_tensors_go_in_and_come_out(dtype):
    torch = pytest.importorskip("torch")
    k, v = (torch.from_numpy(x).to(getattr(torch, dtype)) for x in tokens(2, 300))
    cache = pq.KVCache(PAIR)
    cache.append(k.requires_grad_(), v, torch.tensor([0, 40]))
    same = pq.KVCache(PAIR)
    same.append(*(x.detach().float().numpy() for x in (k, v)), [0, 40])
    for x, y in zip(
        cache._state.keys.table.blocks[1], same._state.keys.table.blocks[1], strict=True
    ):
        np.testing.assert_array_equal(x, y)
    decoded, _ = cache.decode()
    assert decoded.dtype == k.dtype
    assert torch.equal(decoded[:, :, 200:], k[:, :, 200:].detach())
    q = torch.from_numpy(gaussian(2, 2 * HEADS, 2, 64, seed=1)).to(k.dtype)
    mask = torch.rand(2, 1, 2, 300) < 0.9
    out, lse = cache.attend(q, mask, return_lse=True)
    assert (out.dtype, out.shape) == (q.dtype, (2, 2 * HEADS, 2, 64))
    assert lse.dtype == torch.float32
    expected = same.attend(q.float().numpy(), mask.numpy())
    torch.testing.assert_close(out, torch.from_numpy(expected).to(q.dtype))
    with pytest.raises(TypeError, match=f"k is numpy float32; it must be torch {dtype}, as the"):
        cache.append(*tokens(2, 1))
    cache.select(torch.tensor([1]))
    cache.append(k[1:, :, :200], v[1:, :, :200])
    again = pickle.loads(pickle.dumps(cache))
    assert torch.equal(again.decode()[1], cache.decode()[1])


def test_array_types_of_queries_and_cache_may_differ():
    torch = pytest.importorskip("torch")
    cache, q = filled(200), gaussian(1, 2 * HEADS, 1, 64, seed=1)
    out = cache.attend(torch.from_numpy(q))
    assert isinstance(out, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), cache.attend(q))
    half = cache.attend(q.astype(np.float16))
    assert half.dtype == np.float16
