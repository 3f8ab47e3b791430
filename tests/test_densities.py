"""Angle densities and analytic codebooks against SciPy's quadrature and distributions."""

import hashlib
from itertools import pairwise
from math import gamma, pi

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from scipy.spatial.distance import cdist
from support import run_python

from polarquant_nb.densities import (
    angle_cdf,
    angle_density,
    angle_range,
    codeword_angles,
    expected_cosine,
    fit_codewords,
    relative_error,
)

LEVELS = range(1, 10)
BITS = range(1, 7)
ALL_CODEBOOKS = [(level, bits) for level in LEVELS for bits in BITS]

# SHA-256 of the codewords of all levels and bits as little-endian float64, in order.  Codes are
# stored without their codebook: a change here alters what stored codes mean.
CODEBOOKS_SHA = "9cf2ae105a5cd5066f3ec384fe39b116e23095e7393b28003cd529ffe7e28015"

# Codewords are rounded to a grid that is coarser than the noise of quadrature and linear algebra,
# and finer than this, a quarter of a float32 rounding.
GRID = 2e-8


def quad(function, lower, upper, points=()):
    """Adaptive quadrature to about 1e-13, told where the function has corners or peaks."""
    inside = [p for p in points if lower < p < upper]
    edges = [lower, *inside, upper]
    return sum(
        integrate.quad(function, a, b, epsabs=1e-14, epsrel=1e-13, limit=200)[0]
        for a, b in pairwise(edges)
    )


def cell_edges(level, codewords):
    """Ends of the nearest-neighbour cells of ascending codewords."""
    inner = (codewords[1:] + codewords[:-1]) / 2
    if level == 1:
        seam = (codewords[-1] + codewords[0] - 2 * pi) / 2
        return np.r_[seam, inner, seam + 2 * pi]
    return np.r_[0, inner, pi / 2]


def density(level):
    return lambda psi: float(angle_density(level, psi % (2 * pi) if level == 1 else psi))


# ---- densities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_density_integrates_to_one(level):
    total = quad(density(level), 0, angle_range(level), points=[pi / 4])
    assert total == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("level", LEVELS[1:])
def test_sine_squared_is_beta(level):
    m = 2 ** (level - 1)
    beta = stats.beta(m / 2, m / 2)
    psi = np.linspace(0.01, pi / 2 - 0.01, 400)
    # d sin²ψ / dψ = sin 2ψ
    np.testing.assert_allclose(
        angle_density(level, psi),
        beta.pdf(np.sin(psi) ** 2) * np.sin(2 * psi),
        rtol=1e-10,
        atol=1e-300,
    )
    np.testing.assert_allclose(angle_cdf(level, psi), beta.cdf(np.sin(psi) ** 2), rtol=1e-10)


