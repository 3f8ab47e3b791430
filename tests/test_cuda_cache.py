"""KVCache and PolarCache on a GPU, in Numba's simulator, against the same ones on the CPU.

CPU tensors stand in for tensors on a GPU (``simulated_gpu.py``); the CPU's caches are given NumPy
arrays, or made before.
"""

import copy
import pickle

import numpy as np
import pytest
from numba import config
from support import SMALL_OFFSET, gaussian

import polarquant_nb as pq
from polarquant_nb.cache_files import to_plain

torch = pytest.importorskip("torch")
pytest.importorskip("greenlet")
if not config.ENABLE_CUDASIM:
    pytest.skip("runs with NUMBA_ENABLE_CUDASIM=1", allow_module_level=True)
pytestmark = pytest.mark.cudasim

import cuda_simulator  # noqa: E402
from simulated_gpu import gpu_tensors, looked  # noqa: E402, F401

from polarquant_nb import gpu_arrays, gpu_attention, gpu_exact  # noqa: E402

DTYPES = ["float32", "float16", "bfloat16", "float64"]


@pytest.fixture(autouse=True)
def _gpu(gpu_tensors):  # noqa: F811
    pass


class Twins:
    """A cache on the CPU and one on the simulated GPU, to which the same is done."""

    def __init__(
        self, formats="balanced", *, batch=1, heads=1, dtype="float32", dims=(16, 16), **options
    ):
        if isinstance(formats, str):
            options |= {"head_dim": dims[0], "value_head_dim": dims[1]}
        self.batch, self.heads, self.dims = batch, heads, dims
        self.dtype = getattr(torch, dtype)
        self.cpu, self.gpu = pq.KVCache(formats, **options), pq.KVCache(formats, **options)
        self.rng = np.random.default_rng(0)

    def numbers(self, *shape):
        return torch.from_numpy(self.rng.standard_normal(shape, dtype=np.float32)).to(self.dtype)

    def append(self, n, padding=None):
        k, v = (self.numbers(self.batch, n, self.heads, d).transpose(1, 2) for d in self.dims)
        for cache in (self.cpu, self.gpu):
            with where(cache is self.gpu):
                cache.append(k + 0.5, v, padding)
        return self

    def both(self, change):
        for cache in (self.cpu, self.gpu):
            with where(cache is self.gpu):
                change(cache)
        self.batch = self.cpu.batch_size or self.batch
        return self

    def attend(self, group=1, q_len=1, mask=None, **options):
        q = self.numbers(self.batch, q_len, group * self.heads, self.dims[0]).transpose(1, 2)
        results = []
        for cache in (self.cpu, self.gpu):
            with where(cache is self.gpu):
                results.append(cache.attend(q, mask, return_lse=True, **options))
        (expected, expected_lse), (found, lse) = results
        assert found.dtype == q.dtype
        assert found.shape == expected.shape
        step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(q.dtype, 0)
        np.testing.assert_allclose(
            found.double(), expected.double(), rtol=step, atol=1e-5 * float(expected.abs().max())
        )
        np.testing.assert_allclose(lse, expected_lse, atol=1e-5)
        return self

    def check(self):
        """Codes and exact tokens, bit for bit, and what is decoded of them."""
        (numbers, arrays), (others, other_arrays) = (
            to_plain(cache._state) for cache in (self.cpu, self.gpu)
        )
        assert numbers == others
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, other_arrays[name], err_msg=name)
        for expected, found in zip(self.cpu.decode(), self.gpu.decode(), strict=True):
            assert found.dtype == expected.dtype
            step = {torch.float16: 2**-10, torch.bfloat16: 2**-7}.get(found.dtype, 1e-6)
            np.testing.assert_allclose(found.double(), expected.double(), rtol=step, atol=1e-6)
        return self


class where:
    """Whether tensors are a GPU's here."""

    def __init__(self, gpu):
        self.gpu = gpu

    def __enter__(self):
        self.before, gpu_arrays._is_cuda = gpu_arrays._is_cuda, lambda tensor: self.gpu

    def __exit__(self, *_):
        gpu_arrays._is_cuda = self.before


