"""The calibration of a model: what is measured, resumed, written and refused."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace

import numpy as np
import pytest
from language_models import CharacterTokenizer, random_ids, tiny_model
from support import NOJIT

import polarquant_nb as pq
from polarquant_nb import calibrate, eval_command, generate
from polarquant_nb.cli import main
from polarquant_nb.layer_bits import LayerNeeds
from polarquant_nb.models import LoadedModel

torch = pytest.importorskip("torch")
for module in ("transformers", "tqdm"):
    pytest.importorskip(module)

from test_hf import dynamic, forward  # noqa: E402
from tiny_models import tiny  # noqa: E402

from polarquant_nb import evaluate, sensitivity  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("default::FutureWarning"),
    pytest.mark.filterwarnings("default::DeprecationWarning"),
    pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1"),
]

MEASURED = ["--tokens", "196", "--score-tokens", "10", "--windows", "2"]
ARGUMENTS = ["calibrate", "--text", "text.txt", "--out", "out.json", "--bits", "3.5", *MEASURED]


def refused(capsys, *argv):
    """The last line that a refusal prints; loading is announced before some."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("polarquant-nb")]
    assert lines == captured.err.strip().splitlines()[-1:]
    return lines[0]


@pytest.fixture
def use_model(monkeypatch, tmp_path):
    """Have commands use a model, in an empty directory with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 200)
    threads = torch.get_num_threads()

    def use(model, source="tiny random model"):
        loaded = LoadedModel(model, CharacterTokenizer(), source)
        for module in (calibrate, eval_command, generate):
            monkeypatch.setattr(module, "load_model", lambda path: loaded)
            monkeypatch.setattr(module, "set_num_threads", lambda n: None)
        return tmp_path

    yield use
    torch.set_num_threads(threads)


@pytest.fixture
def directory(use_model):
    return use_model(tiny_model(max_position_embeddings=300))


# ---- what is measured ----------------------------------------------------------------------------


def test_moments_are_those_of_queries_and_keys():
    """Against queries and keys worked out by the layer's own projections."""
    model, ids = tiny_model(hidden_size=96, num_attention_heads=6), random_ids(1, 150)
    windows = [ids[0].tolist(), ids[0].flip(0).tolist()]
    found = sensitivity.measure_moments(model, windows, 140, sink=3)
    assert list(found) == [0, 1]
    q_squared, k_variance = [], []
    for window in windows:
        part = torch.tensor([window[:140]])
        with torch.no_grad():
            seen = model(part, output_hidden_states=True, use_cache=True)
            attention = model.model.layers[1].self_attn
            x = model.model.layers[1].input_layernorm(seen.hidden_states[1])
            cos, sin = model.model.rotary_emb(x, torch.arange(140)[None])
            q = attention.q_proj(x).view(140, 6, 64).transpose(0, 1)
            turned = torch.cat([-q[..., 32:], q[..., :32]], -1)
            q = (q * cos + turned * sin).numpy()
        q_squared.append((q**2).reshape(2, 3, 140, 64).mean((1, 2)))
        k = seen.past_key_values.layers[1].keys[0, :, 3:].numpy()
        pages = [k[:, :128], k[:, 128:]]
        k_variance.append(
            sum(((p - p.mean(1, keepdims=True)) ** 2).sum(1) for p in pages) / k.shape[1]
        )
    np.testing.assert_allclose(found[1].q_squared, np.mean(q_squared, 0), rtol=1e-4)
    np.testing.assert_allclose(found[1].k_variance, np.mean(k_variance, 0), rtol=1e-4)
    assert found[1].value_head_dim == 64


