"""Needle in a haystack: a made-up fact in a long text, asked for against the compressed context.

The context, needle included, is read exactly and compressed; only then the question is fed.  What
the answer needs must so have survived in the compressed keys and values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from polarquant_nb.contenders import EXACT, Contender
from polarquant_nb.evaluate import greedy, prefill, score
from polarquant_nb.models import token_window

__all__ = ["Answer", "Needle", "Tally", "ask", "hide", "search", "tally"]

_INTRODUCTION = "Read the following text and remember the special magic number hidden in it.\n\n"
_NEEDLE = " The special magic number for {city} is {number}."
_QUESTION = (
    "\n\nQuestion: What is the special magic number for {city} mentioned in the text above?"
    "\nAnswer: The special magic number for {city} is"
)
_CITIES = (
    "Accra", "Bergen", "Bogota", "Dakar", "Geneva", "Havana", "Kyoto", "Lima", "Malmo", "Osaka",
    "Porto", "Riga", "Sofia", "Tunis", "Turin", "Zagreb",
)  # fmt: skip
_DIGITS = 5
_NEAR = 100
"""Tokens from where a needle should lie to where a sentence may end for it."""

_SLACK = 4
"""Tokens that a greedy answer may be longer than the right one."""


@dataclass(frozen=True)
class Needle:
    """A context with a needle in it, the question, and the answer.

    Parameters
    ----------
    length : int
        Tokens of the context.
    depth : float
        Where the needle lies: 0 at the beginning of what is compressed, 1 at its end.
    seed : int
        Decides on text, city and number.
    context, question, answer : tuple of int
        Token ids.
    number : str
        What is looked for.
    """

    length: int
    depth: float
    seed: int
    context: tuple[int, ...]
    question: tuple[int, ...]
    answer: tuple[int, ...]
    number: str


@dataclass(frozen=True)
class Answer:
    """What a contender's cache made of a needle.

    Parameters
    ----------
    contender, family : str
        See :class:`~polarquant_nb.evaluate.Contender`.
    length : int
        See :class:`Needle`.
    depth : float
        Likewise.
    seed : int
        Likewise.
    hit : bool
        The greedy answer contains the number.
    nll : float
        Negative log-likelihood of the right answer, nats per token of it.
    said : str
        The greedy answer.
    """

    contender: str
    family: str
    length: int
    depth: float
    seed: int
    hit: bool
    nll: float
    said: str


@dataclass(frozen=True)
class Tally:
    """A contender's answers at one context length.

    Parameters
    ----------
    contender : str
        Its name.
    length : int
        Tokens of the context.
    hits, needles : int
        Answers that were right, and all.
    nll : float
        Mean of the answers' NLL, nats per token.
    """

    contender: str
    length: int
    hits: int
    needles: int
    nll: float


def hide(
    tokenizer: Any,
    text: str,
    length: int,
    depth: float,
    *,
    seed: int = 0,
    sink: int = 4,
    recent: int = 64,
) -> Needle:
    """Hide a needle in a text.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Tokenizer of the model that is asked.
    text : str
        The haystack is cut from it.
    length : int
        Tokens of the context.
    depth : float
        Where the needle goes, 0 to 1: to the nearest end of a sentence, if one is near.
    seed : int
        Decides on the part of the text, the city and the number; it is the same for all depths.
    sink, recent : int
        First and last tokens that stay exact.  The needle keeps out of them, where finding it would
        prove nothing.

    Returns
    -------
    Needle
        Context, question and answer.

    Raises
    ------
    ValueError
        If ``depth`` is not between 0 and 1, ``length`` leaves no room, or the text is too short.
    """
    if not 0 <= depth <= 1:
        raise ValueError(f"depth is {depth}; it must be between 0 and 1")
    rng = np.random.default_rng([seed, length])
    words = {
        "city": str(rng.choice(_CITIES)),
        "number": "".join(map(str, rng.integers(1, 10, _DIGITS))),
    }

    def tokens(part: str) -> tuple[int, ...]:
        return tuple(tokenizer(part, add_special_tokens=False)["input_ids"])

    def ends_sentence(ids: list[int]) -> bool:
        return str(tokenizer.decode(ids))[-1:] in ("", ".")  # "": the introduction

    introduction = tuple(tokenizer(_INTRODUCTION)["input_ids"])
    needle = tokens(_NEEDLE.format(**words))
    room = length - len(introduction) - len(needle)
    first, last = max(0, sink - len(introduction)), room - recent
    if last < first:
        raise ValueError(
            f"length is {length}; introduction and needle, clear of sink={sink} and "
            f"recent={recent} tokens, take {length + first - last}"
        )
    # its first token may be the one that starts every text
    straw = token_window(text, tokenizer, room + 1, seed=int(rng.integers(2**31)))[1:]
    place = round(first + depth * (last - first))
    near = range(max(first, place - _NEAR), min(last, place + _NEAR) + 1)
    ends = [i for i in near if ends_sentence(straw[i - 1 : i])]
    cut = min(ends, key=lambda i: abs(i - place), default=place)
    question = _QUESTION.format(**words)
    asked = tokens(question)
    return Needle(
        length=length,
        depth=depth,
        seed=seed,
        context=(*introduction, *straw[:cut], *needle, *straw[cut:]),
        question=asked,
        answer=tokens(f"{question} {words['number']}")[
            len(asked) :
        ],  # as it continues the question
        number=words["number"],
    )


def ask(model: Any, tokenizer: Any, cache: Any, needle: Needle) -> tuple[bool, float, str]:
    """Ask for a needle, given a cache of its context.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    cache : transformers.Cache, or callable that returns one
        Of ``needle.context``, as :func:`polarquant_nb.evaluate.score` takes it.
    needle : Needle
        From :func:`hide`.

    Returns
    -------
    hit : bool
        The greedy answer contains the number.
    nll : float
        Negative log-likelihood of the right answer, nats per token of it.
    said : str
        The greedy answer.
    """
    import torch

    answer = torch.tensor(needle.answer)
    ids = torch.tensor([needle.question + needle.answer[:-1]])
    log_probs = score(model, cache, ids)[0, -len(answer) :]
    nll = -log_probs.gather(-1, answer[:, None]).double().mean().item()
    # If each token of the answer is the most likely one after those before it, greedy decoding
    # says the answer: no need to run it.
    if torch.equal(log_probs.argmax(-1), answer):
        return True, nll, str(tokenizer.decode(list(needle.answer)))
    produced = greedy(model, cache, torch.tensor([needle.question]), len(answer) + _SLACK)[0]
    said = str(tokenizer.decode(produced.tolist()))
    return needle.number in said, nll, said


def search(
    model: Any,
    needles: Iterable[Needle],
    tokenizer: Any,
    contenders: Sequence[Contender],
    *,
    skip: Container[tuple[str, int, float, int]] = (),
) -> Iterator[Answer]:
    """Ask for needles against each contender's cache, the exact one first.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model.
    needles : iterable of Needle
        From :func:`hide`.
    tokenizer : transformers.PreTrainedTokenizerBase
        The model's tokenizer.
    contenders : sequence of Contender
        What to ask beside the exact cache.
    skip : container of (str, int, float, int)
        Contender, length, depth and seed of what is known already.

    Yields
    ------
    Answer
        One at a time, as soon as it is there.
    """
    import torch

    for needle in needles:
        place = needle.length, needle.depth, needle.seed
        wanted = [one for one in (EXACT, *contenders) if (one.name, *place) not in skip]
        if not wanted:
            continue
        cache = prefill(model, torch.tensor([needle.context]))
        for one in wanted:
            found = ask(model, tokenizer, one.compress(cache).cache, needle)
            yield Answer(one.name, one.family, *place, *found)


def tally(answers: Sequence[Answer]) -> list[Tally]:
    """Count hits and average NLLs, over depths and seeds.

    Parameters
    ----------
    answers : sequence of Answer
        Of any contenders, in any order.

    Returns
    -------
    list of Tally
        One for each contender and length, in the order in which contenders appear first.
    """
    groups: dict[str, dict[int, list[Answer]]] = {}
    for one in answers:
        groups.setdefault(one.contender, {}).setdefault(one.length, []).append(one)
    return [
        Tally(
            contender=contender,
            length=length,
            hits=sum(one.hit for one in found),
            needles=len(found),
            nll=fmean(one.nll for one in found),
        )
        for contender, lengths in groups.items()
        for length, found in sorted(lengths.items())
    ]
