"""Key scales and bias that a cache fits to the first tokens of its rows."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from cache_model import assert_same
from support import NOJIT, gaussian

import polarquant_nb as pq

PAIR = pq.preset("balanced", 64)
BATCH, HEADS, GROUP, TOKENS, DIM = 2, 2, 2, 480, 64
INV_FREQ = 1e4 ** (-np.arange(DIM // 2) / (DIM // 2))

compiled = pytest.mark.skipif(NOJIT, reason="too many vectors for plain Python")


def outliers(seed=0):
    """Keys that are small where queries are large, and the other way round."""
    scales = np.exp(gaussian(HEADS, 1, DIM, seed=seed)).astype(np.float32)
    q = gaussian(BATCH, HEADS * GROUP, TOKENS, DIM, seed=seed + 1) * np.repeat(scales, GROUP, 0)
    k = gaussian(BATCH, HEADS, TOKENS, DIM, seed=seed + 2) / scales
    return q, k, gaussian(BATCH, HEADS, TOKENS, DIM, seed=seed + 3)


def filled(q, k, v, cuts=(), padding=None, **options):
    cache = pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner(**options))
    for first, stop in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        here = np.s_[:, :, first:stop]
        cache.append(k[here], v[here], None if first else padding, q=q[here])
    return cache


def logit_error(cache, q, k):
    decoded, _ = cache.decode()
    errors = np.repeat(decoded - k, GROUP, 1) * q
    return float(np.square(errors.sum(-1)).mean())


def test_fitted_scales_lower_the_error_of_logits():
    q, k, v = outliers()
    plain = pq.KVCache(PAIR)
    plain.append(k, v)
    assert logit_error(filled(q, k, v), q, k) < 0.25 * logit_error(plain, q, k)


def test_fitted_bias_is_taken_off():
    q, k, v = outliers()
    bias = pq.RotaryBias(30 * gaussian(HEADS, DIM, seed=9), INV_FREQ)
    biased = k + bias.at(0, TOKENS)
    with_bias = filled(q, biased, v, inv_freq=INV_FREQ)
    assert logit_error(with_bias, q, biased) < 1.2 * logit_error(filled(q, k, v), q, k)


def test_tokens_stay_exact_until_there_are_enough():
    q, k, v = outliers()
    cache = filled(q, k, v, cuts=(255,))
    early = pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner())
    assert early.wants_queries
    early.append(k[:, :, :255], v[:, :, :255], q=q[:, :, :255])
    np.testing.assert_array_equal(early.decode()[0], k[:, :, :255])
    assert early.wants_queries
    assert not cache.wants_queries
    assert (cache.decode()[0] != k).any()


def test_rows_are_fitted_alone():
    """A row that starts later has what it would have alone, padding and other rows aside."""
    q, k, v = outliers()
    both = filled(q, k, v, cuts=(200, 300), padding=[0, 90])
    alone = pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner())
    for part in (np.s_[1:, :, 90:200], np.s_[1:, :, 200:300], np.s_[1:, :, 300:]):
        alone.append(k[part], v[part], q=q[part])
    both.select([1])
    assert_same(both, alone)


def test_what_was_fitted_stays_fixed():
    q, k, v = outliers()
    cache = filled(q, k, v)
    fitted = cache._state.keys.table.preconditioner
    cache.append(k[:, :, :200] * 5, v[:, :, :200])  # no queries are wanted any more
    assert cache._state.keys.table.preconditioner is fitted
    cache.crop(100)
    cache.append(k[:, :, :200] * 5, v[:, :, :200])
    assert cache._state.keys.table.preconditioner is fitted
    cache.reset()
    assert cache.wants_queries


@pytest.mark.parametrize("cuts", [pytest.param((100,), marks=compiled), (100, 300)])
@pytest.mark.parametrize("inv_freq", [None, INV_FREQ])
def test_copies_and_files_go_on_alike(tmp_path, cuts, inv_freq):
    pytest.importorskip("safetensors")
    q, k, v = outliers()
    cache = pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner(inv_freq=inv_freq))
    for first, stop in zip((0, *cuts), cuts, strict=False):
        here = np.s_[:, :, first:stop]
        cache.append(k[here], v[here], q=q[here])
    cache.save(tmp_path / "cache")
    others = [
        copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), pq.KVCache.load(tmp_path / "cache")
    ]  # fmt: skip
    rest = np.s_[:, :, cuts[-1] :]
    for one in (cache, *others):
        one.append(k[rest], v[rest], q=q[rest])
    for other in others:
        assert_same(cache, other)
        np.testing.assert_array_equal(cache.attend(q[:, :, -1:]), other.attend(q[:, :, -1:]))


def test_selected_rows_take_what_was_fitted_along():
    q, k, v = outliers()
    cache = filled(q, k, v)
    out = cache.attend(q[:, :, -1:])
    cache.select([1, 1, 0])
    np.testing.assert_allclose(cache.attend(q[[1, 1, 0], :, -1:]), out[[1, 1, 0]], rtol=1e-5)


def test_numbers_are_counted():
    q, k, v = outliers()
    plain = pq.KVCache(PAIR)
    plain.append(k, v)
    numbers = BATCH * HEADS * DIM
    assert filled(q, k, v).nbytes == plain.nbytes + 4 * numbers + 8 * numbers


def test_numbers_that_are_not_finite_fit_nothing():
    q, k, v = outliers()
    q[0, 0, 3, 5], k[1, 0, 7, 7] = np.inf, np.nan
    online = pq.OnlinePreconditioner()
    cache = pq.KVCache(PAIR, preconditioner=online, nan="propagate")
    cache.append(k, v, q=q)
    assert np.isfinite(cache._state.keys.table.preconditioner.scales).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q: None, "q is None; while an OnlinePreconditioner"),
        (lambda q: q[:, :, 1:], "q has shape"),
        (lambda q: q[:, :3], "q has shape"),
        (lambda q: q[..., :32], "q has shape"),
    ],
    ids=["none", "tokens", "heads", "head_dim"],
)
def test_queries_that_do_not_fit(change, message):
    q, k, v = outliers()
    cache = pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner())
    with pytest.raises(ValueError, match=message):
        cache.append(k, v, q=change(q))
    assert cache.seq_len == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scales": False}, "nothing to fit"),
        ({"min_tokens": 100}, "min_tokens is 100; it must be at least 256"),
        ({"alpha": 2.0}, "alpha is 2.0"),
        ({"inv_freq": np.zeros((2, 2))}, "inv_freq has shape"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        pq.OnlinePreconditioner(**options)


def test_bias_for_more_coordinates_than_keys_have():
    with pytest.raises(ValueError, match="inv_freq has shape"):
        pq.KVCache(PAIR, preconditioner=pq.OnlinePreconditioner(inv_freq=np.ones(33)))
