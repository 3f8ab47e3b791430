"""TurboQuant_mse: rotate at random, then round each coordinate to the best scalar codebook.

Zandieh et al., arXiv 2504.19874, algorithm 1.  A coordinate of a random unit vector of d dimensions
has the density f(t) ∝ (1 − t²)^((d−3)/2); the codebook is the one of least mean squared error
(Lloyd–Max), the same for all coordinates.  The norm is stored in 16 bits.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch


def code(name: str, x: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Vectors ``(..., head_dim)`` decoded, and the bytes stored; keys and values alike."""
    import torch

    head_dim = x.shape[-1]
    rotation = torch.from_numpy(random_rotation(head_dim)).to(x.dtype)
    words = torch.from_numpy(codebook(head_dim, bits)).to(x.dtype)
    norm = x.norm(dim=-1, keepdim=True)
    unit = x / norm.clamp_min(torch.finfo(x.dtype).tiny) @ rotation
    codes = torch.bucketize(unit, (words[1:] + words[:-1]) / 2)
    stored = norm.to(torch.float16)
    nbytes = bits * codes.numel() // 8 + stored.nbytes
    return words[codes] @ rotation.T * stored.to(x.dtype), nbytes


@cache
def codebook(head_dim: int, bits: int) -> npt.NDArray[np.float64]:
    """Codewords of least mean squared error for a coordinate of a random unit vector."""
    t = np.linspace(-1, 1, 200_001)
    density = (1 - t * t) ** ((head_dim - 3) / 2)
    density /= density.sum()
    # mass and first moment below each point
    mass, moment = (np.concatenate([[0], np.cumsum(w)]) for w in (density, density * t))
    words = np.interp((np.arange(2**bits) + 0.5) / 2**bits, np.cumsum(density), t)
    for _ in range(2000):
        cuts = np.searchsorted(t, (words[1:] + words[:-1]) / 2)
        cuts = np.concatenate([[0], cuts, [len(t)]])
        better = np.diff(moment[cuts]) / np.diff(mass[cuts])
        if np.abs(better - words).max() < 1e-9:
            break
        words = better
    return words


@cache
def random_rotation(head_dim: int) -> npt.NDArray[np.float64]:
    """A rotation uniform over the orthogonal group: Q of a Gaussian matrix, signs fixed by R."""
    q, r = np.linalg.qr(np.random.default_rng(0).standard_normal((head_dim, head_dim)))
    return q * np.sign(np.diag(r))
