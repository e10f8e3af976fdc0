"""Checkpoints on disk and on the hub: open, read lazily, save.

A checkpoint is a component folder (config.json beside one safetensors file, or several and an index), one of a
pipeline folder's, a hub id's, or a single safetensors file. Nothing is unpickled. Names of the original releases
become diffusers' when a file is opened. What is written appears under its name only when it is complete.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub

from wanjax import names, tensor_file
from wanjax.tensor_file import StoredTensor

PathOrRepo = str | Path
"""A folder or file; a string that is no path here and looks like `owner/name` is a hub id."""

INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class Checkpoint:
    """One component's stored tensors by name, none of them read, its config.json (empty where there is none), and where it is."""

    config: dict[str, Any]
    tensors: Mapping[str, StoredTensor]
    where: str


def open_checkpoint(path_or_repo: PathOrRepo, subfolder: str | None = None) -> Checkpoint:
    """The checkpoint of a component folder, of a `subfolder` of a folder or hub id, or of a single safetensors file.

    Reads headers alone. ValueError, naming the file, where something is missing, damaged, or points outside the folder.
    """
    prefix = f"{subfolder}/" if subfolder else ""
    path = _local(path_or_repo, [prefix + name for name in ("*.safetensors", f"*{INDEX}", "config.json")])
    if path.is_file():
        if subfolder is not None:
            raise ValueError(f"{path} is a file and has no folder {subfolder}.")
        return Checkpoint({}, _by_diffusers_names(_read_file(path), str(path)), str(path))
    folder = path / subfolder if subfolder else path
    if not folder.is_dir():
        raise ValueError(f"{path_or_repo} has no folder {subfolder}; it has {_listing(path)}.")
    where = f"{folder}{os.sep}"
    return Checkpoint(read_json(folder, "config.json", missing_ok=True), _by_diffusers_names(_read_folder(folder), where), where)


def is_pipeline(path_or_repo: PathOrRepo) -> bool:
    """Whether this is a whole pipeline (a folder with a model_index.json, or a hub id) and not one component."""
    path = _path(path_or_repo)
    return path is None or (path / "model_index.json").is_file()


def read_json(path_or_repo: PathOrRepo, name: str, missing_ok: bool = False) -> dict[str, Any]:
    """A JSON file of a folder or hub id; an empty dict where it is not there and that is `missing_ok`."""
    path = _local(path_or_repo, [name]) / name
    if missing_ok and not path.is_file():
        return {}
    try:
        content = json.loads(local_file(path_or_repo, name).read_text(encoding="utf-8"))
    except ValueError as error:
        if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
            raise ValueError(f"{path} is no JSON ({error}).") from None
        raise
    if not isinstance(content, dict):
        raise ValueError(f"{path} should hold one JSON object; it holds a {type(content).__name__}.")
    return content


def local_file(path_or_repo: PathOrRepo, name: str) -> Path:
    """A file of a folder or hub id on this machine: `name` in it, or its last part where the folder is that of a component."""
    path = _local(path_or_repo, [name])
    if path.is_file():
        return path
    for candidate in (path / name, path / PurePosixPath(name).name):
        if candidate.is_file():
            return candidate
    raise ValueError(f"{path_or_repo} has no {name}; it has {_listing(path)}.")


def write_json(path: PathOrRepo, content: Mapping[str, Any]) -> None:
    """Write a JSON file, and the folders it is in; it appears when it is complete."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _appearing([path]) as (temporary,):
        temporary.write_text(_json_text(content), encoding="utf-8")


def save_component(
    folder: PathOrRepo,
    tensors: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    stem: str,
    max_shard_size: int = 5_000_000_000,
) -> None:
    """Write tensors and config.json as a component folder that diffusers (or transformers) opens.

    One file `stem`.safetensors, or several of at most `max_shard_size` bytes (a larger tensor has one alone) and their index.
    Every tensor keeps its dtype. Files appear when all of them are complete; those of an earlier save are gone then.
    ValueError where the folder is a file, or holds other weights, beside which these would not be found again.
    """
    folder = Path(folder)
    own = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(stem + INDEX)}")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; give a folder, new or of an earlier save.")
    if others := [path.name for path in _weight_files(folder) if not own.fullmatch(path.name)]:
        raise ValueError(f"{folder} holds other weights ({', '.join(others[:8])}); give a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Any]] = [{}]
    room = max_shard_size
    for name, tensor in tensors.items():
        size = tensor.nbytes
        if size > room and shards[-1]:
            shards.append({})
            room = max_shard_size
        shards[-1][name] = tensor
        room -= size
    several = len(shards) > 1
    files = [f"{stem}-{i + 1:05}-of-{len(shards):05}.safetensors" if several else f"{stem}.safetensors" for i in range(len(shards))]
    written: dict[str, Mapping[str, Any]] = {"config.json": config}
    if several:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        written[f"{stem}{INDEX}"] = {"metadata": {"total_size": size}, "weight_map": index}
    with _appearing([folder / file for file in [*files, *written]]) as temporary:
        for path, shard in zip(temporary, shards, strict=False):
            tensor_file.write(path, shard)
        for path, content in zip(temporary[len(files) :], written.values(), strict=True):
            path.write_text(_json_text(content), encoding="utf-8")
    for path in _weight_files(folder):
        if path.name not in files and path.name not in written:
            path.unlink()


def _json_text(content: Mapping[str, Any]) -> str:
    """The text of a JSON file."""
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder and their indices; none where there is no folder. Hidden ones are still being written."""
    found = [*folder.glob("*.safetensors"), *folder.glob(f"*{INDEX}")]
    return sorted(path for path in found if not path.name.startswith("."))


