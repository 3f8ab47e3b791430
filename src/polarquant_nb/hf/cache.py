"""PolarCache: a cache of transformers whose layers of full attention stay compressed."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any, Literal

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from polarquant_nb.budgets import DEFAULT_PRESET, preset
from polarquant_nb.cache import KVCache
from polarquant_nb.calibration import Calibration, LayerCalibration, given_calibration
from polarquant_nb.formats import FormatPair
from polarquant_nb.hf.handle import Counts, untraced
from polarquant_nb.hf.key_bias import key_biases
from polarquant_nb.hf.layer import PolarLayer
from polarquant_nb.hf.report import CacheReport, LayerReport
from polarquant_nb.html_tables import of_layers
from polarquant_nb.online import OnlinePreconditioner
from polarquant_nb.preconditioning import Preconditioner

__all__ = ["PolarCache"]


class PolarCache(DynamicCache):
    """Keys and values of a model: polar codes where attention is full, stock layers elsewhere.

    Give it to ``generate`` or to a model in place of a ``transformers.DynamicCache``.  After
    :func:`polarquant_nb.hf.enable`, attention runs on the codes; otherwise they are decoded for
    every token.  The first prefill attends to exact keys and values.  What a layer holds is on the
    device of that layer of the model, the CPU or an NVIDIA GPU.

    Parameters
    ----------
    config : transformers.PretrainedConfig
        Of the model; a nested ``text_config`` is found.
    formats : str, FormatPair, Calibration or path-like
        The name of a preset, or a pair of formats; or a calibration of the model, or its file.  A
        string that ends in ``.json`` is a path.
    layers : mapping of int to str, FormatPair or None, optional
        What single layers have instead; None keeps one exact.  Negative indices count from the end.
    sink, recent : int
        See :class:`polarquant_nb.KVCache`.
    nan : {'raise', 'propagate'}
        Likewise.
    preconditioner : OnlinePreconditioner, or mapping of int to Preconditioner, optional
        Of all compressed layers, for models that are enabled; or of single ones.  See also
        :meth:`from_model`.  A calibration has its own.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    OSError
        If a calibration's file cannot be read.
    ValueError
        If the model is an encoder-decoder, stores compressed latents (MLA), has no layer of full
        attention or no head_dim, or the formats or calibration are for another one.

    Examples
    --------
    >>> import polarquant_nb as pq
    >>> cache = pq.hf.PolarCache(model.config)  # doctest: +SKIP
    >>> pq.hf.enable(model).generate(**inputs, past_key_values=cache)  # doctest: +SKIP
    >>> print(cache.report())  # doctest: +SKIP
    """

    def __init__(
        self,
        config: PretrainedConfig,
        formats: str | FormatPair | Calibration | os.PathLike[str] = DEFAULT_PRESET,
        *,
        layers: Mapping[int, str | FormatPair | None] | None = None,
        sink: int = 4,
        recent: int = 64,
        nan: Literal["raise", "propagate"] = "raise",
        preconditioner: OnlinePreconditioner | Mapping[int, Preconditioner] | None = None,
    ) -> None:
        text = _text_config(config)
        super().__init__(config=config)
        self.counts = Counts()
        calibration = given_calibration(formats)
        if calibration is not None and preconditioner is not None:
            raise ValueError("preconditioner is given; a calibration has its own")
        chosen = _chosen(formats if calibration is None else calibration, layers or {}, self.layers)
        options: dict[str, Any] = {"sink": sink, "recent": recent, "nan": nan}
        own = _preconditioners(preconditioner, len(self.layers))
        full = [i for i, layer in enumerate(self.layers) if type(layer) is DynamicLayer]
        if not full:
            kinds = ", ".join(sorted({type(layer).__name__ for layer in self.layers})) or "none"
            raise ValueError(
                f"the model's layers are {kinds}: none is of full attention, which is what a "
                "PolarCache compresses; use a DynamicCache"
            )
        for i in set(range(len(self.layers))) - set(full):
            if i in (index % len(self.layers) for index in layers or {}) and chosen[i] is not None:
                raise ValueError(
                    f"layers names layer {i}, a {type(self.layers[i]).__name__}; those of full "
                    f"attention can be compressed: {full}"
                )
        for i in full:
            pair = chosen[i]
            if pair is not None:
                here = options | {"preconditioner": own[i]}
                if isinstance(pair, LayerCalibration):
                    _check_heads(pair, text, i)
                    here["preconditioner"], pair = pair.preconditioner, pair.formats
                _check_formats(pair, _head_dims(text, i), here)
                self.layers[i] = PolarLayer(pair, here, self.counts)
        self._first, self._length_before = min(self.polar_layers, default=None), 0

    @classmethod
    def from_model(
        cls,
        model: Any,
        formats: str | FormatPair | Calibration | os.PathLike[str] = DEFAULT_PRESET,
        **options: Any,
    ) -> PolarCache:
        """A cache that knows the bias of the model's keys, where they have one (Qwen2 and 2.5).

        Such a bias can be many times as long as the rest of a key.  It is taken off before keys are
        encoded, and added back to the logits.

        Parameters
        ----------
        model : transformers.PreTrainedModel
            What the cache is for.
        formats : str, FormatPair, Calibration or path-like
            See :class:`PolarCache`.  A calibration knows the bias already.
        **options : Any
            Of :class:`PolarCache`, but for the preconditioner.

        Returns
        -------
        PolarCache
            As from ``PolarCache(model.config)`` where keys have no bias.

        Raises
        ------
        TypeError, ValueError
            As there; ValueError too if the bias is turned by no known rotary embedding.
        """
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"model is {type(model).__name__}; it must be a transformers model")
        formats = given_calibration(formats) or formats
        if not isinstance(formats, Calibration):
            options["preconditioner"] = key_biases(model)
        return cls(model.config, formats, **options)

    @property
    def polar_layers(self) -> dict[int, PolarLayer]:
        """The layers that are compressed, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, PolarLayer)}

    @property
    def nbytes(self) -> int:
        """Bytes held by all layers, everything counted."""
        return self.report().nbytes

    def copy_from(self, cache: DynamicCache) -> PolarCache:
        """Hold what an exact cache of the same model holds.

        Parameters
        ----------
        cache : transformers.DynamicCache
            Left as it is.  Padding cannot be told, and becomes tokens that masks hide.

        Returns
        -------
        PolarCache
            This one.

        Raises
        ------
        ValueError
            If this cache is not empty, or the other one has other layers.
        """
        if self.get_seq_length() or len(cache.layers) != len(self.layers):
            raise ValueError(
                f"this cache has {len(self.layers)} layers and {self.get_seq_length()} tokens, the "
                f"other one {len(cache.layers)} layers; there must be as many, and no token here"
            )
        exact: Any
        for i, exact in enumerate(cache.layers):
            layer = self.layers[i]
            if not isinstance(layer, PolarLayer):
                self.layers[i] = copy.deepcopy(exact)
            elif exact.is_initialized:
                layer.update(exact.keys, exact.values)
                layer.settle()
        return self

    def to(self, device: Any) -> PolarCache:
        """Move all layers to one device, as a model is moved.

        Parameters
        ----------
        device : str or torch.device
            ``'cpu'``, or a CUDA device.

        Returns
        -------
        PolarCache
            This one.

        Raises
        ------
        ImportError, ValueError
            See :meth:`polarquant_nb.KVCache.to`.
        """
        for layer in self.layers:
            if isinstance(layer, PolarLayer):
                layer.to(device)
            else:
                for name, value in list(vars(layer).items()):
                    if isinstance(value, torch.Tensor):
                        setattr(layer, name, value.to(device))
        return self

    def report(self) -> CacheReport:
        """What the cache holds.

        Returns
        -------
        CacheReport
            Print it for a table.
        """
        layers = tuple(_report(layer) for layer in self.layers)
        counts = self.counts
        return CacheReport(layers, counts.exact, counts.coded, counts.decoded)

    @untraced
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens of a layer.

        Parameters
        ----------
        key_states, value_states : torch.Tensor, shape ``(batch, num_kv_heads, n, head_dim)``
            Keys and values.
        layer_idx : int
            Which layer.
        *args, **kwargs : Any
            What a version of transformers passes on to layers.

        Returns
        -------
        tuple of torch.Tensor
            Keys and values, all that the layer holds; of a compressed layer, handles.

        Raises
        ------
        ValueError
            If they are those of another batch or model, or a call of the model before ended midway.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"a model with a layer {layer_idx} uses a cache made for {len(self.layers)} "
                "layers: make a PolarCache from its own config"
            )
        layer = self.layers[layer_idx]
        if isinstance(layer, PolarLayer):
            self._check_even(layer_idx, layer.get_seq_length())
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def _check_even(self, layer_idx: int, length: int) -> None:
        """Refuse to go on where layers hold different tokens: results would be wrong."""
        if layer_idx == self._first:
            self._length_before = length
        elif length != self._length_before:
            raise ValueError(
                f"layer {layer_idx} holds {length} positions, layer {self._first} held "
                f"{self._length_before} before this call: an earlier one ended midway, by an error "
                "or an interrupt.  crop(0) takes all layers back to the shortest; or reset() the "
                "cache"
            )

    @untraced
    def crop(self, tokens_to_remove: int) -> None:
        """Remove last positions of all layers.

        Layers that hold more than others, as a call of the model ended midway, lose those first.

        Parameters
        ----------
        tokens_to_remove : int
            Minus their number, or 0; up to transformers 5.14 also a length to keep.

        Raises
        ------
        ValueError, RuntimeError
            If it is another number, or a layer with a sliding window keeps no past: see
            ``transformers``.  Nothing has been removed.
        """
        layers: list[Any] = self.layers
        attention = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
        lengths = {layer: layer.get_seq_length() for layer in attention if layer.is_initialized}
        # other layers do not tell how much they have seen
        are_told = len(attention) == len(layers) and tokens_to_remove <= 0
        shortest = min(lengths.values(), default=0)
        # those that may refuse come first
        for layer in sorted(layers, key=lambda x: type(x) in (DynamicLayer, PolarLayer)):
            if layer in lengths or layer not in attention:
                more = lengths[layer] - shortest if are_told else 0
                layer.crop(tokens_to_remove - more)

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Refuse: what has to have its size from the beginning is a static cache.

        Parameters
        ----------
        *args, **kwargs : Any
            Ignored.

        Raises
        ------
        ValueError
            Always.
        """
        raise ValueError(
            "a PolarCache grows and cannot be static; use a StaticCache for torch.export and the "
            "like"
        )

    def __repr__(self) -> str:
        return f"PolarCache({self.layers})"

    def _repr_html_(self) -> str:
        return of_layers(self.report(), [layer.cache for layer in self.polar_layers.values()])


def _text_config(config: Any) -> Any:
    if not isinstance(config, PretrainedConfig):
        raise TypeError(
            f"config is {type(config).__name__}; it must be a model's configuration: model.config"
        )
    if config.is_encoder_decoder:
        raise ValueError(
            f"{type(config).__name__} is that of an encoder-decoder; decoder-only models are "
            "supported"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(
            f"{type(text).__name__} has kv_lora_rank: its model stores latents that are compressed "
            "already (MLA); models that store keys and values of attention heads are supported"
        )
    return text


def _chosen(
    formats: Any, layers: Mapping[int, str | FormatPair | None], stock: list[Any]
) -> list[str | FormatPair | LayerCalibration | None]:
    """Formats of each layer; of a calibration with its preconditioner."""
    for value in (formats, *layers.values()):
        if isinstance(value, Calibration) and value is formats:
            continue
        if not isinstance(value, (str, FormatPair)) and (value is not None or value is formats):
            raise TypeError(
                f"formats are {value!r}; they must be the name of a preset, a FormatPair or, for "
                "all layers, a Calibration or its path"
            )
    count = len(stock)
    chosen: list[str | FormatPair | LayerCalibration | None] = [formats] * count
    if isinstance(formats, Calibration):
        if len(formats) != count:
            raise ValueError(
                f"the calibration is for a model of {len(formats)} layers, {formats.model}; this "
                f"one has {count}"
            )
        chosen = list(formats)
        for i, (own, layer) in enumerate(zip(chosen, stock, strict=True)):
            if own is not None and type(layer) is not DynamicLayer:
                raise ValueError(
                    f"the calibration, for {formats.model}, compresses layer {i}, which here is a "
                    f"{type(layer).__name__}"
                )
    for index, value in layers.items():
        if not -count <= index < count:
            raise ValueError(f"layers names layer {index}; the model has {count}")
        chosen[index] = value
    return chosen


def _preconditioners(given: Any, count: int) -> list[Any]:
    """That of each layer."""
    if given is None or isinstance(given, OnlinePreconditioner):
        return [given] * count
    if not isinstance(given, Mapping):
        raise TypeError(
            f"preconditioner is {given!r}; it must be an OnlinePreconditioner, or a mapping of "
            "layers to Preconditioner"
        )
    chosen: list[Any] = [None] * count
    for index, value in given.items():
        if not -count <= index < count:
            raise ValueError(f"preconditioner names layer {index}; the model has {count}")
        chosen[index] = value
    return chosen


def _head_dims(text: Any, layer: int) -> tuple[int, int]:
    """Width of a layer's keys and of its values."""
    per_layer = getattr(text, "per_layer_config", None)
    if per_layer is not None:
        text = per_layer[layer]
    head_dim = getattr(text, "head_dim", None)
    if head_dim is None:
        hidden, heads = (getattr(text, key, None) for key in ("hidden_size", "num_attention_heads"))
        if not hidden or not heads:
            raise ValueError(
                f"{type(text).__name__} has neither head_dim nor hidden_size and "
                "num_attention_heads, so there is no telling how wide keys are"
            )
        head_dim = hidden // heads
    return head_dim, getattr(text, "v_head_dim", None) or head_dim


