"""PolarFormat: what is allowed, what is said about the rest, and the sizes that follow."""

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from strategies import HEAD_DIMS, formats

from polarquant_nb import FormatPair, PolarFormat
from polarquant_nb.formats import full_depth
from polarquant_nb.layout import PAGE


def test_sizes_of_the_papers_format():
    fmt = PolarFormat(head_dim=128, level_bits=(4, 2, 2, 2))
    assert (fmt.num_levels, fmt.block_size, fmt.num_blocks) == (4, 16, 8)
    assert fmt.bits_per_value == 3.875
    assert fmt.relative_error == pytest.approx(0.0321, abs=5e-5)


@given(formats())
def test_sizes_of_any_format(fmt):
    assert fmt.block_size == 2**fmt.num_levels
    assert fmt.num_blocks * fmt.block_size == fmt.head_dim
    codes = sum(bits * (fmt.head_dim >> level) for level, bits in enumerate(fmt.level_bits, 1))
    radii = {"float16": 16, "log8": 8}[fmt.radius] * fmt.num_blocks
    offset = {None: 0, "int8": 8 * fmt.head_dim + 32, "float16": 16 * fmt.head_dim}[fmt.offset]
    anchor = 32 if fmt.radius == "log8" and fmt.offset != "int8" else 0
    needed = PAGE * (codes + radii) + offset + anchor
    assert 8 * fmt.page_nbytes == needed + PAGE * fmt.layout.padding_bits
    assert fmt.bits_per_value == 8 * fmt.page_nbytes / (PAGE * fmt.head_dim)
    assert 0 < fmt.relative_error < 2


@given(formats())
def test_formats_are_values(fmt):
    same = dataclasses.replace(fmt, level_bits=list(fmt.level_bits))
    assert same == fmt
    assert hash(same) == hash(fmt)
    assert pickle.loads(pickle.dumps(fmt)) == fmt
    assert dataclasses.replace(fmt, seed=(fmt.seed + 1) % 2**63) != fmt
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.seed = 1


def test_numpy_integers_become_ints():
    fmt = PolarFormat(np.int64(64), [np.int32(4), np.uint8(2)], seed=np.uint64(3))
    assert fmt == PolarFormat(64, (4, 2), seed=3)
    assert all(type(n) is int for n in (fmt.head_dim, fmt.seed, *fmt.level_bits))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_supported_head_dim_takes_every_depth(head_dim):
    deepest = full_depth(head_dim, 5, 3)
    assert head_dim % 2 ** len(deepest) == 0
    assert head_dim // 2 ** len(deepest) % 2 == 1 or len(deepest) == 9
    for num_levels in range(1, len(deepest) + 1):
        assert PolarFormat(head_dim, deepest[:num_levels]).num_levels == num_levels


@pytest.mark.parametrize("head_dim", [0, -16, 8, 15, 24, 100, 127, 577, 592, 1024])
def test_unsupported_head_dim_is_refused_when_the_format_is_made(head_dim):
    """CASES row 11 (vllm-project/vllm#56197): other sizes failed late and unrelatedly."""
    message = f"head_dim is {head_dim}; it must be a multiple of 16 from 16 to 576"
    with pytest.raises(ValueError, match=message):
        PolarFormat(head_dim, (4,))


@pytest.mark.parametrize(
    ("head_dim", "num_levels", "most"),
    [(96, 6, 5), (80, 5, 4), (48, 6, 4), (576, 7, 6), (64, 7, 6)],
)
def test_blocks_that_do_not_divide_head_dim(head_dim, num_levels, most):
    """CASES row 12 (Blaizzy/mlx-vlm#2061): 96 in groups of 64, a raw backend error."""
    message = (
        rf"level_bits has {num_levels} levels, blocks of {2**num_levels} coordinates, which do not "
        rf"divide head_dim {head_dim}; it can have 1 to {most} levels"
    )
    with pytest.raises(ValueError, match=message):
        PolarFormat(head_dim, (2,) * num_levels)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"head_dim": 64.0}, TypeError, "head_dim is 64.0; it must be an int"),
        ({"head_dim": "64"}, TypeError, "head_dim is '64'; it must be an int"),
        ({"head_dim": None}, TypeError, "head_dim is None; it must be an int"),
        ({"level_bits": 4}, TypeError, "level_bits is 4; it must be a sequence of ints"),
        ({"level_bits": "42"}, TypeError, "level_bits is '42'; it must be a sequence of ints"),
        ({"level_bits": None}, TypeError, "level_bits is None; it must be a sequence of ints"),
        ({"level_bits": (4, 2.5)}, TypeError, "level_bits is 2.5; it must be an int"),
        ({"level_bits": ()}, ValueError, r"level_bits is \(\); it must hold at least one level"),
        ({"level_bits": (4, 0)}, ValueError, r"level_bits is \(4, 0\); .* each .*1 to 6 bits"),
        ({"level_bits": (7,)}, ValueError, r"level_bits is \(7,\); .* each .*1 to 6 bits"),
        ({"level_bits": (4, -1)}, ValueError, r"level_bits is \(4, -1\); .* each .*1 to 6 bits"),
        ({"offset": "int4"}, ValueError, "offset is 'int4'; it must be None, 'int8' or 'float16'"),
        ({"offset": True}, ValueError, "offset is True; it must be None, 'int8' or 'float16'"),
        ({"rotation": "qr"}, ValueError, "rotation is 'qr'; it must be 'hadamard', 'haar' or"),
        ({"rotation": None}, ValueError, "rotation is None; it must be 'hadamard', 'haar' or"),
        ({"radius": "int8"}, ValueError, "radius is 'int8'; it must be 'float16' or 'log8'"),
        ({"radius": None}, ValueError, "radius is None; it must be 'float16' or 'log8'"),
        ({"seed": -1}, ValueError, r"seed is -1; it must be in 0\.\.2\*\*63 - 1"),
        ({"seed": 2**63}, ValueError, rf"seed is {2**63}; it must be in 0\.\.2\*\*63 - 1"),
        ({"seed": 1.5}, TypeError, "seed is 1.5; it must be an int"),
    ],
    ids=lambda value: repr(value) if isinstance(value, dict) else None,
)
def test_bad_arguments_are_named(change, error, message):
    good = {"head_dim": 64, "level_bits": (4, 2, 2, 2)}
    with pytest.raises(error, match=message):
        PolarFormat(**good | change)


def test_pairs_may_differ_in_head_dim():
    pair = FormatPair(PolarFormat(192, (4, 2, 2, 2)), PolarFormat(128, (3, 1)))
    nbytes = pair.keys.page_nbytes + pair.values.page_nbytes
    assert pair.bits_per_value == 8 * nbytes / (PAGE * 320)
