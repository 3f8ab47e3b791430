"""The constant part of a model's keys, from its own weights and its own rotary embedding."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from polarquant_nb.bias import RotaryBias
from polarquant_nb.preconditioning import Preconditioner

__all__ = ["key_biases"]

_POSITIONS = 300
"""Positions at which our rotary embedding is compared with the model's."""


def key_biases(model: Any) -> dict[int, Preconditioner]:
    """Rotary biases of the layers whose keys have one: ``k_proj.bias`` of Qwen2 and its like.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.

    Returns
    -------
    dict of int to Preconditioner
        By layer; empty where keys have no bias, or are normalised after it.

    Raises
    ------
    ValueError
        If keys have a bias, and the model turns it in a way that :class:`RotaryBias` cannot.
    """
    found = {}
    for module in model.modules():
        bias = getattr(getattr(module, "k_proj", None), "bias", None)
        layer = getattr(module, "layer_idx", None)
        if bias is None or layer is None or getattr(module, "k_norm", None) is not None:
            continue
        if torch.count_nonzero(bias) == 0:
            continue
        vectors = bias.detach().float().cpu().view(-1, module.head_dim)
        found[layer] = Preconditioner(bias=_rotary_bias(model, module, vectors))
    return found


def _rotary_bias(model: Any, attention: torch.nn.Module, vectors: torch.Tensor) -> RotaryBias:
    """The bias that is turned as the model does it: what it does is tried out, not assumed."""
    name = type(attention).__name__
    turn = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    rotary = getattr(model.get_decoder(), "rotary_emb", None)
    inv_freq = getattr(rotary, "inv_freq", None)
    if turn is None or rotary is None or inv_freq is None:
        raise ValueError(
            f"keys of {name} have a bias, but how they are turned is not known; "
            "PolarCache(model.config) works without the bias"
        )
    positions = torch.arange(_POSITIONS, device=inv_freq.device)[None]
    still = vectors.to(inv_freq.device)[None, :, None].expand(-1, -1, _POSITIONS, -1)
    with torch.no_grad():
        _, turned = turn(still, still, *rotary(still, positions))
    expected = turned[0].cpu().numpy()
    scaling = float(getattr(rotary, "attention_scaling", 1.0))
    for interleaved in (False, True):
        own = vectors.numpy().copy()
        own[:, : 2 * inv_freq.numel()] *= scaling
        bias = RotaryBias(own, inv_freq.double().cpu().numpy(), interleaved)
        error = np.abs(bias.at(0, _POSITIONS) - expected).max()
        if error <= 1e-3 * np.abs(expected).max():
            return bias
    raise ValueError(
        f"keys of {name} have a bias that is turned neither by halves nor in interleaved pairs; "
        "PolarCache(model.config) works without the bias"
    )
