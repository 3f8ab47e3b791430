"""The decoder of docs/how-to/custom-decoder.md: near what exact caches give, compiled or not."""

from __future__ import annotations

import shutil

import pytest

import polarquant_nb as pq

torch = pytest.importorskip("torch")
tiny_llama = pytest.importorskip("tiny_llama")

# torch imports its own deprecated module where it generates C++
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
)


@pytest.fixture
def model():
    torch.manual_seed(0)
    torch.compiler.reset()
    return tiny_llama.TinyLlama(tiny_llama.Config()).eval()


def new_caches(model, **options):
    return [pq.KVCache("balanced", head_dim=64, **options) for _ in model.blocks]


def exact_caches(model):
    return [tiny_llama.ExactCache() for _ in model.blocks]


@torch.inference_mode()
def logits(model, tokens, caches, padding=None, cuts=(250, 1, 1, 30, 1, 1)):
    """Of every token, fed a few at a time."""
    positions = torch.arange(tokens.shape[1])[None]
    if padding is not None:
        positions = (positions - padding[:, None]).clamp(min=0)
    parts, start = [], 0
    for n in cuts:
        part = slice(start, start + n)
        parts.append(model(tokens[:, part], positions[:, part], caches, padding))
        start, padding = start + n, None
    return torch.cat(parts, 1)


@pytest.fixture
def tokens():
    torch.manual_seed(1)
    return torch.randint(256, (2, 284))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_without_pages_logits_are_exact(model, tokens, padded):
    padding = torch.tensor([0, 70]) if padded else None
    real = torch.ones(2, 284, dtype=torch.bool)
    if padded:
        real[1, :70] = False
    out = logits(model, tokens, new_caches(model, recent=1000), padding)
    expected = logits(model, tokens, exact_caches(model), padding)
    torch.testing.assert_close(out[real], expected[real], rtol=1e-4, atol=1e-5)


def test_padded_rows_are_as_alone(model, tokens):
    out = logits(model, tokens, new_caches(model), torch.tensor([0, 70]))
    alone = logits(model, tokens[1:, 70:], new_caches(model), cuts=(180, 1, 1, 30, 1, 1))
    torch.testing.assert_close(out[1:, 70:], alone, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_pages_logits_are_near(model, tokens, dtype):
    model = model.to(getattr(torch, dtype))
    out = logits(model, tokens, new_caches(model)).float()
    expected = logits(model, tokens, exact_caches(model)).float()
    error = (out - expected)[:, 250:].square().sum() / expected[:, 250:].square().sum()
    assert 0 < error < 1e-3


def test_compiled_without_fusion_it_is_equal(model, tokens):
    caches, twins = new_caches(model), new_caches(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(logits(compiled, tokens, caches), logits(model, tokens, twins))
    for cache, twin in zip(caches, twins, strict=True):
        assert all(map(torch.equal, cache.decode(), twin.decode()))


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_compiled_with_other_arithmetic_it_is_near(model, tokens, backend):
    """Fused norms round otherwise, so single codes may differ."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    out = logits(compiled, tokens, new_caches(model))
    torch.testing.assert_close(out, logits(model, tokens, new_caches(model)), rtol=0, atol=1e-2)


def test_greedy_says_what_the_exact_caches_say_without_pages(model, tokens):
    out = tiny_llama.greedy(model, tokens, 5, new_caches(model, recent=1000))
    assert torch.equal(out, tiny_llama.greedy(model, tokens, 5, exact_caches(model)))
