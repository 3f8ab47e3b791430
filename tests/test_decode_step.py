"""KVCache.step: what append and attend do, by calls of kernels that are prepared."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from cache_model import PAIR, tokens
from support import NOJIT, gaussian, run_python

import polarquant_nb as pq
from polarquant_nb.decode_step import DecodeStep
from polarquant_nb.kernels import team
from polarquant_nb.kernels.call_list import CallList

compiled_only = pytest.mark.skipif(NOJIT, reason="helpers run compiled code only")


@pytest.fixture
def steps(monkeypatch):
    """How many steps were prepared ones."""
    taken = []
    step = DecodeStep.__call__
    monkeypatch.setattr(DecodeStep, "__call__", lambda *args: taken.append(1) or step(*args))
    return taken


@pytest.fixture
def threads():
    before = pq.get_num_threads()
    yield pq.set_num_threads
    pq.set_num_threads(before)


def queries(batch, heads, dtype=np.float32, seed=5):
    return gaussian(batch, heads, 1, 64, seed=seed).astype(dtype)


def pair(n, batch=1, dtype=np.float32, padding=None, **options):
    """Two caches with the same tokens: one to step, one to append to and to ask."""
    caches = [pq.KVCache(PAIR, **options) for _ in range(2)]
    for cache in caches:
        cache.append(*(x.astype(dtype) for x in tokens(batch, n, seed=n)), padding)
    return caches


def assert_steps_like(stepped, other, count, group=2, dtype=np.float32, **options):
    batch, heads = other.batch_size, other.num_kv_heads
    tolerance = {"float16": 2e-3, "float32": 1e-5, "float64": 1e-5}[np.dtype(dtype).name]
    for i in range(count):
        k, v = (x.astype(dtype) for x in tokens(batch, 1, seed=1000 + i))
        q = queries(batch, group * heads, dtype, seed=i)
        out = stepped.step(q, k, v, **options)
        other.append(k, v)
        expected = other.attend(q, **options)
        assert out.dtype == expected.dtype
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
    assert stepped.lengths.tolist() == other.lengths.tolist()
    assert stepped.nbytes == other.nbytes
    for a, b in zip(stepped.decode(), other.decode(), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 3, 100, 190] if NOJIT else [0, 1, 3, 100, 190, 700])
def test_across_pages_and_buffers(n, steps):
    count = 30 if NOJIT else 160
    assert_steps_like(*pair(n), count)
    assert len(steps) > 0.8 * count


def test_without_sinks_and_recent_tokens(steps):
    assert_steps_like(*pair(250, sink=0, recent=0), 20)
    assert steps


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_other_dtypes(dtype, steps):
    assert_steps_like(*pair(200, dtype=dtype), 10, dtype=dtype)
    assert bool(steps) == (dtype == "float16")  # float64 is kept as it is, and takes longer


@pytest.mark.parametrize("group", [4, 8, 12, 16])
def test_any_number_of_heads(group, steps):
    assert_steps_like(*pair(200), 5, group=group)
    assert bool(steps) == (group != 12)


def test_rows_of_different_lengths(steps):
    assert_steps_like(*pair(300, batch=3, padding=[0, 7, 290]), 20)
    assert steps


def test_scale_and_softcap(steps):
    assert_steps_like(*pair(200), 5, scale=0.3, softcap=2.0)
    assert steps


def test_changes_between_steps(steps):
    stepped, other = pair(300, batch=2)
    for change in (
        lambda c: c.crop(250),
        lambda c: c.select([1, 0, 1]),
        lambda c: c.append(*tokens(3, 150, seed=9)),
        lambda c: c.repeat(2),
        lambda c: c.crop(40),
    ):
        assert_steps_like(stepped, other, 3)
        change(stepped)
        change(other)
    assert_steps_like(stepped, other, 3)
    assert len(steps) >= 8


def test_copies_are_independent():
    stepped, other = pair(200)
    assert_steps_like(stepped, other, 3)
    twin, twin_other = copy.deepcopy(stepped), copy.deepcopy(other)
    assert_steps_like(stepped, other, 3)
    before = [x.copy() for x in stepped.decode()]
    assert_steps_like(twin, twin_other, 3, group=1)
    for a, b in zip(stepped.decode(), before, strict=True):
        np.testing.assert_array_equal(a, b)


def test_reset_lets_go_of_everything():
    stepped, _ = pair(200)
    assert_steps_like(stepped, _, 3)
    stepped.reset()
    assert stepped.nbytes == 0
    assert stepped._step is None


def test_key_scales(steps):
    scales = np.exp2(np.arange(2 * 64).reshape(2, 64) % 3 - 1).astype(np.float32)
    assert_steps_like(*pair(300, preconditioner=pq.Preconditioner(scales=scales)), 10)
    assert steps


def test_tensors(steps):
    torch = pytest.importorskip("torch")
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)):
        stepped, other = pq.KVCache(PAIR), pq.KVCache(PAIR)
        k, v = (torch.from_numpy(x).to(dtype) for x in tokens(2, 300, seed=1))
        for cache in (stepped, other):
            cache.append(k, v)
        for i in range(20):
            # as a model has them: heads after tokens in memory
            q, k, v = (
                torch.from_numpy(gaussian(2, 1, n, 64, seed=3 * i + n)).to(dtype).transpose(1, 2)
                for n in (6, 2, 2)
            )
            out = stepped.step(q, k, v)
            other.append(k, v)
            expected = other.attend(q)
            assert out.dtype == dtype
            torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        for a, b in zip(stepped.decode(), other.decode(), strict=True):
            assert torch.equal(a, b)
    assert len(steps) > 40


def test_lists_of_numbers():
    stepped, other = pair(10)
    q, (k, v) = queries(1, 4, np.float64), tokens(1, 1, seed=3)
    for _ in range(2):
        out = stepped.step(q.tolist(), k, v)
    for _ in range(2):
        other.append(k, v)
    np.testing.assert_allclose(out, other.attend(q), rtol=1e-5)


def test_a_result_is_not_changed_by_the_next_step():
    stepped, _ = pair(200)
    q = queries(1, 4)
    first = stepped.step(q, *tokens(1, 1, seed=1))
    second = stepped.step(q, *tokens(1, 1, seed=2))
    before = second.copy()
    third = stepped.step(-q, *tokens(1, 1, seed=3))
    np.testing.assert_array_equal(second, before)
    assert not np.shares_memory(second, third)
    assert not np.shares_memory(first, second)


# ---- what is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[..., :32], k, v), "head_dim"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of num_kv_heads"),
        (lambda q, k, v: (q, k[..., :32], v), "k has shape"),
        (lambda q, k, v: (q, k, v[:, :1]), "v has shape"),
        (lambda q, k, v: (np.concatenate([q, q], 2), k, v), "q has shape .* one token"),
        (lambda q, k, v: (q, np.concatenate([k, k], 2), v), "k has shape .* one token"),
        (lambda q, k, v: (q, k * np.float32(np.nan), v), "k is nan"),
        (lambda q, k, v: (q, k, v * np.float32(1e6)), "v at index .* has norm"),
        (lambda q, k, v: (q, k.astype(np.float64), v), "float64"),
        (lambda q, k, v: (q.astype(int), k, v), "int64"),
    ],
)
def test_bad_input_leaves_the_cache_as_it_was(warm, change, message):
    stepped, other = pair(200)
    if warm:
        assert_steps_like(stepped, other, 2)
    q, (k, v) = queries(1, 4), tokens(1, 1, seed=3)
    with pytest.raises((ValueError, TypeError), match=message):
        stepped.step(*change(q, k, v))
    with pytest.raises(ValueError, match="scale"):
        stepped.step(q, k, v, scale=-1)
    assert stepped.seq_len == other.seq_len
    assert_steps_like(stepped, other, 3)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_step_has_not_been(warm, error, monkeypatch):
    """Ctrl-C between a token that is stored and one that is counted: later ones went astray."""
    stepped, other = pair(200)
    if warm:
        assert_steps_like(stepped, other, 2)

    def interrupted(function):
        def call(*args, **kwargs):
            function(*args, **kwargs)
            raise error

        return call

    with monkeypatch.context() as patch:
        patch.setattr(CallList, "__call__", interrupted(CallList.__call__))
        patch.setattr(pq.KVCache, "attend", interrupted(pq.KVCache.attend))
        with pytest.raises(error):
            stepped.step(queries(1, 4), *tokens(1, 1, seed=3))
    assert_steps_like(stepped, other, 3)


@pytest.mark.parametrize("n", [0, 200])
def test_no_rows_and_no_heads(n):
    stepped, other = pair(n, batch=2)
    for cache in (stepped, other):
        cache.select([])
    assert_steps_like(stepped, other, 2)
    stepped, other = pair(n, batch=2)
    assert_steps_like(stepped, other, 2, group=0)


def test_queries_beyond_float32():
    stepped, other = pair(200)
    q, (k, v) = queries(1, 4, np.float64), tokens(1, 1, seed=3)
    q[0, 1] = 1e300
    for _ in range(2):
        out = stepped.step(q, k, v)
        other.append(k, v)
        np.testing.assert_allclose(out, other.attend(q), rtol=1e-5)


def test_nan_is_kept_where_it_may_be(steps):
    stepped, other = pair(200, nan="propagate")
    assert_steps_like(stepped, other, 2)
    q, (k, v) = queries(1, 4), tokens(1, 1, seed=3)
    k[0, 0, 0, 3] = np.nan
    out = stepped.step(q, k, v)
    other.append(k, v)
    np.testing.assert_allclose(out, other.attend(q), rtol=1e-5)
    assert np.isnan(out[0, :2]).all()
    assert not np.isnan(out[0, 2:]).any()


# ---- threads -------------------------------------------------------------------------------------


@compiled_only
@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_helpers(num_threads, threads, monkeypatch):
    monkeypatch.setattr("polarquant_nb.decode_step.PAGES_PER_HELPER", 1)
    threads(num_threads)
    assert_steps_like(*pair(3000), 10)


def test_another_number_of_threads(threads, steps):
    stepped, other = pair(600)
    for n in (1, 3, 2):
        threads(n)
        assert_steps_like(stepped, other, 4)
    assert len(steps) >= 8


def test_case_52_many_python_threads_at_once(threads, monkeypatch):
    """Each with its own cache: helpers help one of them, scratch memory is a thread's own."""
    monkeypatch.setattr("polarquant_nb.decode_step.PAGES_PER_HELPER", 1)
    threads(3)
    pairs = [pair(200 + 50 * i) for i in range(2 if NOJIT else 4)]
    with ThreadPoolExecutor(4) as executor:
        list(executor.map(lambda both: assert_steps_like(*both, 3 if NOJIT else 40), pairs))


