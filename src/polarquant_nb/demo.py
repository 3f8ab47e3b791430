"""The demo: a real model on compressed caches of every preset, judged against the exact one.

All that is scored and said comes from attention on the codes, of a
:class:`polarquant_nb.hf.PolarCache`.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from polarquant_nb.budgets import DEFAULT_PRESET, preset
from polarquant_nb.demo_output import draw_angles, format_result
from polarquant_nb.formats import FormatPair
from polarquant_nb.models import (
    LoadedModel,
    announce_loading,
    load_model,
    load_text,
    require,
    token_window,
)
from polarquant_nb.outputs import check_writable, write_json
from polarquant_nb.threads import get_num_threads, set_num_threads

__all__ = ["DemoError", "run"]

_SINKS = (4, 0)  # of the two tables
_RECENT = 64
_CONTINUATION = 40  # tokens
_REPEATS = 5  # the fastest of several encodings is reported


class DemoError(ValueError):
    """The demo cannot run with these arguments."""


def run(
    *,
    presets: Sequence[str],
    tokens: int = 2048,
    score_tokens: int = 256,
    seed: int = 0,
    threads: int | None = None,
    text: str | None = None,
    model: str | None = None,
    png: str = "polarquant-demo.png",
    json: str | None = None,
) -> dict[str, Any]:
    """Run the demo: print tables and continuations, write a figure and the numbers.

    Parameters
    ----------
    presets : sequence of str
        Names of presets.
    tokens, score_tokens : int
        Length of the context, and tokens scored after it.
    seed : int
        Of the rotation and of the text window.
    threads : int, optional
        Threads of the kernels and of torch.
    text, model : str, optional
        Paths; see :mod:`polarquant_nb.models` for the defaults.
    png, json : str
        Files to write; both appear complete or not at all.

    Returns
    -------
    dict
        What the JSON file holds.

    Raises
    ------
    DemoError
        If the text is too short, the context too long for the model, its heads are not supported,
        or a file cannot be written.
    UnavailableError
        If a package, the model or the text is missing.
    """
    started = time.perf_counter()
    try:
        check_writable(png, json)
    except OSError as error:
        raise DemoError(str(error)) from error
    require("torch", "transformers", "matplotlib", "tqdm")
    content, text_source = load_text(text)

    import torch

    from polarquant_nb import evaluate, hf, info

    if threads is not None:
        set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    loaded, window = _load(model, content, tokens, score_tokens, seed)
    ids = torch.tensor([window])
    exact = evaluate.prefill(loaded.model, ids[:, :tokens], progress=True)
    index, layer = _middle_layer(loaded.model, exact)
    pairs = {name: _formats(name, layer, seed) for name in presets}
    try:
        hf.enable(loaded.model)
        kernel_seconds = _warm_up(loaded.model, exact, ids[:, tokens:], pairs)
        rows, continuations, reported = _measure(loaded, exact, ids, tokens, pairs)
    except ValueError as error:
        raise DemoError(f"the model is not supported: {error}") from error
    finally:
        hf.disable(loaded.model)
    draw_angles(png, layer.keys, index, seed)
    result = {
        "model": loaded.source,
        "text": text_source,
        "tokens": tokens,
        "score_tokens": score_tokens,
        "seed": seed,
        "sinks": _SINKS,
        "recent": _RECENT,
        "layers": len(exact.layers),
        "num_kv_heads": layer.keys.shape[1],
        "head_dim": layer.keys.shape[-1],
        "formats": {name: asdict(pair) for name, pair in pairs.items()},
        "rows": rows,
        "context_end": loaded.tokenizer.decode(window[tokens - 24 : tokens + 1]),
        "continuations": continuations,
        "report": reported,
        "repeats": _REPEATS,
        "kernel_seconds": kernel_seconds,
        "total_seconds": time.perf_counter() - started,
        "peak_memory_nbytes": _peak_memory(),
        "info": info.report(),
    }
    print(f"\n{format_result(result)}\nFigure: {png}")
    if json is not None:
        write_json(json, result)
        print(f"Numbers: {json}")
    return result


def _load(
    model: str | None, text: str, tokens: int, score_tokens: int, seed: int
) -> tuple[LoadedModel, list[int]]:
    """The model, and the window of the text: context, scored tokens, and one more."""
    announce_loading()
    loaded = load_model(model)
    context = getattr(loaded.model.config, "max_position_embeddings", None) or sys.maxsize
    if tokens > context:
        raise DemoError(f"--tokens is {tokens}; the model's context is {context} tokens")
    if tokens + score_tokens > context:
        print(
            f"Note: scored tokens lie beyond the model's context of {context} tokens; perplexity "
            "suffers, in every row alike",
            file=sys.stderr,
        )
    try:
        window = token_window(text, loaded.tokenizer, tokens + score_tokens + 1, seed=seed)
    except ValueError as error:
        raise DemoError(
            f"{error} (--tokens + --score-tokens + 1): give a longer --text or fewer --tokens"
        ) from error
    return loaded, window


def _middle_layer(model: Any, exact: Any) -> tuple[int, Any]:
    """The layer whose keys are drawn, of those that are compressed."""
    from polarquant_nb.hf import PolarCache

    try:
        found = sorted(PolarCache(model.config).polar_layers)
    except ValueError as error:
        raise DemoError(f"the model is not supported: {error}") from error
    index = found[len(found) // 2]
    return index, exact.layers[index]


def _formats(name: str, layer: Any, seed: int) -> FormatPair:
    try:
        pair = preset(name, layer.keys.shape[-1], value_head_dim=layer.values.shape[-1])
    except ValueError as error:
        raise DemoError(f"the model's keys and values are not supported: {error}") from error
    return FormatPair(replace(pair.keys, seed=seed), replace(pair.values, seed=seed))


def _compressed(model: Any, exact: Any, pair: FormatPair, sink: int) -> Any:
    """A PolarCache of what an exact cache holds."""
    from polarquant_nb.hf import PolarCache

    return PolarCache(model.config, pair, sink=sink, recent=_RECENT).copy_from(exact)


def _warm_up(model: Any, exact: Any, ids: Any, pairs: Mapping[str, FormatPair]) -> float:
    """Have kernels compiled, or read from Numba's cache, before anything is timed; seconds."""
    from tqdm.auto import tqdm

    from polarquant_nb.evaluate import greedy

    started = time.perf_counter()
    for pair in tqdm(pairs.values(), desc="kernels", unit="preset"):
        greedy(model, _compressed(model, exact, pair, _SINKS[0]), ids[:, :1], 1)
    return time.perf_counter() - started


