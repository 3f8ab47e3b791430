"""The command ``generate``."""

from __future__ import annotations

import pytest
from language_models import CharacterTokenizer, real_model, tiny_model
from support import NOJIT

from polarquant_nb import generate
from polarquant_nb.cli import main
from polarquant_nb.models import LoadedModel

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.fixture
def tiny_generate(monkeypatch, tmp_path):
    """The command with a tiny model of 300 tokens' context; the directory has a prompt."""
    model = tiny_model(max_position_embeddings=300)
    loaded = LoadedModel(model, CharacterTokenizer(), "tiny")
    monkeypatch.setattr(generate, "load_model", lambda path: loaded)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text("What follows is not known. " * 9)
    return model


@pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1")
def test_generate_streams_what_the_model_says(tiny_generate, capsys):
    result = generate.run(prompt_file="prompt.txt", max_new_tokens=9)
    assert (result["prompt_tokens"], result["new_tokens"]) == (9 * 27, 9)
    report = result["report"]
    assert (report.exact, report.coded, report.decoded) == (2, 16, 0)
    assert report.layers[0].kind == "balanced"
    text = capsys.readouterr().out
    assert f"243 tokens of prompt.txt\n\n{result['text']}\n\n" in text
    assert str(report) in text
    assert len(result["text"]) == 9


@pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1")
def test_generate_by_the_command_line(tiny_generate, capsys):
    arguments = ["--prompt-file", "prompt.txt", "--max-new-tokens", "1", "--preset", "tiny"]
    assert main(["generate", *arguments, "--threads", "1"]) == 0
    assert " tiny " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-file", "missing.txt"], "the text missing.txt cannot be read"),
        (["--prompt-file", "empty.txt"], "the prompt has no tokens"),
        (
            ["--prompt-file", "prompt.txt", "--max-new-tokens", "58"],
            "the prompt has 243 tokens, and 58 are to follow; the model's context is 300 tokens",
        ),
        (["--preset", "tiny"], "required: --prompt-file"),
        (["--prompt-file", "prompt.txt", "--preset", "huge"], "invalid choice: 'huge'"),
    ],
)
def test_bad_arguments_end_in_one_line(arguments, message, tiny_generate, capsys, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    assert main(["generate", *arguments]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in line
    assert line.startswith("polarquant-nb generate: ")


def test_models_that_are_not_supported(tiny_generate, capsys, monkeypatch):
    loaded = LoadedModel(tiny_model(head_dim=24), CharacterTokenizer(), "heads of 24")
    monkeypatch.setattr(generate, "load_model", lambda path: loaded)
    assert main(["generate", "--prompt-file", "prompt.txt"]) == 2
    assert "the model is not supported: head_dim is 24" in capsys.readouterr().err


def test_half_a_character_waits_for_its_other_half(capsys):
    class BytesTokenizer:
        def decode(self, ids):
            return bytes(ids).decode(errors="replace")

    streamer = generate._Streamer(BytesTokenizer())
    streamer.put(torch.tensor([[1, 2]]))
    first, second = "é".encode()
    streamer.put(torch.tensor([65]))
    streamer.put(torch.tensor([first]))
    assert capsys.readouterr().out == "A"
    streamer.put(torch.tensor([second]))
    assert capsys.readouterr().out == "é"
    streamer.put(torch.tensor([first]))
    streamer.end()
    assert capsys.readouterr().out == "\N{REPLACEMENT CHARACTER}\n"


@pytest.mark.model
def test_generate_on_the_real_model(monkeypatch, tmp_path):
    loaded = real_model()
    monkeypatch.setattr(generate, "load_model", lambda path: loaded)
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The capital of France is Paris. The capital of Italy is Rome. " * 12)
    result = generate.run(prompt_file=str(prompt), max_new_tokens=7)
    assert result["text"].strip().startswith("The capital of France is")
    assert result["report"].coded == 30 * (result["new_tokens"] - 1)