def test_a_cache_that_goes_from_thread_to_thread():
    stepped, other = pair(300)
    for _ in range(3):
        thread = threading.Thread(target=assert_steps_like, args=(stepped, other, 3))
        thread.start()
        thread.join()
    assert stepped.seq_len == 309


@compiled_only
def test_who_waits_for_a_helper_works_alone_for_a_while(threads, monkeypatch):
    monkeypatch.setattr("polarquant_nb.decode_step.PAGES_PER_HELPER", 1)
    threads(2)
    stepped, other = pair(2000)
    assert_steps_like(stepped, other, 3)
    mine = team._team()
    clock = iter(x for i in range(1000) for x in (3 * i, 3 * i + 1, 3 * i + 2.5))
    monkeypatch.setattr(team, "perf_counter", lambda: next(clock))
    mine._alone, offers, offer = 0, [], mine._code.offer
    monkeypatch.setattr(mine._code, "offer", lambda *args: offers.append(1) or offer(*args))
    assert_steps_like(stepped, other, 60)
    assert len(offers) == 1
    assert mine._alone
    mine._alone, mine._next_alone = 0, team._LEAST_ALONE


@compiled_only
@pytest.mark.parametrize("steps_after", [0, 1, 3])
def test_an_announced_step_may_come_or_not(steps_after, threads, monkeypatch):
    monkeypatch.setattr("polarquant_nb.decode_step.PAGES_PER_HELPER", 1)
    threads(3)
    stepped, other = pair(600)
    for _ in range(5):
        assert_steps_like(stepped, other, 2)
        if stepped._step:
            stepped._step.announce()
            stepped._step.announce()
        assert_steps_like(stepped, other, steps_after)


