"""What a calibration measures on a model: moments of queries and keys, and what errors do."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from polarquant_nb.attention_error import check_watched, watch_attention
from polarquant_nb.codec import encode
from polarquant_nb.evaluate import compare, prefill, score
from polarquant_nb.formats import PolarFormat
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.scales import page_variance

if TYPE_CHECKING:
    import torch

__all__ = ["Coded", "Moments", "full_layers", "measure_kl", "measure_moments"]


@dataclass(frozen=True)
class Moments:
    """Mean squares of a layer's queries and keys, of each channel.

    Parameters
    ----------
    q_squared : ndarray of float64, shape ``(num_kv_heads, head_dim)``
        Of queries, over tokens and the heads that share a kv head.
    k_variance : ndarray of float64, of the same shape
        Of keys around their page's mean.
    value_head_dim : int
        Coordinates of values.
    """

    q_squared: npt.NDArray[np.float64]
    k_variance: npt.NDArray[np.float64]
    value_head_dim: int


@dataclass(frozen=True)
class Coded:
    """One side of one layer, as it is coded while all else stays exact.

    Parameters
    ----------
    layer : int
        Which.
    side : {'keys', 'values'}
        Keys or values.
    fmt : PolarFormat
        Their format.
    preconditioner : Preconditioner, optional
        Of keys.
    """

    layer: int
    side: Literal["keys", "values"]
    fmt: PolarFormat
    preconditioner: Preconditioner | None = None


def full_layers(cache: Any) -> list[int]:
    """The layers of full attention, which are those that can be compressed.

    Parameters
    ----------
    cache : transformers.DynamicCache
        From :func:`~polarquant_nb.evaluate.prefill`.

    Returns
    -------
    list of int
        Their indices.
    """
    from transformers.cache_utils import DynamicLayer

    return [
        i
        for i, layer in enumerate(cache.layers)
        if type(layer) is DynamicLayer and layer.keys is not None
    ]


def measure_moments(
    model: Any,
    windows: Sequence[Sequence[int]],
    tokens: int,
    *,
    sink: int = 4,
    biases: Mapping[int, Preconditioner] | None = None,
) -> dict[int, Moments]:
    """Mean squares of queries and keys while a model reads.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; see :func:`~polarquant_nb.attention_error.watch_attention`.
    windows : sequence of sequences of int
        Token ids.
    tokens : int
        How many of each are read.
    sink : int
        First keys, which stay exact, and are left out.
    biases : mapping of int to Preconditioner, optional
        The rotary bias of layers whose keys have one; it is subtracted before.

    Returns
    -------
    dict of int to Moments
        Of the layers of full attention: means over all windows.

    Raises
    ------
    ValueError
        If the model does not look its attention up in transformers' AttentionInterface.
    """
    import torch

    q_sums: dict[int, npt.NDArray[np.float64]] = {}
    k_sums: dict[int, npt.NDArray[np.float64]] = {}
    widths: dict[int, int] = {}

    def watch(module: Any, query: Any, key: Any, *_: Any) -> None:
        batch, _, n, head_dim = query.shape
        grouped = query.detach().double().view(batch, key.shape[1], -1, n, head_dim)
        squared = grouped.square().mean((0, 2)).sum(1).cpu().numpy()
        q_sums[module.layer_idx] = q_sums.get(module.layer_idx, 0) + squared

    for token_ids in windows:
        with watch_attention(model, watch):
            cache = prefill(model, torch.tensor([token_ids[:tokens]]))
        for i in full_layers(cache):
            keys = cache.layers[i].keys[0, :, sink:].float().cpu().numpy()
            bias = biases[i].bias if biases and i in biases else None
            if bias is not None:
                keys = keys - bias.at(sink, keys.shape[-2])
            k_sums[i] = k_sums.get(i, 0) + page_variance(keys)
            widths[i] = cache.layers[i].values.shape[-1]
    check_watched(q_sums, k_sums)
    count = len(windows)
    return {i: Moments(q_sums[i] / (count * tokens), k_sums[i] / count, widths[i]) for i in k_sums}


def measure_kl(
    model: Any,
    token_ids: Sequence[int],
    tokens: int,
    choices: Sequence[Coded],
    *,
    sink: int = 4,
    recent: int = 64,
) -> Iterator[tuple[Coded, float]]:
    """What coding one side of one layer does to the tokens that a model expects next.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    token_ids : sequence of int
        A window: the context, the tokens fed against it, and one more.
    tokens : int
        Length of the context.
    choices : sequence of Coded
        What is coded, each alone.
    sink, recent : int
        First and last tokens of the context that stay exact.

    Yields
    ------
    Coded, float
        One of the choices, and the mean KL (nats) of next-token distributions from the exact
        cache's.
    """
    import torch

    ids = torch.tensor([token_ids])
    fed, targets = ids[:, tokens:-1], ids[:, tokens + 1 :]
    cache = prefill(model, ids[:, :tokens])
    reference = score(model, cache, fed)
    for choice in choices:
        changed = _with_coded(cache, choice, sink, recent)
        yield choice, compare(score(model, changed, fed), reference, targets).kl


def _with_coded(cache: Any, choice: Coded, sink: int, recent: int) -> Any:
    """The cache with one side of one layer coded; what is as it was is shared."""
    layer = copy.copy(cache.layers[choice.layer])
    x: torch.Tensor = getattr(layer, choice.side).clone()
    middle = x[..., sink : x.shape[-2] - recent, :]
    middle[...] = encode(
        middle, choice.fmt, preconditioner=choice.preconditioner, first_position=sink
    ).decode()
    setattr(layer, choice.side, x)
    changed = copy.copy(cache)
    changed.layers = [*cache.layers]
    changed.layers[choice.layer] = layer
    return changed