def test_the_kl_of_one_side_is_that_of_a_cache_with_only_this_side_coded():
    model, window = tiny_model(), random_ids(1, 211)[0].tolist()
    fmt = pq.preset("tiny", 64).keys
    scales = pq.Preconditioner(np.geomspace(0.5, 2, 128, dtype=np.float32).reshape(2, 64))
    choices = [
        sensitivity.Coded(1, "keys", fmt, scales),
        sensitivity.Coded(0, "values", fmt),
    ]
    found = dict(sensitivity.measure_kl(model, window, 200, choices, sink=2, recent=50))
    ids = torch.tensor([window])
    cache = evaluate.prefill(model, ids[:, :200])
    reference = evaluate.score(model, cache, ids[:, 200:-1])
    for choice in choices:
        changed = evaluate.prefill(model, ids[:, :200])
        x = getattr(changed.layers[choice.layer], choice.side)
        x[..., 2:150, :] = pq.encode(
            x[..., 2:150, :].contiguous(), fmt, preconditioner=choice.preconditioner
        ).decode()
        log_probs = evaluate.score(model, changed, ids[:, 200:-1])
        kl = evaluate.compare(log_probs, reference, ids[:, 201:]).kl
        assert found[choice] == pytest.approx(kl, rel=1e-3)
        assert kl > 0


def test_calibrate_a_tiny_model(directory, capsys):
    assert main([*ARGUMENTS, "--seed", "7"]) == 0
    captured = capsys.readouterr()
    calibration = pq.Calibration.load("out.json")
    assert sorted(p.name for p in directory.iterdir()) == ["out.json", "text.txt"]
    assert calibration.model == "tiny random model"
    assert calibration.text == "file text.txt"
    assert calibration.settings == {
        "tokens": 196, "score_tokens": 10, "windows": 2, "sink": 4, "recent": 64, "alpha": 0.5,
        "seed": 7,
    }  # fmt: skip
    assert calibration.bits == 3.5
    assert 3.2 < calibration.bits_per_value <= 3.5
    for layer in calibration:
        assert layer.preconditioner.shape == (2, 64)
        np.testing.assert_allclose(np.log(layer.preconditioner.scales).mean(-1), 0, atol=1e-3)
        for points in (layer.needs.key_kl, layer.needs.value_kl):
            (fine, little), (coarse, much) = points
            assert 10 * fine < coarse
            assert 0 < 2 * little < much
        assert layer.formats.keys.seed == 0
    assert "layers: 100%" in captured.err
    assert re.search(r"^    1 +\d\.\d\d bits +\d\.\d\d bits ", captured.out, re.M)
    assert "Calibration: out.json" in captured.out


def test_scales_can_be_left_out(directory):
    assert main([*ARGUMENTS, "--alpha", "0"]) == 0
    assert all(layer.preconditioner is None for layer in pq.Calibration.load("out.json"))


def test_layers_that_are_not_of_full_attention_stay_exact(use_model):
    model = tiny("gemma3")
    use_model(model)
    assert main([*ARGUMENTS, "--bits", "4"]) == 0
    calibration = pq.Calibration.load("out.json")
    assert [layer is None for layer in calibration] == [True, False, True]
    assert calibration[1].needs.head_dim == 32
    cache = pq.hf.PolarCache(model.config, calibration)
    assert list(cache.polar_layers) == [1]


def test_the_bias_of_keys_is_taken_off(use_model):
    model = copy.deepcopy(tiny("qwen2"))
    with torch.no_grad():
        bias = model.model.layers[1].self_attn.k_proj.bias
        bias.copy_(torch.linspace(-30, 30, len(bias)))
    use_model(model)
    assert main(ARGUMENTS) == 0
    calibration = pq.Calibration.load("out.json")
    own = calibration[1].preconditioner.bias
    np.testing.assert_allclose(own.vectors.ravel(), bias.detach().numpy(), rtol=1e-6)
    ids = random_ids(1, 300)
    pq.hf.enable(model)
    unbiased = [replace(one, preconditioner=one.preconditioner.without_bias) for one in calibration]
    caches = [
        pq.hf.PolarCache.from_model(model, "out.json"),
        pq.hf.PolarCache(model.config, replace(calibration, layers=tuple(unbiased))),
        dynamic(model),
    ]
    for cache in caches:
        forward(model, cache, ids)
    ours, without, exact = caches
    errors = [
        (cache.layers[1].cache.decode()[0] - exact.layers[1].keys).norm()
        for cache in (ours, without)
    ]
    assert 3 * errors[0] < errors[1]


