"""The safetensors format: what a file holds, its tensors mapped from the disk, and writing one.

A file is the length of its header (8 bytes), the header (JSON: each tensor's dtype, shape and place) and the tensors'
bytes. A header is checked whole before anything is read, and a tensor is mapped when it is asked for and unmapped when
its array is dropped: nothing is in memory that nobody is looking at. Written here and not taken from the safetensors
package because that reads whole tensors, and in NumPy has no bfloat16.
"""

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
"""The dtypes of the format, by its names for them."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # the format's own limit: a longer one is no header but other bytes


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: where its bytes are. `np.asarray` of it maps them; nothing is read until they are looked at."""

    path: Path
    offset: int
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The tensor, mapped read-only for as long as the array lives."""
        if self.nbytes == 0:
            mapped = np.empty(self.shape, self.dtype)
        else:
            mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape).view(np.ndarray)
        return mapped.astype(dtype) if dtype is not None else mapped.copy() if copy else mapped


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, by name; only the header is read.

    ValueError, naming the file, where it is no safetensors file, truncated, or its tensors overlap or leave gaps.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= _LONGEST_HEADER:
            raise ValueError(f"{path} is no safetensors file: it starts with no header length. Download or write it again.")
        if 8 + length > size:
            raise ValueError(f"{path} is truncated: its header has {length} bytes, the file {size}. Download or write it again.")
        try:
            header = json.loads(file.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} has a corrupt header ({error}). Download or write it again.") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} has a corrupt header (no table of tensors). Download or write it again.")
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end, before = 8 + length, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            what = "overlaps" if tensor.offset < end else "leaves a gap after"
            raise ValueError(f"{path} has a corrupt header ({name} {what} {before}). Download or write it again.")
        end, before = end + tensor.nbytes, name
    if end != size:
        what = "is truncated" if end > size else "has bytes that belong to no tensor"
        raise ValueError(f"{path} {what}: its header describes {end} bytes, the file has {size}. Download or write it again.")
    return tensors


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object's pairs as a dict; ValueError where a name is there twice."""
    if len(table := dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return table


def _stored(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    """The tensor that one entry of a header describes."""
    corrupt = ValueError(f"{path} has a corrupt header (entry of {name}). Download or write it again.")
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        well_formed = isinstance(code, str) and isinstance(shape, list)
        well_formed = well_formed and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (KeyError, TypeError, ValueError):
        raise corrupt from None
    if not well_formed:
        raise corrupt
    if code not in DTYPES:
        raise ValueError(f"{path} stores {name} as {code}; known dtypes are {', '.join(DTYPES)}.")
    tensor = StoredTensor(path, start + begin, DTYPES[code], tuple(shape))
    if tensor.nbytes != end - begin:
        raise ValueError(f"{path} has a corrupt header ({name}: {end - begin} bytes for {code} {list(shape)}). Download or write it again.")
    return tensor


def write(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write tensors (anything with shape, dtype and `np.asarray`) as a safetensors file, one at a time.

    The file has no other name than `path` at any time; whoever wants it complete or absent writes to a temporary one.
    """
    order = sorted(tensors, key=lambda name: (-np.dtype(tensors[name].dtype).itemsize, name))  # so every tensor lies aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # what transformers asks of a file it opens
    end = 0
    for name in order:
        dtype, shape = np.dtype(tensors[name].dtype), tuple(tensors[name].shape)
        if dtype not in _NAMES:
            raise ValueError(
                f"{name} is {dtype}, which safetensors files do not hold; save with dtype= one of {', '.join(map(str, _NAMES))}."
            )
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(np.ascontiguousarray(tensors[name]).reshape(-1).view(np.uint8).data)
        file.flush()
        os.fsync(file.fileno())