# ---- what is held --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "sink", "recent"),
    [("float32", 0, 0), ("float16", 4, 3), ("bfloat16", 0, 20), ("float64", 1, 0)],
)
def test_tokens_go_where_they_go_on_the_cpu(dtype, sink, recent):
    """However they are cut into appends; pages of a prompt, gathered ones, then one at a time."""
    twins = Twins(dtype=dtype, sink=sink, recent=recent)
    for n in (1, 2, 140, 0, 112, 1, 1):
        twins.append(n)
    assert len(twins.gpu._state.keys.table.blocks[0]) == (257 - sink - recent) // 128
    twins.check().attend(group=2)


def test_rows_of_different_lengths():
    twins = Twins(batch=3, sink=2, recent=5).append(150, [0, 149, 12]).append(20, [0, 0, 19])
    twins.append(1).check().attend(group=3).attend(group=2, q_len=9)
    assert twins.gpu.lengths.tolist() == [171, 22, 140]


def test_a_cropped_page_is_filled_up():
    """Against its own offset, in a block of its own: snapshots keep the old one."""
    twins = Twins(pq.FormatPair(SMALL_OFFSET, SMALL_OFFSET), dims=(64, 64), sink=1, recent=0)
    twins.append(140)
    snapshot = copy.deepcopy(twins.gpu)
    before = snapshot.decode()
    twins.both(lambda cache: cache.crop(50)).check().attend()
    twins.append(100).check().attend(group=4)
    assert all(map(torch.equal, snapshot.decode(), before))


def test_rows_are_selected_and_repeated_and_share_their_pages():
    twins = Twins(batch=2, sink=1, recent=2).append(140, [0, 7])
    one = twins.gpu.nbytes
    twins.both(lambda cache: cache.select([1, 0, 1])).both(lambda cache: cache.repeat(2))
    assert twins.gpu.nbytes < 2.5 * one
    twins.append(2).check().attend(group=2)
    assert len({id(row[0]) for row in twins.gpu._state.keys.table.blocks}) == 2


def test_bytes_are_those_of_the_cpu():
    """But for the tables that tell where pages are, and counted once."""
    twins = Twins(batch=2, heads=2).append(400)
    states = twins.cpu._state, twins.gpu._state
    for side in ("keys", "values"):
        cpu, gpu = (getattr(state, side) for state in states)
        assert cpu.exact.nbytes == gpu.exact.nbytes
        assert cpu.table.blocks_nbytes == gpu.table.blocks_nbytes
    assert twins.cpu.nbytes == twins.gpu.nbytes
    assert twins.cpu._repr_html_() == twins.gpu._repr_html_()


def test_reset_forgets_where_it_was():
    twins = Twins().append(3)
    twins.gpu.reset()
    twins.gpu.append(*gaussian(2, 1, 1, 5, 16))
    assert isinstance(twins.gpu.decode()[0], np.ndarray)


# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_a_decode_step(group, dtype):
    twins = Twins(heads=2, dtype=dtype, sink=1, recent=2).append(133)
    twins.append(1).attend(group=group)


