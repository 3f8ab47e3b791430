"""What the benchmark leaves behind: tables and the figure."""

from __future__ import annotations

from typing import Any

from polarquant_nb import plot
from polarquant_nb.outputs import write_figure

__all__ = ["draw_speed", "format_result"]

_LINE = "{:>7}  {:22} {:>9} {:>9} {:>9} {:>7} {:>7} {:>8} {:>7} {:>7}"
_HEAD = ("tokens", "", "first ms", "ms", "ns/token", "× ours", "rounds", "MiB")

_NOTES = """\
first ms  the first call; of ours, the first of a kind compiles or reads Numba's cache
ms        median
ns/token  the same for each token and KV head
× ours    how many times faster ours is: median over rounds of the ratio of neighbouring calls
MiB       keys and values, as they are read
matmul    q·Kᵀ, softmax and ·V, the query heads of a KV head in one product
folded    torch's SDPA, the query heads of a KV head as if they were further queries
int4      decodes keys and values to bf16 at every step, as caches of quantised tensors do

On a busy machine, believe only what one thread does (OMP_NUM_THREADS=1): with several, torch waits
for the one that others hold up, and looks slower than it is."""

_GPU_NOTES = """\
first ms  the first call; of ours, the first of a kind compiles, or reads machine code from disk
µs        median, between two events on the GPU's stream: Python's time too, where it is longer
ns/token  the same for each token and KV head
× ours    how many times faster ours is: median over rounds of the ratio of neighbouring calls
MiB       keys and values, as they are read; what encoding and decompressing read and write
GB/s      of these bytes; next to it, as a share of what copying a gibibyte reaches
folded    torch's SDPA, the query heads of a KV head as if they were further queries"""


def format_result(result: dict[str, Any]) -> str:
    """The benchmark's numbers as text.

    Parameters
    ----------
    result : dict
        What :func:`polarquant_nb.bench.run` returns.

    Returns
    -------
    str
        For a terminal.
    """
    gpu, versions = result["gpu"], result["info"]["versions"]
    packages = ("polarquant-nb", "numba", *(["numba-cuda"] if gpu else []), "torch")
    lines = [
        _gpu_line(gpu, result["info"]["gpu"]) if gpu else _cpu_line(result),
        ", ".join(f"{name} {versions[name]}" for name in packages),
    ]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        tables.setdefault(_title(row), []).append(row)
    for title, rows in tables.items():
        copied = gpu and gpu["copy_bandwidth"]
        head = (*_HEAD[:3], "µs", *_HEAD[4:], "GB/s", "of copy") if gpu else (*_HEAD, "", "")
        lines += ["", title, _LINE.format(*head), *(_table_line(row, copied) for row in rows)]
    lines += ["", _GPU_NOTES if gpu else _NOTES, "", f"{result['total_seconds']:.0f} s"]
    return "\n".join(line.rstrip() for line in lines)


def draw_speed(path: str, result: dict[str, Any]) -> None:
    """Draw how many times faster ours is, a panel for each stage.

    Parameters
    ----------
    path : str
        PNG to write.
    result : dict
        What :func:`polarquant_nb.bench.run` returns.
    """
    from matplotlib.figure import Figure

    rows = result["rows"]
    panels = len({row["stage"].split()[0] for row in rows})
    # Not pyplot: the caller's figures and backend are not ours to change.
    figure = Figure(figsize=(9, 1.5 * panels + 0.06 * len(rows)), layout="constrained")
    plot.speed(result, figure.subplots(panels))
    write_figure(path, figure)


def _cpu_line(result: dict[str, Any]) -> str:
    cpu, load = result["info"]["cpu"], result["load_average"]
    return (
        f"{result['cpu_model']} ({cpu['name']}): {cpu['kernels']} kernels, threads: "
        f"{result['threads']}, load average before: {'unknown' if load is None else f'{load:.1f}'}"
    )


def _gpu_line(gpu: dict[str, Any], seen: list[str]) -> str:
    """Of ``seen``, by nvidia-smi, comes the driver's version."""
    drivers = {line.split(", ")[1] for line in seen if line.startswith(gpu["name"] + ", ")}
    return (
        f"{gpu['name']} (sm_{gpu['capability'][0]}{gpu['capability'][1]}, "
        f"{gpu['multiprocessors']} multiprocessors), driver {' '.join(drivers) or 'unknown'}, "
        f"torch's CUDA {gpu['torch_cuda']}; copying: {gpu['copy_bandwidth'] / 1e9:.0f} GB/s"
    )


def _title(row: dict[str, Any]) -> str:
    queries = {0: "", 1: ", 1 query"}.get(row["q_len"], f", {row['q_len']} queries, causal")
    return (
        f"{row['stage'].capitalize()}{queries}: {row['num_kv_heads']} KV heads, {row['num_heads']} "
        f"heads, head_dim {row['head_dim']}; preset {row['preset']}"
    )


def _table_line(row: dict[str, Any], copied: float | None) -> str:
    """``copied`` is the bandwidth of a copy, bytes a second, on a GPU."""
    is_ours = row["contender"] == "ours"
    seconds, nbytes = row["seconds"], row["nbytes"]
    rate = nbytes / seconds if copied and nbytes else None
    return _LINE.format(
        row["seq_len"] if is_ours else "",
        row["contender"],
        f"{1e3 * row['first_seconds']:.2f}",
        f"{1e6 * seconds:.1f}" if copied else f"{1e3 * seconds:.2f}",
        f"{1e9 * seconds / (row['num_kv_heads'] * row['seq_len']):{'.3f' if copied else '.1f'}}",
        "" if is_ours else f"{row['times_faster']:.2f}",
        row["rounds"],
        "" if nbytes is None else f"{nbytes / 2**20:.2f}",
        f"{rate / 1e9:.0f}" if rate else "",
        f"{rate / copied:.0%}" if rate and copied else "",
    )
