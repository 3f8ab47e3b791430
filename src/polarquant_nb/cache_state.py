"""CacheState: everything a cache holds, once the first append has decided on its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import ArrayKind, widen
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import FormatPair, integer
from polarquant_nb.online import Fitting, OnlinePreconditioner
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.storable import MAX_NORM
from polarquant_nb.token_store import Placement, TokenStore, most_exact

__all__ = ["CacheState", "Settings", "runs"]

_ALL = 2**62
"""Recent tokens of a row that is not fitted yet."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Settings:
    """What a cache is made with.

    Parameters
    ----------
    formats : FormatPair
        Key and value format.
    codebooks : tuple of two Codebooks
        Of keys and values.
    sink, recent : int
        First and last tokens that stay exact.
    nan : {'raise', 'propagate'}
        What to do with vectors that cannot be stored.
    preconditioner : Preconditioner or OnlinePreconditioner, optional
        Of the keys.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If sink or recent is negative, nan is another word, codebooks do not have the bits of their
        format, or the preconditioner is for other keys.
    """

    formats: FormatPair
    codebooks: tuple[Codebooks, Codebooks]
    sink: int
    recent: int
    nan: Literal["raise", "propagate"]
    preconditioner: Preconditioner | OnlinePreconditioner | None = None

    def __post_init__(self) -> None:
        for name in ("sink", "recent"):
            value = integer(name, getattr(self, name))
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be at least 0")
            object.__setattr__(self, name, value)
        if self.nan not in ("raise", "propagate"):
            raise ValueError(f"nan is {self.nan!r}; it must be 'raise' or 'propagate'")
        for side, fmt, codebooks in zip(
            ("key", "value"), (self.formats.keys, self.formats.values), self.codebooks, strict=True
        ):
            if not isinstance(codebooks, Codebooks):
                raise TypeError(f"{side}_codebooks is {codebooks!r}; it must be a Codebooks")
            if codebooks.level_bits != fmt.level_bits:
                raise ValueError(
                    f"{side}_codebooks have {codebooks.level_bits} bits by level; the format has "
                    f"{fmt.level_bits}"
                )
        if self.preconditioner is None:
            return
        if not isinstance(self.preconditioner, (Preconditioner, OnlinePreconditioner)):
            raise TypeError(
                f"preconditioner is {self.preconditioner!r}; it must be a Preconditioner or an "
                "OnlinePreconditioner"
            )
        self.initial(1, 1).check(self.formats.keys, ("batch", "num_kv_heads"))

    def initial(self, batch: int, num_kv_heads: int) -> Preconditioner:
        """What keys are encoded with, before anything is fitted; only if there is one.

        Parameters
        ----------
        batch, num_kv_heads : int
            Rows, and kv heads.

        Returns
        -------
        Preconditioner
            The given one, or one that changes nothing.
        """
        given = self.preconditioner
        assert given is not None
        if isinstance(given, Preconditioner):
            return given
        return given.neutral((batch, num_kv_heads, self.formats.keys.head_dim))

    @property
    def capacity(self) -> int:
        """Most exact tokens of a row."""
        most = most_exact(0, self.sink, self.recent)
        online = self.preconditioner
        if isinstance(online, OnlinePreconditioner):
            return max(most, online.min_tokens - 1)
        return most


