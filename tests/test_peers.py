"""The benchmark's baselines against numbers worked out by hand, and the benchmark itself."""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, distribution
from math import gamma, pi, sqrt

import numpy as np
import peers
import pytest
from language_models import CharacterTokenizer, random_ids, tiny_model
from peers import ggml, hugging_face, kivi, turboquant
from support import run_python

from polarquant_nb import eval_command
from polarquant_nb import quality as judging
from polarquant_nb.models import LoadedModel

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
benchmark = pytest.importorskip("quality")


def gaussian(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def relative_error(x, decoded):
    return ((x - decoded).square().sum() / x.square().sum()).item()


# ---- KIVI ----------------------------------------------------------------------------------------


def test_kivi_keeps_what_its_integers_can_hold():
    """Two bits are four levels; those of a group are its own."""
    channel = torch.arange(32.0)
    keys = (channel + (channel + 1) / 2 * (channel % 4)[:, None])[None, None]
    decoded, nbytes = kivi.code("keys", keys, bits=2)  # channels with scales of their own
    assert torch.equal(decoded, keys)
    assert nbytes == 32 * (32 * 2 // 8 + 2 + 2)  # channels: codes, smallest number, step
    values = keys.transpose(-1, -2).contiguous()
    decoded, nbytes = kivi.code("values", values, bits=2)
    assert torch.equal(decoded, values)
    assert nbytes == 32 * 12
    assert relative_error(values, kivi.code("keys", values, bits=2)[0]) > 1e-3


@pytest.mark.parametrize("bits", [2, 4])
def test_kivi_is_off_by_half_a_step_at_most(bits):
    x = gaussian(1, 2, 64, 64)
    x[0, 0, :32, 0] = 5  # a group without extent
    decoded, nbytes = kivi.code("values", x, bits=bits)
    groups = x.unflatten(-1, (-1, 32))
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (decoded.unflatten(-1, (-1, 32)) - groups).abs().amax(-1)
    assert (error <= 0.51 * step + 2**-9).all()  # ends and step are in float16
    assert nbytes == x.numel() * (bits + 1) / 8
    assert torch.equal(kivi.code("keys", x, bits=bits)[0][0, 0, :32, 0], x[0, 0, :32, 0])


# ---- TurboQuant ----------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
def test_turboquants_codebook_of_one_bit_is_the_mean_magnitude(head_dim):
    mean = gamma(head_dim / 2) / (sqrt(pi) * gamma((head_dim + 1) / 2))
    np.testing.assert_allclose(turboquant.codebook(head_dim, 1), [-mean, mean], rtol=1e-4)


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_turboquants_error_is_that_of_lloyd_and_max(bits, error):
    """Of a Gaussian (Max 1960, table I); a coordinate of a unit vector nearly is one."""
    x = gaussian(1, 1, 4096, 128)
    decoded, nbytes = turboquant.code("keys", x, bits=bits)
    assert relative_error(x, decoded) == pytest.approx(error, rel=0.03)
    assert nbytes == x.numel() * (bits + 16 / 128) / 8
    one_hot = torch.eye(128)[None, None]  # the rotation makes all vectors alike
    assert relative_error(one_hot, turboquant.code("keys", one_hot, bits=bits)[0]) < 1.2 * error
    assert not turboquant.code("values", torch.zeros(1, 1, 2, 64), bits=bits)[0].any()


def test_turboquant_rotates():
    q = turboquant.random_rotation(64)
    np.testing.assert_allclose(q @ q.T, np.eye(64), atol=1e-12)


# ---- llama.cpp -----------------------------------------------------------------------------------


def test_q4_0_keeps_sixteen_levels_and_the_largest_number():
    levels = torch.arange(-8, 8).repeat(2).float()
    blocks = torch.stack([0.25 * levels, -0.5 * levels, 0 * levels])[None, None]
    decoded, nbytes = ggml.code("keys", blocks, quantise=ggml.q4_0)
    assert torch.equal(decoded, blocks)
    assert nbytes == 3 * 18
    x = gaussian(1, 1, 100, 64)
    decoded = ggml.code("keys", x, quantise=ggml.q4_0)[0].unflatten(-1, (-1, 32))
    x = x.unflatten(-1, (-1, 32))
    largest = x.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(
        decoded.gather(-1, largest), x.gather(-1, largest), rtol=1e-3, atol=0
    )


def test_q8_0_keeps_bytes():
    x = torch.tensor([127.0, -126, 3, 0] * 8)
    decoded, nbytes = ggml.code("values", torch.stack([x, 2 * x])[None, None], quantise=ggml.q8_0)
    assert torch.equal(decoded[0, 0], torch.stack([x, 2 * x]))
    assert nbytes == 2 * 34


@pytest.mark.parametrize(("head_dim", "size"), [(32, 32), (64, 64), (96, 32)])
def test_hadamard_is_its_own_inverse_and_spreads(head_dim, size):
    x = gaussian(3, head_dim)
    torch.testing.assert_close(ggml.hadamard(ggml.hadamard(x)), x)
    assert (ggml.hadamard(torch.eye(head_dim)).abs() > 0).sum() == head_dim * size
    torch.testing.assert_close(ggml.hadamard(x).norm(dim=-1), x.norm(dim=-1))


def test_rotation_helps_where_a_channel_sticks_out():
    x = gaussian(1, 1, 100, 64)
    x[..., 5] += 20
    errors = [
        relative_error(x, ggml.code("keys", x, quantise=ggml.q4_0, rotate=rotate)[0])
        for rotate in (False, True)
    ]
    assert errors[1] < errors[0] / 2


# ---- all of them ---------------------------------------------------------------------------------

BITS = {
    "KIVI, 4 bits": 5.0,
    "KIVI, 2 bits": 3.0,
    "TurboQuant_mse, 4 bits": 4.25,
    "TurboQuant_mse, 3 bits": 3.25,
    "TurboQuant_mse, 2 bits": 2.25,
    "llama.cpp, q8_0": 8.5,
    "llama.cpp, Hadamard, q8_0": 8.5,
    "llama.cpp, q4_0": 4.5,
    "llama.cpp, Hadamard, q4_0": 4.5,
}
"""Of head_dim 64, written down from the methods' descriptions."""


def test_every_peer_is_judged_by_its_bytes_and_its_words():
    contenders, missing = peers.contenders(4, 10)
    own = [one for one in contenders if not one.family.startswith("QuantizedCache")]
    assert len(own) + 2 * (2 - len(missing)) == len(contenders)
    assert all("python -m pip install" in reason for reason in missing.values())
    ids = random_ids(1, 121)[0].tolist()
    found = {one.contender: one for one in judging.judge(tiny_model(), [ids], 100, own)}
    exact = found.pop("exact")
    assert {name: one.bits_per_value for name, one in found.items()} == BITS
    for name, one in found.items():
        assert one.kl > 0, name
        kept = 100 - 64 if "KIVI" in name else 14
        assert one.nbytes == pytest.approx(
            exact.nbytes * (kept + (100 - kept) * BITS[name] / 16) / 100
        )
    assert found["llama.cpp, q8_0"].kl < found["llama.cpp, q4_0"].kl / 10
    assert found["KIVI, 4 bits"].kl < found["KIVI, 2 bits"].kl / 3
    turbo = [found[f"TurboQuant_mse, {bits} bits"].kl for bits in (4, 3, 2)]
    assert turbo == sorted(turbo)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_caches_of_transformers_plug_in(backend):
    """In another process: what these packages import warns, which is an error here."""
    try:
        distribution(hugging_face.PACKAGES[backend])
    except PackageNotFoundError:
        pytest.skip(f"{backend} is not installed")
    code = f"""
import torch
from language_models import random_ids, tiny_model
from peers import hugging_face
from polarquant_nb import evaluate
model, ids = tiny_model(), random_ids(1, 200)
cache = evaluate.prefill(model, ids[:, :180])
reference = evaluate.score(model, cache, ids[:, 180:-1])
for bits in (4, 2):
    compressed = hugging_face.compress(cache, {backend!r}, bits)
    assert compressed.exact_values == 0
    assert compressed.bits_per_value == bits + 0.5, compressed.bits_per_value
    scores = [evaluate.score(model, compressed.cache, ids[:, 180:-1]) for _ in range(2)]
    assert torch.equal(*scores)
    print(evaluate.compare(scores[0], reference, ids[:, 181:]).kl)
"""
    four, two = map(float, run_python("-c", code).split()[-2:])
    assert 0 < 3 * four < two


# ---- the benchmark -------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    loaded = LoadedModel(tiny_model(), CharacterTokenizer(), "tiny random model")
    monkeypatch.setattr(eval_command, "load_model", lambda path: loaded)
    monkeypatch.setattr(benchmark.pq, "set_num_threads", lambda n: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 200)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


ARGUMENTS = ["--text", "text.txt", "--tokens", "110", "--score-tokens", "5", "--windows", "2"]


def test_the_benchmark_goes_on_where_it_stopped(tiny, capsys, monkeypatch):
    argv = [*ARGUMENTS, "--needles", "0"]
    one, other = ["--only", "llama.cpp, q4_0"], ["--only", "KIVI, 4 bits"]

    def rows():
        return json.loads((tiny / "quality.json").read_text(encoding="utf-8"))["rows"]

    with monkeypatch.context() as patch:
        patch.setattr(benchmark, "draw_quality", lambda *_: pytest.fail("it was interrupted"))
        calls = iter([*range(3)])
        score = judging.score
        patch.setattr(judging, "score", lambda *a: next(calls, None) is not None and score(*a))
        with pytest.raises(AttributeError):  # at the second window's q4_0
            benchmark.main([*argv, *one])
    first = rows()
    assert [(row["contender"], row["window"]) for row in first] == [
        ("exact", 0), ("llama.cpp, q4_0", 0), ("exact", 1),
    ]  # fmt: skip
    benchmark.main([*argv, *one, *other])
    assert rows()[:3] == first
    assert sorted((row["contender"], row["window"]) for row in rows()[3:]) == [
        ("KIVI, 4 bits", 0), ("KIVI, 4 bits", 1), ("llama.cpp, q4_0", 1),
    ]  # fmt: skip
    everything = rows()
    with monkeypatch.context() as patch:
        patch.setattr(judging, "prefill", lambda *_: pytest.fail("nothing is left to do"))
        benchmark.main([*argv, *one, *other])
    assert rows() == everything
    out = capsys.readouterr().out
    assert re.search(r"^KIVI, 4 bits +5\.00 ", out, re.M)
    assert (tiny / "quality.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"quality\.json has other settings"):
        benchmark.main([*argv, "--seed", "1"])


def test_the_benchmark_has_no_contender_of_another_name(tiny, capsys):
    with pytest.raises(SystemExit):
        benchmark.main([*ARGUMENTS, "--only", "best"])
    assert "no contender is called best; there are 'paper', 'tiny'" in capsys.readouterr().err
    assert [p.name for p in tiny.iterdir()] == ["text.txt"]
