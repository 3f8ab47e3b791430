"""torch.compile: graphs with caches in them give what eager calls give, in that order."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil

import pytest
from support import run_python

import polarquant_nb as pq

torch = pytest.importorskip("torch")
counters = pytest.importorskip("torch._dynamo.utils").counters
pytest.importorskip("polarquant_nb.torch_ops")
opcheck = torch.library.opcheck

BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="C++"),
            # torch imports its own deprecated module
            pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
        ],
    ),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    """Nothing compiled, nothing counted."""
    torch._dynamo.reset()
    counters.clear()


def new_cache(**options):
    return pq.KVCache("balanced", head_dim=64, **options)


def tensors(n, *, batch=2, dtype=torch.float32, seed=0):
    """Queries, keys and values of n tokens; not contiguous, as after a transposition."""
    torch.manual_seed(seed)
    heads = (4, 2, 2)
    return [torch.randn(batch, n, h, 64).to(dtype).transpose(1, 2) for h in heads]


def same(a, b):
    """Whether two caches hold the same, bit for bit."""
    return a.lengths.tolist() == b.lengths.tolist() and all(
        map(torch.equal, a.decode(), b.decode())
    )


def step(cache, q, k, v, *options, **more):
    """What a layer does."""
    cache.append(k, v, *options)
    return cache.attend(q, **more)


def both(function, cache, twin, *arguments, **options):
    """The same call on two caches: compiled, and as it is."""
    return function(cache, *arguments, **options), step(twin, *arguments, **options)


def graphs():
    return counters["stats"]["unique_graphs"]


# ---- the same results ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_steps_are_equal(backend):
    check_steps(backend, torch.float32)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_dtypes(dtype):
    check_steps("aot_eager", getattr(torch, dtype))


def check_steps(backend, dtype):
    """A prompt, single tokens, more of a prompt: the same codes and outputs, from few graphs."""
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    cache, twin = new_cache(), new_cache()
    for seed, n in enumerate((300, 1, 1, 7, 1, 200, 1)):
        out, expected = both(compiled, cache, twin, *tensors(n, dtype=dtype, seed=seed))
        assert torch.equal(out, expected)
        assert out.dtype == dtype
    assert same(cache, twin)
    assert cache.seq_len == 511
    assert graphs() == 3  # 300 tokens, 1, any


@pytest.mark.parametrize("backend", BACKENDS)
def test_appends_and_attends_keep_their_order(backend):
    """Nothing but the order tells the four outputs apart; an append without output is kept."""

    def steps(cache, q, k, v):
        cache.append(k, v)
        first = cache.attend(q)
        cache.append(2 * v, k)
        second = cache.attend(q)
        cache.attend(2 * q)  # unused
        cache.append(v, k)
        cache.append(k, k)
        return first, second

    compiled = torch.compile(steps, backend=backend, fullgraph=True)
    cache, twin = new_cache(), new_cache()
    for seed in range(3):
        inputs = tensors(50, seed=seed)
        assert all(map(torch.equal, compiled(cache, *inputs), steps(twin, *inputs)))
    assert same(cache, twin)
    assert cache.seq_len == 600


@pytest.mark.parametrize("as_list", [True, False], ids=["list", "tensor"])
def test_padding(as_list):
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    cache, twin = new_cache(), new_cache()
    for counts in ([0, 20], [7, 0]):
        padding = counts if as_list else torch.tensor(counts)
        assert torch.equal(*both(compiled, cache, twin, *tensors(150), padding))
    assert cache.lengths.tolist() == [293, 280]
    assert same(cache, twin)


@pytest.mark.parametrize("numbers", [True, False])
def test_attend_options(numbers):
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    mask = torch.rand(2, 1, 1, 150) < 0.8
    options = {
        "mask": mask.float() if numbers else mask,
        "scale": 0.3,
        "softcap": 5.0,
        "return_lse": True,
    }
    (out, lse), expected = both(compiled, new_cache(), new_cache(), *tensors(150), **options)
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert lse.dtype == torch.float32


def test_masks_may_be_lists():
    def masked(cache, q, k, v):
        cache.append(k, v)
        return cache.attend(q, [[0.0, 1.0]])

    inputs = tensors(2)
    out = torch.compile(masked, backend="aot_eager", fullgraph=True)(new_cache(), *inputs)
    assert torch.equal(out, masked(new_cache(), *inputs))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["enable_grad", "no_grad", "inference_mode"])
def test_grad_modes(backend, mode):
    """No gradient goes through a cache, compiled or not."""
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    cache, twin = new_cache(), new_cache()
    with getattr(torch, mode)():
        for n in (100, 1):
            inputs = [x.requires_grad_() for x in tensors(n)]
            out, expected = both(compiled, cache, twin, *inputs)
            assert torch.equal(out, expected)
            assert not out.requires_grad
            assert not expected.requires_grad


def test_modes_may_change_between_steps():
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    cache, twin = new_cache(), new_cache()
    with torch.inference_mode():
        assert torch.equal(*both(compiled, cache, twin, *tensors(100)))
    assert torch.equal(*both(compiled, cache, twin, *tensors(1)))
    with torch.inference_mode():
        assert torch.equal(*both(compiled, cache, twin, *tensors(1)))
        made_here = new_cache()
        compiled(made_here, *tensors(100))
    compiled(made_here, *tensors(100))
    assert made_here.seq_len == 200


def test_autocast():
    def layer(cache, q, k, v, w):
        return step(cache, q @ w, k @ w, v @ w)

    w = torch.randn(64, 64) / 8
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    cache, twin = new_cache(), new_cache()
    with torch.autocast("cpu", torch.bfloat16):
        for n in (100, 1):
            out = compiled(cache, *tensors(n), w)
            assert torch.equal(out, layer(twin, *tensors(n), w))
            assert out.dtype == torch.bfloat16
    assert same(cache, twin)


def test_attention_on_pages():
    pair = pq.preset("balanced", 64)

    def attend(q, keys, values, options):
        return pq.attention(2 * q, keys, values, **options)

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    q, k, v = tensors(300)
    keys, values = pq.encode(k, pair.keys), pq.encode(v, pair.values)
    for options in ({}, {"is_causal": True, "scale": 0.2}, {"mask": torch.rand(300) < 0.5}):
        assert torch.equal(compiled(q, keys, values, options), attend(q, keys, values, options))
    lse = {"return_lse": True}
    for n in (1, 2, 3):
        results, expected = (f(q[:, :, :n], keys, values, lse) for f in (compiled, attend))
        assert all(map(torch.equal, results, expected))
    with torch.inference_mode():
        compiled(q, keys, values, lse)
    before = graphs()
    copies = copy.deepcopy(keys), pickle.loads(pickle.dumps(values))
    del keys, values
    gc.collect()
    for pages in (copies, (pq.encode(v, pair.keys), pq.encode(k, pair.values))):
        assert torch.equal(compiled(q, *pages, {}), attend(q, *pages, {}))
    assert graphs() == before


# ---- few graphs ----------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """Holds its cache, as custom decoders do."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Linear(64, 64)
        self.cache = new_cache()

    def forward(self, q, k, v):
        return q + self.out(step(self.cache, q, k, v))


