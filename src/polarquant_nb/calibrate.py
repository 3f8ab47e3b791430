"""The command ``calibrate``: measure a model on a text, and write its calibration.

Key scales follow from the mean squares of queries and keys.  Then, with these scales, keys or
values of one layer at a time are coded, and what that does to the next tokens is measured.
"""

from __future__ import annotations

import hashlib
import json as json_module
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from polarquant_nb.calibration import Calibration, LayerCalibration
from polarquant_nb.formats import FormatPair, PolarFormat
from polarquant_nb.layer_bits import LayerNeeds, allot, chain, expected_kl
from polarquant_nb.models import (
    LoadedModel,
    announce_loading,
    load_model,
    load_text,
    require,
    token_windows,
)
from polarquant_nb.outputs import check_writable, write_json
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.scales import key_scales
from polarquant_nb.sensitivity import Coded, Moments, measure_kl, measure_moments
from polarquant_nb.threads import get_num_threads, set_num_threads

__all__ = ["CalibrateError", "Settings", "run"]

# Relative errors of the formats that are measured: in the middle of what layers are given, and
# at the coarse end, where KL grows faster than the error.
_ERRORS = (0.02, 0.27)

_DIGITS = 4  # of scales in files: their own uncertainty is far larger


class CalibrateError(ValueError):
    """The calibration cannot run with these arguments."""


@dataclass(frozen=True)
class Settings:
    """How a model is measured.

    Parameters
    ----------
    tokens, score_tokens : int
        Length of the context, and tokens fed after it, at which KL is measured.
    windows : int
        Windows of the text, each from another part of it.
    sink, recent : int
        First and last tokens of a context that stay exact.
    alpha : float
        Of :func:`polarquant_nb.key_scales`; 0 for no scales.
    seed : int
        Of rotations and windows.

    Raises
    ------
    CalibrateError
        If the context leaves nothing to compress.
    """

    tokens: int = 2116
    score_tokens: int = 256
    windows: int = 2
    sink: int = 4
    recent: int = 64
    alpha: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokens <= self.sink + self.recent:
            raise CalibrateError(
                f"--tokens is {self.tokens}; with --sink {self.sink} and --recent {self.recent} it "
                f"must be more than {self.sink + self.recent}"
            )


def run(
    *,
    text: str,
    out: str,
    bits: float,
    model: str | None = None,
    threads: int | None = None,
    **settings: Any,
) -> Calibration:
    """Measure, and write the calibration.

    What is measured is kept beside the file, in ``OUT.partial``, until all is done: a run that was
    interrupted goes on from there.

    Parameters
    ----------
    text : str
        UTF-8 text to measure on.
    out : str
        File to write.
    bits : float
        Budget: most bits per stored number.
    model : str, optional
        See :func:`polarquant_nb.models.load_model`.
    threads : int, optional
        Threads of the kernels and of torch.
    **settings
        See :class:`Settings`.

    Returns
    -------
    Calibration
        What was written.

    Raises
    ------
    CalibrateError
        If the text is too short, the context too long for the model, the model not supported, the
        budget too small, the file not writable, or what an interrupted run left was measured in
        another way.
    UnavailableError
        If a package, the model or the text is missing.
    """
    started = time.perf_counter()
    chosen = Settings(**settings)
    if not out.lower().endswith(".json"):
        raise CalibrateError(f"--out is {out}; its name must end in .json")
    partial = f"{out}.partial"
    try:
        check_writable(out, partial)
    except OSError as error:
        raise CalibrateError(str(error)) from error
    content, text_source = load_text(text)
    require("torch", "transformers", "tqdm")

    import torch

    if threads is not None:
        set_num_threads(threads)
    torch.set_num_threads(get_num_threads())
    announce_loading()
    loaded = load_model(model)
    windows = _windows(content, loaded, chosen)
    identity = {
        "settings": asdict(chosen),
        "model": loaded.source,
        # what the model reads, whatever file and tokenizer it came from
        "tokens": hashlib.sha256(json_module.dumps(windows).encode()).hexdigest(),
    }
    known = _read_partial(partial, identity)
    try:
        measured = _measure(loaded.model, windows, chosen, bits, known, partial, identity)
        calibration = Calibration(
            layers=measured,
            bits=bits,
            model=loaded.source,
            text=text_source,
            settings=asdict(chosen),
        ).with_bits(bits)
    except ValueError as error:
        raise CalibrateError(str(error)) from error
    calibration.save(out)
    Path(partial).unlink(missing_ok=True)
    print(f"\n{_table(calibration)}\n\n{time.perf_counter() - started:.0f} s.  Calibration: {out}")
    return calibration


