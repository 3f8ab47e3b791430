"""First checks and timings on a GPU: equality with the CPU, then a table; under four minutes.

    python benchmarks/gpu_check.py [--quick]

Needs torch with CUDA and ``polarquant-nb[cuda13]`` (or [cuda12]).  Equality comes first, and a
failure ends the run: codes bit for bit, decoded vectors and attention within a tolerance, a KVCache
that holds and answers what the CPU's does, a captured graph like an eager call.  Then times by CUDA
events, medians; bandwidths are also given as a share of what copying a tensor reaches in the same
run.  With NUMBA_ENABLE_CUDASIM=1 codes and attention are checked on tiny shapes in Numba's
simulator, without times: that tests this script.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

import polarquant_nb as pq
from polarquant_nb import gpu
from polarquant_nb.bench_contenders import folded_sdpa
from polarquant_nb.bench_gpu import copy_bandwidth, median_seconds
from polarquant_nb.cache_files import to_plain
from polarquant_nb.gpu_status import unusable
from polarquant_nb.kernels.cuda_lanes import SIMULATED

Tensor = torch.Tensor

TOLERANCES = {torch.float16: 1e-3, torch.float32: 1e-5}
"""Of attention, relative to the largest number of the CPU's result, by dtype of the queries."""


def main() -> None:
    """Check, measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="checks and the shortest timings")
    options = parser.parse_args()
    start = time.perf_counter()
    if SIMULATED:
        check_all("cpu", head_dim=16, tokens=137, presets=("balanced",))
        return
    problem = unusable()
    if problem:
        raise SystemExit(f"no GPU to check: {problem}")
    properties = torch.cuda.get_device_properties(0)
    print(f"{properties.name}, {properties.multi_processor_count} multiprocessors, torch "
          f"{torch.__version__}")  # fmt: skip
    check_all("cuda", head_dim=128, tokens=1000, presets=pq.presets())
    check_cache("cuda", head_dim=128, tokens=1000)
    check_graph()
    print(f"checks passed after {time.perf_counter() - start:.0f} s\n")
    copied = copy_bandwidth()
    print(f"copying a tensor: {copied / 1e9:.0f} GB/s\n")
    time_codec(copied)
    lengths = (8192,) if options.quick else (8192, 32768, 131072)
    time_attention(copied, lengths, (1,) if options.quick else (1, 8))
    time_cache(lengths)
    print(f"\n{time.perf_counter() - start:.0f} s in all")


# ---- equality ------------------------------------------------------------------------------------


def check_all(device: str, head_dim: int, tokens: int, presets: tuple[str, ...]) -> None:
    """Codes, decoded vectors and attention of each preset against the CPU's."""
    for name in presets:
        pair = pq.preset(name, head_dim)
        rng = np.random.default_rng(1)
        k, v = rng.standard_normal((2, 1, 2, tokens, head_dim), dtype=np.float32)
        k += 1
        on_cpu = [pq.encode(x, fmt) for x, fmt in ((k, pair.keys), (v, pair.values))]
        pages = [encode(torch.from_numpy(x).to(device), page.format)
                 for x, page in zip((k, v), on_cpu, strict=True)]  # fmt: skip
        for found, expected in zip(pages, on_cpu, strict=True):
            if not np.array_equal(found.to("cpu").words, expected.words):
                raise SystemExit(f"codes of {name} differ from the CPU's")
            close(found.decode(), expected.decode(), 1e-6, f"decoded {name}")
        for dtype, tolerance in TOLERANCES.items():
            for group in (1, 4, 8):
                q = torch.from_numpy(
                    rng.standard_normal((1, 2 * group, 1, head_dim), dtype=np.float32)
                ).to(dtype)
                expected = pq.attention(q.float().numpy(), *on_cpu)
                found = gpu.attention_of_tensors(q.to(device), *pages)
                close(found, expected, tolerance, f"attention {name}, {dtype}, group {group}")
        print(f"{name}: codes equal, decode and attention close to the CPU's")


def encode(x: Tensor, fmt: pq.PolarFormat) -> pq.PolarPages:
    """Encode where ``x`` is, also in the simulator."""
    return gpu.encode_tensor(x, fmt, None, "propagate")


def close(found: Tensor, expected: np.ndarray, tolerance: float, what: str) -> None:
    """End the run if numbers are further apart than the largest one allows."""
    error = np.abs(found.float().cpu().numpy() - expected).max() / np.abs(expected).max()
    if not error <= tolerance:
        raise SystemExit(f"{what}: relative error {error:.2g}, more than {tolerance:.2g}")