class Layers(torch.nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))

    def forward(self, q, k, v):
        for layer in self.layers:
            q = layer(q, k, v)
        return q


@torch.no_grad()
def run(model, num_tokens=20):
    """A prompt and some tokens."""
    return [model(*tensors(n, seed=seed)) for seed, n in enumerate((200, *[1] * num_tokens))]


def test_a_model_is_two_graphs_whatever_its_caches():
    """One for the prompt, one for a token; then one for prompts of any length, and no more."""
    model = Layers(4)
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, run(compiled), run(twin)))
    assert graphs() == 2
    for change in (copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache)), fresh, fresh):
        for layer, other in zip(model.layers, twin.layers, strict=True):
            layer.cache, other.cache = change(layer.cache), change(other.cache)
        assert all(map(torch.equal, run(compiled, 2), run(twin, 2)))
        assert graphs() == 2
    assert all(torch.equal(compiled(*tensors(n)), twin(*tensors(n))) for n in range(5, 9))
    assert graphs() == 3
    assert not counters["graph_break"]


def fresh(cache):
    return new_cache()


def test_layers_that_are_compiled_one_by_one_share_graphs():
    """Names of caches are no constants of a graph: 10 layers do not hit torch's limit of 8."""
    model = Layers(10)
    twin = copy.deepcopy(model)
    for layer in model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, run(model, 2), run(twin, 2)))
    assert graphs() <= 4  # queries of the first layer have other strides


