"""All presets and all peers on a real model: size, KL, attention error, needles.

    python benchmarks/quality.py [--json quality.json] [--png quality.png] [--windows 4] ...

What is there already is read from the JSON file, which is written after every measurement: a run
that was interrupted goes on where it stopped, and new contenders are added to old ones.  See
``benchmarks/peers`` for what the peers are; those whose packages are missing are named and left
out (``python -m pip install optimum-quanto hqq``).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peers
import torch

import polarquant_nb as pq
from polarquant_nb.eval_command import (
    Settings,
    Task,
    calibration_contenders,
    measure,
    preset_contenders,
    report,
)
from polarquant_nb.eval_output import draw_quality, format_result
from polarquant_nb.needle import Answer
from polarquant_nb.outputs import check_writable, write_json
from polarquant_nb.quality import Judgement

NOTE = """\
QuantizedCache keeps no token exact: no sinks, no recent ones.  KIVI's last tokens that fill no
group of 32 stay exact too."""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is missing, print the table, write the numbers and the figure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, default = parser.add_argument, Settings()
    add("--windows", type=int, default=default.windows)
    add("--tokens", type=int, default=default.tokens, help="length of the context")
    add("--score-tokens", type=int, default=default.score_tokens, help="of each window")
    add("--needles", type=int, default=3, help="for each length and depth; 0: none")
    add("--seed", type=int, default=default.seed)
    add("--threads", type=int, default=1)
    add("--calibration", action="append", default=[], metavar="FILE", help="may be repeated")
    add("--bits", type=float, action="append", default=[], metavar="B", help="of calibrations")
    add("--only", action="append", metavar="NAME", help="a contender; may be repeated")
    add("--model", metavar="PATH")
    add("--text", metavar="FILE")
    add("--json", metavar="FILE", default="quality.json")
    add("--png", metavar="FILE", default="quality.png")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    pq.set_num_threads(options.threads)
    settings = Settings(
        tokens=options.tokens,
        score_tokens=options.score_tokens,
        windows=options.windows,
        needle_lengths=default.needle_lengths if options.needles else (),
        needles=options.needles,
        seed=options.seed,
    )
    ours = preset_contenders(pq.presets(), settings)
    ours += calibration_contenders(options.calibration, options.bits, settings)
    others, missing = peers.contenders(settings.sink, settings.recent)
    contenders = [one for one in ours + others if not options.only or one.name in options.only]
    unknown = set(options.only or ()) - {one.name for one in contenders}
    if unknown:
        names = ", ".join(repr(one.name) for one in ours + others)
        parser.error(f"no contender is called {', '.join(sorted(unknown))}; there are {names}")
    check_writable(options.json, options.png)

    judgements, answers, before = _read(options.json, settings)
    started = time.perf_counter()
    task = Task.load(settings, options.model, options.text)

    def result() -> dict[str, Any]:
        seconds = before + time.perf_counter() - started
        return report(task, judgements, answers) | {
            "missing": missing,
            "total_seconds": seconds,
        }

    def save() -> None:
        write_json(options.json, result())

    measure(task, contenders, judgements, answers, save)
    save()
    draw_quality(options.png, result())
    print(f"\n{format_result(result())}\n\n{NOTE}")
    for name, reason in missing.items():
        print(f"Left out: {name}, because {reason}")
    print(f"Numbers: {options.json}\nFigure: {options.png}")


def _read(path: str, settings: Settings) -> tuple[list[Judgement], list[Answer], float]:
    """What an earlier run left, and the seconds that it took."""
    if not Path(path).exists():
        return [], [], 0.0
    old = json.loads(Path(path).read_text(encoding="utf-8"))
    if old["settings"] != json.loads(json.dumps(asdict(settings))):
        raise SystemExit(f"{path} has other settings, {old['settings']}; give another --json")
    judgements = [
        Judgement(**{**row, "attention_errors": tuple(row["attention_errors"])})
        for row in old["rows"]
    ]
    return judgements, [Answer(**row) for row in old["needle_rows"]], old["total_seconds"]


if __name__ == "__main__":
    main()
