"""The benchmark: packed pages against what torch does without them, in time and bytes.

Every baseline is timed right after ours, again and again, and judged by the median of the ratios of
such neighbours: what disturbs both alike cancels.  So ours runs right after torch, as it does in a
model.  Everything is for one layer and a batch of one.  On a GPU, its own events tell the time.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.bench_contenders import STAGES, Contender, Inputs
from polarquant_nb.bench_output import draw_speed, format_result
from polarquant_nb.budgets import preset
from polarquant_nb.formats import FormatPair
from polarquant_nb.gpu_status import unusable
from polarquant_nb.models import require
from polarquant_nb.outputs import check_writable, write_json
from polarquant_nb.threads import get_num_threads, set_num_threads, threads_by_environment

__all__ = ["BenchError", "Row", "alternate", "run", "wall_seconds"]

_BUDGET = 1.0
"""Seconds for a baseline and ours beside it; what is slower gets the fewest rounds."""

_FEWEST = 3
"""Rounds that a median needs at least."""


class BenchError(ValueError):
    """The benchmark cannot run with these arguments."""


@dataclass(frozen=True)
class Row:
    """One contender in one measurement.

    Parameters
    ----------
    stage, preset : str
        What was measured, and with which formats.
    num_kv_heads, num_heads, head_dim, seq_len, q_len : int
        Of keys, values and queries; encoding has ``q_len`` 0.
    contender : str
        'ours', or the name of a baseline.
    seconds : float
        Median time of a call.
    times_faster : float
        How many times faster ours is: median over rounds of the ratio of neighbouring calls.
    quartiles : tuple of two floats
        Of these ratios.
    rounds : int
        Calls timed.
    first_seconds : float
        Time of the first call; if it is the first of its kind in the process, ours compiles
        kernels or reads them from Numba's cache.
    nbytes : int or None
        Bytes of keys and values as this contender reads them; where a GPU encodes or decompresses,
        bytes that it reads and writes.
    """

    stage: str
    preset: str
    num_kv_heads: int
    num_heads: int
    head_dim: int
    seq_len: int
    q_len: int
    contender: str
    seconds: float
    times_faster: float
    quartiles: tuple[float, float]
    rounds: int
    first_seconds: float
    nbytes: int | None


def run(
    *,
    presets: Sequence[str] = ("balanced",),
    shapes: Sequence[tuple[int, int, int]] = ((8, 32, 128), (3, 9, 64)),
    seq_lens: Sequence[int] = (4096, 16384),
    only: Sequence[str] | None = None,
    device: str = "cpu",
    queries: int = 512,
    repeat: int = 15,
    seed: int = 0,
    threads: int | None = None,
    png: str | None = None,
    json: str | None = None,
) -> dict[str, Any]:
    """Run the benchmark: print tables, write a figure and the numbers.

    Parameters
    ----------
    presets : sequence of str
        Names of presets.
    shapes : sequence of (num_kv_heads, num_heads, head_dim)
        Shapes of a layer.
    seq_lens : sequence of int
        Tokens in the cache.
    only : sequence of {'encode', 'decode', 'prefill', 'decompress'}, optional
        What to measure; by default everything, which includes decompressing on a GPU only.
    device : {'cpu', 'cuda'}
        Where.
    queries : int
        Queries of a prefill, the last of the seq_len tokens; seq_len if there are fewer tokens.
    repeat : int
        Rounds; slow baselines get fewer, so that each takes about a second.
    seed : int
        Of queries, keys and values.
    threads : int, optional
        Threads of the kernels and of torch; restored afterwards.
    png, json : str, optional
        Files to write; both appear complete or not at all.

    Returns
    -------
    dict
        What the JSON file holds; ``rows`` are those of :class:`Row`, and ``gpu`` is None on the
        CPU.

    Raises
    ------
    BenchError
        If a head_dim is not supported, a file cannot be written, the device cannot be used or does
        not have what is to be measured, or NumPy would help ours with more threads than the others
        get.
    UnavailableError
        If a package is missing.
    """
    started, load = time.perf_counter(), _load_average()
    threads = get_num_threads() if threads is None else threads
    try:
        formats = {(name, shape): preset(name, shape[2]) for name in presets for shape in shapes}
        check_writable(png, json)
    except (OSError, ValueError) as error:
        raise BenchError(str(error)) from error
    if device == "cpu" and (only is None or "prefill" in only) and _blas_threads() > threads:
        raise BenchError(
            f"threads is {threads}, but NumPy multiplies the matrices of prefill with "
            f"{_blas_threads()}: set the environment variable OMP_NUM_THREADS={threads}, or leave "
            "prefill out by --only encode --only decode"
        )
    require("torch", *(["matplotlib"] if png else []))
    place = _place(device)
    measured = list(dict.fromkeys(stage.split()[0] for stage in place.stages))
    only = measured if only is None else only
    for name in only:
        if name not in measured:
            raise BenchError(
                f"only has {name!r}, which is not measured on device {device!r}; there is "
                f"{', '.join(measured)}"
            )
    from polarquant_nb import info

    stages = [stage for stage in place.stages if stage.split()[0] in only]
    total = len(shapes) * len(seq_lens) * len(presets) * len(stages)
    rows: list[Row] = []
    with _num_threads(threads), _progress(total) as advance:
        for shape, seq_len in product(shapes, seq_lens):
            pairs = {name: formats[name, shape] for name in presets}
            inputs = Inputs.draw(shape, seq_len, min(queries, seq_len), seed, device)
            for name, stage in product(presets, stages):
                contenders = place.stages[stage](inputs, pairs[name])
                rows += _measure(stage, name, inputs, contenders, repeat, place.seconds)
                del contenders
                advance()
            del inputs  # before there are others
        about = info.report()
        gpu = place.gpu()
    result = {
        "device": device,
        "gpu": gpu,
        "repeat": repeat,
        "seed": seed,
        "cpu_model": _cpu_model(),
        "threads": threads,
        "load_average": load,
        "rows": [asdict(row) for row in rows],
        "total_seconds": time.perf_counter() - started,
        "info": about,
    }
    print(format_result(result))
    if png is not None:
        draw_speed(png, result)
        print(f"Figure: {png}")
    if json is not None:
        write_json(json, result)
        print(f"Numbers: {json}")
    return result


def alternate(
    ours: Callable[[], Any],
    baselines: Mapping[str, Callable[[], Any]],
    *,
    repeat: int,
    budget: float,
    seconds: Callable[[Callable[[], Any]], float],
) -> dict[str, npt.NDArray[np.float64]]:
    """Time every baseline right after ours, in rounds.

    Parameters
    ----------
    ours, baselines : callables
        What to time; called before, so that nothing is left to compile.
    repeat : int
        Rounds.
    budget : float
        Seconds for a baseline and ours beside it: it sits out the rounds that it would probably
        need more for, but not the first three.
    seconds : callable
        Calls what it is given, and tells how long that took.

    Returns
    -------
    dict of ndarray, shape ``(rounds, 2)``
        Of each baseline: seconds of ours, and of the baseline after it.
    """
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in baselines}
    for _ in range(repeat):
        for name, baseline in baselines.items():
            done, spent = len(pairs[name]), sum(map(sum, pairs[name]))
            if done < _FEWEST or spent / done * (done + 1) <= budget:
                pairs[name].append((seconds(ours), seconds(baseline)))
    return {name: np.array(both) for name, both in pairs.items()}


def wall_seconds(call: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of a call that returns when it is done.

    Parameters
    ----------
    call : callable
        What to time.
    clock : callable
        Tells the time in seconds.

    Returns
    -------
    float
        Seconds.
    """
    start = clock()
    call()
    return clock() - start