def test_a_cache_that_layers_share():
    model = Layers(3)
    for layer in model.layers:
        layer.cache = model.layers[0].cache
    twin = copy.deepcopy(model)
    assert twin.layers[2].cache is twin.layers[0].cache
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, run(compiled, 1), run(twin, 1)))
    assert model.layers[0].cache.seq_len == 603


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.crop(170),
        lambda cache: cache.crop(30),
        lambda cache: cache.select([1, 0]),
        lambda cache: cache.reset(),
        lambda cache: cache.append(*tensors(10)[1:]),
    ],
    ids=["crop", "crop far", "select", "reset", "append"],
)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_eager_changes_between_steps(change, backend):
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    cache, twin = new_cache(), new_cache()
    for n in (200, 1):
        both(compiled, cache, twin, *tensors(n))
    for seed in range(3):
        change(cache)
        change(twin)
        assert torch.equal(*both(compiled, cache, twin, *tensors(1, seed=seed)))
        for held in (cache, twin):
            held.append(*tensors(250, seed=seed)[1:])
    assert same(cache, twin)
    assert graphs() == 2


# ---- the operators -------------------------------------------------------------------------------

OPS = torch.ops.polarquant_nb


@pytest.mark.parametrize("padding", [None, [3, 0]])
@pytest.mark.parametrize("held", [0, 150])
def test_opcheck_append(held, padding):
    cache = new_cache()
    if held:
        cache.append(*tensors(held)[1:])
    _, k, v = tensors(90)
    padding = None if padding is None else torch.tensor(padding)
    token = cache._token.tensor.clone()
    for keys, values in ((k, v), (k.contiguous(), v.contiguous())):
        opcheck(OPS.append.default, (token, keys, values, padding))
    assert cache.seq_len == held + 90  # however often the operator ran


MASKED = (torch.rand(200) < 0.5, 64, 0.5, 3.0)
PLAIN = (None, 64, None, None)


@pytest.mark.parametrize("options", [(*PLAIN, False), (*MASKED, True)], ids=["plain", "masked"])
def test_opcheck_attend(options):
    cache = new_cache()
    cache.append(*tensors(200)[1:])
    for q in (tensors(5)[0], tensors(5)[0].contiguous()):
        opcheck(OPS.attend.default, (cache._token.tensor, q, *options))


@pytest.mark.parametrize(
    "options", [(*PLAIN, True, False), (*MASKED, False, True)], ids=["plain", "masked"]
)
def test_opcheck_attention(options):
    pair = pq.preset("balanced", 64)
    q, k, v = tensors(200)
    keys, values = pq.encode(k, pair.keys), pq.encode(v, pair.values)
    for queries in (q, q.contiguous().bfloat16()):
        arguments = queries, keys._token.tensor, values._token.tensor, *options
        opcheck(OPS.attention.default, arguments)


def test_append_is_a_function_of_its_arguments():
    """Run again from the same token, it replaces what it appended, across a page's end too."""
    cache, twin = new_cache(), new_cache()
    for held in (cache, twin):
        held.append(*tensors(190)[1:])
    for seed in (1, 2, 3):
        first = cache._token.tensor.clone()
        for again in (seed + 10, seed):
            token = first.clone()
            _, k, v = tensors(70, seed=again)
            OPS.append(token, k, v, None)
            assert torch.equal(token, cache._token.tensor)
        twin.append(k, v)
        assert same(cache, twin)


def test_what_is_out_of_order_is_refused():
    cache = new_cache()
    stale = cache._token.tensor.clone()
    q, k, v = tensors(3)
    cache.append(k, v)
    with pytest.raises(RuntimeError, match=r"after 1 changes, but it has had 2"):
        OPS.attend(stale, q, None, 64, None, None, False)
    with pytest.raises(RuntimeError, match="something else changed it"):
        OPS.append(stale, k, v, None)  # what it would replace was no operator's
    assert cache.seq_len == 3


def test_a_cache_that_is_gone_is_not_mistaken_for_another():
    cache = new_cache()
    token = cache._token.tensor
    del cache
    gc.collect()
    new_cache()
    with pytest.raises(RuntimeError, match="are gone"):
        OPS.append(token, *tensors(3)[1:], None)


def test_replaced_tokens_are_let_go():
    """What an append could be run again from is not kept longer than until the next change."""
    cache = new_cache()
    cache.append(*tensors(190)[1:])
    OPS.append(cache._token.tensor, *tensors(70)[1:], None)
    assert cache._token.before
    cache.reset()
    assert cache._token.before is None


