"""Angles and distortion of data whose answer is known; figures that show what the dataset holds."""

from __future__ import annotations

import subprocess
import sys
from math import pi

import numpy as np
import pytest

from polarquant_nb import PolarFormat, analysis

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


def test_datasets_survive_a_netcdf4_file(gaussian, tmp_path):
    pytest.importorskip("h5netcdf")
    import xarray as xr

    for ds in (analysis.angles(gaussian, OFFSET), analysis.distortion(gaussian, FMT)):
        ds.to_netcdf(tmp_path / "ds.nc", engine="h5netcdf")
        with xr.open_dataset(tmp_path / "ds.nc", engine="h5netcdf") as back:
            xr.testing.assert_equal(back, ds)
            assert list(back.attrs["level_bits"]) == ds.attrs["level_bits"]


def test_datasets_say_what_they_hold(gaussian):
    for ds in (analysis.angles(gaussian, OFFSET), analysis.distortion(gaussian, OFFSET)):
        for name, variable in ds.variables.items():
            assert variable.dtype in (np.int64, np.float64), name
            assert variable.attrs["long_name"]
            assert variable.attrs["units"]
        assert ds.attrs == {
            "head_dim": 64,
            "level_bits": [5, 4, 4, 4, 4, 4],
            "offset": "int8",
            "rotation": "hadamard",
            "rotation_seed": 0,
        }


@pytest.mark.parametrize(
    "function", [analysis.angles, analysis.distortion], ids=["angles", "distortion"]
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


def test_import_is_lean():
    code = (
        "import sys, polarquant_nb.analysis, polarquant_nb.evaluate, polarquant_nb.plot\n"
        "print(sorted({'xarray', 'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