# ---- resumed -------------------------------------------------------------------------------------


def test_an_interrupted_run_goes_on(directory, monkeypatch, capsys):
    assert main(ARGUMENTS) == 0
    whole = (directory / "out.json").read_bytes()
    (directory / "out.json").unlink()
    real, seen = calibrate.measure_kl, []

    def stops(*args, **options):
        for found in real(*args, **options):
            if len(seen) == 11:  # in the second window: each has 8
                raise KeyboardInterrupt
            seen.append(found)
            yield found

    monkeypatch.setattr(calibrate, "measure_kl", stops)
    assert main(ARGUMENTS) == 130
    assert sorted(p.name for p in directory.iterdir()) == ["out.json.partial", "text.txt"]
    seen.clear()
    monkeypatch.setattr(calibrate, "measure_moments", None)
    capsys.readouterr()
    for changes in (["--seed", "1"], ["--alpha", "0.25"], ["--windows", "1"]):
        line = refused(capsys, *ARGUMENTS, *changes)
        assert "out.json.partial was left by a run with another model, text or settings" in line
    assert main([*ARGUMENTS, "--bits", "3.5"]) == 0
    assert len(seen) == 5
    assert (directory / "out.json").read_bytes() == whole
    assert sorted(p.name for p in directory.iterdir()) == ["out.json", "text.txt"]


@pytest.mark.parametrize("raw", [b"{", b"[]", b"null"])
def test_a_damaged_partial_file_is_refused(directory, capsys, raw):
    (directory / "out.json.partial").write_bytes(raw)
    assert "out.json.partial is damaged: remove it" in refused(capsys, *ARGUMENTS)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--bits", "0.5"], "bits_per_value is 0.5; it must be at least"),
        (["--bits", "-1"], "argument --bits: -1 is not above 0 and finite"),
        (["--bits", "nan"], "argument --bits: nan is not above 0 and finite"),
        (["--out", "out.bin"], "--out is out.bin; its name must end in .json"),
        (["--out", "missing/out.json"], "cannot write missing/out.json"),
        (["--text", "missing.txt"], "the text missing.txt cannot be read"),
        (["--tokens", "295"], "are 305 together; the model's context is 300 tokens"),
        (["--windows", "100"], "--tokens + --score-tokens + 1"),
        (["--recent", "192"], "--tokens is 196; with --sink 4 and --recent 192"),
        (["--alpha", "2"], "argument --alpha: 2 is not in 0..1"),
    ],
)
def test_what_cannot_be_calibrated(directory, capsys, changes, message):
    line = refused(capsys, *ARGUMENTS, *changes)
    assert line.startswith("polarquant-nb calibrate: ")
    assert message in line
    assert not (directory / "out.json").exists()


def test_a_small_budget_is_refused_before_anything_is_measured(directory, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "measure_kl", None)
    assert "bits_per_value is 0.5" in refused(capsys, *ARGUMENTS, "--bits", "0.5")


# ---- used ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny_model(max_position_embeddings=1000)


@pytest.fixture(scope="module")
def calibration():
    """Of the tiny model, with different formats and scales in its layers."""
    layers = []
    for seed, name in enumerate(("tiny", "accurate")):
        scales = np.exp(np.random.default_rng(seed).standard_normal((2, 64)) / 2)
        needs = LayerNeeds(2, 64, 64, ((0.02, 1e-3),), ((0.02, 1e-3),))
        layers.append(pq.LayerCalibration(pq.preset(name, 64), pq.Preconditioner(scales), needs))
    return pq.Calibration(tuple(layers), 4.0, "tiny", "none", {})