# ---- what cannot be traced -----------------------------------------------------------------------


QUERIES = tensors(3)[0].numpy()
UNTRACED = {
    "seq_len": lambda cache: cache.seq_len,
    "lengths": lambda cache: cache.lengths.tolist(),
    "batch_size": lambda cache: cache.batch_size,
    "num_kv_heads": lambda cache: cache.num_kv_heads,
    "nbytes": lambda cache: cache.nbytes,
    "bits_per_value": lambda cache: cache.bits_per_value,
    "repr": repr,
    "crop": lambda cache: cache.crop(100),
    "select": lambda cache: cache.select([1]),
    "repeat": lambda cache: cache.repeat(2),
    "reset": lambda cache: cache.reset(),
    "decode": lambda cache: cache.decode()[0].sum().item(),
    "deepcopy": lambda cache: copy.deepcopy(cache).seq_len,
    "numpy": lambda cache: cache.attend(QUERIES).tolist(),
}


@pytest.mark.parametrize("name", UNTRACED)
def test_all_else_breaks_the_graph(name):
    """Read or changed in compiled code, a cache is what it is then; nothing inside is traced."""

    def layer(cache, k, v):
        cache.append(k, v)
        cache.append(k, v)
        result = UNTRACED[name](cache)
        return k + 1, result, cache.seq_len

    compiled = torch.compile(layer, backend="aot_eager")
    cache, twin = new_cache(), new_cache()
    _, k, v = tensors(90)
    for times in range(1, 4):
        out, *results = compiled(cache, k, v)
        assert torch.equal(out, k + 1)
        assert results == list(layer(twin, k, v)[1:])
        assert graphs() <= 2  # none of what this package does
        for held in (cache, twin):
            held.reset()
            held.append(k[:, :, :times], v[:, :, :times])
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="not_part_of_a_graph"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(cache, k, v)


def test_caches_made_and_codes_made_in_compiled_code():
    fmt = pq.preset("balanced", 64).keys

    def layer(q, k, v):
        cache = new_cache()
        out = step(cache, q, pq.decode(pq.encode(2 * k, fmt)), v)
        return out, cache

    compiled = torch.compile(layer, backend="aot_eager")
    for n in (200, 100):
        inputs = tensors(n)
        out, cache = compiled(*inputs)
        expected, twin = layer(*inputs)
        assert torch.equal(out, expected)
        assert same(cache, twin)


def test_what_raises_in_a_graph_leaves_the_cache_as_it_was():
    def layers(caches, q, k, v):
        for cache in caches:
            q = step(cache, q, k, v)
            v = v / 0.0 * 0.0  # NaN
        return q

    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    caches = new_cache(), new_cache()
    q, k, v = tensors(150)
    for cache in caches:
        cache.append(k, v)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"v is nan at index \(0, 0, 0, 0\)"):
            compiled(caches, q, k, v)
        assert [cache.seq_len for cache in caches] == [300, 150]
        caches[0].crop(150)  # as after an eager call
    with pytest.raises(ValueError, match="q has 3 heads"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(caches[0], q[:, :3], k, v)


def test_torch_that_is_imported_later():
    """The cache has no token at first: the graph is broken, until something has been appended."""
    code = """
import polarquant_nb as pq
cache = pq.KVCache("balanced", head_dim=64)
import torch
def step(cache, x):
    cache.append(x, x)
    return cache.attend(x)
x = torch.randn(1, 2, 3, 64)
try:
    torch.compile(step, backend="eager", fullgraph=True)(cache, x)
except torch._dynamo.exc.Unsupported:
    print("broken")
torch._dynamo.reset()
torch.compile(step, backend="eager")(cache, x)
torch._dynamo.reset()
torch.compile(step, backend="eager", fullgraph=True)(cache, x)
print(cache.seq_len)
"""
    assert run_python("-c", code).split() == ["broken", "6"]


def test_eager_calls_load_no_compiler():
    code = """
import sys
import torch
import polarquant_nb as pq
cache = pq.KVCache("balanced", head_dim=64)
x = torch.randn(1, 2, 3, 64)
cache.append(x, x)
cache.attend(x)
print([name for name in ("torch._dynamo", "polarquant_nb.torch_ops") if name in sys.modules])
"""
    assert run_python("-c", code).strip() == "[]"
