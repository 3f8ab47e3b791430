"""On a GPU: codes equal the CPU's, decode and attention are close, graphs can be captured."""

import pytest

import polarquant_nb as pq

torch = pytest.importorskip("torch")
gpu_check = pytest.importorskip("gpu_check")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("preset", pq.presets())
def test_a_preset_gives_what_it_gives_on_the_cpu(preset):
    gpu_check.check_all("cuda", head_dim=128, tokens=1000, presets=(preset,))


def test_a_cache_holds_and_answers_what_it_does_on_the_cpu():
    gpu_check.check_cache("cuda", head_dim=128, tokens=1000)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_decode_step_does_not_wait():
    """torch refuses what it knows to wait."""
    cache = pq.KVCache("balanced", head_dim=128)
    cache.append(*torch.randn(2, 1, 8, 400, 128, device="cuda").half())
    q = torch.randn(1, 32, 1, 128, device="cuda").half()
    token = torch.randn(1, 8, 1, 128, device="cuda").half()
    cache.attend(q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            cache.append(token, token)
            cache.attend(q)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_caches_move_between_devices(tmp_path):
    cache = pq.KVCache("balanced", head_dim=64)
    x = torch.randn(2, 2, 300, 64)
    cache.append(x, x, [0, 9])
    moved = cache.to("cuda")
    assert moved.to("cuda") is moved
    assert all(map(torch.equal, moved.to("cpu").decode(), cache.decode()))
    with pytest.raises(ValueError, match="k is on cpu; the cache holds cuda:0"):
        moved.append(x, x)
    with pytest.raises(ValueError, match="q is on cuda:0; the cache holds cpu"):
        cache.attend(torch.zeros(2, 2, 1, 64, device="cuda"))
    mask = torch.ones(1, 300, dtype=torch.bool)
    with pytest.raises(ValueError, match="mask is on device cpu, but q on cuda:0"):
        moved.attend(torch.zeros(2, 2, 1, 64, device="cuda"), mask)


def test_generate_gives_the_tokens_that_the_cpu_gives():
    """With padding, through a prompt of several pages."""
    pytest.importorskip("transformers")
    from tiny_models import tiny

    from polarquant_nb.hf.versions import CACHE_ARGUMENT

    model = pq.hf.enable(tiny("llama"))
    ids = torch.randint(3, 90, (2, 300), generator=torch.Generator().manual_seed(1))
    shown = torch.ones_like(ids)
    shown[1, :9] = 0
    tokens = []
    try:
        for device in ("cpu", "cuda"):
            model.to(device)
            cache = pq.hf.PolarCache(model.config, recent=8)
            tokens.append(model.generate(
                ids.to(device), attention_mask=shown.to(device), max_new_tokens=20,
                do_sample=False, eos_token_id=None, pad_token_id=0, **{CACHE_ARGUMENT: cache},
            ))  # fmt: skip
            assert cache.layers[1].keys.device.type == device
    finally:
        pq.hf.disable(model.to("cpu"))
    assert torch.equal(tokens[0], tokens[1].cpu())


def test_a_captured_graph_gives_what_an_eager_call_gives():
    gpu_check.check_graph()
