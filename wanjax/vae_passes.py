"""How a video goes through the VAE's networks: chunk by chunk, in tiles or strips, over devices; each wraps one function of one chunk.

None of the ways through changes what is computed, but for tiles, whose edges see zeros beyond them. The networks' middle, where
every position attends to every other, is never cut in tiles: at the latents' size it is small.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from wanjax.sharding import PictureSplit, split_picture
from wanjax.vae_blocks import Cache, First, Way
from wanjax.vae_config import VAEConfig
from wanjax.vae_convs import Padding, Part, Sides
from wanjax.vae_model import VAE, Levels, Step, decode_chunk, encode_chunk

PIXELS = 1 << 15
"""Pixels of the latent frames that a chunk has by default: fewer leave the cores of a CPU waiting for weights."""

LARGE = 1 << 15
"""Pixels of a video from which a CPU's cores have enough to do with two of its frames."""

STRIPS = 16
"""Strips that a picture is cut in on a TPU, at the most: as many as there are sublanes for bfloat16."""


class Passes(NamedTuple):
    """How a video goes through: latent frames at a time, pixels of a tile, whether the backward pass computes again, where it lies.

    `strips`: whether pictures are cut in strips that go through side by side. `alike`: whether the first latent frame goes through
    as the others do, which takes the time of one chunk more, less to compile, and less memory backwards. `few`: see `Way`.
    """

    chunk: int
    tile: int | None = None
    remat: bool = False
    split: PictureSplit | None = None
    strips: bool = False
    alike: bool = False
    few: int = 4

    def way(self, first: First, part: Part | None) -> Way:
        """The way of one chunk."""
        return Way(first, part, self.remat, self.few)


