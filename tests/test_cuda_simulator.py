"""CUDA kernels in Numba's simulator, against the CPU's codes and the float64 reference.

``tox -e cudasim``, or NUMBA_ENABLE_CUDASIM=1 pytest -m cudasim.  CPU tensors stand in for tensors
on a GPU: what differs there is how kernels are compiled and launched.
"""

from dataclasses import replace

import numpy as np
import pytest
from code_digests import FORMATS, encoded, unkind_rows
from numba import config
from support import (
    LOG8_FORMATS,
    RANDOM_FORMATS,
    as_reference,
    exact_attention,
    gaussian,
    ident,
)

import polarquant_nb as pq
from polarquant_nb import reference
from polarquant_nb.layout import PAGE

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")
if not config.ENABLE_CUDASIM:
    pytest.skip("runs with NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)
pytestmark = pytest.mark.cudasim

import cuda_simulator  # noqa: E402

from polarquant_nb import gpu, gpu_codec  # noqa: E402
from polarquant_nb.gpu_attention import attend_rows  # noqa: E402
from polarquant_nb.gpu_codec import DeviceRows, encode_rows  # noqa: E402
from polarquant_nb.kernels import cuda_codec, cuda_launch  # noqa: E402
from polarquant_nb.queries import Logits  # noqa: E402


def on_device(x, fmt, nan="raise", codebooks=None, **options):
    tensor = x if isinstance(x, torch.Tensor) else torch.from_numpy(np.ascontiguousarray(x))
    return gpu.encode_tensor(tensor, fmt, codebooks, nan, **options)


def assert_same_words(pages, expected):
    np.testing.assert_array_equal(pages.words.numpy().view(np.uint32), expected.words)


def assert_attends_as_reference(q, k, v, pair, *, tolerance=1e-5, **options):
    """Against textbook attention in float64 to what the reference decodes of the same codes."""
    k_pages, v_pages = on_device(k, pair.keys), on_device(v, pair.values)
    decoded = [
        reference.decode(as_reference(p.to("cpu")), p.format, p.codebooks.angles)
        for p in (k_pages, v_pages)
    ]
    mask = options.get("mask")
    expected, lse = exact_attention(
        q, *decoded, mask=mask, causal=options.get("is_causal", False),
        softcap=options.get("softcap"), scale=options.get("scale"),
    )  # fmt: skip
    if mask is not None:
        options["mask"] = torch.from_numpy(mask)
    found, found_lse = gpu.attention_of_tensors(
        torch.from_numpy(q), k_pages, v_pages, return_lse=True, **options
    )
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(), rtol=0)
    np.testing.assert_allclose(found_lse, lse, atol=tolerance, rtol=0)


# ---- codes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_the_cpus_with_rows_at_every_limit(name):
    """Bit for bit: NaN, inf, overflow, subnormal numbers, angles on boundaries, a large mean."""
    expected = encoded(name)
    x = unkind_rows(expected.format.head_dim)[:, :, 1:]  # strided, and another page division
    cpu = pq.encode(x, expected.format, codebooks=expected.codebooks, nan="propagate")
    pages = on_device(torch.from_numpy(x), cpu.format, "propagate", cpu.codebooks)
    assert_same_words(pages, cpu)
    assert int(pages.num_nonfinite) == cpu.num_nonfinite > 0
    assert int(pages.num_saturated) == cpu.num_saturated > 0


@pytest.mark.parametrize("side", ["keys", "values"])
@pytest.mark.parametrize("name", pq.presets())
def test_codes_of_presets_are_the_cpus_and_decode_as_the_reference(name, side):
    fmt = getattr(pq.preset(name, 64), side)
    x = gaussian(1, PAGE + 5, 64, seed=71) + 0.5
    pages = on_device(x, fmt)
    assert_same_words(pages, pq.encode(x, fmt))
    expected = reference.decode(as_reference(pages.to("cpu")), fmt, pages.codebooks.angles)
    found = pages.decode(PAGE - 3, PAGE + 2).numpy()
    expected = expected[:, PAGE - 3 : PAGE + 2]
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


SOME_FORMATS = [*[f for f in RANDOM_FORMATS if f.head_dim <= 144][::2], *LOG8_FORMATS]


