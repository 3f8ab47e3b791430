"""Tables for notebooks: their numbers are those of the buffers, and text stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from support import NOJIT, SMALL, SMALL_OFFSET, gaussian

import polarquant_nb as pq
from polarquant_nb import html_tables

TOKENS = 220 if NOJIT else 700


class Table(HTMLParser):
    """What a reader sees: text, rows of cells, and the bar's parts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open, self.text, self.rows, self.bar = [], "", [], {}
        self.feed(html)
        assert not self.open
        for name, count in re.findall(r"■ ([a-z ]+) ([\d,]+)", self.text):
            assert self.bar[name][0] == int(count.replace(",", ""))

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif "title" in attrs:
            name, count = attrs["title"].split(": ")
            width = float(re.search(r"width:([\d.]+)%", attrs["style"])[1])
            self.bar[name] = int(count.removesuffix(" bytes").replace(",", "")), width

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        else:
            self.text += data

    @property
    def parts(self):
        return {name: count for name, (count, _) in self.bar.items()}

    def check(self, title: str, nbytes: int) -> None:
        assert self.text.startswith(f"{title}: {nbytes:,} bytes")
        assert sum(self.parts.values()) == nbytes
        for count, width in self.bar.values():
            assert width == pytest.approx(100 * count / nbytes, abs=0.006)


@pytest.mark.parametrize(
    "fmt",
    [SMALL, SMALL_OFFSET, replace(SMALL, radius="log8")],
    ids=["plain", "offset", "8-bit radii"],
)
def test_pages(fmt):
    pages = pq.encode(gaussian(2, TOKENS, 64), fmt)
    table = Table(pages._repr_html_())
    table.check("PolarPages", pages.nbytes)
    num_pages = 2 * -(-TOKENS // 128)
    expected = {"radii": 2 * 128 * fmt.num_blocks * num_pages}
    if fmt.radius == "log8":  # and a word that says what they mean
        expected = {"radii": (128 * fmt.num_blocks + 4) * num_pages}
    if fmt.offset:
        expected["offsets"] = (64 + 4) * num_pages
    expected["codes"] = pages.words.nbytes - sum(expected.values())
    assert table.parts == expected
    cells = dict(table.rows)
    assert cells["shape"] == f"2 × {TOKENS} × 64"
    assert cells["encoded from"] == "numpy float32"
    assert cells["bits per number, all told"] == f"{pages.bits_per_value:.3f}"


def test_what_comes_with_pages_is_counted():
    x = gaussian(2, 130, 64)
    preconditioner = pq.Preconditioner(np.ones((2, 64)))
    pages = pq.encode(x, SMALL, codebooks="online", preconditioner=preconditioner)
    table = Table(pages._repr_html_())
    table.check("PolarPages", pages.nbytes)
    assert table.parts["tables"] == pages.codebooks.nbytes + preconditioner.nbytes > 0


def test_a_cache_of_several_rows():
    cache = pq.KVCache(SMALL_OFFSET, SMALL)
    empty = Table(cache._repr_html_())
    assert empty.bar == {}
    assert empty.text == "KVCache: 0 bytes"
    assert dict(empty.rows)["rows × kv heads × tokens"] == "0 × 0 × 0"
    assert dict(empty.rows)["bits per number, all told"] == "–"
    cache.append(gaussian(2, 3, TOKENS, 64), gaussian(2, 3, TOKENS, 64), padding=[0, 20])
    cache.repeat(2)  # pages are shared, and counted once
    table = Table(cache._repr_html_())
    table.check("KVCache", cache.nbytes)
    k, v = cache._state.keys, cache._state.values
    assert table.parts["exact tokens"] == k.exact.nbytes + v.exact.nbytes
    blocks = {id(b): b.nbytes for store in (k, v) for row in store.table.blocks for b in row}
    assert sum(table.parts[name] for name in ("codes", "radii", "offsets")) == sum(blocks.values())
    cells = dict(table.rows)
    assert cells["rows × kv heads × tokens"] == f"4 × 3 × {TOKENS - 20} to {TOKENS}"
    assert "5,4,4,4,4,4, int8 offset" in cells["keys"]


def test_a_cache_of_transformers():
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from language_models import tiny_model

    config = tiny_model().config
    cache = pq.hf.PolarCache(config, layers={1: None}, recent=20)
    assert Table(cache._repr_html_()).rows[-1][-2:] == ["0", "–"]
    with torch.no_grad():
        for layer in range(2):
            cache.update(torch.randn(1, 2, TOKENS, 64), torch.randn(1, 2, TOKENS, 64), layer)
    table = Table(cache._repr_html_())
    table.check("PolarCache", cache.nbytes)
    exact = 2 * 2 * TOKENS * 64 * 4  # of the second layer, in float32
    assert table.parts["exact tokens"] > exact
    assert table.parts["codes"] > 0
    assert table.rows[0] == ["layers", "kept as", "tokens", "bytes each", "/ fp16"]
    assert table.rows[-1][-2:] == [f"{cache.nbytes:,}", f"{cache.report().ratio:.2f}"]
    # what is printed says the same
    for row in table.rows:
        assert all(cell in str(cache.report()) for cell in row)


def test_text_is_escaped():
    pytest.importorskip("transformers")
    from polarquant_nb.hf import CacheReport, LayerReport

    evil = "<script>alert('&')</script>"
    html = html_tables.of_layers(CacheReport((LayerReport(evil, 3, 5, 7),), 0, 0, 0), [None])
    assert "<script" not in html
    assert Table(html).rows[1][1] == evil


@pytest.mark.parametrize("kind", ["pages", "cache"])
def test_tables_are_small(kind):
    if kind == "pages":
        html = pq.encode(gaussian(130, 64), SMALL)._repr_html_()
    else:
        html = pq.KVCache("balanced", head_dim=64)._repr_html_()
    assert len(html) < 3000
    assert "<style" not in html  # which would be that of the whole notebook
