"""Hypothesis strategies: formats, vectors, and arrays of every layout that users hand over."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from support import RANDOM_FORMATS

from polarquant_nb import PolarFormat
from polarquant_nb.layout import PAGE

HEAD_DIMS = range(16, 577, 16)


def level_bits(head_dim: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Bits for any number of levels that a head_dim allows."""
    deepest = (head_dim & -head_dim).bit_length() - 1
    return st.lists(st.integers(1, 6), min_size=1, max_size=deepest).map(tuple)


@st.composite
def formats(draw: st.DrawFn, head_dims: st.SearchStrategy[int] | None = None) -> PolarFormat:
    """Any format.  For what compiles nothing: a format costs seconds of compilation."""
    head_dim = draw(st.sampled_from(HEAD_DIMS) if head_dims is None else head_dims)
    return PolarFormat(
        head_dim,
        draw(level_bits(head_dim)),
        draw(st.sampled_from([None, "int8", "float16"])),
        draw(st.sampled_from(["hadamard", "haar", "none"])),
        draw(st.integers(0, 2**63 - 1)),
        draw(st.sampled_from(["float16", "log8"])),
    )


def compiled_formats(*, offset: bool | None = None) -> st.SearchStrategy[PolarFormat]:
    """One of the formats that tests compile; with or without an offset if asked."""
    chosen = [f for f in RANDOM_FORMATS if offset in (None, f.offset is not None)]
    return st.sampled_from(chosen)


def seq_lens(most: int = 2 * PAGE + 1) -> st.SearchStrategy[int]:
    """Lengths around the sizes of registers and pages."""
    edges = [n for n in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 127, 128, 129, 257) if n <= most]
    return st.sampled_from(edges) | st.integers(1, min(most, 40))


@st.composite
def rows(draw: st.DrawFn, seq_len: int, head_dim: int) -> np.ndarray:
    """Finite float32 vectors ``(seq_len, head_dim)``, friendly and unfriendly, of any scale.

    Norms are in 2^-10 .. 2^11, within what float16 radii hold as normal numbers.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = rng.standard_normal((seq_len, head_dim))
    kind = draw(st.sampled_from(["gaussian", "heavy", "sparse", "constant", "signs", "biased"]))
    if kind == "heavy":
        x = x * np.exp(1.5 * rng.standard_normal((1, head_dim)))
    elif kind == "sparse":
        others = rng.random(x.shape).argsort(-1) >= draw(st.integers(1, 4))
        x[others] = 0
    elif kind == "constant":
        x[:] = x[:1, :1]
    elif kind == "signs":
        x = np.sign(x)
    elif kind == "biased":
        x += 30 * rng.standard_normal((1, head_dim))
    norm = np.sqrt(np.square(x).sum(-1, keepdims=True))
    scale = 2.0 ** draw(st.integers(-10, 10))
    return (x / norm * scale * rng.uniform(1, 2, norm.shape)).astype(np.float32)


@st.composite
def rearranged(draw: st.DrawFn, x: np.ndarray) -> np.ndarray:
    """The numbers of a three-dimensional array in another memory layout."""
    order = draw(st.permutations(range(3)))
    gap = draw(st.integers(1, 3))
    backwards = [draw(st.booleans()) for _ in range(3)]
    room = np.empty([x.shape[axis] * gap for axis in order], x.dtype)
    room.view(np.uint8).fill(0xFF)  # NaN in what lies between
    view = room[tuple(slice(None, None, gap) for _ in order)].transpose(np.argsort(order))
    view = view[tuple(slice(None, None, -1 if back else 1) for back in backwards)]
    view[...] = x
    return view
