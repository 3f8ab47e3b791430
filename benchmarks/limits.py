"""What decode attention needs as a cache grows: time, memory, threads, compilation.

Run as ``python benchmarks/limits.py``; takes about three minutes and 2 GiB.  Linux only: peaks of
memory are read from /proc.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

import polarquant_nb as pq

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
MEBIBYTE = 2**20


def main() -> None:
    """Print one line per figure."""
    pair = pq.preset("balanced", HEAD_DIM)
    pq.set_num_threads(1)
    print_growth(pair)
    print_million(pair)
    print_slope(pair)
    print_compile_times()


def print_growth(pair: pq.FormatPair) -> None:
    """Of time and memory with the number of tokens; and what a second thread gives."""
    short, long = (filled(pq.KVCache(pair, sink=0, recent=0), n) for n in (16_384, 262_144))
    q = queries()
    growth = alternate(lambda: long.attend(q), lambda: short.attend(q), 7)
    print(f"time at 262,144 tokens over time at 16,384: {growth:.2f}")
    extra = peak_extra(lambda: long.attend(q))
    print(f"peak extra memory of attention at 262,144 tokens: {extra / MEBIBYTE:.2f} MiB")

    def with_threads(n: int) -> None:
        pq.set_num_threads(n)
        long.attend(q)

    speed_up = alternate(lambda: with_threads(1), lambda: with_threads(2), 9)
    print(f"2 threads over 1, 262,144 tokens: {speed_up:.2f} times as fast")
    pq.set_num_threads(1)


def print_million(pair: pq.FormatPair) -> None:
    """One layer of 1,048,576 tokens, held and attended to."""
    cache = filled(pq.KVCache(pair), 2**20)
    extra = peak_extra(lambda: cache.attend(queries()))
    print(
        f"1,048,576 tokens: {cache.nbytes / 2**30:.3f} GiB, {cache.bits_per_value:.3f} bits a "
        f"number; attention takes {extra / MEBIBYTE:.2f} MiB more"
    )


def filled(cache: pq.KVCache, n: int) -> pq.KVCache:
    """``n`` Gaussian tokens, appended 8,192 at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, n, 8192):
        shape = 2, 1, KV_HEADS, min(8192, n - start), HEAD_DIM
        cache.append(*rng.standard_normal(shape, dtype=np.float32).astype(np.float16))
    return cache


def queries() -> np.ndarray:
    """One query for each head."""
    rng = np.random.default_rng(1)
    return rng.standard_normal((1, HEADS, 1, HEAD_DIM), dtype=np.float32)


def alternate(first: Callable[[], object], second: Callable[[], object], rounds: int) -> float:
    """Median of the ratios of their times, each pair measured one after the other."""
    ratios = []
    for call in (first, second):
        call()
    for _ in range(rounds):
        times = []
        for call in (first, second):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        ratios.append(times[0] / times[1])
    return float(np.median(ratios))


def memory(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM, the most since it was last reset."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def peak_extra(call: Callable[[], object]) -> int:
    """Most memory during a call beyond what was there before; the call is made once before."""
    call()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")
    before = memory("VmRSS")
    call()
    return max(0, memory("VmHWM") - before)


def print_slope(pair: pq.FormatPair) -> None:
    """Growth of 1,000 appends of one token."""
    cache = filled(pq.KVCache(pair), 4096)
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 1, KV_HEADS, 1, HEAD_DIM), dtype=np.float32).astype(np.float16)
    before, start = cache.nbytes, time.perf_counter()
    for _ in range(1000):
        cache.append(k, v)
    seconds = time.perf_counter() - start
    bits = 8 * (cache.nbytes - before) / (1000 * KV_HEADS * 2 * HEAD_DIM)
    print(f"1,000 appends of a token: {bits:.3f} bits a number, {seconds * 1e3:.1f} us each")


def print_compile_times() -> None:
    """Of the default preset, without and with Numba's cache on disk."""
    code = "import polarquant_nb as pq; print(pq.warmup('balanced', head_dim=128, queries=4))"
    with tempfile.TemporaryDirectory() as directory:
        environment = os.environ | {"NUMBA_CACHE_DIR": directory}
        for state in ("empty", "warm"):
            seconds = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True,
                check=True,
            ).stdout  # fmt: skip
            print(f"kernels of balanced, {state} cache: {float(seconds):.2f} s")


if __name__ == "__main__":
    main()
