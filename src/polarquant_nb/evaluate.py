"""Judge a compressed cache against the exact one: KL, top-1 agreement, perplexity.

A cache is judged by what the model says next: prefill a context exactly, compress the cache, and
feed further tokens against it.  Any cache of transformers can stand in for ours, so peers are
judged by the same code.  KL is what to look at; perplexity, and even more the error of keys and
values, rank configurations wrongly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, sqrt
from typing import TYPE_CHECKING, Any

from polarquant_nb.contenders import (
    CompressedCache,
    Contender,
    compress,
    compress_with,
    exact_nbytes,
    fresh,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "CompressedCache",
    "Contender",
    "Score",
    "compare",
    "compress",
    "compress_with",
    "exact_nbytes",
    "greedy",
    "prefill",
    "score",
]


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

    cache = fresh(cache)
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
    model : transformers.PreTrainedModel
        As in :func:`score`.
    cache : transformers.Cache, or callable that returns one
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

    cache = fresh(cache)
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
