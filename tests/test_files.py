"""Files of pages and caches: what goes in comes back, and what does not fit is refused."""

from __future__ import annotations

import builtins
import json
import tempfile

import numpy as np
import pytest
from cache_model import HEADS, PAIR, assert_same, filled, tokens
from support import SMALL, SMALL_OFFSET, gaussian

import polarquant_nb as pq

safetensors = pytest.importorskip("safetensors")

KEY = "polarquant_nb"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "some.safetensors"


def change(path, header=None, tensors=None):
    """Rewrite a file with another header, or other tensors."""
    with safetensors.safe_open(path, framework="numpy") as file:
        old = json.loads(file.metadata()[KEY])
        names = file.keys()
        held = {name: file.get_tensor(name) for name in names}
    if header:
        header(old)
    if tensors:
        tensors(held)
    content = safetensors.numpy.save(held, {KEY: json.dumps(old)})
    path.write_bytes(content)


# ---- there and back ------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [SMALL, SMALL_OFFSET], ids=["plain", "offset"])
@pytest.mark.parametrize("shape", [(130, 64), (2, 3, 128, 64), (2, 0, 64)], ids=str)
def test_pages_come_back(fmt, shape, path):
    pages = pq.encode(gaussian(*shape).astype(np.float16), fmt)
    pages.save(path)
    again = pq.PolarPages.load(path)
    np.testing.assert_array_equal(again.words, pages.words)
    assert (again.format, again.seq_len, again.kind) == (fmt, shape[-2], pages.kind)
    assert again.codebooks is pages.codebooks
    np.testing.assert_array_equal(again.decode(), pages.decode())
    assert again.words.flags.writeable
    assert pq.PolarPages.load(path, fmt).shape == shape


def test_parts_and_counts_of_pages_come_back(path):
    x = gaussian(4, 20, 64)
    x[0, 3], x[1, 5] = np.nan, 1e5
    pages = pq.encode(x, SMALL, nan="propagate")
    part = pq.PolarPages(
        SMALL, pages.words[::2], 20, pages.codebooks, pages.kind, pages.num_nonfinite,
        pages.num_saturated,
    )  # fmt: skip
    part.save(str(path))
    again = pq.PolarPages.load(str(path))
    assert (again.num_nonfinite, again.num_saturated) == (1, 1)
    np.testing.assert_array_equal(again.decode(), pages.decode()[::2])


