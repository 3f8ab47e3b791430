"""What formats are: codebooks, and the words of a page."""

from __future__ import annotations

from typing import Any

import numpy as np

from polarquant_nb.codebooks import Codebooks
from polarquant_nb.densities import angle_density, angle_range
from polarquant_nb.formats import PolarFormat, integer
from polarquant_nb.layout import PAGE, PageLayout
from polarquant_nb.plot.style import EXPECTED, OBSERVED, angle_axis, new_axes, panels

__all__ = ["codebook", "page_layout"]

_WORD = 32
_LUMINANCE = 0.299, 0.587, 0.114  # of red, green and blue
_MANY = 20
"""Codes are written where fewer stems than this would fit at the smallest distance."""


def codebook(codebooks: Codebooks | PolarFormat, level: int | None = None, ax: Any = None) -> Any:
    """Draw codewords over the density of the angles that they stand for.

    A stem is a codeword, up to the density, with its code on top where there is room; dotted lines
    are the borders between what one codeword and the next stand for.

    Parameters
    ----------
    codebooks : Codebooks or PolarFormat
        Fitted codebooks, or a format for its analytic ones.
    level : int, optional
        Which level to draw; by default all of them.
    ax : matplotlib Axes, or an array of one for each level, optional
        Where to draw; by default a new figure with the levels side by side.

    Returns
    -------
    Axes, or ndarray of Axes
        What was drawn on: one Axes for one level, else as many as there are levels.

    Raises
    ------
    TypeError
        If ``codebooks`` is neither.
    ValueError
        If there is no such level, or the number of axes is not the number of levels.
    """
    if isinstance(codebooks, PolarFormat):
        codebooks = Codebooks.analytic(codebooks)
    if not isinstance(codebooks, Codebooks):
        raise TypeError(f"codebooks is {codebooks!r}; it must be a Codebooks or a PolarFormat")
    there = len(codebooks.angles)
    levels = range(1, there + 1) if level is None else [integer("level", level)]
    if not 1 <= levels[0] <= there:
        raise ValueError(f"level is {level}; the codebooks have levels 1 to {there}")
    n = len(levels)
    axes = panels(ax, 1, n, (2.6 * n, 2.4), f"{n} levels are drawn")
    for one, axis in zip(levels, axes, strict=True):
        _draw_codewords(codebooks.angles[one - 1], one, axis)
    axes[0].set_ylabel("density (rad⁻¹)")
    return axes[0] if len(axes) == 1 else axes