@dataclass(frozen=True, eq=False)
class CacheState:
    """Keys, values and their numbers.  Operations make new states and leave the old one as it was.

    Parameters
    ----------
    settings : Settings
        Of the cache.
    keys, values : TokenStore
        Their tokens.
    exact : tuple of int
        Exact tokens of each row; its other tokens are in pages.
    fitting : Fitting, optional
        With an OnlinePreconditioner.
    """

    settings: Settings
    keys: TokenStore
    values: TokenStore
    exact: tuple[int, ...]
    fitting: Fitting | None = None

    @staticmethod
    def empty(settings: Settings, kind: ArrayKind, batch: int, num_kv_heads: int) -> CacheState:
        """A state without tokens.

        Parameters
        ----------
        settings : Settings
            Of the cache.
        kind : ArrayKind
            What will be appended.
        batch, num_kv_heads : int
            Rows, and kv heads.

        Returns
        -------
        CacheState
            With buffers of its own.

        Raises
        ------
        ValueError
            If there is a preconditioner that does not fit, or for arrays on a GPU one that is to be
            fitted.
        """
        formats, preconditioner, fitting = settings.formats, None, None
        if isinstance(settings.preconditioner, OnlinePreconditioner) and kind.device is not None:
            raise ValueError(
                "preconditioner is an OnlinePreconditioner, which is fitted on the CPU only; k is "
                f"on {kind.place}: give a Preconditioner, or a calibration"
            )
        if settings.preconditioner is not None:
            preconditioner = settings.initial(batch, num_kv_heads)
            preconditioner.check(formats.keys, (batch, num_kv_heads))
            if isinstance(settings.preconditioner, OnlinePreconditioner):
                shape = batch, num_kv_heads, formats.keys.head_dim
                fitting = Fitting.empty(settings.preconditioner, shape)
        keys, values = (
            TokenStore.empty(kind, fmt, codebooks, batch, num_kv_heads, before, settings.sink)
            for fmt, codebooks, before in zip(
                (formats.keys, formats.values), settings.codebooks, (preconditioner, None),
                strict=True,
            )
        )  # fmt: skip
        return CacheState(settings, keys, values, (0,) * batch, fitting)

    @property
    def kind(self) -> ArrayKind:
        """What is appended."""
        return self.keys.kind

    @property
    def longest_key(self) -> float:
        """Largest norm of a key that can be stored."""
        preconditioner = self.keys.table.preconditioner
        return MAX_NORM if preconditioner is None else preconditioner.longest

    @property
    def nbytes(self) -> int:
        """Bytes of everything."""
        return self.keys.nbytes + self.values.nbytes + (self.fitting.nbytes if self.fitting else 0)

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return self.keys.exact.shape[1]

    @property
    def packed(self) -> tuple[int, ...]:
        """Tokens of each row in pages."""
        return self.keys.table.lengths

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each row."""
        return tuple(map(sum, zip(self.exact, self.packed, strict=True)))

    @cached_property
    def seq_len(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    def appended(
        self, k: Array, v: Array, padding: Sequence[int], q: tuple[Array, ArrayKind] | None = None
    ) -> CacheState:
        """The state after an append.

        Parameters
        ----------
        k, v : ndarray, shape ``(batch, num_kv_heads, n, head_dim)``
            Elements of vectors that can be stored.
        padding : sequence of int
            First tokens of each row that are none.
        q : tuple of ndarray and ArrayKind, optional
            Their queries, where they are wanted.

        Returns
        -------
        CacheState
            The next state; it may go on using the buffers of this one.
        """
        keys, fitting = self.keys, self.fitting
        if fitting is not None and not all(fitting.fixed):
            keys, fitting = self._fitted(fitting, k, padding, q)
        placements = self._placements(k.shape[2], padding, fitting)
        keys, values = keys.appended(k, placements), self.values.appended(v, placements)
        exact = [p.exact_after for p in placements for _ in range(p.rows.start, p.rows.stop)]
        return CacheState(self.settings, keys, values, tuple(exact), fitting)

    def makes_pages(self, n: int, padding: Sequence[int]) -> bool:
        """Whether an append of ``n`` tokens would encode any, where nothing is to be fitted."""
        return any(placement.moved for placement in self._placements(n, padding, None))

    def _placements(
        self, n: int, padding: Sequence[int], fitting: Fitting | None
    ) -> list[Placement]:
        recent = (self.settings.recent,) * len(padding)
        if fitting is not None and not all(fitting.fixed):
            recent = tuple(r if f else _ALL for r, f in zip(recent, fitting.fixed, strict=True))
        return [
            Placement.of(rows, n - padded, exact, packed, self.settings.sink, last)
            for rows, (exact, packed, padded, last) in runs(
                self.exact, self.packed, padding, recent
            )
        ]

    def _fitted(
        self, fitting: Fitting, k: Array, padding: Sequence[int], q: tuple[Array, ArrayKind] | None
    ) -> tuple[TokenStore, Fitting]:
        """The keys, with the preconditioner of rows fitted that have enough tokens now."""
        if q is not None:
            fitting = fitting.observed(*q, padding)
        preconditioner = self.keys.table.preconditioner
        assert preconditioner is not None
        new = [length + k.shape[2] - n for length, n in zip(self.lengths, padding, strict=True)]
        for row in fitting.ready(new):  # all of its tokens are exact
            held = self.keys.exact[row, :, : self.exact[row]]
            own = np.concatenate([held, k[row, :, padding[row] :]], 1)
            fitting, preconditioner = fitting.fitted(row, widen(own, self.kind), preconditioner)
        return self.keys.with_preconditioner(preconditioner), fitting

    def cropped(self, lengths: Sequence[int]) -> CacheState:
        """The first tokens of each row.

        Parameters
        ----------
        lengths : sequence of int
            How many of each; at most as many as it has.

        Returns
        -------
        CacheState
            The next state; it goes on using the buffers of this one.
        """
        sink = self.settings.sink
        packed = [max(0, min(p, n - sink)) for p, n in zip(self.packed, lengths, strict=True)]
        exact = [n - p for p, n in zip(packed, lengths, strict=True)]
        keys, values = self.keys.cropped(packed), self.values.cropped(packed)
        return replace(self, keys=keys, values=values, exact=tuple(exact))

    def select(self, indices: Sequence[int]) -> CacheState:
        """Rows in another order, each as often as wanted, in buffers of their own.

        Parameters
        ----------
        indices : sequence of int
            Rows.

        Returns
        -------
        CacheState
            The next state; pages are shared.
        """
        exact = tuple(self.exact[i] for i in indices)
        slots = max(exact, default=0)
        keys, values = self.keys.select(indices, slots), self.values.select(indices, slots)
        fitting = self.fitting.select(indices) if self.fitting else None
        return CacheState(self.settings, keys, values, exact, fitting)

    def copy(self) -> CacheState:
        """The same tokens in buffers of their own; pages are shared."""
        slots = max(self.exact, default=0)
        return replace(self, keys=self.keys.copy(slots), values=self.values.copy(slots))

    def decode(self, store: TokenStore) -> Any:
        """All keys, or values, of the array type and dtype that was appended.

        Parameters
        ----------
        store : TokenStore
            One of the two.

        Returns
        -------
        ndarray or torch.Tensor, shape ``(batch, num_kv_heads, seq_len, head_dim)``
            Shorter rows have zeros before them.
        """
        batch, num_kv_heads, _, head_dim = store.exact.shape
        shape = batch, num_kv_heads, self.seq_len, head_dim
        array, x = store.memory.zeros(shape, self.kind)
        for rows, (exact, packed) in runs(self.exact, self.packed):
            sinks = min(exact, self.settings.sink)
            middle = self.seq_len - (exact - sinks) - packed
            x[rows, :, middle - sinks : middle] = store.exact[rows, :, :sinks]
            if packed:
                x[rows, :, middle : middle + packed] = store.table.decode(rows, self.kind)
            x[rows, :, middle + packed :] = store.exact[rows, :, sinks:exact]
        return array


def runs(*columns: Sequence[int]) -> Iterator[tuple[slice, tuple[int, ...]]]:
    """Neighbouring rows of which all numbers are equal: one slice where all rows are.

    Parameters
    ----------
    *columns : sequences of int
        Numbers of each row.

    Yields
    ------
    slice, tuple of int
        Rows, and their numbers.
    """
    if len(columns[0]) == 1:  # as in nearly every call
        yield slice(0, 1), tuple(column[0] for column in columns)
        return
    first = 0
    for numbers, rows in groupby(zip(*columns, strict=True)):
        stop = first + sum(1 for _ in rows)
        yield slice(first, stop), numbers
        first = stop
