"""Codebooks: analytic by default, fitted to data as the paper's option."""

import json
from math import pi

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import compiled_formats, rows
from support import NOJIT, SMALL, SMALL_OFFSET, gaussian, same_rows, squared, token_codes

import polarquant_nb as pq
from polarquant_nb import reference
from polarquant_nb.densities import angle_range, codeword_angles
from polarquant_nb.reference import polar_transform

TOKENS = 256 if NOJIT else 1024

# Angles that the analytic codebooks do not expect: rotation none, eight directions, small ripples.
CLUSTERED = pq.PolarFormat(64, (3, 2, 2), rotation="none")


def clustered(seed=0):
    rng = np.random.default_rng(seed)
    angle = rng.integers(0, 8, (TOKENS, 32)) * (pi / 4) + 0.03 * rng.standard_normal((TOKENS, 32))
    pairs = np.stack([np.cos(angle), np.sin(angle)], -1)
    return pairs.reshape(TOKENS, 64).astype(np.float32)


def error(x, pages):
    return squared(pages.decode() - x).sum() / squared(x).sum()


def test_analytic_codebooks_are_shared_and_free():
    codebooks = pq.Codebooks.analytic(SMALL)
    assert codebooks is pq.Codebooks.analytic(pq.PolarFormat(128, SMALL.level_bits, "int8"))
    assert codebooks.level_bits == SMALL.level_bits
    assert codebooks.nbytes == 0
    assert codebooks.is_analytic


def test_fitted_codebooks_serve_data_that_the_analytic_ones_do_not():
    x = clustered()
    fitted = pq.Codebooks.fit(x, CLUSTERED)
    assert fitted.level_bits == CLUSTERED.level_bits
    analytic = reference.decode(reference.encode(x, CLUSTERED), CLUSTERED)
    assert error(x, pq.encode(x, CLUSTERED, codebooks=fitted)) < 0.01
    assert squared(analytic - x).sum() / squared(x).sum() > 0.03
    # offline: fitted on one sample, used on another
    other = clustered(seed=1)
    assert error(other, pq.encode(other, CLUSTERED, codebooks=fitted)) < 0.01


def test_fitted_codebooks_of_gaussian_data_are_as_good_as_the_analytic_ones():
    x = gaussian(TOKENS, 64)
    pages = pq.encode(x, SMALL, codebooks=pq.Codebooks.fit(x, SMALL))
    assert error(x, pages) == pytest.approx(SMALL.relative_error, rel=0.05)


def test_fit_looks_at_what_the_format_codes():
    """Keys with a large mean: angles after the page offset, not before."""
    fmt = pq.PolarFormat(64, (4, 2), "int8")
    x = gaussian(TOKENS, 64)
    _, level2 = pq.Codebooks.fit(x + 50, fmt).angles
    np.testing.assert_allclose(level2, codeword_angles(2, 2), atol=0.05)


def test_online_is_a_fit_per_call():
    x = gaussian(2, 200, 64)
    online = pq.encode(x, SMALL, codebooks="online")
    fitted = pq.encode(x, SMALL, codebooks=pq.Codebooks.fit(x, SMALL))
    np.testing.assert_array_equal(online.words, fitted.words)
    assert online.codebooks.level_bits == SMALL.level_bits
    # their bytes count
    assert online.nbytes == online.words.nbytes + 4 * (2**4 + 2**5)


def test_fit_depends_on_the_seed_only():
    x = gaussian(200, 64)
    again = [pq.Codebooks.fit(x, SMALL, seed=seed).angles[1] for seed in (3, 3, 4)]
    np.testing.assert_array_equal(again[0], again[1])
    assert not np.array_equal(again[0], again[2])


