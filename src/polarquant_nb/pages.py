"""PolarPages: vectors in packed pages, and what they cost."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.files import (
    format_record,
    preconditioner_record,
    read_file,
    read_format,
    read_kind,
    read_preconditioner,
    reading,
    write_file,
)
from polarquant_nb.formats import PolarFormat
from polarquant_nb.layout import PAGE
from polarquant_nb.preconditioning import Preconditioner, rotary_bias
from polarquant_nb.rows import PackedRows
from polarquant_nb.tracing import Token

__all__ = ["PolarPages"]


@dataclass(frozen=True, eq=False)
class PolarPages:
    """Compressed vectors ``(..., seq_len, head_dim)``, in pages of 128 tokens.

    Made by :func:`polarquant_nb.encode`.

    Parameters
    ----------
    format : PolarFormat
        Decides the bytes.
    words : ndarray of uint32, shape ``(..., num_pages, page_nbytes / 4)``
        The packed pages; see the notation-and-layout page.  The last page may be partial: its
        remaining lanes are zero.  On a GPU a torch.Tensor of int32, with the same bytes.
    seq_len : int
        Tokens.
    codebooks : Codebooks
        Codeword angles.
    kind : ArrayKind
        What :meth:`decode` returns unless told otherwise.
    num_nonfinite : int
        Rows that held NaN or inf when they were encoded (with ``nan="propagate"``).  On a GPU a
        0-d tensor, so that nothing waits for it.
    num_saturated : int
        Rows with a radius beyond float16, stored as the largest one (with ``nan="propagate"``).
    preconditioner : Preconditioner, optional
        What was done to the vectors before, and is undone where they are used.
    first_position : int
        Position of the first token, which a rotary bias depends on.
    """

    format: PolarFormat
    words: npt.NDArray[np.uint32] = field(repr=False)
    seq_len: int
    codebooks: Codebooks = field(repr=False)
    kind: ArrayKind
    num_nonfinite: int = 0
    num_saturated: int = 0
    preconditioner: Preconditioner | None = field(default=None, repr=False)
    first_position: int = 0
    _token: Token = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_token", Token(self))

    def __reduce__(self) -> tuple[Any, ...]:  # copies and pickles: with a token of their own
        return PolarPages, tuple(getattr(self, f.name) for f in fields(self) if f.init)

    @property
    def shape(self) -> tuple[int, ...]:
        """``(..., seq_len, head_dim)``."""
        return (*self.words.shape[:-2], self.seq_len, self.format.head_dim)

    @property
    def num_pages(self) -> int:
        """Pages of each row, the last one maybe partial."""
        return int(self.words.shape[-2])

    @property
    def device(self) -> Any:
        """Where the pages are: ``'cpu'``, or a torch.device."""
        return "cpu" if isinstance(self.words, np.ndarray) else self.words.device

    def to(self, device: Any) -> PolarPages:
        """The pages on another device.

        Parameters
        ----------
        device : str or torch.device
            ``'cpu'``, or a CUDA device.

        Returns
        -------
        PolarPages
            With a copy of the pages, unless they are there already.  Decoding gives torch tensors.
        """
        import torch

        words, place = self.words, torch.device(device)
        if isinstance(words, np.ndarray):
            words = torch.from_numpy(words.view(np.int32))  # type: ignore[assignment]
        moved = words.to(place)  # type: ignore[attr-defined]
        counts = self.num_nonfinite, self.num_saturated
        if place.type == "cpu":
            moved, counts = moved.numpy().view(np.uint32), (int(counts[0]), int(counts[1]))
        kind = ArrayKind("torch", self.kind.dtype)
        return PolarPages(
            self.format, moved, self.seq_len, self.codebooks, kind, *counts, self.preconditioner,
            self.first_position,
        )  # fmt: skip

    @cached_property
    def device_rows(self) -> Any:
        """Pages on a GPU as kernels take them; see ``gpu_codec.DeviceRows``."""
        from polarquant_nb.gpu_codec import device_rows

        return device_rows(self)

    @cached_property
    def rows(self) -> PackedRows:
        """The pages as kernels take them: a row for each index of the leading axes."""
        num_rows = prod(self.words.shape[:-2])
        starts = np.arange(num_rows * self.num_pages) * self.format.layout.num_words
        return PackedRows(
            self.format, self.codebooks, self.words.reshape(-1),
            starts.reshape(num_rows, self.num_pages), np.full(num_rows, self.seq_len), {},
            self.preconditioner, self.first_position,
        )  # fmt: skip

    @property
    def nbytes(self) -> int:
        """Bytes held: whole pages, fitted codebooks, a preconditioner."""
        extra = self.preconditioner.nbytes if self.preconditioner else 0
        return self.words.nbytes + self.codebooks.nbytes + extra

    @property
    def bits_per_value(self) -> float:
        """Bits held per stored number; more than the format's where the last page is partial."""
        values = prod(self.shape)
        return 8 * self.nbytes / values if values else float("nan")

    def _repr_html_(self) -> str:
        from polarquant_nb.html_tables import of_pages

        return of_pages(self)

    def decode(self, start: int = 0, stop: int | None = None, *, dtype: Any = None) -> Any:
        """Reconstruct tokens ``start .. stop−1``; see :func:`polarquant_nb.decode`.

        Parameters
        ----------
        start, stop : int, optional
            Range of tokens, 0 ≤ start ≤ stop ≤ seq_len; all of them by default.
        dtype : optional
            'float16', 'bfloat16', 'float32' or 'float64', or a dtype of that name.

        Returns
        -------
        ndarray or torch.Tensor, shape ``(..., stop − start, head_dim)``
            Of the array type that went in.
        """
        from polarquant_nb.codec import decode

        return decode(self, start, stop, dtype=dtype)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file.

        Parameters
        ----------
        path : path-like
            File to write, in the format of safetensors; one that is there is replaced, and left as
            it is if writing fails.

        Raises
        ------
        ImportError
            If safetensors is missing.
        """
        if self.device != "cpu":
            self.to("cpu").save(path)
            return
        record, arrays = preconditioner_record(self.preconditioner)
        header = {
            "format": format_record(self.format, self.codebooks),
            "seq_len": self.seq_len,
            "kind": self.kind.record,
            "num_nonfinite": self.num_nonfinite,
            "num_saturated": self.num_saturated,
            "preconditioner": record,
            "first_position": self.first_position,
        }
        write_file(path, "pages", header, {"words": np.ascontiguousarray(self.words), **arrays})

    @staticmethod
    def load(path: str | os.PathLike[str], fmt: PolarFormat | None = None) -> PolarPages:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : path-like
            File to read.
        fmt : PolarFormat, optional
            The format that the file must have.

        Returns
        -------
        PolarPages
            Equal to the saved ones.

        Raises
        ------
        ImportError
            If safetensors is missing.
        ValueError
            If the file is damaged, of another kind or version, of another format than ``fmt``, or
            this package would make other codes of its format.
        """
        with reading(path, "pages"):
            header, tensors = read_file(path, "pages")
            found, codebooks = read_format(header["format"])
            if fmt not in (None, found):
                raise ValueError(f"it has {found}, not {fmt}")
            words, seq_len = tensors["words"], header["seq_len"]
            last_axes = -(-seq_len // PAGE), found.layout.num_words
            if words.dtype != np.uint32 or words.shape[-2:] != last_axes:
                raise ValueError(
                    f"words is {words.dtype} of shape {words.shape}; it should be uint32 of shape "
                    f"(..., {last_axes[0]}, {last_axes[1]})"
                )
            preconditioner = read_preconditioner(header["preconditioner"], tensors)
            if preconditioner is not None:
                preconditioner.check(found, words.shape[:-2])
            return PolarPages(
                found, words.copy(), seq_len, codebooks, read_kind(header["kind"]),
                header["num_nonfinite"], header["num_saturated"], preconditioner,
                header["first_position"],
            )  # fmt: skip

    @staticmethod
    def concatenate(parts: Sequence[PolarPages]) -> PolarPages:
        """Join along seq_len; pages are copied as they are, never decoded.

        Parameters
        ----------
        parts : sequence of PolarPages
            Of one format, codebooks, preconditioner and leading shape; all but the last hold whole
            pages.  With a rotary bias, positions must go on from part to part.

        Returns
        -------
        PolarPages
            With the array kind of the first part.

        Raises
        ------
        ValueError
            If there is no part, formats, codebooks, preconditioners or leading shapes differ, a
            part but the last one ends in a partial page, or positions do not go on.
        """
        if not parts:
            raise ValueError("parts is empty; it must hold at least one PolarPages")
        first, position = parts[0], parts[0].first_position
        for i, part in enumerate(parts):
            if part.format != first.format:
                raise ValueError(f"parts[{i}] has {part.format}; parts[0] has {first.format}")
            if part.shape[:-2] != first.shape[:-2]:
                raise ValueError(
                    f"parts[{i}] has leading shape {part.shape[:-2]}; parts[0] has "
                    f"{first.shape[:-2]}"
                )
            if part.codebooks is not first.codebooks and not _same(part.codebooks, first.codebooks):
                raise ValueError(f"parts[{i}] was encoded with other codebooks than parts[0]")
            if not _same_preconditioner(part.preconditioner, first.preconditioner):
                raise ValueError(
                    f"parts[{i}] was encoded with another preconditioner than parts[0]"
                )
            has_bias = rotary_bias(part.preconditioner) is not None
            if has_bias and part.first_position != position:
                raise ValueError(
                    f"parts[{i}] starts at position {part.first_position}; with a rotary bias it "
                    f"must go on from the part before, at {position}"
                )
            position += part.seq_len
            if part.seq_len % PAGE and i < len(parts) - 1:
                raise ValueError(
                    f"parts[{i}] has {part.seq_len} tokens; all parts but the last must hold whole "
                    f"pages, a multiple of {PAGE}"
                )
        return PolarPages(
            format=first.format,
            words=_concatenated([part.words for part in parts]),
            seq_len=sum(part.seq_len for part in parts),
            codebooks=first.codebooks,
            kind=first.kind,
            num_nonfinite=sum(part.num_nonfinite for part in parts),
            num_saturated=sum(part.num_saturated for part in parts),
            preconditioner=first.preconditioner,
            first_position=first.first_position,
        )


def _same_preconditioner(a: Preconditioner | None, b: Preconditioner | None) -> bool:
    return a is b or (a is not None and a.same(b))


def _concatenated(words: list[Any]) -> Any:
    if isinstance(words[0], np.ndarray):
        return np.concatenate(words, -2)
    import torch

    return torch.cat(words, -2)


def _same(a: Codebooks, b: Codebooks) -> bool:
    return a.is_analytic == b.is_analytic and all(
        np.array_equal(x, y) for x, y in zip(a.angles, b.angles, strict=True)
    )
