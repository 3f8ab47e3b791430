"""How kernels are launched, with the driver's calls stubbed: CPU tensors stand in for a GPU's."""

import ctypes
import gc
import os
import shutil
import statistics
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from weakref import ref

import numpy as np
import pytest
from numba import config
from support import gaussian, run_python

import polarquant_nb as pq

torch = pytest.importorskip("torch")
pytest.importorskip("numba_cuda")
if config.ENABLE_CUDASIM:
    pytest.skip("the simulator launches in another way", allow_module_level=True)

from simulated_gpu import gpu_tensors, looked  # noqa: E402, F401

from polarquant_nb import gpu, gpu_attention, gpu_codec, gpu_preconditioning  # noqa: E402
from polarquant_nb.arrays import ArrayKind  # noqa: E402
from polarquant_nb.gpu_preconditioning import subtract_bias  # noqa: E402
from polarquant_nb.kernels import cuda_launch  # noqa: E402
from polarquant_nb.kernels.cuda_compile import ARGUMENTS, KernelSpec, program_of  # noqa: E402
from polarquant_nb.rotations import rotation_for  # noqa: E402

STREAM = 0x5EED

timed = pytest.mark.skipif(
    "COVERAGE_RUN" in os.environ, reason="coverage traces Python, which is what is timed"
)


class Driver:
    """Takes the place of cuLaunchKernel: keeps the numbers that it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self.calls.append((function, (gx, gy, gz), (bx, by, bz), shared, stream, parameters))
        return (0,)

    def arguments(self, call, letters):
        """What the kernel would read, through the array of addresses."""
        kinds = {"i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}
        places = (ctypes.c_void_p * len(letters)).from_address(self.calls[call][5])
        kinds = [kinds.get(letter, ctypes.c_uint64) for letter in letters]
        return [kind.from_address(p).value for kind, p in zip(kinds, places, strict=True)]


def kernel_of(call, name, letters, threads=128):
    """A kernel that ``call`` launches."""
    return cuda_launch.Kernel(name, letters, threads, call, lambda: None)


@pytest.fixture
def driver(monkeypatch):
    """CPU tensors are taken for tensors on a GPU of 100 multiprocessors."""
    stub = Driver()
    compiled = []

    def load(spec, capability):
        compiled.append((spec, capability))
        return kernel_of(stub, spec.name, ARGUMENTS[spec.name], spec.threads)

    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=100)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM)
    )
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(cuda_launch, "_loaded", load)
    forget()
    stub.compiled = compiled
    yield stub
    forget()


def forget():
    """Kernels and tables that were made before, or that the stub has made."""
    for place in (cuda_launch, gpu_codec, gpu_preconditioning):
        for cached in vars(place).values():
            if hasattr(cached, "cache_clear") and cached.__module__ == place.__name__:
                cached.cache_clear()


def pages_of(fmt, seq_len, heads=8, preconditioner=None, batch=1):
    """Pages whose words nobody reads."""
    words = torch.zeros(batch, heads, -(-seq_len // 128), fmt.layout.num_words, dtype=torch.int32)
    books, kind = pq.Codebooks.analytic(fmt), ArrayKind("torch", "float16")
    return pq.PolarPages(fmt, words, seq_len, books, kind, preconditioner=preconditioner)


def scales_and_bias(heads, head_dim):
    bias = pq.RotaryBias(np.ones((heads, head_dim)), np.geomspace(1, 1e-4, head_dim // 2))
    return pq.Preconditioner(np.full((heads, head_dim), 2.0), bias)


def test_arguments_are_packed_as_the_kernel_reads_them(driver):
    for name, letters in ARGUMENTS.items():
        kernel = kernel_of(driver, name, letters)
        numbers = [
            0.5 if c == "f" else -(i + 1) if c == "l" else 2**33 + i if c not in "if" else i
            for i, c in enumerate(letters)
        ]
        kernel.launch((3, 2), STREAM, *numbers)
        assert driver.arguments(-1, letters) == numbers
        assert driver.calls[-1][:5] == (name, (3, 2, 1), (128, 1, 1), 0, STREAM)


def test_an_empty_grid_is_not_launched(driver):
    kernel = kernel_of(driver, "merge", "i")
    kernel.launch((0, 1), STREAM, 1)
    kernel.launch((1, 0), STREAM, 1)
    assert not driver.calls


def test_the_drivers_errors_are_raised():
    kernel = kernel_of(lambda *_: (700,), "merge", "i")
    with pytest.raises(RuntimeError, match="700"):
        kernel.launch((1, 1), STREAM, 1)


def test_what_is_loaded_is_the_machine_code_that_is_kept(monkeypatch):
    from cuda.bindings import driver

    loaded = []

    def load(cubin, *rest):
        loaded.append(cubin)
        return 0, "library"

    monkeypatch.setattr(cuda_launch, "kept_cubin", lambda spec, capability: (b"code", "name"))
    monkeypatch.setattr(driver, "cuLibraryLoadData", load)
    monkeypatch.setattr(
        driver, "cuLibraryGetKernel", lambda library, name: (0, {b"name": 77}.get(name))
    )
    spec = KernelSpec("merge", program_of(pq.PolarFormat(16, (1,)), bare=True))
    kernel = cuda_launch._loaded(spec, (9, 0))
    assert loaded == [b"code"]
    assert int(kernel.function) == 77
    monkeypatch.setattr(driver, "cuLibraryLoadData", lambda *_: (222, None))
    with pytest.raises(RuntimeError, match="refused to load a kernel: 222"):
        cuda_launch._loaded(spec, (9, 0))


LOAD_AND_LAUNCH = """
import threading
import torch
import polarquant_nb as pq
from polarquant_nb.kernels import cuda_launch
from polarquant_nb.kernels.cuda_compile import KernelSpec, program_of

