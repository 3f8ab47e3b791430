"""The bias of keys on a GPU: taken off, put back, and tables for its logits.

Scales are in the signs of the rotation, see ``gpu_codec.tables``.  A bias R_i b has the CPU's bits:
cosines come from there, and all products and sums are single operations of torch, which nothing
contracts.  Tables are copied to a device once, for all layers and many positions; nothing else
waits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.bias import RotaryBias, page_phases, page_table, turns
from polarquant_nb.layout import PAGE
from polarquant_nb.preconditioning import Preconditioner, rotary_bias

if TYPE_CHECKING:
    import torch

__all__ = ["add_bias", "bias_tables", "scaled", "subtract_bias"]

Tensor = Any

_BLOCK = 2048
"""Positions of a table of cosines: a mebibyte for 64 pairs."""

_PHASES = 64
"""Pages that a table of phases grows by: a growing cache seldom waits for a new one."""


def subtract_bias(x: Tensor, preconditioner: Preconditioner | None, first_position: int) -> Tensor:
    """Vectors without their bias; see ``Preconditioner.subtract_bias``.

    Parameters
    ----------
    x : torch.Tensor, shape ``(..., num_kv_heads, seq_len, head_dim)``
        Vectors of consecutive positions.
    preconditioner : Preconditioner, optional
        Its bias, if any, is subtracted.
    first_position : int
        Of the first token.

    Returns
    -------
    torch.Tensor
        Float32; the same one if there is no bias.
    """
    bias = rotary_bias(preconditioner)
    if bias is None:
        return x
    return x.float() - _vectors(bias, first_position, x.shape[-2], x.device)


def add_bias(x: Tensor, bias: RotaryBias, first_position: int) -> None:
    """Give vectors their bias again.

    Parameters
    ----------
    x : torch.Tensor of float32, shape ``(rows, count, head_dim)``, contiguous
        Vectors of consecutive positions, changed; row ``r`` has the bias of row ``r`` modulo the
        rows that it has.
    bias : RotaryBias
        What was subtracted.
    first_position : int
        Of the first token.
    """
    turned = _vectors(bias, first_position, x.shape[-2], x.device).flatten(0, -3)
    x.view(-1, *turned.shape).add_(turned)


def scaled(x: Tensor, preconditioner: Preconditioner) -> Tensor:
    """Vectors times the scales, as their rotation has them; see ``Preconditioner.scaled``.

    Parameters
    ----------
    x : torch.Tensor, shape ``(..., num_kv_heads, seq_len, head_dim)``
        From :func:`subtract_bias`.
    preconditioner : Preconditioner
        Whose scales.

    Returns
    -------
    torch.Tensor of float32
        Of the same shape.
    """
    wide = x.float()
    if preconditioner.scales is None:
        return wide
    return wide * _moved(preconditioner.scales, x.device)[..., None, :]


def bias_tables(
    bias: RotaryBias, first_position: int, pages: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """What the kernel of logits reads; see ``kernels.cuda_bias``.

    Parameters
    ----------
    bias : RotaryBias
        What keys were encoded without.
    first_position, pages : int
        Position of the first page, and how many there are at least.
    device : torch.device
        Where.

    Returns
    -------
    vectors : torch.Tensor, shape ``(rows, head_dim)``
        b of the rows that it has.
    phases : torch.Tensor, shape ``(pages, pairs, 2)``
        e^{−iφ} of the first positions of pages, real and imaginary parts.
    table : torch.Tensor, shape ``(head_dim, 128)``
        What positions of a page do to the real and imaginary parts of each pair, in turn, and ones.
    """
    frequencies = bias.inv_freq.tobytes()
    return (
        _still(bias, device).flatten(0, -2),
        _page_phases(frequencies, first_position, -(-pages // _PHASES) * _PHASES, device),
        _page_table(frequencies, bias.vectors.shape[-1], device),
    )


# ---- tables on a device --------------------------------------------------------------------------


def _moved(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    import torch

    # waits until it is there: what is kept may be used on another stream
    return torch.from_numpy(np.array(array)).to(device)


def _vectors(bias: RotaryBias, first_position: int, count: int, device: torch.device) -> Tensor:
    """R_i b of consecutive positions, ``(..., count, head_dim)``, as ``RotaryBias.at``."""
    still = _still(bias, device)
    turned = still.expand(*still.shape[:-2], count, -1).clone()
    first, second, _ = bias.parts(still)
    to_first, to_second, _ = bias.parts(turned)
    frequencies, done = bias.inv_freq.tobytes(), 0
    while done < count:
        block, begin = divmod(first_position + done, _BLOCK)
        here = min(_BLOCK - begin, count - done)
        cos, sin = (x[begin : begin + here] for x in _turns(frequencies, block, device))
        to_first[..., done : done + here, :] = first * cos - second * sin
        to_second[..., done : done + here, :] = second * cos + first * sin
        done += here
    return turned


@lru_cache(maxsize=256)
def _still(bias: RotaryBias, device: torch.device) -> Tensor:
    """b, ``(..., 1, head_dim)``."""
    return _moved(bias.vectors, device)[..., None, :]


@lru_cache(maxsize=128)  # of 256 Ki positions; the same in all layers
def _turns(frequencies: bytes, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = turns(frequencies, block * _BLOCK, _BLOCK)
    return _moved(cos, device), _moved(sin, device)


@lru_cache(maxsize=4)
def _page_phases(frequencies: bytes, first: int, pages: int, device: torch.device) -> Tensor:
    phases = page_phases(frequencies, first, pages)
    return _moved(phases.view(np.float32).reshape(*phases.shape, 2), device)


@lru_cache(maxsize=8)
def _page_table(frequencies: bytes, head_dim: int, device: torch.device) -> Tensor:
    turned = page_table(frequencies).T
    ones = np.ones((head_dim - len(turned), PAGE), np.float32)
    return _moved(np.concatenate([turned, ones]), device)