def choose_passes(
    config: VAEConfig, latents: tuple[int, ...], *, chunk: int | None, tile: int | None, remat: bool = False, mesh: Mesh | None
) -> Passes:
    """The passes for latents of shape (b, c, t, h, w). ValueError for sizes that cannot be.

    By default as many latent frames go through at a time as have 32,768 pixels, one at the least, and leave no rest.
    """
    stride = config.stride
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk is the number of latent frames that go through at a time, at least 1; got {chunk}.")
    if tile is not None and (tile < 8 * stride or tile % stride):
        nearest = max(round(tile / stride), 8) * stride
        raise ValueError(f"tile is a number of pixels, a multiple of {stride} and at least {8 * stride}; got {tile}: try {nearest}.")
    if tile is not None and mesh is not None:
        raise ValueError("tile and mesh both cut the picture: give one of them.")
    b, _, t, h, w = latents
    if chunk is None:
        most = max(min(PIXELS // (h * w * stride**2), t - 1), 1)
        chunk = next(size for size in range(most, 0, -1) if (t - 1) % size == 0)
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    tpu = platform == "tpu"
    split = None if mesh is None else split_picture(mesh, b, h, w)
    few = 2 if platform == "cpu" and h * w * stride**2 > LARGE else 4
    return Passes(chunk, tile, remat, split, strips=tpu, alike=(tpu or remat) and chunk == 1, few=few)


def decoder_step(weights: VAE, passes: Passes) -> Step:
    """The decoder on consecutive latent frames."""
    return _step(decode_chunk, weights, passes, 1)


def encoder_step(weights: VAE, passes: Passes) -> Step:
    """The encoder on consecutive frames."""
    return _step(encode_chunk, weights, passes, weights.config.stride // (weights.config.patch_size or 1))


def _step(network: Callable[..., tuple[Array, Cache]], weights: VAE, passes: Passes, cells: int) -> Step:
    """A network in strips, or its levels in tiles (and those in strips), where that is asked for.

    Its input has `cells` rows for each latent.
    """

    def in_parts(levels: Levels) -> Step:
        if passes.strips:
            return in_strips(levels, passes, cells)
        return lambda x, cache, first: levels(x, cache, passes.way(first, passes.split))

    def tiled(levels: Levels) -> Levels:
        assert passes.tile is not None
        step = in_tiles(in_parts(levels), passes.tile // weights.config.stride, cells)
        return lambda x, cache, way: step(x, cache, way.first)

    if passes.tile is None:
        return _again(in_parts(lambda x, cache, way: network(x, weights, cache, way)), passes)
    return _again(lambda x, cache, first: network(x, weights, cache, passes.way(first, None), tiled), passes)


def _again(step: Step, passes: Passes) -> Step:
    """The step, computed again in the backward pass where that is asked for."""
    if not passes.remat:
        return step
    return lambda x, cache, first: jax.checkpoint(lambda x, cache: step(x, cache, first))(x, cache)


def no_history(step: Step, chunk: Float[Array, "b t h w c"]) -> Cache:
    """The cache before the first chunk, of the same arrays as before any other."""
    shapes = jax.eval_shape(lambda x: step(x, {}, jnp.bool_(True))[1], chunk)
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def in_chunks(step: Step, x: Float[Array, "b t h w c"], size: int, alike: bool) -> Float[Array, "b t2 h2 w2 c2"]:
    """`step` over the first frame alone, then over `size` frames at a time, then over what remains; see `Passes` for `alike`."""
    head, rest = x[:, :1], x[:, 1:]
    if alike:
        chunks = rearrange(jnp.pad(x, ((0, 0), (size - 1, 0), *((0, 0),) * 3)), "b (n t) h w c -> n b t h w c", t=size)

        def numbered(cache: Cache, chunk: tuple[Array, Array]) -> tuple[Cache, Array]:
            y, cache = step(chunk[1], cache, chunk[0] == 0)
            return cache, y

        ys = lax.scan(numbered, no_history(step, chunks[0]), (jnp.arange(len(chunks)), chunks))[1]
        return rearrange(ys, "n b t h w c -> b (n t) h w c")[:, ys.shape[2] - 1 :]
    y, cache = step(head, {}, True)
    parts = [y]
    count = rest.shape[1] // size
    if count > 1:
        chunks = rearrange(rest[:, : count * size], "b (n t) h w c -> n b t h w c", n=count)

        def scanned(cache: Cache, x: Float[Array, "b t h w c"]) -> tuple[Cache, Float[Array, "b t2 h2 w2 c2"]]:
            y, cache = step(x, cache, False)
            return cache, y

        cache, ys = lax.scan(scanned, cache, chunks)
        parts.append(rearrange(ys, "n b t h w c -> b (n t) h w c"))
        rest = rest[:, count * size :]
    while rest.shape[1]:
        y, cache = step(rest[:, :size], cache, False)
        parts.append(y)
        rest = rest[:, size:]
    return jnp.concatenate(parts, axis=1)


def in_tiles(step: Step, size: int, cells: int) -> Step:
    """`step` over overlapping tiles of `size` latents, one after the other, blended where they overlap.

    The cache holds that of every tile, on a new leading axis.
    """

    def tiled(x: Float[Array, "b t h w c"], cache: Cache, first: First) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        h, w = x.shape[2] // cells, x.shape[3] // cells
        th, tw = min(size, h), min(size, w)
        places = list(itertools.product(tile_starts(h, th), tile_starts(w, tw)))
        cut = lambda i, j: x[:, :, i * cells : (i + th) * cells, j * cells : (j + tw) * cells]
        tiles = jnp.stack([cut(i, j) for i, j in places])
        y, cache = lax.map(lambda tile: step(tile[0], tile[1], first), (tiles, cache))
        return _blended(y, places, (h, w), y.shape[3] // th), cache

    return tiled


def overlap(tile: int) -> int:
    """How many latents two tiles share: a quarter of one, and 8 where that is half of it or less, which is how far a convolution sees."""
    return max(-(-tile // 4), min(8, tile // 2))


def tile_starts(whole: int, tile: int) -> tuple[int, ...]:
    """Where tiles begin that cover `whole`, evenly spread, each sharing its `overlap` with the next at the least."""
    count = 1 if whole == tile else math.ceil((whole - tile) / (tile - overlap(tile))) + 1
    return tuple(int(start) for start in np.round(np.linspace(0, whole - tile, count)))


def _blended(y: Float[Array, "n b t th tw c"], places: list[tuple[int, int]], size: tuple[int, int], up: int) -> Float[Array, "b t h w c"]:
    """Tiles put in their places, `up` rows for each latent, each weighed by how far inside it a row and a column lie."""
    _, b, t, th, tw, c = y.shape
    h, w = size[0] * up, size[1] * up
    total, weights = jnp.zeros((b, t, h, w, c), jnp.float32), np.zeros((h, w, 1), np.float32)
    for tile, (i, j) in zip(y, places, strict=True):
        rows, columns = _inside(i * up, th, h, overlap(th // up) * up), _inside(j * up, tw, w, overlap(tw // up) * up)
        weight = np.minimum.outer(rows, columns)[..., None].astype(np.float32)
        total = total.at[:, :, i * up : i * up + th, j * up : j * up + tw].add(tile.astype(jnp.float32) * weight)
        weights[i * up : i * up + th, j * up : j * up + tw] += weight
    return (total / weights).astype(y.dtype)


def _inside(start: int, length: int, whole: int, shared: int) -> np.ndarray:
    """The weight of each row of a tile: next to nothing near an edge within the picture, 1 from 5/8 of the overlap on."""
    depth = (np.arange(length) + 0.5 - 3 / 8 * shared) / (shared / 4)
    ramp = np.clip(depth, 1e-6, 1)
    first = np.ones(length) if start == 0 else ramp
    last = np.ones(length) if start + length == whole else ramp[::-1]
    return np.minimum(first, last)


class Strips(NamedTuple):
    """Pictures cut in `number` strips of rows (axis 2) or columns (axis 3), which lie side by side on the batch axis.

    A TPU's convolutions want a batch of 8 or 16 next to the channels. Given one they make it of the columns themselves, around each
    convolution anew, at three times the cost. `beyond` has what lies around the picture on the other axis.
    """

    axis: int
    number: int
    beyond: Part | None

    def apart(self, x: Float[Array, "b t h w c"]) -> Float[Array, "b_n t h2 w2 c"]:
        """Pictures in strips."""
        return rearrange(x, "b t (n h) w c -> (b n) t h w c" if self.axis == 2 else "b t h (n w) c -> (b n) t h w c", n=self.number)

    def together(self, x: Float[Array, "b_n t h w c"]) -> Float[Array, "b t h2 w2 c"]:
        """Strips as pictures."""
        return rearrange(x, "(b n) t h w c -> b t (n h) w c" if self.axis == 2 else "(b n) t h w c -> b t h (n w) c", n=self.number)

    def extend(self, x: Float[Array, "b_n t h w c"], rows: Sides, columns: Sides) -> tuple[Float[Array, "b_n t h2 w2 c"], Padding]:
        """Each strip with its neighbours' edges, zeros beyond the picture; see `vae_convs.Part`."""
        low, high = rows if self.axis == 2 else columns
        left: Padding = ((0, 0), columns) if self.axis == 2 else (rows, (0, 0))
        if self.beyond is not None:
            x, left = self.beyond.extend(x, *left)
        parts = [x]
        if low:
            parts.insert(0, self._moved(lax.slice_in_dim(x, x.shape[self.axis] - low, None, axis=self.axis), 1))
        if high:
            parts.append(self._moved(lax.slice_in_dim(x, 0, high, axis=self.axis), -1))
        return jnp.concatenate(parts, axis=self.axis), left

    def whole(self, x: Float[Array, "b_n t h w c"]) -> Float[Array, "b t h2 w2 c"]:
        """The pictures, as large as they are over devices."""
        x = self.together(x)
        return x if self.beyond is None else self.beyond.whole(x)

    def _moved(self, edges: Float[Array, "b_n t h w c"], by: int) -> Float[Array, "b_n t h w c"]:
        """Edges at the strip after (1) or before (-1) their own; zeros at the one that none comes to."""
        edges = rearrange(edges, "(b n) t h w c -> b n t h w c", n=self.number)
        kept, padding = (edges[:, :-1], (1, 0)) if by == 1 else (edges[:, 1:], (0, 1))
        return rearrange(jnp.pad(kept, ((0, 0), padding, *((0, 0),) * 4)), "b n t h w c -> (b n) t h w c")


def in_strips(levels: Levels, passes: Passes, cells: int) -> Step:
    """`levels` on pictures cut in strips, along an axis that is not cut over devices; as they are where no good number divides.

    The cache stays in strips.
    """

    def cut(x: Float[Array, "b t h w c"], cache: Cache, first: First) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        split = passes.split
        over = (1, 1) if split is None else (split.mesh.shape["rows"], split.mesh.shape["columns"])
        axis, count = choose_strips((x.shape[2] // cells, x.shape[3] // cells), over)
        if count == 1:
            return levels(x, cache, passes.way(first, split))
        strips = Strips(axis, count, split)
        y, cache = levels(strips.apart(x), cache, passes.way(first, strips))
        return strips.together(y), cache

    return cut


def choose_strips(size: tuple[int, int], over: tuple[int, int]) -> tuple[int, int]:
    """Axis (2 rows, 3 columns) and number of strips of pictures of `size` latents, cut over so many devices each way.

    The longer side that is not cut over devices and has a divisor from 8 to 16; (2, 1), one strip, where there is none.
    """
    counts = [max((n for n in range(STRIPS // 2, STRIPS + 1) if side % n == 0), default=1) for side in size]
    free = [i for i in (0, 1) if over[i] == 1 and counts[i] > 1]
    best = max(free, key=lambda i: size[i], default=None)
    return (2, 1) if best is None else (best + 2, counts[best])


def on_devices(
    run: Callable[[Any, VAE, Cache], tuple[Any, Cache]], split: PictureSplit | None, cells: int
) -> Callable[[Any, VAE, Cache], tuple[Any, Cache]]:
    """`run(frames, weights, cache)` with a part of the frames (`b c t h w`, `cells` rows for each latent) on every device.

    What it returns has the rows of the whole picture again; the cache stays where it is.
    """
    if split is None:
        return run
    frames, cached = P("videos", None, None, "rows", "columns"), P("videos", None, "rows", "columns")
    over = jax.shard_map(run, mesh=split.mesh, in_specs=(frames, P(), cached), out_specs=(frames, cached), check_vma=False)

    def cut(y: Float[Array, "b c t h w"]) -> Float[Array, "b c t h2 w2"]:
        padded_height = -(-split.height // split.mesh.shape["rows"]) * split.mesh.shape["rows"]
        up = y.shape[3] // padded_height
        return y[..., : split.height * up, : split.width * up]

    def whole(x: Any, weights: VAE, cache: Cache) -> tuple[Any, Cache]:
        y, cache = over(split.padded(x, cells), weights, cache)
        return jax.tree.map(cut, y), cache

    return whole