def test_a_polar_cache_attends_to_what_its_calibration_stores(model, calibration, tmp_path):
    """Against plain attention to the keys and values as each layer's own formats store them."""
    calibration.save(tmp_path / "own.json")
    ids = random_ids(1, 300)
    pq.hf.enable(model)
    expected = evaluate.prefill(model, ids[:, :290])
    for layer, own in zip(expected.layers, calibration, strict=True):
        for name, fmt in vars(own.formats).items():
            x = getattr(layer, name)  # 286 tokens after the sinks: one page, the others exact
            preconditioner = own.preconditioner if name == "keys" else None
            pages = pq.encode(x[:, :, 4:132].contiguous(), fmt, preconditioner=preconditioner)
            x[:, :, 4:132] = pages.decode()
    expected = evaluate.score(model, expected, ids[:, 290:])
    for given in (calibration, tmp_path / "own.json", str(tmp_path / "own.json")):
        cache = pq.hf.PolarCache(model.config, given, recent=120)
        forward(model, cache, ids[:, :290])
        found = torch.log_softmax(forward(model, cache, ids[:, 290:]).logits, -1)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with_other = pq.hf.PolarCache(model.config, calibration, layers={0: None, 1: "tiny"})
    assert list(with_other.polar_layers) == [1]
    assert with_other.layers[1].options["preconditioner"] is None


def test_a_calibration_of_another_model_is_refused(model, calibration):
    one = calibration[0]
    for other, message in (
        ((one,), "for a model of 1 layers, tiny; this one has 2"),
        ((one, of_shape(4, 64)), "for 4 kv heads in layer 1; the model has 2"),
        ((one, of_shape(2, 128)), "for head_dim 128 of keys and 128 of values; the model has 64"),
    ):
        with pytest.raises(ValueError, match=message):
            pq.hf.PolarCache(model.config, pq.Calibration(other, 4, "tiny", "none", {}))
    gemma = tiny("gemma3")
    other = pq.Calibration((of_shape(2, 32),) * 3, 4, "tiny", "none", {})
    with pytest.raises(ValueError, match="layer 0, which here is a DynamicSlidingWindowLayer"):
        pq.hf.PolarCache(gemma.config, other)
    with pytest.raises(ValueError, match="preconditioner is given; a calibration has its own"):
        pq.hf.PolarCache(model.config, calibration, preconditioner=pq.OnlinePreconditioner())
    with pytest.raises(TypeError, match="formats are Calibration"):
        pq.hf.PolarCache(model.config, "tiny", layers={0: calibration})
    cache = evaluate.prefill(model, random_ids(1, 100))
    with pytest.raises(ValueError, match="for a model of 1 layers, tiny; the cache has 2"):
        evaluate.compress(cache, pq.Calibration((one,), 4, "tiny", "none", {}))


def of_shape(heads, head_dim):
    needs = LayerNeeds(heads, head_dim, head_dim, ((0.02, 1e-3),), ((0.02, 1e-3),))
    return pq.LayerCalibration(pq.preset("tiny", head_dim), None, needs)


def test_compress_with_a_calibration(model, calibration):
    cache = evaluate.prefill(model, random_ids(1, 300))
    compressed = evaluate.compress(cache, calibration, seed=3)
    for i, own in enumerate(calibration):
        pages = [
            pq.encode(
                getattr(cache.layers[i], name)[:, :, 4:-64].contiguous(),
                pq.PolarFormat(**{**vars(fmt), "seed": 3}),
                preconditioner=own.preconditioner if name == "keys" else None,
            )
            for name, fmt in vars(own.formats).items()
        ]
        assert torch.equal(compressed.cache.layers[i].keys[:, :, 4:-64], pages[0].decode())
        assert torch.equal(compressed.cache.layers[i].values[:, :, 4:-64], pages[1].decode())
    partly = pq.Calibration((None, calibration[1]), 4, "tiny", "none", {})
    compressed = evaluate.compress(cache, partly)
    assert torch.equal(compressed.cache.layers[0].keys, cache.layers[0].keys)
    assert compressed.coded_values == 2 * 2 * 232 * 64


