"""What the demo leaves behind: tables and the figure."""

from __future__ import annotations

from typing import Any

from polarquant_nb import analysis, plot
from polarquant_nb.formats import PolarFormat, full_depth
from polarquant_nb.layout import PAGE
from polarquant_nb.outputs import write_figure

__all__ = ["draw_angles", "format_result"]

_LINE = "{:9} {:>6} {:>7} {:>6} {:>17} {:>8} {:>11} {:>16}"
_HEAD = ("preset", "bits", "MiB", "ratio", "KL (nats)", "top-1", "perplexity", "encode tokens/s")


def format_result(result: dict[str, Any]) -> str:
    """The demo's numbers as text.

    Parameters
    ----------
    result : dict
        What :func:`polarquant_nb.demo.run` returns.

    Returns
    -------
    str
        For a terminal.
    """
    recent, sinks = result["recent"], result["sinks"]
    lines = [
        f"Model: {result['model']}",
        f"       {result['layers']} layers, {result['num_kv_heads']} KV heads, head_dim "
        f"{result['head_dim']}, in float32",
        f"Text:  {result['text']}",
        f"       {result['tokens']} tokens of context, then {result['score_tokens']} scored; seed "
        f"{result['seed']}",
    ]
    for sink in sinks:
        kept = f"The first {sink} and last" if sink else "No sinks: only the last"
        fewest = f"{kept} {recent} tokens kept exact, and up to {PAGE - 1} that do not fill a page"
        lines += ["", fewest, _LINE.format(*_HEAD)]
        lines += [_table_line(row) for row in result["rows"] if row.get("sink", sink) == sink]
    lines += [
        "",
        "bits    per number in pages, offsets and radii included",
        "MiB     all that the cache holds; exact tokens are in float32, as this model has them",
        "ratio   size in fp16, which is what the exact cache is counted in, to this size",
        "KL      next-token distribution from the exact cache's: mean and standard error",
        "encode  keys and values of all layers into a cache, kernels compiled before; fastest of "
        f"{result['repeats']} runs",
        "",
        f"Greedy continuations of: ...{_one_line(result['context_end'])}",
        "(tokens that agree with the exact cache's, before the first that does not)",
    ]
    for one in result["continuations"]:
        agree = f"({one['same_as_exact']:2d} of {len(one['tokens'])})"
        lines.append(f"{one['preset']:9} {agree}  {_one_line(one['text'])}")
    report, peak = result["report"], result["peak_memory_nbytes"]
    lines += [
        "",
        f"What the cache of {report['preset']} holds then:",
        report["table"],
        "",
        f"{result['total_seconds']:.0f} s, of which {result['kernel_seconds']:.0f} s to compile "
        "kernels or to read them from Numba's cache"
        + ("" if peak is None else f"; peak memory {peak / 2**20:.0f} MiB"),
    ]
    return "\n".join(line.rstrip() for line in lines)


def draw_angles(path: str, keys: Any, layer: int, seed: int) -> None:
    """Draw the angles of keys: as they are, rotated, and rotated minus their page's mean.

    Parameters
    ----------
    path : str
        PNG to write.
    keys : torch.Tensor, shape ``(batch, num_kv_heads, seq_len, head_dim)``
        One layer's keys.
    layer : int
        Its number, for the title.
    seed : int
        Of the rotation.
    """
    from matplotlib.figure import Figure

    head_dim = keys.shape[-1]
    bits = full_depth(head_dim, 4, 2)
    views = {
        "as they are": PolarFormat(head_dim, bits, rotation="none"),
        "rotated": PolarFormat(head_dim, bits, seed=seed),
        "rotated, mean off": PolarFormat(head_dim, bits, offset="int8", seed=seed),
    }
    # Not pyplot: the caller's figures and backend are not ours to change.
    figure = Figure(figsize=(2.4 * len(bits), 2.2 * len(views)), layout="constrained")
    axes = figure.subplots(len(views), len(bits), squeeze=False)
    for row, (label, fmt) in zip(axes, views.items(), strict=True):
        plot.angles(analysis.angles(keys, fmt), row)
        row[0].set_ylabel(f"{label}\ndensity (1/rad)")
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower right", ncols=2)
    figure.suptitle(
        f"Angles of the keys of layer {layer}: as they are, after the rotation, and after taking "
        f"off the mean of each page of {PAGE} tokens"
    )
    write_figure(path, figure)


def _table_line(row: dict[str, Any]) -> str:
    is_exact = row["preset"] == "exact"
    return _LINE.format(
        row["preset"],
        f"{row['bits_per_value']:.2f}",
        f"{row['nbytes'] / 2**20:.2f}",
        f"{row['ratio']:.2f}",
        "0" if is_exact else f"{row['kl']:.5f} ± {row['kl_stderr']:.5f}",
        f"{100 * row['top1']:.1f} %",
        f"{row['perplexity']:.3f}",
        "" if is_exact else f"{row['encode_tokens_per_second']:,.0f}",
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())
