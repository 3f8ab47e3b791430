"""The command ``generate``: continue a text on a compressed cache, and show what the cache held."""

from __future__ import annotations

import sys
import time
from typing import Any

from polarquant_nb.budgets import DEFAULT_PRESET
from polarquant_nb.calibration import Calibration
from polarquant_nb.models import announce_loading, load_model, load_text, require
from polarquant_nb.threads import get_num_threads, set_num_threads

__all__ = ["GenerateError", "run"]


class GenerateError(ValueError):
    """The command cannot run with these arguments."""


def run(
    *,
    prompt_file: str,
    preset: str = DEFAULT_PRESET,
    calibration: str | None = None,
    max_new_tokens: int = 64,
    threads: int | None = None,
    model: str | None = None,
) -> dict[str, Any]:
    """Print a greedy continuation as it comes, then the cache's report.

    Parameters
    ----------
    prompt_file : str
        UTF-8 text to continue, as it is.
    preset : str
        Name of a preset.
    calibration : str, optional
        File of a calibration of the model, in place of a preset.
    max_new_tokens : int
        Tokens at most; the model may end earlier.
    threads : int, optional
        Threads of the kernels and of torch.
    model : str, optional
        See :func:`polarquant_nb.models.load_model`.

    Returns
    -------
    dict
        ``prompt_tokens``, ``new_tokens``, ``text``, ``seconds`` to the first token and
        ``tokens_per_second`` after it, and the ``report``.

    Raises
    ------
    GenerateError
        If the prompt is empty or too long for the model, the model is not supported, or the
        calibration cannot be read or is not the model's.
    UnavailableError
        If a package, the model or the prompt is missing.
    """
    prompt, _ = load_text(prompt_file)
    measured = None
    if calibration is not None:
        try:
            measured = Calibration.load(calibration)
        except (OSError, ValueError) as error:
            raise GenerateError(f"--calibration: {error}") from error
    require("torch", "transformers")
    import torch

    from polarquant_nb.hf import PolarCache, enable
    from polarquant_nb.hf.versions import CACHE_ARGUMENT

    if threads is not None:
        set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    announce_loading()
    loaded = load_model(model)
    ids = torch.tensor([loaded.tokenizer(prompt, verbose=False)["input_ids"]], dtype=torch.long)
    _check_length(ids.shape[1], max_new_tokens, loaded.model.config)
    try:
        cache = PolarCache(loaded.model.config, measured or preset)
        enable(loaded.model)
    except ValueError as error:
        raise GenerateError(f"the model is not supported: {error}") from error
    streamer = _Streamer(loaded.tokenizer)
    print(f"Model: {loaded.source}\nPrompt: {ids.shape[1]} tokens of {prompt_file}\n", flush=True)
    started = time.perf_counter()
    out = loaded.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        **{CACHE_ARGUMENT: cache},
    )
    stopped = time.perf_counter()
    new = out.shape[1] - ids.shape[1]
    first = streamer.first_token or stopped
    rate = (new - 1) / (stopped - first) if new > 1 else float("nan")
    report = cache.report()
    print(f"\n{report}")
    print(f"{new} tokens: the first after {first - started:.1f} s, then {rate:.1f} a second")
    return {
        "prompt_tokens": ids.shape[1],
        "new_tokens": new,
        "text": streamer.text,
        "seconds": first - started,
        "tokens_per_second": rate,
        "report": report,
    }


class _Streamer:
    """Prints text as soon as no later token can change it.

    Parameters
    ----------
    tokenizer : transformers.PreTrainedTokenizerBase
        Of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.tokens: list[int] | None = None
        self.text = ""
        self.first_token: float | None = None

    def put(self, ids: Any) -> None:
        """Take the prompt at first, then new tokens.

        Parameters
        ----------
        ids : torch.Tensor of int64
            Tokens of one row.
        """
        if self.tokens is None:
            self.tokens = []
            return
        self.first_token = self.first_token or time.perf_counter()
        self.tokens += ids.flatten().tolist()
        self._show(self._decoded())

    def end(self) -> None:
        """Print what is left."""
        self._show(self._decoded(), is_last=True)
        print(flush=True)

    def _decoded(self) -> str:
        return str(self.tokenizer.decode(self.tokens or []))

    def _show(self, text: str, is_last: bool = False) -> None:
        if is_last or not text.endswith("\N{REPLACEMENT CHARACTER}"):  # half of a character
            print(text[len(self.text) :], end="", flush=True)
            self.text = text


def _check_length(prompt: int, new: int, config: Any) -> None:
    if not prompt:
        raise GenerateError("the prompt has no tokens")
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    if prompt + new > context:
        raise GenerateError(
            f"the prompt has {prompt} tokens, and {new} are to follow; the model's context is "
            f"{context} tokens"
        )