torch.cuda.current_device = lambda: 1
cuda_launch.kept_cubin = lambda spec, capability: (b"code", "name")
bare = program_of(pq.PolarFormat(16, (1,)), bare=True)
kernel = cuda_launch._loaded(KernelSpec("exact", bare, values=bare, threads=256), (9, 0))
for stream in (0, 0x5EED):
    kernel.launch((3, 2), stream, *range(1, 9), -1, 2, 3, 4, 0.5, -2, 5, -(2**40), 6, 2**40)
other = threading.Thread(target=kernel.launch, args=((1, 1), 7, *range(18)))
other.start()
other.join()
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_cuda_bindings_hands_on_what_it_is_given(tmp_path):
    """The package itself, on a library that prints its arguments; and a context for each thread."""
    source, library = Path(__file__).with_name("fake_cuda.c"), tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    printed = run_python(
        "-c", LOAD_AND_LAUNCH, LD_LIBRARY_PATH=str(tmp_path), LETTERS=ARGUMENTS["exact"]
    )
    arguments = (
        f"{' '.join(map(hex, range(1, 9)))} -1 2 3 4 0.5 -2 5 -1099511627776 6 1099511627776"
    )
    assert printed.splitlines() == [
        "load code 0 0",
        "kernel 0x11 name",
        "context 0x541",
        f"launch 0x22 3,2,1 256,1,1 0 (nil) {arguments}",
        f"launch 0x22 3,2,1 256,1,1 0 0x5eed {arguments}",
        "context 0x541",
        f"launch 0x22 1,1,1 256,1,1 0 0x7 (nil) {' '.join(map(hex, range(1, 8)))} "
        f"{' '.join(map(str, range(8, 18)))}",
    ]


def test_attention_launches_three_kernels_on_the_current_stream(driver):
    pair = pq.preset("balanced", 128)
    k, v = pages_of(pair.keys, 32768), pages_of(pair.values, 32768)
    q = torch.zeros(1, 32, 1, 128, dtype=torch.float16)
    out, lse = gpu.attention_of_tensors(q, k, v, return_lse=True)
    assert [call[0] for call in driver.calls] == ["rotate", "attend", "merge"]
    assert {call[4] for call in driver.calls} == {STREAM}
    # 8 kv heads, one group of 4 queries; four blocks for each of 100 multiprocessors
    assert [call[1] for call in driver.calls] == [(32, 1, 1), (8, 43, 1), (32, 1, 1)]
    attend = driver.arguments(1, ARGUMENTS["attend"])
    assert attend[1] == k.words.data_ptr()
    assert attend[4] == v.words.data_ptr()
    merge = driver.arguments(2, ARGUMENTS["merge"])
    assert merge[3:5] == [out.data_ptr(), lse.data_ptr()]
    assert out.shape == q.shape
    assert out.dtype == q.dtype


