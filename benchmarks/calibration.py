"""What scales, bits of each layer, and both do at equal bits: ``python benchmarks/calibration.py``.

The bundled calibration, measured on Python's manual, is scored on presidential addresses, beside
the presets.  Takes about a quarter of an hour on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial

import torch

import polarquant_nb as pq
from polarquant_nb.contenders import Contender, compress
from polarquant_nb.eval_command import Settings, Task
from polarquant_nb.outputs import write_json
from polarquant_nb.quality import judge, summarise

# A preset, and a budget.  Scales add .008 bits to 2,048 tokens of a sequence; they are part of it.
ROWS = {"tiny": 2.79, "compact": 3.29, "balanced": 4.04, "accurate": 4.59}


def contenders(calibration: pq.Calibration, settings: Settings) -> list[Contender]:
    """Each preset, and what a calibration makes of as many bits."""

    def without_scales(one: pq.Calibration) -> pq.Calibration:
        return replace(one, layers=tuple(replace(x, preconditioner=None) for x in one))

    found = []
    for name, bits in ROWS.items():
        same = tuple(replace(x, formats=pq.preset(name, x.needs.head_dim)) for x in calibration)
        allotted = calibration.with_bits(bits)
        for label, formats in (
            (f"{name}", name),
            (f"{name}, scales", replace(calibration, layers=same)),
            (f"{bits} bits by layer", without_scales(allotted)),
            (f"{bits} bits by layer, scales", allotted),
        ):
            options = {"sink": settings.sink, "recent": settings.recent, "seed": settings.seed}
            found.append(Contender(label, partial(compress, formats=formats, **options)))
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, default = parser.add_argument, Settings()
    add("--calibration", metavar="FILE", help="default: the bundled one")
    add("--windows", type=int, default=default.windows)
    add("--tokens", type=int, default=default.tokens)
    add("--score-tokens", type=int, default=default.score_tokens)
    add("--threads", type=int, default=1)
    add("--model", metavar="PATH")
    add("--text", metavar="FILE")
    add("--json", metavar="FILE")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    pq.set_num_threads(options.threads)
    settings = Settings(
        tokens=options.tokens,
        score_tokens=options.score_tokens,
        windows=options.windows,
        needle_lengths=(),
    )
    given = options.calibration
    calibration = pq.Calibration.bundled() if given is None else pq.Calibration.load(given)
    task = Task.load(settings, options.model, options.text)
    judgements = []
    chosen = contenders(calibration, settings)
    for one in judge(task.loaded.model, task.windows, settings.tokens, chosen):
        judgements.append(one)
        print(f"window {one.window}: {one.contender:34}{one.kl:.6f}", flush=True)
    summary = summarise(judgements)
    print(f"\ncalibrated on {calibration.text}; scored on {task.text_source}, "
          f"{summary[0].tokens} tokens in {settings.windows} windows\n")  # fmt: skip
    print(f"{'':34}{'bits':>7}{'KL (nats)':>12}{'±':>10}{'top-1 (%)':>12}{'of preset':>11}")
    preset_kl = 0.0
    for one in summary[1:]:
        if one.contender in ROWS:
            preset_kl = one.kl
        stderr = f"{one.kl_stderr:.6f}" if one.kl_stderr is not None else ""
        print(f"{one.contender:34}{one.bits_per_value:>7.3f}{one.kl:>12.6f}{stderr:>10}"
              f"{100 * one.top1:>12.1f}{one.kl / preset_kl:>11.2f}")  # fmt: skip
    if options.json:
        write_json(options.json, {"summary": [asdict(one) for one in summary]})


if __name__ == "__main__":
    main()
