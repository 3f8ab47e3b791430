"""What the evaluation leaves behind: tables and the figure."""

from __future__ import annotations

from math import ceil
from typing import Any

from polarquant_nb import plot
from polarquant_nb.outputs import write_figure

__all__ = ["draw_quality", "format_result"]

_LINE = "{:{}} {:>5} {:>7} {:>6}  {:19}  {:12} {:>10}  {:17}"
_HEAD = ("bits", "MiB", "ratio", "KL (nats)", "top-1 (%)", "perplexity", "attention error")
_NOTES = """\
bits       per number that is not kept exact, scales and the like included
MiB        of the whole cache; tokens kept exact take 2 bytes a number
ratio      size in fp16 to this size
KL         next-token distribution from the exact cache's
top-1      tokens at which both find the same token most likely
attention  relative squared error of the attention outputs with exact queries, mean over layers"""
_NEEDLE_NOTES = """\
hits       greedy answers that contain the number, over depths
NLL        of the right answer, nats per token"""


def format_result(result: dict[str, Any]) -> str:
    """The evaluation's numbers as text.

    Parameters
    ----------
    result : dict
        What :func:`polarquant_nb.eval_command.report` returns; with ``total_seconds``, they are
        told too.

    Returns
    -------
    str
        For a terminal.
    """
    settings, summary = result["settings"], result["summary"]
    windows = settings["windows"]
    plural = "s" if windows > 1 else ""
    width = max(10, *(len(row["contender"]) for row in summary))
    lines = [
        f"Model: {result['model']}",
        f"Text:  {result['text']}",
        f"       {windows} window{plural} of {settings['tokens']} tokens, the first "
        f"{settings['sink']} and last {settings['recent']} kept exact, then "
        f"{settings['score_tokens']} scored; seed {settings['seed']}",
        "",
        _LINE.format("cache", width, *_HEAD),
        *(_table_line(row, width) for row in summary),
        "",
        _NOTES,
    ]
    if windows > 1:
        lines.append("±          standard error over windows")
    if result["needle_summary"]:
        lines += ["", *_needle_table(result["needle_summary"], width), "", _NEEDLE_NOTES]
    if "total_seconds" in result:
        lines += ["", f"{result['total_seconds']:.0f} s"]
    return "\n".join(line.rstrip() for line in lines)


def draw_quality(path: str, result: dict[str, Any]) -> None:
    """Draw the frontier, and below it the needles' heat maps.

    Parameters
    ----------
    path : str
        PNG to write.
    result : dict
        What :func:`polarquant_nb.eval_command.report` returns.
    """
    from matplotlib.figure import Figure

    panels = len({row["contender"] for row in result["needle_rows"]})
    columns = min(panels, 6)
    rows = ceil(panels / 6)
    # Not pyplot: the caller's figures and backend are not ours to change.
    figure = Figure(figsize=(11, 5 + 2.4 * rows), layout="constrained")
    if not panels:
        plot.frontier(result, figure.subplots())
    else:
        parts: Any = figure.subfigures(2, height_ratios=(5, 2.4 * rows))
        top, bottom = parts
        plot.frontier(result, top.subplots())
        bottom.suptitle(
            "Needles: hit rate (dark 0, light 1), and the answer's NLL (nats per token) in numbers"
        )
        axes = bottom.subplots(rows, columns, squeeze=False).ravel()
        plot.needle(result, axes[:panels])
        for ax in axes[panels:]:
            ax.set_axis_off()
    write_figure(path, figure)


def _table_line(row: dict[str, Any], width: int) -> str:
    is_exact = row["family"] == "exact"
    return _LINE.format(
        row["contender"],
        width,
        f"{row['bits_per_value']:.2f}",
        f"{row['nbytes'] / 2**20:.2f}",
        f"{row['ratio']:.2f}",
        "0" if is_exact else _spread(row["kl"], row["kl_stderr"], 6),
        _spread(100 * row["top1"], row["top1_stderr"] and 100 * row["top1_stderr"], 1),
        f"{row['perplexity']:.3f}",
        "0" if is_exact else _spread(row["attention_error"], row["attention_error_stderr"], 4),
    )


def _spread(mean: float, stderr: float | None, digits: int) -> str:
    return f"{mean:.{digits}f}" + ("" if stderr is None else f" ± {stderr:.{digits}f}")


def _needle_table(tallies: list[dict[str, Any]], width: int) -> list[str]:
    """A line for each contender, a pair of columns for each length."""
    lengths = sorted({one["length"] for one in tallies})
    found = {(one["contender"], one["length"]): one for one in tallies}
    lines = [
        "Needle: five digits, asked for against the compressed context",
        f"{'tokens':{width}}" + "".join(f" {n:>14}" for n in lengths),
        f"{'cache':{width}}" + f" {'hits':>7}{'NLL':>7}" * len(lengths),
    ]
    for name in dict.fromkeys(one["contender"] for one in tallies):
        cells = (found[name, n] for n in lengths)
        lines.append(
            f"{name:{width}}"
            + "".join(f" {c['hits']:>4}/{c['needles']:<2}{c['nll']:>7.3f}" for c in cells)
        )
    return lines
