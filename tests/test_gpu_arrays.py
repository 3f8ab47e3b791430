"""Arrays on a GPU that is not there: which they are, and what is said about what is missing."""

import importlib.metadata

import numpy as np
import pytest
from support import gaussian, run_python

import polarquant_nb as pq
from polarquant_nb import gpu_arrays, gpu_status, info

torch = pytest.importorskip("torch")


class Foreign:
    """An array of another library, on a device that DLPack numbers."""

    def __init__(self, device):
        self.device = device

    def __dlpack_device__(self):
        return self.device, 0


class WithInterface:
    @property
    def __cuda_array_interface__(self):
        return {"shape": (3, 16), "typestr": "<f4", "data": (1, True), "version": 3}


def test_arrays_on_a_gpu_are_recognised():
    assert gpu_arrays.on_gpu(Foreign(2))  # kDLCUDA
    assert gpu_arrays.on_gpu(WithInterface())
    for other in (np.ones(3), torch.ones(3), torch.ones(3, device="meta"), [1.0], Foreign(1)):
        assert not gpu_arrays.on_gpu(other)


def without(monkeypatch, **versions):
    """As if packages had other versions, None for not installed; torch is built for CUDA."""
    versions = {"torch": "2.13.0", **versions}
    real = importlib.metadata.version

    def version(name):
        found = versions.get(name.replace("-", "_"), "as it is")
        if found is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name) if found == "as it is" else found

    gpu_status.check.cache_clear()
    monkeypatch.setattr(gpu_status, "version", version)
    monkeypatch.setattr(gpu_status, "_exists", lambda module: True)
    monkeypatch.delenv("NUMBA_ENABLE_CUDASIM", raising=False)


@pytest.mark.parametrize(("versions", "message"), [
    ({"numba_cuda": None}, r"numba-cuda is not installed: pip install 'polarquant-nb\[cuda13\]'"),
    ({"numba_cuda": "0.30.4", "numpy": "2.5.1"}, r"numba-cuda 0.30.4 .* NumPy 2.5.1: .*numpy<2.5"),
    ({"torch": "2.13.0+cpu"}, r"torch 2.13.0\+cpu is built without CUDA: install a build for CUDA"),
])  # fmt: skip
def test_what_is_missing_is_named(monkeypatch, versions, message):
    """By encode and attention, before anything is compiled, and by ``polarquant-nb info``."""
    without(monkeypatch, **versions)
    with pytest.raises(ImportError, match=message):
        pq.encode(WithInterface(), pq.PolarFormat(16, (4,)))
    pages = pq.encode(gaussian(1, 1, 3, 16), pq.PolarFormat(16, (4,)))
    with pytest.raises(ImportError, match=message):
        pq.attention(WithInterface(), pages, pages)
    assert gpu_status.missing() in info.report()["backend"]


def test_bindings_are_missed(monkeypatch):
    """numba-cuda without its extra has no linker."""
    without(monkeypatch, numba_cuda="0.30.4", numpy="2.4.6")
    monkeypatch.setattr(gpu_status, "_exists", lambda module: module != "cuda.core")
    assert "cuda-core is not installed" in gpu_status.missing()


def test_nothing_is_missing_and_there_is_no_gpu(monkeypatch):
    without(monkeypatch, numba_cuda="0.30.4", numpy="2.4.6")
    assert gpu_status.missing() is None
    monkeypatch.setattr(info, "_gpus", list)
    assert "no NVIDIA GPU, or no driver" in info.report()["backend"]
    monkeypatch.setattr(info, "_gpus", lambda: ["NVIDIA H200, 580.1, 141 GiB"])
    assert "CUDA for arrays on a GPU" in info.report()["backend"]


def test_the_simulator_is_no_gpu(monkeypatch):
    monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", "1")
    assert "unset it" in gpu_status.missing()


