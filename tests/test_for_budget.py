"""Formats for a budget: never above it, and the best there is within it."""

import re
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import HEAD_DIMS

import polarquant_nb as pq
from polarquant_nb import FormatPair, PolarFormat

ROLES = ("key", "value")
head_dims = st.sampled_from(HEAD_DIMS)
roles = st.sampled_from(ROLES)
budgets = st.floats(2.5, 8.0)


@cache
def allowed(head_dim, role):
    """Every format that the docstring allows, found by trying all level bits."""
    levels = (head_dim & -head_dim).bit_length() - 1
    found = []
    for bits in product(range(1, 7), repeat=levels):
        falls = all(low <= high for high, low in pairwise(bits))
        if falls and bits[0] - bits[-1] <= 3 and bits[min(1, levels - 1)] - bits[-1] <= 1:
            found.append(PolarFormat(head_dim, bits, offset="int8" if role == "key" else None))
    return found


def weighted_error(pair):
    return 6 * pair.keys.relative_error + pair.values.relative_error


@given(head_dims, budgets, roles)
def test_never_above_the_budget(head_dim, budget, role):
    fmt = PolarFormat.for_budget(head_dim, budget, role)
    assert fmt.bits_per_value <= budget
    assert fmt.head_dim == head_dim
    assert fmt.offset == ("int8" if role == "key" else None)
    assert (fmt.rotation, fmt.seed) == ("hadamard", 0)


@given(head_dims, head_dims, budgets)
def test_a_pair_is_never_above_the_budget(head_dim, value_head_dim, budget):
    pair = FormatPair.for_budget(head_dim, budget, value_head_dim)
    assert pair.bits_per_value <= budget
    assert (pair.keys.head_dim, pair.values.head_dim) == (head_dim, value_head_dim)
    assert (pair.keys.offset, pair.values.offset) == ("int8", None)


@given(head_dims, st.tuples(budgets, budgets).map(sorted), roles)
def test_more_bits_never_err_more(head_dim, two_budgets, role):
    less, more = (PolarFormat.for_budget(head_dim, budget, role) for budget in two_budgets)
    assert more.relative_error <= less.relative_error
    less, more = (FormatPair.for_budget(head_dim, budget) for budget in two_budgets)
    assert weighted_error(more) <= weighted_error(less)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("head_dim", [16, 64, 80])
def test_no_other_format_is_better(head_dim, role):
    formats = allowed(head_dim, role)
    for budget in {fmt.bits_per_value for fmt in formats}:
        best = min(fmt.relative_error for fmt in formats if fmt.bits_per_value <= budget)
        for spare in (0.0, 1e-9):
            chosen = PolarFormat.for_budget(head_dim, budget + spare, role)
            assert chosen in formats
            assert chosen.relative_error == best


@pytest.mark.parametrize(("head_dim", "value_head_dim"), [(16, 16), (80, 80), (48, 96), (96, 16)])
def test_no_other_pair_is_better(head_dim, value_head_dim):
    keys, values = allowed(head_dim, "key"), allowed(value_head_dim, "value")
    pairs = [FormatPair(k, v) for k, v in product(keys, values)]
    bits = np.array([pair.bits_per_value for pair in pairs])
    errors = np.array([weighted_error(pair) for pair in pairs])
    for budget in np.unique(bits)[::40]:
        chosen = FormatPair.for_budget(head_dim, budget, value_head_dim)
        assert chosen in pairs
        assert weighted_error(chosen) == pytest.approx(errors[bits <= budget].min(), rel=1e-12)


@given(head_dims, budgets, st.lists(st.floats(0.1, 50), min_size=2, max_size=2).map(sorted))
def test_a_larger_weight_never_hurts_keys(head_dim, budget, weights):
    less, more = (FormatPair.for_budget(head_dim, budget, key_weight=w) for w in weights)
    assert more.keys.relative_error <= less.keys.relative_error
    assert more.values.relative_error >= less.values.relative_error


def test_the_default_weight_is_six():
    for budget in np.arange(2.5, 6, 0.1):
        assert FormatPair.for_budget(64, budget) == FormatPair.for_budget(64, budget, key_weight=6)


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf")])
def test_weight_out_of_range(weight):
    with pytest.raises(ValueError, match=f"key_weight is {weight}; it must be above 0"):
        FormatPair.for_budget(64, 4, key_weight=weight)


@pytest.mark.parametrize("name", pq.presets()[1:])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 576])
def test_no_worse_than_a_preset_of_the_same_bits(head_dim, name):
    preset = pq.preset(name, head_dim)
    chosen = FormatPair.for_budget(head_dim, preset.bits_per_value)
    assert weighted_error(chosen) <= weighted_error(preset)


def test_bits_without_end_take_the_most():
    assert PolarFormat.for_budget(64, float("inf"), "value").level_bits == (6,) * 6


@given(head_dims, head_dims, st.floats(-1, 1) | st.just(float("nan")), roles)
def test_too_small_a_budget_names_the_smallest(head_dim, value_head_dim, budget, role):
    for choose in (
        lambda bits: PolarFormat.for_budget(head_dim, bits, role),
        lambda bits: FormatPair.for_budget(head_dim, bits, value_head_dim),
    ):
        with pytest.raises(ValueError, match=f"bits_per_value is {re.escape(str(budget))}") as info:
            choose(budget)
        smallest = float(re.search(r"at least ([\d.]+),", str(info.value))[1])
        assert choose(smallest).bits_per_value == smallest
        with pytest.raises(ValueError, match="at least"):
            choose(np.nextafter(smallest, 0))


@pytest.mark.parametrize("budget", ["4", None, True, 4j])
def test_budget_is_a_number(budget):
    message = f"bits_per_value is {budget!r}; it must be a number"
    with pytest.raises(TypeError, match=re.escape(message)):
        PolarFormat.for_budget(64, budget)
    with pytest.raises(TypeError, match=re.escape(message)):
        FormatPair.for_budget(64, budget)
    with pytest.raises(
        TypeError, match=re.escape(f"key_weight is {budget!r}; it must be a number")
    ):
        FormatPair.for_budget(64, 4, key_weight=budget)


@pytest.mark.parametrize("role", ["keys", None, ""])
def test_unknown_role(role):
    with pytest.raises(ValueError, match=f"role is {role!r}; it must be 'key' or 'value'"):
        PolarFormat.for_budget(64, 4, role)


@pytest.mark.parametrize("head_dim", [0, 20, 577])
def test_unsupported_head_dim(head_dim):
    message = f"head_dim is {head_dim}; it must be a multiple of 16"
    with pytest.raises(ValueError, match=message):
        PolarFormat.for_budget(head_dim, 4)
    for both in ((head_dim, 64), (64, head_dim)):
        with pytest.raises(ValueError, match=message):
            FormatPair.for_budget(both[0], 4, both[1])
