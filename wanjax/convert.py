"""What a checkpoint holds, and rewriting one in the diffusers layout; both look at one tensor at a time at most."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from wanjax import checkpoint, loading
from wanjax.tensor_file import StoredTensor


def describe(path_or_repo_or_preset: str | Path) -> str:
    """A table of a checkpoint's components: parameters, stored dtypes, bytes, and the preset it is sampled with.

    Reads headers alone. Raises ValueError where there is nothing to describe.
    """
    source = loading.resolve(path_or_repo_or_preset)
    rows = []
    for folder, opened in _components(source).items():
        dtypes = Counter({str(tensor.dtype): 0 for tensor in opened.tensors.values()})
        for tensor in opened.tensors.values():
            dtypes[str(tensor.dtype)] += 1
        count = sum(int(np.prod(tensor.shape)) for tensor in opened.tensors.values())
        size = sum(tensor.nbytes for tensor in opened.tensors.values())
        rows.append([folder, f"{count:,}", f"{size / 1e9:.3f} GB", ", ".join(dtypes), str(opened.config.get("_class_name", ""))])
    header = ["component", "parameters", "size", "dtypes", "class"]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
    if checkpoint.is_pipeline(source):
        preset = loading.preset_of(path_or_repo_or_preset)
        lines += ["", f"preset {preset.name}", *(f"  {name}: {value}" for name, value in preset.to_json().items() if name != "name")]
    return "\n".join(lines)


def _components(source: str | Path) -> dict[str, checkpoint.Checkpoint]:
    """The opened components of a pipeline, or the one of a folder or file."""
    if not checkpoint.is_pipeline(source):
        return {Path(source).name: checkpoint.open_checkpoint(source)}
    index = checkpoint.read_json(source, "model_index.json")
    folders = [name for name in ("text_encoder", "image_encoder", "transformer", "transformer_2", "vae") if (index.get(name) or [None])[0]]
    return {folder: checkpoint.open_checkpoint(source, folder) for folder in folders}


def convert(source: str | Path, target: str | Path, *, dtype: DTypeLike | None = None, max_shard_size: int = 5_000_000_000) -> None:
    """Write one component (a folder or single file, under original or diffusers' names) as a folder that diffusers opens.

    `dtype` is what its tensors are stored as (default: as they are). One tensor is in memory at a time. Raises ValueError where
    the tensors are of no model known here.
    """
    opened = checkpoint.open_checkpoint(source)
    component, config = loading.identify(opened)
    tensors: Mapping[str, Any] = (
        opened.tensors if dtype is None else {name: _Cast(t, np.dtype(dtype)) for name, t in opened.tensors.items()}
    )
    checkpoint.save_component(target, tensors, config.to_json(), stem=component.stem, max_shard_size=max_shard_size)


class _Cast:
    """A stored tensor in another dtype, cast when it is read."""

    def __init__(self, tensor: StoredTensor, dtype: np.dtype):
        self.tensor, self.dtype, self.shape = tensor, dtype, tensor.shape

    @property
    def nbytes(self) -> int:
        """Bytes in the new dtype."""
        return int(np.prod(self.shape)) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self.tensor).astype(self.dtype)
