"""The Wan VAE, 2.1 (16 channels, 8 pixels a latent) and 2.2 (48 channels, 16 pixels): `encode` and `decode`.

A video of 4 (t - 1) + 1 frames has t latent frames: the first stands for one frame, every other for four. Both ways
run chunk by chunk, the first latent frame alone and then `chunk` latent frames a step in a `lax.scan` whose carry is
the cache of past frames (see vae_blocks.py); a `chunk` that covers everything runs without a scan. `decode_stream` and
`encode_stream` run the same steps one by one, for videos of any length in constant memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt8

from wanjax.vae_blocks import Cache
from wanjax.vae_config import VAE_2_1, VAE_2_2, VAEConfig
from wanjax.vae_convs import causal_conv
from wanjax.vae_inputs import Weights, as_vae, check_frames, check_latents, check_video
from wanjax.vae_model import VAE, init_vae
from wanjax.vae_passes import Passes, choose_passes, decoder_step, encoder_step, in_chunks, no_history, on_devices

__all__ = [
    "VAE",
    "VAE_2_1",
    "VAE_2_2",
    "Posterior",
    "VAEConfig",
    "decode",
    "decode_stream",
    "denormalize_latents",
    "encode",
    "encode_stream",
    "init_vae",
    "normalize_latents",
]


class Posterior(NamedTuple):
    """The encoder's diagonal Gaussian over latents; its mode is the mean."""

    mean: Float[Array, "b c t h w"]
    logvar: Float[Array, "b c t h w"]


def normalize_latents(mean: Float[Array | np.ndarray, "b c t h w"], config: VAEConfig) -> Float[Array, "b c t h w"]:
    """Raw VAE latents to the diffusion model's scale, (mean - latents_mean) / latents_std per channel, in float32."""
    offset, scale = _statistics(config)
    return (jnp.asarray(mean, jnp.float32) - offset) / scale


def denormalize_latents(z: Float[Array | np.ndarray, "b c t h w"], config: VAEConfig) -> Float[Array, "b c t h w"]:
    """The diffusion model's latents to raw VAE latents, z latents_std + latents_mean per channel, in float32."""
    offset, scale = _statistics(config)
    return jnp.asarray(z, jnp.float32) * scale + offset


def _statistics(config: VAEConfig) -> tuple[Float[Array, "c 1 1 1"], Float[Array, "c 1 1 1"]]:
    """Mean and standard deviation of each latent channel, in float32: bfloat16 would be off by up to 0.4 %."""
    mean, std = (jnp.asarray(v, jnp.float32)[:, None, None, None] for v in (config.latents_mean, config.latents_std))
    return mean, std


