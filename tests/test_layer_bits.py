"""Bits shared among layers: within the budget, and as good as any other choice."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarquant_nb.formats import FormatPair, PolarFormat
from polarquant_nb.layer_bits import LayerNeeds, allot, chain

sensitivities = st.floats(0, 1) | st.floats(1e-6, 1e-3)
needs = st.builds(
    LayerNeeds,
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    value_head_dim=st.sampled_from([16, 64, 128]),
    key_sensitivity=sensitivities,
    value_sensitivity=sensitivities,
)
budgets = st.floats(2.6, 7)


def numbers(layer):
    return layer.num_kv_heads * (layer.head_dim + layer.value_head_dim)


def bits(layers, pairs):
    total = sum(numbers(n) * p.bits_per_value for n, p in zip(layers, pairs, strict=True))
    return total / sum(map(numbers, layers))


def expected_kl(layers, pairs):
    return sum(
        n.key_sensitivity * p.keys.relative_error + n.value_sensitivity * p.values.relative_error
        for n, p in zip(layers, pairs, strict=True)
    )


def pairs_of(layer):
    return [
        FormatPair(*pair)
        for pair in product(chain(layer.head_dim, "key"), chain(layer.value_head_dim, "value"))
    ]


@given(st.lists(needs, min_size=1, max_size=6), budgets)
def test_the_budget_is_kept(layers, budget):
    pairs = allot(layers, budget)
    assert bits(layers, pairs) <= budget + 1e-9
    for layer, pair in zip(layers, pairs, strict=True):
        assert (pair.keys.head_dim, pair.values.head_dim) == (layer.head_dim, layer.value_head_dim)
        assert (pair.keys.offset, pair.values.offset) == ("int8", None)


@given(st.lists(needs, min_size=1, max_size=2), budgets)
def test_no_other_choice_within_the_budget_is_better(layers, budget):
    found = expected_kl(layers, allot(layers, budget))
    for pairs in product(*map(pairs_of, layers)):
        if bits(layers, pairs) <= budget - 1e-9:
            assert found <= expected_kl(layers, pairs) + 1e-12


@given(
    st.lists(st.tuples(sensitivities, sensitivities), min_size=1, max_size=30),
    st.sampled_from(pairs_of(LayerNeeds(1, 64, 64, 0, 0))),
)
def test_never_worse_than_the_same_formats_everywhere(costs, pair):
    layers = [LayerNeeds(3, 64, 64, *cost) for cost in costs]
    found = expected_kl(layers, allot(layers, pair.bits_per_value + 1e-9))
    assert found <= expected_kl(layers, [pair] * len(layers)) * (1 + 1e-9)


def test_bits_go_where_errors_cost_most():
    layers = [LayerNeeds(2, 128, 128, cost, cost / 4) for cost in (1e-4, 1e-2, 1e-3)]
    low, high, middle = (
        (p.keys.bits_per_value, p.values.bits_per_value) for p in allot(layers, 4)
    )
    assert low < middle < high
    assert all(keys > values for keys, values in (low, middle, high))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_chain_goes_in_steps_of_half_a_bit(head_dim):
    for role in ("key", "value"):
        formats = chain(head_dim, role)
        assert len(formats) == 9
        steps = [b.bits_per_value - a.bits_per_value for a, b in zip(formats, formats[1:])]  # noqa: B905, RUF007
        assert all(0.49 <= step <= 0.51 for step in steps[:-1])
        errors = [fmt.relative_error for fmt in formats]
        assert errors == sorted(errors, reverse=True)


def test_budgets():
    layers = [LayerNeeds(2, 64, 64, 1.0, 1.0)]
    with pytest.raises(ValueError, match=r"bits_per_value is 1.5; it must be at least 1\.783"):
        allot(layers, 1.5)
    with pytest.raises(ValueError, match="bits_per_value is nan"):
        allot(layers, float("nan"))
    (pair,) = allot(layers, 100)
    assert pair.keys == PolarFormat(64, (6, 5, 5, 5, 5, 5), "int8")
    assert pair.values == PolarFormat(64, (6, 5, 5, 5, 5, 5))
