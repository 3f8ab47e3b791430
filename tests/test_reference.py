"""The oracle itself: the paper's formulas on vectors whose answer is known."""

from math import pi

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from strategies import formats
from support import RANDOM_FORMATS, centred, gaussian, ident, per_token, squared

from polarquant_nb import PolarFormat, preset, presets, reference
from polarquant_nb.densities import relative_error
from polarquant_nb.layout import PAGE
from polarquant_nb.reference import inverse_polar_transform, polar_transform
from polarquant_nb.rotations import Rotation, rotation_for


def test_toy_vector():
    """The worked example of the paper's definition: (3, 4, 4, 3)."""
    angles, radii = polar_transform([3.0, 4.0, 4.0, 3.0], 2)
    np.testing.assert_allclose(angles[0], [np.arctan(4 / 3), np.arctan(3 / 4)], rtol=1e-15)
    np.testing.assert_allclose(angles[0], [0.927, 0.644], atol=5e-4)
    assert angles[1].tolist() == [pi / 4]
    np.testing.assert_allclose(radii, [50**0.5], rtol=1e-15)
    np.testing.assert_array_equal(polar_transform([3.0, 4.0, 4.0, 3.0], 1)[1], [5, 5])


@pytest.mark.parametrize(
    ("pair", "angle"),
    [
        ((1, 0), 0),
        ((1, 1), pi / 4),
        ((0, 1), pi / 2),
        ((-1, 0), pi),
        ((-1, -0.0), pi),
        ((0, -1), 3 * pi / 2),
        ((1, -1), 7 * pi / 4),
        ((0, 0), 0),
    ],
)
def test_level_1_angles_run_around_the_circle(pair, angle):
    assert polar_transform(np.array(pair, float), 1)[0][0] == pytest.approx([angle], abs=1e-15)


finite = st.floats(-1e100, 1e100)


@given(hnp.arrays(np.float64, (3, 16), elements=finite), st.integers(1, 4))
def test_transform_has_its_ranges_and_can_be_undone(x, num_levels):
    angles, radii = polar_transform(x, num_levels)
    assert [psi.shape for psi in angles] == [(3, 16 >> level) for level in range(1, num_levels + 1)]
    assert ((angles[0] >= 0) & (angles[0] < 2 * pi)).all()
    for psi in angles[1:]:
        assert ((psi >= 0) & (psi <= pi / 2)).all()
    blocks = x.reshape(3, -1, 2**num_levels)
    largest = np.abs(blocks).max(-1)
    np.testing.assert_allclose(
        radii,
        np.linalg.norm(blocks / np.where(largest, largest, 1)[..., None], axis=-1) * largest,
        rtol=1e-12,
    )
    error = inverse_polar_transform(angles, radii) - x
    assert (np.abs(error.reshape(blocks.shape)) <= 1e-14 * radii[..., None]).all()