def _windows(content: str, loaded: LoadedModel, settings: Settings) -> list[list[int]]:
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    length = settings.tokens + settings.score_tokens + 1
    if length - 1 > (limit or sys.maxsize):
        raise CalibrateError(
            f"--tokens and --score-tokens are {length - 1} together; the model's context is "
            f"{limit} tokens"
        )
    try:
        return token_windows(
            content, loaded.tokenizer, length, settings.windows, seed=settings.seed
        )
    except ValueError as error:
        raise CalibrateError(
            f"{error} (--tokens + --score-tokens + 1): give a longer --text, or fewer --tokens or "
            "--windows"
        ) from error


def _measure(
    model: Any,
    windows: Sequence[Sequence[int]],
    settings: Settings,
    bits: float,
    known: dict[str, Any],
    partial: str,
    identity: Mapping[str, Any],
) -> tuple[LayerCalibration | None, ...]:
    """Scales and KL of each layer; the formats are the smallest ones."""
    from tqdm.auto import tqdm
    from transformers import DynamicCache

    from polarquant_nb.hf.key_bias import key_biases

    def save() -> None:
        write_json(partial, {**identity, **known})

    biases = key_biases(model)
    if "moments" not in known:
        print("Reading the text", file=sys.stderr)
        found = measure_moments(model, windows, settings.tokens, sink=settings.sink, biases=biases)
        known["moments"] = {str(i): _moments_record(one) for i, one in found.items()}
        save()
    moments = {int(i): _read_moments(record) for i, record in known["moments"].items()}
    # a budget that is too small is refused before hours of measuring
    allot([_needs(one, [(1.0, 1.0)], [(1.0, 1.0)]) for one in moments.values()], bits)
    preconditioners = _preconditioners(moments, biases, settings.alpha)
    choices = _choices(moments, preconditioners, settings.seed)
    measured: list[list[float]] = known.setdefault("kl", [])  # of each window, each choice
    bar = tqdm(
        total=len(windows) * len(choices),
        initial=sum(map(len, measured)),
        desc="layers",
        unit="measurement",
    )
    with bar:
        for window, ids in enumerate(windows):
            if window == len(measured):
                measured.append([])
            there = measured[window]
            if len(there) == len(choices):
                continue
            for choice, kl in measure_kl(
                model,
                ids,
                settings.tokens,
                choices[len(there) :],
                sink=settings.sink,
                recent=settings.recent,
            ):
                if not isfinite(kl):
                    raise ValueError(
                        f"the KL with {choice.side} of layer {choice.layer} coded is {kl}: what "
                        "the model says is not finite"
                    )
                there.append(kl)
                save()
                bar.update()
    # rounding errors of the model can make a KL of nothing negative
    means = np.maximum(np.mean(measured, 0), 0.0).tolist()
    layers: list[LayerCalibration | None] = [None] * len(DynamicCache(config=model.config).layers)
    for i, one in moments.items():
        points: dict[str, list[tuple[float, float]]] = {"keys": [], "values": []}
        for choice, kl in zip(choices, means, strict=True):
            if choice.layer == i:
                points[choice.side].append((choice.fmt.relative_error, float(f"{kl:.4g}")))
        needs = _needs(one, points["keys"], points["values"])
        pair = FormatPair(chain(needs.head_dim, "key")[0], chain(needs.value_head_dim, "value")[0])
        layers[i] = LayerCalibration(pair, preconditioners[i], needs)
    return tuple(layers)


