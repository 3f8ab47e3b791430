"""Rotations: orthogonal, random enough, and the same everywhere."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from language_models import real_model
from scipy import stats
from scipy.linalg import hadamard
from strategies import HEAD_DIMS
from support import gaussian, run_python

from polarquant_nb import PolarFormat
from polarquant_nb.densities import angle_cdf
from polarquant_nb.reference import polar_transform
from polarquant_nb.rotations import Rotation, rotation_for

KINDS = ("hadamard", "haar", "none")

# (kind, head_dim, seed): SHA-256 of the float32 factors.  Stored codes mean nothing under another
# rotation, so these never change.
FINGERPRINTS = {
    ("hadamard", 64, 0): "e27e24dab736594ea7767fab65c8ec516ba933f478504bfb4baf9fabfff545ca",
    ("hadamard", 128, 1): "49221dd3f74b7cec96028d7cc7439026ac34e2d4bdadbbe481216ce4af5e09b0",
    ("hadamard", 80, 0): "ab3196a6eb21812d4e793682dd11ea5385d7cbab7e78ffcb3e98d2dbfb85813b",
    ("hadamard", 576, 2**63 - 1): (
        "245691e4598555dd8bd8f0c8002bf109fdcbc0669ff0f1cc2efcb014fb383d6e"
    ),
    ("haar", 16, 0): "0d32979ab04befd061a148ebddeba8f831ade7c697434881b25373abd0089cd9",
    ("haar", 64, 0): "3a6b006e32107e1f7923cd768371ac031a655be1b160940410dd5085de88e87c",
    ("haar", 80, 7): "18d4241b1ab652cf300a6776b100c81d5ce568f19a04a11f5af86771242b21a7",
    ("haar", 256, 0): "1a6f93a7569a79e545facb87fa93bf41f57ef96fd5d0f2fe0cdaa87076aaae2c",
    ("none", 64, 0): "3b8bf1ab2329e96b36e66df0df7da8b53ecdf930fc8d379683ee042372c4986e",
}


def matrix(kind, head_dim, seed=0):
    """S, in float64."""
    return Rotation(kind, head_dim, seed).apply(np.eye(head_dim))


@pytest.mark.parametrize(
    ("kind", "head_dim"),
    [("hadamard", d) for d in HEAD_DIMS]
    # large dense matrices take half a second each
    + [("haar", d) for d in (*HEAD_DIMS[:12], 256, 400, 576)],
)
def test_orthogonal(kind, head_dim):
    s = matrix(kind, head_dim, seed=head_dim)
    np.testing.assert_allclose(s @ s.T, np.eye(head_dim), rtol=0, atol=1e-6)


@given(st.sampled_from(KINDS), st.sampled_from(HEAD_DIMS[:12]), st.integers(0, 2**63 - 1))
def test_any_seed_keeps_norms_and_can_be_undone(kind, head_dim, seed):
    x = gaussian(3, head_dim, seed=seed % 1000).astype(np.float64)
    rotation = Rotation(kind, head_dim, seed)
    r = rotation.apply(x)
    assert r.dtype == np.float64
    np.testing.assert_allclose(np.square(r).sum(-1), np.square(x).sum(-1), rtol=2e-6)
    np.testing.assert_allclose(rotation.invert(r), x, rtol=0, atol=1e-5)
    # the inverse is the transpose: <xS, y> = <x, ySᵀ>
    y = x[::-1]
    np.testing.assert_allclose((r * y).sum(-1), (x * rotation.invert(y)).sum(-1), atol=1e-10)


@pytest.mark.parametrize(("head_dim", "groups"), [(64, 1), (128, 1), (80, 5), (96, 3), (576, 9)])
def test_hadamard_is_two_rounds_of_signs_and_butterflies(head_dim, groups):
    """S = D₁ (Q ⊗ H) P D₂ (Q ⊗ H) / 2^p, with Q mixing the groups where head_dim is m·2^p."""
    rotation = Rotation("hadamard", head_dim, 3)
    assert rotation.num_groups == groups
    first, second = rotation.signs.astype(np.float64)
    size = head_dim // groups
    np.testing.assert_array_equal(np.abs(first), np.full(head_dim, np.float32(1 / size)))
    np.testing.assert_array_equal(np.abs(second), np.ones(head_dim))
    mixed = np.kron(rotation.mix.astype(np.float64), hadamard(size))
    np.testing.assert_array_equal(np.sort(rotation.order), np.arange(head_dim))
    permutation = np.eye(head_dim)[:, rotation.order]
    expected = np.diag(first) @ mixed @ permutation @ np.diag(second) @ mixed
    np.testing.assert_allclose(matrix("hadamard", head_dim, 3), expected, rtol=0, atol=1e-12)


def test_none_is_the_identity():
    np.testing.assert_array_equal(matrix("none", 48), np.eye(48))


@pytest.mark.parametrize("head_dim", [16, 80])
def test_haar_is_uniform(head_dim):
    """Every entry squared is Beta(1/2, (d−1)/2), of either sign; some far-apart ones."""
    matrices = np.array([Rotation("haar", head_dim, seed).dense for seed in range(600)], np.float64)
    beta = stats.beta(0.5, (head_dim - 1) / 2)
    for i, j in [
        (0, 0),
        (0, head_dim - 1),
        (head_dim - 1, 0),
        (head_dim - 1, head_dim - 1),
        (3, 5),
    ]:
        entry = matrices[:, i, j]
        assert stats.kstest(np.square(entry), beta.cdf).pvalue > 1e-3
        assert abs((entry > 0).mean() - 0.5) < 0.08  # four standard deviations
    # both signs of the determinant
    assert abs((np.linalg.slogdet(matrices[:100]).sign > 0).mean() - 0.5) < 0.2


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
def test_seeds_give_unrelated_rotations(kind):
    s = [matrix(kind, 64, seed) for seed in (0, 1, 2, 2**62, 2**63 - 1)]
    for a, b in pairwise(s):
        # ‖Sₐᵀ S_b‖ entries of unrelated rotations are of the size 1/√d, not 1
        assert np.abs(a.T @ b).max() < 0.8


# ---- the same everywhere -------------------------------------------------------------------------


def fingerprints():
    return {key: Rotation(*key).fingerprint for key in FINGERPRINTS}


def test_fingerprints_are_pinned():
    assert fingerprints() == FINGERPRINTS
    assert len(set(FINGERPRINTS.values())) == len(FINGERPRINTS)


@pytest.mark.parametrize(
    "environment",
    [
        {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "POLARQUANT_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2", "POLARQUANT_NUM_THREADS": "2"},
        # other processors: OpenBLAS and NumPy choose their loops by what the CPU offers
        {"OPENBLAS_CORETYPE": "Prescott"},
        {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL X86_V3 AVX512_SKX AVX512F AVX2 FMA3"},
    ],
    ids=["1 thread", "2 threads", "Prescott", "baseline NumPy"],
)
def test_case_44_rotations_do_not_depend_on_blas_or_threads(environment):
    """CASES row 44 (RyanCodrai/turbovec#206): a seeded QR differed by BLAS and thread count."""
    code = "import test_rotations as t; print(t.fingerprints())"
    found = run_python("-W", "ignore", "-c", code, **environment)
    assert found.strip() == str(FINGERPRINTS)


def test_equal_arguments_share_a_rotation():
    a, b = PolarFormat(64, (4, 2), seed=5), PolarFormat(64, (6,), "int8", seed=5)
    assert rotation_for(a) is rotation_for(b)
    assert not rotation_for(a).signs.flags.writeable


# ---- the angles that follow ----------------------------------------------------------------------


def largest_gap(r, num_levels):
    """Kolmogorov–Smirnov statistic of the angles against their densities, the largest level's."""
    angles, _ = polar_transform(r, num_levels)
    return max(
        stats.kstest(psi.ravel(), lambda v, level=level: angle_cdf(level, v)).statistic
        for level, psi in enumerate(angles, 1)
    )


def rotated(x, kind):
    """Vectors under 400 seeds: the lemma is about the draw of S, and one S is one draw."""
    parts = np.array_split(x.reshape(-1, x.shape[-1]), 400)
    return np.concatenate(
        [Rotation(kind, x.shape[-1], seed).apply(part) for seed, part in enumerate(parts)]
    )


def test_angles_of_a_fixed_vector_under_haar_seeds_follow_the_densities():
    """Lemma 2: exactly, and independent of the vector."""
    x = np.zeros(32)
    x[3], x[17] = 1, -0.5
    r = np.array([Rotation("haar", 32, seed).apply(x) for seed in range(2000)])
    angles, _ = polar_transform(r, 5)
    for level, psi in enumerate(angles, 1):
        for node in range(0, psi.shape[1], 3):
            test = stats.kstest(psi[:, node], lambda v, level=level: angle_cdf(level, v))
            assert test.pvalue > 1e-3


SYNTHETIC = {
    "heavy tails": lambda rng: rng.standard_t(3, (4000, 64)),
    "one large channel": lambda rng: rng.standard_normal((4000, 64)) * np.r_[30, np.ones(63)],
    "decaying spectrum": lambda rng: rng.standard_normal((4000, 64)) * np.arange(1, 65) ** -0.5,
    "sparse": lambda rng: rng.standard_normal((4000, 64)) * (rng.random((4000, 64)) < 0.1),
}


@pytest.mark.parametrize("kind", ["hadamard", "haar"])
@pytest.mark.parametrize("name", SYNTHETIC)
def test_rotated_data_follow_the_densities(name, kind):
    """Within .03 at every level, for data that are far from it without the rotation."""
    x = SYNTHETIC[name](np.random.default_rng(0))
    x = x[(x != 0).any(-1)]
    assert largest_gap(rotated(x, kind), 6) < 0.03
    assert largest_gap(x, 6) > 0.16


@pytest.mark.model
@pytest.mark.slow
def test_rotated_real_keys_follow_the_densities():
    """The paper's first experiment: keys of a real model on real text, all its layers and heads."""
    loaded = real_model()
    import torch

    from polarquant_nb import evaluate, models

    text, _ = models.load_text()
    ids = models.token_window(text, loaded.tokenizer, 512)
    cache = evaluate.prefill(loaded.model, torch.tensor([ids]))
    # without the sinks, which every cache keeps exact
    keys = np.stack([layer.keys[0, :, 4:].float().numpy() for layer in cache.layers])
    assert largest_gap(rotated(keys, "hadamard"), 6) < 0.03
    assert largest_gap(keys, 6) > 0.3
