"""Importing the package costs next to nothing, and its names are what they seem in any order."""

from pathlib import Path

import pytest
from support import run_python

import polarquant_nb as pq

HEAVY = ("torch", "transformers", "matplotlib", "xarray", "pandas", "tqdm", "numba.cuda")


def test_import_takes_no_time():
    """Under 0.3 s over NumPy and SciPy; the best of three, as the machine may be busy."""
    code = """
import time
import numpy, scipy.special
start = time.perf_counter()
import polarquant_nb
print(time.perf_counter() - start)
"""
    assert min(float(run_python("-c", code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize(
    "use",
    [
        "",
        "pq.preset, pq.presets, pq.PolarFormat, pq.FormatPair, pq.Codebooks, pq.PolarPages",
        "pq.encode, pq.decode, pq.set_num_threads, pq.get_num_threads",
        "pq.decode(pq.encode(numpy.ones((3, 16), numpy.float32), pq.PolarFormat(16, (2,))))",
    ],
    ids=["import", "names", "codec", "round trip"],
)
def test_nothing_heavy_is_imported(use):
    code = f"""
import sys
import numpy
import polarquant_nb as pq
{use}
loaded = [name for name in {HEAVY} if name in sys.modules]
assert not loaded, loaded
"""
    run_python("-c", code)


def test_import_alone_loads_neither_numba_nor_scipy():
    """Formats and codebooks can be had without the compiler."""
    code = "import sys, polarquant_nb; print([m for m in ('numba', 'scipy') if m in sys.modules])"
    assert run_python("-c", code).strip() == "[]"


OPTIONAL = (
    "analysis", "cli", "demo", "demo_output", "evaluate", "hf", "models", "plot", "torch_ops",
)  # fmt: skip
"""Modules that may need what is not installed; they are no part of the codec."""


def test_names_mean_the_same_whatever_was_imported_before():
    """Submodules become attributes of the package when they are imported: none may hide a name."""
    files = Path(pq.__file__).parent.glob("[a-z]*.py")
    submodules = sorted({path.stem for path in files} - set(OPTIONAL))
    code = f"""
import importlib, types
import polarquant_nb as pq
for submodule in {submodules}:
    importlib.import_module("polarquant_nb." + submodule)
for name in set(pq.__all__) - set({OPTIONAL}):
    assert callable(getattr(pq, name)), (name, getattr(pq, name))
"""
    run_python("-c", code)


def test_names_are_listed_and_others_refused():
    assert set(pq.__all__) <= set(dir(pq))
    assert pq.__all__ == sorted(pq.__all__)
    with pytest.raises(AttributeError, match="module 'polarquant_nb' has no attribute 'turbo'"):
        pq.turbo  # noqa: B018
    assert isinstance(pq.__version__, str)
