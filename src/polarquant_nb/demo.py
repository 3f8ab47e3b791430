"""The demo: a real model's cache, compressed with every preset and judged against the exact one."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from polarquant_nb.budgets import preset
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

    from polarquant_nb import evaluate, info

    if threads is not None:
        set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    loaded, window = _load(model, content, tokens, score_tokens, seed)
    ids = torch.tensor([window])
    cache = evaluate.prefill(loaded.model, ids[:, :tokens], progress=True)
    index = _middle_layer(cache)
    layer = cache.layers[index]
    pairs = {name: _formats(name, layer, seed) for name in presets}
    kernel_seconds = _warm_up(layer, pairs)
    rows, continuations = _measure(loaded, cache, ids, tokens, pairs)
    draw_angles(png, layer.keys, index, seed)
    result = {
        "model": loaded.source,
        "text": text_source,
        "tokens": tokens,
        "score_tokens": score_tokens,
        "seed": seed,
        "sinks": _SINKS,
        "recent": _RECENT,
        "layers": len(cache.layers),
        "num_kv_heads": layer.keys.shape[1],
        "head_dim": layer.keys.shape[-1],
        "formats": {name: asdict(pair) for name, pair in pairs.items()},
        "whole_page_bits_per_value": {name: pair.bits_per_value for name, pair in pairs.items()},
        "rows": rows,
        "context_end": loaded.tokenizer.decode(window[tokens - 24 : tokens + 1]),
        "continuations": continuations,
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


def _middle_layer(cache: Any) -> int:
    """Index of the layer whose keys are drawn; layers without attention have none."""
    found = [i for i, layer in enumerate(cache.layers) if getattr(layer, "keys", None) is not None]
    if not found:
        raise DemoError("the model has no attention layer: there is nothing to compress")
    return found[len(found) // 2]


def _formats(name: str, layer: Any, seed: int) -> FormatPair:
    try:
        pair = preset(name, layer.keys.shape[-1], value_head_dim=layer.values.shape[-1])
    except ValueError as error:
        raise DemoError(f"the model's keys and values are not supported: {error}") from error
    return FormatPair(replace(pair.keys, seed=seed), replace(pair.values, seed=seed))


def _warm_up(layer: Any, pairs: Mapping[str, FormatPair]) -> float:
    """Have kernels compiled, or read from Numba's cache, before anything is timed; seconds."""
    from tqdm.auto import tqdm

    from polarquant_nb.codec import encode

    started = time.perf_counter()
    for pair in tqdm(pairs.values(), desc="kernels", unit="preset"):
        for x, fmt in ((layer.keys, pair.keys), (layer.values, pair.values)):
            encode(x[..., :1, :], fmt).decode()
    return time.perf_counter() - started


def _measure(
    loaded: LoadedModel, cache: Any, ids: Any, tokens: int, pairs: Mapping[str, FormatPair]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of both tables, and the continuations."""
    from tqdm.auto import tqdm

    from polarquant_nb.evaluate import compare, compress, exact_nbytes, greedy, score

    fed, targets = ids[:, tokens:-1], ids[:, tokens + 1 :]
    rows: list[dict[str, Any]] = []
    continuations: list[dict[str, Any]] = []

    def continue_with(name: str, some_cache: Any) -> None:
        produced = greedy(loaded.model, some_cache, fed[:, :1], _CONTINUATION)[0].tolist()
        exact = continuations[0]["tokens"] if continuations else produced
        differing = (i for i in range(len(exact)) if exact[i] != produced[i])
        continuations.append(
            {
                "preset": name,
                "tokens": produced,
                "text": loaded.tokenizer.decode(produced),
                "same_as_exact": next(differing, len(exact)),
            }
        )

    with tqdm(total=1 + len(_SINKS) * len(pairs), desc="presets", unit="cache") as bar:
        reference = score(loaded.model, cache, fed)
        size = {"bits_per_value": 16.0, "nbytes": exact_nbytes(cache), "ratio": 1.0}
        rows.append({"preset": "exact", **size, **asdict(compare(reference, reference, targets))})
        continue_with("exact", cache)
        bar.update()
        for sink in _SINKS:
            for name, pair in pairs.items():
                compressed = compress(cache, pair, sink=sink, recent=_RECENT)
                seconds = min(
                    compress(cache, pair, sink=sink, recent=_RECENT).encode_seconds
                    for _ in range(_REPEATS)
                )
                judged = compare(score(loaded.model, compressed.cache, fed), reference, targets)
                rows.append(
                    {
                        "preset": name,
                        "sink": sink,
                        "recent": _RECENT,
                        "bits_per_value": compressed.bits_per_value,
                        "nbytes": compressed.nbytes,
                        "ratio": compressed.ratio,
                        **asdict(judged),
                        "encode_tokens_per_second": (tokens - sink - _RECENT) / seconds,
                    }
                )
                if sink:
                    continue_with(name, compressed.cache)
                bar.update()
    return rows, continuations


def _peak_memory() -> int | None:
    """Most memory that the process has held, bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
