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


def summary(contender, family, bits, kl, stderr):
    return {
        "contender": contender,
        "family": family,
        "bits_per_value": bits,
        "kl": kl,
        "kl_stderr": stderr,
    }


@pytest.fixture
def quality():
    answers = [
        {"contender": name, "length": length, "depth": depth, "hit": hit, "nll": nll}
        for name, length, depth, hit, nll in (
            ("exact", 200, 0.5, True, 0.1),
            ("exact", 100, 0.0, True, 0.2),
            ("ours", 200, 0.5, True, 1.0),
            ("ours", 200, 0.5, False, 2.0),
            ("ours", 100, 0.0, False, 4.0),
        )
    ]
    rows = [
        summary("exact", "exact", 16, 0, 0),
        summary("ours, fine", "ours", 4, 0.01, 0.001),
        summary("ours, coarse", "ours", 2, 0.1, 0.02),
        summary("peer", "peer", 3, 0.2, None),
    ]
    return {"summary": rows, "needle_rows": answers}


def test_frontier_joins_families_and_shows_what_none_beats(quality):
    style = dict(matplotlib.rcParams)
    ax = figure.Figure().subplots()
    assert plot.frontier(quality, ax) is ax
    ours, peer = ax.containers
    assert (ours.get_label(), peer.get_label()) == ("ours", "peer")
    np.testing.assert_array_equal(ours[0].get_data(), [[2, 4], [0.1, 0.01]])
    np.testing.assert_array_equal(peer[0].get_data(), [[3], [0.2]])
    assert ours[0].get_color() != peer[0].get_color()
    assert ours[0].get_marker() != peer[0].get_marker()
    coarse, fine = ours[2][0].get_segments()
    np.testing.assert_allclose(fine[:, 1], [0.009, 0.011])
    np.testing.assert_allclose(coarse[:, 1], [0.08, 0.12])
    (steps,) = (line for line in ax.lines if line.get_drawstyle() == "steps-post")
    np.testing.assert_array_equal(steps.get_data(), [[2, 4], [0.1, 0.01]])
    assert [text.get_text() for text in ax.texts] == ["coarse", "fine", ""]
    assert ax.get_yscale() == "log"
    assert "bits" in ax.get_xlabel()
    assert "nats" in ax.get_ylabel()
    assert dict(matplotlib.rcParams) == style


def test_needles_are_drawn_by_length_and_depth(quality):
    style = dict(matplotlib.rcParams)
    axes = figure.Figure().subplots(2)
    exact, ours = plot.needle(quality, axes)
    assert [exact, ours] == list(axes)
    assert [ax.get_title() for ax in axes] == ["exact", "ours"]
    for ax, hits in ((exact, [[1, np.nan], [np.nan, 1]]), (ours, [[0, np.nan], [np.nan, 0.5]])):
        (image,) = ax.images
        np.testing.assert_array_equal(np.ma.filled(image.get_array(), np.nan), hits)
        assert image.get_clim() == (0, 1)
        assert image.get_cmap().name == "cividis"
        assert [label.get_text() for label in ax.get_xticklabels()] == ["100", "200"]
        assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "0.5"]
    assert {text.get_position(): text.get_text() for text in ours.texts} == {
        (0, 0): "4.00",
        (1, 1): "1.50",
    }
    assert dict(matplotlib.rcParams) == style


def test_needles_of_one_contender_are_one_axes_and_axes_are_counted(quality):
    with pytest.raises(ValueError, match="ax holds 1 axes; the results have 2 contenders"):
        plot.needle(quality, figure.Figure().subplots())
    quality["needle_rows"] = quality["needle_rows"][:2]
    ax = figure.Figure().subplots()
    assert plot.needle(quality, ax) is ax
    with pytest.raises(ValueError, match="no needles"):
        plot.needle({"needle_rows": []})


def test_frontier_and_needle_make_a_figure_if_there_is_none(quality):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    for ax in (plot.frontier(quality), plot.needle(quality)[0]):
        ax.figure.canvas.draw()
        pyplot.close(ax.figure)
