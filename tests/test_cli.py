"""The command: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from language_models import CharacterTokenizer, real_model, tiny_model

from polarquant_nb import demo, models, outputs
from polarquant_nb.budgets import presets
from polarquant_nb.cli import main
from polarquant_nb.models import LoadedModel


def refused(capsys, *argv):
    """The single line that a refusal prints."""
    assert main(list(argv)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("polarquant-nb")
    return line


def test_import_is_lean():
    code = (
        "import sys, polarquant_nb.cli\n"
        "heavy = {'numba', 'torch', 'transformers', 'matplotlib', 'xarray'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_info_says_what_a_bug_report_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("POLARQUANT_CACHE", str(tmp_path / "chosen"))
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines())
    import numba

    assert facts["numba"] == numba.__version__
    assert facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert re.search(r"(avx512|avx2|portable) kernels .*\d+ thread", facts["CPU"])
    assert facts["cache"] == str(tmp_path / "chosen")
    assert facts["CUDA kernels"] == str(tmp_path / "chosen" / "cuda")
    assert "CUDA is not used: " in facts["backend"] or facts["gpu"]
    assert facts["POLARQUANT_CACHE"] == str(tmp_path / "chosen")
    for package in (
        "polarquant-nb",
        "torch",
        "transformers",
        "numba-cuda",
        "xarray",
        "scipy",
        "GPU",
    ):
        assert package in facts


def test_info_does_not_import_torch():
    code = (
        "import sys\nfrom polarquant_nb.cli import main\nmain(['info'])\n"
        "assert not {'torch', 'transformers', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize(
    ("answer", "gpus"),
    [
        ("echo 'NVIDIA H200, 570.1, 143771 MiB'", ["NVIDIA H200, 570.1, 143771 MiB"]),
        ("echo 'no driver'; exit 9", []),
    ],
    ids=["gpu", "broken"],
)
@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a shell script")
def test_info_names_gpus(monkeypatch, tmp_path, answer, gpus):
    from polarquant_nb import info

    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert info.report()["gpu"] == gpus


def test_version_and_help(capsys):
    commands = ("demo", "eval", "bench")
    for argv in (["--version"], ["--help"], *([command, "--help"] for command in commands)):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        assert stop.value.code == 0
    out = capsys.readouterr().out
    assert "--score-tokens" in out
    assert "--seq-len" in out
    assert "--needle TOKENS | --no-needle" in out
    assert "default: None" not in out
    assert all(name in out for name in presets())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: {bench,calibrate,demo,eval,generate,info}"),
        (["demonstrate"], "demonstrate"),
        (["demo", "--preset", "best"], "'best'.*paper.*tiny.*compact.*balanced.*accurate"),
        (["demo", "--tokens", "127"], "127 is not in 128..8192"),
        (["demo", "--tokens", "8193"], "8193 is not in 128..8192"),
        (["demo", "--tokens", "many"], "'many' is no integer"),
        (["demo", "--score-tokens", "0"], "0 is not in 1..4096"),
        (["demo", "--seed", "-1"], "-1 is not in"),
        (["demo", "--threads", "0"], "0 is not in 1..1024"),
        (["demo", "--wrong"], "--wrong"),
        (["bench", "--seq-len", "0"], "0 is not in 1..1048576"),
        (["bench", "--shape", "8/32"], "'8/32' is not KV_HEADS/HEADS/HEAD_DIM"),
        (["bench", "--shape", "8/32/128/1"], "'8/32/128/1' is not KV_HEADS/HEADS/HEAD_DIM"),
        (["bench", "--shape", "8/a/128"], "'a' is no integer"),
        (["bench", "--shape", "8/32/0"], "0 is not in 1..1024"),
        (["bench", "--shape", "8/12/128"], "12 heads; .* a multiple of its 8 KV heads"),
        (["bench", "--shape", "8/32/100"], "head_dim is 100; it must be a multiple of 16"),
        (["bench", "--only", "decoding"], "'decoding'.*encode.*decode.*prefill"),
        (["bench", "--queries", "0"], "0 is not in 1..8192"),
        (["bench", "--repeat", "0"], "0 is not in 1..1000"),
        (["bench", "--preset", "best"], "'best'.*paper.*tiny.*compact.*balanced.*accurate"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_in_one_line(capsys, argv, message):
    assert re.search(message, refused(capsys, *argv))


def test_outputs_that_cannot_be_written_are_refused_before_the_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(demo, "load_model", lambda *_: pytest.fail("the work has started"))
    monkeypatch.chdir(tmp_path)
    assert "is a directory" in refused(capsys, "demo", "--png", str(tmp_path))
    missing = str(tmp_path / "missing" / "x.json")
    assert f"cannot write {missing}" in refused(capsys, "demo", "--json", missing)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_with_the_command(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    absent = ("torch", "tqdm")
    monkeypatch.setattr(models, "find_spec", lambda n: None if n in absent else find_spec("sys"))
    line = refused(capsys, "demo")
    assert 'torch, tqdm: python -m pip install -c constraints.txt ".[demo]"' in line


def test_texts_that_cannot_be_used(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "require", lambda *_: None)
    assert "cannot be read" in refused(capsys, "demo", "--text", "missing.txt")


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupt(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == "polarquant-nb: interrupted\n"


def test_files_are_whole_or_not_there(tmp_path):
    path = tmp_path / "file"
    outputs.write_atomically(str(path), lambda file: file.write(b"old"))

    def fail(file):
        file.write(b"ne")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        outputs.write_atomically(str(path), fail)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def tiny_demo(monkeypatch, tmp_path):
    """The demo on a tiny random model, in an empty directory."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("tqdm")
    torch = pytest.importorskip("torch")
    model = tiny_model(max_position_embeddings=250)
    loaded = LoadedModel(model, CharacterTokenizer(), "tiny random model")
    monkeypatch.setattr(demo, "load_model", lambda path: loaded)
    monkeypatch.setattr(demo, "set_num_threads", lambda n: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 200)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


