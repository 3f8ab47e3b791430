"""Generation by a real model on caches of transformers: speed, attention alone, bytes, memory.

    python benchmarks/generation.py [--json FILE] [--tokens 512 4096 8000] [--only decode] ...

SmolLM2 in float32.  Every step feeds the same token to all caches, one after another, and ours is
judged by the median of the ratios of such neighbours, so that a busy machine disturbs all alike.
``QuantizedCache`` of 4 bits takes part where its packages are installed (``python -m pip install
optimum-quanto hqq``).  The defaults take about ten minutes on 2 cores.  Linux only: memory is read
from /proc, in a process of its own for each cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from limits import MEBIBYTE, memory
from peers import hugging_face
from transformers import AttentionInterface, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import polarquant_nb as pq
from polarquant_nb import info
from polarquant_nb.evaluate import prefill
from polarquant_nb.hf.versions import CACHE_ARGUMENT
from polarquant_nb.models import LoadedModel, announce_loading, load_model, load_text, token_window
from polarquant_nb.outputs import check_writable, write_json

PARTS = ("decode", "prefill", "bytes", "memory", "growth")
OURS, EXACT = "PolarCache", "DynamicCache"
WARM_UP = 3
"""Steps that are not counted."""


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, and write the numbers."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    pq.set_num_threads(options.threads)
    if options.child:
        print(json.dumps(CHILDREN[options.child[0]](options.child[1], options)))
        return
    if options.json:
        check_writable(options.json)
    parts = options.only or PARTS
    announce_loading()
    loaded = load_model()
    result: dict[str, Any] = {"info": info.report(), "threads": options.threads}
    print(f"{loaded.source}; {options.threads} threads, preset {options.preset}", flush=True)
    for part in PARTS:
        if part in parts:
            result[part] = MEASURES[part](loaded, options)
    if options.json:
        write_json(options.json, result)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=[512, 4096, 8000], help="contexts")
    add("--steps", type=int, default=24, help="of decoding, timed")
    add("--repeat", type=int, default=3, help="prefills of each cache, timed")
    add("--growth-steps", type=int, default=2000, help="of decoding, for the growth of memory")
    add("--preset", default="balanced", choices=pq.presets())
    add("--threads", type=int, default=2)
    add("--only", action="append", choices=PARTS, help="may be repeated")
    add("--json", metavar="FILE")
    add("--child", nargs=2, help=argparse.SUPPRESS)  # how this program calls itself
    return parser.parse_args(argv)


# ---- decoding ------------------------------------------------------------------------------------


@dataclass
class Clock:
    """Seconds spent in parts of the model since they were last taken."""

    attention: float = 0.0
    update: float = 0.0

    def timing(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same function, its time added to a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            setattr(self, part, getattr(self, part) + time.perf_counter() - start)
            return result

        return timed

    def take(self) -> tuple[float, float]:
        """Attention, and attention and update together; both start from 0 again."""
        taken = self.attention, self.attention + self.update
        self.attention = self.update = 0.0
        return taken


@contextmanager
def clocked(model: Any) -> Iterator[Clock]:
    """A clock in an enabled model's attention function."""
    clock, name = Clock(), model.config._attn_implementation
    was = ALL_ATTENTION_FUNCTIONS[name]
    AttentionInterface.register(name, clock.timing(was, "attention"))
    try:
        yield clock
    finally:
        AttentionInterface.register(name, was)


