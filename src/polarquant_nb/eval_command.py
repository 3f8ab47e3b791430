"""The evaluation of a model's cache: several windows of text, needles, any contenders.

``polarquant-nb eval`` compares the presets; ``benchmarks/quality.py`` compares them with others.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from polarquant_nb.attention_error import record_attention
from polarquant_nb.calibration import Calibration
from polarquant_nb.contenders import Contender, compress
from polarquant_nb.eval_output import draw_quality, format_result
from polarquant_nb.evaluate import prefill, score
from polarquant_nb.models import (
    LoadedModel,
    announce_loading,
    load_model,
    load_text,
    require,
    token_windows,
)
from polarquant_nb.needle import Answer, Needle, hide, search, tally
from polarquant_nb.outputs import check_writable, write_json
from polarquant_nb.quality import Judgement, judge, summarise
from polarquant_nb.threads import get_num_threads, set_num_threads

__all__ = [
    "EvalError",
    "Settings",
    "Task",
    "calibration_contenders",
    "measure",
    "preset_contenders",
    "report",
    "run",
]


class EvalError(ValueError):
    """The evaluation cannot run with these arguments."""


@dataclass(frozen=True)
class Settings:
    """What is measured, and on how much of a text.

    Parameters
    ----------
    tokens, score_tokens : int
        Length of the context, and tokens scored after it.  By default, 2,048 tokens are compressed
        beside those that stay exact.
    windows : int
        Windows of the text, each from another part of it.
    sink, recent : int
        First and last tokens of a context that stay exact.
    needle_lengths : tuple of int
        Tokens of the contexts that needles are hidden in; none for no needles.
    needle_depths : tuple of float
        Where they are hidden, 0 to 1; see :func:`polarquant_nb.needle.hide`.
    needles : int
        Needles for each length and depth.
    seed : int
        Of rotations, windows and needles.

    Raises
    ------
    EvalError
        If the context leaves nothing to compress.
    """

    tokens: int = 2116
    score_tokens: int = 256
    windows: int = 4
    sink: int = 4
    recent: int = 64
    needle_lengths: tuple[int, ...] = (1024, 2048)
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens <= self.sink + self.recent:
            raise EvalError(
                f"--tokens is {self.tokens}; with --sink {self.sink} and --recent {self.recent} it "
                f"must be more than {self.sink + self.recent}"
            )


@dataclass(frozen=True)
class Task:
    """A model, windows of a text, and needles in it.

    Parameters
    ----------
    settings : Settings
        What they were made by.
    loaded : LoadedModel
        Model and tokenizer.
    text_source : str
        Where the text came from.
    windows : tuple of list of int
        Token ids: context, scored tokens, and one more.
    needles : tuple of Needle
        By length, depth and seed.
    """

    settings: Settings
    loaded: LoadedModel
    text_source: str
    windows: tuple[list[int], ...]
    needles: tuple[Needle, ...]

    @staticmethod
    def load(settings: Settings, model: str | None = None, text: str | None = None) -> Task:
        """Load a model and a text, and cut windows and haystacks.

        Parameters
        ----------
        settings : Settings
            What is measured.
        model, text : str, optional
            Paths; see :mod:`polarquant_nb.models` for the defaults.

        Returns
        -------
        Task
            Ready to be measured.

        Raises
        ------
        EvalError
            If a context is too long for the model or leaves no room for a needle, or the text is
            too short.
        UnavailableError
            If a package, the model or the text is missing.
        """
        content, text_source = load_text(text)
        announce_loading()
        loaded = load_model(model)
        limit = getattr(loaded.model.config, "max_position_embeddings", None) or sys.maxsize
        lengths = {"--tokens": settings.tokens, "--needle": max(settings.needle_lengths, default=0)}
        for option, length in lengths.items():
            if length > limit:
                raise EvalError(f"{option} is {length}; the model's context is {limit} tokens")
        try:
            windows = token_windows(
                content,
                loaded.tokenizer,
                settings.tokens + settings.score_tokens + 1,
                settings.windows,
                seed=settings.seed,
            )
        except ValueError as error:
            raise EvalError(
                f"{error} (--tokens + --score-tokens + 1): give a longer --text, or fewer --tokens "
                "or --windows"
            ) from error
        try:
            needles = [
                hide(
                    loaded.tokenizer,
                    content,
                    length,
                    depth,
                    seed=settings.seed + i,
                    sink=settings.sink,
                    recent=settings.recent,
                )
                for length, depth, i in product(
                    settings.needle_lengths, settings.needle_depths, range(settings.needles)
                )
            ]
        except ValueError as error:
            raise EvalError(f"--needle: {error}") from error
        return Task(settings, loaded, text_source, tuple(windows), tuple(needles))


def preset_contenders(presets: Sequence[str], settings: Settings) -> list[Contender]:
    """Presets as contenders.

    Parameters
    ----------
    presets : sequence of str
        Their names.
    settings : Settings
        Sinks, recent tokens and the rotation's seed.

    Returns
    -------
    list of Contender
        In this order; the published setting is a family of its own.
    """
    options = {"sink": settings.sink, "recent": settings.recent, "seed": settings.seed}
    return [
        Contender(
            name,
            partial(compress, formats=name, **options),
            "paper" if name == "paper" else "polarquant_nb",
        )
        for name in presets
    ]


def calibration_contenders(
    paths: Sequence[str], bits: Sequence[float], settings: Settings
) -> list[Contender]:
    """Calibrations as contenders, named by their files and budgets.

    Parameters
    ----------
    paths : sequence of str
        Files.
    bits : sequence of float
        Budgets; none for each file's own.
    settings : Settings
        Sinks, recent tokens and the rotation's seed.

    Returns
    -------
    list of Contender
        For each file all budgets.

    Raises
    ------
    EvalError
        If a file cannot be read or holds no calibration, a budget is too small, or two are called
        the same.
    """
    options = {"sink": settings.sink, "recent": settings.recent, "seed": settings.seed}
    found: dict[str, Contender] = {}
    for path in paths:
        stem = Path(path).stem
        try:
            own = Calibration.load(path)
            chosen = [own.with_bits(budget) for budget in bits] or [own]
        except (OSError, ValueError) as error:
            raise EvalError(f"--calibration: {error}") from error
        for one in chosen:
            name = f"{stem} {one.bits:g}"
            if name in found:
                raise EvalError(f"--calibration: two contenders are called {name}")
            found[name] = Contender(name, partial(compress, formats=one, **options), stem)
    return list(found.values())


def measure(
    task: Task,
    contenders: Sequence[Contender],
    judgements: list[Judgement],
    answers: list[Answer],
    save: Callable[[], object] = lambda: None,
) -> None:
    """Measure all that is not measured yet, with progress bars.

    Parameters
    ----------
    task : Task
        Model, windows and needles.
    contenders : sequence of Contender
        What to measure beside the exact cache.
    judgements, answers : list of Judgement, list of Answer
        What there is; what is new is appended.
    save : callable
        Called after each.
    """
    from tqdm.auto import tqdm

    model, tokenizer = task.loaded.model, task.loaded.tokenizer
    known = {(one.contender, one.window) for one in judgements}
    new = judge(model, task.windows, task.settings.tokens, contenders, skip=known)
    total = len(task.windows) * (1 + len(contenders))
    with tqdm(total=total, initial=len(known), desc="windows", unit="cache") as bar:
        for one in new:
            judgements.append(one)
            save()
            bar.update()
    if not task.needles:
        return
    found = {(one.contender, one.length, one.depth, one.seed) for one in answers}
    total = len(task.needles) * (1 + len(contenders))
    with tqdm(total=total, initial=len(found), desc="needles", unit="cache") as bar:
        for answer in search(model, task.needles, tokenizer, contenders, skip=found):
            answers.append(answer)
            save()
            bar.update()


def report(
    task: Task, judgements: Sequence[Judgement], answers: Sequence[Answer]
) -> dict[str, Any]:
    """All numbers, as JSON holds them.

    Parameters
    ----------
    task : Task
        What was measured.
    judgements, answers : sequence of Judgement, sequence of Answer
        From :func:`measure`.

    Returns
    -------
    dict
        ``rows``, ``needle_rows``: what is given; ``summary``, ``needle_summary``: those of
        :class:`~polarquant_nb.quality.Summary` and :class:`~polarquant_nb.needle.Tally`; settings;
        model; text; versions.
    """
    from polarquant_nb import info

    return {
        "model": task.loaded.source,
        "text": task.text_source,
        "settings": asdict(task.settings),
        "summary": [asdict(one) for one in summarise(judgements)],
        "needle_summary": [asdict(one) for one in tally(answers)],
        "rows": [asdict(one) for one in judgements],
        "needle_rows": [asdict(one) for one in answers],
        "info": info.report(),
    }


def run(
    *,
    presets: Sequence[str],
    calibrations: Sequence[str] = (),
    bits: Sequence[float] = (),
    threads: int | None = None,
    text: str | None = None,
    model: str | None = None,
    png: str | None = None,
    json: str | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Run the evaluation: print tables, write a figure and the numbers.

    Parameters
    ----------
    presets : sequence of str
        Names of presets.
    calibrations : sequence of str
        Files of calibrations of the model.
    bits : sequence of float
        Their budgets; none for each file's own.
    threads : int, optional
        Threads of the kernels and of torch.
    text, model : str, optional
        Paths; see :mod:`polarquant_nb.models` for the defaults.
    png, json : str, optional
        Files to write; both appear complete or not at all.
    **settings
        See :class:`Settings`.

    Returns
    -------
    dict
        What the JSON file holds: :func:`report`, and the seconds that all took.

    Raises
    ------
    EvalError
        If a context leaves nothing to compress or is too long for the model, the text is too short,
        the model's heads are not supported, a calibration is not the model's, or a file cannot be
        read or written.
    UnavailableError
        If a package, the model or the text is missing.
    """
    started = time.perf_counter()
    chosen = Settings(**settings)
    try:
        check_writable(png, json)
    except OSError as error:
        raise EvalError(str(error)) from error
    if bits and not calibrations:
        raise EvalError("--bits is given; it is the budget of a --calibration")
    calibrated = calibration_contenders(calibrations, bits, chosen)
    require("torch", "transformers", "tqdm", *(["matplotlib"] if png else []))

    import torch

    if threads is not None:
        set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    task = Task.load(chosen, model, text)
    contenders = preset_contenders(presets, chosen) + calibrated
    _try_out(task, contenders)
    judgements: list[Judgement] = []
    answers: list[Answer] = []
    measure(task, contenders, judgements, answers)
    seconds = time.perf_counter() - started
    result = report(task, judgements, answers) | {"total_seconds": seconds}
    print(f"\n{format_result(result)}")
    if png is not None:
        draw_quality(png, result)
        print(f"Figure: {png}")
    if json is not None:
        write_json(json, result)
        print(f"Numbers: {json}")
    return result


def _try_out(task: Task, contenders: Sequence[Contender]) -> None:
    """Find out what the model does not support on a token, and have kernels compiled meanwhile."""
    import torch
    from tqdm.auto import tqdm

    settings = task.settings
    length = settings.sink + settings.recent + 1
    model, ids = task.loaded.model, torch.tensor([task.windows[0][:length]])
    cache = prefill(model, ids)
    try:
        for one in tqdm(contenders, desc="kernels", unit="cache"):
            one.compress(cache)
        with record_attention(model) as recording:
            score(model, cache, ids)
        recording.errors(cache)
    except ValueError as error:
        raise EvalError(f"the model is not supported: {error}") from error