def test_fitted_codebooks_come_back(path):
    x = gaussian(2, 200, 64)
    pages = pq.encode(x, SMALL, codebooks="online")
    pages.save(path)
    again = pq.PolarPages.load(path)
    assert not again.codebooks.is_analytic
    for a, b in zip(again.codebooks.angles, pages.codebooks.angles, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(again.decode(), pages.decode())
    k, v = tokens(1, 200)
    cache = pq.KVCache(SMALL, key_codebooks=pages.codebooks)
    cache.append(k, v)
    cache.save(path)
    other = pq.KVCache.load(path)
    assert_same(cache, other)
    for one in (cache, other):
        one.append(*tokens(1, 200, seed=1))
    assert_same(cache, other)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_caches_go_on_bit_for_bit(path, dtype):
    k, v = (x.astype(dtype) for x in tokens(2, 500))
    cache = pq.KVCache("balanced", head_dim=64, sink=3, recent=20, nan="propagate")
    cache.append(k, v, [0, 90])
    cache.crop(300)  # into a page
    cache.repeat(2)
    cache.save(path)
    other = pq.KVCache.load(path, "balanced", head_dim=64)
    assert (other.sink, other.recent) == (3, 20)
    assert_same(cache, other)
    assert other.nbytes == cache.nbytes  # shared pages are shared again
    q = gaussian(4, 2 * HEADS, 1, 64)
    np.testing.assert_array_equal(cache.attend(q), other.attend(q))
    for one in (cache, other):
        one.append(k[[0, 0, 1, 1], :, :200], v[[0, 0, 1, 1], :, :200])
        one.append(np.full((4, HEADS, 1, 64), np.nan, dtype), np.zeros((4, HEADS, 1, 64), dtype))
    assert_same(cache, other)


@pytest.mark.parametrize("n", [None, 0, 2, 40])
def test_caches_without_pages_come_back(path, n):
    cache = pq.KVCache(PAIR) if n is None else filled(n, 2, [0, n // 2])
    cache.save(path)
    other = pq.KVCache.load(path)
    assert_same(cache, other)
    for one in (cache, other):
        one.append(*tokens(2, 150))
    assert_same(cache, other)


def test_tensors_come_back(path):
    torch = pytest.importorskip("torch")
    k, v = (torch.from_numpy(x).bfloat16() for x in tokens(1, 200))
    cache = pq.KVCache(PAIR)
    cache.append(k, v)
    cache.save(path)
    other = pq.KVCache.load(path)
    for x, y in zip(cache.decode(), other.decode(), strict=True):
        assert torch.equal(x, y)


def test_what_a_crop_left_behind_is_not_written(path):
    cache = filled(40)
    cache.crop(10)
    cache.repeat(2)
    cache.append(*tokens(2, 5), [0, 5])
    cache.save(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        exact = file.get_tensor("keys.exact")
    assert exact.shape[2] == 15
    assert not exact[1, :, 10:].any()


# ---- never half written --------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(path, monkeypatch):
    filled(10).save(path)
    old = path.read_bytes()
    write = builtins.open

    class Full:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[:100])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        builtins, "open", lambda name, mode="r", **more: Full(write(name, mode, **more))
    )
    with pytest.raises(OSError, match="No space left"):
        filled(200).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    filled(200).save(path)  # replaced
    assert_same(pq.KVCache.load(path), filled(200))


def test_missing_folders_and_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        filled(5).save(tmp_path / "none" / "file")
    for load in (pq.KVCache.load, pq.PolarPages.load):
        with pytest.raises(FileNotFoundError, match="nothing"):
            load(tmp_path / "nothing")


def test_an_open_file_is_not_taken_for_a_path():
    """Nor closed, as what ``open`` returns for its number would be."""
    with tempfile.TemporaryFile() as file:
        for kind in (pq.KVCache, pq.PolarPages, pq.Codebooks, pq.Calibration):
            with pytest.raises(TypeError, match="PathLike"):
                kind.load(file.fileno())
        file.write(b"still open")
        file.flush()


def test_without_safetensors(path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    message = r"files need safetensors: pip install 'polarquant-nb\[io\]'"
    with pytest.raises(ImportError, match=message):
        filled(5).save(path)
    path.write_bytes(b"")
    with pytest.raises(ImportError, match=message):
        pq.KVCache.load(path)


# ---- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"hello", b"\0" * 200, b"\xff" * 200])
@pytest.mark.parametrize("load", [pq.KVCache.load, pq.PolarPages.load], ids=["cache", "pages"])
def test_files_of_another_kind(load, content, path):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path is .*some.safetensors'; that file holds no usable"):
        load(path)


def test_truncated_files(path):
    filled(300).save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(ValueError, match="that file holds no usable cache"):
        pq.KVCache.load(path)


def test_other_contents(path):
    filled(5).save(path)
    with pytest.raises(ValueError, match="holds no usable pages: it holds cache"):
        pq.PolarPages.load(path)
    pq.encode(gaussian(5, 64), SMALL).save(path)
    with pytest.raises(ValueError, match="holds no usable cache: it holds pages"):
        pq.KVCache.load(path)
    safetensors.numpy.save_file({"x": np.zeros(3)}, path)
    with pytest.raises(ValueError, match="holds no usable cache: it holds something else"):
        pq.KVCache.load(path)


def test_other_formats_than_expected(path):
    filled(5).save(path)
    assert pq.KVCache.load(path, PAIR).formats == PAIR
    with pytest.raises(ValueError, match=r"it has FormatPair\(.*, not FormatPair\("):
        pq.KVCache.load(path, "paper", head_dim=64)
    pq.encode(gaussian(5, 64), SMALL).save(path)
    with pytest.raises(ValueError, match=r"it has PolarFormat\(.*offset=None.*, not PolarFormat"):
        pq.PolarPages.load(path, SMALL_OFFSET)


def set_at(*keys, value):
    def edit(header):
        for key in keys[:-1]:
            header = header[key]
        header[keys[-1]] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (set_at("version", value=2), "it has version 2; version 1 is known"),
        (set_at("key_format", "sha256", "rotation", value="00"), "its rotation of .* SHA-256 00"),
        (set_at("key_format", "sha256", "layout", value="00"), "its layout of PolarFormat"),
        (set_at("value_format", "sha256", "codebooks", value="00"), "its codebooks of PolarFormat"),
        (set_at("key_format", "seed", value=1), "its rotation of"),
        (set_at("key_format", "level_bits", value=[4, 4, 4, 4, 4, 4]), "its layout of"),
        (set_at("key_format", "head_dim", value=65), "head_dim is 65; it must be a multiple"),
        (set_at("sink", value=-1), "sink is -1"),
        (set_at("nan", value="?"), r"nan is '\?'"),
        (set_at("numbers", "kind", "dtype", value="int8"), "its arrays are .*int8"),
        (set_at("numbers", "kind", "dtype", value="float64"), "keys.exact is float32 .* float64"),
        (set_at("numbers", "exact", value=[189, 174]), "keys.exact is float32 of shape"),
        (set_at("numbers", "exact", value=[188]), "it has 1 rows of exact tokens and 2 of packed"),
        (set_at("numbers", "exact", value=[500, 174]), "a row of 500 exact tokens and 512 in pa"),
        (set_at("numbers", "exact", value=[188, 3]), "a row of 3 exact tokens and 256 in pages"),
        (set_at("numbers", "packed", value=[512, 384]), "keys.index does not fit"),
        (set_at("numbers", "packed", value=[512, -1]), "exact tokens and -1 in pages"),
        (set_at("numbers", "packed", value=[512, 1.5]), "packed is 1.5; it must be an int"),
        (lambda header: header.pop("numbers"), "it lacks 'numbers'"),
        (lambda header: header["value_format"].pop("codebooks"), "it lacks 'codebooks'"),
    ],
)  # fmt: skip
def test_damaged_headers_of_caches(path, edit, message):
    filled(700, 2, [0, 270]).save(path)
    change(path, header=edit)
    with pytest.raises(ValueError, match=message) as caught:
        pq.KVCache.load(path)
    assert str(caught.value).startswith(f"path is {str(path)!r}; that file holds no usable cache")


def cut(name, *index):
    def edit(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name][index])

    return edit