@pytest.mark.parametrize("fmt", SOME_FORMATS, ids=ident)
def test_any_format(fmt):
    """Every rotation, odd parts of head_dim, offsets, widths and depths."""
    x = gaussian(1, 20, fmt.head_dim, seed=72)
    pages, cpu = on_device(x, fmt), pq.encode(x, fmt)
    assert_same_words(pages, cpu)
    np.testing.assert_allclose(pages.decode().numpy(), cpu.decode(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_other_dtypes(dtype):
    """Elements are widened and narrowed as on the CPU, ties to even."""
    fmt = pq.PolarFormat(32, (4, 2, 2))
    x = torch.from_numpy(gaussian(9, 32, seed=73)).to(getattr(torch, dtype))
    x[0, 0] = 3e4
    pages, cpu = on_device(x, fmt), pq.encode(x, fmt)
    assert_same_words(pages, cpu)
    assert pages.decode().dtype == x.dtype
    assert torch.equal(pages.decode(), cpu.decode())


def test_strided_vectors_are_read_in_place():
    fmt = pq.PolarFormat(32, (4, 2, 2), "int8")
    x = torch.from_numpy(gaussian(2, 19, 3, 64, seed=74)).transpose(1, 2)[..., ::2]
    assert_same_words(on_device(x, fmt), pq.encode(x, fmt))
    more = x.reshape(2, 1, 3, 19, 32)[:, :, ::2].expand(2, 2, 2, 19, 32)  # more than two strides
    assert_same_words(on_device(more, fmt), pq.encode(more, fmt))


def test_a_page_keeps_its_offset_if_it_is_frozen():
    """As a cache fills up a partial page."""
    fmt = pq.PolarFormat(16, (5, 4, 4, 4), "int8")
    x = gaussian(1, PAGE, 16, seed=75) + 2
    cpu = pq.encode(x, fmt)
    words, other = cpu.words.copy().reshape(-1), (x + 1).copy()
    from polarquant_nb.arrays import open_array
    from polarquant_nb.codec import encode_into

    starts, books = np.zeros(1, np.int64), cpu.codebooks
    device_words = torch.from_numpy(words.copy().view(np.int32))
    encode_into(open_array(other), fmt, books, words, starts, frozen=True)
    encode_rows(
        torch.from_numpy(other), fmt, books, device_words, torch.from_numpy(starts), frozen=True
    )
    np.testing.assert_array_equal(device_words.numpy().view(np.uint32), words)
    assert not np.array_equal(words, cpu.words.reshape(-1))


def test_rows_that_cannot_be_stored_are_named():
    fmt = pq.PolarFormat(16, (4,))
    x = torch.zeros(1, 9, 16)
    x[0, 7, 3] = float("nan")
    with pytest.raises(ValueError, match=r"x\[0, 7\]|\(0, 7"):
        on_device(x, fmt)
    x[0, 7, 3] = 1e6
    with pytest.raises(ValueError, match="65504"):
        on_device(x, fmt)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("name", pq.presets())
def test_attention_is_the_references(name, group):
    """Two kv heads, a partial page, more ranges than one."""
    pair = pq.preset(name, 32)
    k, v = gaussian(1, 2, PAGE + 9, 32, seed=81) + 1, gaussian(1, 2, PAGE + 9, 32, seed=82)
    assert_attends_as_reference(gaussian(1, 2 * group, 1, 32, seed=83), k, v, pair)


ATTENDED = [*[RANDOM_FORMATS[i] for i in (0, 1, 2, 5, 6, 8, 9)], *LOG8_FORMATS]


@pytest.mark.parametrize("keys", ATTENDED, ids=ident)
def test_attention_with_any_format(keys):
    """Trees of one level, codes of several words a run, offsets of values, all rotations."""
    d = keys.head_dim
    values = pq.PolarFormat(48, (6, 6, 6), "float16", radius=keys.radius)
    q, k, v = gaussian(1, 2, 1, d, seed=84), gaussian(1, 1, 40, d, seed=85), gaussian(1, 1, 40, 48)
    assert_attends_as_reference(q, k, v + 1, pq.formats.FormatPair(keys, values))


@pytest.mark.parametrize("options", [
    {"mask": np.random.default_rng(0).random((2, 1, 3, 137)) > 0.4},
    {"mask": gaussian(1, 4, 1, 137, seed=86)},
    {"mask": np.tril(np.ones((3, 137), bool), 100)},
    {"is_causal": True},
    {"softcap": 2.0, "scale": 3.0},
    {"is_causal": True, "softcap": 5.0, "mask": gaussian(2, 1, 1, 137, seed=87)},
], ids=["bool", "bias", "two axes", "causal", "softcap", "all"])  # fmt: skip
def test_what_hides_tokens_and_changes_logits(options):
    pair = pq.preset("balanced", 16)
    k, v = gaussian(2, 2, 137, 16, seed=88) + 1, gaussian(2, 2, 137, 16, seed=89)
    assert_attends_as_reference(gaussian(2, 4, 3, 16, seed=90), k, v, pair, **options)


def test_a_query_that_sees_nothing_gets_zeros():
    pair = pq.preset("balanced", 16)
    x = gaussian(1, 1, 20, 16)
    mask = np.ones((2, 20), bool)
    mask[1] = False
    k, v = on_device(x, pair.keys), on_device(x, pair.values)
    q = torch.from_numpy(gaussian(1, 1, 2, 16))
    out, lse = gpu.attention_of_tensors(q, k, v, mask=torch.from_numpy(mask), return_lse=True)
    assert torch.equal(out[0, 0, 1], torch.zeros(16))
    assert lse[0, 0, 1] == -float("inf")
    assert torch.isfinite(lse[0, 0, 0])


def test_many_queries_decode_pages_and_multiply_matrices():
    pair = pq.preset("accurate", 16)
    k, v = gaussian(1, 1, 150, 16, seed=91), gaussian(1, 1, 150, 16, seed=92)
    q = gaussian(1, 2, 70, 16, seed=93)
    bias = gaussian(1, 2, 70, 150, seed=94)
    assert_attends_as_reference(q, k, v, pair, is_causal=True, softcap=4.0, mask=bias)


def test_rows_may_differ_in_length_and_pages_lie_anywhere():
    """Each row gives what it gives alone; what is beyond a row's end is never looked at."""
    pair = pq.preset("balanced", 16)
    lengths = [5, PAGE + 1, PAGE]
    x = gaussian(3, 2 * PAGE, 16, seed=95)
    sides = []
    for fmt in (pair.keys, pair.values):
        alone = [pq.encode(row[None, None, :n], fmt) for row, n in zip(x, lengths, strict=True)]
        pages = [page for p in alone for page in p.words.reshape(-1, fmt.layout.num_words)]
        order = np.random.default_rng(1).permutation(len(pages))
        words = np.full((len(pages), fmt.layout.num_words + 3), 0xFFFFFFFF, np.uint32)
        starts = np.full((3, 2), 10**9)
        where = iter(np.argsort(order) * words.shape[1])
        words[np.argsort(order), :-3] = pages
        for row, n in enumerate(lengths):
            for page in range(-(-n // PAGE)):
                starts[row, page] = next(where)
        sides.append((alone, DeviceRows(
            fmt, alone[0].codebooks, torch.from_numpy(words.reshape(-1).view(np.int32)),
            torch.from_numpy(starts), torch.tensor(lengths), min(lengths),
        )))  # fmt: skip
    (k_alone, keys), (v_alone, values) = sides
    q = gaussian(3, 2, 1, 16, seed=96)
    out, lse = attend_rows(
        torch.from_numpy(q), keys, values, Logits(0.25, 0.0), None, False, longest=PAGE + 1
    )
    for row in range(3):
        expected, expected_lse = pq.attention(
            q[row : row + 1], k_alone[row], v_alone[row], scale=0.25, return_lse=True
        )
        np.testing.assert_allclose(out[row], expected[0], atol=2e-6)
        np.testing.assert_allclose(lse[row], expected_lse[0], atol=2e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_queries_of_other_dtypes(dtype):
    pair = pq.preset("balanced", 16)
    x = gaussian(1, 1, 30, 16, seed=97)
    k, v = on_device(x, pair.keys), on_device(x, pair.values)
    q = torch.from_numpy(gaussian(1, 2, 4, 16, seed=98)).to(getattr(torch, dtype))
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection leaves them
    found = gpu.attention_of_tensors(q, k, v)
    expected = pq.attention(q.double(), k.to("cpu"), v.to("cpu"))
    assert found.dtype == q.dtype
    tolerance = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 1e-5}[dtype]
    assert (found.double() - expected).abs().max() <= tolerance * expected.abs().max()


# ---- preconditioners -----------------------------------------------------------------------------


def preconditioner_of(parts, shape, *, pairs=None, interleaved=False, seed=101):
    """Scales over three orders of magnitude, and a bias longer than the keys."""
    rng = np.random.default_rng(seed)
    inv_freq = 100.0 ** -np.linspace(0, 1, pairs or shape[-1] // 2)
    return pq.Preconditioner(
        scales=np.exp(rng.uniform(-3, 3, shape)) if "scales" in parts else None,
        bias=pq.RotaryBias(3 * rng.standard_normal(shape), inv_freq, interleaved)
        if "bias" in parts else None,
    )  # fmt: skip


OWN_SHAPES = {"shared": (2, 16), "per batch row": (2, 2, 16)}
PARTS = ["scales", "bias", "scales and bias"]


@pytest.mark.parametrize("own", OWN_SHAPES)
@pytest.mark.parametrize("parts", PARTS)
def test_preconditioned_codes_are_the_cpus(parts, own):
    """Bit for bit, with the page's mean, a partial page and a position that is not the first."""
    preconditioner = preconditioner_of(parts, OWN_SHAPES[own])
    fmt = pq.preset("balanced", 16).keys
    options = {"preconditioner": preconditioner, "first_position": 2000}
    x = gaussian(2, 2, PAGE + 9, 16, seed=102) + 1
    pages, cpu = on_device(x, fmt, **options), pq.encode(x, fmt, **options)
    assert_same_words(pages, cpu)
    assert not np.array_equal(cpu.words, pq.encode(x, fmt).words)
    largest = np.abs(cpu.decode()).max()
    for start, stop in ((0, PAGE + 9), (PAGE - 2, PAGE + 3)):  # positions 2048 begins a table
        found = pages.decode(start, stop).numpy()
        np.testing.assert_allclose(found, cpu.decode(start, stop), atol=1e-6 * largest, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_preconditioned_vectors_of_other_dtypes(dtype):
    """The bias is taken off and put back in float32, and only the sum is rounded."""
    options = {"preconditioner": preconditioner_of("scales and bias", (2, 32)), "first_position": 7}
    fmt = pq.PolarFormat(32, (5, 4, 4), "float16")
    x = torch.from_numpy(gaussian(1, 21, 2, 32, seed=103)).to(getattr(torch, dtype))
    x = x.transpose(1, 2)
    pages, cpu = on_device(x, fmt, **options), pq.encode(x, fmt, **options)
    assert_same_words(pages, cpu)
    assert pages.decode().dtype == x.dtype
    step = {"float16": 2**-10, "bfloat16": 2**-7, "float64": 1e-6}[dtype]  # one, where sums tie
    error = (pages.decode().double() - cpu.decode().double()).abs()
    assert (error <= step * cpu.decode().double().abs().clamp_min(1e-2)).all()


def assert_attends_as_the_cpu(q, k, v, pair, keys, values=None, *, first_position=0, **options):
    """To the same codes, which the CPU has, with what it makes of preconditioners."""
    k_options = {"preconditioner": keys, "first_position": first_position}
    sides = ((k, pair.keys, k_options), (v, pair.values, {"preconditioner": values}))
    on_cpu = [pq.encode(x, fmt, **more) for x, fmt, more in sides]
    pages = [on_device(x, fmt, **more) for x, fmt, more in sides]
    expected, lse = pq.attention(q, *on_cpu, return_lse=True, **options)
    if "mask" in options:
        options["mask"] = torch.from_numpy(options["mask"])
    found, found_lse = gpu.attention_of_tensors(
        torch.from_numpy(q), *pages, return_lse=True, **options
    )
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    np.testing.assert_allclose(found_lse, lse, atol=1e-5 * max(1, np.abs(lse).max()), rtol=0)


@pytest.mark.parametrize("own", OWN_SHAPES)
@pytest.mark.parametrize("parts", PARTS)
def test_attention_to_preconditioned_keys(parts, own):
    """Two batch rows, three heads a kv head, two queries, a partial page."""
    k, v = gaussian(2, 2, PAGE + 9, 16, seed=104) + 1, gaussian(2, 2, PAGE + 9, 16, seed=105)
    assert_attends_as_the_cpu(
        gaussian(2, 6, 2, 16, seed=106), k, v, pq.preset("balanced", 16),
        preconditioner_of(parts, OWN_SHAPES[own]), first_position=5, is_causal=True,
    )  # fmt: skip


@pytest.mark.parametrize("options", [
    {"mask": np.random.default_rng(0).random((2, 1, 3, 40)) > 0.4},
    {"mask": gaussian(1, 4, 1, 40, seed=107), "scale": 0.7},
    {"softcap": 2.0},
    {"is_causal": True, "softcap": 5.0, "mask": gaussian(2, 1, 1, 40, seed=108)},
], ids=["bool", "added", "softcap", "all"])  # fmt: skip
def test_bias_and_what_hides_tokens_and_changes_logits(options):
    k, v = gaussian(2, 2, 40, 16, seed=109), gaussian(2, 2, 40, 16, seed=110)
    assert_attends_as_the_cpu(
        gaussian(2, 4, 3, 16, seed=111), k, v, pq.preset("balanced", 16),
        preconditioner_of("scales and bias", (2, 16)), first_position=-3, **options,
    )  # fmt: skip


@pytest.mark.parametrize(("pairs", "interleaved"), [(5, False), (5, True), (8, True)])
def test_embeddings_of_other_kinds(pairs, interleaved):
    """Pairs of neighbours, and coordinates that are not turned; scales of values, too."""
    k, v = gaussian(1, 2, 20, 16, seed=112), gaussian(1, 2, 20, 16, seed=113)
    keys = preconditioner_of("scales and bias", (2, 16), pairs=pairs, interleaved=interleaved)
    values = preconditioner_of("scales", (2, 16), seed=114)
    q = gaussian(1, 2, 1, 16, seed=115)
    assert_attends_as_the_cpu(q, k, v, pq.preset("balanced", 16), keys, values)


def test_many_queries_meet_keys_with_their_bias():
    k, v = gaussian(1, 2, 30, 16, seed=116), gaussian(1, 2, 30, 16, seed=117)
    keys = preconditioner_of("scales and bias", (2, 16))
    q = gaussian(1, 6, 25, 16, seed=118)
    assert_attends_as_the_cpu(q, k, v, pq.preset("accurate", 16), keys, is_causal=True)


def test_codebooks_are_fitted_to_what_is_rotated():
    options = {
        "preconditioner": preconditioner_of("scales and bias", (2, 16)),
        "codebooks": "online",
    }
    fmt = pq.PolarFormat(16, (3, 2))
    x = gaussian(1, 2, 60, 16, seed=119)
    pages, cpu = on_device(x, fmt, **options), pq.encode(x, fmt, **options)
    for found, expected in zip(pages.codebooks.angles, cpu.codebooks.angles, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert_same_words(pages, cpu)


def test_preconditioned_pages_move_between_devices():
    options = {
        "preconditioner": preconditioner_of("scales and bias", (2, 16)),
        "first_position": 11,
    }
    x = gaussian(1, 2, 20, 16, seed=120)
    fmt = pq.preset("balanced", 16).keys
    back = on_device(x, fmt, **options).to("cpu")
    np.testing.assert_array_equal(back.decode().numpy(), pq.encode(x, fmt, **options).decode())
    assert back.preconditioner is options["preconditioner"]
    assert back.to("meta").first_position == 11


def test_preconditioners_that_do_not_fit_are_refused():
    fmt = pq.PolarFormat(16, (4,))
    with pytest.raises(ValueError, match=r"preconditioner has shape \(3, 16\)"):
        on_device(gaussian(1, 2, 9, 16), fmt, preconditioner=preconditioner_of("bias", (3, 16)))
    x = gaussian(1, 2, 9, 16)
    x[0, 1, 4] = 1e4
    scales = pq.Preconditioner(scales=np.full((2, 16), 10.0))
    with pytest.raises(ValueError, match=r"6550 with this preconditioner|6\.55e\+03 with this"):
        on_device(x, fmt, preconditioner=scales)


# ---- blocks of threads ---------------------------------------------------------------------------


@pytest.mark.parametrize("radius", ["float16", "log8"])
@pytest.mark.parametrize("threads", [32, 128])
def test_the_order_of_threads_does_not_matter(threads, radius, monkeypatch):
    """A missing barrier would show: threads run to the next one first to last, or last to first."""
    monkeypatch.setattr(gpu_codec, "simulated_threads", lambda *_: threads)
    monkeypatch.setattr("polarquant_nb.gpu_attention.simulated_threads", lambda *_: threads)
    pair = pq.FormatPair(
        *(replace(fmt, radius=radius) for fmt in vars(pq.preset("balanced", 64)).values())
    )
    x, q = gaussian(1, 1, 37, 64, seed=99) + 1, torch.from_numpy(gaussian(1, 3, 1, 64))
    preconditioner = preconditioner_of("scales and bias", (1, 64))

    def results(order):
        monkeypatch.setattr(cuda_simulator, "order", order)
        k = on_device(x, pair.keys, preconditioner=preconditioner)
        v = on_device(x, pair.values)
        return k.words, v.words, k.decode(), gpu.attention_of_tensors(q, k, v)

    for a, b in zip(results(list), results(lambda t: list(reversed(t))), strict=True):
        assert torch.equal(a, b)
    assert_same_words(on_device(x, pair.keys), pq.encode(x, pair.keys))


def test_nothing_is_launched_for_empty_inputs(monkeypatch):
    def refuse(*_):
        raise AssertionError("launched")

    monkeypatch.setattr(cuda_launch, "SimulatedKernel", refuse)
    monkeypatch.setattr(cuda_codec, "make_encode", refuse)
    cuda_launch.kernel_for.cache_clear()
    fmt = pq.PolarFormat(16, (2, 2))
    empty = gpu.encode_tensor(torch.empty(1, 1, 0, 16), fmt, None, "propagate")
    assert empty.decode().shape == (1, 1, 0, 16)
    out, lse = gpu.attention_of_tensors(torch.ones(1, 2, 1, 16), empty, empty, return_lse=True)
    assert torch.equal(out, torch.zeros(1, 2, 1, 16))
    assert (lse == -float("inf")).all()


# ---- arguments -----------------------------------------------------------------------------------


def test_bad_queries_and_masks_are_refused():
    fmt = pq.PolarFormat(16, (2, 2))
    pages = on_device(gaussian(1, 2, 9, 16), fmt)
    q = torch.ones(1, 4, 1, 16)
    for bad, message in (
        (torch.ones(1, 4, 1, 32), "q has shape"),
        (torch.ones(1, 3, 1, 16), "multiple of num_kv_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            gpu.attention_of_tensors(bad, pages, pages)
    with pytest.raises(ValueError, match="broadcastable"):
        gpu.attention_of_tensors(q, pages, pages, mask=torch.ones(8))
    with pytest.raises(TypeError, match="bool or a float"):
        gpu.attention_of_tensors(q, pages, pages, mask=torch.ones(9, dtype=torch.int64))
    with pytest.raises(ValueError, match="mask is a ndarray on the CPU"):
        gpu.attention_of_tensors(q, pages, pages, mask=np.ones(9, bool))
    with pytest.raises(ValueError, match="q is on device meta, but k_pages on cpu"):
        gpu.attention_of_tensors(q.to("meta"), pages, pages)
    with pytest.raises(ValueError, match="q_len <= seq_len"):
        gpu.attention_of_tensors(torch.ones(1, 4, 10, 16), pages, pages, is_causal=True)


# ---- the script for a GPU ------------------------------------------------------------------------


def test_the_check_for_gpus_passes_and_finds_differences(capsys, monkeypatch):
    """``benchmarks/gpu_check.py``, whose times need a GPU."""
    import gpu_check

    monkeypatch.setattr("sys.argv", ["gpu_check.py"])
    gpu_check.main()
    assert "balanced: codes equal" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="relative error"):
        gpu_check.close(torch.ones(3), np.array([1, 1, 1.01]), 1e-3, "numbers")
