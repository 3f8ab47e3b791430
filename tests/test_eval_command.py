"""The evaluation from the command line: what it prints and writes, and how it refuses."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
from language_models import CharacterTokenizer, real_model, tiny_model

from polarquant_nb import eval_command, models
from polarquant_nb.cli import main
from polarquant_nb.eval_output import format_result
from polarquant_nb.models import LoadedModel


def refused(capsys, *argv):
    """The last line that a refusal prints; loading is announced before some."""
    assert main(["eval", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("polarquant-nb")]
    assert lines == captured.err.strip().splitlines()[-1:]
    return lines[0]


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A tiny random model, in an empty directory."""
    for name in ("matplotlib", "tqdm"):
        pytest.importorskip(name)
    torch = pytest.importorskip("torch")
    loaded = LoadedModel(
        tiny_model(max_position_embeddings=300), CharacterTokenizer(), "tiny random model"
    )
    monkeypatch.setattr(eval_command, "load_model", lambda path: loaded)
    monkeypatch.setattr(eval_command, "set_num_threads", lambda n: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy. " * 200)
    threads = torch.get_num_threads()
    yield tmp_path
    torch.set_num_threads(threads)


ARGUMENTS = ["--text", "text.txt", "--tokens", "196", "--score-tokens", "10", "--windows", "2"]
NEEDLES = ["--needle", "290", "--needle", "280", "--depth", "0", "--depth", "1", "--needles", "2"]


def test_eval_of_a_tiny_model(tiny, capsys):
    files = ["--json", "out.json", "--png", "out.png"]
    presets = ["--preset", "tiny", "--preset", "paper", "--preset", "tiny"]
    assert main(["eval", *ARGUMENTS, *NEEDLES, *files, *presets, "--seed", "7"]) == 0
    result = json.loads((tiny / "out.json").read_text(encoding="utf-8"))
    names = ["exact", "tiny", "paper"]
    assert result["settings"] == {
        "tokens": 196,
        "score_tokens": 10,
        "windows": 2,
        "sink": 4,
        "recent": 64,
        "needle_lengths": [290, 280],
        "needle_depths": [0, 1],
        "needles": 2,
        "seed": 7,
    }
    rows = [(row["contender"], row["window"]) for row in result["rows"]]
    assert rows == [(name, window) for window in (0, 1) for name in names]
    summary = {row["contender"]: row for row in result["summary"]}
    assert [row["family"] for row in summary.values()] == ["exact", "polarquant_nb", "paper"]
    exact, paper = summary["exact"], summary["paper"]
    assert (exact["kl"], exact["kl_stderr"], exact["top1"]) == (0, 0, 1)
    assert exact["nbytes"] == 2 * 2 * 2 * 2 * 196 * 64
    assert paper["bits_per_value"] == 3.875  # one whole page
    assert paper["nbytes"] == 2 * 2 * 2 * 64 * (128 * 3.875 / 8 + 68 * 2)
    assert paper["tokens"] == 20
    assert paper["kl"] > 0 < paper["kl_stderr"]
    assert len(paper["attention_errors"]) == 2
    found = [(row["contender"], row["length"], row["needles"]) for row in result["needle_summary"]]
    assert found == [(name, length, 4) for name in names for length in (280, 290)]
    assert len(result["needle_rows"]) == 3 * 2 * 2 * 2
    assert {row["seed"] for row in result["needle_rows"]} == {7, 8}
    assert result["info"]["versions"]["torch"]
    assert (tiny / "out.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tiny.iterdir()) == ["out.json", "out.png", "text.txt"]

    captured = capsys.readouterr()
    table = re.findall(r"^(exact|tiny|paper) +(\d+\.\d\d) +(\d+\.\d\d) ", captured.out, re.M)
    assert [name for name, *_ in table] == names
    assert table[2][1] == "3.88"
    assert "2 windows of 196 tokens, the first 4 and last 64 kept exact" in captured.out
    assert re.search(r"^tokens +280 +290$", captured.out, re.M)
    assert re.search(r"^tiny +\d/4 +\d+\.\d{3} +\d/4 +\d+\.\d{3}$", captured.out, re.M)
    for bar in ("kernels", "windows", "needles"):
        assert f"{bar}: 100%" in captured.err


def test_eval_without_needles_and_files(tiny, capsys):
    argv = [*ARGUMENTS[:-1], "1", "--no-needle", "--preset", "tiny", "--sink", "0", "--recent", "0"]
    assert main(["eval", *argv]) == 0
    captured = capsys.readouterr()
    assert "1 window of 196 tokens, the first 0 and last 0 kept exact" in captured.out
    assert "±" not in captured.out
    assert "Needle" not in captured.out
    assert "needles" not in captured.err
    assert [p.name for p in tiny.iterdir()] == ["text.txt"]


def test_eval_repeats_itself_with_a_seed(tiny):
    def numbers(seed):
        argv = [*ARGUMENTS, "--needle", "280", "--depth", "0.5", "--preset", "tiny"]
        assert main(["eval", *argv, "--seed", seed, "--json", "out.json"]) == 0
        result = json.loads((tiny / "out.json").read_text(encoding="utf-8"))
        return [row["kl"] for row in result["rows"]] + [row["nll"] for row in result["needle_rows"]]

    first = numbers("1")
    assert numbers("1") == first
    assert numbers("2") != first


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--tokens", "301"], "--tokens is 301; the model's context is 300 tokens"),
        (["--needle", "301"], "--needle is 301; the model's context is 300 tokens"),
        (["--needle", "150"], r"--needle: length is 150; .* sink=4 and recent=64"),
        (
            ["--windows", "50", "--no-needle"],
            r"part 1 of 50: the text has \d+ tokens; 207 are needed .*--tokens \+ --score-tokens",
        ),
    ],
    ids=str,
)
def test_what_does_not_fit_model_or_text_is_refused(tiny, capsys, argv, message):
    assert re.search(message, refused(capsys, *ARGUMENTS, *argv))


