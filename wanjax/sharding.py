"""Many devices: the mesh, where each weight lies, and attention between devices. The only module that knows a mesh.

A mesh has four axes of any size: `data` (videos, and guidance's two branches), `fsdp` (weights stored in parts, gathered
a layer at a time), `context` (tokens) and `tensor` (heads and feed-forward channels). Everything but attention is left to
the compiler, which follows the layouts said here; attention across `context` is written out, and exact for any number of
tokens, heads and devices.
"""

import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from wanjax.attention import attention, last_attention, partial_attention

AXES = ("data", "fsdp", "context", "tensor")
Tree = TypeVar("Tree")


def make_mesh(*, data: int = 1, fsdp: int = 1, context: int = 1, tensor: int = 1, devices: Any = None) -> Mesh:
    """A mesh over `devices` (default: all there are), neighbours along the last axes; one size may be -1, for whatever remains.

    ValueError unless the sizes multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes: dict[str, int] = {"data": data, "fsdp": fsdp, "context": context, "tensor": tensor}
    said = ", ".join(f"{name}={size}" for name, size in sizes.items())
    free = [name for name, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    if len(free) > 1 or any(size < 1 and size != -1 for size in sizes.values()):
        raise ValueError(f"mesh sizes are at least 1, and one may be -1 (whatever remains); got {said}.")
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"a mesh has as many places as devices, {len(devices)} here; got {said}: make one of them -1 to fill up.")
    return Mesh(np.array(devices, dtype=object).reshape(tuple(sizes.values())), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def join_processes(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """Make this process one of several that compute together; before anything else asks for a device.

    `coordinator` is the host:port of process 0, the same in all; without one, what a TPU pod or a cluster's scheduler has put
    into the environment counts, and where that says nothing this is the only process. ValueError for some of the three alone.
    """
    if coordinator is not None and num_processes is not None and process_id is not None:
        if not 0 <= process_id < num_processes:
            raise ValueError(f"process ids are 0 to {num_processes - 1} of {num_processes} processes; got {process_id}.")
        jax.distributed.initialize(coordinator, num_processes, process_id)
    elif (coordinator, num_processes, process_id) != (None, None, None):
        given = f"{coordinator}, {num_processes}, {process_id}"
        raise ValueError(f"a process that joins others needs coordinator, number of processes and its id; got {given}.")
    elif len(os.environ.get("TPU_WORKER_HOSTNAMES", "").split(",")) > 1 or int(os.environ.get("SLURM_NTASKS", "1")) > 1:
        jax.distributed.initialize()


# --- weights ---

# Stored in parts over both: a device that has only some of the tokens still needs whole layers, but one at a time.
PARTS = ("fsdp", "context")
_INTO, _OUT_OF = (PARTS, "tensor"), ("tensor", PARTS)

# Weight names to the mesh axes of their last dimensions; the first rule that matches holds. Linear maps are (in, out).
RULES: tuple[tuple[str, tuple[Any, ...]], ...] = (
    # transformer
    (r"attn[12]\.to_[qkv]\.weight|ffn\.net\.0\.proj\.weight", _INTO),
    (r"attn[12]\.to_[qkv]\.bias|attn[12]\.norm_[qk]\.weight|ffn\.net\.0\.proj\.bias", ("tensor",)),
    (r"attn[12]\.to_out\.0\.weight|ffn\.net\.2\.weight", _OUT_OF),
    (r"attn[12]\.to_out\.0\.bias|ffn\.net\.2\.bias|norm2\.|scale_shift_table", ()),
    (r"condition_embedder\..*\.weight|time_proj\.weight|proj_out\.weight", _INTO),
    (r"condition_embedder\..*\.bias|proj_out\.bias|patch_embedding\.", ()),
    # UMT5
    (r"SelfAttention\.[qkv]\.weight|DenseReluDense\.wi_[01]\.weight", _INTO),
    (r"SelfAttention\.o\.weight|DenseReluDense\.wo\.weight", _OUT_OF),
    (r"relative_attention_bias\.weight", (None, "tensor")),
    (r"shared\.weight", (None, (*PARTS, "tensor"))),
    (r"layer_norm\.weight", ()),
    # VAE: small, and every device decodes a part of the picture with all of it
    (r"^(post_)?quant_conv\.|^(encoder|decoder)\.(conv_in|conv_out|norm_out|mid_block|down_blocks|up_blocks)\.", ()),
)


def weight_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where a weight lies: `name` as in the checkpoint, `shape` as in the module. ValueError for a name that no rule knows.

    An axis that does not divide its dimension is left out: that dimension is then whole on every device along it.
    """
    axes = next((axes for pattern, axes in RULES if re.search(pattern, name)), None)
    if axes is None:
        raise ValueError(f"no rule says where weight {name} of shape {shape} lies: add one to RULES.")
    spec = [_dividing(mesh, size, axis) for size, axis in zip(shape[len(shape) - len(axes) :], axes, strict=True)]
    return NamedSharding(mesh, P(*(None,) * (len(shape) - len(axes)), *spec))