def test_kernels_are_compiled_once(driver):
    """Per format, group, dtype and compute capability; the seed of a rotation is not code."""
    fmt = pq.PolarFormat(64, (4, 2, 2))
    for seed in (0, 1):
        x = torch.zeros(2, 300, 64)
        other = pq.PolarFormat(64, (4, 2, 2), seed=seed)
        for _ in range(2):
            gpu.encode_tensor(x, other, None, "propagate")
    assert driver.compiled == [(KernelSpec("encode", program_of(fmt)), (9, 0))]
    gpu.encode_tensor(x.half(), fmt, None, "propagate")
    assert driver.compiled[1:] == [(KernelSpec("encode", program_of(fmt), "float16"), (9, 0))]
    assert [call[1] for call in driver.calls] == [(6, 1, 1)] * 5


def test_each_row_gets_the_signs_of_its_kv_head(driver):
    """Scales are multiplied into them to encode, and divided out to decode and for queries."""
    fmt, preconditioner = pq.PolarFormat(64, (4, 2)), scales_and_bias(3, 64)
    x, q = torch.zeros(2, 3, 9, 64), torch.zeros(2, 3, 1, 64)
    pages = gpu.encode_tensor(x, fmt, None, "propagate", preconditioner=preconditioner)
    pages.decode()
    gpu.attention_of_tensors(q, pages, pages_of(fmt, 9, 3, batch=2))
    places = {"encode": (3, 11), "decode": (2, 13), "rotate": (2, 10), "merge": (5, 12)}
    found = {}
    for i, (name, *_) in enumerate(driver.calls):
        if name in places:
            arguments = driver.arguments(i, ARGUMENTS[name])
            address, heads = (arguments[at] for at in places[name])
            table = (ctypes.c_float * (heads * 2 * 64)).from_address(address)
            found[name] = np.array(table).reshape(heads, 2, 64)
    signs = rotation_for(fmt).signs
    for name, factor in (("encode", 2), ("decode", 0.5), ("rotate", 0.5)):
        np.testing.assert_array_equal(found[name], np.stack([signs * [[factor], [1]]] * 3))
    np.testing.assert_array_equal(found["merge"], signs[None])


def test_tables_are_moved_to_a_device_once(driver, monkeypatch):
    fmt, preconditioner = pq.PolarFormat(64, (4, 2)), scales_and_bias(2, 64)
    pages, values = pages_of(fmt, 300, 2, preconditioner), pages_of(fmt, 300, 2)
    x, q = torch.zeros(1, 2, 300, 64), torch.zeros(1, 4, 1, 64)
    words, starts = torch.zeros(pages.words.numel(), dtype=torch.int32), torch.zeros(6, dtype=int)
    moved = []
    from_numpy = torch.from_numpy

    def spy(array):
        moved.append(array)
        return from_numpy(array)

    monkeypatch.setattr(torch, "from_numpy", spy)
    counts = []
    for _ in range(3):
        plain = subtract_bias(x, preconditioner, 0)
        gpu_codec.encode_rows(plain, fmt, pages.codebooks, words, starts, preconditioner)
        gpu.attention_of_tensors(q, pages, values)
        pages.decode()
        counts.append(len(moved))
    # the format's eight, signs to encode and to decode with, b, cos, sin, and two for logits
    assert counts == [15, 15, 15]


@pytest.mark.parametrize("preconditioner", [None, scales_and_bias(2, 64)], ids=["none", "both"])
def test_encoding_does_not_wait_unless_it_is_to_raise(driver, looked, preconditioner):  # noqa: F811
    """A tensor's numbers are looked at on the CPU with nan='raise' only."""
    x = torch.zeros(1, 2, 9, 64)
    fmt = pq.PolarFormat(64, (4,))
    pages = gpu.encode_tensor(x, fmt, None, "propagate", preconditioner=preconditioner)
    for queries in (1, 70):
        gpu.attention_of_tensors(
            torch.zeros(1, 2, queries, 64),
            pages,
            pages_of(fmt, 9, 2),
            mask=torch.ones(9, dtype=torch.bool),
        )
    pages.decode()
    assert not looked


