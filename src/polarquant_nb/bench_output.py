"""What the benchmark leaves behind: tables and the figure."""

from __future__ import annotations

from typing import Any

from polarquant_nb import plot
from polarquant_nb.outputs import write_figure

__all__ = ["draw_speed", "format_result"]

_LINE = "{:>7}  {:22} {:>9} {:>9} {:>9} {:>7} {:>7} {:>8}"
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
    versions, cpu, load = result["info"]["versions"], result["info"]["cpu"], result["load_average"]
    lines = [
        f"{result['cpu_model']} ({cpu['name']}): {cpu['kernels']} kernels, threads: "
        f"{result['threads']}, load average before: {'unknown' if load is None else f'{load:.1f}'}",
        ", ".join(f"{name} {versions[name]}" for name in ("polarquant-nb", "numba", "torch")),
    ]
    tables: dict[str, list[dict[str, Any]]] = {}
    for row in result["rows"]:
        tables.setdefault(_title(row), []).append(row)
    for title, rows in tables.items():
        lines += ["", title, _LINE.format(*_HEAD), *map(_table_line, rows)]
    lines += ["", _NOTES, "", f"{result['total_seconds']:.0f} s"]
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


def _title(row: dict[str, Any]) -> str:
    queries = {0: "", 1: ", 1 query"}.get(row["q_len"], f", {row['q_len']} queries, causal")
    return (
        f"{row['stage'].capitalize()}{queries}: {row['num_kv_heads']} KV heads, {row['num_heads']} "
        f"heads, head_dim {row['head_dim']}; preset {row['preset']}"
    )


def _table_line(row: dict[str, Any]) -> str:
    is_ours = row["contender"] == "ours"
    nbytes = row["nbytes"]
    return _LINE.format(
        row["seq_len"] if is_ours else "",
        row["contender"],
        f"{1e3 * row['first_seconds']:.2f}",
        f"{1e3 * row['seconds']:.2f}",
        f"{1e9 * row['seconds'] / (row['num_kv_heads'] * row['seq_len']):.1f}",
        "" if is_ours else f"{row['times_faster']:.2f}",
        row["rounds"],
        "" if nbytes is None else f"{nbytes / 2**20:.2f}",
    )