def decode(
    z: Float[Array | np.ndarray, "b c t h w"],
    weights: Weights,
    dtype: DTypeLike = jnp.float32,
    *,
    chunk: int | None = None,
    tile: int | None = None,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Float[Array, "b 3 4*t-3 H W"]:
    """Latents to video.

    `z` are raw VAE latents (`denormalize_latents` makes them from the diffusion model's). The video is in [-1, 1], of
    `dtype`, in which everything but statistics is computed. `weights` are a VAE or its tensors by checkpoint name.
    Raises ValueError or TypeError for latents that are not this VAE's.

    None of the rest changes what is computed, but for `tile`, and rounding. `chunk` latent frames go through at a time (by
    default few of large pictures, many of small ones): more is faster and takes more memory. `tile` is a number of pixels:
    pictures larger than that go through in overlapping tiles of that size, which are blended, for large
    pictures in less memory (that of one tile, and the caches of all).
    `remat` computes each chunk again in the backward pass, for gradients in less memory. `mesh` (of
    `wanjax.sharding.make_mesh`) cuts videos and pictures into a part for each of its devices.
    """
    vae = as_vae(weights)
    check_latents(z, vae)
    passes = choose_passes(vae.config, z.shape, chunk=chunk, tile=tile, remat=remat, mesh=mesh)
    return _decode(jnp.asarray(z), vae, dtype, passes)


def encode(
    video: Float[Array | np.ndarray, "b c f H W"],
    weights: Weights,
    dtype: DTypeLike = jnp.float32,
    *,
    chunk: int | None = None,
    tile: int | None = None,
    remat: bool = False,
    mesh: Mesh | None = None,
) -> Posterior:
    """Video to the posterior over its raw VAE latents, whose mean is what pipelines use.

    `video` is in [-1, 1], of 4 n + 1 frames, height and width multiples of the config's `stride`. See `decode` for
    `weights`, `dtype` and the rest.
    """
    vae = as_vae(weights)
    check_video(video, vae)
    passes = choose_passes(vae.config, _latent_shape(video, vae), chunk=chunk, tile=tile, remat=remat, mesh=mesh)
    return _encode(jnp.asarray(video), vae, dtype, passes)


def decode_stream(
    z: Float[Array | np.ndarray, "b c t h w"],
    weights: Weights,
    dtype: DTypeLike = jnp.float32,
    *,
    uint8: bool = False,
    chunk: int = 1,
    tile: int | None = None,
    mesh: Mesh | None = None,
) -> Iterator[Array]:
    """`decode`, in parts as they are made (`b 3 f H W`): one frame first, then four for each of `chunk` latent frames.

    Memory does not grow with the video's length, and while a chunk is looked at the next one is already being computed.
    `uint8` asks for frames as files and screens have them (`b f H W 3`), round(255 (video / 2 + 0.5)), converted on the device.
    Other arguments, values and errors (raised at the call, not at the first frame) are those of `decode`.
    """
    vae = as_vae(weights)
    check_latents(z, vae)
    passes = choose_passes(vae.config, z.shape, chunk=chunk, tile=tile, mesh=mesh)
    decoder = replace(vae, encoder=None, quant_conv=None)
    return _one_ahead(_decode_parts(jnp.asarray(z), _cast(decoder, dtype), passes, uint8))


def encode_stream(
    frames: Iterable[Array | np.ndarray],
    weights: Weights,
    dtype: DTypeLike = jnp.float32,
    *,
    chunk: int = 1,
    tile: int | None = None,
    mesh: Mesh | None = None,
) -> Iterator[Posterior]:
    """`encode` of a video that comes in parts: posteriors of one latent frame first, then of `chunk` at a time.

    `frames` gives the video part by part, of any number of frames each: `b 3 f H W` in [-1, 1], or uint8 `b f H W 3`,
    `f H W 3` or `H W 3`, as `decode_stream` and a video file's reader give them. In all they are 4 n + 1 frames, which
    is known, and raised as ValueError, only at their end. Memory does not grow with the video's length.
    """
    vae = as_vae(weights)
    choose = lambda part: choose_passes(vae.config, _latent_shape(part, vae), chunk=chunk, tile=tile, mesh=mesh)
    choose(np.zeros((1, 3, 1, vae.config.stride, vae.config.stride), np.float32))  # raises now, not at the first frame
    encoder = replace(vae, decoder=None, post_quant_conv=None)
    return _one_ahead(_encode_parts(_regrouped(frames, vae, 4 * chunk), _cast(encoder, dtype), choose))


def cast(weights: VAE, dtype: DTypeLike) -> VAE:
    """The same weights in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), weights)


def _from_latents(z: Float[Array, "b c t h w"], weights: VAE, dtype: DTypeLike) -> Float[Array, "b t h w c"]:
    """What the decoder reads of raw latents."""
    assert weights.post_quant_conv is not None
    return causal_conv(rearrange(z.astype(dtype), "b c t h w -> b t h w c"), weights.post_quant_conv)


def _to_video(x: Float[Array, "b t h w c"], config: VAEConfig) -> Float[Array, "b 3 t H W"]:
    """What the decoder puts out as video: patches spread, column offset before row offset, and clipped."""
    p = config.patch_size or 1
    return jnp.clip(rearrange(x, "b t h w (c q p) -> b c t (h p) (w q)", p=p, q=p), -1, 1)


def _from_video(video: Float[Array, "b c t H W"], weights: VAE, dtype: DTypeLike) -> Float[Array, "b t h w c2"]:
    """What the encoder reads of a video."""
    p = weights.config.patch_size or 1
    return rearrange(video.astype(dtype), "b c t (h p) (w q) -> b t h w (c q p)", p=p, q=p)


def _to_posterior(x: Float[Array, "b t h w c"], weights: VAE) -> Posterior:
    """What the encoder puts out as mean and log-variance."""
    assert weights.quant_conv is not None
    moments = rearrange(causal_conv(x, weights.quant_conv), "b t h w c -> b c t h w")
    mean, logvar = jnp.split(moments, 2, axis=1)
    return Posterior(mean, jnp.clip(logvar, -30, 20))


@partial(jax.jit, static_argnames=("dtype", "passes"))
def _decode(z: Float[Array, "b c t h w"], weights: VAE, dtype: DTypeLike, passes: Passes) -> Float[Array, "b 3 4*t-3 H W"]:
    """`decode` of what has been checked."""

    def run(z: Float[Array, "b c t h w"], weights: VAE, cache: Cache) -> tuple[Float[Array, "b 3 f H W"], Cache]:
        weights = cast(weights, dtype)
        x = _from_latents(z, weights, dtype)
        return _to_video(in_chunks(decoder_step(weights, passes), x, passes.chunk, passes.alike), weights.config), cache

    return on_devices(run, passes.split, 1)(z, weights, {})[0]


@partial(jax.jit, static_argnames=("dtype", "passes"))
def _encode(video: Float[Array, "b 3 f H W"], weights: VAE, dtype: DTypeLike, passes: Passes) -> Posterior:
    """`encode` of what has been checked."""

    def run(video: Float[Array, "b 3 f H W"], weights: VAE, cache: Cache) -> tuple[Posterior, Cache]:
        weights = cast(weights, dtype)
        x = _from_video(video, weights, dtype)
        return _to_posterior(in_chunks(encoder_step(weights, passes), x, 4 * passes.chunk, passes.alike), weights), cache

    return on_devices(run, passes.split, weights.config.stride)(video, weights, {})[0]


# --- streaming ---

_cast_anew = jax.jit(cast, static_argnames="dtype")


def _cast(weights: VAE, dtype: DTypeLike) -> VAE:
    """`cast` once for all chunks; what has the dtype is not copied, which would take as much memory again."""
    ready = all(isinstance(leaf, jax.Array) and leaf.dtype == dtype for leaf in jax.tree.leaves(weights))
    return weights if ready else _cast_anew(weights, dtype)


@partial(jax.jit, static_argnames=("passes", "encodes"), keep_unused=True)  # lies where the weights lie, as the next one will
def first_history(x: Float[Array, "b c t h w"], weights: VAE, *, passes: Passes, encodes: bool) -> Cache:
    """The cache before x, the first latent frame, or as many frames as one makes, where all go through alike."""
    make, read, cells = (encoder_step, _from_video, weights.config.stride) if encodes else (decoder_step, _from_latents, 1)

    def run(x: Float[Array, "b c t h w"], weights: VAE, cache: Cache) -> tuple[Float[Array, "b c t h w"], Cache]:
        return x, no_history(make(weights, passes), read(x, weights, jax.tree.leaves(weights)[0].dtype))

    return on_devices(run, passes.split, cells)(x, weights, {})[1]


def _one_ahead(parts: Iterable[Callable[[Cache], tuple[Any, Cache]]]) -> Iterator[Any]:
    """The results of steps that hand each other a cache; each is given out when the one after it is under way."""
    cache, waiting = {}, None
    for part in parts:
        y, cache = part(cache)
        if waiting is not None:
            yield waiting
        waiting = y
    if waiting is not None:
        yield waiting


@partial(jax.jit, static_argnames=("size", "passes", "uint8"), donate_argnames="cache")
def _decode_step(
    z: Float[Array, "b c t h w"], weights: VAE, start: Int[Array | np.integer, ""], cache: Cache, *, size: int, passes: Passes, uint8: bool
) -> tuple[Float[Array, "b 3 f H W"] | UInt8[Array, "b f H W 3"], Cache]:
    """Frames of `size` latent frames from `start` on; an empty cache marks the first, where they do not go through alike."""
    dtype = jax.tree.leaves(weights)[0].dtype
    first = start == 0 if passes.alike else not cache

    def run(z: Float[Array, "b c t h w"], weights: VAE, cache: Cache) -> tuple[Float[Array, "b 3 f H W"], Cache]:
        x, cache = decoder_step(weights, passes)(_from_latents(z, weights, dtype), cache, first)
        return _to_video(x, weights.config), cache

    video, cache = on_devices(run, passes.split, 1)(lax.dynamic_slice_in_dim(z, start, size, 2), weights, cache)
    if uint8:
        shown = rearrange(video.astype(jnp.float32) / 2 + 0.5, "b c f h w -> b f h w c")
        return jnp.round(shown * 255).astype(jnp.uint8), cache
    return video, cache


def _as_video(frames: Float[Array | np.ndarray, "b 3 f H W"] | UInt8[Array | np.ndarray, "b f H W 3"]) -> Float[Array, "b 3 f H W"]:
    """Frames as the encoder takes them."""
    if frames.dtype == jnp.uint8:
        return rearrange(jnp.asarray(frames, jnp.float32) / 127.5 - 1, "b f h w c -> b c f h w")
    return jnp.asarray(frames)


@partial(jax.jit, static_argnames="passes", donate_argnames="cache")
def _encode_step(
    video: Float[Array | np.ndarray, "b 3 f H W"] | UInt8[Array | np.ndarray, "b f H W 3"],
    cache: Cache,
    *,
    weights: VAE,
    start: Int[Array | np.integer, ""],
    passes: Passes,
) -> tuple[Posterior, Cache]:
    """The posterior of the next frames, latent frame `start` and on; an empty cache marks the first, where they do not go through alike."""
    dtype = jax.tree.leaves(weights)[0].dtype
    first = start == 0 if passes.alike else not cache

    def run(video: Float[Array, "b 3 f H W"], weights: VAE, cache: Cache) -> tuple[Posterior, Cache]:
        x, cache = encoder_step(weights, passes)(_from_video(video, weights, dtype), cache, first)
        return _to_posterior(x, weights), cache

    return on_devices(run, passes.split, weights.config.stride)(_as_video(video), weights, cache)


def _decode_parts(
    z: Float[Array, "b c t h w"], weights: VAE, passes: Passes, uint8: bool
) -> Iterator[Callable[[Cache], tuple[Any, Cache]]]:
    """A step for the first latent frame, then one for each chunk."""
    start, end = 0, z.shape[2]
    while start < end:
        size = min(passes.chunk, end - start) if start else 1
        step = partial(_decode_step, z, weights, np.int32(start), size=size, passes=passes, uint8=uint8)
        yield partial(_first_frame, step, z, weights, passes) if passes.alike and not start else step
        start += size


def _first_frame(step: Callable[[Cache], tuple[Array, Cache]], z: Array, weights: VAE, passes: Passes, _: Cache) -> tuple[Array, Cache]:
    """The first frame, the last of a chunk like any other."""
    frames, cache = step(first_history(z[:, :, :1], weights, passes=passes, encodes=False))
    return lax.slice_in_dim(frames, -1, None, axis=_frame_axis(frames)), cache


def _encode_parts(
    parts: Iterable[Any], weights: VAE, choose: Callable[[Any], Passes]
) -> Iterator[Callable[[Cache], tuple[Posterior, Cache]]]:
    """A step for each part of the video."""
    for start, part in enumerate(parts):
        passes = choose(part)
        step = partial(_encode_step, weights=weights, start=np.int32(start), passes=passes)
        yield partial(_first_latent, step, part, weights, passes) if passes.alike and not start else partial(step, part)


def _first_latent(
    step: Callable[..., tuple[Posterior, Cache]], frame: Any, weights: VAE, passes: Passes, _: Cache
) -> tuple[Posterior, Cache]:
    """That of the first frame, which comes after three that stand for nothing."""
    frames = jnp.pad(frame, [(3 if axis == _frame_axis(frame) else 0, 0) for axis in range(5)])
    return step(frames, first_history(_as_video(frames), weights, passes=passes, encodes=True))


def _regrouped(parts: Iterable[Any], weights: VAE, size: int) -> Iterator[Any]:
    """The same frames in parts of one, then of `size`, then of the multiple of four that remains."""
    held, wanted, total = None, 1, 0
    for part in parts:
        part = _checked_part(part, weights)
        axis = _frame_axis(part)
        total += part.shape[axis]
        held = part if held is None else np.concatenate([np.asarray(held), np.asarray(part)], axis)
        while held.shape[axis] >= wanted:
            head, held = np.split(held, [wanted], axis) if isinstance(held, np.ndarray) else jnp.split(held, [wanted], axis)
            yield head
            wanted = size
    if held is None or total % 4 != 1:
        raise ValueError(f"a video has 4 n + 1 frames (one, then four for each latent frame); got {total} in all.")
    if held.shape[_frame_axis(held)]:
        yield held


def _frame_axis(part: Any) -> int:
    return 1 if part.dtype == np.uint8 else 2


def _latent_shape(video: Any, weights: VAE) -> tuple[int, int, int, int, int]:
    """Of the latents of a video, or of a part of one."""
    height, width = video.shape[2:4] if video.dtype == np.uint8 else video.shape[3:]
    config, frames = weights.config, video.shape[_frame_axis(video)]
    return video.shape[0], config.z_dim, (frames + 3) // 4, height // config.stride, width // config.stride


def _checked_part(part: Any, weights: VAE) -> Any:
    """A part of a video with all of its axes; raises as `encode` does."""
    if part.dtype != np.uint8:
        check_frames(part, weights)
        return part
    part = part.reshape((1,) * (5 - part.ndim) + part.shape)
    check_frames(np.broadcast_to(np.float32(0), (part.shape[0], part.shape[-1], *part.shape[1:-1])), weights)
    return part