ARGUMENTS = ["demo", "--text", "text.txt", "--tokens", "230", "--score-tokens", "10"]


def test_demo_of_a_tiny_model(tiny_demo, capsys):
    argv = [*ARGUMENTS, "--seed", "7", "--json", "out.json", "--png", "out.png"]
    assert main([*argv, "--preset", "compact", "--preset", "paper", "--preset", "paper"]) == 0
    captured = capsys.readouterr()
    result = json.loads((tiny_demo / "out.json").read_text(encoding="utf-8"))
    rows = [(row["preset"], row.get("sink")) for row in result["rows"]]
    assert rows == [("exact", None), ("compact", 4), ("paper", 4), ("compact", 0), ("paper", 0)]
    exact, compact = result["rows"][:2]
    assert (exact["kl"], exact["top1"], exact["nbytes"]) == (0, 1, 2 * 2 * 2 * 2 * 230 * 64)
    heads, (keys, values) = 2 * 2, result["formats"]["compact"].values()
    page = 2 * compact["bits_per_value"] / 8 * 128 * 64  # keys and values of 230 - 4 - 64 tokens
    exact_tokens = 2 * 4 * (230 - 128) * 64
    assert heads * (page + exact_tokens) < compact["nbytes"] < heads * (page + 1.15 * exact_tokens)
    assert compact["ratio"] == pytest.approx(exact["nbytes"] / compact["nbytes"])
    assert compact["kl"] > 0
    assert compact["encode_tokens_per_second"] > 0
    assert keys["seed"] == values["seed"] == result["seed"] == 7
    assert [one["preset"] for one in result["continuations"]] == ["exact", "compact", "paper"]
    assert all(len(one["tokens"]) == 40 for one in result["continuations"])
    assert result["continuations"][0]["same_as_exact"] == 40
    assert result["report"]["preset"] == "paper"  # the last, as the default was not asked for
    # every token in two layers; none of them on decoded keys and values
    assert "attention on codes 80 times, on a first prefill 0, on decoded" in captured.out
    assert "0-1" in result["report"]["table"]
    assert result["info"]["versions"]["torch"]
    assert (tiny_demo / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tiny_demo.iterdir()) == ["out.json", "out.png", "text.txt"]
    tables = re.findall(r"^(exact|compact|paper) +(\d+\.\d\d) +(\d+\.\d\d) ", captured.out, re.M)
    assert [name for name, *_ in tables] == 2 * ["exact", "compact", "paper"]
    assert float(tables[1][1]) == pytest.approx(compact["bits_per_value"], abs=0.005)
    assert "No sinks" in captured.out
    assert "prefill" in captured.err


def test_demo_repeats_itself_with_a_seed(tiny_demo):
    def numbers(seed):
        assert main([*ARGUMENTS, "--seed", seed, "--preset", "tiny", "--json", "out.json"]) == 0
        result = json.loads((tiny_demo / "out.json").read_text(encoding="utf-8"))
        return [(row["kl"], row["perplexity"]) for row in result["rows"]]

    first = numbers("1")
    assert numbers("1") == first
    assert numbers("2") != first


def test_demo_refuses_a_short_text(tiny_demo, capsys):
    (tiny_demo / "text.txt").write_text("too short")
    assert main(ARGUMENTS) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "the text has 9 tokens; 241 are needed (--tokens + --score-tokens + 1)" in line


def test_demo_refuses_a_context_beyond_the_models(tiny_demo, capsys):
    assert main([*ARGUMENTS, "--tokens", "251"]) == 2
    assert "the model's context is 250 tokens" in capsys.readouterr().err
    assert main([*ARGUMENTS, "--score-tokens", "21", "--preset", "tiny"]) == 0
    assert "beyond the model's context of 250" in capsys.readouterr().err


def test_demo_refuses_heads_that_are_not_supported(tiny_demo, capsys, monkeypatch):
    loaded = LoadedModel(tiny_model(head_dim=24), CharacterTokenizer(), "heads of 24")
    monkeypatch.setattr(demo, "load_model", lambda path: loaded)
    assert main(ARGUMENTS) == 2
    assert "not supported: head_dim is 24" in capsys.readouterr().err


@pytest.mark.model
def test_demo_of_the_real_model(capsys, monkeypatch, tmp_path):
    loaded = real_model()
    monkeypatch.setattr(demo, "load_model", lambda path: loaded)
    monkeypatch.setattr(demo, "_CONTINUATION", 4)
    monkeypatch.chdir(tmp_path)
    argv = ["demo", "--tokens", "256", "--score-tokens", "32", "--json", "out.json"]
    assert main([*argv, "--preset", "paper", "--preset", "balanced"]) == 0
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert (result["layers"], result["num_kv_heads"], result["head_dim"]) == (30, 3, 64)
    assert (tmp_path / "polarquant-demo.png").stat().st_size > 10_000
    exact, paper, balanced, *without = result["rows"]
    assert exact["nbytes"] == 30 * 3 * 2 * 2 * 256 * 64
    assert 0 < balanced["kl"] < paper["kl"] < 0.05
    assert balanced["top1"] > 0.85
    assert all(row["kl"] > 2 * balanced["kl"] for row in without)
    assert result["continuations"][0]["text"].strip()
