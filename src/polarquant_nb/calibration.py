"""Calibration: what one model's layers store their keys and values with, measured on a text.

A calibration holds, for each layer, key scales and how much errors of its keys and of its values
cost; from these follow the formats of all layers for any budget of bits.  It is measured by
``polarquant-nb calibrate``, kept in a JSON file, and taken by caches in place of a preset.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from polarquant_nb.bias import RotaryBias
from polarquant_nb.formats import FormatPair, PolarFormat
from polarquant_nb.layer_bits import LayerNeeds, allot
from polarquant_nb.outputs import write_atomically
from polarquant_nb.preconditioning import Preconditioner

__all__ = ["Calibration", "LayerCalibration", "given_calibration"]

_WHAT = "polarquant_nb calibration"
_VERSION = 1
_SUFFIX = ".json"


@dataclass(frozen=True, eq=False)
class LayerCalibration:
    """What one layer stores its keys and values with.

    Parameters
    ----------
    formats : FormatPair
        Formats of keys and values.
    preconditioner : Preconditioner or None
        Key scales, and the bias of keys where they have one; of all rows alike.
    needs : LayerNeeds
        Its sizes, and what its errors cost.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If they are for other sizes than each other.
    """

    formats: FormatPair
    preconditioner: Preconditioner | None
    needs: LayerNeeds

    def __post_init__(self) -> None:
        for name, kind in (
            ("formats", FormatPair),
            ("preconditioner", Preconditioner),
            ("needs", LayerNeeds),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) and (value is not None or name != "preconditioner"):
                raise TypeError(f"{name} is {value!r}; it must be a {kind.__name__}")
        widths = self.formats.keys.head_dim, self.formats.values.head_dim
        if widths != (self.needs.head_dim, self.needs.value_head_dim):
            raise ValueError(
                f"formats are for head_dim {widths[0]} of keys and {widths[1]} of values; the "
                f"layer has {self.needs.head_dim} and {self.needs.value_head_dim}"
            )
        if self.preconditioner is not None:
            if len(self.preconditioner.shape) != 2:
                raise ValueError(
                    f"preconditioner has shape {self.preconditioner.shape}; that of a calibration "
                    "is (num_kv_heads, head_dim)"
                )
            self.preconditioner.check(self.formats.keys, (self.needs.num_kv_heads,))


@dataclass(frozen=True, eq=False)
class Calibration:
    """Formats and key scales of each layer of one model.

    Parameters
    ----------
    layers : tuple of LayerCalibration or None
        Of each layer of the model; None for one that stays exact.
    bits : float
        The budget that the formats were chosen for: bits per stored number.
    model, text : str
        What it was measured on.
    settings : mapping
        How; can be written as JSON.

    Raises
    ------
    TypeError
        If an argument has the wrong type.
    ValueError
        If no layer is to be compressed.

    Examples
    --------
    >>> import polarquant_nb as pq
    >>> calibration = pq.Calibration.bundled("SmolLM2-135M-Instruct", bits=3.3)
    >>> len(calibration), calibration.bits_per_value <= 3.3
    (30, True)
    >>> cache = pq.KVCache(calibration[0])  # of the first layer, for a decoder of your own
    """

    layers: tuple[LayerCalibration | None, ...]
    bits: float
    model: str
    text: str
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        layers = tuple(self.layers)
        for i, layer in enumerate(layers):
            if not isinstance(layer, LayerCalibration | None):
                raise TypeError(f"layers[{i}] is {layer!r}; it must be a LayerCalibration or None")
        if not any(layers):
            raise ValueError("layers are all None; at least one must be compressed")
        object.__setattr__(self, "layers", layers)

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> LayerCalibration | None:
        return self.layers[layer]

    def __iter__(self) -> Iterator[LayerCalibration | None]:
        return iter(self.layers)

    def __repr__(self) -> str:
        return (
            f"Calibration({len(self)} layers of {self.model}, {self.bits_per_value:.3f} bits per "
            f"value, measured on {self.text})"
        )

    @property
    def bits_per_value(self) -> float:
        """Bits per stored number over all compressed layers, in whole pages."""
        numbers = [
            layer.needs.num_kv_heads * (layer.needs.head_dim + layer.needs.value_head_dim)
            for layer in self._compressed
        ]
        bits = [layer.formats.bits_per_value for layer in self._compressed]
        return float(np.average(bits, weights=numbers))

    @property
    def expected_kl(self) -> float:
        """KL (nats) that the measurements predict for all errors together."""
        return sum(layer.needs.expected_kl(layer.formats) for layer in self._compressed)

    def with_bits(self, bits: float) -> Calibration:
        """The same measurements for another budget.

        Parameters
        ----------
        bits : float
            Most bits per stored number, the mean over keys and values of all compressed layers,
            everything counted.

        Returns
        -------
        Calibration
            With the formats of the least expected KL; see :func:`polarquant_nb.layer_bits.allot`.

        Raises
        ------
        TypeError
            If bits is no number.
        ValueError
            If no formats are as small.
        """
        if isinstance(bits, bool) or not isinstance(bits, int | float):
            raise TypeError(f"bits is {bits!r}; it must be a number")
        pairs = iter(allot([layer.needs for layer in self._compressed], bits))
        layers = [layer and replace(layer, formats=next(pairs)) for layer in self.layers]
        return replace(self, layers=tuple(layers), bits=float(bits))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a JSON file, whole or not at all.

        Parameters
        ----------
        path : path-like
            File to write; one that is there is replaced.  Caches take its name in place of a preset
            if it ends in ``.json``.
        """
        from polarquant_nb import __version__

        header = {
            "what": _WHAT,
            "version": _VERSION,
            "package": __version__,
            "model": self.model,
            "text": self.text,
            "settings": dict(self.settings),
            "bits": self.bits,
        }
        # a line for each layer: thousands of numbers are better not looked at one by one
        lines = [json.dumps(_layer_record(layer)) for layer in self.layers]
        content = json.dumps(header, indent=1, ensure_ascii=False).removesuffix("\n}")
        content += ',\n "layers": [\n' + ",\n".join(lines) + "\n]}\n"
        write_atomically(path, lambda file: file.write(content.encode()))

    @staticmethod
    def load(path: str | os.PathLike[str], bits: float | None = None) -> Calibration:
        """Read what :meth:`save` wrote.

        Parameters
        ----------
        path : path-like
            File to read.
        bits : float, optional
            Another budget than the file's; see :meth:`with_bits`.

        Returns
        -------
        Calibration
            With equal numbers.

        Raises
        ------
        OSError
            If the file cannot be read.
        TypeError, ValueError
            If it holds no usable calibration, or for ``bits`` as in :meth:`with_bits`.
        """
        raw = Path(path).read_bytes()
        with _reading(path):
            record = json.loads(raw)
            if not isinstance(record, dict) or record.get("what") != _WHAT:
                raise ValueError("it holds something else")
            if record["version"] != _VERSION:
                raise ValueError(f"it has version {record['version']}; {_VERSION} is known")
            calibration = Calibration(
                layers=tuple(map(_read_layer, record["layers"])),
                bits=float(record["bits"]),
                model=str(record["model"]),
                text=str(record["text"]),
                settings=dict(record["settings"]),
            )
        return calibration if bits is None else calibration.with_bits(bits)

    @staticmethod
    def bundled(name: str = "SmolLM2-135M-Instruct", bits: float | None = None) -> Calibration:
        """A calibration that comes with the package.

        Parameters
        ----------
        name : str
            The model's, without its owner's.
        bits : float, optional
            Budget; by default 4.05.

        Returns
        -------
        Calibration
            Measured on another kind of text than the one that accuracy is reported on.

        Raises
        ------
        TypeError, ValueError
            If there is none of that name, or for ``bits`` as in :meth:`with_bits`.
        """
        directory = files("polarquant_nb") / "data"
        there = {f.name.removesuffix(_SUFFIX): f for f in directory.iterdir()}
        if name not in there:
            raise ValueError(f"name is {name!r}; there are calibrations of {', '.join(there)}")
        return Calibration.load(Path(str(there[name])), bits)

    @property
    def _compressed(self) -> list[LayerCalibration]:
        return [layer for layer in self.layers if layer is not None]