def check_cache(device: str, head_dim: int, tokens: int) -> None:
    """Bytes and answers of a KVCache that grows by a prompt, tokens and pages, and is cropped."""
    rng = np.random.default_rng(2)
    for dtype, tolerance in TOLERANCES.items():
        caches = [pq.KVCache("balanced", head_dim=head_dim, recent=8) for _ in range(2)]
        name = str(dtype).removeprefix("torch.")

        def numbers(heads: int, n: int, name: str = name) -> tuple[np.ndarray, Tensor]:
            x = rng.standard_normal((2, heads, n, head_dim), dtype=np.float32).astype(name)
            return x, torch.from_numpy(x).to(device)

        def append(n: int, padding: list[int] | None = None, caches: list = caches) -> None:
            for cache, k, v in zip(caches, numbers(2, n), numbers(2, n), strict=True):
                cache.append(k, v, padding)

        append(tokens, [0, 7])
        for cache in caches:
            cache.crop(tokens - 30)
        for n in (60, 1, 1, 1):
            append(n)
        plain = [to_plain(cache._state)[1] for cache in caches]
        for part, expected in plain[0].items():
            if not np.array_equal(plain[1][part], expected):
                raise SystemExit(f"{part} of a KVCache of {name} differ from the CPU's")
        for group, q_len in ((1, 1), (4, 1), (8, 1), (4, 5), (2, 40)):
            q, on_device = numbers(2 * group, q_len)
            expected, found = caches[0].attend(q.astype(np.float32)), caches[1].attend(on_device)
            what = f"KVCache.attend, {name}, group {group}, {q_len} queries"
            close(found, expected, tolerance, what)
    print("KVCache: bytes equal, attention close to the CPU's")


def check_graph() -> None:
    """A captured call, replayed with other queries, gives what an eager call gives."""
    pair = pq.preset("balanced", 128)
    x = torch.randn(1, 8, 4096, 128, device="cuda", dtype=torch.float16)
    k, v = pq.encode(x, pair.keys), pq.encode(x, pair.values)
    q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.float16)
    pq.attention(q, k, v)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = pq.attention(q, k, v)
    q.copy_(torch.randn_like(q))
    graph.replay()
    if not torch.equal(out, pq.attention(q, k, v)):
        raise SystemExit("a captured graph differs from an eager call")
    print("graph capture: replay equals an eager call")


# ---- times ---------------------------------------------------------------------------------------


def time_codec(copied: float) -> None:
    """Encode from bfloat16 and decode to it: 8 heads of 128k tokens."""
    x = torch.randn(8, 131072, 128, device="cuda", dtype=torch.bfloat16)
    print("| codec | µs | GB/s, codes and vectors | share of a copy |\n|---|---|---|---|")
    for name in ("paper", "balanced"):
        pair = pq.preset(name, 128)
        for side, fmt in (("keys", pair.keys), ("values", pair.values)):
            pages = encode(x, fmt)
            moved = x.nbytes + pages.words.nbytes
            for what, run in (
                ("encode", lambda fmt=fmt: encode(x, fmt)),
                ("decode", lambda pages=pages: pages.decode()),
            ):
                taken = median_seconds(run)
                print(f"| {what} {name} {side} | {taken * 1e6:.0f} | {moved / taken / 1e9:.0f} | "
                      f"{moved / taken / copied:.0%} |", flush=True)  # fmt: skip
    print()


def time_attention(copied: float, lengths: tuple[int, ...], batches: tuple[int, ...]) -> None:
    """One query a head, 8 kv heads, against torch's attention to float16 keys and values."""
    pair = pq.preset("balanced", 128)
    print("| batch | heads | tokens | torch float16, µs | packed, µs | times as fast | GB/s | "
          "share of a copy |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    for batch in batches:
        for tokens in lengths:
            k, v = (torch.randn(batch, 8, tokens, 128, device="cuda", dtype=torch.float16)
                    for _ in range(2))  # fmt: skip
            packed = encode(k, pair.keys), encode(v, pair.values)
            for heads in (32, 8):
                q = torch.randn(batch, heads, 1, 128, device="cuda", dtype=torch.float16)
                exact = median_seconds(lambda q=q, k=k, v=v: folded_sdpa(q, k, v))
                taken = median_seconds(lambda q=q, packed=packed: pq.attention(q, *packed))
                rate = sum(pages.words.nbytes for pages in packed) / taken
                print(f"| {batch} | {heads} | {tokens} | {exact * 1e6:.0f} | {taken * 1e6:.0f} | "
                      f"{exact / taken:.2f} | {rate / 1e9:.0f} | {rate / copied:.0%} |",
                      flush=True)  # fmt: skip


def time_cache(lengths: tuple[int, ...]) -> None:
    """A step of decoding, 8 kv and 32 query heads: append a token, attend.

    Against tensors of float16 that are concatenated, and torch's attention.
    """
    print("\n| tokens | cat and torch float16, µs | KVCache, µs | times as fast | MB of float16 | "
          "MB of KVCache |\n|---|---|---|---|---|---|")  # fmt: skip
    for tokens in lengths:
        exact = [torch.randn(1, 8, tokens, 128, device="cuda", dtype=torch.float16)
                 for _ in range(2)]  # fmt: skip
        cache = pq.KVCache("balanced", head_dim=128)
        cache.append(*exact)
        held, nbytes = sum(x.nbytes for x in exact), cache.nbytes
        token = torch.randn(1, 8, 1, 128, device="cuda", dtype=torch.float16)
        q = torch.randn(1, 32, 1, 128, device="cuda", dtype=torch.float16)

        def exact_step(exact: list[Tensor] = exact, token: Tensor = token, q: Tensor = q) -> Tensor:
            exact[:] = (torch.cat([x, token], 2) for x in exact)
            return folded_sdpa(q, *exact)

        def step(cache: pq.KVCache = cache, token: Tensor = token, q: Tensor = q) -> Tensor:
            cache.append(token, token)
            return cache.attend(q)

        before, after = median_seconds(exact_step), median_seconds(step)
        print(f"| {tokens} | {before * 1e6:.0f} | {after * 1e6:.0f} | {before / after:.2f} | "
              f"{held / 1e6:.0f} | {nbytes / 1e6:.0f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
