"""Encode vectors into pages and decode them: check arguments, run kernels over all threads."""

from __future__ import annotations

import operator
from dataclasses import replace
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, SupportsIndex

import numpy as np
import numpy.typing as npt

from polarquant_nb.arrays import (
    ArrayKind,
    StridedBuffer,
    from_float32,
    new_array,
    open_elements,
    strided,
    widen,
)
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import FormatPair, PolarFormat, integer
from polarquant_nb.gpu_arrays import on_gpu
from polarquant_nb.kernels import cpu
from polarquant_nb.kernels.jit import Program, cpu_isa
from polarquant_nb.layout import PAGE
from polarquant_nb.pages import PolarPages
from polarquant_nb.preconditioning import Preconditioner, row_signs
from polarquant_nb.rotations import rotation_for
from polarquant_nb.rows import PackedRows
from polarquant_nb.storable import MAX_NORM, nonfinite_message, too_long_message
from polarquant_nb.threads import run_ranges
from polarquant_nb.tracing import untraced

__all__ = [
    "chosen_codebooks",
    "decode",
    "decode_rows",
    "describe_nonfinite",
    "describe_saturated",
    "encode",
    "encode_into",
    "kernel_shape",
    "prepared",
]

_PAGES_PER_THREAD = 4  # a page takes some 10 µs, a thread some 50 to start

Shape = tuple[int, int, int, int, int, int, int, int]


