"""How a video goes through the VAE's networks: chunk by chunk, in tiles, over devices; each wraps the same function of one chunk.

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
from wanjax.vae_blocks import Cache
from wanjax.vae_config import VAEConfig
from wanjax.vae_model import VAE, Step, decode_chunk, encode_chunk

POSITIONS = 512
"""Latent positions that a chunk has by default: fewer leave the cores of a CPU waiting for weights."""


class Passes(NamedTuple):
    """How a video goes through: latent frames at a time, pixels of a tile, whether the backward pass computes again, where it lies."""

    chunk: int
    tile: int | None = None
    remat: bool = False
    split: PictureSplit | None = None


def choose_passes(
    config: VAEConfig, latents: tuple[int, ...], *, chunk: int | None, tile: int | None, remat: bool = False, mesh: Mesh | None
) -> Passes:
    """The passes for latents of shape (b, c, t, h, w). ValueError for sizes that cannot be.

    By default as many latent frames go through at a time as have 512 positions, one at the least, and leave no rest.
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
        most = max(min(POSITIONS // (h * w), t - 1), 1)
        chunk = next(size for size in range(most, 0, -1) if (t - 1) % size == 0)
    return Passes(chunk, tile, remat, None if mesh is None else split_picture(mesh, b, h, w))


def decoder_step(weights: VAE, passes: Passes) -> Step:
    """The decoder on consecutive latent frames."""
    wrap = _tiling(passes, weights.config, 1)
    return _again(lambda x, cache, first: decode_chunk(x, weights, cache, first, passes.split, wrap), passes)


def encoder_step(weights: VAE, passes: Passes) -> Step:
    """The encoder on consecutive frames."""
    wrap = _tiling(passes, weights.config, weights.config.stride // (weights.config.patch_size or 1))
    return _again(lambda x, cache, first: encode_chunk(x, weights, cache, first, passes.split, wrap), passes)


def _again(step: Step, passes: Passes) -> Step:
    """The step, computed again in the backward pass where that is asked for."""
    return jax.checkpoint(step, static_argnums=2) if passes.remat else step


def _tiling(passes: Passes, config: VAEConfig, cells: int) -> Callable[[Step], Step]:
    """What makes a step one over tiles where that is asked for; its input has `cells` rows for each latent."""
    return lambda step: step if passes.tile is None else in_tiles(step, passes.tile // config.stride, cells)


def in_chunks(step: Step, head: Float[Array, "b one h w c"], rest: Float[Array, "b t h w c"], size: int) -> Float[Array, "b t2 h2 w2 c2"]:
    """`step` over the first frame alone, then over `size` frames at a time, then over what remains."""
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

    def tiled(x: Float[Array, "b t h w c"], cache: Cache, first: bool) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
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