def _needs(
    moments: Moments, key_kl: list[tuple[float, float]], value_kl: list[tuple[float, float]]
) -> LayerNeeds:
    heads, head_dim = moments.q_squared.shape
    points = (tuple(sorted(key_kl)), tuple(sorted(value_kl)))
    return LayerNeeds(heads, head_dim, moments.value_head_dim, *points)


def _choices(
    moments: Mapping[int, Moments], preconditioners: Mapping[int, Preconditioner | None], seed: int
) -> list[Coded]:
    """What is coded, one after another."""

    def measured(formats: Sequence[PolarFormat]) -> list[PolarFormat]:
        errors = np.log([fmt.relative_error for fmt in formats])
        nearest = {int(np.abs(errors - np.log(error)).argmin()) for error in _ERRORS}
        return [replace(formats[i], seed=seed) for i in sorted(nearest)]

    choices = []
    for i, one in moments.items():
        for fmt in measured(chain(one.q_squared.shape[1], "key")):
            choices.append(Coded(i, "keys", fmt, preconditioners[i]))
        for fmt in measured(chain(one.value_head_dim, "value")):
            choices.append(Coded(i, "values", fmt))
    return choices


def _preconditioners(
    moments: Mapping[int, Moments], biases: Mapping[int, Preconditioner], alpha: float
) -> dict[int, Preconditioner | None]:
    chosen: dict[int, Preconditioner | None] = {}
    for i, one in moments.items():
        scales = None
        if alpha:
            scales = key_scales(one.q_squared, one.k_variance, alpha=alpha)
            rounded = [[float(f"{x:.{_DIGITS}g}") for x in row] for row in scales]
            scales = np.asarray(rounded, np.float32)
        bias = biases[i].bias if i in biases else None
        chosen[i] = None if scales is None and bias is None else Preconditioner(scales, bias)
    return chosen


def _moments_record(moments: Moments) -> dict[str, Any]:
    return {
        "q_squared": moments.q_squared.tolist(),
        "k_variance": moments.k_variance.tolist(),
        "value_head_dim": moments.value_head_dim,
    }


def _read_moments(record: Mapping[str, Any]) -> Moments:
    q_squared, k_variance = (np.array(record[name]) for name in ("q_squared", "k_variance"))
    return Moments(q_squared, k_variance, record["value_head_dim"])


def _read_partial(path: str | os.PathLike[str], identity: Mapping[str, Any]) -> dict[str, Any]:
    """What an interrupted run left, if anything."""
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        record = json_module.loads(raw)
        same = all(record[name] == value for name, value in identity.items())
        known = {name: record[name] for name in ("moments", "kl") if name in record}
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrateError(f"{path} is damaged: remove it to start anew") from error
    if not same:
        raise CalibrateError(
            f"{path} was left by a run with another model, text or settings: remove it to start "
            "anew, or give another --out"
        )
    return known


def _table(calibration: Calibration) -> str:
    """What was found, layer by layer."""
    lines = ["layer  keys        values      KL of keys  of values   (nats, expected)"]
    for i, layer in enumerate(calibration):
        if layer is None:
            lines.append(f"{i:5}  exact")
            continue
        pair, needs = layer.formats, layer.needs
        key_kl = expected_kl(needs.key_kl, pair.keys.relative_error)
        value_kl = expected_kl(needs.value_kl, pair.values.relative_error)
        lines.append(
            f"{i:5}  {pair.keys.bits_per_value:.2f} bits   {pair.values.bits_per_value:.2f} bits   "
            f"{key_kl:10.6f}  {value_kl:9.6f}"
        )
    lines.append(
        f"{calibration.bits_per_value:.3f} bits per value, expected KL "
        f"{calibration.expected_kl:.5f}.  Measured on {calibration.text}"
    )
    return "\n".join(lines)
