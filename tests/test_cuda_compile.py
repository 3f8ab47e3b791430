"""What NVVM and ptxas make of the CUDA kernels: no GPU and no driver is needed."""

import re

import pytest
from support import LOG8_FORMATS, RANDOM_FORMATS, ident

import polarquant_nb as pq

pytest.importorskip("numba_cuda")
from numba import config

from polarquant_nb.kernels import cuda_compile
from polarquant_nb.kernels.cuda_attention import query_group
from polarquant_nb.kernels.cuda_attention_stages import RunLayout
from polarquant_nb.kernels.cuda_codec import SHARED_BYTES
from polarquant_nb.kernels.cuda_compile import KernelSpec, compile_ptx, program_of
from polarquant_nb.kernels.cuda_exact import EXACT_THREADS, MANY

pytestmark = pytest.mark.skipif(
    bool(config.ENABLE_CUDASIM) or cuda_compile.find_ptxas() is None,
    reason="needs numba-cuda with its extra, ptxas, and no simulator",
)

MOST_REGISTERS = 128
"""Of a thread, on sm_80 and sm_90: four blocks of 128 threads fit a multiprocessor."""

IN_CI = [(8, 0), (9, 0)]
MORE = [(8, 6), (8, 9)]
PRESETS = dict(cuda_compile.preset_kernels())


def global_loads(ptx):
    """Loads from global memory, by type."""
    return re.findall(r"ld\.global(?:\.nc)?((?:\.v\d)?\.\w+)", ptx)


def check(spec, capability, most_registers=MOST_REGISTERS):
    ptx = compile_ptx(spec, capability)
    found = cuda_compile.resources(ptx, capability)
    assert found.spills == found.stack == 0
    assert found.registers <= most_registers
    assert 0 < found.shared <= SHARED_BYTES
    assert not re.search(r"\b(ld|st)\.local|\.local\s+\.align", ptx)
    assert ".f64" not in ptx
    shared = re.findall(r"\.shared \.align (\d+)", ptx)
    assert shared
    assert set(shared) == {"16"}
    return ptx


def check_codes_are_exact(ptx):
    """Every product and sum has its rounding, which forbids contraction; subnormals stay."""
    assert not re.search(r"\b(add|sub|mul)\.(ftz\.)?f32", ptx)
    assert ".ftz" not in ptx
    assert ".approx" not in ptx


@pytest.mark.parametrize("capability", IN_CI, ids=str)
@pytest.mark.parametrize("title", PRESETS)
def test_kernels_of_presets_fit_registers(title, capability):
    spec = PRESETS[title]
    ptx = check(spec, capability)
    if spec.name in ("encode", "decode"):
        check_codes_are_exact(ptx)
    if spec.name == "attend":
        check_pages_are_read_once(spec, ptx)


@pytest.mark.parametrize("capability", IN_CI, ids=str)
@pytest.mark.parametrize("element", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("head_dim", "value_head_dim"), [(16, 16), (64, 48), (128, 128), (576, 512)]
)
def test_exact_tokens_are_loaded_many_at_a_time(head_dim, value_head_dim, element, capability):
    """Of keys as many as fit 32 registers, side by side in the code; half as many of values."""
    keys, values = (
        program_of(pq.PolarFormat(d, (1,)), bare=True) for d in (head_dim, value_head_dim)
    )
    spec = KernelSpec("exact", keys, element, values, threads=EXACT_THREADS)
    ptx = check(spec, capability)
    kind = ".f32" if element == "float32" else (".u16", ".b16")
    assert sum(load.endswith(kind) for load in global_loads(ptx)) >= MANY // 2 + MANY // 4


def check_pages_are_read_once(spec, ptx):
    """Threads take tokens side by side, 32 bits each: every row is one coalesced load.

    Radii and narrow rows are the only 16- and 8-bit loads, besides int8 offsets, which come each
    with its scale, as often as NVVM repeats that loop.
    """
    loads = global_loads(ptx)
    words = halves = octets = 0
    for program in (spec.program, spec.values):
        layout = program.layout
        words += sum(row.width == 32 for row in layout.code_rows)
        halves += sum(row.width == 16 for row in layout.code_rows) + len(layout.radius_words)
        octets += sum(row.width == 8 for row in layout.code_rows)
    repeats = loads.count(".u8") - octets
    assert (repeats > 0) == ("int8" in (spec.program.offset, spec.values.offset))
    assert words <= loads.count(".u32") <= words + repeats
    assert loads.count(".u16") + loads.count(".b16") == halves
    if spec.group % 4 == 0:
        assert "ld.shared.v4.f32" in ptx  # queries and weights of a group


@pytest.mark.slow
@pytest.mark.parametrize("capability", [*IN_CI, *MORE], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", pq.presets())
def test_the_whole_matrix(name, head_dim, capability):
    """All groups.  More registers for eight queries, which have 64 sums a thread, for long columns,
    and on sm_86 and sm_89, whose multiprocessors hold fewer threads.
    """
    every = cuda_compile.preset_kernels(head_dim, (1, 2, 3, 4, 8))
    pair = pq.preset(name, head_dim)
    programs = {program_of(pair.keys), program_of(pair.values)}
    for _, spec in every:
        if spec.program in programs or spec.name in cuda_compile.BARE:
            most = 255 if spec.group == 8 or head_dim == 256 else MOST_REGISTERS
            check(spec, capability, max(most, 168) if capability in MORE else most)


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [*RANDOM_FORMATS, *LOG8_FORMATS], ids=ident)
def test_any_format_compiles(fmt):
    program = program_of(fmt)
    group = query_group(program, program, 8)
    for spec in (
        KernelSpec("encode", program, "float16"),
        KernelSpec("decode", program, "float32"),
        KernelSpec("rotate", program_of(fmt, bare=True), "float16"),
        KernelSpec("attend", program, values=program, group=group),
        KernelSpec("merge", program_of(fmt, bare=True), "float16", group=group),
        KernelSpec(
            "exact",
            program_of(fmt, bare=True),
            "float16",
            program_of(fmt, bare=True),
            threads=EXACT_THREADS,
        ),
    ):
        check(spec, (9, 0), 255)


def test_presets_have_groups_as_large_as_they_share_queries():
    """1 to 4, or 8 queries share a walk; others are split."""
    for name in pq.presets():
        for head_dim in (64, 128):
            pair = pq.preset(name, head_dim)
            keys, values = program_of(pair.keys), program_of(pair.values)
            groups = [query_group(keys, values, n) for n in (1, 2, 3, 4, 5, 7, 8, 12, 16)]
            assert groups == [1, 2, 3, 4, 4, 4, 8, 4, 8]


def test_balanced_keys_are_staged_as_they_are_stored():
    pair = pq.preset("balanced", 128)
    assert RunLayout(program_of(pair.keys)).is_stored_by_runs
    assert not RunLayout(program_of(pair.values)).is_stored_by_runs


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_machine_code_is_made_without_a_driver(capability):
    spec = KernelSpec("merge", program_of(pq.PolarFormat(16, (1,)), bare=True))
    cubin, name = cuda_compile.compile_cubin(spec, capability)
    assert cubin.startswith(b"\x7fELF")
    assert name.encode() in cubin


def test_element_types_and_attention_differ_in_code():
    program = program_of(pq.PolarFormat(16, (2, 2)))
    names = {
        compile_ptx(KernelSpec("encode", program, element), (8, 0)).count("cvt.f32.f16")
        for element in ("float32", "bfloat16")
    }
    assert names == {0}
    assert "cvt.f32.f16" in compile_ptx(KernelSpec("encode", program, "float16"), (8, 0))