@untraced
def encode(
    x: Any,
    fmt: PolarFormat,
    *,
    codebooks: Codebooks | Literal["online"] | None = None,
    preconditioner: Preconditioner | None = None,
    first_position: int = 0,
    nan: Literal["raise", "propagate"] = "raise",
) -> PolarPages:
    """Compress vectors: rotate, turn into a tree of angles and radii, store short codes.

    Parameters
    ----------
    x : ndarray or torch.Tensor, shape ``(..., seq_len, head_dim)``
        float16, bfloat16, float32 or float64, of any strides; read in place.  Keys after the
        positional encoding, or values.  Tensors that require grad are detached.  An array on an
        NVIDIA GPU, of torch, CuPy or anything with DLPack, is encoded there.
    fmt : PolarFormat
        The format, for instance ``pq.preset("balanced", head_dim=128).keys``.
    codebooks : Codebooks or 'online', optional
        Fitted codebooks instead of the analytic ones: made beforehand by
        :meth:`Codebooks.fit <polarquant_nb.Codebooks.fit>`, or with ``'online'`` fitted to this x.
    preconditioner : Preconditioner, optional
        Key scales and rotary bias, which pages then carry and :func:`attention` and
        :func:`decode` undo.
    first_position : int
        Position of the first token; a rotary bias depends on it.
    nan : {'raise', 'propagate'}
        What to do with rows that hold NaN or inf, or whose radius float16 cannot hold (65504):
        raise, naming the first; or go on.  Then the former decode to NaN and stay out of the page
        offset, the latter are stored with the largest radius, no other row is touched (but that
        radii of 8 bits in the page of such a long one are stored in coarser steps), and the result
        counts both.  On a GPU ``'raise'`` waits for the result, ``'propagate'`` does not.

    Returns
    -------
    PolarPages
        Packed pages.

    Raises
    ------
    TypeError
        If ``x`` is no float array on the CPU or a CUDA device, or another argument has the wrong
        type.
    ValueError
        If the last axis is not ``fmt.head_dim`` long, the codebooks do not have the format's bits,
        the preconditioner does not fit, or (with ``nan="raise"``) a row cannot be stored.

    References
    ----------
    Han et al., "PolarQuant", arXiv 2502.02617, Algorithm 1.

    Examples
    --------
    >>> import numpy as np
    >>> import polarquant_nb as pq
    >>> x = np.random.default_rng(0).standard_normal((8, 1024, 128), dtype=np.float32)
    >>> pages = pq.encode(x, pq.PolarFormat(head_dim=128, level_bits=(4, 2, 2, 2)))
    >>> pages.bits_per_value
    3.875
    >>> error = pq.decode(pages) - x
    >>> round(float((error**2).sum() / (x**2).sum()), 3)
    0.032
    """
    _check_format(fmt)
    if nan not in ("raise", "propagate"):
        raise ValueError(f"nan is {nan!r}; it must be 'raise' or 'propagate'")
    first_position = integer("first_position", first_position)
    if not isinstance(preconditioner, (Preconditioner, NoneType)):
        raise TypeError(f"preconditioner is {preconditioner!r}; it must be a Preconditioner")
    if on_gpu(x):
        from polarquant_nb import gpu

        return gpu.encode(x, fmt, codebooks, nan, preconditioner, first_position)
    elements, kind = open_elements(x)
    *leading, seq_len, head_dim = elements.shape
    if head_dim != fmt.head_dim:
        raise ValueError(
            f"x has shape {elements.shape}; its last axis must be fmt.head_dim = {fmt.head_dim}"
        )
    given, given_kind = elements, kind
    if preconditioner is not None:
        preconditioner.check(fmt, leading)
        elements, kind = preconditioner.subtract_bias(elements, kind, first_position)
    rotated = x
    if preconditioner is not None and isinstance(codebooks, str):  # fitted to what is rotated
        rotated = preconditioner.scaled(elements, kind)
    codebooks = chosen_codebooks(codebooks, rotated, fmt)
    num_pages, page_words = -(-seq_len // PAGE), fmt.layout.num_words
    words = np.empty((*leading, num_pages, page_words), np.uint32)
    starts = np.arange(words.size // page_words) * page_words
    nonfinite, saturated = encode_into(
        strided(elements, kind), fmt, codebooks, words.reshape(-1), starts, preconditioner
    )
    if nan == "raise" and nonfinite:
        raise ValueError(describe_nonfinite(given, given_kind, preconditioner))
    if nan == "raise" and saturated:
        raise ValueError(describe_saturated(given, given_kind, words, fmt, preconditioner))
    return PolarPages(
        fmt, words, seq_len, codebooks, given_kind,
        num_nonfinite=nonfinite, num_saturated=saturated,
        preconditioner=preconditioner, first_position=first_position,
    )  # fmt: skip


def chosen_codebooks(codebooks: object, x: Any, fmt: PolarFormat) -> Codebooks:
    """The codebooks that ``encode`` is asked to use.

    Parameters
    ----------
    codebooks : Codebooks, 'online' or None
        Its argument.
    x : array_like
        What 'online' is fitted to.
    fmt : PolarFormat
        Format.

    Returns
    -------
    Codebooks
        Analytic ones by default.

    Raises
    ------
    TypeError
        If ``codebooks`` is anything else.
    ValueError
        If they do not have the format's bits.
    """
    if codebooks is None:
        codebooks = Codebooks.analytic(fmt)
    elif isinstance(codebooks, str) and codebooks == "online":
        codebooks = Codebooks.fit(x, fmt)
    if not isinstance(codebooks, Codebooks):
        raise TypeError(f"codebooks is {codebooks!r}; it must be a Codebooks, 'online' or None")
    if codebooks.level_bits != fmt.level_bits:
        raise ValueError(
            f"codebooks have {codebooks.level_bits} bits by level; the format has {fmt.level_bits}"
        )
    return codebooks


def encode_into(
    source: StridedBuffer,
    fmt: PolarFormat,
    codebooks: Codebooks,
    words: npt.NDArray[np.uint32],
    starts: npt.NDArray[np.int64],
    preconditioner: Preconditioner | None = None,
    *,
    frozen: bool = False,
) -> tuple[int, int]:
    """Encode vectors into pages that may lie anywhere; arguments are not checked.

    Parameters
    ----------
    source : StridedBuffer
        Vectors ``(..., seq_len, head_dim)``.
    fmt : PolarFormat
        Format.
    codebooks : Codebooks
        Codebooks.
    words : 1-d array of uint32
        Memory that holds the pages.
    starts : 1-d array of int64
        Each page's first word, rows after one another.
    preconditioner : Preconditioner, optional
        Its scales are used; its bias is subtracted already.
    frozen : bool
        The pages are whole and hold their offsets already; those are kept.

    Returns
    -------
    int, int
        Rows that are not finite, and rows whose radius is beyond float16.
    """
    program, shape, (_, *rotation), _ = prepared(fmt, codebooks.is_analytic)
    signs = row_signs(fmt, preconditioner, inverse=False)
    thresholds = np.empty(0, np.float32) if codebooks.is_analytic else codebooks.thresholds()
    tables = (signs, *rotation, thresholds)
    events: list[npt.NDArray[np.int64]] = []  # per range: rows not finite, rows saturated

    def encode_range(first: int, last: int) -> None:
        here = np.zeros(2, np.int64)
        cpu.encode_pages(
            program, shape, source.flat, element_kind(source.kind), _direct(source), source.bases,
            source.strides, source.shape[-2], tables, words, starts, frozen, first, last, here,
        )  # fmt: skip
        events.append(here)

    run_ranges(encode_range, starts.size, _PAGES_PER_THREAD)
    nonfinite, saturated = (sum(int(count[i]) for count in events) for i in (0, 1))
    return nonfinite, saturated


@untraced
def decode(pages: PolarPages, start: int = 0, stop: int | None = None, *, dtype: Any = None) -> Any:
    """Reconstruct vectors from their codes.

    Parameters
    ----------
    pages : PolarPages
        What :func:`encode` returned.
    start, stop : int, optional
        Range of tokens, 0 ≤ start ≤ stop ≤ seq_len; all of them by default.
    dtype : optional
        'float16', 'bfloat16', 'float32' or 'float64', or a dtype of that name; by default the dtype
        that was encoded.  NumPy's bfloat16 becomes float32 unless ``ml_dtypes`` is imported.

    Returns
    -------
    ndarray or torch.Tensor, shape ``(..., stop − start, head_dim)``
        Of the array type that was encoded.

    Raises
    ------
    TypeError
        If ``pages`` is no PolarPages.
    ValueError
        If the range or dtype is not allowed.
    """
    if not isinstance(pages, PolarPages):
        raise TypeError(
            f"pages is a {type(pages).__name__}; it must be a PolarPages, from encode()"
        )
    stop = pages.seq_len if stop is None else stop
    for name, bound in (("start", start), ("stop", stop)):
        if not isinstance(bound, SupportsIndex):
            raise TypeError(f"{name} is {bound!r}; it must be an int")
    start, stop = operator.index(start), operator.index(stop)
    if not 0 <= start <= stop <= pages.seq_len:
        raise ValueError(
            f"start is {start} and stop {stop}; it must hold that 0 <= start <= stop <= seq_len = "
            f"{pages.seq_len}"
        )
    kind = _result_kind(pages.kind, dtype)
    if pages.device != "cpu":
        from polarquant_nb import gpu

        return gpu.decode(pages, start, stop, kind)
    array, flat = new_array((*pages.shape[:-2], stop - start, pages.format.head_dim), kind)
    decode_rows(pages.rows, start, stop, flat, kind)
    return array


def decode_rows(
    rows: PackedRows, start: int, stop: int, flat: npt.NDArray[Any], kind: ArrayKind
) -> None:
    """Reconstruct tokens ``start .. stop−1`` of rows that all have them.

    Parameters
    ----------
    rows : PackedRows
        Pages.
    start, stop : int
        Range of tokens.
    flat : ndarray, 1-d
        Where vectors go, rows after one another; from :func:`~polarquant_nb.arrays.new_array`.
    kind : ArrayKind
        What ``flat`` holds.
    """
    if flat.size == 0:
        return
    if rows.rotary_bias is not None:
        _decode_with_bias(rows, start, stop, flat, kind)
        return
    in_place = flat if flat.dtype == np.float32 else np.empty(0, np.float32)
    program, shape, _, (_, *rotation) = prepared(rows.format, rows.codebooks.is_analytic)
    tables = (rows.inverse_signs, *rotation, rows.codebooks.cosines)

    def decode_range(first: int, last: int) -> None:
        cpu.decode_pages(
            program, shape, rows.words, rows.starts, tables, flat, element_kind(kind), in_place,
            start, stop, first, last,
        )  # fmt: skip

    touched = -(-stop // PAGE) - start // PAGE
    run_ranges(decode_range, len(rows.starts) * touched, _PAGES_PER_THREAD)


def _decode_with_bias(
    rows: PackedRows, start: int, stop: int, flat: npt.NDArray[Any], kind: ArrayKind
) -> None:
    """Row by row in float32, as the sum is what is to be rounded."""
    for row, target in enumerate(flat.reshape(len(rows.starts), stop - start, -1)):
        x = np.empty(target.shape, np.float32)
        alone = rows.part(slice(row, row + 1))
        assert alone.preconditioner is not None
        assert alone.preconditioner.bias is not None
        turned = alone.preconditioner.bias.at(rows.first_position + start, stop - start)
        plain = replace(alone, preconditioner=alone.preconditioner.without_bias)
        decode_rows(plain, start, stop, x.reshape(-1), ArrayKind("numpy", "float32"))
        target[:] = open_elements(from_float32(x + turned[0], kind))[0]


def kernel_shape(fmt: PolarFormat, lanes: int) -> Shape:
    """Sizes that kernels take.

    Parameters
    ----------
    fmt : PolarFormat
        Format.
    lanes : int
        Tokens per register.

    Returns
    -------
    tuple of int
        lanes, head_dim, codes of a vector, words of a page, first word of its offset, kind of
        offset (0 none, 1 int8, 2 float16), word with the anchor of the radii (0 if there is none),
        kind of rotation (0 none, 1 hadamard, 2 haar).
    """
    layout = fmt.layout
    return (
        lanes,
        fmt.head_dim,
        layout.num_nodes,
        layout.num_words,
        layout.offset_word,
        {None: 0, "int8": 1, "float16": 2}[fmt.offset],
        layout.anchor_word or 0,
        {"none": 0, "hadamard": cpu.HADAMARD, "haar": cpu.HAAR}[fmt.rotation],
    )


Factors = tuple[npt.NDArray[Any], ...]


@lru_cache(maxsize=256)
def prepared(fmt: PolarFormat, analytic: bool) -> tuple[Program, Shape, Factors, Factors]:
    """Program, sizes, and the rotation's flat factors to encode and to decode with."""
    program = Program(
        fmt.head_dim, fmt.level_bits, fmt.offset, fmt.radius, fmt.rotation, not analytic, cpu_isa()
    )
    rotation = rotation_for(fmt)
    signs, order, mix = rotation.signs.ravel(), rotation.order, rotation.mix.ravel()
    inverse = np.argsort(order).astype(np.uint32)
    dense, back = rotation.dense.ravel(), np.ascontiguousarray(rotation.dense.T).ravel()
    shape = kernel_shape(fmt, program.lanes)
    return program, shape, (signs, order, mix, dense), (signs, inverse, mix, back)


def _check_format(fmt: object) -> None:
    if isinstance(fmt, FormatPair):
        raise TypeError("fmt is a FormatPair; encode takes one format: pair.keys or pair.values")
    if not isinstance(fmt, PolarFormat):
        raise TypeError(
            f"fmt is {fmt!r}; it must be a PolarFormat, such as pq.preset('balanced', 128).keys"
        )


def element_kind(kind: ArrayKind) -> int:
    """What kernels call elements of a kind.

    Parameters
    ----------
    kind : ArrayKind
        Family and dtype.

    Returns
    -------
    int
        ``HALF``, ``BFLOAT`` or ``FLOAT`` of :mod:`polarquant_nb.kernels.cpu`.
    """
    return {"float16": cpu.HALF, "bfloat16": cpu.BFLOAT}.get(kind.dtype, cpu.FLOAT)


def _direct(buffer: StridedBuffer) -> npt.NDArray[np.float32]:
    """The buffer again if kernels can use its rows in place, else nothing."""
    in_place = buffer.flat.dtype == np.float32 and buffer.strides[1] == 1
    return buffer.flat if in_place else np.empty(0, np.float32)


def _result_kind(kind: ArrayKind, dtype: Any) -> ArrayKind:
    if dtype is None:
        return kind
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = name.removeprefix("torch.")
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise ValueError(
            f"dtype is {dtype!r}; it must be float16, bfloat16, float32 or float64, or None"
        )
    if name == "bfloat16" and kind.family == "numpy" and not _numpy_has_bfloat16():
        name = "float32"
    return ArrayKind(kind.family, name)


def _numpy_has_bfloat16() -> bool:
    """NumPy has none of its own; ``ml_dtypes``, once imported, registers one."""
    try:
        np.dtype("bfloat16")
    except TypeError:
        return False
    return True


def describe_nonfinite(
    x: npt.NDArray[Any], kind: ArrayKind, preconditioner: Preconditioner | None = None
) -> str:
    """Where the first number is that is not finite; the slow path of an error."""
    for leading in np.ndindex(x.shape[:-2]):
        for token in np.flatnonzero(~np.isfinite(widen(x[leading], kind)).all(-1)):
            index = (*leading, int(token))
            return nonfinite_message(x[index], kind, "x", index) or ""
    # the preconditioner has made them infinite
    return _describe_longest(x, kind, list(np.ndindex(x.shape[:-1])), preconditioner)


def describe_saturated(
    x: npt.NDArray[Any], kind: ArrayKind, words: npt.NDArray[np.uint32], fmt: PolarFormat,
    preconditioner: Preconditioner | None = None,
) -> str:  # fmt: skip
    """Which row has a radius beyond float16; of several the longest: it may have moved a mean."""
    radii = fmt.layout.read_radii(words)
    radii = radii.reshape(*x.shape[:-2], -1, fmt.num_blocks)[..., : x.shape[-2], :].max(-1)
    saturated = [tuple(at) for at in np.argwhere(radii >= MAX_NORM).tolist()]
    return _describe_longest(x, kind, saturated, preconditioner)


def _describe_longest(
    x: npt.NDArray[Any], kind: ArrayKind, indices: list[tuple[int, ...]],
    preconditioner: Preconditioner | None,
) -> str:  # fmt: skip
    def norm(index: tuple[int, ...]) -> float:
        return float(np.linalg.norm(widen(x[index], kind).astype(np.float64)))

    index = max(indices, key=norm)
    longest = MAX_NORM if preconditioner is None else preconditioner.longest
    return too_long_message(x[index], kind, "x", index, longest)
