"""Checkpoint tensors to pytrees and back.

A module's fields are its checkpoint: the path of a leaf is the tensor's name in the file, and `stored` says where
the two differ (a name that is no Python identifier, another axis order, a stack of layers under one field). So one
walk over a template gives the names and shapes that a file must have (`expected`), and the same walk reads them
(`fill`) and writes them (`to_tensors`).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Sharding
from jax.typing import DTypeLike

Sizes = Mapping[str, int]
"""Sizes of the axis names in layouts that shapes alone do not give, such as {"pair": 2}."""

Shape = tuple[int, ...]
Template = TypeVar("Template")


def stored(layout: str | None = None, *, name: str | None = None, stacked: bool = False, **options: Any) -> Any:
    """A dataclass field that says how the checkpoint file stores it.

    `layout` is an einops pattern from the file's axes to the field's ("cout cin -> cin cout"); `name` is the dotted
    name in the file where it is not the field's own ("to_out.0"); `stacked` marks a module whose leaves have a
    leading layer axis, stored in the file as `name.0`, `name.1`, and so on.
    """
    return eqx.field(metadata={"layout": layout, "name": name, "stacked": stacked}, **options)


@dataclass(frozen=True)
class Entry:
    """One leaf of a template and its tensors in the file: one, or one a layer."""

    names: tuple[str, ...]
    layout: str | None
    stacked: bool
    leaf: Any
    sizes: dict[str, int]

    def to_field(self, tensor: Any) -> Any:
        """A tensor in the file's axes to the field's, without a layer axis."""
        return tensor if self.layout is None else rearrange(tensor, self.layout, **self.sizes)

    def to_file(self, array: Any) -> Any:
        """An array in the field's axes, without a layer axis, to the file's."""
        return array if self.layout is None else rearrange(array, " -> ".join(reversed(self.layout.split("->"))), **self.sizes)

    @property
    def file_shape(self) -> Shape:
        """Shape of each tensor in the file."""
        shape = self.leaf.shape[1:] if self.stacked else self.leaf.shape
        return self.to_file(np.broadcast_to(np.float32(0), shape)).shape  # an array of no memory


def entries(template: Any, sizes: Sizes | None = None) -> list[Entry]:
    """Every leaf of a template with the names it has in the file, in the order of `jax.tree.leaves`."""
    return [_entry(template, path, leaf, sizes or {}) for path, leaf in jax.tree_util.tree_leaves_with_path(template)]


def _entry(node: Any, path: tuple[Any, ...], leaf: Any, sizes: Sizes) -> Entry:
    """The entry of the leaf at a path, which is walked through the fields' metadata."""
    parts: list[str] = []
    layout, layer_part = None, None
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            metadata = next(field.metadata for field in fields(node) if field.name == key.name)
            parts.append(metadata.get("name") or key.name)
            layout = metadata.get("layout")
            node = getattr(node, key.name)
            if metadata.get("stacked"):
                layer_part = len(parts)
                parts.append("")
        else:
            index = key.idx if isinstance(key, jax.tree_util.SequenceKey) else key.key
            parts.append(str(index))
            node = node[index]
    used = {} if layout is None else {name: size for name, size in sizes.items() if name in _axis_names(layout)}
    if layer_part is None:
        return Entry((".".join(parts),), layout, False, leaf, used)
    before, after = parts[:layer_part], parts[layer_part + 1 :]
    names = tuple(".".join([*before, str(layer), *after]) for layer in range(leaf.shape[0]))
    return Entry(names, layout, True, leaf, used)


def _axis_names(layout: str) -> set[str]:
    """The axis names in an einops pattern."""
    return set(layout.replace("->", " ").replace("(", " ").replace(")", " ").split())


def expected(template: Any, sizes: Sizes | None = None) -> dict[str, Shape]:
    """Name and shape of every tensor that a checkpoint of the template has.

    `template` is a module of arrays or `jax.ShapeDtypeStruct`s (`jax.eval_shape` of an init function makes one). Fields
    that are static or None have no tensor.
    """
    return {name: entry.file_shape for entry in entries(template, sizes) for name in entry.names}


