"""Calibrations: files, and caches made with them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support import gaussian

import polarquant_nb as pq
from polarquant_nb.calibration import given_calibration
from polarquant_nb.layer_bits import LayerNeeds

PAIR = pq.preset("balanced", 64)
ERROR = 0.02
NEEDS = LayerNeeds(2, 64, 64, ((ERROR, 4e-4),), ((ERROR, 1e-4),))


def scales(seed=0, heads=2, head_dim=64):
    return np.exp(gaussian(heads, head_dim, seed=seed))


def layer(seed=0, factor=1.0, **options):
    needs = replace(NEEDS, key_kl=((ERROR, factor * 4e-4),))
    return pq.LayerCalibration(PAIR, pq.Preconditioner(scales(seed)), needs, **options)


@pytest.fixture
def calibration():
    """Layers of every kind: scaled, exact, plain, biased; of different sensitivity."""
    bias = pq.RotaryBias(gaussian(2, 64), 10000.0 ** (-np.arange(32) / 32), interleaved=True)
    layers = (
        layer(0),
        None,
        pq.LayerCalibration(PAIR, None, NEEDS),
        pq.LayerCalibration(PAIR, pq.Preconditioner(scales(3), bias), NEEDS),
        layer(4, factor=100),
    )
    return pq.Calibration(layers, 4.1, "a model", "a text — with a dash", {"tokens": 100})


def assert_equal(a, b):
    assert len(a) == len(b)
    for ours, theirs in zip(a, b, strict=True):
        if ours is None:
            assert theirs is None
            continue
        assert (ours.formats, ours.needs) == (theirs.formats, theirs.needs)
        if ours.preconditioner is None:
            assert theirs.preconditioner is None
        else:
            assert ours.preconditioner.same(theirs.preconditioner)
    assert (a.bits, a.model, a.text, a.settings) == (b.bits, b.model, b.text, b.settings)


# ---- what it says --------------------------------------------------------------------------------


def test_a_calibration_is_a_sequence_of_layers(calibration):
    assert len(calibration) == 5
    assert calibration[1] is None
    assert list(calibration)[4] is calibration[-1]
    assert calibration.bits_per_value == pytest.approx(PAIR.bits_per_value)
    key, value = PAIR.keys.relative_error, PAIR.values.relative_error
    assert calibration.expected_kl == pytest.approx((4e-4 * 103 * key + 1e-4 * 4 * value) / ERROR)
    assert "5 layers of a model, 4.033 bits per value, measured on a text" in repr(calibration)


def test_another_budget_of_the_same_measurements(calibration):
    expected = []
    for bits in (2.8, 3.3, 4.05, 4.6):
        other = calibration.with_bits(bits)
        assert bits - 0.2 < other.bits_per_value <= bits == other.bits
        assert other[1] is None
        assert other[0].preconditioner is calibration[0].preconditioner
        keys = [other[i].formats.keys.bits_per_value for i in (0, 4)]
        assert keys[1] > keys[0]  # a hundred times more sensitive
        expected.append(other.expected_kl)
    assert expected == sorted(expected, reverse=True)
    # better than the preset of as many bits
    assert calibration.with_bits(PAIR.bits_per_value).expected_kl < calibration.expected_kl / 1.5
    with pytest.raises(ValueError, match="bits_per_value is 1; it must be at least"):
        calibration.with_bits(1)
    with pytest.raises(TypeError, match="bits is '4'; it must be a number"):
        calibration.with_bits("4")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"formats": "balanced"}, "formats is 'balanced'"),
        ({"formats": pq.preset("tiny", 128)}, "formats are for head_dim 128 of keys and 128"),
        ({"preconditioner": np.ones((2, 64))}, "preconditioner is array"),
        ({"preconditioner": pq.Preconditioner(scales(heads=3))}, r"shape \(3, 64\); it must be"),
        ({"preconditioner": pq.Preconditioner(scales()[None])}, r"shape \(1, 2, 64\); that of"),
        ({"needs": None}, "needs is None"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        replace(layer(), **changes)


def test_a_calibration_of_nothing_is_refused(calibration):
    with pytest.raises(ValueError, match="layers are all None"):
        replace(calibration, layers=(None, None))
    with pytest.raises(TypeError, match=r"layers\[1\] is FormatPair"):
        replace(calibration, layers=(layer(), PAIR))


# ---- files ---------------------------------------------------------------------------------------


def test_files(calibration, tmp_path):
    path = tmp_path / "model.json"
    calibration.with_bits(3.3).save(path)
    loaded = pq.Calibration.load(path)
    assert_equal(loaded, calibration.with_bits(3.3))
    assert_equal(pq.Calibration.load(str(path), bits=4.6), calibration.with_bits(4.6))
    assert len(path.read_text(encoding="utf-8").splitlines()) < 30  # one line for a layer
    assert [p.name for p in tmp_path.iterdir()] == ["model.json"]


def test_what_takes_formats_takes_files(calibration, tmp_path):
    path = tmp_path / "model.json"
    calibration.save(path)
    assert given_calibration(calibration) is calibration
    for given in (path, str(path)):
        assert_equal(given_calibration(given), calibration)
    for other in ("balanced", PAIR, None, "json"):
        assert given_calibration(other) is None
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        given_calibration("none.json")


def _without(name):
    def change(record):
        del record[name]

    return change


def _set(value, *keys):
    def change(record):
        for key in keys[:-1]:
            record = record[key]
        record[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_set("a poem", "what"), "it holds something else"),
        (_set(2, "version"), "it has version 2; 1 is known"),
        (_without("bits"), "it lacks 'bits'"),
        (_without("layers"), "it lacks 'layers'"),
        (_set([None], "layers"), "layers are all None"),
        (_set("much", "bits"), "could not convert"),
        (_set([5, 5], "layers", 0), "list indices"),
        (_set(9, "layers", 0, "keys", "level_bits", 0), "level_bits is"),
        (_set(63, "layers", 0, "keys", "head_dim"), "head_dim is 63"),
        (_set(7, "layers", 0, "keys", "colour"), "colour"),
        (_set(-1.0, "layers", 0, "scales", 1, 5), "scales hold -1"),
        (_set([1.0], "layers", 0, "scales", 1), "inhomogeneous"),
        (_set("1", "layers", 0, "scales"), "scales"),
        (_set(3, "layers", 0, "needs", "num_kv_heads"), "preconditioner has shape"),
        (_set([[0.02, -1.0]], "layers", 0, "needs", "key_kl"), "key_kl is"),
        (_set(0.02, "layers", 0, "needs", "value_kl"), "not iterable"),
        (_set(2.5, "layers", 0, "needs", "num_kv_heads"), "num_kv_heads is 2.5"),
        (_set([1e3], "layers", 3, "bias", "vectors"), "vectors"),
    ],
)
def test_damaged_files_are_refused(calibration, tmp_path, change, reason):
    path = tmp_path / "model.json"
    calibration.save(path)
    record = json.loads(path.read_text(encoding="utf-8"))
    change(record)
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match=f"(?s)model.json'; that file holds no usable.*{reason}"):
        pq.Calibration.load(path)


@pytest.mark.parametrize("raw", [b"", b"[]", b"null", b"\xff\xfe", b'{"what": '])
def test_files_of_something_else_are_refused(tmp_path, raw):
    path = tmp_path / "model.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"model\.json'; that file holds no usable calibration"):
        pq.Calibration.load(path)


def test_half_a_file_is_refused(calibration, tmp_path):
    path = tmp_path / "model.json"
    calibration.save(path)
    raw = path.read_bytes()
    for part in (1, len(raw) // 3, len(raw) - 3):
        path.write_bytes(raw[:part])
        with pytest.raises(ValueError, match="no usable calibration"):
            pq.Calibration.load(path)


# ---- the one that comes with the package ---------------------------------------------------------


def test_the_bundled_calibration():
    for bits in (2.8, 3.3, 4.05, 4.6):
        calibration = pq.Calibration.bundled("SmolLM2-135M-Instruct", bits=bits)
        assert len(calibration) == 30
        assert all(one.needs.num_kv_heads == 3 for one in calibration)
        assert bits - 0.02 < calibration.bits_per_value <= bits
        formats = {one.formats.keys for one in calibration}
        assert len(formats) <= 9  # each is compiled
    assert pq.Calibration.bundled().bits == 4.05
    with pytest.raises(ValueError, match=r"name is 'GPT'; there are .*SmolLM2-135M-Instruct"):
        pq.Calibration.bundled("GPT")


# ---- caches --------------------------------------------------------------------------------------


def test_a_cache_of_one_layer(calibration):
    own = calibration[0]
    cache = pq.KVCache(own, sink=2, recent=10)
    plain = pq.KVCache(own.formats, sink=2, recent=10, preconditioner=own.preconditioner)
    k, v, q = gaussian(1, 2, 300, 64), gaussian(1, 2, 300, 64, seed=1), gaussian(1, 4, 1, 64)
    for one in (cache, plain):
        one.append(k, v)
    assert cache.formats == PAIR
    np.testing.assert_array_equal(cache.attend(q), plain.attend(q))
    unscaled = pq.KVCache(PAIR, sink=2, recent=10)
    unscaled.append(k, v)
    assert not np.array_equal(cache.attend(q), unscaled.attend(q))
    with pytest.raises(TypeError, match="preconditioner is given; a calibration has its own"):
        pq.KVCache(own, preconditioner=own.preconditioner)
    with pytest.raises(TypeError, match="value_format is"):
        pq.KVCache(own, PAIR.values)