@compiled_only
def test_helpers_do_not_survive_a_fork_and_are_made_anew():
    code = """
import os, sys
import numpy as np, polarquant_nb as pq
from polarquant_nb import decode_step
decode_step.PAGES_PER_HELPER = 1
pq.set_num_threads(3)
cache = pq.KVCache("balanced", head_dim=64)
x = np.random.default_rng(0).standard_normal((1, 2, 2000, 64), dtype=np.float32)
cache.append(x, x)
def go():
    return [cache.step(x[:, :, :1], x[:, :, :1], x[:, :, :1]) for _ in range(5)][-1]
go()
pid = os.fork()
if pid == 0:
    os._exit(0 if np.isfinite(go()).all() else 1)
assert os.waitpid(pid, 0)[1] == 0
assert np.isfinite(go()).all()
print("both")
"""
    assert run_python("-c", code).strip() == "both"


# ---- the words that kernels are called with ------------------------------------------------------


@pytest.mark.skipif(NOJIT, reason="there is no machine code")
def test_arguments_of_a_kernel_in_memory():
    from polarquant_nb.kernels.call_list import Call, CallList
    from polarquant_nb.kernels.jit import kernel

    @kernel
    def weigh(pair, factor, x, out):
        floats, integers = pair
        for i in range(len(out)):
            out[i] = factor * floats[1, i] + integers[i] * x

    floats = np.arange(6, dtype=np.float32).reshape(2, 3)
    integers, out = np.array([10, -20, 30]), np.zeros(3)
    calls = CallList([[[Call(weigh, ((floats, integers), 0.5, -2, out), {})]]])
    calls()
    np.testing.assert_array_equal(out, [1.5 - 20, 2 + 40, 2.5 - 60])
    integers[:] = 0  # arrays are used where they are
    calls()
    np.testing.assert_array_equal(out, [1.5, 2, 2.5])


@pytest.mark.skipif(NOJIT, reason="there is no machine code")
def test_an_error_of_a_kernel_is_raised():
    from polarquant_nb.kernels.call_list import Call, CallList
    from polarquant_nb.kernels.jit import kernel

    @kernel
    def allocate(n, out):
        out[0] = len(np.empty(n))

    out = np.zeros(1)
    good, bad = (Call(allocate, (n, out), {}) for n in (3, 2**60))
    CallList([[[good]]])()
    assert out[0] == 3
    for phase in ([[bad]], [[good], [bad], [good]]):
        with pytest.raises(MemoryError, match="kernel"):
            CallList([phase])()
