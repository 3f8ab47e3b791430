"""What pages and caches hold, as small tables for notebooks: a bar of bytes over numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from math import isfinite
from typing import TYPE_CHECKING, Any

from polarquant_nb.formats import PolarFormat

if TYPE_CHECKING:
    from polarquant_nb.cache_state import CacheState
    from polarquant_nb.token_store import TokenStore

__all__ = ["of_cache", "of_layers", "of_pages"]

_COLOURS = {
    "codes": "#0072B2",
    "radii": "#E69F00",
    "offsets": "#009E73",
    "exact tokens": "#CC79A7",
    "tables": "#999999",  # where pages are; fitted codebooks, scales, moments
}
"""Parts, in the order of the bar; from Okabe and Ito's palette."""


def of_pages(pages: Any) -> str:
    """A table of pages.

    Parameters
    ----------
    pages : PolarPages
        On any device.

    Returns
    -------
    str
        HTML.
    """
    parts = _of_words(pages.format, pages.words.nbytes)
    parts["tables"] = pages.nbytes - pages.words.nbytes
    rows = [
        ("shape", " × ".join(f"{n:,}" for n in pages.shape)),
        ("format", _described(pages.format)),
        ("encoded from", f"{pages.kind.family} {pages.kind.dtype}"),
        ("bits per number, all told", _bits(pages.bits_per_value)),
    ]
    return _html("PolarPages", rows, parts)


def of_cache(cache: Any) -> str:
    """A table of a cache.

    Parameters
    ----------
    cache : KVCache
        The cache.

    Returns
    -------
    str
        HTML.
    """
    lengths = sorted(set(cache.lengths.tolist())) or [0]
    tokens = " to ".join(f"{n:,}" for n in dict.fromkeys((lengths[0], lengths[-1])))
    rows = [
        ("rows × kv heads × tokens", f"{cache.batch_size} × {cache.num_kv_heads} × {tokens}"),
        ("keys", _described(cache.formats.keys)),
        ("values", _described(cache.formats.values)),
        ("exact", f"first {cache.sink} tokens, and last {cache.recent} or more"),
        ("bits per number, all told", _bits(cache.bits_per_value)),
    ]
    return _html("KVCache", rows, _of_state(cache._state))


def of_layers(report: Any, caches: Iterable[Any]) -> str:
    """A table of the layers of a PolarCache.

    Parameters
    ----------
    report : CacheReport
        Of all layers.
    caches : iterable of KVCache or None
        Of those that are compressed; all other bytes are exact tokens.

    Returns
    -------
    str
        HTML.
    """
    parts: Counter[str] = Counter()
    for cache in caches:
        if cache is not None:
            parts.update(_of_state(cache._state))
    parts["exact tokens"] += report.nbytes - sum(parts.values())
    heading, *rows = report.rows()
    return _html("PolarCache", rows, parts, heading)


def _of_state(state: CacheState | None) -> Counter[str]:
    parts: Counter[str] = Counter()
    if state is not None:
        parts.update(_of_store(state.keys))
        parts.update(_of_store(state.values))
        parts["tables"] += state.nbytes - sum(parts.values())
    return parts


def _of_store(store: TokenStore) -> Counter[str]:
    parts = _of_words(store.table.format, store.table.blocks_nbytes)
    parts["exact tokens"] = store.exact.nbytes
    return parts


def _of_words(fmt: PolarFormat, nbytes: int) -> Counter[str]:
    """Parts of whole pages."""
    pages = nbytes // fmt.page_nbytes
    return Counter({name: 4 * n * pages for name, n in fmt.layout.words_by_part.items()})


def _described(fmt: PolarFormat) -> str:
    bits = ",".join(map(str, fmt.level_bits))
    offset = f", {fmt.offset} offset" if fmt.offset else ""
    radii = ", 8-bit radii" if fmt.radius == "log8" else ""
    return (
        f"head_dim {fmt.head_dim}, bits {bits}{offset}{radii}: {fmt.bits_per_value:.3f} bits per "
        "number"
    )


def _bits(per_value: float) -> str:
    return f"{per_value:.3f}" if isfinite(per_value) else "–"


def _html(
    title: str,
    rows: Sequence[Sequence[str]],
    parts: Mapping[str, int],
    heading: Sequence[str] = (),
) -> str:
    """A title with all bytes, a bar, what its colours are, and rows of cells."""
    total = sum(parts.values())
    shown = {name: parts[name] for name in _COLOURS if parts.get(name)}
    bar = "".join(
        f'<span title="{escape(name)}: {n:,} bytes" style="background:{_COLOURS[name]};'
        f'width:{100 * n / total:.2f}%"></span>'
        for name, n in shown.items()
    )
    legend = " ".join(
        f'<span style="white-space:nowrap;margin-right:.8em"><span style="color:{_COLOURS[name]}">■'
        f"</span> {escape(name)} {n:,}</span>"
        for name, n in shown.items()
    )
    if bar:
        bar = (
            '<div style="display:flex;height:.8em;max-width:36em;margin:.3em 0">'
            f"{bar}</div><div>{legend}</div>"
        )
    head = f"<thead>{_row('th', heading)}</thead>" if heading else ""
    body = "".join(_row("td", row) for row in rows)
    # notebooks would put the table into the middle
    return (
        f"<div><strong>{escape(title)}</strong>: {total:,} bytes{bar}"
        f'<table style="margin:.3em 0">{head}<tbody>{body}</tbody></table></div>'
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    """Names to the left; from the third column on, numbers to the right."""
    return (
        "<tr>"
        + "".join(
            f'<{tag} style="text-align:{"left" if i < 2 else "right"}">{escape(cell)}</{tag}>'
            for i, cell in enumerate(cells)
        )
        + "</tr>"
    )
