"""Figures hold what the dataset holds, on the axes that were given."""

from __future__ import annotations

import numpy as np
import pytest

from polarquant_nb import PolarFormat, analysis, plot

matplotlib = pytest.importorskip("matplotlib")
figure = pytest.importorskip("matplotlib.figure")


@pytest.fixture(scope="module")
def ds():
    x = np.random.default_rng(0).standard_normal((256, 64))
    return analysis.angles(x, PolarFormat(64, (4, 2, 2)), bins=20)


def test_draws_on_the_axes_it_is_given(ds):
    style = dict(matplotlib.rcParams)
    axes = figure.Figure().subplots(3)
    drawn = plot.angles(ds, axes)
    assert list(drawn) == list(axes)
    for level, ax in zip(ds.level.values, drawn, strict=True):
        one = ds.sel(level=level)
        heights, edges, _ = ax.patches[0].get_data()
        np.testing.assert_array_equal(heights, one.density)
        np.testing.assert_allclose((edges[:-1] + edges[1:]) / 2, one.angle)
        x, y = ax.lines[0].get_data()
        np.testing.assert_array_equal(x, one.angle)
        np.testing.assert_array_equal(y, one.expected_density)
        assert ax.get_title() == f"level {level}"
        assert "rad" in ax.get_xlabel()
    assert dict(matplotlib.rcParams) == style


def test_one_level_is_one_axes(ds):
    ax = figure.Figure().subplots()
    assert plot.angles(ds.sel(level=2), ax) is ax
    assert ax.get_title() == "level 2"


def test_makes_a_figure_if_there_is_none(ds):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    axes = plot.angles(ds)
    assert len(axes) == 3
    pyplot.close(axes[0].figure)


def test_axes_must_be_as_many_as_levels(ds):
    with pytest.raises(ValueError, match="ax holds 2 axes; the dataset has 3 levels"):
        plot.angles(ds, figure.Figure().subplots(2))


def result(stage, seq_len, contender, times_faster):
    return {
        "stage": stage,
        "preset": "balanced",
        "num_kv_heads": 1,
        "num_heads": 2,
        "head_dim": 64,
        "seq_len": seq_len,
        "contender": contender,
        "times_faster": times_faster,
        "quartiles": [times_faster / 2, 3 * times_faster],
    }


@pytest.fixture
def results():
    rows = [
        result("encode keys", 128, "ours", 1),
        result("encode keys", 128, "rotation", 0.25),
        result("encode values", 128, "rotation", 4),
        result("decode", 128, "slow", 9),
        result("decode", 256, "slow", 8),
        result("decode", 256, "slower", 10),
    ]
    return {"rows": rows}


def test_speed_has_a_panel_for_each_stage_and_a_line_for_each_case(results):
    axes = figure.Figure().subplots(2)
    encode, decode = plot.speed(results, axes)
    assert [encode, decode] == list(axes)
    assert [ax.get_title() for ax in axes] == ["encode", "decode"]
    assert encode.get_xlim() == decode.get_xlim() == (0.125 / 1.1, 30 * 1.1)
    case = "balanced, 1/2/64"
    assert [label.get_text() for label in decode.get_yticklabels()] == [
        f"{case}, 128 tokens",
        f"{case}, 256 tokens",
    ]
    assert encode.get_yticklabels()[1].get_text() == f"values, {case}, 128 tokens"
    slow, slower = decode.containers
    assert (slow.get_label(), slower.get_label()) == ("slow", "slower")
    x, y = slow[0].get_data()
    np.testing.assert_array_equal(x, [9, 8])
    np.testing.assert_array_equal(np.rint(np.array(y, float)), [0, 1])
    ((low, high),) = slower[2][0].get_segments()
    assert (low[0], high[0]) == (5, 30)
    assert slow[0].get_color() != slower[0].get_color() != encode.containers[0][0].get_color()


def test_speed_of_one_stage_is_one_axes(results):
    results["rows"] = results["rows"][3:]
    ax = figure.Figure().subplots()
    assert plot.speed(results, ax) is ax
    with pytest.raises(ValueError, match="ax holds 2 axes; the results have 1 panels"):
        plot.speed(results, figure.Figure().subplots(2))


def test_speed_makes_a_figure_if_there_is_none(results):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    axes = plot.speed(results)
    assert len(axes) == 2
    axes[0].figure.canvas.draw()
    pyplot.close(axes[0].figure)
