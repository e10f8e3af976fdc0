"""Checkpoints on disk and on the hub: open, read lazily, save.

A checkpoint is a component folder (config.json beside one safetensors file, or several and an index), one of a
pipeline folder's, a hub id's, or a single safetensors file. Nothing is unpickled. Names of the original releases
become diffusers' when a file is opened. What is written appears under its name only when it is complete.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
    patterns = [f"{subfolder}/*" if subfolder else "*"]
    path = _local(path_or_repo, [pattern + end for pattern in patterns for end in (".safetensors", INDEX, "config.json")])
    if path.is_file():
        return Checkpoint({}, _by_diffusers_names(_read_file(path)), str(path))
    folder = path / subfolder if subfolder else path
    if not folder.is_dir():
        raise ValueError(f"{path_or_repo} has no folder {subfolder}; it has {_listing(path)}.")
    tensors = _by_diffusers_names(_read_folder(folder))
    return Checkpoint(read_json(folder, "config.json", missing_ok=True), tensors, f"{folder}{os.sep}")


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
        temporary.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
    """
    folder = Path(folder)
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
    with _appearing([folder / file for file in files]) as temporary:
        for path, shard in zip(temporary, shards, strict=True):
            tensor_file.write(path, shard)
    if several:
        index = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(tensor.nbytes for tensor in tensors.values())
        write_json(folder / f"{stem}{INDEX}", {"metadata": {"total_size": size}, "weight_map": index})
    stale = re.compile(rf"{re.escape(stem)}(-\d{{5}}-of-\d{{5}})?\.safetensors|{re.escape(stem + INDEX)}")
    for path in folder.iterdir():
        if stale.fullmatch(path.name) and path.name not in files and not (several and path.name.endswith(INDEX)):
            path.unlink()
    write_json(folder / "config.json", config)


@contextmanager
def _appearing(paths: list[Path]) -> Iterator[list[Path]]:
    """Temporary paths beside `paths`, renamed to them when the block ends well and removed when it does not."""
    temporary = [path.with_name(f".{path.name}.{os.getpid()}.part") for path in paths]
    try:
        yield temporary
        for part, path in zip(temporary, paths, strict=True):
            part.replace(path)
    finally:
        for part in temporary:
            part.unlink(missing_ok=True)


def _by_diffusers_names(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors under the names that diffusers gives them, without those that no model uses."""
    return {name: stored[original] for original, name in names.to_diffusers(stored).items()}


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
    indices = sorted(folder.glob(f"*{INDEX}"))
    files = sorted(folder.glob("*.safetensors"))
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
    path = Path(path_or_repo).expanduser()
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
    except (OSError, ValueError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{path_or_repo} is neither a folder here nor to be had from the hub ({cause}): where there is a network, "
            f"run `hf download {path_or_repo}`, or give a folder."
        ) from error


def _listing(folder: Path) -> str:
    """What a folder holds, for a message."""
    found = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return ", ".join(found[:8]) + (", ..." if len(found) > 8 else "") if found else "nothing"