def _dividing(mesh: Mesh, size: int, axes: str | tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Those of the axes, from the first on, whose product divides the size."""
    chosen: list[str] = []
    for axis in (axes,) if isinstance(axes, str) else axes or ():
        if mesh.shape[axis] > 1 and size % (mesh.shape[axis] * math.prod(mesh.shape[a] for a in chosen)) == 0:
            chosen.append(axis)
    return tuple(chosen) or None


def replicated(mesh: Mesh, tree: Tree) -> Tree:
    """The arrays whole on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


# --- tokens ---


class Way(NamedTuple):
    """How attention crosses `context`: groups of `heads` devices trade tokens for heads, `ring` groups pass keys around."""

    heads: int
    ring: int
    why: str


HIDDEN = 8192
"""Tokens on a device from which attention over them takes longer than handing its keys and values to a neighbour, on any TPU or GPU."""


TILE, MANY_TILES = 16, 128
"""Rows of a bfloat16 tile on a TPU, and tiles of tokens on a device from which filling the last one costs less than a percent."""


def choose_way(devices: int, heads: int, kind: str = "auto", tokens: int = 0) -> Way:
    """The way for so many devices on `context`, heads and `tokens` on each: "ring", "ulysses" or "2d", and "auto" one of these.

    A ring moves k and v once a device, while others are attended to; with many tokens that costs nothing. Trading heads moves q, k, v
    and the output once, whatever the number of devices, and everybody waits: as many devices trade as the heads divide into, and
    the rest form rings ("2d"). ValueError where "ulysses" cannot be.
    """
    if kind not in ("auto", "2d", "ring", "ulysses"):
        raise ValueError(f'attention across devices is "auto", "ring", "ulysses" or "2d"; got {kind!r}.')
    if kind == "ulysses" and heads % devices:
        raise ValueError(f'"ulysses" gives each of {devices} devices whole heads, and {heads} heads do not divide: use "auto" or "ring".')
    if kind == "auto" and tokens >= HIDDEN:
        return Way(1, devices, f"{tokens} tokens on each of {devices} devices: a ring, hidden behind attention over so many")
    trading = 1 if kind == "ring" else math.gcd(devices, heads)
    why = f"{heads} heads on {devices} devices: {trading} of them trade tokens for heads, in rings of {devices // trading}"
    return Way(trading, devices // trading, why)


@dataclass(frozen=True)
class Layout:
    """How a transformer's rows and blocks lie on a mesh, and its attention between them; hashable, so it may be a static argument.

    Hand it to `velocity(layout=)`. `kind` is one of `choose_way`'s.
    """

    mesh: Mesh
    kind: str = "auto"

    def rows(self, x: Shaped[Array, "..."], axis: int, batch: int | None = None, length: int | None = None) -> Shaped[Array, "..."]:
        """Spread tokens over `context`, padded at their end to divide or to `length`, and videos over `data` and `fsdp`.

        Where a TPU has several videos, to whole tiles on every device: their keys and values are copied on their way around else.
        """
        size, context = x.shape[axis], self.mesh.shape["context"]
        tile = TILE if batch is not None and self._tiled(x.shape[batch], size // context) else 1
        missing = -size % (context * tile) if length is None else length - size
        if missing:
            x = jnp.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)])
        spec: list[Any] = [None] * x.ndim
        spec[axis] = "context"
        if batch is not None:
            spec[batch] = self._videos(x.shape[batch])
        return lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*spec)))

    def warn_of_repeated_work(self, videos: int, heads: int) -> None:
        """Say which devices compute what others compute too, because videos or heads do not divide among them."""
        spread = math.prod(self.mesh.shape[axis] for axis in self._videos(videos) or ())
        over = self.mesh.shape["data"] * self.mesh.shape["fsdp"]
        if spread < over:
            said = f"{videos} videos (with guidance's branches) do not divide among data x fsdp = {over} devices"
            warnings.warn(f"{said}: every {over // spread} of them do the same; `context` splits a single video.", stacklevel=4)
        if heads % self.mesh.shape["tensor"]:
            said = f"{heads} heads do not divide among tensor = {self.mesh.shape['tensor']} devices"
            warnings.warn(f"{said}: all of them do the same in the attention.", stacklevel=4)

    def _tiled(self, batch: int, tokens: int) -> bool:
        """Whether so many videos of so many tokens a device are padded to whole tiles."""
        videos = batch // math.prod(self.mesh.shape[axis] for axis in self._videos(batch) or ())
        return self.mesh.devices.flat[0].platform == "tpu" and videos > 1 and tokens >= MANY_TILES * TILE

    def block(self, weights: Tree) -> Tree:
        """One layer's weights as it computes with them: gathered from their parts, heads and channels still on `tensor`."""
        return jax.tree_util.tree_map_with_path(self._gathered, weights)

    def _gathered(self, path: tuple[Any, ...], leaf: Array) -> Array:
        name = jax.tree_util.keystr(path)
        spec: list[Any] = [None] * leaf.ndim
        if re.search(r"to_[qkv]\.|norm_[qk]\.|\.up\.", name):
            spec[-1] = _dividing(self.mesh, leaf.shape[-1], "tensor")
        elif re.search(r"(to_out|down)\.weight", name):
            spec[0] = _dividing(self.mesh, leaf.shape[0], "tensor")
        return lax.with_sharding_constraint(leaf, NamedSharding(self.mesh, P(*spec)))

    def _videos(self, batch: int) -> tuple[str, ...] | None:
        return _dividing(self.mesh, batch, ("data", "fsdp"))

    def locally(self, function: Callable[[Array, Tree], Array], x: Shaped[Array, "b s c"], rope: Tree) -> Shaped[Array, "b s c"]:
        """A function of tokens, their heads in their channels, and of their angles (s, d), by each device of its own."""
        heads = x.shape[2] // jax.tree.leaves(rope)[0].shape[1]
        spec = P(self._videos(x.shape[0]), "context", self._heads(heads))
        angles = P("context", None)
        return jax.shard_map(function, mesh=self.mesh, in_specs=(spec, angles), out_specs=spec, check_vma=False)(x, rope)

    def attend(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], valid: int | None = None
    ) -> Float[Array, "b s n d"]:
        """Attention of all tokens over all tokens, each device starting from and ending with its own."""
        way = self.way(q.shape[1], q.shape[2])
        return self._attend_locally(partial(_attend_across, way=way, valid=valid), q, k, v, "context")

    def cross_attend(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], valid: int | None = None
    ) -> Float[Array, "b s n d"]:
        """Attention of each device's tokens over the text, which every device has whole."""
        return self._attend_locally(partial(attention, valid=valid), q, k, v, None)

    def way(self, tokens: int, heads: int) -> Way:
        """How attention of so many tokens and heads crosses `context`."""
        context = self.mesh.shape["context"]
        here = heads // (self.mesh.shape["tensor"] if self._heads(heads) else 1)
        return choose_way(context, here, self.kind, -(-tokens // context))

    def _heads(self, count: int) -> tuple[str, ...] | None:
        return _dividing(self.mesh, count, "tensor")

    def _attend_locally(
        self,
        function: Callable[..., Array],
        q: Float[Array, "b s n d"],
        k: Float[Array, "b l n d"],
        v: Float[Array, "b l n d"],
        keys: str | None,
    ) -> Float[Array, "b s n d"]:
        """`function` on every device, of its own queries and of the keys that it has along the axis `keys`."""
        d, videos, heads = q.shape[3], self._videos(q.shape[0]), self._heads(q.shape[2])
        local = lambda *qkv: _join(function(*(_split(x, d) for x in qkv)))
        rows, columns = P(videos, "context", heads), P(videos, keys, heads)
        across = jax.shard_map(local, mesh=self.mesh, in_specs=(rows, columns, columns), out_specs=rows, check_vma=False)
        return _split(across(_join(q), _join(k), _join(v)), d)


def _attend_across(
    q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], way: Way, valid: int | None
) -> Float[Array, "b s n d"]:
    """Attention over the tokens of all devices on `context`, inside a `shard_map`; this device holds those of its place in order."""
    groups = [[ring * way.heads + i for i in range(way.heads)] for ring in range(way.ring)]
    trade = lambda x, cut, joined: _split(
        lax.all_to_all(_join(x), "context", cut, joined, axis_index_groups=groups, tiled=True), q.shape[3]
    )
    if way.heads > 1:
        q, k, v = (trade(x, 2, 1) for x in (q, k, v))
    out = _ring(q, k, v, way, valid) if way.ring > 1 else attention(q, k, v, valid)
    return trade(out, 1, 2) if way.heads > 1 else out


def _join(x: Float[Array, "b s n d"]) -> Float[Array, "b s c"]:
    """Heads side by side in the channels, as projections write and read them: in that layout nothing is copied on the way."""
    return rearrange(x, "b s n d -> b s (n d)")


def _split(x: Float[Array, "b s c"], d: int) -> Float[Array, "b s n d"]:
    return rearrange(x, "b s (n d) -> b s n d", d=d)


def _ring(
    q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], way: Way, valid: int | None
) -> Float[Array, "b s n d"]:
    """Keys and values go around the ring, ring - 1 hops; each hop is under way while the keys at hand are attended to."""
    length, place = k.shape[1], lax.axis_index("context") // way.heads
    onward = [(i, (i + way.heads) % (way.heads * way.ring)) for i in range(way.heads * way.ring)]
    total = None
    for hop in range(way.ring):
        owner = (place - hop) % way.ring
        counted = None if valid is None else valid - owner * length
        if hop == way.ring - 1:
            return last_attention(q, k, v, counted, total)
        coming = lax.ppermute((_join(k), _join(v)), "context", onward)
        total = partial_attention(q, k, v, counted, total)
        k, v = (_split(x, q.shape[3]) for x in coming)
    raise AssertionError("a ring has at least one device")


