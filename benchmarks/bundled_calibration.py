"""Make the bundled calibration anew: ``python benchmarks/bundled_calibration.py``.

It is measured on the topics of Python's own manual, which every Python has: a text of another kind
than the addresses that ``benchmarks/calibration.py`` scores it on.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

from polarquant_nb import calibrate
from polarquant_nb.calibration import Calibration

NAME = "SmolLM2-135M-Instruct"
TEXT = "\n\n".join(topics[name] for name in sorted(topics))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and write the file into the package."""
    data = Path(calibrate.__file__).parent / "data"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add, default = parser.add_argument, calibrate.Settings()
    add("--out", metavar="FILE", default=str(data / f"{NAME}.json"))
    add("--windows", type=int, default=default.windows)
    add("--tokens", type=int, default=default.tokens)
    add("--score-tokens", type=int, default=default.score_tokens)
    add("--threads", type=int, default=1)
    options = vars(parser.parse_args(argv))
    with tempfile.TemporaryDirectory() as directory:
        text = Path(directory) / "topics.txt"
        text.write_text(TEXT, encoding="utf-8")
        measured = calibrate.run(text=str(text), bits=4.05, **options)
    text_name = f"pydoc_data.topics of Python {platform.python_version()}"
    named: Calibration = replace(measured, model=NAME, text=text_name)
    named.save(options["out"])


if __name__ == "__main__":
    main()
