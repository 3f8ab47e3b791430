"""Record the queries, keys and values of a model, as its cache sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polarquant_nb.analysis.describing import described
from polarquant_nb.formats import integer

if TYPE_CHECKING:
    import torch
    import xarray as xr

__all__ = ["capture"]

_ROPE = "apply_rotary_pos_emb"
"""What the files of models in transformers call their rotary embedding."""


def capture(
    model: Any,
    text: str | Sequence[int] | npt.NDArray[np.integer[Any]] | torch.Tensor,
    tokenizer: Any = None,
    *,
    tokens: int | None = None,
    layers: Sequence[int] | None = None,
    before_rope: bool = False,
    chunk: int = 512,
    progress: bool = False,
) -> xr.Dataset:
    """Let a model read a text, and keep its queries, keys and values.

    Those of the layers of full attention, which are the ones that can be compressed; as attention
    gets them, so after the rotary embedding.  The model is not changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel or LoadedModel
        A causal language model that finds its attention by transformers' AttentionInterface, as all
        newer ones do; or what ``polarquant_nb.models.load_model`` returns, which has a
        tokenizer.
    text : str, or sequence, ndarray or tensor of int, 1-d
        A text, or token ids.
    tokenizer : transformers.PreTrainedTokenizerBase, optional
        For a text.
    tokens : int, optional
        How many of the first tokens are read; by default all.
    layers : sequence of int, optional
        Which layers are kept, in this order; by default all of full attention.
    before_rope : bool
        Keep queries and keys before the rotary embedding, too.
    chunk : int
        Tokens at a time; bounds the memory of activations.
    progress : bool
        Show a progress bar.

    Returns
    -------
    xarray.Dataset
        In float32 (float64 of models in float64): ``query`` (layer, head, token, coord), ``key``
        (layer, kv_head, token, coord) and ``value`` (layer, kv_head, token, coord; ``value_coord``
        where values are of another width); with ``before_rope``, ``query_before_rope`` and
        ``key_before_rope``.  By layer, the ``scale`` of logits and, where a model has one, the
        ``softcap``.  By token, ``token_id``.

    Raises
    ------
    TypeError
        If ``model`` is none of the above, a text comes without a tokenizer, or ids are no ints.
    ValueError
        If there is no token or fewer than ``tokens``, a layer cannot be kept, those kept differ in
        shape, or queries (or what the rotary embedding gets) cannot be seen.

    Examples
    --------
    >>> captured = pq.analysis.capture(model, text, tokenizer, tokens=2048)  # doctest: +SKIP
    >>> captured.to_netcdf("captured.nc", engine="h5netcdf")  # doctest: +SKIP
    """
    import torch

    from polarquant_nb.attention_error import check_watched, watch_attention
    from polarquant_nb.evaluate import prefill
    from polarquant_nb.sensitivity import full_layers

    source = getattr(model, "source", None)
    if source is not None:  # a LoadedModel
        model, tokenizer = model.model, tokenizer or model.tokenizer
    if not hasattr(model, "config") or not hasattr(model, "modules"):
        raise TypeError(f"model is a {type(model).__name__}; it must be a transformers model")
    ids = _token_ids(text, tokenizer, tokens)
    chunk = integer("chunk", chunk)
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    wanted = None if layers is None else [integer("layers", layer) for layer in layers]
    recorder = _Recorder(len(ids), wanted, before_rope)
    rope = _watch_rope(model, recorder.note_rope) if before_rope else nullcontext()
    with watch_attention(model, recorder.note_attention), rope:
        cache = prefill(model, torch.tensor([ids]), chunk=chunk, progress=progress)
    full = full_layers(cache)
    chosen = full if wanted is None else wanted
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(full):
        raise ValueError(
            f"layers are {wanted}; they must be some of those of full attention, each once: {full}"
        )
    check_watched(recorder.scales, chosen)
    for layer in chosen:
        recorder.keep(layer, "key", 0, cache.layers[layer].keys)
        recorder.keep(layer, "value", 0, cache.layers[layer].values)
    return recorder.dataset(
        chosen, ids, {"model": source or model.config.name_or_path or type(model).__name__}
    )


class _Recorder:
    """Collects what a model does, layer by layer and a chunk of tokens at a time."""

    def __init__(self, tokens: int, layers: Sequence[int] | None, before_rope: bool) -> None:
        self.tokens, self.layers, self.before_rope = tokens, layers, before_rope
        self.arrays: dict[tuple[int, str], npt.NDArray[Any]] = {}
        self.seen: dict[int, int] = {}  # tokens of each layer
        self.scales: dict[int, tuple[float, float]] = {}
        self.turned: tuple[Any, Any] | None = None

    def note_rope(self, query: Any, key: Any) -> None:
        """What the rotary embedding gets; the attention that follows is of the same layer."""
        self.turned = query, key

    def note_attention(self, module: Any, query: Any, *_: Any) -> None:
        layer, turned = module.layer_idx, self.turned
        self.turned = None
        if self.layers is not None and layer not in self.layers:
            return
        first = self.seen.get(layer, 0)
        self.seen[layer] = first + query.shape[2]
        self.scales[layer] = (
            float(getattr(module, "scaling", None) or query.shape[-1] ** -0.5),
            float(getattr(module, "attn_logit_softcapping", None) or 0),
        )
        self.keep(layer, "query", first, query)
        if self.before_rope:
            if turned is None or turned[0].shape != query.shape:
                raise ValueError(
                    f"before_rope is True, but what {type(module).__name__} turns by its rotary "
                    "embedding are not its whole queries and keys"
                )
            self.keep(layer, "query_before_rope", first, turned[0])
            self.keep(layer, "key_before_rope", first, turned[1])

    def keep(self, layer: int, name: str, first: int, x: Any) -> None:
        """Tokens from ``first`` on, ``(1, heads, n, head_dim)``."""
        x = x[0].detach().cpu()
        x = (x if str(x.dtype) == "torch.float64" else x.float()).numpy()
        if (layer, name) not in self.arrays:
            shape = (x.shape[0], self.tokens, x.shape[2])
            self.arrays[layer, name] = np.empty(shape, x.dtype)
        self.arrays[layer, name][:, first : first + x.shape[1]] = x

    def dataset(self, layers: list[int], ids: list[int], attrs: dict[str, Any]) -> xr.Dataset:
        """Everything about some layers."""
        import xarray as xr

        names = [name for layer, name in self.arrays if layer == layers[0]]
        for name in names:
            shapes = {layer: self.arrays[layer, name].shape for layer in layers}
            if len(set(shapes.values())) > 1:
                raise ValueError(
                    f"layers differ in the shape of their {name} (heads, tokens, head_dim): "
                    f"{shapes}; capture those of one shape at a time, by layers="
                )
        key, value = self.arrays[layers[0], "key"], self.arrays[layers[0], "value"]
        width = "coord" if key.shape[-1] == value.shape[-1] else "value_coord"
        about = {
            "query": ("head", "coord", "queries after the rotary embedding"),
            "key": ("kv_head", "coord", "keys after the rotary embedding"),
            "value": ("kv_head", width, "values"),
            "query_before_rope": ("head", "coord", "queries before the rotary embedding"),
            "key_before_rope": ("kv_head", "coord", "keys before the rotary embedding"),
        }
        variables = {}
        for name, (heads, coord, long_name) in about.items():
            if name in names:
                # popped, so that no more than one variable is held twice
                stacked = np.stack([self.arrays.pop((layer, name)) for layer in layers])
                variables[name] = described(("layer", heads, "token", coord), stacked, long_name)
        scales, softcaps = np.array([self.scales[layer] for layer in layers]).T
        variables["scale"] = described("layer", scales, "factor of attention logits")
        if softcaps.any():
            variables["softcap"] = described(
                "layer", softcaps, "soft cap of attention logits, 0 for none"
            )
        return xr.Dataset(
            variables,
            coords={
                "layer": described("layer", np.array(layers, np.int64), "layer of the model"),
                "token": described("token", np.arange(self.tokens), "position in the text"),
                "token_id": described("token", np.array(ids, np.int64), "id of a token"),
            },
            attrs=attrs,
        )


@contextmanager
def _watch_rope(model: Any, watch: Callable[[Any, Any], None]) -> Iterator[None]:
    """Have a function called with the queries and keys that a model's rotary embedding gets."""
    homes = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "layer_idx")}
    originals = {home: vars(home)[_ROPE] for home in homes if _ROPE in vars(home)}
    if not originals:
        raise ValueError(
            f"before_rope is True, but the file of {type(model).__name__} has no {_ROPE}"
        )

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def turn(query: Any, key: Any, *args: Any, **options: Any) -> Any:
            watch(query, key)
            return original(query, key, *args, **options)

        return turn

    for home, original in originals.items():
        setattr(home, _ROPE, watched(original))
    try:
        yield
    finally:
        for home, original in originals.items():
            setattr(home, _ROPE, original)


def _token_ids(text: Any, tokenizer: Any, tokens: int | None) -> list[int]:
    if isinstance(text, str):
        if tokenizer is None:
            raise TypeError("tokenizer is None; a text needs one, token ids do not")
        ids = list(tokenizer(text)["input_ids"])
    else:
        ids = text.tolist() if hasattr(text, "tolist") else list(text)
        if any(isinstance(i, list) for i in ids):
            raise ValueError("text has more than one axis; token ids must be 1-d, of one text")
        ids = [integer("text", i) for i in ids]
    count = len(ids) if tokens is None else integer("tokens", tokens)
    if not 1 <= count <= len(ids):
        raise ValueError(
            f"tokens is {tokens} and text has {len(ids)}; at least one must be read, and no more "
            "than there are"
        )
    return ids[:count]
