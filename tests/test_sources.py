"""Machine code on disk is that of the sources that run."""

import ast
import shutil
from pathlib import Path

import pytest
from support import NOJIT, run_python

import polarquant_nb as pq
from polarquant_nb.kernels import sources

PACKAGE = Path(pq.__file__).parent

# Modules that kernels import, and that do not decide what code is made.
INDIFFERENT = {"budgets", "outputs", "places", "threads"}


def imported(path):
    """Names of the package's modules that a file imports, outside ``kernels``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("polarquant_nb."):
            names.add(node.module.removeprefix("polarquant_nb."))
    return {name for name in names if not name.startswith("kernels")}


def test_the_digest_covers_what_kernels_import():
    decisive = {path for pattern in sources._DECISIVE for path in PACKAGE.glob(pattern)}
    readers = decisive - {PACKAGE / "codebooks.py"}  # of which kernels take the size of a table
    needed = set().union(*(imported(path) for path in readers)) - INDIFFERENT
    assert {"layout", "densities"} <= needed
    assert {PACKAGE / f"{name}.py" for name in needed} <= decisive


@pytest.mark.skipif(NOJIT, reason="nothing is compiled")
def test_an_edited_layout_compiles_anew(tmp_path):
    """Numba knows the time of a kernel's own file, which stays what it was."""
    shutil.copytree(
        PACKAGE, tmp_path / "polarquant_nb", ignore=shutil.ignore_patterns("__pycache__")
    )
    code = """
import numpy as np
from polarquant_nb.kernels.exact_cpu import start_empty
start_empty(np.empty((2, 3), np.float32), np.empty(2, np.float32))
"""
    cached = []
    for addition in ("", "", "# an edit\n"):
        with (tmp_path / "polarquant_nb" / "layout.py").open("a") as file:
            file.write(addition)
        run_python("-c", code, PYTHONPATH=str(tmp_path), NUMBA_CACHE_DIR=str(tmp_path / "cache"))
        cached.append(len(list((tmp_path / "cache").rglob("*.nbc"))))
    assert cached == [1, 1, 2]
