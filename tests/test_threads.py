"""Threads: any number gives the same bytes, and none is left behind in a forked child."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
from support import NOJIT, SMALL, SMALL_OFFSET, gaussian, run_python

import polarquant_nb as pq
from polarquant_nb.threads import run_ranges

PAGES = 16 if NOJIT else 64  # enough for four threads


@pytest.fixture(autouse=True)
def restore_num_threads():
    before = pq.get_num_threads()
    yield
    pq.set_num_threads(before)


@pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])
def test_results_do_not_depend_on_the_number_of_threads(fmt):
    x = gaussian(PAGES // 2, 130, 64, seed=40)
    x[1, 3] = np.nan
    x[2, 100, 7] = np.inf
    x[3, 129] = 1e38
    found = []
    for num_threads in (1, 2, 4):
        pq.set_num_threads(num_threads)
        assert pq.get_num_threads() == num_threads
        pages = pq.encode(x, fmt, nan="propagate")
        found.append((pages.words, pages.decode(), pages.num_nonfinite, pages.num_saturated))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            np.testing.assert_array_equal(a, b)


def test_case_52_many_python_threads_at_once():
    """CASES row 52 (numba/numba#9288): a thread layer aborted when two threads called a kernel."""
    pq.set_num_threads(3)
    arrays = [gaussian(PAGES // 4, 256, 64, seed=seed) for seed in range(8)]
    expected = [pq.encode(x, SMALL).words for x in arrays]
    with ThreadPoolExecutor(4) as executor:
        for _ in range(1 if NOJIT else 10):
            found = list(executor.map(lambda x: pq.encode(x, SMALL), arrays))
            decoded = list(executor.map(pq.decode, found))
            for pages, words in zip(found, expected, strict=True):
                np.testing.assert_array_equal(pages.words, words)
            for pages, y in zip(found, decoded, strict=True):
                np.testing.assert_array_equal(pages.decode(), y)


def test_case_52_with_numbas_most_fragile_thread_layer():
    """The same under ``workqueue``, what pip installs on macOS and Windows have."""
    code = """
from concurrent.futures import ThreadPoolExecutor
import polarquant_nb as pq
from support import SMALL, gaussian
x = gaussian(8, 128, 64)
pq.set_num_threads(2)
with ThreadPoolExecutor(4) as executor:
    found = executor.map(lambda _: pq.encode(x, SMALL).words.tobytes(), range(8))
print(len(set(found)))
"""
    assert run_python("-c", code, NUMBA_THREADING_LAYER="workqueue").strip() == "1"


def test_threads_may_change_while_others_work():
    x = gaussian(PAGES // 2, 128, 64, seed=41)
    expected = pq.encode(x, SMALL).words
    with ThreadPoolExecutor(2) as executor:
        running = [executor.submit(pq.encode, x, SMALL) for _ in range(4)]
        for num_threads in (1, 3, 2, 4):
            pq.set_num_threads(num_threads)
        for future in running:
            np.testing.assert_array_equal(future.result().words, expected)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_works_in_a_forked_child():
    """In another process: forking this one, with its threads, is what Python warns of."""
    code = """
import os, warnings
import numpy as np
import polarquant_nb as pq
from support import SMALL, gaussian
warnings.simplefilter("ignore")
x = gaussian(32, 128, 64)
pq.set_num_threads(3)
words = pq.encode(x, SMALL).words
child = os.fork()
if child == 0:
    same = np.array_equal(pq.encode(x, SMALL).words, words)
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
assert np.array_equal(pq.encode(x, SMALL).words, words)
print(os.waitstatus_to_exitcode(status))
"""
    assert run_python("-c", code).strip() == "0"


def test_ranges_cover_everything_once_and_are_worth_a_thread():
    pq.set_num_threads(4)
    for total in (0, 1, 3, 4, 7, 8, 9, 40, 41):
        seen = []
        run_ranges(lambda a, b: seen.append((a, b)), total, 4)  # noqa: B023
        covered = sorted(seen)
        assert [i for a, b in covered for i in range(a, b)] == list(range(total))
        assert len(seen) <= 4
        assert len(seen) == 1 or all(b - a >= 4 for a, b in seen) or total == 0


@pytest.mark.parametrize("failing", [0, 12], ids=["this thread", "another thread"])
def test_errors_in_any_range_arrive(failing):
    pq.set_num_threads(4)

    def work(first, last):
        if first <= failing < last:
            raise RuntimeError("in a range")

    with pytest.raises(RuntimeError, match="in a range"):
        run_ranges(work, 16, 4)


def test_no_range_runs_on_after_an_interrupt():
    """What it writes to is the caller's again."""
    pq.set_num_threads(2)
    interrupted, written = Event(), []

    def work(first, last):
        if first == 0:
            interrupted.set()
            raise KeyboardInterrupt
        interrupted.wait()
        time.sleep(0.1)
        written.append(last)

    with pytest.raises(KeyboardInterrupt):
        run_ranges(work, 8, 4)
    assert written == [8]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"POLARQUANT_NUM_THREADS": "3"}, "3"),
        ({"POLARQUANT_NUM_THREADS": "3", "OMP_NUM_THREADS": "2"}, "3"),
        ({"POLARQUANT_NUM_THREADS": "", "OMP_NUM_THREADS": "2"}, "2"),
        ({"POLARQUANT_NUM_THREADS": "many", "OMP_NUM_THREADS": "0"}, None),
    ],
)
def test_number_of_threads_by_environment(environment, expected):
    if expected is None:
        usable = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        expected = str(len(usable))
    code = "import polarquant_nb as pq; print(pq.get_num_threads())"
    assert run_python("-c", code, **environment).strip() == expected


@pytest.mark.parametrize("n", [0, -1])
def test_number_of_threads_out_of_range(n):
    before = pq.get_num_threads()
    with pytest.raises(ValueError, match=f"n is {n}; it must be at least 1"):
        pq.set_num_threads(n)
    assert pq.get_num_threads() == before


@pytest.mark.parametrize("n", [1.5, "2", None])
def test_number_of_threads_of_a_wrong_type(n):
    with pytest.raises(TypeError, match=f"n is {n!r}; it must be an int"):
        pq.set_num_threads(n)
