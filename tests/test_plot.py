"""Figures hold what the dataset holds, on the axes that were given."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support import RANDOM_FORMATS, SMALL_OFFSET, ident

from polarquant_nb import Codebooks, PolarFormat, analysis, plot
from polarquant_nb.densities import angle_density

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


def test_angles_have_units_and_a_legend(ds):
    axes = plot.angles(ds, figure.Figure().subplots(3))
    assert axes[0].get_ylabel() == "density (rad⁻¹)"
    assert [t.get_text() for t in axes[-1].get_legend().get_texts()] == ["observed", "theory"]


# ---- formats -------------------------------------------------------------------------------------


def stems(collection):
    return [tuple(segment[:, 0]) for segment in collection.get_segments()]


def test_codewords_stand_under_the_density():
    fmt = PolarFormat(64, (3, 2, 6))
    style = dict(matplotlib.rcParams)
    axes = figure.Figure().subplots(3)
    assert list(plot.codebook(fmt, ax=axes)) == list(axes)
    books = Codebooks.analytic(fmt)
    for level, (ax, codewords) in enumerate(zip(axes, books.angles, strict=True), 1):
        assert ax.get_title() == f"level {level}"
        assert ax.get_xlabel() == "angle (rad)"
        _, lines, borders = ax.collections
        np.testing.assert_array_equal([x for x, _ in stems(lines)], codewords)
        heights = [segment[1, 1] for segment in lines.get_segments()]
        np.testing.assert_array_equal(heights, angle_density(level, codewords))
        between = np.array([x for x, _ in stems(borders)])
        assert len(between) == len(codewords) - (level > 1)  # level 1 is a circle
        step = 2 * np.pi / 8 if level == 1 else None
        if step:
            np.testing.assert_allclose(np.sort(between), step * np.arange(8), atol=1e-12)
        else:
            np.testing.assert_allclose(between, (codewords[1:] + codewords[:-1]) / 2)
    codes = [{t.get_text(): t.xy[0] for t in ax.texts} for ax in axes]
    assert codes[0] == {str(i): x for i, x in enumerate(books.angles[0])}
    assert len(codes[1]) == 4
    assert codes[2] == {}  # no room for 64
    assert axes[0].get_ylabel() == "density (rad⁻¹)"
    assert dict(matplotlib.rcParams) == style


def test_fitted_codebooks_and_single_levels_are_drawn():
    fitted = Codebooks([[0.5, 2.0, 3.0, 6.0], [0.3, 1.2]])
    ax = figure.Figure().subplots()
    assert plot.codebook(fitted, 2, ax) is ax
    assert [x for x, _ in stems(ax.collections[1])] == [0.3, 1.2]
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    axes = plot.codebook(fitted)
    assert len(axes) == 2
    axes[0].figure.canvas.draw()
    pyplot.close(axes[0].figure)


def test_codebooks_that_are_none_are_refused():
    fmt = PolarFormat(64, (3, 2))
    with pytest.raises(TypeError, match="codebooks is 'balanced'"):
        plot.codebook("balanced")
    with pytest.raises(ValueError, match="level is 3; the codebooks have levels 1 to 2"):
        plot.codebook(fmt, 3, figure.Figure().subplots())
    with pytest.raises(ValueError, match="ax holds 1 axes; 2 levels are drawn"):
        plot.codebook(fmt, ax=figure.Figure().subplots())


@pytest.mark.parametrize(
    "fmt",
    [
        SMALL_OFFSET,
        PolarFormat(64, (4, 2, 2, 2)),
        RANDOM_FORMATS[0],
        replace(SMALL_OFFSET, radius="log8"),
        PolarFormat(64, (4, 2, 2, 2), radius="log8"),
    ],
    ids=ident,
)
def test_page_layout_draws_every_bit_where_it_is(fmt):
    style = dict(matplotlib.rcParams)
    ax = figure.Figure().subplots()
    assert plot.page_layout(fmt, ax) is ax
    layout = fmt.layout
    labels = [label.get_text() for label in ax.get_yticklabels()]
    boxes = {}
    for box, text in zip(ax.patches, ax.texts, strict=True):
        y = round(box.get_y() + box.get_height() / 2)
        boxes[labels[y], box.get_x()] = box.get_width(), text.get_text(), box.get_facecolor()

    # every node: in the row and at the bit that the layout reads it from, as wide as its code
    starts = [*layout.level_start, layout.num_nodes]
    colours = {}
    for row in layout.code_rows:
        words = f"{row.word:,}–{row.word + 4 * row.width - 1:,}"
        for node, shift in row.fields:
            level = sum(node >= start for start in starts[:-1])
            width, text, colour = boxes.pop((words, shift))
            assert width == fmt.level_bits[level - 1]
            assert text == str(node - starts[level - 1])
            assert colours.setdefault(level, colour) == colour
    assert len(set(colours.values())) == fmt.num_levels
    left = [(width, text) for width, text, _ in boxes.values()]
    assert sum(width for width, text in left if not text) == layout.padding_bits
    radii = [width for width, text in left if text.startswith("radius")]
    assert radii == [layout.radius_width] * fmt.num_blocks
    assert sum("anchor" in text for _, text in left) == (fmt.radius == "log8")
    assert sum("offset" in text for _, text in left) == (fmt.offset is not None)
    assert f"{fmt.page_nbytes:,} bytes" in ax.get_title()
    assert "bit" in ax.get_xlabel()
    # rows are in the order of the page, and no word is left out
    ends = [[int(x.replace(",", "")) for x in label.split("–")] for label in labels]
    assert [each[0] for each in ends] == [0, *(each[-1] + 1 for each in ends[:-1])]
    assert ends[-1][-1] == layout.num_words - 1
    legend = [t.get_text() for t in ax.get_legend().get_texts()]
    assert len(legend) == fmt.num_levels + (layout.padding_bits > 0)
    assert dict(matplotlib.rcParams) == style


def test_page_layout_takes_layouts_and_makes_a_figure():
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = plot.page_layout(PolarFormat(64, (4, 2, 2, 2)).layout)
    ax.figure.canvas.draw()
    pyplot.close(ax.figure)
    with pytest.raises(TypeError, match="fmt is 'paper'"):
        plot.page_layout("paper")


# ---- layers --------------------------------------------------------------------------------------


@pytest.fixture
def errors():
    import xarray as xr

    error = np.arange(1.0, 13).reshape(2, 3, 2)
    about = {"long_name": "KL of attention rows", "units": "nat"}
    return xr.Dataset(
        {"kl": (("format", "layer", "head"), error, about)},
        coords={"format": ["fine", "coarse"], "layer": [2, 5, 9]},
    )


def test_layer_error_draws_heads_and_their_mean(errors):
    style = dict(matplotlib.rcParams)
    ax = figure.Figure().subplots()
    assert plot.layer_error(errors, "kl", ax) is ax
    lines = {line.get_label(): line for line in ax.lines}
    for name in ("fine", "coarse"):
        x, y = lines[name].get_data()
        np.testing.assert_array_equal(x, [2, 5, 9])
        np.testing.assert_array_equal(y, errors.kl.sel(format=name).mean("head"))
    assert lines["fine"].get_color() != lines["coarse"].get_color()
    assert lines["fine"].get_marker() != lines["coarse"].get_marker()
    dots = [line.get_ydata() for line in ax.lines if line.get_linestyle() == "None"]
    np.testing.assert_array_equal(np.sort(np.concatenate(dots)), np.arange(1, 13))
    assert ax.get_yscale() == "log"
    assert ax.get_xlabel() == "layer"
    assert ax.get_ylabel() == "KL of attention rows (nat)"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["fine", "coarse"]
    assert dict(matplotlib.rcParams) == style


def test_layer_error_needs_no_formats_and_no_heads(errors):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    ax = plot.layer_error(errors.isel(format=0, drop=True).mean("head"), "kl")
    (line,) = ax.lines
    np.testing.assert_array_equal(line.get_ydata(), [1.5, 3.5, 5.5])
    assert ax.get_legend() is None
    ax.figure.canvas.draw()
    pyplot.close(ax.figure)


def test_layer_error_names_what_there_is(errors):
    with pytest.raises(ValueError, match=r"variable is 'error'; .* 'layer': kl"):
        plot.layer_error(errors)
    with pytest.raises(ValueError, match="the dataset has none"):
        plot.layer_error(errors.mean("layer"), "kl")


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
    assert [text.get_text() for text in ax.texts] == ["coarse", "fine"]
    assert ax.get_yscale() == "log"
    assert "bits" in ax.get_xlabel()
    assert "nats" in ax.get_ylabel()
    assert dict(matplotlib.rcParams) == style


def test_names_of_close_contenders_do_not_hide_each_other():
    """Points at about the same place, in the corner where names would leave the figure, too."""
    row = {"family": "ours", "kl_stderr": None}
    places = [(2.5, 1.3), (2.5, 1.0), (4.5, 0.007), (4.52, 0.0062), (4.5, 0.005), (8.5, 1e-5)]
    rows = [
        row | {"contender": f"method {i}", "bits_per_value": bits, "kl": kl}
        for i, (bits, kl) in enumerate(places)
    ]
    ax = figure.Figure().subfigures(1, 2)[0].subplots()
    plot.frontier({"summary": rows}, ax)
    boxes = [text.get_window_extent() for text in ax.texts]
    assert len(boxes) == len(places)
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


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
