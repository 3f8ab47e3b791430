"""Files that are written whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["check_writable", "write_atomically", "write_figure", "write_json"]


def check_writable(*paths: str | None) -> None:
    """Find out whether files can be written, without touching them.

    Parameters
    ----------
    *paths : str or None
        Files that may or may not exist; None for one that is not wanted.

    Raises
    ------
    OSError
        If one is a directory, or its directory is not there or not writable.
    """
    for path in paths:
        if path is None:
            continue
        if Path(path).is_dir():
            raise IsADirectoryError(f"cannot write {path}: it is a directory")
        try:
            with tempfile.TemporaryFile(dir=Path(path).parent):
                pass
        except OSError as error:
            raise type(error)(f"cannot write {path}: {error.strerror or error}") from error


def write_atomically(path: str | os.PathLike[str], write: Callable[[Any], object]) -> None:
    """Write beside the target, then rename: readers see the old file or the whole new one.

    Parameters
    ----------
    path : path-like
        Target; a file that is there is replaced, and left as it is if writing fails.
    write : callable
        Takes a file opened for binary writing.
    """
    final = Path(path)
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, final)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_json(path: str, result: Mapping[str, Any]) -> None:
    """Write numbers, for programs and for people.

    Parameters
    ----------
    path : str
        JSON to write.
    result : mapping
        Can be written as JSON.
    """
    numbers = json.dumps(result, indent=2, ensure_ascii=False).encode() + b"\n"
    write_atomically(path, lambda file: file.write(numbers))


def write_figure(path: str, figure: Any) -> None:
    """Write a figure.

    Parameters
    ----------
    path : str
        PNG to write.
    figure : matplotlib Figure
        Complete.
    """
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=120))
