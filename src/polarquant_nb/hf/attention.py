"""enable and disable: attention of transformers models straight on the codes of a PolarCache.

A model finds its attention function by name.  An enabled model has the name of what it used before
behind a prefix: that is what first prefills, layers with a sliding window, and whatever the codes
cannot serve go on using.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from polarquant_nb.hf.handle import Handle, untraced
from polarquant_nb.hf.layer import PolarLayer

__all__ = ["disable", "enable"]

Tensor = torch.Tensor
Result: TypeAlias = "tuple[Tensor, Tensor | None]"

_PREFIX = "polarquant_"


def enable(model: Any) -> Any:
    """Let a model attend to what a :class:`polarquant_nb.hf.PolarCache` holds without decoding it.

    Other caches work as before.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder whose attention is ``'sdpa'`` or ``'eager'``; changed in place.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        If it is no model of transformers.
    ValueError
        If it is an encoder-decoder, or its attention is another one or cannot be set.
    """
    was = _implementation(model)
    if was.startswith(_PREFIX):
        return model
    if model.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is an encoder-decoder; decoder-only models are supported"
        )
    if was not in _EXACT:
        raise ValueError(
            f"the model's attention is {was!r}; it must be {' or '.join(map(repr, _EXACT))}: "
            "model.set_attn_implementation('sdpa')"
        )
    _set(model, _PREFIX + was)
    if _implementation(model) != _PREFIX + was:
        raise ValueError(
            f"{type(model).__name__} does not let its attention be set, so it cannot be enabled; a "
            "PolarCache works without, only slower"
        )
    return model


def disable(model: Any) -> Any:
    """Undo :func:`polarquant_nb.hf.enable`.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        Changed in place; left alone if it is not enabled.

    Returns
    -------
    transformers.PreTrainedModel
        The same model.

    Raises
    ------
    TypeError
        If it is no model of transformers.
    """
    name = _implementation(model)
    if name.startswith(_PREFIX):
        _set(model, name.removeprefix(_PREFIX))
    return model


def _implementation(model: Any) -> str:
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model is {type(model).__name__}; it must be a transformers model")
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def _set(model: Any, name: str) -> None:
    """Set the attention of the part that decodes; a vision tower keeps its own."""
    config = model.config
    text = config.get_text_config(decoder=True)
    keys = [key for key in config.sub_configs if getattr(config, key, None) is text]
    model.set_attn_implementation({keys[0]: name} if keys else name)


# ---- attention -----------------------------------------------------------------------------------


@untraced
def _attention(
    exact: Callable[..., Result],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Result:
    """What enabled models call, for every layer.

    Parameters
    ----------
    exact : callable
        Attention to exact or decoded keys and values, with the same arguments.
    module : torch.nn.Module
        The layer.
    query : torch.Tensor, shape ``(batch, num_heads, q_len, head_dim)``
        Queries of the last tokens.
    key, value : torch.Tensor, shape ``(batch, num_kv_heads, kv_len, head_dim)``
        Handles of a PolarCache, or plain.
    attention_mask : torch.Tensor, optional
        Bool, True where a query may attend, or float, ``(batch, 1, q_len, kv_len)``.
    **options : Any
        ``scaling``, ``softcap``, ``s_aux``, ``dropout`` and whatever a model passes.

    Returns
    -------
    out : torch.Tensor, shape ``(batch, q_len, num_heads, value_head_dim)``
        Result.
    weights : torch.Tensor or None
        Attention weights, where they are asked for.
    """
    if options.get("output_attentions") or any(
        options.get(name) is not None for name in ("softcap", "s_aux")
    ):
        exact = _eager
    if not isinstance(key, Handle) or not isinstance(value, Handle):
        return exact(module, query, key, value, attention_mask, **options)
    key.pair.check()
    layer = key.pair.layer
    if key.exact is not None and value.exact is not None:
        layer.settle(attention_mask, query)
        layer.counts.exact += 1
        return exact(module, query, key.exact, value.exact, attention_mask, **options)
    out = _on_codes(layer, module, query, attention_mask, options)
    if out is not None:
        return out.transpose(1, 2).contiguous(), None
    return exact(module, query, *layer.decode(attention_mask, query), attention_mask, **options)


def _on_codes(
    layer: PolarLayer,
    module: torch.nn.Module,
    query: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor | None:
    """The result, or None where codes cannot give it."""
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if (
        options.get("output_attentions")
        or options.get("dropout")
        or options.get("position_bias") is not None
        or not (is_causal or query.shape[2] == 1 or mask is not None)
    ):
        return None
    return layer.attend(
        query, mask, *(options.get(name) for name in ("scaling", "softcap", "s_aux"))
    )


def _eager(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Result:
    """The model's own attention in plain torch, which takes masks that are added."""
    attend = _eager_function(module)
    q_len, kv_len = query.shape[2], key.shape[2]
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if attention_mask is None and is_causal and q_len > 1:
        shown = torch.ones(q_len, kv_len, dtype=torch.bool, device=query.device)
        attention_mask = shown.tril(kv_len - q_len)[None, None]
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = torch.zeros_like(attention_mask, dtype=query.dtype).masked_fill_(
            ~attention_mask, lowest
        )
    return attend(module, query, key, value, attention_mask, **options)


def _eager_function(module: torch.nn.Module) -> Callable[..., Result]:
    for cls in type(module).__mro__:
        function = getattr(sys.modules.get(cls.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise ValueError(
        f"{type(module).__name__} has no eager attention, which softcap, s_aux and "
        "output_attentions need"
    )


_EXACT: dict[str, Callable[..., Result]] = {"sdpa": sdpa_attention_forward, "eager": _eager}

for _name, _exact in _EXACT.items():
    AttentionInterface.register(_PREFIX + _name, partial(_attention, _exact))
    # without a mask function of the same name there is no mask at all, and padding is attended to
    AttentionMaskInterface.register(_PREFIX + _name, sdpa_mask)
