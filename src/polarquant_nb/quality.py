"""Judge contenders over several windows of text: means, and their spread over windows."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any

from polarquant_nb.attention_error import record_attention
from polarquant_nb.contenders import EXACT, Contender
from polarquant_nb.evaluate import compare, prefill, score

__all__ = ["Judgement", "Summary", "judge", "summarise"]


@dataclass(frozen=True)
class Judgement:
    """A contender on one window of text.

    Parameters
    ----------
    contender, family : str
        See :class:`~polarquant_nb.evaluate.Contender`; both ``'exact'`` for the exact cache.
    window : int
        Which window, from 0.
    bits_per_value : float
        See :class:`~polarquant_nb.evaluate.CompressedCache`.
    nbytes : int
        Likewise.
    ratio : float
        Likewise.
    kl, top1, perplexity : float
        See :class:`~polarquant_nb.evaluate.Score`.
    tokens : int
        Likewise.
    attention_errors : tuple of float
        Of each layer; see :meth:`~polarquant_nb.attention_error.Recording.errors`.
    """

    contender: str
    family: str
    window: int
    bits_per_value: float
    nbytes: int
    ratio: float
    kl: float
    top1: float
    perplexity: float
    tokens: int
    attention_errors: tuple[float, ...]


@dataclass(frozen=True)
class Summary:
    """A contender over several windows: means, and the standard errors of these over windows.

    Windows count, not tokens: neighbouring tokens depend on each other.  One window has no
    standard error (None).

    Parameters
    ----------
    contender, family : str
        See :class:`Judgement`.
    windows, tokens : int
        Windows, and tokens scored in all of them.
    bits_per_value, nbytes, ratio : float
        Means.
    kl, kl_stderr, top1, top1_stderr : float
        Means and standard errors.
    perplexity : float
        Of all windows together.
    attention_error, attention_error_stderr : float
        Of the mean over layers.
    attention_errors : tuple of float
        Of each layer, means over windows.
    """

    contender: str
    family: str
    windows: int
    tokens: int
    bits_per_value: float
    nbytes: float
    ratio: float
    kl: float
    kl_stderr: float | None
    top1: float
    top1_stderr: float | None
    perplexity: float
    attention_error: float
    attention_error_stderr: float | None
    attention_errors: tuple[float, ...]


def judge(
    model: Any,
    windows: Sequence[Sequence[int]],
    tokens: int,
    contenders: Sequence[Contender],
    *,
    skip: Container[tuple[str, int]] = (),
) -> Iterator[Judgement]:
    """Judge caches window by window, the exact one first.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    windows : sequence of sequences of int
        Token ids, for instance from ``polarquant_nb.models.token_windows``.
    tokens : int
        Length of the context, which is compressed.  The tokens after it are fed against the
        compressed cache, and what is predicted is the token after each; so a window holds at least
        ``tokens + 2``.
    contenders : sequence of Contender
        What to judge beside the exact cache.
    skip : container of (str, int)
        Names of contenders and windows to leave out, as they are known already.

    Yields
    ------
    Judgement
        One at a time, as soon as it is there.
    """
    import torch

    for window, token_ids in enumerate(windows):
        wanted = [one for one in (EXACT, *contenders) if (one.name, window) not in skip]
        if not wanted:
            continue
        ids = torch.tensor([token_ids])
        fed, targets = ids[:, tokens:-1], ids[:, tokens + 1 :]
        cache = prefill(model, ids[:, :tokens])
        with record_attention(model) as recording:
            reference = score(model, cache, fed)
        for one in wanted:
            compressed = one.compress(cache)
            log_probs = reference if one is EXACT else score(model, compressed.cache, fed)
            result = compare(log_probs, reference, targets)
            yield Judgement(
                contender=one.name,
                family=one.family,
                window=window,
                bits_per_value=compressed.bits_per_value,
                nbytes=compressed.nbytes,
                ratio=compressed.ratio,
                kl=result.kl,
                top1=result.top1,
                perplexity=result.perplexity,
                tokens=result.tokens,
                attention_errors=recording.errors(compressed.cache),
            )


def summarise(judgements: Sequence[Judgement]) -> list[Summary]:
    """Means over windows, and their standard errors.

    Parameters
    ----------
    judgements : sequence of Judgement
        Of any contenders, in any order.

    Returns
    -------
    list of Summary
        One for each contender, in the order in which they appear first.
    """
    by_contender: dict[str, list[Judgement]] = {}
    for one in judgements:
        by_contender.setdefault(one.contender, []).append(one)
    return [_summary(found) for found in by_contender.values()]


def _summary(found: Sequence[Judgement]) -> Summary:
    kl, top1 = [one.kl for one in found], [one.top1 for one in found]
    attention = [fmean(one.attention_errors) for one in found]
    layers = zip(*(one.attention_errors for one in found), strict=True)
    return Summary(
        contender=found[0].contender,
        family=found[0].family,
        windows=len(found),
        tokens=sum(one.tokens for one in found),
        bits_per_value=fmean(one.bits_per_value for one in found),
        nbytes=fmean(one.nbytes for one in found),
        ratio=fmean(one.ratio for one in found),
        kl=fmean(kl),
        kl_stderr=_stderr(kl),
        top1=fmean(top1),
        top1_stderr=_stderr(top1),
        # as many tokens in each window
        perplexity=exp(fmean(log(one.perplexity) for one in found)),
        attention_error=fmean(attention),
        attention_error_stderr=_stderr(attention),
        attention_errors=tuple(map(fmean, layers)),
    )


def _stderr(values: Sequence[float]) -> float | None:
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None
