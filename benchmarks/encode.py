"""Encode and decode against torch's dense rotation alone, alternating in one process.

    python benchmarks/encode.py [--head-dim 128] [--tokens 4096] [--heads 8] [--rounds 15]

The baseline multiplies the same float32 vectors by a dense head_dim × head_dim matrix, which is
what a codec with an unstructured rotation has to do before it quantises anything.  Times are ns per
token and head; ratios are medians over rounds of the ratio within a round, so that a busy machine
disturbs both sides.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

import polarquant_nb as pq


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    pq.set_num_threads(options.threads)

    shape = (options.heads, options.tokens, options.head_dim)
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    tensor = torch.from_numpy(x)
    dense = torch.randn(options.head_dim, options.head_dim)
    out = torch.empty_like(tensor)
    pair = pq.preset("balanced", options.head_dim)
    paper = pq.preset("paper", options.head_dim).keys
    keys, values = pq.encode(x, pair.keys), pq.encode(x, pair.values)
    work: dict[str, Callable[[], Any]] = {
        "torch dense rotation float32": lambda: torch.matmul(tensor, dense, out=out),
        "encode balanced keys": lambda: pq.encode(x, pair.keys),
        "encode balanced values": lambda: pq.encode(x, pair.values),
        "encode paper": lambda: pq.encode(x, paper),
        "encode balanced keys, bfloat16": lambda: pq.encode(half, pair.keys),
        "encode balanced keys, no rotation": lambda: pq.encode(x, unrotated),
        "encode balanced keys, haar": lambda: pq.encode(x, haar),
        "decode balanced keys": lambda: pq.decode(keys),
        "decode balanced values": lambda: pq.decode(values),
    }
    half = tensor.to(torch.bfloat16)
    unrotated, haar = (replace(pair.keys, rotation=kind) for kind in ("none", "haar"))

    times: dict[str, list[float]] = {name: [] for name in work}
    for round_ in range(options.rounds + 1):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            if round_:  # the first round compiles
                times[name].append(time.perf_counter() - start)

    vectors = options.heads * options.tokens
    baseline = next(iter(times.values()))
    print(f"{options.heads} heads x {options.tokens} tokens, d = {options.head_dim}, "
          f"{options.threads} thread(s), medians of {options.rounds} rounds")  # fmt: skip
    print(f"{'':36}{'ns/token/head':>14}{'times baseline':>16}")
    for name, seconds in times.items():
        ratio = statistics.median(b / s for b, s in zip(baseline, seconds, strict=True))
        print(f"{name:36}{statistics.median(seconds) / vectors * 1e9:14.1f}{ratio:15.2f}x")


if __name__ == "__main__":
    main()
