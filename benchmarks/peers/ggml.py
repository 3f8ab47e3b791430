"""Blocks of 32 coordinates with one scale, as llama.cpp keeps quantised caches (ggml).

``q8_0``: a float16 scale, the largest magnitude over 127, and 32 signed bytes.  ``q4_0``: a float16
scale, the number of largest magnitude over −8, and 32 codes 0 to 15 that stand for −8 to 7; so that
number itself is kept.  Newer versions rotate vectors by a normalised Hadamard matrix before, as
``rotate`` does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 32

Quantise = Callable[["torch.Tensor"], "tuple[torch.Tensor, int]"]


def code(
    name: str, x: torch.Tensor, quantise: Quantise, rotate: bool = False
) -> tuple[torch.Tensor, int]:
    """Vectors ``(..., head_dim)`` decoded, and the bytes stored; keys and values alike."""
    turned = hadamard(x) if rotate else x
    decoded, nbytes = quantise(turned.unflatten(-1, (-1, BLOCK)))
    decoded = decoded.reshape(x.shape)
    return (hadamard(decoded) if rotate else decoded), nbytes


def q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Blocks ``(..., 32)`` decoded, and the bytes stored."""
    import torch

    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = (blocks / torch.where(scale == 0, 1, scale)).round()
    stored = scale.to(torch.float16)
    return codes * stored.to(blocks.dtype), codes.numel() + stored.nbytes


def q4_0(blocks: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Blocks ``(..., 32)`` decoded, and the bytes stored."""
    import torch

    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    codes = (blocks / torch.where(scale == 0, 1, scale) + 8.5).floor().clamp(0, 15)
    stored = scale.to(torch.float16)
    return (codes - 8) * stored.to(blocks.dtype), codes.numel() // 2 + stored.nbytes


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Vectors times the normalised Hadamard matrix, which is its own inverse.

    Its size is the largest power of two that divides head_dim.
    """
    import torch

    d = x.shape[-1]
    size = d & -d
    matrix = torch.ones(1, 1, dtype=x.dtype)
    while len(matrix) < size:
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=x.dtype), matrix)
    return (x.unflatten(-1, (-1, size)) @ (matrix / size**0.5)).reshape(x.shape)
