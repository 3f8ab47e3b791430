"""Shared by the tests: formats that are compiled, data, codes and datasets read back."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import config

from polarquant_nb import PolarFormat, PolarPages
from polarquant_nb.densities import codeword_angles
from polarquant_nb.layout import PAGE
from polarquant_nb.reference import ReferenceCodes

NOJIT = bool(config.DISABLE_JIT)
"""Kernels run as plain Python, about 500 times slower: tests look at fewer vectors."""

RANDOM_FORMATS = (
    PolarFormat(16, (6, 2, 3), "float16", "hadamard"),
    PolarFormat(32, (6, 1, 6, 1), "int8", "none"),
    PolarFormat(48, (6, 4, 2, 1), None, "haar"),
    PolarFormat(64, (4, 5), None, "hadamard"),
    PolarFormat(64, (6, 1, 4, 1, 4), None, "none"),
    PolarFormat(80, (6,), None, "hadamard"),
    PolarFormat(80, (4, 4, 4), "int8", "haar"),
    PolarFormat(96, (5, 6, 2), None, "hadamard"),
    PolarFormat(112, (1, 2, 4), None, "hadamard"),
    PolarFormat(128, (5, 6), "float16", "haar"),
    PolarFormat(128, (6, 6, 2), "int8", "hadamard"),
    PolarFormat(144, (6, 2), "float16", "none"),
    PolarFormat(160, (3, 2, 2, 1, 3), None, "hadamard"),
    PolarFormat(192, (2, 2, 4), None, "hadamard"),
    PolarFormat(208, (6, 1, 1, 1), None, "hadamard"),
    PolarFormat(256, (1, 4, 6, 6, 6, 3, 4, 1), "int8", "haar"),
    PolarFormat(320, (5, 3, 3, 2, 3), None, "none"),
    PolarFormat(384, (5, 5, 3, 3, 6), None, "hadamard"),
    PolarFormat(512, (1, 1, 2, 4, 2, 4, 5, 2, 2), "int8", "hadamard"),
    PolarFormat(576, (3, 5, 4, 6, 1), "float16", "hadamard"),
)
"""Drawn at random once, and written down: every format that is compiled costs seconds."""

LOG8_FORMATS = (
    PolarFormat(64, (4, 2, 2, 2, 2, 2), None, "hadamard", radius="log8"),
    PolarFormat(32, (6, 1, 6, 1), "int8", "none", radius="log8"),
    PolarFormat(48, (6, 4, 2, 1), "float16", "haar", radius="log8"),
)
"""With radii of 8 bits: one and several blocks, and every place that an anchor can have."""

SMALL = RANDOM_FORMATS[3]
"""A quick format without offset, for tests of what does not depend on the format."""

SMALL_OFFSET = PolarFormat(64, (5, 4, 4, 4, 4, 4), "int8")
"""The same with an offset: the keys of the ``balanced`` preset."""


STORES = ("h5netcdf", "zarr 2", "zarr 3")
"""How datasets are kept: NetCDF-4, and both formats of zarr."""


def stored(ds: Any, path: Path, store: str) -> Any:
    """A dataset, written and opened again."""
    import xarray as xr

    engine, *version = store.split()
    pytest.importorskip(engine)
    if engine == "h5netcdf":
        ds.to_netcdf(path, engine=engine)
    else:
        with warnings.catch_warnings():  # of format 3, what it says about strings may change
            warnings.simplefilter("ignore" if version == ["3"] else "error")
            ds.to_zarr(path, zarr_format=int(version[0]))
    return xr.open_dataset(path, engine=engine)


def ident(fmt: PolarFormat) -> str:
    """Name of a format in test ids."""
    bits = "".join(map(str, fmt.level_bits))
    radius = "" if fmt.radius == "float16" else f"-{fmt.radius}"
    return f"{fmt.head_dim}-{bits}-{fmt.offset}-{fmt.rotation}{radius}"


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    """Standard normal float32."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def centred(x: np.ndarray, fmt: PolarFormat) -> np.ndarray:
    """``x − μ``, what a format codes: without the mean of each page where it has an offset."""
    x = np.asarray(x, np.float64)
    if fmt.offset is None:
        return x
    pages = [x[..., t : t + PAGE, :] for t in range(0, x.shape[-2], PAGE)]
    return np.concatenate([page - page.mean(-2, keepdims=True) for page in pages], -2)


def squared(x: np.ndarray) -> np.ndarray:
    """Squared norms along the last axis, in float64."""
    return np.square(np.asarray(x, np.float64)).sum(-1)


