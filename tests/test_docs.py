"""What is printed in the README, the documentation and docstrings runs as it is printed."""

from __future__ import annotations

import doctest
import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from language_models import CharacterTokenizer, tiny_model
from support import NOJIT, run_python

import polarquant_nb as pq
from polarquant_nb import eval_command, models
from polarquant_nb.cli import _parser, main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "polarquant_nb"
WRITTEN = [path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "cli.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *WRITTEN]

pytestmark = [
    pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1"),
    # torch imports its own deprecated module where it generates C++
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning"),
    # transformers 5.24 renames an argument
    pytest.mark.filterwarnings("default:.*past_key_values:FutureWarning"),
]


def page_name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in a language, in order."""
    text = page.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)


def module_name(path: Path) -> str:
    parts = ("polarquant_nb", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


MODULES = [
    module_name(path)
    for path in sorted(SOURCE.rglob("*.py"))
    if re.search(r">>> (?!.*# doctest: \+SKIP)", path.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_docstrings(name):
    if name.startswith("polarquant_nb.hf"):
        pytest.importorskip("transformers")
    results = doctest.testmod(import_module(name))
    assert results.attempted
    assert not results.failed


def needs(*modules: str) -> Callable[[], None]:
    """What skips a page where modules are missing."""
    return lambda: [pytest.importorskip(module) for module in modules]


def needs_compiler() -> None:
    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("needs a C++ compiler")


def needs_gpu() -> None:
    if not pytest.importorskip("torch").cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


NEEDS: dict[str, list[Callable[[], object]]] = {
    "README.md": [needs("transformers")],
    "docs/how-to/calibrate.md": [needs("transformers")],
    "docs/how-to/cuda.md": [needs_gpu, needs("transformers", "safetensors")],
    "docs/how-to/custom-decoder.md": [needs("torch", "safetensors"), needs_compiler],
    "docs/how-to/save-and-load.md": [needs("safetensors")],
    "docs/how-to/transformers.md": [needs("transformers")],
}

SNIPPETS = {"docs/explanation/kernels.md"}
"""Pages whose code does not run by itself: a piece of a kernel."""


def stand_in_for_the_real_model(monkeypatch):
    """Of the guide to measuring, which takes minutes with it; and what its command writes."""
    for module in ("transformers", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    text = "All work and no play makes Jack a dull boy. " * 200
    model = tiny_model(max_position_embeddings=1000)
    loaded = models.LoadedModel(model, CharacterTokenizer(), "tiny random model")
    for module in (models, eval_command):
        monkeypatch.setattr(module, "load_model", lambda path=None: loaded)
        monkeypatch.setattr(module, "load_text", lambda path=None: (text, "text"))
    lengths = ("--tokens", "196", "--score-tokens", "10", "--windows", "2", "--needle", "280")
    assert main(["eval", "--preset", "balanced", "--json", "quality.json", *lengths]) == 0


def attended_on_codes(namespace, printed):
    assert namespace["cache"].counts.coded == 2 * 5
    assert "balanced" in printed


def said_what_it_holds(_namespace, printed):
    assert "bits per number" in printed


AFTERWARDS: dict[str, Callable[[dict[str, object], str], None]] = {
    "docs/how-to/custom-decoder.md": said_what_it_holds,
    "docs/how-to/transformers.md": attended_on_codes,
}
"""What is true of a page's variables and what it printed."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=page_name)
def test_the_python_of_a_page(page, tmp_path, monkeypatch, capsys):
    """All of its blocks in order, as one program; some pages write files."""
    if page_name(page) in SNIPPETS:
        pytest.skip("see SNIPPETS")
    for need in NEEDS.get(page_name(page), ()):
        need()
    monkeypatch.chdir(tmp_path)
    if page_name(page) == "docs/how-to/measure-quality.md":
        stand_in_for_the_real_model(monkeypatch)
    if find_spec("torch"):
        import torch

        torch.manual_seed(0)  # of random models
        torch.compiler.reset()
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page, "python"), 1):
        name = f"{page_name(page)}, block {number}"
        if block.startswith(">>>"):
            example = doctest.DocTestParser().get_doctest(block, namespace, name, name, 0)
            assert not doctest.DocTestRunner().run(example).failed
        else:
            exec(compile(block, name, "exec"), namespace)
    AFTERWARDS.get(page_name(page), lambda *_: None)(namespace, capsys.readouterr().out)


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_the_commands_of_a_page(page):
    """Every ``polarquant-nb`` command is one that the parser takes; none is run."""
    text = page.read_text(encoding="utf-8")
    for line in re.findall(r"^ *(?:\w+=\S+ )*polarquant-nb ((?:.*\\\n)*.*)", text, re.M):
        command = re.split(r" [>|&]", line.replace("\\\n", " "))[0]
        _parser().parse_args(shlex.split(command, comments=True))


def test_every_public_name_is_in_the_reference():
    listed = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8").split()
    names = set(pq.__all__) - {"analysis", "hf", "plot"}
    names |= {f"analysis.{name}" for name in pq.analysis.__all__}
    names |= {f"plot.{name}" for name in pq.plot.__all__}
    if find_spec("transformers"):
        names |= {f"hf.{name}" for name in pq.hf.__all__}
    assert not names - set(listed)


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    version = project["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.*?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert newest[1] in ("Unreleased", re.sub(r"\.dev\d+$", "", version))


def test_heads_in_two_processes(tmp_path):
    """The example of docs/how-to/distributed.md, which checks itself."""
    dist = pytest.importorskip("torch.distributed")
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this torch has no gloo")
    script = Path(__file__).with_name("tensor_parallel.py")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script)
    printed = run_python(*launch, OMP_NUM_THREADS="1")
    assert "2 processes: 2 kv heads each" in printed