@pytest.mark.parametrize("options", [
    {"softcap": 2.0, "scale": 3.0},
    {"q_len": 5},
    {"q_len": 140, "softcap": 4.0},
    {"mask": "bool"},
    {"mask": "bias", "q_len": 3},
    {"mask": "column"},
    {"mask": "bias", "q_len": 66},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("uneven", [False, True])
def test_what_hides_tokens_and_changes_logits(options, uneven):
    """Few and many queries, of which some see a part of a page only."""
    twins = Twins(batch=2, heads=1, sink=2, recent=3).append(145, [0, 9] if uneven else None)
    kind, options = options.get("mask"), dict(options)
    q_len, seq_len = options.get("q_len", 1), twins.cpu.seq_len
    mask = {
        "bool": torch.rand(2, 1, q_len, seq_len) < 0.7,
        "bias": torch.randn(2, 1, seq_len),
        "column": torch.zeros(1, 2, q_len, 1),
    }
    if kind == "bias":
        mask["bias"] = torch.randn(1, 2, 1, seq_len)
    twins.attend(group=2, **(options | {"mask": mask.get(kind)}))


def test_long_prompts_are_gone_through_in_blocks(monkeypatch):
    """Of queries, as scores take more memory than all else."""
    held, exp2 = [], torch.exp2
    for module in (gpu_attention, gpu_exact):
        monkeypatch.setattr(module, "SCORES", 5000)
    monkeypatch.setattr(torch, "exp2", lambda x: (held.append(x.numel()), exp2(x))[1])
    twins = Twins(batch=2, heads=1, sink=2, recent=3).append(145, [0, 9])
    twins.attend(group=2, q_len=136, softcap=4.0, mask=torch.randn(1, 2, 136, 145))
    assert 2500 < max(held) <= 5000


def test_only_exact_or_only_packed_tokens():
    twins = Twins(batch=2, sink=0, recent=0, dims=(32, 48))
    twins.append(5).attend(group=2).append(123).attend(group=2).attend(q_len=3)
    assert twins.gpu._state.exact == (0, 0)
    twins.append(1).attend().check()


def test_more_exact_tokens_than_a_tile():
    """With a running softmax; a row that is far shorter has none in the later tiles."""
    twins = Twins(batch=2, sink=4, recent=600, dims=(48, 16)).append(550, [0, 500])
    twins.attend(group=2, softcap=3.0)


def test_rows_without_tokens_get_zeros():
    twins = Twins(batch=2, sink=1, recent=1).append(140, [0, 140])
    out = twins.gpu.attend(torch.ones(2, 1, 1, 16))
    assert torch.equal(out[1], torch.zeros(1, 1, 16))
    twins.attend(group=2)


def test_queries_of_another_dtype_than_the_tokens():
    twins = Twins(dtype="bfloat16", sink=1, recent=1).append(135)
    twins.dtype = torch.float32
    twins.attend(group=2).attend(group=2, q_len=2)


def test_nan_is_kept_to_its_row():
    twins = Twins(batch=2, sink=1, recent=1, nan="propagate")
    k, v = torch.randn(2, 2, 1, 140, 16)
    k[1, 0, 100, 3] = float("nan")
    for cache in (twins.cpu, twins.gpu):
        with where(cache is twins.gpu):
            cache.append(k, v)
    q = torch.randn(2, 1, 1, 16)
    out = twins.gpu.attend(q)
    with where(False):
        expected = twins.cpu.attend(q)
    np.testing.assert_allclose(out, expected, atol=1e-5)
    assert torch.isfinite(out[0]).all()
    assert torch.isnan(out[1]).all()


@pytest.mark.parametrize("threads", [32, 64])
def test_the_order_of_threads_does_not_matter(threads, monkeypatch):
    """A missing barrier of the kernel for exact tokens would show."""
    from polarquant_nb import gpu_codec

    monkeypatch.setattr(gpu_codec, "simulated_threads", lambda *_: threads)
    cache = pq.KVCache("balanced", head_dim=16, sink=1, recent=300)
    cache.append(*torch.randn(2, 1, 1, 290, 16))
    q = torch.randn(1, 2, 1, 16)
    first = cache.attend(q)
    monkeypatch.setattr(cuda_simulator, "order", lambda t: list(reversed(t)))
    assert torch.equal(cache.attend(q), first)


def test_a_step_of_no_rows_or_queries_launches_nothing():
    cache = pq.KVCache("balanced", head_dim=16)
    cache.append(*torch.ones(2, 1, 1, 3, 16))
    out, lse = cache.attend(torch.ones(1, 2, 0, 16), return_lse=True)
    assert out.shape == (1, 2, 0, 16)
    assert lse.shape == (1, 2, 0)
    cache.append(*torch.ones(2, 1, 1, 0, 16))
    assert cache.seq_len == 3


def test_the_check_for_gpus_finds_caches_equal(capsys):
    """``benchmarks/gpu_check.py``, whose times need a GPU."""
    import gpu_check

    gpu_check.check_cache("cpu", head_dim=16, tokens=140)
    assert "KVCache: bytes equal" in capsys.readouterr().out


# ---- moving --------------------------------------------------------------------------------------


def test_to_another_device_and_back():
    twins = Twins(batch=2, sink=1, recent=2).append(140, [0, 3])
    with where(False):
        back = twins.gpu.to("cpu")
    assert back._state.kind.device is None
    twins.gpu, on_gpu = back.to("cpu"), twins.gpu
    assert twins.gpu is not back  # here "cpu" is a GPU
    assert on_gpu.to("cpu") is on_gpu
    twins.append(3).check().attend()
    with where(False), pytest.raises(ValueError, match="device is 'meta'; it must be 'cpu' or"):
        back.to("meta")


def test_a_numpy_cache_moves_and_gives_tensors():
    cache = pq.KVCache("balanced", head_dim=16, sink=1, recent=2)
    k, v = gaussian(2, 1, 2, 140, 16)
    cache.append(k, v)
    moved = cache.to("cpu")
    q = gaussian(1, 4, 1, 16)
    np.testing.assert_allclose(moved.attend(torch.from_numpy(q)), cache.attend(q), atol=1e-5)
    assert isinstance(cache.decode()[0], np.ndarray)


def test_pickles_and_files_are_read_on_the_cpu(tmp_path):
    pytest.importorskip("safetensors")
    twins = Twins(dtype="bfloat16", sink=1, recent=2).append(140)
    twins.gpu.save(tmp_path / "cache")
    for read in (pq.KVCache.load(tmp_path / "cache"), pickle.loads(pickle.dumps(twins.gpu))):
        assert read._state.kind == twins.cpu._state.kind
        with where(False):
            assert all(map(torch.equal, read.decode(), twins.cpu.decode()))
    twins.gpu = read.to("cpu")
    twins.append(4).check()


def test_inference_mode_and_gradients():
    cache = pq.KVCache("balanced", head_dim=16, sink=1, recent=2)
    with torch.inference_mode():
        cache.append(*torch.randn(2, 1, 1, 140, 16))
        cache.select([0, 0])
        cache.attend(torch.randn(2, 1, 1, 16))
    k = torch.randn(2, 1, 1, 16, requires_grad=True)
    cache.append(k, k)
    assert not cache.attend(k).requires_grad
    assert not cache.decode()[0].requires_grad


# ---- what cannot be stored -----------------------------------------------------------------------


def test_a_prompt_that_cannot_be_stored_is_refused():
    cache = pq.KVCache("balanced", head_dim=16)
    k, v = torch.randn(2, 2, 1, 200, 16)
    v[1, 0, 7, 3] = float("inf")
    with pytest.raises(ValueError, match=r"v is inf at index \(1, 0, 7, 3\)"):
        cache.append(k, v)
    cache.append(k, v, [0, 8])  # padding is not looked at
    k = k.clone()
    k[0, 0, 0] = 7e4
    with pytest.raises(ValueError, match=r"k at index \(0, 0, 0\) has norm 2.8e\+05"):
        cache.append(k, v, [0, 8])
    assert cache.lengths.tolist() == [200, 192]


def test_a_token_that_cannot_be_stored_is_refused_when_its_page_is_to_be_made():
    """Late, as nothing waits until then; the cache is as it was, and a crop helps."""
    cache = pq.KVCache("balanced", head_dim=16, sink=1, recent=2)
    k, v = torch.randn(2, 1, 1, 120, 16)
    k[0, 0, 100, 5] = float("nan")
    cache.append(k, v)
    new = torch.randn(1, 1, 1, 16)
    for _ in range(10):
        cache.append(new, new)
    held = cache.decode()
    with pytest.raises(
        ValueError, match=r"k of an earlier append.* is nan at index \(0, 0, 100, 5"
    ):
        cache.append(new, new)
    assert cache.seq_len == 130
    np.testing.assert_array_equal(cache.decode()[0], held[0])
    cache.crop(100)
    cache.append(*torch.randn(2, 1, 1, 50, 16))
    assert cache._state.packed == (128,)


# ---- models --------------------------------------------------------------------------------------


def generated(cache, model, ids, **options):
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None} | options
    return model.generate(ids, pad_token_id=0, **given(cache), **options)


def given(cache):
    from polarquant_nb.hf.versions import CACHE_ARGUMENT

    return {CACHE_ARGUMENT: cache}


@pytest.fixture
def model():
    pytest.importorskip("transformers")
    from tiny_models import tiny

    sizes = {"head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = pq.hf.enable(tiny("llama", **sizes))
    yield model
    pq.hf.disable(model)


def caches(model, run, **options):
    """Results of a PolarCache on the CPU, and of one on the GPU."""
    results = []
    for is_gpu in (False, True):
        with where(is_gpu):
            results.append(run(pq.hf.PolarCache(model.config, sink=1, recent=2, **options)))
    return results


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.filterwarnings("ignore:keys and values of a PolarCache")
def test_generate_gives_the_tokens_that_the_cpu_gives(model, enabled):
    """On the codes, and on what is decoded of them; a page is made on the way."""
    if not enabled:
        pq.hf.disable(model)
    ids = torch.randint(3, 90, (1, 129), generator=torch.Generator().manual_seed(1))

    def run(cache):
        tokens = generated(cache, model, ids)
        layer = cache.polar_layers[1]
        assert layer.cache._state.packed == (128,)
        assert (layer.cache._state.kind.device is None) == (not gpu_arrays._is_cuda(ids))
        return tokens, cache.nbytes, cache.report().coded

    expected, found = caches(model, run)
    assert torch.equal(expected[0], found[0])
    assert expected[1:] == found[1:]


def test_a_step_of_a_layer_does_not_wait(model, looked):  # noqa: F811
    """One token without a mask; with one, once for the mask, which every layer is given."""
    cache = pq.hf.PolarCache(model.config, sink=1, recent=2)
    k, v = torch.randn(2, 1, 1, 30, 16)
    q = torch.randn(1, 2, 1, 16)
    for layer in cache.polar_layers.values():
        layer.update(k, v)
        layer.settle()
    looked.clear()
    mask = torch.ones(1, 1, 1, 32, dtype=torch.bool)
    for shown, waits in ((None, []), (mask, ["tolist"])):
        for layer in cache.polar_layers.values():
            keys, _ = layer.update(k[:, :, :1], v[:, :, :1])
            assert layer.attend(q, shown, None, None, None) is not None
            assert keys.shape[2] == layer.get_seq_length()
        assert looked == waits


def test_generate_with_padding_and_beams(model):
    ids = torch.randint(3, 90, (2, 134), generator=torch.Generator().manual_seed(2))
    shown = torch.ones_like(ids)
    shown[0, :7] = 0
    options = {"attention_mask": shown, "num_beams": 2, "max_new_tokens": 3}
    expected, found = caches(model, lambda cache: generated(cache, model, ids, **options))
    assert torch.equal(expected, found)


def test_chunks_of_a_prompt_attend_to_each_other_exactly(model):
    """A padded row; then cropped, moved, and handles of what is held."""
    ids = torch.randint(3, 90, (2, 150), generator=torch.Generator().manual_seed(3))
    shown = torch.ones_like(ids)
    shown[1, :5] = 0

    def run(cache):
        with torch.no_grad():
            for first, last in ((0, 135), (135, 149)):
                model(ids[:, first:last], attention_mask=shown[:, :last], **given(cache))
            cache.crop(-2)
            cache.to("cpu")
            last = model(ids[:, 147:149], attention_mask=shown[:, :149], **given(cache))
        keys = cache.layers[0].keys
        assert keys.device == ids.device
        return last.logits, keys + 0, cache.layers[1].values + 0

    for expected, found in zip(*caches(model, run), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_compiled_step_is_an_operator(model):
    """Of caches on a GPU as of others; only that the simulator runs it."""
    cache, twin = (pq.KVCache("balanced", head_dim=16, sink=1, recent=2) for _ in range(2))
    cache.append(*torch.ones(2, 1, 1, 3, 16))
    twin.append(*torch.ones(2, 1, 1, 3, 16))

    def step(cache, q, k, v):
        cache.append(k, v)
        return cache.attend(q)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        q, k, v = torch.randn(3, 1, 1, 1, 16)
        assert torch.equal(compiled(cache, q, k, v), step(twin, q, k, v))
    assert cache._state.kind.device is not None


# ---- arguments -----------------------------------------------------------------------------------


def test_what_is_on_another_device_is_named():
    cache = pq.KVCache("balanced", head_dim=16)
    x, array = torch.ones(1, 1, 3, 16), np.ones((1, 1, 3, 16), np.float32)
    with pytest.raises(ValueError, match="v is on cpu; k is on cpu: move it there"):
        cache.append(x, array)  # both names are the CPU's here
    cache.append(x, x)
    with pytest.raises(ValueError, match="k is on meta; the cache holds cpu: move it there"):
        cache.append(x.to("meta"), x.to("meta"))
    with pytest.raises(ValueError, match="q is on cpu; the cache holds cpu: move it there"):
        cache.attend(array[:, :, :1])
    with pytest.raises(ValueError, match="q is on device meta, but the cache on cpu"):
        cache.attend(x[:, :, :1].to("meta"))
    with pytest.raises(ValueError, match="mask is a ndarray on the CPU, but q on device cpu"):
        cache.attend(x[:, :, :1], np.ones((1, 3), bool))
    with pytest.raises(ValueError, match="mask is on device meta, but q on cpu"):
        cache.attend(x[:, :, :1], torch.ones(1, 3, dtype=torch.bool, device="meta"))
    with pytest.raises(TypeError, match="k is torch float16; it must be torch float32"):
        cache.append(x.half(), x.half())
    with pytest.raises(ValueError, match="q_len is 4 and seq_len 3"):
        cache.attend(torch.ones(1, 1, 4, 16))
    with pytest.raises(ValueError, match="q has shape"):
        cache.attend(torch.ones(1, 1, 1, 32))
    with pytest.raises(
        ValueError, match=r"k has shape \(2, 1, 3, 16\); it must be \(1, 1, n, 16\)"
    ):
        cache.append(x.repeat(2, 1, 1, 1), x)


@pytest.mark.parametrize("has_bias", [False, True], ids=["scales", "scales and bias"])
@pytest.mark.parametrize("shape", [(2, 16), (2, 2, 16)], ids=["shared", "of each row"])
def test_a_preconditioner(shape, has_bias):
    """Positions of a bias count from each row's first token, sinks included."""
    rng = np.random.default_rng(7)
    bias = pq.RotaryBias(3 * rng.standard_normal(shape), np.geomspace(1, 1e-2, 8))
    scales = np.exp2(rng.integers(-1, 2, shape)).astype(np.float32)
    preconditioner = pq.Preconditioner(scales, bias if has_bias else None)
    twins = Twins(batch=2, heads=2, sink=1, recent=2, preconditioner=preconditioner)
    twins.append(140, [0, 9]).check().attend(group=2).attend(q_len=3)
    twins.both(lambda cache: cache.select([1, 1])).append(1).check().attend(group=3)
    twins.both(lambda cache: cache.crop(60)).append(90).check().attend()


def test_a_key_that_scales_make_too_long_is_refused():
    preconditioner = pq.Preconditioner(np.full((1, 16), 4.0))
    cache = pq.KVCache("balanced", head_dim=16, preconditioner=preconditioner)
    x = torch.full((1, 1, 130, 16), 5000.0)
    cache.append(x[:, :, :1], x[:, :, :1] / 9)
    with pytest.raises(ValueError, match=r"k .*has norm 2e\+04.*with this preconditioner"):
        cache.append(x, x / 9)
    assert cache.seq_len == 1


def test_an_online_preconditioner_is_refused():
    cache = pq.KVCache("balanced", head_dim=16, preconditioner=pq.OnlinePreconditioner())
    x = torch.ones(1, 1, 3, 16)
    with pytest.raises(ValueError, match="OnlinePreconditioner, which is fitted on the CPU only"):
        cache.append(x, x)
    assert cache.seq_len == 0