@pytest.mark.parametrize("level", LEVELS)
def test_distribution_function_is_the_integral_of_the_density(level):
    for psi in np.linspace(0.1, 0.9, 5) * angle_range(level):
        integral = quad(density(level), 0, psi, points=[pi / 4])
        assert angle_cdf(level, psi) == pytest.approx(integral, abs=1e-12)
    np.testing.assert_array_equal(angle_cdf(level, [-1, 0, angle_range(level), 9]), [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("level", "constant"),
    # REFERENCE: Γ(m) / (2^(m−2) Γ(m/2)²), the density at its peak π/4
    list(zip(range(2, 9), (1, 1.5, 2.1875, 3.14209, 4.47840, 6.35819, 9.00942), strict=True)),
)
def test_gamma_constants(level, constant):
    assert angle_density(level, pi / 4) == pytest.approx(constant, abs=5e-6)
    if level < 8:
        m = 2 ** (level - 1)
        exact = gamma(m) / (2 ** (m - 2) * gamma(m / 2) ** 2)
        assert angle_density(level, pi / 4) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(
    ("level", "variance"),
    list(
        zip(
            range(2, 8),
            (pi**2 / 16 - 0.5, 0.061295, 0.031091, 0.015605, 0.007810, 0.003906),
            strict=True,
        )
    ),
)
def test_mean_and_variance(level, variance):
    f = density(level)
    assert quad(lambda psi: psi * f(psi), 0, pi / 2, [pi / 4]) == pytest.approx(pi / 4, abs=1e-12)
    found = quad(lambda psi: (psi - pi / 4) ** 2 * f(psi), 0, pi / 2, [pi / 4])
    assert found == pytest.approx(variance, abs=5e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_density_is_zero_outside_and_keeps_shapes(level):
    psi = np.array([[-0.1, angle_range(level) + 0.1], [-np.inf, np.inf]])
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(angle_density(level, psi), np.zeros((2, 2)))
    assert angle_cdf(level, psi[:1]).shape == (1, 2)
    assert np.shape(angle_density(level, 0.5)) == ()


# ---- codebooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "codewords"),
    [
        (2, (0.30976, 0.63398, 0.93681, 1.26104)),
        (3, (0.42625, 0.67438, 0.89641, 1.14454)),
        # REFERENCE prints .52422 .70591 .86488 1.04657, three of them off by one in the last digit
        (4, (0.52421, 0.70591, 0.86489, 1.04658)),
        (5, (0.59850, 0.72895, 0.84184, 0.97229)),
        (6, (0.65254, 0.74542, 0.82537, 0.91825)),
        (7, (0.69122, 0.75711, 0.81368, 0.87957)),
    ],
)
def test_two_bit_codewords_of_the_reference(level, codewords):
    np.testing.assert_allclose(codeword_angles(level, 2), codewords, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("level", "bits"), ALL_CODEBOOKS)
def test_codewords_are_the_centroids_of_their_cells(level, bits):
    """Lloyd's two conditions: the cells are nearest-neighbour cells, codewords their centroids."""
    codewords = np.sort(codeword_angles(level, bits))
    assert codewords.shape == (2**bits,)
    edges = cell_edges(level, codewords)
    assert (np.diff(edges) > 0).all()
    f = density(level)
    for c, (lower, upper) in zip(codewords, pairwise(edges), strict=True):
        centroid = quad(lambda psi: psi * f(psi), lower, upper) / quad(f, lower, upper)
        assert centroid == pytest.approx(c, abs=GRID)


@pytest.mark.parametrize("level", [2, 5, 9])
@pytest.mark.parametrize("bits", [1, 3, 6])
def test_no_codeword_can_be_moved_for_the_better(level, bits):
    psi = (np.arange(400_000) + 0.5) / 400_000 * pi / 2
    weight = angle_density(level, psi)

    def distortion(codewords):
        cell = np.searchsorted((codewords[1:] + codewords[:-1]) / 2, psi)
        return (weight * (psi - codewords[cell]) ** 2).sum()

    best = codeword_angles(level, bits)
    gap = np.diff(best).min()
    for k in range(0, 2**bits, 5):
        for step in (-gap / 4, gap / 4):
            moved = best.copy()
            moved[k] += step
            assert distortion(moved) > distortion(best)


@pytest.mark.parametrize("bits", BITS)
def test_level_1_is_uniform_and_laid_out_by_symmetry(bits):
    angles = codeword_angles(1, bits)
    n = 2**bits
    np.testing.assert_allclose(np.sort(angles), (np.arange(n) + 0.5) * 2 * pi / n, atol=1e-12)
    if bits == 1:
        return
    # bit 0 turns by π; the highest bit mirrors the sine
    code = np.arange(n)
    np.testing.assert_allclose(np.exp(1j * angles[code ^ 1]), -np.exp(1j * angles), atol=1e-12)
    np.testing.assert_allclose(np.sin(angles[code ^ (n >> 1)]), -np.sin(angles), atol=1e-12)
    np.testing.assert_allclose(np.cos(angles[code ^ (n >> 1)]), np.cos(angles), atol=1e-12)


def test_codewords_are_symmetric_and_cannot_be_written_to():
    for level, bits in ALL_CODEBOOKS[6:]:
        codewords = codeword_angles(level, bits)
        np.testing.assert_allclose(codewords, pi / 2 - codewords[::-1], rtol=0, atol=GRID)
    with pytest.raises(ValueError, match="read-only"):
        codeword_angles(3, 2)[0] = 0


@pytest.mark.parametrize(("level", "bits"), ALL_CODEBOOKS)
def test_expected_cosine_is_its_integral(level, bits):
    codewords = np.sort(codeword_angles(level, bits))
    edges = cell_edges(level, codewords)
    f = density(level)
    rho = sum(
        quad(lambda psi: np.cos(psi - c) * f(psi), lower, upper)  # noqa: B023
        for c, (lower, upper) in zip(codewords, pairwise(edges), strict=True)
    )
    assert expected_cosine(level, bits) == pytest.approx(rho, abs=1e-12)


@pytest.mark.parametrize(
    ("level_bits", "printed", "digits"),
    [
        ((4, 2, 2, 2), 0.0321, 4),
        ((4, 3, 3, 2), 0.0205, 4),
        ((3, 3, 2, 2, 2, 2, 1), 0.0666, 4),
        ((4, 3, 3, 2, 2, 2, 2), 0.0236, 4),
        ((4, 4, 3, 3, 3, 3, 3), 0.0171, 4),
        ((5, 3, 3, 3, 3, 3, 3), 0.0094, 4),
        ((6, 4, 4, 3, 3, 3, 3), 0.0038, 4),
        ((3, 2, 2, 2, 2, 2, 2), 0.073, 3),
        ((4, 2, 2, 2, 2, 2, 2), 0.035, 3),
        ((4, 3, 3, 3, 3, 3, 3), 0.019, 3),
        ((5, 4, 4, 4, 4, 4, 4), 0.0049, 4),
        ((6, 4, 4, 4, 4, 4, 4), 0.0025, 4),
    ],
    ids=lambda value: "".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_distortion_table_of_the_reference(level_bits, printed, digits):
    # "Monte Carlo agrees to 3 digits": the table holds no more than that (one entry is .0668)
    tolerance = max(0.55 * 10.0**-digits, 0.004 * printed)
    assert relative_error(level_bits) == pytest.approx(printed, abs=tolerance)


def all_codebooks_sha():
    digest = hashlib.sha256()
    for level, bits in ALL_CODEBOOKS:
        digest.update(codeword_angles(level, bits).astype("<f8").tobytes())
    return digest.hexdigest()


def test_codebooks_are_pinned():
    assert all_codebooks_sha() == CODEBOOKS_SHA


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
        # other processors: OpenBLAS and NumPy choose their loops by what the CPU offers
        {"OPENBLAS_CORETYPE": "Haswell"},
        {"OPENBLAS_CORETYPE": "Prescott"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL X86_V3 AVX512_SKX AVX512F AVX2 FMA3"},
    ],
    ids=["1 thread", "2 threads", "Haswell", "Prescott", "baseline NumPy"],
)
def test_codebooks_are_the_same_on_every_machine(environment):
    code = "import test_densities as t; print(t.all_codebooks_sha())"
    found = run_python("-W", "ignore", "-c", code, **environment)
    assert found.strip() == CODEBOOKS_SHA


# ---- fitted codewords ----------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "bits"), [(1, 1), (1, 4), (2, 2), (3, 5), (6, 3), (9, 1)])
def test_fit_to_the_density_comes_near_lloyd_max(level, bits):
    """k-means++ on draws from the density: at most a few per cent above the optimum's error."""
    uniform = np.random.default_rng(level).random(60_000)
    grid = np.linspace(0, angle_range(level), 100_001)
    psi = np.interp(uniform, angle_cdf(level, grid), grid)

    def distortion(codewords):
        distance = np.abs(psi[:, None] - codewords)
        if level == 1:
            distance = np.minimum(distance, 2 * pi - distance)
        return np.square(distance.min(1)).mean()

    fitted = fit_codewords(psi, level, bits)
    assert distortion(fitted) < 1.03 * distortion(codeword_angles(level, bits))


def test_fit_finds_clusters_across_the_seam_of_the_circle():
    # one cluster at angle 0 = 2π, one at π
    rng = np.random.default_rng(0)
    psi = (np.repeat([0, pi], 500) + 0.1 * rng.standard_normal(1000)) % (2 * pi)
    found = np.exp(1j * fit_codewords(psi, 1, 1))
    distance = cdist(np.c_[found.real, found.imag], [[1, 0], [-1, 0]]).min(0)
    assert (distance < 0.02).all()


def test_fit_leaves_nan_out_and_depends_on_the_seed_only():
    psi = np.random.default_rng(1).uniform(0, pi / 2, 300)
    with_nan = np.r_[psi, np.nan, np.inf]
    np.testing.assert_array_equal(
        fit_codewords(with_nan, 2, 3, seed=5), fit_codewords(psi, 2, 3, seed=5)
    )


@given(
    level=st.integers(1, 9),
    bits=st.integers(1, 6),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_fit_gives_distinct_codewords_in_range_for_any_angles(level, bits, data, seed):
    """Also for fewer distinct angles than codewords, and for angles at the ends of the range."""
    top = angle_range(level)
    psi = data.draw(st.lists(st.floats(0, top, exclude_max=level == 1), min_size=1, max_size=40))
    codewords = fit_codewords(psi, level, bits, seed=seed)
    assert codewords.shape == (2**bits,)
    assert codewords[0] >= 0
    assert codewords[-1] < top if level == 1 else codewords[-1] <= top
    assert (np.diff(codewords) > 0).all()


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 10, -1])
@pytest.mark.parametrize(
    "function",
    [
        lambda level: angle_density(level, 0.5),
        lambda level: angle_cdf(level, 0.5),
        lambda level: codeword_angles(level, 2),
        lambda level: expected_cosine(level, 2),
        lambda level: fit_codewords([0.5], level, 2),
    ],
    ids=["angle_density", "angle_cdf", "codeword_angles", "expected_cosine", "fit_codewords"],
)
def test_level_out_of_range(function, level):
    with pytest.raises(ValueError, match=rf"level is {level}; it must be in 1\.\.9"):
        function(level)


@pytest.mark.parametrize("bits", [0, 7])
@pytest.mark.parametrize(
    "function",
    [
        lambda bits: codeword_angles(3, bits),
        lambda bits: expected_cosine(3, bits),
        lambda bits: fit_codewords([0.5], 3, bits),
        lambda bits: relative_error((bits,)),
    ],
    ids=["codeword_angles", "expected_cosine", "fit_codewords", "relative_error"],
)
def test_bits_out_of_range(function, bits):
    with pytest.raises(ValueError, match=rf"bits is {bits}; it must be in 1\.\.6"):
        function(bits)


@pytest.mark.parametrize("angles", [[], [np.nan, np.inf]], ids=["empty", "not finite"])
def test_nothing_to_fit(angles):
    with pytest.raises(ValueError, match="angles holds no finite value"):
        fit_codewords(angles, 2, 2)
