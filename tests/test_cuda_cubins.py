"""Machine code on disk: compiled once for all processes, and never the wrong code."""

import pytest
from numba import config
from support import run_python

import polarquant_nb as pq

pytest.importorskip("numba_cuda")
if config.ENABLE_CUDASIM:
    pytest.skip("the simulator has no machine code", allow_module_level=True)

from polarquant_nb.kernels import cuda_cubins
from polarquant_nb.kernels.cuda_compile import KernelSpec, program_of
from polarquant_nb.kernels.cuda_cubins import kept_cubin

SPEC = KernelSpec("merge", program_of(pq.PolarFormat(16, (1,)), bare=True))


@pytest.fixture
def directory(monkeypatch, tmp_path):
    monkeypatch.setenv("POLARQUANT_CACHE", str(tmp_path))
    monkeypatch.delenv("POLARQUANT_CUDA_CACHE", raising=False)
    return tmp_path / "cuda"


@pytest.fixture
def compiled(monkeypatch):
    """Compiling takes no time and is counted."""
    specs = []

    def compile_cubin(spec, capability):
        specs.append((spec, capability))
        return b"\x7fELF\n%d" % len(specs), "kernel"

    monkeypatch.setattr(cuda_cubins, "compile_cubin", compile_cubin)
    return specs


def test_another_process_compiles_nothing(directory):
    code = (
        "import polarquant_nb as pq\n"
        "from polarquant_nb.kernels import cuda_cubins\n"
        "from polarquant_nb.kernels.cuda_compile import KernelSpec, program_of\n"
        "spec = KernelSpec('merge', program_of(pq.PolarFormat(16, (1,)), bare=True))\n"
        "{}\n"
        "cubin, name = cuda_cubins.kept_cubin(spec, (9, 0))\n"
        "print(cubin.hex(), name)"
    )
    environment = {"POLARQUANT_CACHE": str(directory.parent), "NUMBA_ENABLE_CUDASIM": "0"}
    first = run_python("-c", code.format(""), **environment)
    second = run_python("-c", code.format("cuda_cubins.compile_cubin = None"), **environment)
    assert first == second
    cubin, name = first.split()
    assert bytes.fromhex(cubin).startswith(b"\x7fELF")
    assert name.encode() in bytes.fromhex(cubin)


def test_what_is_compiled_depends_on_kernel_and_capability(directory, compiled):
    other = KernelSpec("merge", SPEC.program, "float16")
    wanted = [(SPEC, (9, 0)), (SPEC, (8, 0)), (other, (9, 0))]
    found = [kept_cubin(*each) for each in wanted]
    assert compiled == wanted
    assert [kept_cubin(*each) for each in wanted] == found
    assert len(compiled) == len(set(found)) == len(list(directory.iterdir())) == 3


@pytest.mark.parametrize("damage", [
    lambda content: b"",
    lambda content: content[:20],
    lambda content: content[:-1],
    lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    lambda content: bytes(len(content)),
], ids=["empty", "half a digest", "truncated", "a bit", "zeros"])  # fmt: skip
def test_damaged_files_are_compiled_anew(directory, compiled, damage):
    kept_cubin(SPEC, (9, 0))
    (file,) = directory.iterdir()
    file.write_bytes(damage(file.read_bytes()))
    assert kept_cubin(SPEC, (9, 0)) == (b"\x7fELF\n2", "kernel")
    assert kept_cubin(SPEC, (9, 0)) == (b"\x7fELF\n2", "kernel")
    assert len(compiled) == 2


@pytest.mark.parametrize("package", ["numba", "numba-cuda", "cuda-core"])
def test_another_version_compiles_anew(directory, compiled, monkeypatch, package):
    kept_cubin(SPEC, (9, 0))
    real = cuda_cubins.version
    monkeypatch.setattr(
        cuda_cubins, "version", lambda name: "other" if name == package else real(name)
    )
    forget_versions(monkeypatch)
    kept_cubin(SPEC, (9, 0))
    assert len(compiled) == 2


@pytest.mark.parametrize("name", ["nvvm", "nvJitLink"])
def test_another_library_compiles_anew(directory, compiled, monkeypatch, name):
    """One that is there without a package: what counts is the file that is loaded."""
    kept_cubin(SPEC, (9, 0))
    real = cuda_cubins._library
    assert real(name) is not None
    monkeypatch.setattr(
        cuda_cubins, "_library", lambda other: ("/usr/lib", 1, 2) if other == name else real(other)
    )
    forget_versions(monkeypatch)
    kept_cubin(SPEC, (9, 0))
    assert len(compiled) == 2


def test_other_sources_compile_anew(directory, compiled, monkeypatch):
    kept_cubin(SPEC, (9, 0))
    monkeypatch.setattr(cuda_cubins, "source_digest", lambda: "that of another release")
    kept_cubin(SPEC, (9, 0))
    assert len(compiled) == 2


def forget_versions(monkeypatch):
    """Look them up again, for this test alone."""
    monkeypatch.setattr(cuda_cubins, "_compilers", cuda_cubins._compilers.__wrapped__)


def test_a_directory_that_cannot_be_written_is_done_without(directory, compiled):
    directory.parent.rmdir()
    directory.parent.write_text("a file where the directory should be")
    for n in (1, 2):
        assert kept_cubin(SPEC, (9, 0))[0] == b"\x7fELF\n%d" % n


def test_a_disk_that_is_full_is_done_without(directory, compiled, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cuda_cubins, "write_atomically", full)
    assert kept_cubin(SPEC, (9, 0)) == (b"\x7fELF\n1", "kernel")


def test_nothing_is_kept_if_it_is_switched_off(directory, compiled, monkeypatch):
    kept_cubin(SPEC, (9, 0))
    monkeypatch.setenv("POLARQUANT_CUDA_CACHE", "0")
    kept_cubin(SPEC, (9, 0))
    kept_cubin(SPEC, (8, 0))
    assert len(compiled) == 3
    assert len(list(directory.iterdir())) == 1


def test_what_was_not_used_for_longest_makes_room(directory, compiled, monkeypatch):
    import os

    capabilities = [(8, 0), (8, 6), (8, 9)]
    files = {}
    for age, capability in enumerate(capabilities):
        before = set(directory.iterdir()) if directory.exists() else set()
        kept_cubin(SPEC, capability)
        (files[capability],) = set(directory.iterdir()) - before
        os.utime(files[capability], (1000 + age, 1000 + age))
    kept_cubin(SPEC, (8, 0))  # used again: no longer the oldest
    size = files[8, 0].stat().st_size
    monkeypatch.setattr(cuda_cubins, "MOST_BYTES", 3 * size)
    kept_cubin(SPEC, (9, 0))
    assert not files[8, 6].exists()
    assert files[8, 0].exists()
    assert files[8, 9].exists()
    assert len(list(directory.iterdir())) == 3


def test_two_processes_that_compile_at_once_leave_one_whole_file(directory, compiled, monkeypatch):
    """The other one writes while this one compiles."""
    compile_cubin = cuda_cubins.compile_cubin

    def overtaken(spec, capability):
        monkeypatch.setattr(cuda_cubins, "compile_cubin", compile_cubin)
        kept_cubin(spec, capability)
        return compile_cubin(spec, capability)

    monkeypatch.setattr(cuda_cubins, "compile_cubin", overtaken)
    found = kept_cubin(SPEC, (9, 0))
    assert kept_cubin(SPEC, (9, 0)) == found
    assert len(compiled) == 2
    assert len(list(directory.iterdir())) == 1