def test_coordinates_are_products_along_the_tree():
    """REFERENCE: coordinate i is its block's norm times cos or sin of angle ⌈i/2^ℓ⌉, by i's bit."""
    x = gaussian(1, 32)[0].astype(np.float64)
    angles, radii = polar_transform(x, 4)
    for i in range(32):
        product = radii[i // 16]
        for level, psi in enumerate(angles, 1):
            first_half = (i >> (level - 1)) % 2 == 0
            angle = psi[i >> level]
            product *= np.cos(angle) if first_half else np.sin(angle)
        assert product == pytest.approx(x[i], rel=1e-12)


@given(formats(st.sampled_from([16, 32, 48, 64, 80])), st.integers(1, 200), st.integers(0, 99))
def test_codes_are_nearest_and_shapes_are_as_documented(fmt, seq_len, seed):
    x = gaussian(2, seq_len, fmt.head_dim, seed=seed)
    encoded = reference.encode(x, fmt)
    r = rotation_for(fmt).apply(x)
    if fmt.offset is None:
        assert encoded.offsets is None
    else:
        assert encoded.offsets.shape == (2, -(-seq_len // PAGE), fmt.head_dim)
        r = r - per_token(encoded.offsets, seq_len)
    angles, radii = polar_transform(r, fmt.num_levels)
    if fmt.radius == "float16":
        np.testing.assert_array_equal(encoded.radii, radii.astype(np.float16))
    else:  # Gaussian blocks of two numbers may differ a thousandfold
        assert (np.abs(encoded.radii - radii) <= 2.0**-5 * radii).all()
    decoded = reference.decode(encoded, fmt)
    assert decoded.shape == x.shape
    # the angles of the reconstruction lie in the codes' cells: at most half the widest cell away
    for level, (psi, code, bits) in enumerate(
        zip(angles, encoded.codes, fmt.level_bits, strict=True), 1
    ):
        assert code.shape == psi.shape
        assert code.min() >= 0
        assert code.max() < 2**bits
        if level == 1:
            half_cell = pi / 2**bits
            exact = np.exp(1j * psi)
            stored = np.exp(1j * reference.codeword_angles(1, bits)[code])
            assert np.abs(np.angle(stored / exact)).max() <= half_cell + 1e-12


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_page_offsets_are_the_means_of_real_tokens(kind):
    fmt = PolarFormat(32, (4, 2), kind, "none")
    r = gaussian(2, 300, 32).astype(np.float64) + 5
    offsets = reference.page_offsets(r, fmt)
    assert offsets.shape == (2, 3, 32)
    for page, rows in enumerate((slice(0, 128), slice(128, 256), slice(256, 300))):
        mean = r[:, rows].mean(1)
        step = np.abs(mean).max() / 127 if kind == "int8" else np.abs(mean).max() * 2**-11
        assert np.abs(offsets[:, page] - mean).max() <= 0.51 * step if kind == "int8" else step


@pytest.mark.parametrize("fmt", RANDOM_FORMATS, ids=ident)
def test_round_trip_matches_the_closed_form(fmt):
    x = gaussian(2**18 // fmt.head_dim // PAGE * PAGE, fmt.head_dim, seed=1)
    error = reference.decode(reference.encode(x, fmt), fmt) - x
    found = squared(error).sum() / squared(centred(x, fmt)).sum()
    assert found == pytest.approx(fmt.relative_error, rel=0.02)


@pytest.fixture(scope="module")
def many_haar_rotations():
    """S of 1,500 seeds at head_dim 32, ``(32, 1500, 32)``: x @ it is x under every seed."""
    return np.stack(
        [Rotation("haar", 32, seed).dense.astype(np.float64) for seed in range(1500)], 1
    )


@given(data=st.data())
def test_error_is_the_closed_form_for_any_vector(many_haar_rotations, data):
    """E‖x − x̂‖² = ε‖x‖² over Haar rotations, whatever x is: nothing is assumed about data."""
    magnitudes = st.floats(1e-3, 1e3) | st.just(0.0)
    signed = st.tuples(magnitudes, st.sampled_from([-1, 1])).map(lambda pair: pair[0] * pair[1])
    x = data.draw(hnp.arrays(np.float64, 32, elements=signed).filter(np.any))
    fmt = PolarFormat(
        32, data.draw(st.sampled_from([(4, 2, 2, 2), (5, 3, 3, 3, 3), (2, 1, 1)])), rotation="none"
    )
    r = np.tensordot(x, many_haar_rotations, 1)
    error = reference.decode(reference.encode(r, fmt), fmt) - r
    assert squared(error).mean() / squared(x) == pytest.approx(fmt.relative_error, rel=0.03)


@pytest.mark.parametrize("name", presets())
def test_closed_form_of_presets(name):
    """REFERENCE's numbers: .0321 for the paper's setting, .0094 for 5,3,3,3,3,3,3."""
    assert relative_error((5, 3, 3, 3, 3, 3, 3)) == pytest.approx(0.0094, abs=5e-5)
    pair = preset(name, 128)
    if name == "paper":
        assert pair.keys.relative_error == pytest.approx(0.0321, abs=5e-5)
    assert pair.values.relative_error == relative_error(pair.values.level_bits)
