"""The benchmark: fair turns, baselines that compute the same, and what it prints and writes."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import polarquant_nb as pq
from polarquant_nb import bench, models
from polarquant_nb.bench_contenders import STAGES, Inputs, Int4
from polarquant_nb.bench_output import format_result
from polarquant_nb.cli import main

# ---- turns ---------------------------------------------------------------------------------------


class Machine:
    """Contenders that take a given time each, on a clock of their own."""

    def __init__(self):
        self.now = 0.0
        self.called = []

    def contender(self, name, *seconds):
        times = iter(seconds)

        def call():
            self.called.append(name)
            self.now += next(times) if len(seconds) > 1 else seconds[0]

        return call

    def alternate(self, ours, baselines, **limits):
        def seconds(call):
            return bench.wall_seconds(call, clock=lambda: self.now)

        return bench.alternate(ours, baselines, seconds=seconds, **limits)


def test_each_baseline_is_timed_right_after_ours():
    machine = Machine()
    ours = machine.contender("ours", *range(1, 5))
    baselines = {"a": machine.contender("a", 10, 20), "b": machine.contender("b", 0.5)}
    pairs = machine.alternate(ours, baselines, repeat=2, budget=1e9)
    assert machine.called == ["ours", "a", "ours", "b"] * 2
    assert list(pairs) == ["a", "b"]
    np.testing.assert_array_equal(pairs["a"], [[1, 10], [3, 20]])
    np.testing.assert_array_equal(pairs["b"], [[2, 0.5], [4, 0.5]])


@pytest.mark.parametrize(
    ("repeat", "budget", "slow", "fast"), [(9, 30, 5, 9), (9, 1, 3, 3), (2, 1, 2, 2), (1, 99, 1, 1)]
)
def test_slow_baselines_sit_out_rounds_but_the_first_three(repeat, budget, slow, fast):
    machine = Machine()
    baselines = {"slow": machine.contender("slow", 5), "fast": machine.contender("fast", 0.25)}
    ours = machine.contender("ours", 1)
    pairs = machine.alternate(ours, baselines, repeat=repeat, budget=budget)
    assert [len(pairs["slow"]), len(pairs["fast"])] == [slow, fast]
    assert sum(map(sum, pairs["slow"])) <= max(budget, 3 * 6)


# ---- contenders ----------------------------------------------------------------------------------


def exact_attention(q, k, v):
    """Textbook attention in float64; the queries are the last tokens."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    n, tokens = logits.shape[-2:]
    logits = np.where(np.tri(n, tokens, tokens - n, dtype=bool), logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights @ v / weights.sum(-1, keepdims=True)


def distance(x, y):
    """Relative, in the Euclidean norm."""
    x, y = (np.asarray(z.float() if hasattr(z, "float") else z, np.float64) for z in (x, y))
    return np.linalg.norm(x - y) / np.linalg.norm(y)


@pytest.fixture
def inputs():
    pytest.importorskip("torch")
    return Inputs.draw((2, 6, 64), 150, 5, seed=1)


@pytest.mark.parametrize(("stage", "queries"), [("decode", 1), ("prefill", 5)])
def test_contenders_compute_the_same(inputs, stage, queries):
    pair = pq.preset("balanced", 64)
    q = inputs.q[:, :, -queries:]
    contenders = STAGES[stage](inputs, pair)
    assert next(iter(contenders)) == "ours"
    exact = exact_attention(q, inputs.k, inputs.v)
    decoded = [
        pq.encode(x, fmt).decode() for x, fmt in ((inputs.k, pair.keys), (inputs.v, pair.values))
    ]
    int4 = [Int4.quantise(x).dequantise().float() for x in (inputs.k, inputs.v)]
    for name, contender in contenders.items():
        out = contender.call()
        assert tuple(out.shape) == (1, 6, queries, 64)
        if name == "ours":
            assert distance(out, exact_attention(q, *decoded)) < 1e-2
        elif name.startswith("int4"):
            assert distance(out, exact_attention(q, *int4)) < 1e-2
        else:
            assert distance(out, exact) < (1e-5 if "fp32" in name else 1e-2), name


def test_bytes_are_those_of_the_cache(inputs):
    pair = pq.preset("balanced", 64)
    pages = 2 * 2 * (pair.keys.page_nbytes + pair.values.page_nbytes)  # 150 tokens fill two pages
    numbers = 2 * 2 * 150 * 64
    expected = {
        "ours": pages,
        "matmul bf16": 2 * numbers,
        "matmul fp32": 4 * numbers,
        "SDPA bf16, folded": 2 * numbers,
        "int4 to bf16, SDPA": numbers // 2 + 4 * numbers // 64,
        "SDPA bf16, enable_gqa": 2 * numbers,
    }
    assert {n: c.nbytes for n, c in STAGES["decode"](inputs, pair).items()} == expected


def test_encoding_is_compared_with_a_rotation(inputs):
    pair = pq.preset("compact", 64)
    for stage, x, fmt in (("keys", inputs.k, pair.keys), ("values", inputs.v, pair.values)):
        contenders = STAGES[f"encode {stage}"](inputs, pair)
        pages = contenders["ours"].call()
        np.testing.assert_array_equal(pages.words, pq.encode(x, fmt).words)
        assert contenders["dense rotation fp32"].call().shape == x.shape


@pytest.mark.parametrize(("head_dim", "group"), [(128, 64), (96, 32), (80, 16)])
def test_int4_is_off_by_half_a_step_at_most(head_dim, group):
    torch = pytest.importorskip("torch")
    x = torch.randn(2, 50, head_dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 3  # a group without extent
    packed = Int4.quantise(x)
    assert packed.nbytes == x.numel() // 2 + 4 * x.numel() // group
    groups = x.float().reshape(2, 50, -1, group)
    step = (groups.amax(-1) - groups.amin(-1)) / 15
    error = (packed.dequantise().float().reshape(groups.shape) - groups).abs().amax(-1)
    # bfloat16 keeps eight bits of step, sum and product
    assert (error <= 0.5 * step + 2**-6 * groups.abs().amax(-1)).all()
    torch.testing.assert_close(packed.dequantise()[0, 0], x[0, 0])


def test_inputs_are_those_of_the_seed_and_the_same_in_16_bits(inputs):
    torch = pytest.importorskip("torch")
    again, other = (Inputs.draw((2, 6, 64), 150, 5, seed=seed) for seed in (1, 2))
    for name, shape in (("q", (1, 6, 5, 64)), ("k", (1, 2, 150, 64)), ("v", (1, 2, 150, 64))):
        x = getattr(inputs, name)
        assert (tuple(x.shape), x.dtype) == (shape, torch.float32)
        assert torch.equal(x, x.bfloat16().float())
        assert torch.equal(x, getattr(again, name))
        assert not torch.equal(x, getattr(other, name))


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARQUANT_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)


TINY = ["bench", "--seq-len", "128", "--shape", "1/2/64", "--threads", "1", "--repeat", "2"]


def test_bench_of_a_tiny_layer(one_thread, capsys, monkeypatch, tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads(), pq.get_num_threads()
    argv = [*TINY, "--seq-len", "130", "--queries", "129", "--seed", "3"]
    assert main([*argv, "--seq-len", "128", "--json", "out.json", "--png", "out.png"]) == 0
    assert (torch.get_num_threads(), pq.get_num_threads()) == before

    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (result["threads"], result["repeat"], result["seed"]) == (1, 2, 3)
    assert (result["device"], result["gpu"]) == ("cpu", None)
    assert result["cpu_model"]
    assert result["info"]["versions"]["torch"]
    rows = result["rows"]
    cases = list(dict.fromkeys((r["seq_len"], r["stage"], r["q_len"]) for r in rows))
    assert cases == [
        (tokens, stage, queries)
        for tokens, many in ((128, 128), (130, 129))
        for stage, queries in zip(STAGES, (0, 0, 1, many), strict=True)
    ]
    for row in rows:
        assert (row["num_kv_heads"], row["num_heads"], row["head_dim"]) == (1, 2, 64)
        assert row["preset"] == "balanced"
        assert row["seconds"] > 0
        assert row["first_seconds"] > 0
        low, high = row["quartiles"]
        assert 0 < low <= row["times_faster"] <= high
        if row["contender"] == "ours":
            assert low == high == 1
        else:
            assert row["rounds"] == 2
    ours = [row for row in rows if row["contender"] == "ours"]
    assert [row["rounds"] for row in ours] == 2 * [2, 2, 10, 4]

    out = capsys.readouterr().out
    assert len(re.findall(r"^ +128  ours ", out, re.M)) == len(STAGES)
    assert "Decode, 1 query: 1 KV heads, 2 heads, head_dim 64; preset balanced" in out
    assert "Prefill, 129 queries, causal" in out
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.json", "out.png"]


def test_bench_of_one_stage_without_files_or_tqdm(capsys, monkeypatch, tmp_path):
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    monkeypatch.chdir(tmp_path)
    argv = [*TINY, "--only", "encode", "--preset", "tiny", "--preset", "paper"]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert re.findall(r"^(\w+).*preset (\w+)$", captured.out, re.M) == [
        ("Encode", name) for name in ("tiny", "tiny", "paper", "paper")
    ]
    assert captured.err == ""
    assert list(tmp_path.iterdir()) == []


def test_tables_say_how_ours_compares():
    row = {
        "stage": "decode",
        "preset": "tiny",
        "num_kv_heads": 2,
        "num_heads": 4,
        "head_dim": 64,
        "seq_len": 1000,
        "q_len": 1,
        "contender": "ours",
        "seconds": 2e-3,
        "times_faster": 1.0,
        "quartiles": [1.0, 1.0],
        "rounds": 5,
        "first_seconds": 3.0,
        "nbytes": 2**20,
    }
    baseline = {"contender": "rival", "seconds": 5e-3, "times_faster": 2.5, "nbytes": None}
    versions = {"polarquant-nb": "1", "numba": "2", "torch": "3"}
    text = format_result(
        {
            "rows": [row, {**row, **baseline}],
            "gpu": None,
            "threads": 7,
            "load_average": None,
            "cpu_model": "fast",
            "total_seconds": 1.2,
            "info": {"versions": versions, "cpu": {"name": "zen", "kernels": "avx2"}},
        }
    )
    lines = text.splitlines()
    assert lines[0] == "fast (zen): avx2 kernels, threads: 7, load average before: unknown"
    assert "torch 3" in lines[1]
    assert lines[5].split() == ["1000", "ours", "3000.00", "2.00", "1000.0", "5", "1.00"]
    assert lines[6].split() == ["rival", "3000.00", "5.00", "2500.0", "2.50", "5"]


def refused(capsys, *argv):
    assert main(["bench", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_outputs_that_cannot_be_written_are_refused_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(Inputs, "draw", lambda *_: pytest.fail("the work has started"))
    assert "is a directory" in refused(capsys, "--png", str(tmp_path))
    missing = str(tmp_path / "missing" / "x.json")
    assert f"cannot write {missing}" in refused(capsys, "--json", missing)


def test_missing_packages_are_named_with_the_command(capsys, monkeypatch, one_thread):
    monkeypatch.setattr(models, "find_spec", lambda n: None if n == "torch" else find_spec("sys"))
    assert "polarquant-nb bench: this needs torch: python -m pip" in refused(capsys, *TINY[1:])


def test_more_threads_of_numpy_than_of_torch_are_refused(capsys, monkeypatch, one_thread):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    line = refused(capsys, "--threads", "2")
    assert "threads is 2, but NumPy multiplies the matrices of prefill with 3" in line
    assert "OMP_NUM_THREADS=2" in line