def measure_decode(loaded: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds of a token, and of attention in it, for each context and cache."""
    print("\ndecode: medians; ratios are of ours to the other, in the same step")
    line = "{:>6}  {:26} {:>9} {:>7} {:>7} | {:>8} {:>7} | {:>9} {:>7}"
    print(line.format("tokens", "cache", "ms/token", "tok/s", "ours x", "attention", "ours x",
                      "+ update", "ours x"))  # fmt: skip
    rows = []
    for tokens in options.tokens:
        caches = {
            name: timed_steps(times) for name, times in decode(loaded, tokens, options).items()
        }
        for name, (whole, attention, both) in caches.items():
            row = {"tokens": tokens, "cache": name}
            for part, mine, ours in zip(
                ("step", "attention", "attention_and_update"),
                (whole, attention, both), caches[OURS], strict=True,
            ):  # fmt: skip
                row[f"{part}_seconds"] = median(mine)
                row[f"{part}_ours_times"] = median(a / b for a, b in zip(mine, ours, strict=True))
            rows.append(row)
            print(
                line.format(
                    tokens, name, f"{1e3 * row['step_seconds']:.1f}",
                    f"{1 / row['step_seconds']:.1f}", f"{row['step_ours_times']:.2f}",
                    f"{1e3 * row['attention_seconds']:.2f}", f"{row['attention_ours_times']:.2f}",
                    f"{1e3 * row['attention_and_update_seconds']:.2f}",
                    f"{row['attention_and_update_ours_times']:.2f}",
                ),
                flush=True,
            )  # fmt: skip
    return rows


def decode(
    loaded: LoadedModel, tokens: int, options: argparse.Namespace
) -> dict[str, list[tuple[float, float, float]]]:
    """Seconds of each step, of attention in it, and of attention and update."""
    model, ids = loaded.model, window(loaded, tokens + options.steps + WARM_UP)
    exact = prefill(model, ids[:, :tokens])
    caches: dict[str, Any] = {
        EXACT: exact,
        OURS: pq.hf.PolarCache(model.config, options.preset).copy_from(exact),
    }
    for backend in hugging_face.PACKAGES:
        reason = hugging_face.missing(backend)
        if reason:
            print(f"left out: {reason}", file=sys.stderr)
        else:
            cache = hugging_face.compress(exact, backend, 4).cache()
            caches[f"QuantizedCache, {backend}"] = cache
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in caches}
    pq.hf.enable(model)
    with clocked(model) as clock, torch.no_grad():
        for cache in caches.values():
            cache.update = clock.timing(cache.update, "update")
        for step in range(options.steps + WARM_UP):
            token = ids[:, tokens + step : tokens + step + 1]
            names = list(caches)
            for name in names[step % len(names) :] + names[: step % len(names)]:
                clock.take()
                seconds = time_call(lambda: forward(model, token, caches[name]))  # noqa: B023
                times[name].append((seconds, *clock.take()))
    pq.hf.disable(model)
    return times


def timed_steps(times: list[tuple[float, float, float]]) -> tuple[list[float], ...]:
    """Columns, without the steps that warm up."""
    return tuple(map(list, zip(*times[WARM_UP:], strict=True)))


# ---- prefill, bytes ------------------------------------------------------------------------------


def measure_prefill(loaded: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds of one call of the model for a whole prompt, what is encoded included."""
    print("\nprefill: medians, and the median of DynamicCache's time / ours")
    model, rows = pq.hf.enable(loaded.model), []
    for tokens in options.tokens:
        ids = window(loaded, tokens)
        times: dict[str, list[float]] = {EXACT: [], OURS: []}
        with torch.no_grad():
            for _ in range(options.repeat):
                for name, each in times.items():
                    cache = new_cache(name, model, options.preset)
                    each.append(time_call(lambda: forward(model, ids, cache)))  # noqa: B023
        ratio = median(a / b for a, b in zip(times[EXACT], times[OURS], strict=True))
        seconds = {name: median(each) for name, each in times.items()}
        rows.append({"tokens": tokens, "seconds": seconds, "ours_times": ratio})
        print(
            f"{tokens:>6}  {EXACT} {seconds[EXACT]:.2f} s, {OURS} {seconds[OURS]:.2f} s: "
            f"{ratio:.2f} times as fast",
            flush=True,
        )
    pq.hf.disable(model)
    return rows


def measure_bytes(loaded: LoadedModel, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Bytes held, everything counted, to those of the same tokens in fp16."""
    print("\nbytes / fp16")
    rows = []
    for tokens in options.tokens:
        exact = prefill(loaded.model, window(loaded, tokens))
        for dtype in (torch.float32, torch.bfloat16):
            for layer in exact.layers:
                layer.keys, layer.values = layer.keys.to(dtype), layer.values.to(dtype)
            cache = pq.hf.PolarCache(loaded.model.config, options.preset).copy_from(exact)
            report, name = cache.report(), str(dtype).removeprefix("torch.")
            rows.append(
                {"tokens": tokens, "dtype": name, "nbytes": report.nbytes, "ratio": report.ratio}
            )
            print(f"{tokens:>6}  {name:9} {report.nbytes:>12,}  {report.ratio:.4f}", flush=True)
    return rows


# ---- memory, in processes of their own -----------------------------------------------------------


def measure_memory(_: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """Most memory of a process during the prefill of the longest context."""
    print(f"\nmemory during the prefill of {max(options.tokens)} tokens")
    peaks = {name: call_child("prefill", name, options) for name in (EXACT, OURS)}
    for name, peak in peaks.items():
        print(f"{name}: peak {peak['peak'] / MEBIBYTE:.0f} MiB, {peak['extra'] / MEBIBYTE:.0f} "
              "of them since before")  # fmt: skip
    print(f"{OURS} / {EXACT}: {peaks[OURS]['peak'] / peaks[EXACT]['peak']:.3f}", flush=True)
    return peaks


def measure_growth(_: LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """What a process grows by while it decodes."""
    print(f"\ngrowth over {options.growth_steps} steps of decoding")
    grown: dict[str, Any] = call_child("growth", OURS, options)
    print(
        f"{OURS}: process {grown['process'] / MEBIBYTE:.2f} MiB, cache "
        f"{grown['cache'] / MEBIBYTE:.2f} MiB, the same in fp16 {grown['fp16'] / MEBIBYTE:.2f} MiB",
        flush=True,
    )
    return grown


def child_prefill(name: str, options: argparse.Namespace) -> dict[str, int]:
    """Peak, and how much more it is than what there was before."""
    loaded = load_model()
    model, ids = pq.hf.enable(loaded.model), window(loaded, max(options.tokens))
    with torch.no_grad():
        forward(model, ids[:, :400], new_cache(name, model, options.preset))
        with open("/proc/self/clear_refs", "w") as reset:
            reset.write("5")
        before = memory("VmRSS")
        forward(model, ids, new_cache(name, model, options.preset))
    peak = memory("VmHWM")
    return {"peak": peak, "extra": peak - before}


def child_growth(name: str, options: argparse.Namespace) -> dict[str, int]:
    """Bytes by which process and cache grow, after a warm-up of a few pages."""
    loaded, warm_up, prompt = load_model(), 256, 512
    model, ids = pq.hf.enable(loaded.model), window(loaded, prompt + warm_up + options.growth_steps)
    cache = new_cache(name, model, options.preset)
    with torch.no_grad():
        forward(model, ids[:, :prompt], cache)
        for step in range(prompt, ids.shape[1]):
            if step == prompt + warm_up:
                before, held = memory("VmRSS"), cache.report()
            forward(model, ids[:, step : step + 1], cache)
    report = cache.report()
    return {
        "process": memory("VmRSS") - before,
        "cache": report.nbytes - held.nbytes,
        "fp16": report.fp16_nbytes - held.fp16_nbytes,
    }


def call_child(kind: str, name: str, options: argparse.Namespace) -> Any:
    """What a new process measures."""
    arguments = ["--child", kind, name, "--threads", options.threads, "--preset", options.preset]
    arguments += ["--growth-steps", options.growth_steps, "--tokens", *options.tokens]
    command = [sys.executable, __file__, *map(str, arguments)]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(out.splitlines()[-1])


# ---- helpers -------------------------------------------------------------------------------------


def new_cache(name: str, model: Any, preset: str) -> Any:
    """An empty cache."""
    if name == EXACT:
        return DynamicCache(config=model.config)
    return pq.hf.PolarCache(model.config, preset)


def forward(model: Any, ids: torch.Tensor, cache: Any) -> None:
    """One call of the model."""
    model(ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache})


def window(loaded: LoadedModel, tokens: int) -> torch.Tensor:
    """Text, as ids of one row."""
    return torch.tensor([token_window(load_text()[0], loaded.tokenizer, tokens)])


def time_call(call: Callable[[], object]) -> float:
    """Seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


MEASURES: dict[str, Callable[[LoadedModel, argparse.Namespace], Any]] = {
    "decode": measure_decode,
    "prefill": measure_prefill,
    "bytes": measure_bytes,
    "memory": measure_memory,
    "growth": measure_growth,
}
CHILDREN = {"prefill": child_prefill, "growth": child_growth}


if __name__ == "__main__":
    main()
