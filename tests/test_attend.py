"""Attention on the codes equals exact attention on what the codes decode to."""

from __future__ import annotations

import numpy as np
import pytest
from support import NOJIT, exact_attention

import polarquant_nb as pq
from polarquant_nb import packed_attention

# Shapes are small where the kernels run as plain Python.
SCALE = 1 if NOJIT else 4


def problem(head_dim, kv_heads, groups, q_len, seq_len, preset="balanced", batch=2, seed=0):
    """Queries, and keys and values as pages; keys have a mean, as real keys do."""
    rng = np.random.default_rng(seed)
    pair = pq.preset(preset, head_dim)
    q = rng.standard_normal((batch, kv_heads * groups, q_len, head_dim), dtype=np.float32)
    k, v = rng.standard_normal((2, batch, kv_heads, seq_len, head_dim), dtype=np.float32)
    return q, pq.encode(k + np.float32(0.5), pair.keys), pq.encode(v, pair.values)


def assert_close(q, keys, values, **kwargs):
    out, lse = pq.attention(q, keys, values, return_lse=True, **kwargs)
    causal = kwargs.pop("is_causal", False)
    expected, expected_lse = exact_attention(
        q, pq.decode(keys), pq.decode(values), causal=causal, **kwargs
    )
    assert out.dtype == q.dtype
    assert out.shape == expected.shape
    assert np.linalg.norm(out - expected) <= 1e-5 * np.linalg.norm(expected)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("head_dim", "groups", "q_len", "preset"),
    [
        (64, 3, 1, "balanced"),
        (128, 4, 1, "balanced"),
        (64, 1, 1, "paper"),
        (64, 8, 1, "accurate"),
        (80, 2, 3, "compact"),
        (64, 5, 5, "tiny"),
        (64, 24, 1, "balanced"),
    ],
)
@pytest.mark.parametrize("seq_len", [1, 127, 129, 300])
def test_fused_equals_exact(head_dim, groups, q_len, preset, seq_len):
    assert_close(*problem(head_dim, 2, groups, q_len, seq_len, preset))


@pytest.mark.parametrize("threads", [1, 4])
def test_long_rows_are_split_and_merged(threads, monkeypatch):
    monkeypatch.setattr(packed_attention, "_PAGES_PER_THREAD", 1)
    before = pq.get_num_threads()
    pq.set_num_threads(threads)
    try:
        assert_close(*problem(64, 1, 2, 1, 700 * SCALE, batch=1))
    finally:
        pq.set_num_threads(before)


@pytest.mark.parametrize("q_len", [2, 100])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 300), (1, 4, 1, 300), (2, 4, -1, 300), (300,)], ids=str
)
@pytest.mark.parametrize("kind", [bool, np.float32])
def test_masks_broadcast(q_len, shape, kind):
    q, keys, values = problem(64, 2, 2, q_len, 300)
    rng = np.random.default_rng(1)
    shape = tuple(q_len if n == -1 else n for n in shape)
    mask = rng.random(shape) < 0.7 if kind is bool else rng.standard_normal(shape).astype(kind)
    assert_close(q, keys, values, mask=mask)


def test_masks_may_be_read_backwards():
    """9 queries make two groups, the second filled up: it must not look before the mask."""
    q, keys, values = problem(64, 1, 9, 1, 300)
    mask = np.random.default_rng(1).standard_normal((1, 1, 1, 300)).astype(np.float32)
    assert_close(q, keys, values, mask=mask[..., ::-1])


@pytest.mark.parametrize("q_len", [1, 3, 90])
def test_causal_queries_are_the_last_tokens(q_len):
    assert_close(*problem(64, 2, 2, q_len, 300), is_causal=True)


@pytest.mark.parametrize("q_len", [1, 90])
def test_scale_and_softcap(q_len):
    q, keys, values = problem(64, 2, 2, q_len, 200)
    assert_close(q, keys, values, scale=0.5, softcap=3.0)


@pytest.mark.parametrize("q_len", [2, 90])
def test_query_that_sees_nothing_gives_zeros(q_len):
    q, keys, values = problem(64, 2, 2, q_len, 200)
    mask = np.ones((2, 1, q_len, 200), bool)
    mask[1, :, 0] = False
    out, lse = pq.attention(q, keys, values, mask=mask, return_lse=True)
    assert not out[1, :, 0].any()
    assert np.isneginf(lse[1, :, 0]).all()
    assert_close(q, keys, values, mask=mask)


def test_key_and_value_head_dims_may_differ():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 4, 1, 96), dtype=np.float32)
    k = rng.standard_normal((1, 2, 200, 96), dtype=np.float32)
    v = rng.standard_normal((1, 2, 200, 64), dtype=np.float32)
    pair = pq.preset("balanced", 96, value_head_dim=64)
    assert_close(q, pq.encode(k, pair.keys), pq.encode(v, pair.values))