def fill(
    template: Template,
    tensors: Mapping[str, Any],
    sizes: Sizes | None = None,
    *,
    dtype: Callable[[str], DTypeLike | None] | DTypeLike | None = None,
    place: Callable[[str, Shape], Sharding | None] | None = None,
    what: str = "the checkpoint",
) -> Template:
    """The template with arrays read from a checkpoint, tensor by tensor.

    `tensors` maps names to arrays in the file's layout: an open checkpoint's, or jax or numpy arrays (jax arrays may be
    traced). `dtype` is one for all, a function of the tensor's name, or None for what is stored; `place` gives the
    sharding of a field of that name and shape. ValueError, naming every tensor that is missing, unused or of another
    shape, where `what` does not fit.
    """
    leaves = entries(template, sizes)
    _check_fit(leaves, tensors, what, type(template).__name__)
    dtype_of = dtype if callable(dtype) and not isinstance(dtype, type) else lambda _: dtype
    return jax.tree.unflatten(jax.tree.structure(template), [_read(entry, tensors, dtype_of(entry.names[0]), place) for entry in leaves])


def _read(entry: Entry, tensors: Mapping[str, Any], dtype: Any, place: Callable[[str, Shape], Sharding | None] | None) -> jax.Array:
    """The array of one leaf. From files no more is held on the host than the part that goes to one device, in its final dtype."""
    shape, sharding = tuple(entry.leaf.shape), None if place is None else place(entry.names[0], entry.leaf.shape)
    first = tensors[entry.names[0]]
    if isinstance(first, jax.Array):
        layers = [entry.to_field(tensors[name]) for name in entry.names]
        array = jnp.stack(layers) if entry.stacked else layers[0]
        array = array if dtype is None else array.astype(dtype)
        return array if sharding is None else jax.device_put(array, sharding)
    dtype = np.asarray(first).dtype if dtype is None else dtype
    if sharding is None:
        return jax.device_put(_part(entry, tensors, dtype, tuple(slice(0, size) for size in shape)))
    parts: dict[str, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        """Devices that hold the same part share one reading of it."""
        if (key := str(index)) not in parts:
            parts[key] = _part(entry, tensors, dtype, index)
        return parts[key]

    return jax.make_array_from_callback(shape, sharding, part)


def _part(entry: Entry, tensors: Mapping[str, Any], dtype: Any, index: tuple[slice, ...]) -> np.ndarray:
    """A slice of a leaf, read layer by layer."""
    names, rest = (entry.names[index[0]], index[1:]) if entry.stacked else (entry.names, index)
    shape = tuple(len(range(*part.indices(size))) for part, size in zip(index, entry.leaf.shape, strict=True))
    whole = _aligned(shape, dtype)
    for i, name in enumerate(names):
        whole[i if entry.stacked else ...] = entry.to_field(np.asarray(tensors[name]))[rest]
    return whole


def _aligned(shape: Shape, dtype: DTypeLike) -> np.ndarray:
    """An array of any content that JAX on a CPU takes as it is instead of copying it: what it asks for is 64-byte alignment."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def _check_fit(leaves: list[Entry], tensors: Mapping[str, Any], what: str, model: str) -> None:
    """ValueError unless the tensors are exactly those of the leaves."""
    shapes = {name: entry.file_shape for entry in leaves for name in entry.names}
    missing = [name for name in shapes if name not in tensors]
    unused = [name for name in tensors if name not in shapes]
    wrong = [(name, tuple(tensors[name].shape), shape) for name, shape in shapes.items() if name in tensors]
    wrong = [f"{name}: file {found}, model {shape}" for name, found, shape in wrong if found != shape]
    problems = [
        f"{label} {len(found)} ({', '.join(found[:8])}{', ...' if len(found) > 8 else ''})"
        for label, found in (("missing", missing), ("unused", unused), ("wrong shape", wrong))
        if found
    ]
    if problems:
        raise ValueError(f"{what} does not fit {model}: {'; '.join(problems)}.")


def not_finite(weights: Any, sizes: Sizes | None = None) -> list[str]:
    """The names of the tensors that have a NaN or an infinity."""
    found = []
    for entry in entries(weights, sizes):
        layers = entry.leaf.reshape(len(entry.names), -1)
        found += [name for name, fine in zip(entry.names, np.asarray(jnp.isfinite(layers).all(1)), strict=True) if not fine]
    return found


def to_tensors(weights: Any, sizes: Sizes | None = None) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint, by name and in the file's layout: the inverse of `fill`."""
    return dict(_tensors(weights, sizes))


def _tensors(weights: Any, sizes: Sizes | None) -> Iterator[tuple[str, np.ndarray]]:
    for entry in entries(weights, sizes):
        array = np.asarray(entry.leaf)
        for i, name in enumerate(entry.names):
            yield name, entry.to_file(array[i] if entry.stacked else array)
