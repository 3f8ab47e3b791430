"""Presets: pairs of formats that keep to a budget of bits."""

from itertools import pairwise

import numpy as np
import pytest
from strategies import HEAD_DIMS
from support import gaussian

import polarquant_nb as pq
from polarquant_nb.layout import PAGE

# bits per number at head_dim 64, padding and offsets counted
BUDGET = {"paper": 3.875, "tiny": 2.78, "compact": 3.28, "balanced": 4.03, "accurate": 4.53}


def test_names_are_in_the_order_of_accuracy():
    assert pq.presets() == ("paper", "tiny", "compact", "balanced", "accurate")
    chain = [pq.preset(name, 64) for name in pq.presets()[1:]]
    for worse, better in pairwise(chain):
        assert worse.keys.relative_error >= better.keys.relative_error
        assert worse.values.relative_error >= better.values.relative_error
        assert worse.bits_per_value < better.bits_per_value


def test_balanced_at_128_is_the_default():
    assert pq.preset() == pq.preset("balanced", 128)
    assert pq.preset().keys.level_bits == (5, 4, 4, 4, 4, 4, 4)
    assert pq.preset().values.level_bits == (4, 2, 2, 2, 2, 2, 2)


@pytest.mark.parametrize("name", pq.presets())
def test_budget_at_64(name):
    assert pq.preset(name, 64).bits_per_value == pytest.approx(BUDGET[name], abs=0.006)


@pytest.mark.parametrize("head_dim", [n for n in HEAD_DIMS if n not in (64, 128, 256)])
def test_other_head_dims_keep_to_the_budget(head_dim):
    """Within 3 %, keys and values together, everything counted; ``paper`` has no choice."""
    for name in pq.presets()[1:]:
        pair = pq.preset(name, head_dim)
        assert pair.bits_per_value == pytest.approx(pq.preset(name, 64).bits_per_value, rel=0.03)
    assert 3.875 <= pq.preset("paper", head_dim).bits_per_value <= 4


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_keys_get_more_bits_and_the_offset(head_dim):
    for name in pq.presets()[1:]:
        pair = pq.preset(name, head_dim)
        assert (pair.keys.offset, pair.values.offset) == ("int8", None)
        assert pair.keys.relative_error <= pair.values.relative_error
        for fmt in (pair.keys, pair.values):
            assert fmt.rotation == "hadamard"
            assert fmt.head_dim // fmt.block_size % 2 == 1  # full depth
    paper = pq.preset("paper", head_dim)
    assert paper.keys == paper.values == pq.PolarFormat(head_dim, (4, 2, 2, 2))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_paper_measures_3875_bits(head_dim):
    """Exactly, from the bytes of the buffers, on whole pages."""
    pages = pq.encode(gaussian(2, 3 * PAGE, head_dim), pq.preset("paper", head_dim).keys)
    assert pages.nbytes == pages.words.nbytes
    assert 8 * pages.nbytes / np.prod(pages.shape) == 3.875
    assert pages.bits_per_value == 3.875
    assert pq.preset("paper", head_dim).bits_per_value == 3.875


def test_keys_and_values_of_different_head_dim():
    pair = pq.preset("balanced", 192, value_head_dim=128)
    assert pair.keys == pq.preset("balanced", 192).keys
    assert pair.values == pq.preset("balanced", 128).values


@pytest.mark.parametrize("name", ["Paper", "", "4bit", None])
def test_unknown_name(name):
    message = f"preset is {name!r}; it must be one of paper, tiny, compact, balanced, accurate"
    with pytest.raises(ValueError, match=message):
        pq.preset(name, 64)


@pytest.mark.parametrize("head_dim", [0, 20, 577, -64])
@pytest.mark.parametrize("name", pq.presets())
def test_unsupported_head_dim(name, head_dim):
    for arguments in ({"head_dim": head_dim}, {"head_dim": 64, "value_head_dim": head_dim}):
        with pytest.raises(
            ValueError, match=f"head_dim is {head_dim}; it must be a multiple of 16"
        ):
            pq.preset(name, **arguments)