def test_fit_leaves_rows_that_are_not_finite_out():
    x = gaussian(200, 64)
    broken = x.copy()
    broken[[3, 50]] = np.nan
    broken[9, 1] = np.inf
    finite = np.delete(x, [3, 9, 50], 0)
    for a, b in zip(
        pq.Codebooks.fit(broken, SMALL).angles, pq.Codebooks.fit(finite, SMALL).angles, strict=True
    ):
        np.testing.assert_array_equal(a, b)


def test_fit_takes_torch_tensors():
    torch = pytest.importorskip("torch")
    x = gaussian(2, 100, 64)
    expected = pq.Codebooks.fit(x, SMALL).angles
    tensor = torch.tensor(x, requires_grad=True)
    for a, b in zip(pq.Codebooks.fit(tensor, SMALL).angles, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert pq.Codebooks.fit(tensor.bfloat16(), SMALL).level_bits == SMALL.level_bits


@given(data=st.data())
@settings(max_examples=20)
def test_any_data_can_be_fitted(data):
    """Also few rows, equal rows and zeros, where there are fewer angles than codewords."""
    fmt = data.draw(compiled_formats().filter(lambda f: f.head_dim <= 128))
    x = data.draw(rows(data.draw(st.integers(1, 5)), fmt.head_dim)) * data.draw(
        st.sampled_from([0, 1])
    )
    codebooks = pq.Codebooks.fit(x, fmt)
    assert codebooks.level_bits == fmt.level_bits
    for level, codewords in enumerate(codebooks.angles, 1):
        assert (np.diff(np.sort(codewords)) > 0).all()
        assert 0 <= codewords.min() <= codewords.max() <= angle_range(level)


def test_case_2_constant_data_can_be_fitted_online():
    """CASES row 2 (ericshwu/PolarQuant): a scale fitted to a constant channel was 0, codes NaN."""
    for x in (np.zeros((5, 64), np.float32), np.full((5, 64), 3.0, np.float32), gaussian(1, 64)):
        pages = pq.encode(x, SMALL, codebooks="online")
        assert np.isfinite(pages.decode()).all()
        assert error(x, pages) < 0.05 if x.any() else not pages.decode().any()


# ---- own codebooks -------------------------------------------------------------------------------


def test_codewords_are_sorted_and_code_0_is_the_cell_of_angle_0():
    codebooks = pq.Codebooks([[3.0, 1.0, 6.0, 5.0], [1.0, 0.5]])
    assert codebooks.level_bits == (2, 1)
    # angle 0 = 2π is nearer to 6.0 than to 1.0
    assert codebooks.angles[0].tolist() == [6.0, 1.0, 3.0, 5.0]
    assert codebooks.angles[1].tolist() == [0.5, 1.0]
    assert pq.Codebooks([[4.0, 0.5]]).angles[0].tolist() == [0.5, 4.0]
    with pytest.raises(ValueError, match="read-only"):
        codebooks.angles[0][0] = 0


@given(st.lists(st.floats(0, 6.28), min_size=8, max_size=8, unique=True), st.integers(0, 2**32 - 1))
@settings(max_examples=15)
def test_codes_of_any_level_1_codebook_are_nearest_on_the_circle(angles, seed):
    """Whatever the codewords, uneven and across the seam."""
    fmt = pq.PolarFormat(16, (3,), rotation="none")
    codebooks = pq.Codebooks([angles])
    x = np.random.default_rng(seed).standard_normal((16, 16), dtype=np.float32)
    code = token_codes(pq.encode(x, fmt, codebooks=codebooks))[0]
    (psi,), _ = polar_transform(x, 1)
    distance = np.abs(psi[..., None] - codebooks.angles[0])
    distance = np.minimum(distance, 2 * pi - distance)
    chosen = np.take_along_axis(distance, code[..., None].astype(np.int64), -1)[..., 0]
    # twice the distance to the boundary between the two: see test_kernels.py
    assert (chosen - distance.min(-1)).max() <= 2e-6


@pytest.mark.parametrize(
    ("angles", "message"),
    [
        ([[0.0, 1.0, 2.0]], "angles has 3 codewords at level 1; it must be 2, 4, 8, 16, 32 or 64"),
        (
            [[0.5, 1.5], [0.5]],
            "angles has 1 codewords at level 2; it must be 2, 4, 8, 16, 32 or 64",
        ),
        ([np.linspace(0, 6, 128)], "angles has 128 codewords at level 1"),
        ([[1.0, 1.0]], r"angles at level 1 .* must be distinct and within \[0, 6.28"),
        ([[-0.1, 1.0]], r"angles at level 1 run from -0.1 to 1.0; .* within \[0, 6.28"),
        ([[0.0, 2 * pi]], r"angles at level 1 .* must be distinct"),  # the same direction
        ([[0.1, 1.0], [0.1, 1.6]], r"angles at level 2 run from 0.1 to 1.6; .* within \[0, 1.57"),
        ([[0.1, np.nan]], r"angles at level 1 run from 0.1 to nan"),
    ],
)
def test_bad_codewords_are_named(angles, message):
    with pytest.raises(ValueError, match=message):
        pq.Codebooks(angles)


@pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])
def test_codebooks_of_other_bits_are_refused(fmt):
    other = pq.Codebooks.analytic(pq.PolarFormat(64, (4, 2, 2)))
    message = r"codebooks have \(4, 2, 2\) bits by level; the format has \("
    with pytest.raises(ValueError, match=message):
        pq.encode(gaussian(4, 64), fmt, codebooks=other)