def test_heads_that_are_not_supported_are_refused(tiny, capsys, monkeypatch):
    loaded = LoadedModel(tiny_model(head_dim=24), CharacterTokenizer(), "heads of 24")
    monkeypatch.setattr(eval_command, "load_model", lambda path: loaded)
    line = refused(capsys, *ARGUMENTS, "--no-needle")
    assert "the model is not supported: head_dim is 24" in line


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--preset", "best"], "'best'.*paper.*tiny.*compact.*balanced.*accurate"),
        (["--tokens", "127"], "127 is not in 128..8192"),
        (["--windows", "0"], "0 is not in 1..1000"),
        (["--sink", "-1"], "-1 is not in 0..8192"),
        (["--recent", "x"], "'x' is no integer"),
        (["--sink", "1000", "--recent", "1116"], "--tokens is 2116; .* more than 2116"),
        (["--needle", "12"], "12 is not in 128..8192"),
        (["--depth", "1.5"], r"1\.5 is not in 0\.\.1"),
        (["--depth", "nan"], r"nan is not in 0\.\.1"),
        (["--depth", "deep"], "'deep' is no number"),
        (["--needles", "0"], "0 is not in 1..1000"),
        (["--needle", "1024", "--no-needle"], "--no-needle: not allowed with argument --needle"),
        (["--text", "missing.txt"], "missing.txt cannot be read as UTF-8"),
        (["--json", "missing/out.json"], "cannot write missing/out.json"),
        (["--png", "."], "cannot write .: it is a directory"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_in_one_line(capsys, monkeypatch, tmp_path, argv, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(eval_command, "require", lambda *_: None)
    monkeypatch.setattr(eval_command, "load_model", lambda _: pytest.fail("the work has started"))
    pytest.importorskip("torch")
    assert re.search(message, refused(capsys, *argv))


def test_missing_packages_are_named_with_the_command(capsys, monkeypatch):
    absent = {"tqdm", "matplotlib"}
    monkeypatch.setattr(models, "find_spec", lambda n: None if n in absent else find_spec("sys"))
    assert "this needs tqdm: python -m pip install" in refused(capsys)
    assert "this needs tqdm, matplotlib: python -m pip" in refused(capsys, "--png", "out.png")


def test_tables_fit_long_names():
    row = {
        "contender": "a contender with a long name",
        "family": "x",
        "bits_per_value": 4.0,
        "nbytes": 2**21,
        "ratio": 3.5,
        "kl": 0.001,
        "kl_stderr": 0.0002,
        "top1": 0.98,
        "top1_stderr": 0.01,
        "perplexity": 20.0,
        "attention_error": 0.02,
        "attention_error_stderr": 0.003,
    }
    settings = {"windows": 4, "tokens": 100, "sink": 1, "recent": 2, "score_tokens": 3, "seed": 0}
    tally = {"contender": row["contender"], "length": 1000, "hits": 3, "needles": 15, "nll": 0.25}
    text = format_result(
        {
            "model": "m",
            "text": "t",
            "settings": settings,
            "summary": [row],
            "needle_summary": [tally],
        }
    )
    lines = text.splitlines()
    start = "a contender with a long name "
    table, needles = (line for line in lines if line.startswith(start))
    expected = "4.00 2.00 3.50 0.001000 ± 0.000200 98.0 ± 1.0 20.000 0.0200 ± 0.0030"
    assert table.removeprefix(start).split() == expected.split()
    assert needles.removeprefix(start).split() == ["3/15", "0.250"]
    assert lines[4].index("KL") == table.index("0.001000")


@pytest.mark.model
def test_eval_of_the_real_model(capsys, monkeypatch, tmp_path):
    loaded = real_model()
    monkeypatch.setattr(eval_command, "load_model", lambda path: loaded)
    monkeypatch.chdir(tmp_path)
    argv = ["eval", "--tokens", "324", "--score-tokens", "32", "--windows", "2"]
    argv += ["--needle", "300", "--depth", "0.5", "--preset", "paper", "--preset", "balanced"]
    assert main([*argv, "--json", "out.json"]) == 0
    result = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    exact, paper, balanced = result["summary"]
    assert exact["nbytes"] == 30 * 3 * 2 * 2 * 324 * 64
    assert 0 < balanced["kl"] < paper["kl"] / 2 < 0.05
    assert 0 < balanced["attention_error"] < paper["attention_error"] / 2 < 0.05
    assert len(balanced["attention_errors"]) == 30
    assert [row["hit"] for row in result["needle_rows"]] == [True, True, True]
