"""Files and folders of tensors: read back as written in every layout, and one clear sentence for each way they can be broken."""

import errno
import json
import os
import re
import struct
from pathlib import Path

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from wanjax import checkpoint, tensor_file
from wanjax.checkpoint import open_checkpoint, save_component

STEM = "diffusion_pytorch_model"
CONFIG = {"_class_name": "Something"}


def random_tensors(dtype=np.float32, names=("a.weight", "a.bias", "b.weight", "c")) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = ((4, 3), (4,), (2, 3, 1, 1), ())
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in zip(names, shapes, strict=True)}


def write_raw(path: Path, header, data: bytes = b"", length: int | None = None) -> Path:
    """A file of any header, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(begin: int, end: int, shape=None, dtype="F32") -> dict:
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


def assert_same(found, tensors):
    assert set(found) == set(tensors)
    for name, tensor in tensors.items():
        array = np.asarray(found[name])
        assert (array.dtype, array.shape, found[name].nbytes) == (tensor.dtype, tensor.shape, tensor.nbytes), name
        assert array.tobytes() == tensor.tobytes(), name


# One file


@pytest.mark.parametrize("dtype", tensor_file.DTYPES.values(), ids=tensor_file.DTYPES)
def test_every_dtype_is_read_as_written(dtype, tmp_path):
    tensors = random_tensors(dtype)
    tensor_file.write(tmp_path / "x.safetensors", tensors)
    assert_same(tensor_file.read_header(tmp_path / "x.safetensors"), tensors)


def test_files_interchange_with_the_safetensors_package(tmp_path):
    tensors = {**random_tensors(), "half": np.ones(3, np.float16), "long": np.arange(5), "empty": np.zeros((0, 3), np.float32)}
    safetensors.numpy.save_file(tensors, tmp_path / "theirs.safetensors", metadata={"note": "kept out of the tensors"})
    assert_same(tensor_file.read_header(tmp_path / "theirs.safetensors"), tensors)
    tensor_file.write(tmp_path / "ours.safetensors", tensors)
    assert_same({name: np.asarray(t) for name, t in safetensors.numpy.load_file(tmp_path / "ours.safetensors").items()}, tensors)


def test_a_tensor_that_is_no_row_of_bytes_is_written_in_order(tmp_path):
    array = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    tensors = {"turned": array.T, "every_other": array[:, ::2], "spread": np.broadcast_to(np.float32(3), (2, 2))}
    tensor_file.write(tmp_path / "x.safetensors", tensors)
    assert_same(tensor_file.read_header(tmp_path / "x.safetensors"), tensors)


def test_a_dtype_that_files_do_not_hold_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"z is complex64, which safetensors files do not hold; save with dtype= one of float64, "):
        tensor_file.write(tmp_path / "x.safetensors", {"z": np.zeros(2, np.complex64)})
    assert not list(tmp_path.iterdir())


BROKEN = {
    "empty": (b"", "starts with no header length"),
    "too short for a length": (b"\x10\x00\x00", "starts with no header length"),
    "a zip": (b"PK\x03\x04" + bytes(range(60)), "starts with no header length"),
    "header of no bytes": (struct.pack("<Q", 0) + bytes(60), "starts with no header length"),
    "cut in the header": (struct.pack("<Q", 100) + b"{", "is truncated: its header has 100 bytes, the file 9"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_bytes_that_are_no_file_of_tensors(name, tmp_path):
    content, message = BROKEN[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} (is no safetensors file: it )?{message}.*again"):
        tensor_file.read_header(path)


HEADERS = {
    "no json": (b"{nothing", r"corrupt header \(Expecting property name"),
    "no text": (b"\xff\xfe\xff\xff", "corrupt header"),
    "deep": (b"[" * 100_000, "corrupt header"),
    "no table": ([], r"corrupt header \(no table of tensors\)"),
    "twice": (b'{"a": 1, "a": 2}', r"corrupt header \(a name is there twice\)"),
    "entry is no table": ({"a": 1}, r"corrupt header \(entry of a\)"),
    "no dtype": ({"a": {"shape": [], "data_offsets": [0, 4]}}, r"corrupt header \(entry of a\)"),
    "dtype is no name": ({"a": entry(0, 4, dtype=["F32"])}, r"corrupt header \(entry of a\)"),
    "shape is no list": ({"a": entry(0, 4, shape="1")}, r"corrupt header \(entry of a\)"),
    "shape is a table": ({"a": entry(0, 4, shape={})}, r"corrupt header \(entry of a\)"),
    "negative shape": ({"a": entry(0, 4, shape=[-1])}, r"corrupt header \(entry of a\)"),
    "boolean shape": ({"a": entry(0, 4, shape=[True])}, r"corrupt header \(entry of a\)"),
    "fractional shape": ({"a": entry(0, 4, shape=[1.0])}, r"corrupt header \(entry of a\)"),
    "three offsets": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 8]}}, r"corrupt header \(entry of a\)"),
    "offset before the data": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}, r"corrupt header \(entry of a\)"),
    "offsets turned": ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}, r"corrupt header \(a: -4 bytes for F32 \[1\]\)"),
    "shape of other bytes": ({"a": entry(0, 8, shape=[3])}, r"corrupt header \(a: 8 bytes for F32 \[3\]\)"),
    "unknown dtype": ({"a": entry(0, 8, dtype="F4")}, "stores a as F4; known dtypes are F64, F32, "),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 8)}, r"corrupt header \(b overlaps a\)"),
    "gap": ({"a": entry(0, 4), "b": entry(8, 12)}, r"corrupt header \(b leaves a gap after a\)"),
    "gap in front": ({"a": entry(4, 8)}, r"corrupt header \(a leaves a gap after the header\)"),
    "past the end": ({"a": entry(0, 400)}, r"is truncated: its header describes \d+ bytes, the file has \d+"),
    "bytes left": ({"a": entry(0, 4)}, r"has bytes that belong to no tensor: its header describes \d+ bytes, the file has \d+"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_is_checked_whole(name, tmp_path):
    header, message = HEADERS[name]
    path = write_raw(tmp_path / "x.safetensors", header, data=bytes(8))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))} .*{message}"):
        tensor_file.read_header(path)


def test_a_truncated_download_is_told_before_anything_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    tensor_file.write(path, random_tensors())
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            open_checkpoint(path)


# Folders


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("shard", [5_000_000_000, 40, 1])
def test_saved_folders_open_identically(dtype, shard, tmp_path):
    tensors = random_tensors(dtype)
    save_component(tmp_path, tensors, CONFIG, stem=STEM, max_shard_size=shard)
    opened = open_checkpoint(tmp_path)
    assert_same(opened.tensors, tensors)
    assert opened.config == CONFIG
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    count = len(files)
    assert files == ([f"{STEM}.safetensors"] if count == 1 else [f"{STEM}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)])
    assert count == {5_000_000_000: 1, 1: 4}.get(shard, count)
    for file in files:
        held = tensor_file.read_header(tmp_path / file)
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= shard
    if count > 1:
        index = json.loads((tmp_path / f"{STEM}.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
        assert set(index["weight_map"]) == set(tensors)


def test_a_folder_a_subfolder_and_a_file_are_the_same_checkpoint(tmp_path):
    tensors = random_tensors()
    save_component(tmp_path / "part", tensors, CONFIG, stem=STEM)
    file = tmp_path / "part" / f"{STEM}.safetensors"
    for opened in (open_checkpoint(tmp_path / "part"), open_checkpoint(str(tmp_path), "part"), open_checkpoint(file)):
        assert_same(opened.tensors, tensors)
    assert open_checkpoint(file).config == {}


def test_another_save_replaces_the_one_before(tmp_path):
    many, few = random_tensors(), {"a.weight": np.zeros((2, 2), np.float32)}
    for tensors, shard in ((many, 40), (few, 40), (many, 10**9), (many, 1)):
        save_component(tmp_path, tensors, CONFIG, stem=STEM, max_shard_size=shard)
        assert_same(open_checkpoint(tmp_path).tensors, tensors)


def test_a_save_beside_other_weights_or_on_a_file_is_refused(tmp_path):
    save_component(tmp_path / "text", random_tensors(), CONFIG, stem="model")
    before = {path: path.read_bytes() for path in (tmp_path / "text").iterdir()}
    with pytest.raises(ValueError, match=r"text holds other weights \(model\.safetensors\); give a new folder"):
        save_component(tmp_path / "text", random_tensors(), CONFIG, stem=STEM)
    with pytest.raises(ValueError, match=r"model\.safetensors is a file; give a folder"):
        save_component(tmp_path / "text" / "model.safetensors", random_tensors(), CONFIG, stem=STEM)
    assert before == {path: path.read_bytes() for path in (tmp_path / "text").iterdir()}


class Breaks:
    """A tensor that cannot be read: what a full disk, Ctrl-C or a lost mount is to a save."""

    shape, dtype, nbytes = (2,), np.dtype(np.float32), 8

    def __init__(self, error: BaseException):
        self.error = error

    def __array__(self, dtype=None, copy=None):
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), ValueError("broken")], ids=repr)
@pytest.mark.parametrize("shard", [10**9, 8])
def test_a_save_that_fails_leaves_what_was_there(error, shard, tmp_path):
    tensors = random_tensors()
    save_component(tmp_path, tensors, CONFIG, stem=STEM, max_shard_size=40)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    message = f"{re.escape(str(tmp_path))} cannot be written .No space left on device" if isinstance(error, OSError) else f"^{error}$"
    with pytest.raises(type(error), match=message):
        save_component(tmp_path, {**tensors, "z": Breaks(error)}, {"other": 1}, stem=STEM, max_shard_size=shard)
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert_same(open_checkpoint(tmp_path).tensors, tensors)


def test_a_name_appears_only_when_everything_is_written(tmp_path, monkeypatch):
    """At every write, of tensors or text, no file has its final name; the renames come last."""
    events = []
    write, replace, write_text = tensor_file.write, Path.replace, Path.write_text

    def watched(name, function):
        def call(path, *arguments, **options):
            events.append((name, path.name, sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("."))))
            return function(path, *arguments, **options)

        return call

    monkeypatch.setattr(tensor_file, "write", watched("write", write))
    monkeypatch.setattr(Path, "replace", watched("rename", replace))
    monkeypatch.setattr(Path, "write_text", watched("write", write_text))
    save_component(tmp_path, random_tensors(), CONFIG, stem=STEM, max_shard_size=1)
    kinds = [kind for kind, _, _ in events]
    assert kinds == ["write"] * 6 + ["rename"] * 6  # four shards, config.json and the index
    assert all(name.startswith(".") and name.endswith(".part") for _, name, _ in events)
    assert not any(visible for kind, _, visible in events if kind == "write")


def test_a_file_may_be_saved_over_while_it_is_looked_at(tmp_path):
    save_component(tmp_path, random_tensors(), CONFIG, stem=STEM)
    opened = open_checkpoint(tmp_path)
    view = np.asarray(opened.tensors["a.weight"])
    seen = view.copy()
    save_component(tmp_path, {name: np.asarray(tensor) + 1 for name, tensor in opened.tensors.items()}, CONFIG, stem=STEM)
    np.testing.assert_array_equal(view, seen)
    np.testing.assert_array_equal(open_checkpoint(tmp_path).tensors["a.weight"], seen + 1)


# Indices


@pytest.fixture
def sharded(tmp_path):
    """A folder of several files and the path of their index."""
    save_component(tmp_path, random_tensors(), CONFIG, stem=STEM, max_shard_size=1)
    return tmp_path / f"{STEM}.safetensors.index.json"


def rewrite(index: Path, weight_map) -> None:
    index.write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "..\\secret.safetensors"])
def test_an_index_that_points_outside_its_folder(file, sharded):
    tensor_file.write(sharded.parent.parent / "secret.safetensors", {"a.weight": np.zeros((4, 3), np.float32)})
    rewrite(sharded, {"a.weight": file})
    with pytest.raises(ValueError, match=rf"index\.json names {re.escape(repr(file))}; only files beside the index are opened"):
        open_checkpoint(sharded.parent)


def test_an_index_entry_that_is_no_tensor_file(sharded):
    rewrite(sharded, {"a.weight": "config.json"})
    with pytest.raises(ValueError, match=r"config\.json is no \.safetensors file"):
        open_checkpoint(sharded.parent)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[]", "{", "\x00"])
def test_an_index_that_is_none(content, sharded):
    sharded.write_text(content)
    with pytest.raises(ValueError, match=r"index\.json (has no weight_map|is no JSON|should hold one JSON object)"):
        open_checkpoint(sharded.parent)


def test_missing_files_and_tensors_of_an_index_are_told_at_once(sharded):
    files = sorted(sharded.parent.glob("*.safetensors"))
    listed = json.loads(sharded.read_text())["weight_map"]
    rewrite(sharded, {**listed, "x": files[0].name, "y": files[1].name})
    with pytest.raises(ValueError, match=r"index\.json lists 2 tensors that their files do not have: x, y\."):
        open_checkpoint(sharded.parent)
    for file in files[1:3]:
        file.unlink()
    with pytest.raises(ValueError, match=rf"lacks 2 of the 4 files in its index: {files[1].name}, {files[2].name}\. Download again"):
        open_checkpoint(sharded.parent)


def test_a_damaged_shard_is_named(sharded):
    file = sorted(sharded.parent.glob("*.safetensors"))[2]
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} is truncated"):
        open_checkpoint(sharded.parent)


def test_folders_that_are_no_component(tmp_path):
    with pytest.raises(ValueError, match=r"should hold one \.safetensors file or one index of several; it has nothing"):
        open_checkpoint(tmp_path)
    for name in ("one", "two"):
        tensor_file.write(tmp_path / f"{name}.safetensors", random_tensors())
    with pytest.raises(ValueError, match=r"it has one\.safetensors, two\.safetensors"):
        open_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"has no folder vae; it has one\.safetensors"):
        open_checkpoint(tmp_path, "vae")
    with pytest.raises(ValueError, match=r"one\.safetensors is a file and has no folder vae"):
        open_checkpoint(tmp_path / "one.safetensors", "vae")


def test_pickles_are_never_opened(tmp_path):
    path = tmp_path / "Wan2.1_VAE.pth"
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(ValueError, match=r"pickles are never opened here.*safetensors\.torch\.save_file"):
        open_checkpoint(path)


def test_a_tensor_under_two_names_is_an_error(tmp_path):
    tensors = {"a.weight": np.zeros(2, np.float32), "model.diffusion_model.a.weight": np.ones(2, np.float32)}
    tensor_file.write(tmp_path / "x.safetensors", tensors)
    with pytest.raises(ValueError, match=r"x\.safetensors has 1 tensors under two names each: a\.weight\. Keep one of each"):
        open_checkpoint(tmp_path / "x.safetensors")


@pytest.mark.parametrize(("content", "message"), [("{", "is no JSON"), ("[]", "should hold one JSON object; it holds a list")])
def test_a_broken_config_is_named(content, message, tmp_path):
    save_component(tmp_path, random_tensors(), CONFIG, stem=STEM)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=rf"config\.json {message}"):
        open_checkpoint(tmp_path)


# The hub


def test_a_hub_id_downloads_only_what_is_needed(tmp_path, monkeypatch):
    """A local stand-in for the hub: a snapshot folder, and a record of the files that were asked for."""
    save_component(tmp_path / "vae", random_tensors(), CONFIG, stem=STEM)
    asked = []

    def snapshot_download(repo, allow_patterns, ignore_patterns):
        asked.append((repo, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert_same(open_checkpoint("someone/wan", "vae").tensors, random_tensors())
    assert checkpoint.is_pipeline("someone/wan")
    assert {repo for repo, _ in asked} == {"someone/wan"}
    assert asked[0][1] == ["vae/*.safetensors", "vae/*.safetensors.index.json", "vae/config.json"]
    with pytest.raises(ValueError, match=r"someone/wan has no model_index\.json; it has vae"):
        checkpoint.read_json("someone/wan", "model_index.json")


def test_a_hub_id_without_a_network_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match=r"^someone/wan is neither a folder here nor to be had from the hub \(.*`hf download someone/wan`"):
        open_checkpoint("someone/wan", "vae")


@pytest.mark.parametrize("error", [ConnectionError("no route\nto host"), RuntimeError(""), OSError("gated")], ids=repr)
def test_whatever_the_hub_says_is_in_the_sentence(error, monkeypatch):
    def snapshot_download(*arguments, **options):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    cause = (str(error).splitlines() or [type(error).__name__])[0]
    with pytest.raises(ValueError, match=rf"someone/wan is neither .* \({cause}\)") as raised:
        open_checkpoint("someone/wan", "vae")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("source", ["nowhere", "./nowhere/at", "a/b/c", "~nobody-here/x", Path("someone/wan")], ids=str)
def test_what_is_neither_path_nor_id(source):
    with pytest.raises(ValueError, match=r"is not here: give a folder or file that exists, or a hub id like"):
        open_checkpoint(source)


def test_json_files_appear_when_complete(tmp_path, monkeypatch):
    checkpoint.write_json(tmp_path / "deep" / "x.json", {"a": "é"})
    assert checkpoint.read_json(tmp_path / "deep", "x.json") == {"a": "é"}
    before = (tmp_path / "deep" / "x.json").read_bytes()

    def full(path, *_, **__):
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"deep cannot be written .No space left on device"):
        checkpoint.write_json(tmp_path / "deep" / "x.json", {"a": 2})
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]
    assert (tmp_path / "deep" / "x.json").read_bytes() == before