# --- pictures ---


@dataclass(frozen=True)
class PictureSplit:
    """How the frames of a batch of videos lie on a mesh: chosen once, from the latents, and held through all sizes above them.

    `mesh` has the same devices as the one it was made from, on axes `videos`, `rows` and `columns`; `height` and `width`
    are of the latents, and where they do not divide, the last devices hold rows or columns beyond the picture, kept at zero.
    """

    mesh: Mesh
    height: int
    width: int

    def padded(self, x: Shaped[Array, "..."], unit: int = 1) -> Shaped[Array, "..."]:
        """Frames with heights and widths on the last two axes, `unit` for each latent, padded so that they divide."""
        missing = (-self.height % self.mesh.shape["rows"] * unit, -self.width % self.mesh.shape["columns"] * unit)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size) for size in missing]) if any(missing) else x

    def extend(
        self, x: Float[Array, "b t h w c"], rows: tuple[int, int], columns: tuple[int, int]
    ) -> tuple[Float[Array, "b t h2 w2 c"], tuple[tuple[int, int], tuple[int, int]]]:
        """This device's part with its neighbours' rows and columns around it, zeros beyond the picture; inside `shard_map`.

        Along an axis that is not cut it stays as it is; the zeros that it still needs there come with it.
        """
        left = [rows, columns]
        for i, (axis, name, size) in enumerate(((2, "rows", self.height), (3, "columns", self.width))):
            parts, (low, high) = self.mesh.shape[name], left[i]
            if parts == 1:
                continue
            x = self._within(x, axis, name, size)
            # A device that nobody sends to receives zeros, which is what lies beyond the picture.
            before = lax.slice_in_dim(x, x.shape[axis] - low, None, axis=axis)
            after = lax.slice_in_dim(x, 0, high, axis=axis)
            if low:
                before = lax.ppermute(before, name, [(i, i + 1) for i in range(parts - 1)])
            if high:
                after = lax.ppermute(after, name, [(i + 1, i) for i in range(parts - 1)])
            x, left[i] = jnp.concatenate([before, x, after], axis=axis), (0, 0)
        return x, (left[0], left[1])

    def whole(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b t h2 w2 c"]:
        """The whole frames, of the latents' size; inside `shard_map`."""
        for axis, name, size in ((2, "rows", self.height), (3, "columns", self.width)):
            if self.mesh.shape[name] > 1:
                x = lax.slice_in_dim(lax.all_gather(x, name, axis=axis, tiled=True), 0, size, axis=axis)
        return x

    def _within(self, x: Float[Array, "b t h w c"], axis: int, name: str, size: int) -> Float[Array, "b t h w c"]:
        """Zero where a part reaches beyond the picture."""
        parts = self.mesh.shape[name]
        if size % parts == 0:
            return x
        here, latents = x.shape[axis], -(-size // parts)
        places = lax.axis_index(name) * here + jnp.arange(here)
        inside = places < size * here // latents
        return jnp.where(jnp.expand_dims(inside, [i for i in range(x.ndim) if i != axis]), x, 0)


def split_picture(mesh: Mesh, batch: int, height: int, width: int) -> PictureSplit:
    """Where a batch of latents lies: videos on as many devices as divide, then the width, else the height, else both, else padded.

    All axes of the mesh are used. Both together are cut as evenly as divides; where nothing divides, so that the fewest rows
    and columns are added.
    """
    videos = math.gcd(batch, mesh.size)
    rows, columns = choose_cut(mesh.size // videos, height, width)
    devices = mesh.devices.reshape(videos, rows, columns)
    return PictureSplit(Mesh(devices, ("videos", "rows", "columns"), axis_types=(AxisType.Auto,) * 3), height, width)


def choose_cut(devices: int, height: int, width: int) -> tuple[int, int]:
    """How many devices share the rows, and how many the columns, of a picture."""
    cuts = [(devices // columns, columns) for columns in range(devices, 0, -1) if devices % columns == 0]
    exact = [(rows, columns) for rows, columns in cuts if height % rows == 0 and width % columns == 0]
    alone = [cut for cut in exact if 1 in cut]
    if alone:
        return next((cut for cut in alone if cut[0] == 1), alone[0])
    if exact:
        return min(exact, key=lambda cut: height // cut[0] + width // cut[1])
    return min(cuts, key=lambda cut: -(-height // cut[0]) * -(-width // cut[1]))