@dataclass(frozen=True)
class _Place:
    """What depends on the device: stages, how a call is timed, what is said about a GPU."""

    stages: Mapping[str, Callable[[Inputs, FormatPair], dict[str, Contender]]]
    seconds: Callable[[Callable[[], Any]], float]
    gpu: Callable[[], dict[str, Any] | None]


def _place(device: str) -> _Place:
    if device == "cpu":
        return _Place(STAGES, wall_seconds, lambda: None)
    problem = unusable()
    if problem:
        raise BenchError(f"device is {device!r}, which cannot be used: {problem}")
    from polarquant_nb.bench_gpu import (
        GPU_STAGES,
        copy_bandwidth,
        describe_gpu,
        event_seconds,
    )

    return _Place(
        GPU_STAGES, event_seconds, lambda: {**describe_gpu(), "copy_bandwidth": copy_bandwidth()}
    )


def _measure(
    stage: str, preset_name: str, inputs: Inputs, contenders: dict[str, Contender], repeat: int,
    seconds_of: Callable[[Callable[[], Any]], float],
) -> list[Row]:  # fmt: skip
    """A stage's rows, ours first."""
    first = {name: seconds_of(contender.call) for name, contender in contenders.items()}
    calls = {name: contender.call for name, contender in contenders.items()}
    pairs = alternate(calls.pop("ours"), calls, repeat=repeat, budget=_BUDGET, seconds=seconds_of)
    ours = np.concatenate(list(pairs.values()))[:, :1]
    _, kv_heads, seq_len, head_dim = inputs.k.shape
    _, heads, queries, _ = inputs.q.shape
    rows = []
    for name, seconds in {"ours": np.repeat(ours, 2, 1), **pairs}.items():
        low, middle, high = np.quantile(seconds[:, 1] / seconds[:, 0], (0.25, 0.5, 0.75)).tolist()
        rows.append(
            Row(
                stage=stage,
                preset=preset_name,
                num_kv_heads=kv_heads,
                num_heads=heads,
                head_dim=head_dim,
                seq_len=seq_len,
                q_len={"decode": 1, "prefill": queries}.get(stage, 0),
                contender=name,
                seconds=float(np.median(seconds[:, 1])),
                times_faster=middle,
                quartiles=(low, high),
                rounds=len(seconds),
                first_seconds=first[name],
                nbytes=contenders[name].nbytes,
            )
        )
    return rows


@contextmanager
def _num_threads(n: int) -> Iterator[None]:
    """As many threads for the kernels and for torch."""
    import torch

    before, torch_before = get_num_threads(), torch.get_num_threads()
    set_num_threads(n)
    torch.set_num_threads(n)
    try:
        yield
    finally:
        set_num_threads(before)
        torch.set_num_threads(torch_before)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], object]]:
    """A progress bar if tqdm is there; gives what to call after each step."""
    try:
        from tqdm.auto import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, desc="bench", unit="measurement") as bar:
        yield bar.update


def _blas_threads() -> int:
    """Threads of NumPy's matrix products, which nothing in NumPy tells or sets."""
    return threads_by_environment("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")


def _load_average() -> float | None:
    """Processes that ran or waited for a CPU in the last minute; None where nobody counts."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def _cpu_model() -> str:
    """What the processor calls itself; Numba knows only its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