def test_the_bias_of_keys_is_one_launch_more(driver):
    """Its result takes the place of the mask, which is added to it."""
    fmt = pq.PolarFormat(64, (4, 2))
    k, v = pages_of(fmt, 300, 2, scales_and_bias(2, 64)), pages_of(fmt, 300, 2)
    q = torch.zeros(1, 6, 2, 64, dtype=torch.float16)
    gpu.attention_of_tensors(q, k, v, mask=torch.zeros(2, 300))
    assert [call[0] for call in driver.calls] == ["bias", "rotate", "attend", "merge"]
    assert {call[4] for call in driver.calls} == {STREAM}
    assert driver.calls[0][1] == (2 * 2, 3, 1)  # 6 queries a row are two groups; 3 pages
    bias = driver.arguments(0, ARGUMENTS["bias"])
    assert bias[0] == q.data_ptr()
    assert bias[5:14] == [pytest.approx(64**-0.5), 6, 2, 6, 2, 2, 32, 1, 32]
    attend = driver.arguments(2, ARGUMENTS["attend"])
    assert attend[8] == bias[4]
    assert attend[20:25] == [1, 0, 2 * 384, 384, 1]  # there is a mask; the batch has one row


@timed
@pytest.mark.parametrize("parts", ["none", "scales", "scales and bias"])
def test_python_takes_30_microseconds_a_call(driver, parts):
    """Of attention with one query a head: arguments, three or four launches, their allocations."""
    pair, both = pq.preset("balanced", 128), scales_and_bias(8, 128)
    preconditioner = {"none": None, "scales": both.without_bias, "scales and bias": both}[parts]
    k = pages_of(pair.keys, 4096, preconditioner=preconditioner)
    v = pages_of(pair.values, 4096)
    q = torch.zeros(1, 32, 1, 128, dtype=torch.float16)
    for _ in range(20):
        gpu.attention_of_tensors(q, k, v)
    medians = []
    for _ in range(5):  # the best of a few medians: others may use the machine
        times = []
        for _ in range(200):
            start = time.perf_counter_ns()
            gpu.attention_of_tensors(q, k, v)
            times.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(times) / 1000)
    print(f"{min(medians):.1f} µs")
    assert min(medians) <= 30


STEP = {"recent": 64, "sink": 4}


def filled_cache(n, heads=8):
    """A cache of float16 on a GPU."""
    cache = pq.KVCache("balanced", head_dim=128, **STEP)
    cache.append(*torch.zeros(2, 1, heads, n, 128, dtype=torch.float16))
    return cache


def test_a_decode_step_is_four_launches_and_no_wait(driver, gpu_tensors, looked):  # noqa: F811
    """Rotate, attend, merge, and the exact tokens; until the next page is made."""
    cache = filled_cache(4 + 64 + 256)
    q, token = torch.zeros(1, 32, 1, 128).half(), torch.zeros(1, 8, 1, 128).half()
    cache.attend(q)
    launched = len(driver.calls)
    looked.clear()
    for _ in range(127):
        cache.append(token, token)
        cache.attend(q)
    assert not looked
    names = [call[0] for call in driver.calls[launched:]]
    assert names == ["rotate", "attend", "merge", "exact"] * 127
    cache.append(token, token)
    assert len(looked) == 1
    assert [call[0] for call in driver.calls[-2:]] == ["encode", "encode"]
    cache.attend(q)
    assert len(looked) == 1


def test_the_kernel_for_exact_tokens_is_given_the_buffers(driver, gpu_tensors):  # noqa: F811
    cache = filled_cache(300)
    q = torch.zeros(1, 1, 32, 128).half().transpose(1, 2)
    out, lse = cache.attend(q, scale=0.5, softcap=3.0, return_lse=True)
    letters = ARGUMENTS["exact"]
    numbers = driver.arguments(-1, letters)
    state = cache._state
    assert driver.calls[-1][1:3] == ((32, 1, 1), (256, 1, 1))
    assert numbers[:3] == [t.data_ptr() for t in (q, state.keys.exact, state.values.exact)]
    assert numbers[6:8] == [out.data_ptr(), lse.data_ptr()]
    assert numbers[4:6] == driver.arguments(-2, ARGUMENTS["merge"])[3:5]
    assert numbers[8:12] == [300 - 128, 176, 4, 32]
    np.testing.assert_allclose(numbers[12:14], np.array([0.5, 3.0]) / np.log(2), rtol=1e-6)
    assert numbers[14:] == [1, 32 * 128, 128, 1]


