"""KVCache: the keys and values of one layer, compressed as they grow."""

from __future__ import annotations

import os
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from polarquant_nb import cache_attention, cache_files
from polarquant_nb.arrays import ArrayKind, open_elements, open_integers
from polarquant_nb.budgets import format_pair
from polarquant_nb.cache_state import CacheState, Settings
from polarquant_nb.calibration import LayerCalibration
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.decode_step import DecodeStep
from polarquant_nb.formats import FormatPair, PolarFormat, integer
from polarquant_nb.gpu_arrays import gpu_of, on_gpu
from polarquant_nb.memory import open_tokens
from polarquant_nb.online import OnlinePreconditioner
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.queries import (
    check_last,
    check_query_shape,
    open_logits,
    open_mask,
    open_queries,
    result,
)
from polarquant_nb.storable import check_storable
from polarquant_nb.tracing import Token, traced_by, untraced_methods

__all__ = ["KVCache"]


@untraced_methods("append", "attend", "formats", "recent", "sink", "step")
class KVCache:
    """The keys and values of one layer: first and last tokens exact, the others as polar codes.

    A row of the batch is ``sinks | pages | recent``.  Its first ``sink`` tokens and its last ones
    are kept as they were appended, between ``recent`` and ``recent + 127`` of them; when there are
    128 more than ``recent``, the oldest 128 become a page.  A token is encoded once, and never
    decoded and encoded again; codes do not depend on how the tokens were cut into appends.

    Rows may be of different lengths (see ``padding`` of :meth:`append`); each holds and returns
    what it would alone.  The first append decides on batch, number of kv heads, dtype, array type
    and device; on an NVIDIA GPU everything stays there.  Memory grows by pages.  Pages never
    change, and rows that were selected twice and copies of a cache share them.

    One cache must not be changed by one thread while another uses it.  Whatever raises leaves the
    cache as it was.  To torch.compile, :meth:`append` and :meth:`attend` are operators, and
    :meth:`step` is the two; everything else, but for formats, ``sink`` and ``recent``, breaks the
    graph.

    Parameters
    ----------
    key_format : str, FormatPair, PolarFormat or LayerCalibration
        The name of a preset, with ``head_dim``; a pair of formats; the format of the keys; or what
        a :class:`Calibration` has for the layer, ``calibration[i]``, which has a preconditioner.
    value_format : PolarFormat, optional
        The format of the values, where ``key_format`` is a PolarFormat; by default the same.
    head_dim, value_head_dim : int, optional
        Coordinates of keys, and of values if they differ; for presets only.
    sink : int
        First tokens of each row that stay exact.
    recent : int
        Fewest last tokens of each row that stay exact, while there are as many.
    nan : {'raise', 'propagate'}
        What to do with vectors that hold NaN or inf, or whose norm is beyond 65504: refuse them
        when they are appended (on a GPU, see :meth:`append`), or store them as :func:`encode` does.
    key_codebooks, value_codebooks : Codebooks, optional
        Fitted codebooks instead of the analytic ones.
    preconditioner : Preconditioner or OnlinePreconditioner, optional
        Key scales and rotary bias of the layer, or how to fit them to the first tokens, which is
        done on the CPU only.  For a rotary bias, a row's token i is at position i; it makes
        :meth:`attend` use some 8 more bytes of scratch per packed token and query.

    Raises
    ------
    TypeError
        If an argument has the wrong type, or the formats are given in another way.
    ValueError
        If an argument is outside what is stated above.

    Examples
    --------
    >>> import numpy as np
    >>> import polarquant_nb as pq
    >>> cache = pq.KVCache("balanced", head_dim=64)
    >>> rng = np.random.default_rng(0)
    >>> k, v = rng.standard_normal((2, 1, 3, 1000, 64), dtype=np.float32)
    >>> cache.append(k, v)
    >>> q = rng.standard_normal((1, 9, 1, 64), dtype=np.float32)
    >>> cache.attend(q).shape
    (1, 9, 1, 64)
    >>> cache.seq_len, cache.nbytes < (k.nbytes + v.nbytes) / 4
    (1000, True)
    """

    def __init__(
        self,
        key_format: str | FormatPair | PolarFormat | LayerCalibration,
        value_format: PolarFormat | None = None,
        *,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
        sink: int = 4,
        recent: int = 64,
        nan: Literal["raise", "propagate"] = "raise",
        key_codebooks: Codebooks | None = None,
        value_codebooks: Codebooks | None = None,
        preconditioner: Preconditioner | OnlinePreconditioner | None = None,
    ) -> None:
        if isinstance(key_format, LayerCalibration):
            if preconditioner is not None:
                raise TypeError("preconditioner is given; a calibration has its own")
            preconditioner = key_format.preconditioner
            key_format = key_format.formats
        formats = format_pair(
            key_format, value_format, head_dim=head_dim, value_head_dim=value_head_dim
        )
        codebooks = (
            Codebooks.analytic(formats.keys) if key_codebooks is None else key_codebooks,
            Codebooks.analytic(formats.values) if value_codebooks is None else value_codebooks,
        )
        self._token = Token(self)
        self._settings = Settings(formats, codebooks, sink, recent, nan, preconditioner)
        self._state = None

    @property
    def _state(self) -> CacheState | None:  # a property, so that no change goes uncounted
        return self._held

    @_state.setter
    def _state(self, state: CacheState | None) -> None:
        self._held = state
        self._step: DecodeStep | None = None  # it is for the state before
        self._token.count()

    # ---- what there is ---------------------------------------------------------------------------

    @property
    def formats(self) -> FormatPair:
        """Key and value format."""
        return self._settings.formats

    @property
    def sink(self) -> int:
        """First tokens of each row that stay exact."""
        return self._settings.sink

    @property
    def recent(self) -> int:
        """Fewest last tokens of each row that stay exact."""
        return self._settings.recent

    @property
    def batch_size(self) -> int:
        """Rows; 0 before the first append."""
        return len(self._state.exact) if self._state else 0

    @property
    def num_kv_heads(self) -> int:
        """Kv heads; 0 before the first append."""
        return self._state.num_kv_heads if self._state else 0

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each row, ``(batch,)``; padding is not counted."""
        return np.array(self._state.lengths if self._state else (), np.int64)

    @property
    def seq_len(self) -> int:
        """Tokens of the longest row."""
        return self._state.seq_len if self._state else 0

    @property
    def nbytes(self) -> int:
        """Bytes held: exact buffers, pages (shared ones once), tables, fitted codebooks, scales."""
        return self._state.nbytes if self._state else 0

    @property
    def wants_queries(self) -> bool:
        """Whether the next append must be given the queries: see OnlinePreconditioner."""
        if self._state is None:
            online = self._settings.preconditioner
            return isinstance(online, OnlinePreconditioner) and online.scales
        return self._state.fitting is not None and self._state.fitting.wants_queries

    @property
    def bits_per_value(self) -> float:
        """Bits held per number of the keys and values; NaN if there are none."""
        width = self.formats.keys.head_dim + self.formats.values.head_dim
        numbers = int(self.lengths.sum()) * self.num_kv_heads * width
        return 8 * self.nbytes / numbers if numbers else float("nan")

    def __repr__(self) -> str:
        return (
            f"KVCache(batch_size={self.batch_size}, num_kv_heads={self.num_kv_heads}, "
            f"seq_len={self.seq_len}, nbytes={self.nbytes}, sink={self.sink}, "
            f"recent={self.recent}, formats={self.formats})"
        )

    def _repr_html_(self) -> str:
        from polarquant_nb.html_tables import of_cache

        return of_cache(self)

    # ---- what changes it -------------------------------------------------------------------------

    @traced_by("traced_append")
    def append(self, k: Any, v: Any, padding: Any = None, *, q: Any = None) -> None:
        """Add tokens to the end of each row.

        Parameters
        ----------
        k : ndarray or torch.Tensor, shape ``(batch, num_kv_heads, n, head_dim)``
            Keys after the positional encoding, of any number of tokens: float16, bfloat16, float32
            or float64, of any strides.
        v : of the same type, shape ``(batch, num_kv_heads, n, value_head_dim)``
            Values.
        padding : array_like of int, shape ``(batch,)``, optional
            How many first tokens of each row are padding, 0 to n.  They are not stored, and not
            looked at.
        q : of a float dtype, shape ``(batch, num_heads, n, head_dim)``, optional
            Queries of the same tokens, after the positional encoding; looked at only while
            :attr:`wants_queries`.

        Raises
        ------
        TypeError
            If ``k``, ``v`` or ``q`` is no float array on the CPU or an NVIDIA GPU, or of another
            type than before.
        ValueError
            If shapes do not fit, arrays are on another device than before, queries are wanted and
            not given, or (with ``nan="raise"``) a vector cannot be stored.  On a GPU one that came
            with fewer than 128 tokens is found when a page is made: the append that makes it
            raises.
        """
        (keys, kind), (values, value_kind) = open_tokens(k, "k"), open_tokens(v, "v")
        self._check_shapes(tuple(keys.shape), tuple(values.shape))
        state = self._state
        expected, whose = (state.kind, "the cache") if state else (kind, "k")
        for name, given in (("k", kind), ("v", value_kind)):
            if given != expected:
                _refuse(name, given, expected, whose)
        batch, num_kv_heads, n, _ = keys.shape
        paddings = [0] * batch if padding is None else _open_padding(padding, batch, n)
        state = state or CacheState.empty(self._settings, kind, batch, num_kv_heads)
        if self._settings.nan == "raise" and kind.device is not None:
            from polarquant_nb import gpu_cache

            gpu_cache.check_storable(state, keys, values, paddings)
        elif self._settings.nan == "raise":
            check_storable(keys, kind, "k", paddings, state.longest_key)
            check_storable(values, kind, "v", paddings)
        wanted = state.fitting is not None and state.fitting.wants_queries
        queries = self._open_appended_queries(q, keys.shape) if wanted else None
        self._state = state.appended(keys, values, paddings, queries)

    def crop(self, n: Any) -> None:
        """Keep the first tokens of each row.

        Tokens that are appended next take the places of those that went: in a page that was cut,
        they are coded with the page's offset.

        Parameters
        ----------
        n : int, or array_like of int of shape ``(batch,)``
            Tokens of the longest row to keep, 0 to ``seq_len``: every row loses as many last
            tokens as the longest, as when a draft is rejected; none has less than 0.  Or tokens of
            each row to keep, 0 to its length.

        Raises
        ------
        TypeError
            If ``n`` is not of integers.
        ValueError
            If it is out of range.
        """
        held = self.lengths.tolist()
        if np.ndim(n):
            lengths = open_integers(n, "n")
            if len(lengths) != len(held) or any(
                not 0 <= a <= b for a, b in zip(lengths, held, strict=True)
            ):
                raise ValueError(f"n is {lengths}; of rows, it must be 0 to their lengths {held}")
        else:
            n, seq_len = integer("n", n), self.seq_len
            if not 0 <= n <= seq_len:
                raise ValueError(f"n is {n}; it must be 0 to seq_len = {seq_len}")
            lengths = [max(0, length - (seq_len - n)) for length in held]
        if self._state and lengths != held:
            self._state = self._state.cropped(lengths)

    def select(self, indices: Any) -> None:
        """Take rows in the order of ``indices``, each as often as it is named there.

        Parameters
        ----------
        indices : array_like of int, 1-d
            Rows, 0 to ``batch_size − 1``; NumPy, torch or a sequence.

        Raises
        ------
        TypeError
            If they are not integers.
        ValueError
            If they are not one-dimensional, or out of range.
        """
        rows = open_integers(indices, "indices")
        batch = self.batch_size
        if any(not 0 <= i < batch for i in rows):
            raise ValueError(
                f"indices are {rows}; each must be 0 to batch_size - 1, and batch_size is {batch}"
            )
        if self._state:
            self._state = self._state.select(rows)

    def repeat(self, n: int) -> None:
        """Take each row ``n`` times, one after another; the pages are shared.

        Parameters
        ----------
        n : int
            At least 1.

        Raises
        ------
        TypeError
            If ``n`` is no int.
        ValueError
            If it is less than 1.
        """
        n = integer("n", n)
        if n < 1:
            raise ValueError(f"n is {n}; it must be at least 1")
        self.select([row for row in range(self.batch_size) for _ in range(n)])

    def reset(self) -> None:
        """Forget all tokens, and batch, dtype and array type with them."""
        self._state = None

    # ---- what it is for --------------------------------------------------------------------------

    @traced_by("traced_attend")
    def attend(
        self,
        q: Any,
        mask: Any = None,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Causal attention of the last tokens to all tokens of their rows.

        The keys and values of the queries' own tokens must have been appended.  Query i of a row
        with ``length`` tokens sees the first ``length − q_len + i + 1`` of them; one that sees none
        (the padding of a shorter row) gets zeros.  Sums are in float32.

        Parameters
        ----------
        q : ndarray or torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
            Queries of the last ``q_len`` tokens of the cache, after the positional encoding.
            Consecutive runs of ``num_heads / num_kv_heads`` heads share a kv head.
        mask : array_like of bool or float, optional
            Broadcastable to ``(batch, num_heads, q_len, seq_len)``: True where a query may attend,
            or numbers that are added to the logits; what causality hides stays hidden.  The last
            column is the last token of every row, as in left-padded batches.
        scale : float, optional
            Of the logits; ``head_dim ** -0.5`` by default.
        softcap : float, optional
            Logits become ``softcap * tanh(logits / softcap)``, before the mask.
        return_lse : bool
            Return the logarithm of each query's sum of exponentials too.

        Returns
        -------
        out : ndarray or torch.Tensor, shape ``(batch, num_heads, q_len, value_head_dim)``
            Of the array type and dtype of ``q``.
        lse : ndarray or torch.Tensor of float32, shape ``(batch, num_heads, q_len)``
            Natural logarithms, only with ``return_lse``; −inf for a query that sees no token.

        Raises
        ------
        TypeError
            If ``q`` or ``mask`` is no array of a supported dtype.
        ValueError
            If shapes do not fit, arrays are elsewhere than the cache, there are fewer tokens than
            queries, or scale or softcap is not a finite positive number.
        """
        state = self._opened()
        seq_len, head_dim = state.seq_len, self.formats.keys.head_dim
        held = len(state.exact), state.num_kv_heads, seq_len, head_dim
        if state.kind.device is not None or on_gpu(q):
            from polarquant_nb import gpu_cache

            logits = open_logits(scale, softcap, head_dim)
            return gpu_cache.attend(state, q, mask, logits, held, return_lse)
        queries = open_queries(q, held, "the cache")
        logits = open_logits(scale, softcap, head_dim)
        check_last(queries.shape, seq_len)
        numbers = None if mask is None else open_mask(mask, (*queries.shape, seq_len))
        out, lse = cache_attention.attend(state, queries, logits, numbers)
        return result(queries, out, lse if return_lse else None)

    @traced_by("traced_step")
    def step(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> Any:
        """Append one token to each row, and attend to it and all tokens before it.

        What :meth:`append` and :meth:`attend` do one after the other, in less time: a decoder's
        step.

        Parameters
        ----------
        q : ndarray or torch.Tensor, shape ``(batch, num_heads, 1, head_dim)``
            Queries of the token; see :meth:`attend`.
        k : likewise, shape ``(batch, num_kv_heads, 1, head_dim)``
            Keys; see :meth:`append`.
        v : likewise, shape ``(batch, num_kv_heads, 1, value_head_dim)``
            Values.
        scale, softcap : float, optional
            See :meth:`attend`.

        Returns
        -------
        ndarray or torch.Tensor, shape ``(batch, num_heads, 1, value_head_dim)``
            Of the array type and dtype of ``q``.

        Raises
        ------
        TypeError
            As :meth:`append` and :meth:`attend`.
        ValueError
            Likewise.
        """
        logits = open_logits(scale, softcap, self.formats.keys.head_dim)
        step = self._step
        if step is not None and step.fits(q, k, v, logits):
            self._step = None  # one that is interrupted may have counted a token that is not there
            out = step(q, k, v)
            self._state = step.state
            self._step = step
            return out
        (keys, k_kind), (queries, q_kind) = open_tokens(k, "k"), open_tokens(q, "q")
        for name, x in (("k", keys), ("q", queries)):
            if len(x.shape) != 4 or x.shape[2] != 1:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; step takes one token: (batch, heads, 1, "
                    "head_dim)"
                )
        if q_kind.device != k_kind.device:
            raise ValueError(f"q is on {q_kind.place}; k is on {k_kind.place}: move it there")
        num_heads = queries.shape[1]
        check_query_shape(tuple(queries.shape), tuple(keys.shape), "k")
        before = self._state
        try:
            self.append(k, v, q=q)
            out = self.attend(q, scale=scale, softcap=softcap)
            state = self._opened()
            if DecodeStep.is_possible(state, num_heads) and q_kind.family == k_kind.family:
                self._step = DecodeStep(state, num_heads, q_kind, logits)
        except BaseException:  # no memory, or an interrupt
            self._state = before
            raise
        return out

    def decode(self) -> tuple[Any, Any]:
        """All keys and values, as exact as the cache holds them.

        Returns
        -------
        k : ndarray or torch.Tensor, shape ``(batch, num_kv_heads, seq_len, head_dim)``
            Of the array type and dtype that was appended; shorter rows have zeros before them.
        v : likewise, shape ``(batch, num_kv_heads, seq_len, value_head_dim)``
            Values.

        Raises
        ------
        ValueError
            Before the first append, which decides on their type.
        """
        state = self._opened()
        return state.decode(state.keys), state.decode(state.values)

    # ---- copies and files ------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCache:
        return _with(type(self), self._settings, self._state.copy() if self._state else None)

    def __copy__(self) -> KVCache:
        return self.__deepcopy__({})

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_plain, (type(self), self._settings, *cache_files.to_plain(self._state))

    def to(self, device: Any) -> KVCache:
        """The cache on another device.

        Parameters
        ----------
        device : str or torch.device
            ``'cpu'``, or a CUDA device.

        Returns
        -------
        KVCache
            With a copy of the tokens, of which codes are the same bytes; it takes and gives torch
            tensors there.  This cache itself if it is there already.

        Raises
        ------
        ImportError
            If kernels cannot run there.
        ValueError
            If it is another device, or a GPU and there is an OnlinePreconditioner.
        """
        place, state = gpu_of(device), self._state
        if state is None or state.kind.device == place:
            return self
        numbers, arrays = cache_files.to_plain(state)
        moved = cache_files.from_plain(self._settings, numbers, arrays, place)
        return _with(type(self), self._settings, moved)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a file: codes and exact tokens as they are.

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
        cache_files.save_cache(path, self._settings, self._state)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        key_format: str | FormatPair | PolarFormat | None = None,
        value_format: PolarFormat | None = None,
        *,
        head_dim: int | None = None,
        value_head_dim: int | None = None,
    ) -> KVCache:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : path-like
            File to read.
        key_format, value_format, head_dim, value_head_dim : optional
            The formats that the file must have, given as to :class:`KVCache`.

        Returns
        -------
        KVCache
            It goes on as the saved one would, bit for bit.

        Raises
        ------
        ImportError
            If safetensors is missing.
        ValueError
            If the file is damaged, of another kind or version, of other formats than expected, or
            this package would make other codes of its formats.
        """
        expected = None
        if key_format is not None:
            expected = format_pair(
                key_format, value_format, head_dim=head_dim, value_head_dim=value_head_dim
            )
        return _with(cls, *cache_files.load_cache(path, expected))

    def _open_appended_queries(self, q: Any, k: tuple[int, ...]) -> tuple[Any, ArrayKind]:
        if q is None:
            raise ValueError(
                "q is None; while an OnlinePreconditioner has not fitted its key scales, append "
                "needs the queries of the tokens: cache.append(k, v, q=q)"
            )
        elements, kind = open_elements(q, "q")
        shape = elements.shape
        if len(shape) != 4 or (shape[0], *shape[2:]) != (k[0], *k[2:]) or shape[1] % k[1]:
            raise ValueError(
                f"q has shape {shape}; it must be ({k[0]}, num_heads, {k[2]}, {k[3]}), num_heads a "
                f"multiple of {k[1]}"
            )
        return elements, kind

    def _opened(self) -> CacheState:
        if self._state is None:
            raise ValueError("the cache is empty: nothing has been appended, not even a dtype")
        return self._state

    def _check_shapes(self, k: tuple[int, ...], v: tuple[int, ...]) -> None:
        state, formats = self._state, self.formats
        held = (len(state.exact), state.num_kv_heads) if state else ("batch", "num_kv_heads")
        for name, shape, width in (
            ("k", k, formats.keys.head_dim),
            ("v", v, formats.values.head_dim),
        ):
            fits = len(shape) == 4 and shape[1] > 0 and shape[3] == width
            if not fits or (state and shape[:2] != held):
                raise ValueError(
                    f"{name} has shape {shape}; it must be ({held[0]}, {held[1]}, n, {width})"
                )
        if k[:3] != v[:3]:
            raise ValueError(f"k has shape {k} and v {v}; batch, num_kv_heads and n must agree")


def _with(cls: type[KVCache], settings: Settings, state: CacheState | None) -> KVCache:
    cache = object.__new__(cls)
    cache._token, cache._settings = Token(cache), settings
    cache._state = state
    return cache


def _from_plain(cls: type[KVCache], settings: Settings, numbers: Any, arrays: Any) -> KVCache:
    return _with(cls, settings, cache_files.from_plain(settings, numbers, arrays))


def _refuse(name: str, given: ArrayKind, expected: ArrayKind, whose: str) -> NoReturn:
    """Say in what an array differs from those before it."""
    if given.device != expected.device:
        holds = "is on" if whose == "k" else "holds"
        raise ValueError(
            f"{name} is on {given.place}; {whose} {holds} {expected.place}: move it there"
        )
    raise TypeError(
        f"{name} is {given.family} {given.dtype}; it must be {expected.family} {expected.dtype}, "
        f"as {whose} is"
    )


def _open_padding(padding: Any, batch: int, n: int) -> list[int]:
    counts = open_integers(padding, "padding")
    if len(counts) != batch or any(not 0 <= count <= n for count in counts):
        raise ValueError(
            f"padding is {counts}; it must be one count for each of {batch} rows, 0 to {n}"
        )
    return counts