def test_numbas_own_target_is_not_mistaken_for_numba_cuda():
    """Without its .pth file, numba-cuda is installed, but Numba imports its deprecated target."""
    pytest.importorskip("numba_cuda")
    code = (
        "import sys, types\n"
        "import numba\n"
        "fake = types.ModuleType('numba.cuda')\n"
        "fake.__file__ = '/site/numba/cuda/__init__.py'\n"
        "sys.modules['numba.cuda'] = numba.cuda = fake\n"
        "from polarquant_nb import gpu_status\n"
        "print(gpu_status._shadowed())"
    )
    message = run_python("-c", code)
    assert "built-in CUDA target" in message
    assert "_numba_cuda_redirector.pth" in message


def test_numba_cuda_is_in_effect_here():
    pytest.importorskip("numba_cuda")
    code = "from polarquant_nb import gpu_status\nprint(gpu_status._shadowed())"
    assert run_python("-c", code, NUMBA_ENABLE_CUDASIM="0").strip() == "None"


@pytest.fixture
def nothing_missing(monkeypatch):
    for name in ("missing", "_shadowed", "_old_driver"):
        monkeypatch.setattr(gpu_status, name, lambda: None)
    gpu_status.check.cache_clear()
    yield
    gpu_status.check.cache_clear()


@pytest.mark.parametrize(("number", "bindings", "message"), [
    (12040, "13.5.0", r"CUDA 12\.4, but .* with CUDA 13: .* newer driver, or pip .*\[cuda12\]'$"),
    (11080, "12.9.2", r"supports CUDA 11\.8, but .* with CUDA 12: install a newer driver$"),
    (12040, "12.9.2", None),
    (13000, "12.9.2", None),
    (13000, "13.5.0", None),
    (None, "13.5.0", "there is no NVIDIA driver"),
])  # fmt: skip
def test_old_drivers(monkeypatch, number, bindings, message):
    """Before anything is compiled that the driver would refuse to load."""
    driver = pytest.importorskip("cuda.bindings.driver")

    def get_version():
        if number is None:
            raise RuntimeError("Failed to dlopen libcuda.so.1")
        return 0, number

    without(monkeypatch, cuda_bindings=bindings)
    monkeypatch.setattr(driver, "cuDriverGetVersion", get_version)
    if message is None:
        assert gpu_status._old_driver() is None
        return
    monkeypatch.setattr(gpu_status, "missing", lambda: None)
    monkeypatch.setattr(gpu_status, "_shadowed", lambda: None)
    with pytest.raises(RuntimeError, match=message):
        pq.encode(WithInterface(), pq.PolarFormat(16, (4,)))


def test_packages_are_looked_at_until_nothing_is_missing(monkeypatch, nothing_missing):
    problems = iter(["this", "that", None])
    monkeypatch.setattr(gpu_status, "missing", lambda: next(problems))
    for problem in ("this", "that"):
        with pytest.raises(ImportError, match=problem):
            gpu_status.check()
    for _ in range(2):
        gpu_status.check()


def test_a_query_on_the_cpu_does_not_meet_pages_on_a_device(nothing_missing):
    pages = pq.encode(gaussian(1, 1, 3, 16), pq.PolarFormat(16, (4,))).to("meta")
    with pytest.raises(ValueError, match="q is on the CPU, but k_pages on meta"):
        pq.attention(np.ones((1, 1, 1, 16), np.float32), pages, pages)


def test_results_go_back_to_the_library_that_the_array_came_from(monkeypatch):
    import sys
    from types import SimpleNamespace

    taken = SimpleNamespace(from_dlpack=lambda tensor: ("taken", tensor))
    monkeypatch.setitem(sys.modules, "another", taken)
    tensor = torch.ones(2)
    assert gpu_arrays.give_back(tensor, "another") == ("taken", tensor)
    assert gpu_arrays.give_back(tensor, "torch") is tensor
    assert gpu_arrays.give_back(tensor, "unheard_of") is tensor


def test_tensors_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match="dtype int64"):
        gpu_arrays.as_tensor(torch.ones(2, dtype=torch.int64), "x")
    with pytest.raises(TypeError, match="dense"):
        gpu_arrays.as_tensor(torch.ones(2, 2).to_sparse(), "x")