def test_pages_are_found_from_the_lowest_one(driver, gpu_tensors):  # noqa: F811
    """A base that is a block's address, and distances from it in words."""
    cache = filled_cache(4 + 64 + 3 * 128)
    cache.attend(torch.zeros(1, 8, 1, 128).half())
    _, base, _, _, *_ = driver.arguments(-3, ARGUMENTS["attend"])
    table = cache._state.keys.table
    places = [block.data_ptr() for block in table.blocks[0]]
    assert base == min(places)
    words = table.format.layout.num_words
    for head in (0, 7):
        expected = [(place - base) // 4 + head * words for place in places]
        assert table.rows.starts[head].tolist() == expected


@timed
def test_python_of_a_decode_step(driver, gpu_tensors):  # noqa: F811
    """Appending a token and attending: two copies, four launches, and what torch allocates."""
    q, token = torch.zeros(1, 32, 1, 128).half(), torch.zeros(1, 8, 1, 128).half()
    medians = []
    for _ in range(4):
        cache, times = filled_cache(4 + 64 + 4096), []
        for _ in range(120):
            start = time.perf_counter_ns()
            cache.append(token, token)
            cache.attend(q)
            times.append(time.perf_counter_ns() - start)
        medians.append(statistics.median(times[20:]) / 1000)
    print(f"{min(medians):.1f} µs")
    assert min(medians) <= 150


@pytest.mark.parametrize("preconditioner", [None, scales_and_bias(2, 64)], ids=["none", "both"])
def test_memory_is_given_back_with_the_last_reference(driver, preconditioner):
    """What is kept for the next call is in no cycle, which memory of a GPU would wait for."""
    fmt, q = pq.PolarFormat(64, (4,)), torch.zeros(1, 2, 1, 64)
    k, v = pages_of(fmt, 300, 2, preconditioner), pages_of(fmt, 300, 2)
    gc.disable()
    try:
        for keys, values in ((k, v), (v, v)):
            gpu.attention_of_tensors(q, keys, values)
        held = [ref(each) for pages in (k, v) for each in (pages.words, pages.device_rows.words)]
        del k, v, keys, values
        assert [each() for each in held] == [None] * 4
    finally:
        gc.enable()


def test_pages_that_a_cache_has_no_more_are_given_back(driver, gpu_tensors):  # noqa: F811
    cache = filled_cache(4 + 64 + 256)
    gc.disable()
    try:
        cache.attend(torch.zeros(1, 32, 1, 128).half())
        held = ref(cache._state.keys.table.rows), ref(cache._state.keys.table.blocks[0][0])
        cache.crop(0)
        assert [each() for each in held] == [None] * 2
    finally:
        gc.enable()


def test_decoding_covers_the_pages_that_tokens_touch(driver):
    pages = pages_of(pq.PolarFormat(64, (4,)), 1000, heads=3)
    out = pages.decode(200, 500)
    assert out.shape == (1, 3, 300, 64)
    assert driver.calls[0][1] == (3 * 3, 1, 1)  # pages 1, 2 and 3 of three heads
    numbers = driver.arguments(0, ARGUMENTS["decode"])
    assert numbers[7] == out.data_ptr()
    assert numbers[8:] == [200, 500, 1, 3, 8, 1]


def test_pages_move_between_devices(driver):
    fmt = pq.PolarFormat(32, (4, 2))
    pages = pq.encode(gaussian(2, 130, 32), fmt)
    moved = pq.PolarPages(
        fmt, torch.from_numpy(pages.words.view(np.int32)), 130, pages.codebooks, pages.kind
    )
    back = moved.to("cpu")
    np.testing.assert_array_equal(back.words, pages.words)
    assert moved.nbytes == pages.nbytes
    assert moved.shape == pages.shape
    whole = pq.PolarPages(fmt, moved.words[:, :1], 128, pages.codebooks, pages.kind)
    joined = pq.PolarPages.concatenate([whole, moved])
    assert joined.shape == (2, 258, 32)
    assert joined.device == moved.device


def test_saved_from_a_device_and_loaded(driver, tmp_path):
    pytest.importorskip("safetensors")
    pages = pages_of(pq.PolarFormat(32, (4, 2)), 130, 2)
    pages.save(tmp_path / "pages")
    np.testing.assert_array_equal(
        pq.PolarPages.load(tmp_path / "pages").words, pages.to("cpu").words
    )


def test_blocks_fill_the_gpu_whatever_the_length(driver):
    """At least as many as a wave, and no more ranges than pages."""
    pair = pq.preset("balanced", 64)
    q = torch.zeros(1, 8, 1, 64)
    for seq_len, grid in ((100, (8, 1, 1)), (1024, (8, 8, 1)), (131072, (8, 49, 1))):
        gpu.attention_of_tensors(q, pages_of(pair.keys, seq_len), pages_of(pair.values, seq_len))
        assert driver.calls[-2][1] == grid
    assert gpu_attention._BLOCKS_PER_PROCESSOR == 4
