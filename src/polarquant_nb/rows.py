"""PackedRows: pages wherever they lie in memory, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.bias import RotaryBias
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.preconditioning import Preconditioner, rotary_bias, row_signs

__all__ = ["PackedRows"]


@dataclass(frozen=True, eq=False)
class PackedRows:
    """Pages of several rows, a row being one batch element and kv head.

    Parameters
    ----------
    format : PolarFormat
        Of all pages.
    codebooks : Codebooks
        Of all pages.
    words : 1-d array of uint32
        Memory that holds the pages, and maybe other things between them.
    starts : array of int64, shape ``(rows, num_pages)``
        Index in ``words`` of each page's first word; whatever it is where a row is shorter.
    lengths : array of int64, shape ``(rows,)``
        Tokens of each row; pages are full but for the last of a row.
    prepared : dict
        What attention works out once, for its own use.
    preconditioner : Preconditioner, optional
        Of the vectors; of row ``r`` modulo the rows that it has.
    first_position : int
        Position of each row's first token, which a rotary bias depends on.
    """

    format: PolarFormat
    codebooks: Codebooks
    words: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]
    prepared: dict[Any, Any] = field(default_factory=dict, repr=False)
    preconditioner: Preconditioner | None = None
    first_position: int = 0

    def __post_init__(self) -> None:
        # compiled code is called without a look at types and strides
        for name in ("starts", "lengths"):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), np.int64))

    @property
    def num_pages(self) -> int:
        """Most pages that a row may have."""
        return self.starts.shape[1]

    @property
    def rotary_bias(self) -> RotaryBias | None:
        """What was subtracted from the vectors, if anything was."""
        return rotary_bias(self.preconditioner)

    @cached_property
    def inverse_signs(self) -> npt.NDArray[np.float32]:
        """Signs that undo those of encoding, as ``preconditioning.row_signs`` gives them."""
        return row_signs(self.format, self.preconditioner, inverse=True)

    def part(self, rows: slice) -> PackedRows:
        """Some of the rows."""
        preconditioner = self.preconditioner
        if preconditioner is not None:
            preconditioner = preconditioner.of_rows(len(self.starts), rows)
        return PackedRows(
            self.format, self.codebooks, self.words, self.starts[rows], self.lengths[rows], {},
            preconditioner, self.first_position,
        )  # fmt: skip
