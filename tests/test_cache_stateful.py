"""Any sequence of operations leaves a cache with what a plain model of it holds."""

from __future__ import annotations

import copy
import pickle

import numpy as np
from cache_model import ModelRow, assert_holds
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import NOJIT, SMALL, SMALL_OFFSET, exact_attention, visible_mask

import polarquant_nb as pq

HEADS = 2
SIZES = st.sampled_from([0, 1, 2, 5, 60, 127, 128, 129, 260]) | st.integers(0, 140)
MOST_ROWS = 2 if NOJIT else 4


class CacheMachine(RuleBasedStateMachine):
    """A cache of formats with and without offset, and lists of tokens."""

    @initialize(sink=st.sampled_from([0, 1, 4]), recent=st.sampled_from([0, 3, 64, 140]))
    def make(self, sink, recent):
        self.formats = pq.FormatPair(SMALL_OFFSET, SMALL)
        self.sink, self.recent = sink, recent
        self.cache = pq.KVCache(self.formats, sink=sink, recent=recent)
        self.rows: list[ModelRow] = []
        self.snapshots = []
        self.rng = np.random.default_rng(0)

    @rule(n=SIZES, data=st.data())
    def append(self, n, data):
        batch = len(self.rows) or data.draw(st.integers(1, 2))
        padding = [0] * batch
        if data.draw(st.booleans()):
            padding = [data.draw(st.integers(0, n)) for _ in range(batch)]
        k, v = self.rng.standard_normal((2, batch, HEADS, n, 64), dtype=np.float32)
        k += np.float32(0.5)
        for row, padded in enumerate(padding):
            k[row, :, :padded] = np.nan  # must not be looked at
        self.cache.append(k, v, padding if any(padding) else None)
        if not self.rows:
            self.rows = [ModelRow(self.formats, self.sink, self.recent) for _ in range(batch)]
        for i, row in enumerate(self.rows):
            for t in range(padding[i], n):
                row.append(k[i, :, t], v[i, :, t])

    @rule(data=st.data())
    def crop(self, data):
        n = data.draw(st.integers(0, self.cache.seq_len))
        less = self.cache.seq_len - n
        self.cache.crop(n)
        for row in self.rows:
            row.crop(max(0, row.length - less))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def select(self, data):
        row = st.integers(0, len(self.rows) - 1)
        indices = data.draw(st.lists(row, min_size=1, max_size=MOST_ROWS))
        self.cache.select(indices)
        self.rows = [self.rows[i].copy() for i in indices]

    @precondition(lambda self: 2 * len(self.rows) <= MOST_ROWS)
    @rule()
    def repeat(self):
        self.cache.repeat(2)
        self.rows = [row.copy() for row in self.rows for _ in range(2)]

    @rule()
    def reset(self):
        self.cache.reset()
        self.rows = []

    @rule()
    def take_snapshot(self):
        self.snapshots.append((copy.deepcopy(self.cache), [row.copy() for row in self.rows]))

    @precondition(lambda self: self.snapshots)
    @rule()
    def change_places_with_a_snapshot(self):
        snapshot = self.snapshots.pop(0)
        self.snapshots.append((self.cache, self.rows))
        self.cache, self.rows = snapshot

    @rule()
    def pickle(self):
        self.cache = pickle.loads(pickle.dumps(self.cache))

    @precondition(lambda self: self.cache.seq_len)
    @rule(q_len=st.sampled_from([1, 2, 4]), masked=st.booleans())
    def attend(self, q_len, masked):
        q_len = min(q_len, self.cache.seq_len)
        q = self.rng.standard_normal((len(self.rows), 2 * HEADS, q_len, 64), dtype=np.float32)
        mask = self.rng.random((len(self.rows), 1, q_len, self.cache.seq_len)) < 0.8
        out = self.cache.attend(q, mask if masked else None)
        seen = visible_mask(self.cache.lengths, q_len)
        expected, _ = exact_attention(q, *self.cache.decode(), mask=seen & mask if masked else seen)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

    @invariant()
    def numbers_are_in_bounds(self):
        cache = self.cache
        assert cache.batch_size == len(self.rows)
        assert cache.lengths.tolist() == [row.length for row in self.rows]
        if self.rows:
            held = np.array(cache._state.exact) - self.sink
            assert (held <= self.recent + 127).all()
            slots = cache._state.keys.exact.shape[2]
            assert held.max(initial=0) <= slots < self.sink + self.recent + 127 + 16

    @invariant()
    def tokens_are_those_of_the_model(self):
        if self.rows:
            assert_holds(self.cache, self.rows)

    def teardown(self):
        """Snapshots have not changed with the cache."""
        for cache, rows in getattr(self, "snapshots", []):
            if rows:
                assert_holds(cache, rows)


CacheMachine.TestCase.settings = settings(
    max_examples=max(4, settings().max_examples // (10 if NOJIT else 2)),
    stateful_step_count=6 if NOJIT else 15,
)
TestCache = CacheMachine.TestCase