def _check_heads(own: LayerCalibration, text: Any, layer: int) -> None:
    per_layer = getattr(text, "per_layer_config", None)
    config = text if per_layer is None else per_layer[layer]
    heads = getattr(config, "num_key_value_heads", None)
    if heads not in (None, own.needs.num_kv_heads):
        raise ValueError(
            f"the calibration is for {own.needs.num_kv_heads} kv heads in layer {layer}; the model "
            f"has {heads}"
        )


def _check_formats(
    pair: str | FormatPair, widths: tuple[int, int], options: dict[str, Any]
) -> None:
    if isinstance(pair, str):
        pair = preset(pair, widths[0], value_head_dim=widths[1])
    KVCache(pair, **options)
    if (pair.keys.head_dim, pair.values.head_dim) != widths:
        raise ValueError(
            f"the formats are for head_dim {pair.keys.head_dim} of keys and "
            f"{pair.values.head_dim} of values; the model has {widths[0]} and {widths[1]}"
        )


def _report(layer: Any) -> LayerReport:
    if isinstance(layer, PolarLayer):
        cache, formats = layer.cache, layer.formats
        kind = formats if isinstance(formats, str) else f"{formats.bits_per_value:.2f} bits"
        if cache is None:
            return LayerReport(kind, 0, 0, 0)
        tokens = int(cache.lengths.sum())
        width = cache.formats.keys.head_dim + cache.formats.values.head_dim
        return LayerReport(kind, tokens, cache.nbytes, 2 * tokens * cache.num_kv_heads * width)
    tensors = [x for x in vars(layer).values() if isinstance(x, torch.Tensor) and x.numel() > 1]
    keys = getattr(layer, "keys", None)
    tokens = keys.shape[0] * keys.shape[2] if keys is not None and keys.ndim == 4 else 0
    return LayerReport(
        type(layer).__name__,
        tokens,
        sum(x.nbytes for x in tensors),
        2 * sum(x.numel() for x in tensors),
    )
