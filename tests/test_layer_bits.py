"""Bits shared among layers: within the budget, and as good as any other choice."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polarquant_nb.formats import FormatPair, PolarFormat
from polarquant_nb.layer_bits import LayerNeeds, allot, chain, expected_kl

kls = st.floats(0, 1) | st.floats(1e-8, 1e-3)
measured = st.dictionaries(st.floats(1e-3, 1), kls, min_size=1, max_size=3).map(
    lambda points: tuple(sorted(points.items()))
)
needs = st.builds(
    LayerNeeds,
    num_kv_heads=st.integers(1, 4),
    head_dim=st.sampled_from([16, 64, 80, 128]),
    value_head_dim=st.sampled_from([16, 64, 128]),
    key_kl=measured,
    value_kl=measured,
)
ONE = ((0.02, 1.0),)
budgets = st.floats(2.6, 7)


def numbers(layer):
    return layer.num_kv_heads * (layer.head_dim + layer.value_head_dim)


def bits(layers, pairs):
    total = sum(numbers(n) * p.bits_per_value for n, p in zip(layers, pairs, strict=True))
    return total / sum(map(numbers, layers))


def total_kl(layers, pairs):
    return sum(n.expected_kl(p) for n, p in zip(layers, pairs, strict=True))


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
    found = total_kl(layers, allot(layers, budget))
    for pairs in product(*map(pairs_of, layers)):
        if bits(layers, pairs) <= budget - 1e-9:
            assert found <= total_kl(layers, pairs) + 1e-12


@given(
    st.lists(st.tuples(measured, measured), min_size=1, max_size=30),
    st.sampled_from(pairs_of(LayerNeeds(1, 64, 64, ONE, ONE))),
)
def test_never_worse_than_the_same_formats_everywhere(costs, pair):
    layers = [LayerNeeds(3, 64, 64, *cost) for cost in costs]
    found = total_kl(layers, allot(layers, pair.bits_per_value + 1e-9))
    assert found <= total_kl(layers, [pair] * len(layers)) * (1 + 1e-9)


def test_bits_go_where_errors_cost_most():
    layers = [
        LayerNeeds(2, 128, 128, ((0.02, kl),), ((0.02, kl / 4),)) for kl in (1e-6, 1e-4, 1e-5)
    ]
    low, high, middle = ((p.keys.bits_per_value, p.values.bits_per_value) for p in allot(layers, 4))
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
    layers = [LayerNeeds(2, 64, 64, ONE, ONE)]
    with pytest.raises(ValueError, match=r"bits_per_value is 1.5; it must be at least 1\.660"):
        allot(layers, 1.5)
    with pytest.raises(ValueError, match="bits_per_value is nan"):
        allot(layers, float("nan"))
    (pair,) = allot(layers, 100)
    assert pair.keys == PolarFormat(64, (6, 5, 5, 5, 5, 5), "int8", radius="log8")
    assert pair.values == PolarFormat(64, (6, 5, 5, 5, 5, 5), radius="log8")


def test_expected_kl():
    """One measurement is extended in proportion; between two there is a power law."""
    assert expected_kl(((0.02, 3e-4),), 0.01) == pytest.approx(1.5e-4)
    assert expected_kl(((0.02, 3e-4),), 0.2) == pytest.approx(3e-3)
    square = ((0.01, 1e-4), (0.1, 1e-2))
    for error, kl in ((0.01, 1e-4), (0.03, 9e-4), (0.1, 1e-2), (0.2, 2e-2), (0.005, 5e-5)):
        assert expected_kl(square, error) == pytest.approx(kl)
    assert expected_kl(((0.02, 0.0),), 0.1) < 1e-10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 0}, "num_kv_heads is 0"),
        ({"head_dim": 64.0}, r"head_dim is 64\.0; it must be an int"),
        ({"key_kl": ()}, r"key_kl is \(\)"),
        ({"key_kl": ((0.02, -1),)}, "key_kl is .*not negative"),
        ({"value_kl": ((0.02, float("nan")),)}, "value_kl is"),
        ({"value_kl": ((0.0, 1),)}, "value_kl is .*above 0"),
        ({"value_kl": ((0.2, 1), (0.1, 2))}, "value_kl is .*ascending"),
    ],
)
def test_needs_that_make_no_sense_are_refused(changes, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LayerNeeds(**{"num_kv_heads": 2, "head_dim": 64, "value_head_dim": 64, "key_kl": ONE,
                      "value_kl": ONE, **changes})  # fmt: skip
