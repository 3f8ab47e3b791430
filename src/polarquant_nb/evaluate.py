"""Judge a compressed cache against the exact one: KL, top-1 agreement, perplexity.

A cache is judged by what the model says next: prefill a context exactly, compress the cache, and
feed further tokens against it.  Any cache of transformers can stand in for ours, so peers are
judged by the same code.  KL is what to look at; perplexity, and even more the error of keys and
values, rank configurations wrongly.
"""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from polarquant_nb.budgets import preset
from polarquant_nb.codec import encode
from polarquant_nb.formats import FormatPair, PolarFormat

if TYPE_CHECKING:
    import torch

__all__ = [
    "CompressedCache",
    "Score",
    "compare",
    "compress",
    "exact_nbytes",
    "greedy",
    "prefill",
    "score",
]

_EXACT_NBYTES = 2  # per number kept exact: models store keys and values in 16 bits


@dataclass(frozen=True)
class CompressedCache:
    """A cache after compression: what a model reads from it, and what it costs.

    Parameters
    ----------
    cache : transformers.DynamicCache
        Sinks and recent tokens as they were; the others decoded from their pages.
    page_nbytes : int
        Bytes of all pages, measured from their buffers; a last page that is partly empty counts
        whole.
    page_values : int
        Numbers stored in pages.
    exact_values : int
        Numbers kept exact: sinks, recent tokens, and layers that are not compressed.
    encode_seconds : float
        Time spent in :func:`polarquant_nb.encode`.
    """

    cache: Any
    page_nbytes: int
    page_values: int
    exact_values: int
    encode_seconds: float

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache; numbers kept exact count 2 bytes each, as models store them."""
        return self.page_nbytes + _EXACT_NBYTES * self.exact_values

    @property
    def ratio(self) -> float:
        """How many times larger the cache is in 16 bits."""
        return _EXACT_NBYTES * (self.page_values + self.exact_values) / self.nbytes

    @property
    def bits_per_value(self) -> float:
        """Bits per number stored in pages, keys and values together."""
        return 8 * self.page_nbytes / self.page_values


@dataclass(frozen=True)
class Score:
    """How close next-token distributions are to the reference's.

    Parameters
    ----------
    kl : float
        Mean of KL(reference ‖ this), nats.
    kl_stderr : float
        Its standard error, taking tokens as independent.
    top1 : float
        Share of tokens at which both find the same token most likely.
    perplexity : float
        Of the text, under this cache.
    tokens : int
        Tokens scored.
    """

    kl: float
    kl_stderr: float
    top1: float
    perplexity: float
    tokens: int


def prefill(model: Any, ids: torch.Tensor, *, chunk: int = 512, progress: bool = False) -> Any:
    """Run a context through a model and keep its exact cache.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    ids : torch.Tensor of int64, shape ``(batch, seq_len)``
        Token ids, without padding.
    chunk : int
        Tokens at a time; bounds the memory of activations.
    progress : bool
        Show a progress bar.

    Returns
    -------
    transformers.DynamicCache
        Keys and values of all ``seq_len`` tokens.
    """
    import torch
    from tqdm.auto import tqdm
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with (
        torch.no_grad(),
        tqdm(total=ids.shape[1], desc="prefill", unit="token", disable=not progress) as bar,
    ):
        for part in torch.split(ids, chunk, 1):
            _forward(model, part, cache, logits_to_keep=1)
            bar.update(part.shape[1])
    return cache


def compress(
    cache: Any,
    formats: FormatPair | str,
    *,
    sink: int = 4,
    recent: int = 64,
) -> CompressedCache:
    """Encode a cache into pages and decode it again; the original is left as it is.

    Layers of full attention are compressed, layers with a sliding window stay exact.

    Parameters
    ----------
    cache : transformers.DynamicCache
        From :func:`prefill`; all rows of one length, without padding.
    formats : FormatPair or str
        Formats, or the name of a preset.
    sink, recent : int
        First and last tokens that stay exact.

    Returns
    -------
    CompressedCache
        The reconstructed cache, bytes and time.

    Raises
    ------
    ValueError
        If ``sink`` or ``recent`` is negative, they leave nothing to compress, the preset is
        unknown, or a head_dim is not the format's.
    """
    from transformers.cache_utils import DynamicLayer

    if sink < 0 or recent < 0:
        raise ValueError(f"sink is {sink} and recent is {recent}; both must be at least 0")
    restored = copy.copy(cache)
    restored.layers = [copy.copy(layer) for layer in cache.layers]
    page_nbytes = page_values = 0
    seconds = 0.0
    for layer in restored.layers:
        if type(layer) is not DynamicLayer or layer.keys is None:
            continue
        for name, fmt in _layer_formats(formats, layer):
            exact = getattr(layer, name)
            stop = exact.shape[-2] - recent
            if stop <= sink:
                raise ValueError(
                    f"the cache holds {exact.shape[-2]} tokens; with sink={sink} and "
                    f"recent={recent} it must hold more than {sink + recent}"
                )
            start_time = time.perf_counter()
            pages = encode(exact[..., sink:stop, :], fmt)
            seconds += time.perf_counter() - start_time
            mixed = exact.clone()
            mixed[..., sink:stop, :] = pages.decode()
            setattr(layer, name, mixed)
            page_nbytes += pages.nbytes
            page_values += exact[..., sink:stop, :].numel()
    if not page_values:
        raise ValueError("the cache has no layer of full attention: there is nothing to compress")
    exact_values = exact_nbytes(cache) // _EXACT_NBYTES - page_values
    return CompressedCache(restored, page_nbytes, page_values, exact_values, seconds)


def exact_nbytes(cache: Any) -> int:
    """Bytes of a cache's keys and values in 16 bits, whatever they are held in here.

    Parameters
    ----------
    cache : transformers.DynamicCache
        From :func:`prefill`.

    Returns
    -------
    int
        Bytes.
    """
    tensors = (getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values"))
    return _EXACT_NBYTES * sum(x.numel() for x in tensors if x is not None)


def score(
    model: Any, cache: Any | Callable[[], Any], ids: torch.Tensor, *, chunk: int = 256
) -> torch.Tensor:
    """Next-token distributions, given a cached context and further tokens of the text.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model that the cache belongs to.
    cache : transformers.Cache, or callable that returns one
        Any cache.  A cache is copied and left as it is; what a callable returns is used up.
    ids : torch.Tensor of int64, shape ``(batch, q_len)``
        The tokens that follow the cached ones.
    chunk : int
        Tokens at a time; bounds the memory of logits.

    Returns
    -------
    torch.Tensor of float32, shape ``(batch, q_len, vocab_size)``
        Log-probabilities (nats) of the token after each of ``ids``.
    """
    import torch

    cache = _own(cache)
    with torch.no_grad():
        logits = (_forward(model, part, cache).logits for part in torch.split(ids, chunk, 1))
        return torch.cat([torch.log_softmax(part.double(), -1).float() for part in logits], 1)


def compare(log_probs: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> Score:
    """Compare next-token distributions with those of the exact cache.

    Parameters
    ----------
    log_probs, reference : torch.Tensor, shape ``(batch, q_len, vocab_size)``
        What :func:`score` gives for the cache in question and for the exact one.
    targets : torch.Tensor of int64, shape ``(batch, q_len)``
        The tokens that do follow, for perplexity.

    Returns
    -------
    Score
        Means over all tokens, accumulated in float64.

    Raises
    ------
    ValueError
        If the shapes do not fit together.
    """
    import torch

    if log_probs.shape != reference.shape or log_probs.shape[:-1] != targets.shape:
        raise ValueError(
            f"log_probs has shape {tuple(log_probs.shape)}, reference {tuple(reference.shape)}, "
            f"targets {tuple(targets.shape)}; they must be (batch, q_len, vocab_size) twice and "
            "(batch, q_len)"
        )
    kl, same, nll = [], [], []
    # A few tokens at a time: float64 copies of all distributions would be large.
    for p, q, target in zip(
        torch.split(reference.flatten(0, 1), 64),
        torch.split(log_probs.flatten(0, 1), 64),
        torch.split(targets.flatten(), 64),
        strict=True,
    ):
        p, q = p.double(), q.double()
        # A token that the reference rules out (probability 0) adds nothing.
        kl.append(torch.where(p > -torch.inf, p.exp() * (p - q), 0.0).sum(-1))
        same.append(p.argmax(-1) == q.argmax(-1))
        nll.append(-q.gather(-1, target[:, None])[:, 0])
    divergence = torch.cat(kl)
    n = len(divergence)
    return Score(
        kl=divergence.mean().item(),
        kl_stderr=divergence.std().item() / sqrt(n) if n > 1 else float("nan"),
        top1=torch.cat(same).double().mean().item(),
        perplexity=exp(torch.cat(nll).mean().item()),
        tokens=n,
    )


def greedy(
    model: Any, cache: Any | Callable[[], Any], ids: torch.Tensor, num_tokens: int
) -> torch.Tensor:
    """Continue a cached context with the most likely token, again and again.

    Parameters
    ----------
    model, cache
        As in :func:`score`.
    ids : torch.Tensor of int64, shape ``(batch, q_len)``
        The tokens that follow the cached ones, at least one.
    num_tokens : int
        Tokens to produce.

    Returns
    -------
    torch.Tensor of int64, shape ``(batch, num_tokens)``
        The tokens after ``ids``.
    """
    import torch

    cache = _own(cache)
    produced = []
    with torch.no_grad():
        for _ in range(num_tokens):
            ids = _forward(model, ids, cache, logits_to_keep=1).logits[:, -1].argmax(-1)[:, None]
            produced.append(ids)
    return torch.cat(produced, 1)


def _forward(model: Any, ids: torch.Tensor, cache: Any, **options: Any) -> Any:
    """One call of the model; transformers 5.24 renamed ``past_key_values`` to ``cache``."""
    known = inspect.signature(model.forward).parameters
    argument = "cache" if "cache" in known else "past_key_values"
    return model(ids, use_cache=True, **{argument: cache}, **options)


def _own(cache: Any | Callable[[], Any]) -> Any:
    return cache() if callable(cache) else copy.deepcopy(cache)


def _layer_formats(formats: FormatPair | str, layer: Any) -> list[tuple[str, PolarFormat]]:
    if isinstance(formats, str):
        value_head_dim = layer.values.shape[-1]
        formats = preset(formats, layer.keys.shape[-1], value_head_dim=value_head_dim)
    return [("keys", formats.keys), ("values", formats.values)]