@contextmanager
def _appearing(paths: list[Path]) -> Iterator[list[Path]]:
    """Temporary paths beside `paths`, renamed to them when the block ends well and removed when it does not.

    OSError, naming the folder, where they cannot be written (a full disk, no permission).
    """
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    try:
        yield temporary
        for part, path in zip(temporary, paths, strict=True):
            part.replace(path)
    except OSError as error:
        reason = f"{paths[0].parent} cannot be written ({error.strerror or error}); nothing is left of the attempt"
        raise type(error)(f"{reason}.") from error
    finally:
        for part in temporary:
            part.unlink(missing_ok=True)


def _by_diffusers_names(stored: Mapping[str, StoredTensor], where: str) -> dict[str, StoredTensor]:
    """The tensors under the names that diffusers gives them, without those that no model uses."""
    renamed = names.to_diffusers(stored)
    if twice := [name for name, count in Counter(renamed.values()).items() if count > 1]:
        more = ", ..." if len(twice) > 8 else ""
        raise ValueError(f"{where} has {len(twice)} tensors under two names each: {', '.join(twice[:8])}{more}. Keep one of each.")
    return {name: stored[original] for original, name in renamed.items()}


def _read_file(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a single file."""
    if path.suffix != ".safetensors":
        raise ValueError(
            f"{path} is no .safetensors file, and pickles are never opened here, since opening one runs its code; convert it once with "
            f"torch: safetensors.torch.save_file(torch.load(path, weights_only=True), 'weights.safetensors')."
        )
    return tensor_file.read_header(path)


def _read_folder(folder: Path) -> dict[str, StoredTensor]:
    """The tensors of a component folder: those of its index's files, or of its only file."""
    found = _weight_files(folder)
    indices = [path for path in found if path.name.endswith(INDEX)]
    files = [path for path in found if path not in indices]
    if len(indices) == 1:
        return _read_shards(folder, indices[0].name)
    if indices or len(files) != 1:
        raise ValueError(f"{folder} should hold one .safetensors file or one index of several; it has {_listing(folder)}.")
    return _read_file(files[0])


def _read_shards(folder: Path, index: str) -> dict[str, StoredTensor]:
    """The tensors that an index lists, each from the file it names."""
    listed = read_json(folder, index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise ValueError(f"{folder / index} has no weight_map from tensors to files.")
    files = sorted(set(listed.values()))
    for file in files:
        if file != os.path.basename(file.replace("\\", "/")) or file in ("", ".", ".."):
            raise ValueError(f"{folder / index} names {file!r}; only files beside the index are opened.")
    if missing := [file for file in files if not (folder / file).is_file()]:
        raise ValueError(f"{folder} lacks {len(missing)} of the {len(files)} files in its index: {', '.join(missing)}. Download again.")
    stored = {file: _read_file(folder / file) for file in files}
    if absent := [name for name, file in listed.items() if name not in stored[file]]:
        more = ", ..." if len(absent) > 8 else ""
        raise ValueError(f"{folder / index} lists {len(absent)} tensors that their files do not have: {', '.join(absent[:8])}{more}.")
    return {name: stored[file][name] for name, file in listed.items()}


def _path(path_or_repo: PathOrRepo) -> Path | None:
    """The path, or None for a hub id: a string like `owner/name` that is no path here."""
    path = Path(path_or_repo)
    with suppress(RuntimeError):  # a `~name` of nobody stays as it is, and is not here
        path = path.expanduser()
    if path.exists():
        return path
    if isinstance(path_or_repo, str) and re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path_or_repo):
        return None
    raise ValueError(f"{path_or_repo} is not here: give a folder or file that exists, or a hub id like Wan-AI/Wan2.1-T2V-1.3B-Diffusers.")


def _local(path_or_repo: PathOrRepo, patterns: list[str]) -> Path:
    """The path; for a hub id that of its snapshot, with the files of these patterns downloaded where they are not yet."""
    path = _path(path_or_repo)
    if path is not None:
        return path
    try:
        return Path(huggingface_hub.snapshot_download(str(path_or_repo), allow_patterns=patterns, ignore_patterns=["*.fp16*", "*.bf16*"]))
    except Exception as error:  # the hub's own, its HTTP client's, the system's: which one depends on the version
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path_or_repo} is neither a folder here nor to be had from the hub ({cause}): where there is a network, "
            f"run `hf download {path_or_repo}`, or give a folder."
        ) from error


def _listing(folder: Path) -> str:
    """What a folder holds, for a message."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
