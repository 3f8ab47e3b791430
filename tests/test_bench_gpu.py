"""The benchmark on a GPU that is not there: CPU tensors and a stopped clock stand in for it."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import numpy as np
import pytest
from test_bench import distance, exact_attention, refused

import polarquant_nb as pq
from polarquant_nb import bench, bench_gpu, gpu_status
from polarquant_nb.bench_contenders import Inputs
from polarquant_nb.bench_gpu import GPU_STAGES
from polarquant_nb.bench_output import format_result
from polarquant_nb.cli import main

torch = pytest.importorskip("torch")

TINY = ["bench", "--device", "cuda", "--seq-len", "128", "--shape", "1/2/64", "--repeat", "2"]
GPU = {
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "multiprocessors": 132,
    "memory": 2**37,
    "torch_cuda": "13.0",
}


# ---- contenders ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "queries"), [("decode", 1), ("prefill", 5)])
def test_contenders_compute_the_same(stage, queries):
    inputs, pair = Inputs.draw((2, 6, 64), 150, 5, seed=1), pq.preset("balanced", 64)
    q = inputs.q[:, :, -queries:]
    exact = exact_attention(q, inputs.k, inputs.v)
    decoded = [
        pq.encode(x, fmt).decode() for x, fmt in ((inputs.k, pair.keys), (inputs.v, pair.values))
    ]
    contenders = GPU_STAGES[stage](inputs, pair)
    assert next(iter(contenders)) == "ours"
    for name, contender in contenders.items():
        expected = exact_attention(q, *decoded) if name == "ours" else exact
        assert distance(contender.call(), expected) < 1e-2, name


def test_vectors_are_encoded_and_decompressed():
    inputs, pair = Inputs.draw((2, 6, 64), 150, 5, seed=1), pq.preset("balanced", 64)
    for side, x, fmt in (("keys", inputs.k, pair.keys), ("values", inputs.v, pair.values)):
        pages = pq.encode(x.bfloat16(), fmt)
        encoding = GPU_STAGES[f"encode {side}"](inputs, pair)
        np.testing.assert_array_equal(encoding["ours"].call().words, pages.words)
        assert torch.equal(encoding["copy bf16"].call(), x.bfloat16())
        assert encoding["dense rotation bf16"].call().shape == x.shape
        back = GPU_STAGES[f"decompress {side}"](inputs, pair)
        assert torch.equal(back["ours"].call(), pages.decode())
        numbers = 2 * 2 * 150 * 64
        for contenders in (encoding, back):
            assert contenders["ours"].nbytes == numbers + pages.nbytes
            assert contenders["copy bf16"].nbytes == 2 * numbers


# ---- time ----------------------------------------------------------------------------------------


class Stream:
    """Events take their time from a clock that calls move on."""

    def __init__(self, monkeypatch):
        self.now, self.done = 0.0, []
        monkeypatch.setattr(torch.cuda, "Event", self.event)

    def event(self, *, enable_timing):
        assert enable_timing
        found = SimpleNamespace(time=None)
        found.record = lambda: setattr(found, "time", self.now)
        found.synchronize = lambda: self.done.append(found)
        found.elapsed_time = self.elapsed(found)
        return found

    def elapsed(self, begin):
        def milliseconds(end):
            assert self.done[-1] is end  # else the GPU is still at work
            return 1e3 * (end.time - begin.time)

        return milliseconds


def test_events_tell_the_time_of_calls(monkeypatch):
    stream = Stream(monkeypatch)
    times = iter([9.0, 9.0, 9.0, 5.0, 1.0, 2.0])

    def call():
        stream.now += next(times)

    assert bench_gpu.median_seconds(call, repeat=3) == 2.0


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch):
    """Tensors stay on the CPU, where ours runs too."""
    draw = Inputs.draw

    def on_cpu(shape, seq_len, q_len, seed, device):
        assert device == "cuda"
        return draw(shape, seq_len, q_len, seed)

    monkeypatch.setattr(bench, "unusable", lambda: None)
    monkeypatch.setattr(Inputs, "draw", on_cpu)
    monkeypatch.setattr(bench_gpu, "event_seconds", bench.wall_seconds)
    monkeypatch.setattr(bench_gpu, "describe_gpu", lambda: GPU)
    monkeypatch.setattr(bench_gpu, "copy_bandwidth", lambda: 4e12)


def test_bench_of_a_tiny_layer(device, capsys, monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")  # NumPy's threads do not matter here
    assert main([*TINY, "--threads", "1", "--json", "out.json", "--png", "out.png"]) == 0
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert result["device"] == "cuda"
    assert result["gpu"] == {**GPU, "copy_bandwidth": 4e12}
    assert {"torch", "numba-cuda"} <= set(result["info"]["versions"])
    assert list(dict.fromkeys(row["stage"] for row in result["rows"])) == list(GPU_STAGES)
    for row in result["rows"]:
        assert row["seconds"] > 0
        assert row["nbytes"] > 0 or row["contender"].startswith("dense")
    out = capsys.readouterr().out
    assert out.startswith("NVIDIA H200 (sm_90, 132 multiprocessors), driver ")
    assert len(re.findall(r"^ +128  ours .*%$", out, re.M)) == len(GPU_STAGES)
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bench_of_one_stage(device, capsys):
    assert main([*TINY, "--only", "decompress"]) == 0
    assert re.findall(r"^(\w+).*preset (\w+)$", capsys.readouterr().out, re.M) == [
        ("Decompress", "balanced"),
        ("Decompress", "balanced"),
    ]


def test_tables_tell_bandwidths():
    row = {
        "stage": "decode",
        "preset": "tiny",
        "num_kv_heads": 2,
        "num_heads": 4,
        "head_dim": 64,
        "seq_len": 1000,
        "q_len": 1,
        "contender": "ours",
        "seconds": 50e-6,
        "times_faster": 1.0,
        "quartiles": [1.0, 1.0],
        "rounds": 5,
        "first_seconds": 3.0,
        "nbytes": 10**8,
    }
    rival = {"contender": "rival", "seconds": 1e-4, "times_faster": 2.0, "nbytes": None}
    versions = {"polarquant-nb": "1", "numba": "2", "numba-cuda": "3", "torch": "4"}
    text = format_result(
        {
            "rows": [row, {**row, **rival}],
            "gpu": {**GPU, "copy_bandwidth": 4e12},
            "total_seconds": 1.2,
            "info": {
                "versions": versions,
                "gpu": ["NVIDIA H200, 580.65, 143771 MiB", "NVIDIA L4, 580.65, 23034 MiB"],
            },
        }
    )
    lines = text.splitlines()
    assert lines[0] == (
        "NVIDIA H200 (sm_90, 132 multiprocessors), driver 580.65, torch's CUDA 13.0; "
        "copying: 4000 GB/s"
    )
    assert lines[1] == "polarquant-nb 1, numba 2, numba-cuda 3, torch 4"
    assert lines[5].split() == [
        "1000", "ours", "3000.00", "50.0", "25.000", "5", "95.37", "2000", "50%",
    ]  # fmt: skip
    assert lines[6].split() == ["rival", "3000.00", "100.0", "50.000", "2.00", "5"]


# ---- what is in the way --------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "problem"), [
    ("missing", "numba-cuda is not installed: pip install 'polarquant-nb[cuda13]'"),
    ("_shadowed", "Numba's built-in CUDA target was imported"),
    ("_old_driver", "the NVIDIA driver supports CUDA 12.4"),
])  # fmt: skip
def test_a_gpu_that_cannot_be_used_is_an_error_that_says_why(capsys, monkeypatch, name, problem):
    for each in ("missing", "_shadowed", "_old_driver"):
        monkeypatch.setattr(gpu_status, each, lambda each=each: problem if each == name else None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    line = refused(capsys, *TINY[1:])
    assert line == (f"polarquant-nb bench: device is 'cuda', which cannot be used: {problem}")


@pytest.mark.parametrize(("cuda", "message"), [
    (None, "is built without CUDA: install a build for CUDA"),
    ("13.0", "torch finds no NVIDIA GPU: .* too old for CUDA 13.0"),
])  # fmt: skip
def test_what_torch_lacks_is_named(capsys, monkeypatch, cuda, message):
    for each in ("missing", "_shadowed"):
        monkeypatch.setattr(gpu_status, each, lambda: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert re.search(message, refused(capsys, *TINY[1:]))


def test_what_is_not_measured_on_a_cpu_is_refused(capsys):
    line = refused(capsys, "--only", "encode", "--only", "decompress")
    assert "only has 'decompress', which is not measured on device 'cpu'" in line
    assert "encode, decode, prefill" in line
