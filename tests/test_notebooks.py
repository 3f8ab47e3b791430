"""The notebooks' code runs from top to bottom, and the site has them all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import NOJIT

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def needs_model(path: Path) -> bool:
    return "polarquant_nb.models" in path.read_text(encoding="utf-8")


CASES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.model] if needs_model(path) else [])
    for path in NOTEBOOKS
]


def cells(path: Path) -> list[dict]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


# what transformers itself warns of is not ours to repair
@pytest.mark.filterwarnings("default::FutureWarning")
@pytest.mark.filterwarnings("default::DeprecationWarning")
@pytest.mark.skipif(NOJIT, reason="takes minutes with NUMBA_DISABLE_JIT=1")
@pytest.mark.parametrize("path", CASES)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.chdir(tmp_path)
    if needs_model(path):
        from language_models import real_model

        model = real_model()  # or skips
        monkeypatch.setattr("polarquant_nb.models.load_model", lambda: model)
    namespace: dict[str, object] = {"__name__": "__main__"}
    try:
        for cell in cells(path):
            if cell["cell_type"] == "code":
                exec(compile("".join(cell["source"]), str(path), "exec"), namespace)
        assert pyplot.get_fignums(), "a notebook shows something"
    finally:
        pyplot.close("all")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_for_readers(path: Path) -> None:
    """A heading, prose before code, no outputs in the repository, and a page of the site."""
    found = cells(path)
    assert found[0]["source"][0].startswith("# ")
    kinds = [cell["cell_type"] for cell in found]
    assert kinds.count("markdown") >= 4
    runs = "".join(kind[0] for kind in kinds).split("m")  # of code cells between prose
    assert max(map(len, runs)) <= 2
    for cell in found:
        if cell["cell_type"] == "code":
            assert not cell["outputs"]
            assert cell["execution_count"] is None
    index = (ROOT / "docs" / "tutorial" / "index.md").read_text(encoding="utf-8")
    assert f"\nnotebooks/{path.stem}\n" in index