def put(name, value, *index):
    def edit(tensors):
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda tensors: tensors.pop("values.pages"), "it lacks 'values.pages'"),
        (cut("keys.exact", slice(0, 1)), r"keys.exact is .* should be float32 of shape \(2, 2"),
        (cut("keys.pages", slice(None), slice(0, 1)), "keys.pages is uint32 of shape"),
        (cut("values.pages", slice(0, 2)), "values.index does not fit"),
        (cut("values.index", slice(None), slice(0, 2)), "values.index is int64 of shape"),
        (put("values.index", -1, 0, 1), "values.index does not fit"),
        (put("values.index", 99, 0, 1), "values.index does not fit"),
        (lambda tensors: tensors.update({"keys.exact": np.zeros(9)}), "no usable cache: tuple"),
    ],
    ids=["no pages", "rows", "heads", "few pages", "few columns", "a gap", "too far", "flat"],
)
def test_damaged_tensors_of_caches(path, edit, message):
    filled(700, 2, [0, 270]).save(path)
    change(path, tensors=edit)
    with pytest.raises(ValueError, match=message):
        pq.KVCache.load(path)


@pytest.mark.parametrize(
    ("header", "tensors", "message"),
    [
        (set_at("seq_len", value=300), None, r"words is uint32 of shape \(2, 2, .* 3, "),
        (set_at("format", "offset", value="int8"), None, "its layout of"),
        (set_at("kind", value={}), None, "missing"),
        (None, cut("words", slice(None), slice(None), slice(0, 9)), "words is uint32 of shape"),
        (None, lambda t: t.update(words=t["words"].astype(np.int64)), "words is int64 of shape"),
    ],
)
def test_damaged_pages(path, header, tensors, message):
    pq.encode(gaussian(2, 200, 64), SMALL).save(path)
    change(path, header, tensors)
    with pytest.raises(ValueError, match=message):
        pq.PolarPages.load(path)