def worst_error(fmt: PolarFormat) -> float:
    """Bound of ‖x − x̂‖²/‖x‖² for every single vector, with an exact radius.

    At a node, ⟨x, x̂⟩ is at least cos Δ times what it is at the worse of its two halves, with Δ the
    largest angle to a codeword; so ⟨x, x̂⟩ ≥ ‖x‖² ∏ cos Δ_ℓ.
    """
    rho = np.cos(np.pi / 2 ** fmt.level_bits[0])
    for level, bits in enumerate(fmt.level_bits[1:], 2):
        c = codeword_angles(level, bits)
        rho *= np.cos(max(c[0], np.diff(c).max() / 2))
    return 2 * (1 - rho)


def token_codes(pages: PolarPages) -> list[np.ndarray]:
    """Codes by level, ``(..., seq_len, head_dim / 2**level)``."""
    layout = pages.format.layout
    codes = layout.read_codes(pages.words)
    codes = codes.reshape(*codes.shape[:-3], -1, codes.shape[-1])[..., : pages.seq_len, :]
    return np.split(codes, layout.level_start[1:], -1)


def token_radii(pages: PolarPages) -> np.ndarray:
    """Block radii as stored, ``(..., seq_len, num_blocks)``."""
    radii = pages.format.layout.read_radii(pages.words)
    return radii.reshape(*radii.shape[:-3], -1, radii.shape[-1])[..., : pages.seq_len, :]


def page_offsets(pages: PolarPages) -> np.ndarray | None:
    """Offsets in rotated space, ``(..., num_pages, head_dim)``, decoded from the stored bytes."""
    fmt = pages.format
    if fmt.offset is None:
        return None
    first = fmt.layout.offset_word
    words = np.ascontiguousarray(pages.words[..., first : first + fmt.layout.offset_words])
    if fmt.offset == "float16":
        return words.view(np.float16).astype(np.float64)
    codes = words[..., :-1].copy().view(np.int8)
    scale = words[..., -1:].astype(np.uint16).view(np.float16)
    return codes * scale.astype(np.float64)


def per_token(offsets: np.ndarray, seq_len: int) -> np.ndarray:
    """Offsets of pages, repeated for their tokens."""
    return np.repeat(offsets, PAGE, -2)[..., :seq_len, :]


def radius_errors(pages: PolarPages) -> np.ndarray:
    """Largest relative error of each token's radii, by their rounding: ``(..., seq_len, 1)``."""
    layout = pages.format.layout
    if layout.anchor_word is None:
        return np.full((*pages.shape[:-1], 1), 2.0**-11)
    shifts = pages.words[..., layout.anchor_word, None] >> 16 & 7
    return per_token(2.0 ** (shifts.astype(np.float64) - 8), pages.seq_len)


def as_reference(pages: PolarPages) -> ReferenceCodes:
    """What is stored, in the form the reference takes."""
    return ReferenceCodes(token_codes(pages), token_radii(pages), page_offsets(pages))


def same_rows(a: PolarPages, b: PolarPages, tokens: np.ndarray | slice = np.s_[:]) -> bool:
    """Whether the codes and radii of some tokens are equal bit for bit."""
    codes = zip(token_codes(a), token_codes(b), strict=True)
    radii = token_radii(a).view(np.uint8), token_radii(b).view(np.uint8)
    return all(np.array_equal(x[..., tokens, :], y[..., tokens, :]) for x, y in (*codes, radii))


def exact_attention(q, k, v, *, scale=None, mask=None, causal=False, softcap=None):
    """Textbook attention in float64: q (b, h, n, d), k and v (b, kv, t, d)."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    logits = q @ k.swapaxes(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    if mask is not None:
        logits = np.where(mask, logits, -np.inf) if mask.dtype == bool else logits + mask
    if causal:
        n, t = logits.shape[-2:]
        logits = np.where(np.tri(n, t, t - n, dtype=bool), logits, -np.inf)
    top = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = np.where(total > 0, weights @ v / total, 0)
        return out, (np.log(total) + top)[..., 0]


def visible_mask(lengths: np.ndarray, q_len: int) -> np.ndarray:
    """What the last tokens of left-padded rows see: bool ``(batch, 1, q_len, seq_len)``."""
    seq_len = int(max(lengths))
    token = np.arange(seq_len) - (seq_len - np.asarray(lengths)[:, None, None])  # within its row
    last = np.asarray(lengths)[:, None] - q_len + np.arange(q_len)
    return ((token >= 0) & (token <= last[..., None]))[:, None]


def run_python(*arguments: str | os.PathLike[str], **environment: str) -> str:
    """Standard output of another interpreter, which finds the package and the tests' modules."""
    path = [str(Path(__file__).parent), *filter(None, sys.path)]
    result = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout
