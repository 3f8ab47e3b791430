"""Angles and distortion of data whose answer is known; figures that show what the dataset holds."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from dataclasses import replace
from math import pi

import numpy as np
import pytest
from support import NOJIT, STORES, exact_attention, stored

from polarquant_nb import FormatPair, PolarFormat, analysis
from polarquant_nb.preconditioning import Preconditioner

FMT = PolarFormat(64, (4, 5))
FULL = PolarFormat(64, (5, 4, 4, 4, 4, 4))
OFFSET = PolarFormat(64, (5, 4, 4, 4, 4, 4), "int8")


@pytest.fixture(scope="module")
def gaussian():
    return np.random.default_rng(0).standard_normal((3, 512, 64), dtype=np.float32)


def test_angles_of_gaussian_data_follow_the_theory(gaussian):
    ds = analysis.angles(gaussian, FULL, bins=50)
    assert dict(ds.sizes) == {"level": 6, "bin": 50}
    n = np.array([3 * 512 * 64 >> level for level in ds.level.values])
    assert (ds["count"].sum("bin") == n).all()
    # the distance exceeds 1.95 / sqrt(n) once in a thousand times
    assert (ds.distance < 1.95 / np.sqrt(n)).all()
    width = np.where(ds.level == 1, 2 * pi, pi / 2)[:, None] / 50
    for name in ("density", "expected_density"):
        np.testing.assert_allclose((ds[name] * width).sum("bin"), 1)
    np.testing.assert_allclose(ds.angle[:, 0], width[:, 0] / 2)
    np.testing.assert_allclose(ds.angle[:, -1], 49.5 * width[:, 0])


def test_angles_of_the_toy_vector():
    """(3, 4, 4, 3): atan(4/3), atan(3/4), then π/4 exactly, everywhere above."""
    x = np.tile([3.0, 4.0, 4.0, 3.0], 16)[None]
    fmt = PolarFormat(64, (4, 2, 2), rotation="none")
    ds = analysis.angles(x, fmt, bins=63)  # odd: π/4 is in the middle of a bin
    first, second, third = ds["count"].values
    assert first[int(np.arctan2(4, 3) / (2 * pi) * 63)] == 16
    assert first[int(np.arctan2(3, 4) / (2 * pi) * 63)] == 16
    assert (second[31], third[31]) == (16, 8)
    assert ds["count"].sum() == 32 + 16 + 8


def test_the_rotation_makes_any_data_follow_the_theory():
    """Keys of one channel each: useless angles as they are, the expected ones after a rotation."""
    rng = np.random.default_rng(1)
    x = np.zeros((4096, 64))
    x[np.arange(4096), rng.integers(64, size=4096)] = 1
    plain = analysis.angles(x, PolarFormat(64, (4, 2, 2, 2), rotation="none"))
    rotated = analysis.angles(x, PolarFormat(64, (4, 2, 2, 2), rotation="haar"))
    assert (plain.distance > 0.4).all()
    assert (rotated.distance < 0.1).all()


def test_a_common_mean_is_seen_unless_the_format_has_an_offset(gaussian):
    x = gaussian + 3 * np.random.default_rng(2).standard_normal(64)
    with_mean = analysis.angles(x, FULL)
    without = analysis.angles(x, OFFSET)
    assert with_mean.distance.max() > 0.1
    assert (without.distance < 0.03).all()


def test_tensors_and_arrays_give_the_same(gaussian):
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(gaussian)
    assert analysis.angles(x, FMT).identical(analysis.angles(gaussian, FMT))
    half = x.bfloat16().requires_grad_()
    assert analysis.angles(half, FMT).identical(analysis.angles(half.detach().float(), FMT))


@pytest.mark.parametrize("fmt", [FMT, OFFSET], ids=["plain", "offset"])
def test_distortion_matches_the_closed_form(gaussian, fmt):
    ds = analysis.distortion(gaussian + 2, fmt)
    assert float(ds.expected_error) == fmt.relative_error
    assert float(ds.error) == pytest.approx(fmt.relative_error, rel=0.02)
    assert float(ds.bits_per_value) == fmt.bits_per_value
    if fmt.offset is None:
        assert float(ds.total_error) == float(ds.error)
    else:  # ‖x‖² is 1 + 2² a coordinate, ‖x − μ‖² about 1
        assert float(ds.total_error) == pytest.approx(float(ds.error) / 5, rel=0.03)


@pytest.fixture(scope="module")
def few(gaussian):
    """Where only equality is asserted: a page and some of another."""
    return gaussian[:, :130]


@pytest.fixture(scope="module")
def datasets(few, captured):
    """One of every kind."""
    layers = as_layers(few)
    return {
        "angles": analysis.angles(layers, OFFSET, by="layer"),
        "angle_error": analysis.angle_error(few, FMT, bits=(2, 3)),
        "distortion": analysis.distortion(few, OFFSET),
        "rate_distortion": analysis.rate_distortion(layers, [FMT, OFFSET], by="layer"),
        "attention_error": analysis.attention_error(captured, PAIRS),
    }


@pytest.mark.parametrize("store", STORES)
def test_datasets_survive_files(datasets, tmp_path, store):
    import xarray as xr

    for name, ds in datasets.items():
        with stored(ds, tmp_path / name, store) as back:
            xr.testing.assert_equal(back, ds)
            assert set(back.variables) == set(ds.variables)
            for key, variable in ds.variables.items():
                assert back[key].attrs == variable.attrs
                if variable.dtype.kind != "U":  # strings have no length in some files
                    assert back[key].dtype == variable.dtype
            assert back.attrs.keys() == ds.attrs.keys()
            for key, value in ds.attrs.items():
                np.testing.assert_array_equal(back.attrs[key], value)


def test_datasets_say_what_they_hold(datasets):
    for ds in datasets.values():
        for name, variable in ds.variables.items():
            assert variable.dtype in (np.int64, np.float64) or variable.dtype.kind == "U", name
            assert variable.attrs["long_name"]
            assert variable.attrs["units"]
    for name in ("angles", "distortion"):
        assert datasets[name].attrs == {
            "head_dim": 64,
            "level_bits": [5, 4, 4, 4, 4, 4],
            "offset": "int8",
            "radius": "float16",
            "rotation": "hadamard",
            "rotation_seed": 0,
        }


@pytest.mark.parametrize(
    "function",
    [
        analysis.angles,
        analysis.angle_error,
        analysis.distortion,
        lambda x, fmt: analysis.rate_distortion(x, [fmt]),
    ],
    ids=["angles", "angle_error", "distortion", "rate_distortion"],
)
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((4, 32)), r"shape \(4, 32\).*64"),
        (np.zeros(64), r"shape \(64,\)"),
        (np.zeros((0, 64)), "at least one vector"),
        (np.full((4, 64), np.nan), "not finite"),
    ],
    ids=["head_dim", "1-d", "empty", "nan"],
)
def test_bad_input_is_refused(function, x, message):
    with pytest.raises(ValueError, match=message):
        function(x, FMT)


def test_bins_must_be_positive(gaussian):
    with pytest.raises(ValueError, match="bins is 0"):
        analysis.angles(gaussian, FMT, bins=0)


def as_layers(x):
    import xarray as xr

    about = {"long_name": "layer of the model", "units": "1"}
    return xr.DataArray(
        x, dims=("layer", "token", "coord"), coords={"layer": ("layer", [3, 5, 9], about)}
    )


def test_dimensions_are_kept_and_pooled(few):
    layers = as_layers(few * np.array([1, 2, 3], np.float32)[:, None, None])
    kept = analysis.angles(layers, FULL, by="layer")
    assert kept["count"].dims == ("layer", "level", "bin")
    assert kept.layer.values.tolist() == [3, 5, 9]
    pooled = analysis.angles(layers, FULL)
    np.testing.assert_array_equal(kept["count"].sum("layer"), pooled["count"])
    for layer in layers.layer:
        alone = analysis.angles(layers.sel(layer=layer), FULL)
        assert kept.sel(layer=layer, drop=True).identical(alone)

    swapped = layers.expand_dims(run=2).transpose("run", "layer", "token", "coord")
    table = analysis.rate_distortion(swapped, [FMT, OFFSET], by=("layer", "run"))
    assert table.error.dims == ("layer", "run", "format")
    for i, fmt in enumerate((FMT, OFFSET)):
        alone = analysis.distortion(layers, fmt, by="layer")
        np.testing.assert_array_equal(table.error[:, 1, i], alone.error)
        np.testing.assert_array_equal(table.total_error[:, 0, i], alone.total_error)


def test_a_dimension_that_is_not_there_is_named(gaussian):
    for by in ("token", "head", ("layer", "layer")):
        with pytest.raises(ValueError, match=r"by is .* each once: layer"):
            analysis.distortion(as_layers(gaussian), FMT, by=by)
    with pytest.raises(ValueError, match=r"by is 'layer'.*: dim_0"):
        analysis.angles(gaussian, FMT, by="layer")


def test_rate_distortion_names_formats(few):
    table = analysis.rate_distortion(few, [FMT, FULL, OFFSET])
    assert table.format.values.tolist() == ["4,5", "5,4,4,4,4,4", "5,4,4,4,4,4 int8 offset"]
    assert table.level_bits.values.tolist() == ["4,5", "5,4,4,4,4,4", "5,4,4,4,4,4"]
    assert table.offset.values.tolist() == ["none", "none", "int8"]
    for i, fmt in enumerate((FMT, FULL, OFFSET)):
        one = analysis.distortion(few, fmt)
        for name in one:
            assert float(table[name][i]) == float(one[name])
    assert table.radius.values.tolist() == ["float16"] * 3
    short = analysis.rate_distortion(few, [replace(FMT, radius="log8")])
    assert short.format.values.tolist() == ["4,5 log8 radii"]
    assert short.bits_per_value[0] < table.bits_per_value[0]
    named = analysis.rate_distortion(few, {"a": FMT, "b": FMT})
    assert named.format.values.tolist() == ["a", "b"]


@pytest.mark.parametrize(
    ("formats", "error", "message"),
    [
        ([], ValueError, "there must be some"),
        ([FMT, FMT], ValueError, "'4,5' twice"),
        ([FMT, PolarFormat(128, (4,))], ValueError, r"\[64, 128\]"),
        ({"a": "balanced"}, TypeError, r"formats\[a\] is 'balanced'"),
    ],
    ids=["none", "twice", "head_dim", "no format"],
)
def test_formats_must_be_formats(gaussian, formats, error, message):
    with pytest.raises(error, match=message):
        analysis.rate_distortion(gaussian, formats)


def test_angle_error_is_the_error_of_one_level(gaussian):
    ds = analysis.angle_error(gaussian, FULL)
    assert dict(ds.sizes) == {"level": 6, "bits": 6}
    np.testing.assert_allclose(ds.error, ds.expected_error, rtol=0.12)
    # with one level there is nothing else: the codec's own error, but for float16 radii
    alone = analysis.angle_error(gaussian, PolarFormat(64, (4,)), bits=[4])
    measured = analysis.distortion(gaussian, PolarFormat(64, (4,)))
    np.testing.assert_allclose(alone.error[0, 0], measured.error, rtol=1e-3)


@pytest.mark.parametrize("bits", [[], [0], [7]], ids=["none", "0", "7"])
def test_bits_must_be_in_range(gaussian, bits):
    with pytest.raises(ValueError, match=r"bits are .* each 1 to 6"):
        analysis.angle_error(gaussian, FMT, bits=bits)


# ---- attention -----------------------------------------------------------------------------------

PAIRS = {"fine": FormatPair(OFFSET, FULL), "coarse": FormatPair(FMT, FMT)}
TOKENS = 80 if NOJIT else 200


@pytest.fixture(scope="module")
def captured():
    """Two layers of two kv heads and four heads; larger keys in the second layer."""
    import xarray as xr

    rng = np.random.default_rng(3)
    q = rng.standard_normal((2, 4, TOKENS, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, 2, 2, TOKENS, 64), dtype=np.float32)
    k[1] *= 2
    return xr.Dataset(
        {
            "query": (("layer", "head", "token", "coord"), q),
            "key": (("layer", "kv_head", "token", "coord"), k),
            "value": (("layer", "kv_head", "token", "coord"), v),
        },
        coords={"layer": ("layer", [4, 7], {"long_name": "layer of the model", "units": "1"})},
    )


def test_attention_error_is_that_of_textbook_attention(captured):
    from polarquant_nb import encode

    ds = analysis.attention_error(captured, PAIRS, queries=5, sink=2, recent=10)
    assert ds.error.dims == ds.kl.dims == ("format", "layer", "head")
    assert ds.layer.values.tolist() == [4, 7]
    assert ds.kv_head.values.tolist() == [0, 0, 1, 1]
    middle = slice(2, TOKENS - 10)
    for name, pair in PAIRS.items():
        for layer in (4, 7):
            q, k, v = (captured[n].sel(layer=layer).values for n in ("query", "key", "value"))
            q = q[:, -5:]
            coded_k, coded_v = k.copy(), v.copy()
            coded_k[:, middle] = encode(k[:, middle].copy(), pair.keys).decode()
            coded_v[:, middle] = encode(v[:, middle].copy(), pair.values).decode()
            exact, lse = exact_attention(q[None], k[None], v[None], causal=True)
            ours, coded_lse = exact_attention(q[None], coded_k[None], coded_v[None], causal=True)
            error = ((ours - exact) ** 2).sum((2, 3)) / (exact**2).sum((2, 3))
            here = ds.sel(format=name, layer=layer)
            np.testing.assert_allclose(here.error, error[0], rtol=1e-3)
            # KL = Σ p (x − x̂) − lse + lse^, x the logits
            twice = np.repeat(k, 2, 0), np.repeat(coded_k, 2, 0)
            x, x_coded = (q.astype(float) @ each.swapaxes(1, 2) / 8 for each in twice)
            seen = np.tri(5, TOKENS, TOKENS - 5, dtype=bool)
            p = np.where(seen, np.exp(x - lse[0, ..., None]), 0)
            kl = (p * (x - x_coded)).sum(-1) - lse[0] + coded_lse[0]
            np.testing.assert_allclose(here.kl, kl.mean(-1), rtol=1e-3)
    assert (ds.error.sel(format="fine") < ds.error.sel(format="coarse")).all()


def test_bits_of_attention_error_are_those_of_the_pages(captured):
    from polarquant_nb import encode

    ds = analysis.attention_error(captured, PAIRS)
    key = captured.key.values[0, :, 4 : TOKENS - 64].copy()
    nbytes = sum(encode(key, fmt).nbytes for fmt in (PAIRS["fine"].keys, PAIRS["fine"].values))
    np.testing.assert_array_equal(ds.bits_per_value.sel(format="fine"), 8 * nbytes / key.size / 2)


def test_scale_and_softcap_are_used(captured):
    one = captured.sel(layer=[4])
    small = analysis.attention_error(one.assign(scale=("layer", [1e-9])), PAIRS)
    assert (small.kl < 1e-12).all()
    plain, again = (
        analysis.attention_error(ds, PAIRS) for ds in (one, one.assign(scale=("layer", [0.125])))
    )
    np.testing.assert_array_equal(plain.kl, again.kl)
    capped = analysis.attention_error(one.assign(softcap=("layer", [1e-9])), PAIRS)
    assert (capped.kl < 1e-12).all()


def test_calibrations_have_formats_and_scales_of_each_layer(captured):
    from polarquant_nb.calibration import Calibration, LayerCalibration
    from polarquant_nb.layer_bits import LayerNeeds

    point = ((0.01, 0.001),)
    scales = np.exp(np.random.default_rng(4).standard_normal((2, 64)))
    scales /= np.exp(np.log(scales).mean(-1, keepdims=True))
    needs = LayerNeeds(2, 64, 64, point, point)
    own = LayerCalibration(PAIRS["fine"], Preconditioner(scales), needs)
    layers = [None] * 8
    layers[4] = own
    calibration = Calibration(tuple(layers), 4.0, "a model", "a text", {})
    ds = analysis.attention_error(captured, {"own": calibration, **PAIRS})
    assert (ds.error.sel(format="own", layer=7) == 0).all()  # left out: exact
    assert np.isnan(ds.bits_per_value.sel(format="own", layer=7))
    here, fine = (ds.kl.sel(format=name, layer=4).values for name in ("own", "fine"))
    assert (here > 0).all()
    assert (here != fine).all()


@pytest.mark.parametrize(
    ("change", "options", "error", "message"),
    [
        (lambda ds: ds.drop_vars("key"), {}, ValueError, "no 'key'"),
        (lambda ds: ds.isel(layer=0), {}, ValueError, r"captured\['query'\] has dimensions"),
        (lambda ds: ds.isel(head=slice(3)), {}, ValueError, "3 heads"),
        (lambda ds: ds.isel(token=slice(68)), {}, ValueError, "68 tokens; .* more than 68"),
        (lambda ds: ds, {"queries": 0}, ValueError, "queries is 0; it must be at least 1"),
        (lambda ds: ds, {"sink": -1}, ValueError, "sink is -1"),
        (lambda ds: ds, {"formats": ["big"]}, ValueError, "preset is 'big'"),
        (lambda ds: ds, {"formats": "balanced"}, TypeError, "must be a mapping"),
        (lambda ds: ds, {"formats": {"a": FMT}}, TypeError, r"formats\['a'\] is PolarFormat"),
        (lambda ds: ds, {"formats": []}, ValueError, "at least one"),
        (lambda ds: ds * np.nan, {}, ValueError, "not finite"),
    ],
    ids=[
        "key", "dims", "heads", "tokens", "queries", "sink", "preset", "string", "format", "none",
        "nan",
    ],
)  # fmt: skip
def test_attention_error_refuses(captured, change, options, error, message):
    with pytest.raises(error, match=message):
        analysis.attention_error(change(captured), **{"formats": PAIRS, **options})


# ---- larger than memory --------------------------------------------------------------------------


@pytest.fixture
def watched():
    """A dask array of 64 MiB whose blocks are made when they are asked for."""
    da = pytest.importorskip("dask.array")
    dask = pytest.importorskip("dask")

    def block(block_info=None):
        where = block_info[None]
        rng = np.random.default_rng(where["chunk-location"])
        return rng.standard_normal(where["chunk-shape"], dtype=np.float32)

    x = da.map_blocks(block, chunks=((1,) * 64, (4096,), (64,)), dtype=np.float32)
    with dask.config.set(scheduler="threads", num_workers=2):
        yield x


def peak_of(function):
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["angles", "angle_error", "rate_distortion"])
@pytest.mark.skipif(NOJIT, reason="a quarter of a million vectors")
def test_a_dask_array_is_never_held_whole(watched, monkeypatch, name):
    da = pytest.importorskip("dask.array")
    import xarray as xr

    array = xr.DataArray(watched, dims=("layer", "token", "coord"))
    fmt = PolarFormat(64, (4, 5))
    calls = {
        "angles": lambda x: analysis.angles(x, fmt, by="layer"),
        "angle_error": lambda x: analysis.angle_error(x, fmt, bits=[4]),
        "rate_distortion": lambda x: analysis.rate_distortion(x, [fmt], by="layer"),
    }
    calls[name](array[:2])  # compiles
    # one block is 1 MiB, in float64 with its angles some ten times as much; two run at a time
    assert peak_of(lambda: calls[name](array)) < watched.nbytes / 2

    def whole(self, *args, **kwargs):
        raise AssertionError("the whole array was asked for")

    monkeypatch.setattr(da.Array, "__array__", whole)
    found = calls[name](array[:2])
    monkeypatch.undo()
    assert found.equals(calls[name](array[:2].compute()))


def test_chunks_may_lie_anywhere(gaussian):
    da = pytest.importorskip("dask.array")
    x = da.from_array(gaussian, chunks=(2, 100, 24))
    for fmt in (FMT, OFFSET):
        assert analysis.angles(x, fmt).identical(analysis.angles(gaussian, fmt))
        assert analysis.distortion(x, fmt).identical(analysis.distortion(gaussian, fmt))


@pytest.mark.slow
@pytest.mark.skipif(NOJIT, reason="a quarter of a million vectors")
def test_attention_error_reads_layer_by_layer(watched):
    import xarray as xr

    x = watched.reshape(32, 2, 4096, 64)
    names = {"query": "head", "key": "kv_head", "value": "kv_head"}
    ds = xr.Dataset({name: (("layer", head, "token", "coord"), x) for name, head in names.items()})
    pairs = {"a": PAIRS["coarse"]}
    few = analysis.attention_error(ds.isel(layer=slice(2)), pairs, queries=4)
    peak = peak_of(lambda: analysis.attention_error(ds, pairs, queries=4))
    assert peak < watched.nbytes  # of three arrays of that size
    held = analysis.attention_error(ds.isel(layer=slice(2)).compute(), pairs, queries=4)
    assert few.equals(held)


@pytest.mark.skipif(NOJIT, reason="a quarter of a million vectors")
def test_a_file_is_read_piece_by_piece(watched, tmp_path):
    pytest.importorskip("h5netcdf")
    import xarray as xr

    ds = xr.Dataset({"key": (("layer", "token", "coord"), watched)})
    ds.to_netcdf(tmp_path / "k.nc", engine="h5netcdf")
    fmt = PolarFormat(64, (4, 5))
    with xr.open_dataset(tmp_path / "k.nc", engine="h5netcdf") as file:
        assert peak_of(lambda: analysis.distortion(file.key, fmt)) < watched.nbytes / 2
        assert analysis.distortion(file.key[3], fmt).equals(
            analysis.distortion(watched[3].compute(), fmt)
        )


def test_import_is_lean():
    code = (
        "import sys, polarquant_nb.analysis, polarquant_nb.evaluate, polarquant_nb.plot\n"
        "heavy = {'xarray', 'torch', 'transformers', 'matplotlib', 'dask'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
