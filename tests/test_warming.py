"""Kernels are there before the first request."""

import numpy as np
import pytest
from support import NOJIT

import polarquant_nb as pq
from polarquant_nb.kernels import attention_cpu, cpu, exact_cpu, native

KERNELS = (
    cpu.encode_pages, cpu.decode_pages, attention_cpu.weigh_keys, attention_cpu.add_values,
    attention_cpu.merge_ranges, exact_cpu.store_token, exact_cpu.add_exact,
)  # fmt: skip


def compiled():
    return [*(len(kernel.signatures) for kernel in KERNELS), native.shim.cache_info().currsize]


@pytest.mark.skipif(NOJIT, reason="nothing is compiled")
def test_nothing_is_compiled_after_it():
    assert pq.warmup("balanced", head_dim=64, queries=[3], dtype="float32") > 0
    before = compiled()
    cache = pq.KVCache("balanced", head_dim=64)
    k, v = np.random.default_rng(0).standard_normal((2, 1, 3, 300, 64), dtype=np.float32)
    cache.append(k, v)
    cache.attend(np.zeros((1, 9, 1, 64), np.float32))
    cache.decode()
    for _ in range(3):
        cache.step(np.zeros((1, 9, 1, 64), np.float32), k[:, :, :1], v[:, :, :1])
    assert compiled() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queries": 0}, "queries is 0; it must be at least 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; it must be one of"),
        ({"head_dim": 63}, "head_dim"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ValueError, match=message):
        pq.warmup("balanced", **{"head_dim": 64, **arguments})
    with pytest.raises(TypeError, match="queries"):
        pq.warmup("balanced", head_dim=64, queries=1.5)
