"""How fast attention on the codes is with each preset: ``python benchmarks/preset_speed.py``.

One query a head, one thread; times are divided by those of ``balanced`` right before.  The last
column is ``balanced`` with radii of 8 bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

import polarquant_nb as pq

SHAPES = ((64, 3, 9), (128, 8, 32))
"""head_dim, kv heads, heads."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, default=8192)
    parser.add_argument("--repeat", type=int, default=61)
    options = parser.parse_args(argv)
    pq.set_num_threads(1)
    rng = np.random.default_rng(0)
    for head_dim, kv_heads, heads in SHAPES:
        shape = 1, kv_heads, options.seq_len, head_dim
        k, v = rng.standard_normal((2, *shape), dtype=np.float32)
        q = rng.standard_normal((1, heads, 1, head_dim), dtype=np.float32)
        pairs = {name: pq.preset(name, head_dim) for name in pq.presets()}
        own = pairs["balanced"]
        formats = (replace(fmt, radius="log8") for fmt in (own.keys, own.values))
        pairs["8-bit radii"] = pq.FormatPair(*formats)
        packed = {
            name: (pq.encode(k, pair.keys), pq.encode(v, pair.values))
            for name, pair in pairs.items()
        }

        def seconds(name: str) -> float:
            started = time.perf_counter()
            pq.attention(q, *packed[name])  # noqa: B023
            return time.perf_counter() - started

        for name in packed:  # compiled, and warm
            seconds(name)
        ratios: dict[str, list[float]] = {name: [] for name in packed}
        for _ in range(options.repeat):
            for name, found in ratios.items():
                before = seconds("balanced")
                found.append(seconds(name) / before)
        row = ", ".join(f"{name} {median(found):.2f}" for name, found in ratios.items())
        print(f"{heads} heads on {kv_heads} of {head_dim} coordinates: {row}", flush=True)


if __name__ == "__main__":
    main()