def page_layout(fmt: PolarFormat | PageLayout, ax: Any = None) -> Any:
    """Draw where the codes of a token are in its page: a line for each row, a box for each code.

    A row gives each of the 128 tokens (lanes) 32, 16 or 8 bits; the offset belongs to the page, and
    is drawn as wide as a word.  Boxes have the colour of their level and the number of their node
    within it, from 0.

    Parameters
    ----------
    fmt : PolarFormat or PageLayout
        The format.
    ax : matplotlib Axes, optional
        Where to draw; by default a new figure, high enough for all rows.

    Returns
    -------
    Axes
        What was drawn on.

    Raises
    ------
    TypeError
        If ``fmt`` is neither.
    """
    layout = fmt.layout if isinstance(fmt, PolarFormat) else fmt
    if not isinstance(layout, PageLayout):
        raise TypeError(f"fmt is {fmt!r}; it must be a PolarFormat or a PageLayout")
    rows = _rows(layout)
    if ax is None:
        ax = new_axes(1, 1, (9, 1.3 + 0.26 * len(rows)))[0, 0]
    colours = _level_colours(len(layout.level_bits))
    for y, (_, boxes) in enumerate(rows):
        for box in boxes:
            _draw_box(ax, y, box, colours)
    ax.set_yticks(range(len(rows)), [_words(first, count) for (first, count), _ in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, _WORD)
    ax.set_xticks(range(0, _WORD + 1, 4))
    ax.set_xlabel("bit of a lane (a token's part of the row)")
    ax.set_ylabel("words of the page")
    ax.set_title(
        f"a page of {PAGE} tokens: {layout.num_words:,} words, {4 * layout.num_words:,} bytes"
    )
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
    _add_legend(ax, layout.level_bits, colours, layout.padding_bits > 0)
    return ax


def _draw_codewords(codewords: Any, level: int, ax: Any) -> None:
    end = angle_range(level)
    psi = np.linspace(0, end, 401)
    density = angle_density(level, psi)
    ax.fill_between(psi, density, color=OBSERVED, alpha=0.35, linewidth=0)
    ax.plot(psi, density, color=OBSERVED)
    height = angle_density(level, codewords)
    ax.vlines(codewords, 0, height, color=EXPECTED)
    ax.plot(codewords, height, "o", color=EXPECTED, markersize=3)
    order = np.sort(codewords)
    if level == 1:  # a circle
        order = np.append(order, order[0] + end)
    borders = (order[1:] + order[:-1]) / 2 % end
    ax.vlines(borders, 0, density.max(), color="0.5", linestyle=":", linewidth=0.8)
    if np.diff(order).min() > end / _MANY:
        size = "small" if len(codewords) <= 8 else "xx-small"
        for code, (x, y) in enumerate(zip(codewords, height, strict=True)):
            ax.annotate(
                str(code),
                (x, y),
                (0, 3),
                textcoords="offset points",
                ha="center",
                fontsize=size,
            )
    angle_axis(ax, level, end)
    ax.set_ylim(0, 1.15 * density.max())


Box = tuple[float, float, int, str]
"""First bit, bits, level (0: no code) and label."""


def _rows(layout: PageLayout) -> list[tuple[tuple[int, int], list[Box]]]:
    """First word, words and boxes of each row, in the order of a page."""
    bits = layout.node_bits()
    starts = np.array(layout.level_start)
    rows: list[tuple[tuple[int, int], list[Box]]] = []
    for row in layout.code_rows:
        boxes: list[Box] = []
        for node, shift in row.fields:
            level = int(np.searchsorted(starts, node, side="right"))
            boxes.append((shift, int(bits[node]), level, str(node - starts[level - 1])))
        used = max(first + count for first, count, *_ in boxes)
        if used < row.width:
            boxes.append((used, row.width - used, -1, ""))
        rows.append(((row.word, PAGE * row.width // 32), boxes))
    for block, word in enumerate(layout.radius_words):
        name = "radius" if len(layout.radius_words) == 1 else f"radius of block {block}"
        width = layout.radius_width
        label = f"{name}, float16" if width == 16 else name
        rows.append(((word, PAGE * width // 32), [(0, width, 0, label)]))
    rows.sort(key=lambda row: row[0])
    anchor, end = layout.anchor_word, layout.offset_word + layout.offset_words
    if layout.offset_words:
        is_int8 = layout.offset_words != layout.head_dim // 2
        held = "int8, and a float16 scale" if is_int8 else "float16"
        label = f"offset: {layout.head_dim} × {held}, once for all lanes"
        if anchor is not None and anchor < end:
            label += "; anchor of the radii"
        rows.append(((layout.offset_word, layout.offset_words), [(0, _WORD, 0, label)]))
    if anchor is not None and anchor >= end:
        label = "anchor of the radii, once for all lanes"
        rows.append(((anchor, 1), [(0, _WORD, 0, label)]))
    return rows


def _draw_box(ax: Any, y: int, box: Box, colours: list[Any]) -> None:
    first, bits, level, label = box
    padding = level < 0
    ax.barh(
        y,
        bits,
        left=first,
        height=0.86,
        color="white" if padding else "0.85" if level == 0 else colours[level - 1],
        edgecolor="0.5" if padding else "white",
        linewidth=0.8,
        hatch="////" if padding else None,
    )
    dark = level > 0 and np.dot(colours[level - 1][:3], _LUMINANCE) < 0.45
    ax.text(
        first + bits / 2,
        y,
        label,
        ha="center",
        va="center",
        fontsize=7,
        color="white" if dark else "black",
        clip_on=True,
    )


def _words(first: int, count: int) -> str:
    return f"{first:,}" if count == 1 else f"{first:,}–{first + count - 1:,}"


def _level_colours(levels: int) -> list[Any]:
    """Dark to light, told apart by every kind of sight."""
    from matplotlib import colormaps

    return [colormaps["viridis"](x) for x in np.linspace(0.05, 1, levels)]


def _add_legend(
    ax: Any, level_bits: tuple[int, ...], colours: list[Any], has_padding: bool
) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=colour, label=f"level {level}, {bits} bit{'s' if bits > 1 else ''}")
        for level, (bits, colour) in enumerate(zip(level_bits, colours, strict=True), 1)
    ]
    if has_padding:
        handles.append(Patch(facecolor="white", edgecolor="0.5", hatch="////", label="padding"))
    ax.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
