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
