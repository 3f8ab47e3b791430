"""What the commands measure: speed, quality over size, needles."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarquant_nb.plot.style import COLOURS, MARKERS, label_points, new_axes, panels

__all__ = ["frontier", "needle", "speed"]


def speed(results: dict[str, Any], ax: Any = None) -> Any:
    """Draw how many times faster ours is than each baseline of the benchmark.

    Points are medians, lines reach from the first to the third quartile.

    Parameters
    ----------
    results : dict
        What ``polarquant-nb bench --json FILE`` writes.
    ax : matplotlib Axes, or an array of one for each stage (encode, decode, …), optional
        Where to draw; by default a new figure with a panel for each that was measured.

    Returns
    -------
    Axes, or ndarray of Axes
        What was drawn on.

    Raises
    ------
    ValueError
        If the number of axes is not the number of panels.
    """
    rows = [row for row in results["rows"] if row["contender"] != "ours"]
    stages = list(dict.fromkeys(row["stage"].split()[0] for row in rows))
    n = len(stages)
    axes = panels(ax, n, 1, (8, 2.5 * n), f"the results have {n} panels")
    colours = dict(zip(dict.fromkeys(row["contender"] for row in rows), COLOURS, strict=False))
    drawn = [x for row in rows for x in row["quartiles"]]
    limits = min(0.5, *drawn) / 1.1, 1.1 * max(2, *drawn)
    for stage, axis in zip(stages, axes, strict=True):
        _draw_speed([row for row in rows if row["stage"].startswith(stage)], colours, axis)
        axis.set_title(stage)
        axis.set_xlim(limits)
    return axes[0] if len(axes) == 1 else axes


def frontier(results: dict[str, Any], ax: Any = None) -> Any:
    """Draw quality over size: KL, and its standard error, over bits per number.

    Contenders of one family are joined; steps show the frontier, which no contender beats in both.

    Parameters
    ----------
    results : dict
        What ``polarquant-nb eval --json FILE`` writes.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure.

    Returns
    -------
    Axes
        What was drawn on.
    """
    if ax is None:
        ax = new_axes(1, 1, (8, 5))[0, 0]
    rows = [row for row in results["summary"] if row["family"] != "exact"]
    best: list[tuple[float, float]] = []
    for bits, kl in sorted((row["bits_per_value"], row["kl"]) for row in rows):
        if not best or kl < best[-1][1]:
            best.append((bits, kl))
    ax.step(*zip(*best, strict=True), where="post", color="0.8", linewidth=4, zorder=0)
    labels: list[tuple[float, float, str]] = []
    for i, family in enumerate(dict.fromkeys(row["family"] for row in rows)):
        found = sorted(
            (row for row in rows if row["family"] == family), key=lambda row: row["bits_per_value"]
        )
        bits, kl = ([row[name] for row in found] for name in ("bits_per_value", "kl"))
        ax.errorbar(
            bits,
            kl,
            yerr=[row["kl_stderr"] or 0 for row in found],
            label=family,
            color=COLOURS[i % len(COLOURS)],
            marker=MARKERS[i % len(MARKERS)],
        )
        names = (row["contender"].removeprefix(family).strip(", ") for row in found)
        labels += zip(bits, kl, names, strict=True)
    ax.set_yscale("log")
    ax.set_xlabel("bits per number, scales included")
    ax.set_ylabel("KL from the exact cache (nats)")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    label_points(ax, sorted(label for label in labels if label[2]))
    return ax


def needle(results: dict[str, Any], ax: Any = None) -> Any:
    """Draw heat maps of needles over depth and context length: hit rate, and NLL in numbers.

    Parameters
    ----------
    results : dict
        What ``polarquant-nb eval --json FILE`` writes.
    ax : matplotlib Axes, or an array of one for each contender, optional
        Where to draw; by default a new figure with the contenders side by side.

    Returns
    -------
    Axes, or ndarray of Axes
        What was drawn on: one Axes for one contender, else as many as there are.

    Raises
    ------
    ValueError
        If the number of axes is not the number of contenders, or no needles were asked for.
    """
    rows = results["needle_rows"]
    names = list(dict.fromkeys(row["contender"] for row in rows))
    if not names:
        raise ValueError("the results have no needles")
    n = len(names)
    axes = panels(ax, 1, n, (2.2 * n, 2.6), f"the results have {n} contenders")
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({row["depth"] for row in rows})
    for name, axis in zip(names, axes, strict=True):
        _draw_needles([row for row in rows if row["contender"] == name], lengths, depths, axis)
        axis.set_title(name.replace(", ", "\n"), fontsize="medium")
    return axes[0] if len(axes) == 1 else axes


def _draw_speed(rows: list[dict[str, Any]], colours: dict[str, str], ax: Any) -> None:
    cases = list(dict.fromkeys(map(_case, rows)))
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for name, shift in zip(names, np.linspace(-0.5, 0.5, len(names) + 2)[1:-1], strict=True):
        found = [row for row in rows if row["contender"] == name]
        x = np.array([row["times_faster"] for row in found])
        low, high = np.array([row["quartiles"] for row in found]).T
        y = [cases.index(_case(row)) + shift for row in found]
        ax.errorbar(x, y, xerr=(x - low, high - x), fmt="o", color=colours[name], label=name)
    ax.axvline(1, color="0.6", zorder=0)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter("{x:g}×")
    ax.set_yticks(range(len(cases)), cases)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_xlabel("times faster than the baseline")
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def _draw_needles(
    rows: list[dict[str, Any]], lengths: list[int], depths: list[float], ax: Any
) -> None:
    groups: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in rows:
        place = depths.index(row["depth"]), lengths.index(row["length"])
        groups.setdefault(place, []).append(row)
    hits = np.full((len(depths), len(lengths)), np.nan)
    for (y, x), found in groups.items():
        hits[y, x] = np.mean([row["hit"] for row in found])
        nll = np.mean([row["nll"] for row in found])
        colour = "black" if hits[y, x] > 0.5 else "white"
        ax.text(x, y, f"{nll:.2f}", ha="center", va="center", color=colour, fontsize="small")
    # dark to light, told apart by every kind of sight
    ax.imshow(hits, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
    ax.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    ax.set_xlabel("tokens")
    ax.set_ylabel("depth")


def _case(row: dict[str, Any]) -> str:
    """What a row was measured on: what is encoded, preset, shape and tokens."""
    what = row["stage"].split()[1:]
    shape = f"{row['num_kv_heads']}/{row['num_heads']}/{row['head_dim']}"
    return ", ".join([*what, row["preset"], shape, f"{row['seq_len']:,} tokens"])