@pytest.mark.parametrize("codebooks", ["offline", [[0.5, 1.0]], 3])
def test_what_is_no_codebooks_is_refused(codebooks):
    with pytest.raises((TypeError, ValueError), match=r"codebooks is .*'online'"):
        pq.encode(gaussian(4, 64), SMALL, codebooks=codebooks)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.zeros((3, 32)), r"x has shape \(3, 32\); it must be \(\.\.\., seq_len, 64\)"),
        (np.zeros(64), r"x has shape \(64,\); it must be \(\.\.\., seq_len, 64\)"),
        (np.full((3, 64), np.nan), "x holds no finite row"),
        (np.zeros((0, 64)), "x holds no finite row"),
        (np.zeros((2, 0, 64)), "x holds no finite row"),
        (np.zeros((0, 5, 64)), "x holds no finite row"),
    ],
    ids=["head_dim", "one axis", "NaN", "no token", "no token in two rows", "no row"],
)
def test_nothing_to_fit(x, message):
    with pytest.raises(ValueError, match=message):
        pq.Codebooks.fit(x, SMALL)


# ---- files ---------------------------------------------------------------------------------------


def test_saved_codebooks_give_the_same_codes(tmp_path):
    x = gaussian(150, 64)
    codebooks = pq.Codebooks.fit(x, SMALL)
    codebooks.save(tmp_path / "codebooks.json")
    loaded = pq.Codebooks.load(tmp_path / "codebooks.json")
    for a, b in zip(codebooks.angles, loaded.angles, strict=True):
        np.testing.assert_array_equal(a, b)
    a, b = (pq.encode(x, SMALL, codebooks=c) for c in (codebooks, loaded))
    assert same_rows(a, b)
    assert (
        pq.PolarPages.concatenate([pq.encode(x[:128], SMALL, codebooks=codebooks), b]).seq_len
        == 278
    )


def test_saved_analytic_codebooks_are_equal_when_loaded(tmp_path):
    codebooks = pq.Codebooks.analytic(SMALL)
    codebooks.save(str(tmp_path / "codebooks.json"))
    loaded = pq.Codebooks.load(str(tmp_path / "codebooks.json"))
    for a, b in zip(codebooks.angles, loaded.angles, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "3", '{"angles": [[0, 1]]}', json.dumps({"polarquant_nb codebooks": 1})],
)
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json.* does not hold codebooks"):
        pq.Codebooks.load(path)