def given_calibration(formats: object) -> Calibration | None:
    """The calibration that is given where formats are taken, if one is.

    Parameters
    ----------
    formats : Calibration, path-like or anything else
        A string is a path if it ends in ``.json``.

    Returns
    -------
    Calibration or None
        None if it is something else.

    Raises
    ------
    OSError, ValueError
        If the file cannot be read, or holds no calibration.
    """
    if isinstance(formats, Calibration):
        return formats
    if isinstance(formats, os.PathLike) or str(formats).lower().endswith(_SUFFIX):
        return Calibration.load(formats)  # type: ignore[arg-type]
    return None


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name the file in the errors of whatever is wrong with its contents."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ValueError(
            f"path is {os.fspath(path)!r}; that file holds no usable calibration: {reason}"
        ) from error


def _layer_record(layer: LayerCalibration | None) -> dict[str, Any] | None:
    if layer is None:
        return None
    preconditioner, bias = layer.preconditioner, None
    scales = None if preconditioner is None else preconditioner.scales
    if preconditioner is not None and preconditioner.bias is not None:
        bias = {
            "vectors": _numbers(preconditioner.bias.vectors),
            "inv_freq": preconditioner.bias.inv_freq.tolist(),
            "interleaved": preconditioner.bias.interleaved,
        }
    return {
        "keys": vars(layer.formats.keys),
        "values": vars(layer.formats.values),
        "needs": asdict(layer.needs),
        "scales": None if scales is None else _numbers(scales),
        "bias": bias,
    }


def _read_layer(record: Mapping[str, Any] | None) -> LayerCalibration | None:
    if record is None:
        return None
    scales, bias, preconditioner = record["scales"], record["bias"], None
    if scales is not None:
        scales = np.asarray(scales, np.float32)
    if bias is not None:
        vectors, inv_freq = np.asarray(bias["vectors"], np.float32), np.asarray(bias["inv_freq"])
        bias = RotaryBias(vectors, inv_freq, bias["interleaved"])
    if scales is not None or bias is not None:
        preconditioner = Preconditioner(scales, bias)
    formats = FormatPair(PolarFormat(**record["keys"]), PolarFormat(**record["values"]))
    return LayerCalibration(formats, preconditioner, LayerNeeds(**record["needs"]))


def _numbers(x: Any) -> list[list[float]]:
    """The shortest decimals that are read as the same float32."""
    return [[float(str(number)) for number in row] for row in x]