@pytest.mark.parametrize("rotation", ["haar", "none"])
def test_rotations_and_fitted_codebooks(rotation):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 1, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, 1, 150, 32), dtype=np.float32)
    fmt = pq.PolarFormat(32, (5, 3, 2), rotation=rotation, offset="float16")
    fitted = pq.Codebooks.fit(k, fmt)
    assert_close(q, pq.encode(k, fmt, codebooks=fitted), pq.encode(v, fmt, codebooks=fitted))


@pytest.mark.parametrize("levels", [1, 2, 5])
def test_any_depth_of_tree(levels):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 1, 32), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, 1, 150, 32), dtype=np.float32)
    fmt = pq.PolarFormat(32, (6, 5, 4, 3, 2)[:levels])
    assert_close(q, pq.encode(k, fmt), pq.encode(v, fmt))


def test_bytes_in_lanes_without_tokens_do_not_leak():
    q, keys, values = problem(64, 2, 2, 1, 200)
    before = pq.attention(q, keys, values)
    for pages in (keys, values):
        row = pages.words.reshape(-1, pages.num_pages, pages.words.shape[-1])[:, -1]
        for place in pages.format.layout.code_rows:
            assert place.width == 32
            row[:, place.word + 200 % 128 : place.word + 128] = 0xFFFFFFFF
        for word in pages.format.layout.radius_words:
            row[:, word + 200 % 128 // 2 : word + 64] = 0x7E007E00  # NaN
    np.testing.assert_array_equal(pq.attention(q, keys, values), before)


def test_nan_key_gives_nan_as_exact_attention_does():
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 1, 64), dtype=np.float32)
    k, v = rng.standard_normal((2, 1, 2, 150, 64), dtype=np.float32)
    k[0, 0, 17, 3] = np.nan
    pair = pq.preset("balanced", 64)
    out = pq.attention(q, pq.encode(k, pair.keys, nan="propagate"), pq.encode(v, pair.values))
    assert np.isnan(out[0, 0]).all()
    assert np.isfinite(out[0, 1]).all()


def test_empty_inputs():
    q, keys, values = problem(64, 2, 2, 1, 0)
    out, lse = pq.attention(q, keys, values, return_lse=True)
    assert not out.any()
    assert np.isneginf(lse).all()
    q, keys, values = problem(64, 2, 2, 1, 10, batch=0)
    assert pq.attention(q, keys, values).shape == (0, 4, 1, 64)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_torch_tensors_keep_their_type(dtype):
    torch = pytest.importorskip("torch")
    q, keys, values = problem(64, 2, 2, 1, 200)
    query = torch.from_numpy(q).to(getattr(torch, dtype)).requires_grad_()
    out, lse = pq.attention(query, keys, values, return_lse=True)
    assert out.dtype == query.dtype
    assert lse.dtype == torch.float32
    expected = pq.attention(query.detach().float().numpy(), keys, values)
    torch.testing.assert_close(
        out.float(), torch.from_numpy(expected).to(out.dtype).float(), rtol=0, atol=0
    )


def test_strided_queries():
    q, keys, values = problem(64, 2, 2, 3, 200)
    transposed = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(
        pq.attention(transposed, keys, values), pq.attention(q, keys, values)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"q": np.zeros((2, 5, 1, 64), np.float32)},
            r"q has 5 heads.*num_kv_heads = 2",
        ),
        ({"q": np.zeros((3, 4, 1, 64), np.float32)}, r"q has shape.*batch 2"),
        ({"q": np.zeros((2, 4, 1, 32), np.float32)}, r"q has shape.*head_dim 64"),
        ({"q": np.zeros((4, 64), np.float32)}, "q has shape"),
        ({"mask": np.ones((2, 1, 1, 199), bool)}, r"mask has shape.*broadcastable"),
        ({"scale": float("nan")}, r"scale is nan.*finite positive"),
        ({"softcap": -1.0}, r"softcap is -1.0.*finite positive"),
        ({"q": np.zeros((2, 4, 201, 64), np.float32), "is_causal": True}, "q_len is 201"),
    ],
)
def test_bad_values(change, message):
    q, keys, values = problem(64, 2, 2, 1, 200)
    arguments = {"q": q, **change}
    with pytest.raises(ValueError, match=message):
        pq.attention(arguments.pop("q"), keys, values, **arguments)


def test_bad_types():
    q, keys, values = problem(64, 2, 2, 1, 200)
    with pytest.raises(TypeError, match="k_pages is a ndarray"):
        pq.attention(q, q, values)
    with pytest.raises(TypeError, match="mask has dtype int64"):
        pq.attention(q, keys, values, mask=np.ones(200, np.int64))
    with pytest.raises(TypeError, match="q has dtype int64"):
        pq.attention(q.astype(np.int64), keys, values)


def test_keys_and_values_must_match():
    q, keys, _ = problem(64, 2, 2, 1, 200)
    _, _, values = problem(64, 2, 2, 1, 100)
    with pytest.raises(ValueError, match=r"k_pages has shape.*must agree"):
        pq.attention(q, keys, values)