def test_eval_of_calibrations(directory, calibration, capsys):
    calibration.save("own.json")
    argv = ["eval", "--text", "text.txt", *MEASURED, "--no-needle", "--calibration", "own.json"]
    assert main([*argv, "--json", "numbers.json"]) == 0
    result = json.loads((directory / "numbers.json").read_text(encoding="utf-8"))
    assert [row["contender"] for row in result["summary"]] == ["exact", "own 4"]
    assert [row["family"] for row in result["summary"]] == ["exact", "own"]
    budgets = ["--bits", "4.5", "--bits", "3", "--preset", "tiny"]
    assert main([*argv, *budgets, "--json", "numbers.json"]) == 0
    result = json.loads((directory / "numbers.json").read_text(encoding="utf-8"))
    rows = {row["contender"]: row for row in result["summary"]}
    assert list(rows) == ["exact", "tiny", "own 4.5", "own 3"]
    assert 0 < rows["own 4.5"]["kl"] < rows["own 3"]["kl"]

    capsys.readouterr()
    assert "--bits is given; it is the budget of" in refused(capsys, "eval", "--bits", "4")
    line = refused(capsys, *argv, "--calibration", "./own.json", "--bits", "3")
    assert "two contenders are called own 3" in line
    assert "No such file" in refused(capsys, "eval", "--calibration", "missing.json")
    line = refused(capsys, "eval", "--calibration", "numbers.json")
    assert "numbers.json'; that file holds no usable calibration" in line
    pq.Calibration((calibration[0],), 4, "other", "none", {}).save("other.json")
    line = refused(capsys, *argv, "--calibration", "other.json")
    assert "not supported: the calibration is for a model of 1 layers, other" in line


def test_generate_with_a_calibration(directory, calibration, capsys):
    calibration.save("own.json")
    argv = ["generate", "--prompt-file", "text.txt", "--max-new-tokens", "1", "--calibration"]
    (directory / "text.txt").write_text("What follows is not known. " * 9)
    assert main([*argv, "own.json"]) == 0
    assert "4.53 bits" in capsys.readouterr().out
    assert "generate: --calibration: " in refused(capsys, *argv, "missing.json")
    pq.Calibration((calibration[0],), 4, "other", "none", {}).save("other.json")
    assert "for a model of 1 layers, other" in refused(capsys, *argv, "other.json")


# ---- benchmarks ----------------------------------------------------------------------------------


def test_the_bundled_calibration_can_be_made_anew(directory):
    bundled = pytest.importorskip("bundled_calibration")
    bundled.main(["--out", "made.json", "--tokens", "196", "--score-tokens", "10"])
    made = pq.Calibration.load("made.json")
    assert made.model == "SmolLM2-135M-Instruct"
    assert re.fullmatch(r"pydoc_data.topics of Python 3\.\d+\.\w+", made.text)
    assert made.bits == 4.05


def test_the_benchmark_of_calibrations(directory, calibration, capsys):
    benchmark = pytest.importorskip("calibration")
    calibration.save("own.json")
    benchmark.main(
        ["--calibration", "own.json", "--text", "text.txt", *MEASURED, "--json", "a.json"]
    )
    rows = json.loads((directory / "a.json").read_text(encoding="utf-8"))["summary"]
    assert len(rows) == 1 + 4 * 4
    assert [row["contender"] for row in rows[5:9]] == [
        "compact", "compact, scales", "3.29 bits by layer", "3.29 bits by layer, scales",
    ]  # fmt: skip
    kl = [row["kl"] for row in rows]
    assert kl[0] == 0 < min(kl[1:])
    assert len(set(kl)) == 17
    assert "calibrated on none; scored on file text.txt, 20 tokens in 2 windows" in (
        capsys.readouterr().out
    )
