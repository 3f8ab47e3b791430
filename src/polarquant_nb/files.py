"""Files of pages and caches: safetensors, with everything that decides the bytes in the header.

A file is read only if this package would make the same bytes: the rotation, the layout of a page
and the codebooks are compared by their SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from polarquant_nb.arrays import DTYPES, ArrayKind
from polarquant_nb.bias import RotaryBias
from polarquant_nb.codebooks import Codebooks
from polarquant_nb.formats import PolarFormat
from polarquant_nb.outputs import write_atomically
from polarquant_nb.preconditioning import Preconditioner
from polarquant_nb.rotations import rotation_for

__all__ = [
    "format_record",
    "preconditioner_record",
    "read_file",
    "read_format",
    "read_kind",
    "read_preconditioner",
    "reading",
    "write_file",
]

_VERSION = 1
_KEY = "polarquant_nb"

Tensors = Mapping[str, npt.NDArray[Any]]


def write_file(
    path: str | os.PathLike[str], what: str, content: Mapping[str, Any], tensors: Tensors
) -> None:
    """Write a file whole, or not at all.

    Parameters
    ----------
    path : path-like
        File to write; one that is there is replaced.
    what : str
        What the file holds, such as ``'cache'``.
    content : mapping
        Everything but tensors; can be written as JSON.
    tensors : mapping of str to ndarray
        Contiguous arrays.
    """
    from polarquant_nb import __version__

    header = {"what": what, "version": _VERSION, "package": __version__, **content}
    save = _safetensors().numpy.save
    write_atomically(path, lambda file: file.write(save(dict(tensors), {_KEY: json.dumps(header)})))


def read_file(
    path: str | os.PathLike[str], what: str
) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
    """Read what :func:`write_file` wrote.

    Parameters
    ----------
    path : path-like
        File to read.
    what : str
        What it must hold.

    Returns
    -------
    content : dict
        Everything but tensors.
    tensors : dict of str to ndarray
        Arrays.

    Raises
    ------
    ValueError
        If the file is of another kind or another version.
    """
    with open(path, "rb"):  # names the file if it is not there
        pass
    with _safetensors().safe_open(path, framework="numpy") as file:
        header = json.loads((file.metadata() or {}).get(_KEY, "{}"))
        if header.get("what") != what:
            raise ValueError(f"it holds {header.get('what', 'something else')}")
        if header["version"] != _VERSION:
            raise ValueError(f"it has version {header['version']}; version {_VERSION} is known")
        names = file.keys()
        return header, {name: file.get_tensor(name) for name in names}


@contextmanager
def reading(path: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Name the file in the errors of whatever goes wrong with its contents.

    Parameters
    ----------
    path : path-like
        The file.
    what : str
        What it should hold.

    Raises
    ------
    TypeError
        If ``path`` is none: an int would be taken for an open file, and closed.
    ValueError
        Instead of what damaged contents lead to.
    """
    place = os.fspath(path)
    try:
        yield
    except (ValueError, LookupError, TypeError, _safetensors().SafetensorError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        message = f"path is {place!r}; that file holds no usable {what}: {reason}"
        raise ValueError(message) from error


def format_record(fmt: PolarFormat, codebooks: Codebooks) -> dict[str, Any]:
    """A format with its codebooks, and what identifies the bytes it leads to.

    Parameters
    ----------
    fmt : PolarFormat
        Format.
    codebooks : Codebooks
        Codebooks.

    Returns
    -------
    dict
        Can be written as JSON.
    """
    fitted = None if codebooks.is_analytic else [angles.tolist() for angles in codebooks.angles]
    record = {**vars(fmt), "codebooks": fitted, "sha256": _fingerprints(fmt, codebooks)}
    if fmt.radius == "float16":  # as in files from before there were others, which are read still
        del record["radius"]
    return record


def read_format(record: dict[str, Any]) -> tuple[PolarFormat, Codebooks]:
    """The format and codebooks of a record.

    Parameters
    ----------
    record : dict
        From :func:`format_record`.

    Returns
    -------
    PolarFormat, Codebooks
        Equal to those that were written.

    Raises
    ------
    ValueError
        If this package would make other bytes of that format.
    """
    record = dict(record)
    expected, fitted = record.pop("sha256"), record.pop("codebooks")
    fmt = PolarFormat(**record)
    codebooks = Codebooks.analytic(fmt) if fitted is None else Codebooks(fitted)
    for name, made in _fingerprints(fmt, codebooks).items():
        if expected[name] != made:
            raise ValueError(
                f"its {name} of {fmt} has the SHA-256 {expected[name]}; this version of the "
                f"package makes {made}"
            )
    return fmt, codebooks


def preconditioner_record(
    preconditioner: Preconditioner | None, prefix: str = "preconditioner"
) -> tuple[dict[str, Any] | None, dict[str, npt.NDArray[Any]]]:
    """A preconditioner, for files and pickles.

    Parameters
    ----------
    preconditioner : Preconditioner, optional
        None gives nothing.
    prefix : str
        Of the arrays' names.

    Returns
    -------
    record : dict or None
        Can be written as JSON.
    arrays : dict of str to ndarray
        Scales and bias, where there are any.
    """
    if preconditioner is None:
        return None, {}
    arrays: dict[str, npt.NDArray[Any]] = {}
    if preconditioner.scales is not None:
        arrays[f"{prefix}.scales"] = preconditioner.scales
    bias = preconditioner.bias
    if bias is None:
        return {"interleaved": None}, arrays
    arrays |= {f"{prefix}.bias": bias.vectors, f"{prefix}.inv_freq": bias.inv_freq}
    return {"interleaved": bias.interleaved}, arrays


def read_preconditioner(
    record: Mapping[str, Any] | None, arrays: Tensors, prefix: str = "preconditioner"
) -> Preconditioner | None:
    """What :func:`preconditioner_record` was given.

    Parameters
    ----------
    record, arrays, prefix
        From there; arrays may hold others too.

    Returns
    -------
    Preconditioner or None
        With equal numbers.

    Raises
    ------
    ValueError, TypeError, KeyError
        If they contradict each other.
    """
    if record is None:
        return None
    bias = None
    if record["interleaved"] is not None:
        vectors, inv_freq = (arrays[f"{prefix}.{part}"] for part in ("bias", "inv_freq"))
        bias = RotaryBias(vectors, inv_freq, record["interleaved"])
    return Preconditioner(arrays.get(f"{prefix}.scales"), bias)


def read_kind(record: dict[str, str]) -> ArrayKind:
    """The array kind of a record, ``kind.record``.

    Parameters
    ----------
    record : dict
        Family and dtype.

    Returns
    -------
    ArrayKind
        Equal to the one that was written.

    Raises
    ------
    ValueError
        If there is no such kind.
    """
    kind = ArrayKind(**record)
    if kind.family not in ("numpy", "torch") or kind.dtype not in DTYPES:
        raise ValueError(f"its arrays are {record}")
    return kind


def _fingerprints(fmt: PolarFormat, codebooks: Codebooks) -> dict[str, str]:
    layout = fmt.layout
    rows = [(row.word, row.width, row.fields) for row in layout.code_rows]
    places: list[Any] = [rows, layout.radius_words, layout.offset_word, layout.num_words]
    if layout.anchor_word is not None:
        places += [layout.radius_width, layout.anchor_word]
    angles = b"".join(level.astype("<f4").tobytes() for level in codebooks.angles)
    return {
        "rotation": rotation_for(fmt).fingerprint,
        "layout": hashlib.sha256(json.dumps(places).encode()).hexdigest(),
        "codebooks": hashlib.sha256(angles).hexdigest(),
    }


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("files need safetensors: pip install 'polarquant-nb[io]'") from error
    return safetensors