def _measure(
    loaded: LoadedModel, exact: Any, ids: Any, tokens: int, pairs: Mapping[str, FormatPair]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[str, Any]]:
    """Rows of both tables, the continuations, and the report of one cache."""
    from tqdm.auto import tqdm

    from polarquant_nb.evaluate import compare, exact_nbytes, score

    model, fed, targets = loaded.model, ids[:, tokens:-1], ids[:, tokens + 1 :]
    rows: list[dict[str, Any]] = []
    continuations: list[dict[str, Any]] = []
    reports: dict[str, str] = {}

    def continue_with(name: str, cache: Any) -> None:
        produced = _generate(model, cache, ids[:, : tokens + 1])
        first = continuations[0]["tokens"] if continuations else produced
        differing = (i for i in range(len(first)) if first[i] != produced[i])
        continuations.append(
            {
                "preset": name,
                "tokens": produced,
                "text": loaded.tokenizer.decode(produced),
                "same_as_exact": next(differing, len(first)),
            }
        )

    with tqdm(total=1 + len(_SINKS) * len(pairs), desc="presets", unit="cache") as bar:
        reference = score(model, exact, fed)
        size = {"bits_per_value": 16.0, "nbytes": exact_nbytes(exact), "ratio": 1.0}
        rows.append({"preset": "exact", **size, **asdict(compare(reference, reference, targets))})
        continue_with("exact", copy.deepcopy(exact))
        bar.update()
        for sink in _SINKS:
            for name, pair in pairs.items():
                cache, seconds = _timed(model, exact, pair, sink)
                held = cache.report()
                rows.append(
                    {
                        "preset": name,
                        "sink": sink,
                        "recent": _RECENT,
                        "bits_per_value": pair.bits_per_value,
                        "nbytes": held.nbytes,
                        "ratio": 1 / held.ratio,
                        **asdict(compare(score(model, cache, fed), reference, targets)),
                        "encode_tokens_per_second": tokens / seconds,
                    }
                )
                if sink:
                    continue_with(name, cache)
                    reports[name] = str(cache.report())
                bar.update()
    reported = DEFAULT_PRESET if DEFAULT_PRESET in reports else next(reversed(reports))
    return rows, continuations, {"preset": reported, "table": reports[reported]}


def _timed(model: Any, exact: Any, pair: FormatPair, sink: int) -> tuple[Any, float]:
    """A compressed cache, and the seconds that making it took: the fastest of several."""
    fastest = float("inf")
    for _ in range(_REPEATS):
        started = time.perf_counter()
        cache = _compressed(model, exact, pair, sink)
        fastest = min(fastest, time.perf_counter() - started)
    return cache, fastest


def _generate(model: Any, cache: Any, ids: Any) -> list[int]:
    """A greedy continuation of ``ids``, all but the last of which the cache holds."""
    import torch

    from polarquant_nb.hf.versions import CACHE_ARGUMENT

    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=_CONTINUATION,
        do_sample=False,
        eos_token_id=None,
        **{CACHE_ARGUMENT: cache},
    )
    produced: list[int] = out[0, ids.shape[1] :].tolist()
    return produced


def _peak_memory() -> int | None:
    """Most memory that the process has held, bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
