"""What a PolarCache holds, as numbers and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

__all__ = ["CacheReport", "LayerReport"]

_LINE = "{:>7}  {:30} {:>8} {:>13} {:>6}"


@dataclass(frozen=True)
class LayerReport:
    """One layer.

    Parameters
    ----------
    kind : str
        Preset or formats; of a layer that is not compressed, its class.
    tokens : int
        Of all rows together.
    nbytes : int
        Bytes held, everything counted.
    fp16_nbytes : int
        Bytes of the same keys and values in 16 bits.
    """

    kind: str
    tokens: int
    nbytes: int
    fp16_nbytes: int

    @property
    def ratio(self) -> float:
        """Part of the bytes that it would take in 16 bits; NaN if there is nothing."""
        return self.nbytes / self.fp16_nbytes if self.fp16_nbytes else float("nan")


@dataclass(frozen=True)
class CacheReport:
    """All layers; as a string, a table in which neighbours that are equal share a line.

    Parameters
    ----------
    layers : tuple of LayerReport
        In order.
    exact, coded, decoded : int
        How often attention ran on the exact keys and values of a first prefill, on the codes, and
        on decoded keys and values.
    """

    layers: tuple[LayerReport, ...]
    exact: int
    coded: int
    decoded: int

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def fp16_nbytes(self) -> int:
        """Bytes of the same keys and values in 16 bits."""
        return sum(layer.fp16_nbytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Part of the bytes that all would take in 16 bits; NaN if there is nothing."""
        return self.nbytes / self.fp16_nbytes if self.fp16_nbytes else float("nan")

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in self._lines())

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Cells of the table: its heading, neighbours that are equal, and all layers.

        Yields
        ------
        tuple of str
            Layers, what they are kept as, tokens and bytes of each, and the part that these are of
            those in 16 bits.
        """
        yield "layers", "kept as", "tokens", "bytes each", "/ fp16"
        first = 0
        for layer, same in groupby(self.layers):
            last = first + len(list(same)) - 1
            which = str(first) if first == last else f"{first}-{last}"
            yield which, layer.kind, f"{layer.tokens:,}", f"{layer.nbytes:,}", _part(layer)
            first = last + 1
        yield "all", "", "", f"{self.nbytes:,}", _part(self)

    def _lines(self) -> Iterator[str]:
        for row in self.rows():
            yield _LINE.format(*row)
        yield (
            f"attention on codes {self.coded} times, on a first prefill {self.exact}, on decoded "
            f"keys and values {self.decoded}"
        )


def _part(of: LayerReport | CacheReport) -> str:
    return f"{of.ratio:.2f}" if of.fp16_nbytes else "–"
