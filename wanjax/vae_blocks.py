"""The parts of the Wan VAE: causal convolutions, residual and attention blocks, and the resamplers between levels.

A module holds the weights of one checkpoint entry and a function of the same name computes with them, channels last
(`b t h w c`). Every convolution that looks back in time keeps the last frames of its input in a cache, a dict keyed by
the convolution's checkpoint name, so that a video runs chunk by chunk with the result of one pass over all of it.

One irregular rule, from the reference: the first latent frame stands for a single video frame. It passes every change
of frame rate untouched, and `first=True` marks the chunk made of it alone. Where `first` is a traced boolean one program
does for every chunk, and one loop for residual blocks of the same shapes, where compiling is what takes long: the first frame
is then the last of a chunk as long as any, and what lies before it stands for nothing.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange, reduce, repeat
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from wanjax.attention import attention
from wanjax.vae_convs import CausalConv3d, Conv2d, Part, causal_conv, double_size, frame_conv, halve_size
from wanjax.weights import stored

Cache = Mapping[str, Float[Array, "..."]]  # conv name -> the frames before the next chunk, "b k h w c" (of every tile: "n b k h w c")
First = bool | Bool[Array, ""]  # whether a chunk is the first latent frame


class Way(NamedTuple):
    """How a chunk goes through: whether it is the first, what part of a picture it is, and what the backward pass computes again.

    At the video's size, where most memory goes, `few` frames go through at a time, if the chunk has more.
    With `remat` blocks keep nothing but what goes into them, and those of the same shapes are a loop, so that one at a time is
    computed again; what a compiler does with blocks in a row is to keep all of them at hand.
    """

    first: First
    part: Part | None = None
    remat: bool = False
    few: int = 4


HISTORY = 2  # frames a convolution over three frames looks back


class Norm(eqx.Module):
    """Gain of a norm over the channels."""

    gamma: Float[Array, " c"] = stored("c 1 1 1 -> c")


class FrameNorm(eqx.Module):
    """The same gain as the attention block's file entry has it, with one axis fewer."""

    gamma: Float[Array, " c"] = stored("c 1 1 -> c")


class ResidualBlock(eqx.Module):
    """Two convolutions and a shortcut, which has weights where the channel count changes."""

    norm1: Norm
    conv1: CausalConv3d
    norm2: Norm
    conv2: CausalConv3d
    conv_shortcut: CausalConv3d | None


class AttentionBlock(eqx.Module):
    """Single-head attention within each frame."""

    norm: FrameNorm
    to_qkv: Conv2d
    proj: Conv2d


class MidBlock(eqx.Module):
    """Residual block, attention, residual block at the smallest size."""

    resnets: tuple[ResidualBlock, ResidualBlock]
    attentions: tuple[AttentionBlock]


class Resample(eqx.Module):
    """Halves or doubles height and width and, where it has a `time_conv`, the frame rate."""

    conv: Conv2d = stored(name="resample.1")
    time_conv: CausalConv3d | None = stored()


class ResidualDownBlock(eqx.Module):
    """One level of the 2.2 encoder, with an averaging shortcut around the whole of it."""

    resnets: tuple[ResidualBlock, ...]
    downsampler: Resample | None


class ResidualUpBlock(eqx.Module):
    """One level of the 2.2 decoder, with a duplicating shortcut around the whole of it."""

    resnets: tuple[ResidualBlock, ...]
    upsampler: Resample | None


class UpBlock(eqx.Module):
    """One level of the 2.1 decoder."""

    resnets: tuple[ResidualBlock, ...]
    upsamplers: tuple[Resample, ...]


def rms_norm(x: Float[Array, "*b c"], gamma: Float[Array, " c"]) -> Float[Array, "*b c"]:
    """x / max(|x|, 1e-12) sqrt(c) gamma: the length in float32, each later product rounded to the dtype of x."""
    x32 = x.astype(jnp.float32)
    # Bounded before the root, whose gradient at zero is none: frames that do not exist are zero.
    length = jnp.sqrt(jnp.maximum(jnp.sum(jnp.square(x32), axis=-1, keepdims=True), 1e-24))
    unit = (x32 / length).astype(x.dtype)
    return unit * jnp.asarray(x.shape[-1] ** 0.5, x.dtype) * gamma


def existing(x: Float[Array, "b t h w c"], first: First) -> Float[Array, "b t h w c"]:
    """Zeros for the frames before the first one, which are in its chunk where `first` is traced."""
    if isinstance(first, bool):
        return x
    exists = ~first | (jnp.arange(x.shape[1]) == x.shape[1] - 1)
    return jnp.where(exists[:, None, None, None], x, jnp.zeros((), x.dtype))


def cached_conv(
    x: Float[Array, "b t h w cin"], conv: CausalConv3d, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t h w cout"], Cache]:
    """`causal_conv` of one chunk after the frames that the cache holds under `name`, which it replaces by the latest."""
    x, history = existing(x, way.first), cache.get(name)
    before = jnp.zeros((x.shape[0], HISTORY, *x.shape[2:]), x.dtype) if history is None else history
    latest = jnp.concatenate([before, x], axis=1)[:, -HISTORY:]
    return causal_conv(x, conv, history, part=way.part), {**cache, name: latest}


Block = Callable[[Float[Array, "b t h w c"], Any, str, Cache, Way], tuple[Float[Array, "b t2 h2 w2 c2"], Cache]]


def computed_again(function: Block) -> Block:
    """The function of a block of which, with `remat`, the inputs alone are kept for the backward pass."""

    @functools.wraps(function)
    def block(x: Float[Array, "b t h w c"], weights: Any, name: str, cache: Cache, way: Way) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        if not way.remat:
            return function(x, weights, name, cache, way)
        own = {key: frames for key, frames in cache.items() if key.startswith(f"{name}.")}
        y, own = jax.checkpoint(lambda x, weights, own: function(x, weights, name, own, way))(x, weights, own)
        return y, {**cache, **own}

    return block


@computed_again
def residual_block(
    x: Float[Array, "b t h w c"], block: ResidualBlock, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t h w c2"], Cache]:
    """conv2(silu(norm2(conv1(silu(norm1(x)))))) plus the shortcut."""
    shortcut = x if block.conv_shortcut is None else causal_conv(x, block.conv_shortcut)
    x = jax.nn.silu(rms_norm(x, block.norm1.gamma))
    x, cache = cached_conv(x, block.conv1, f"{name}.conv1", cache, way)
    x = jax.nn.silu(rms_norm(x, block.norm2.gamma))
    x, cache = cached_conv(x, block.conv2, f"{name}.conv2", cache, way)
    return x + shortcut, cache


def residual_blocks(
    x: Float[Array, "b t h w c"], blocks: Sequence[ResidualBlock], name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t h w c2"], Cache]:
    """Residual blocks in a row. Where `first` is traced, or with `remat`, those of the same shapes are a loop.

    Its cache has the first one's name.
    """
    alone = isinstance(way.first, bool) and not way.remat
    rows = [[block] for block in blocks] if alone else [list(row) for _, row in itertools.groupby(blocks, _shapes)]
    start = 0
    for row in rows:
        if len(row) == 1:
            x, cache = residual_block(x, row[0], f"{name}.{start}", cache, way)
        else:
            x, cache = _repeated(x, row, f"{name}.{start}", cache, way)
        start += len(row)
    return x, cache


def _shapes(block: ResidualBlock) -> list[tuple[int, ...]]:
    """What blocks of one loop have in common."""
    return [leaf.shape for leaf in jax.tree.leaves(block)]


def _repeated(
    x: Float[Array, "b t h w c"], blocks: Sequence[ResidualBlock], name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t h w c"], Cache]:
    """A loop over residual blocks of the same shapes; each has its frames of the cache, one after the other on the batch axis."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
    b = x.shape[0]
    nothing = jnp.zeros((b * len(blocks), HISTORY, *x.shape[2:]), x.dtype)
    names = [f"{name}.conv1", f"{name}.conv2"]

    def one(i: Array, carry: tuple[Array, Cache]) -> tuple[Array, Cache]:
        x, cache = carry
        own = {name: lax.dynamic_slice_in_dim(cache[name], b * i, b) for name in names}
        x, own = residual_block(x, jax.tree.map(lambda leaf: leaf[i], stacked), name, own, way)
        return x, {name: lax.dynamic_update_slice_in_dim(cache[name], own[name], b * i, axis=0) for name in names}

    x, own = lax.fori_loop(0, len(blocks), one, (x, {name: cache.get(name, nothing) for name in names}))
    return x, {**cache, **own}


def attention_block(x: Float[Array, "b t h w c"], block: AttentionBlock, part: Part | None) -> Float[Array, "b t h w c"]:
    """x + proj(attention over the h w positions of each whole frame)."""
    q, k, v = jnp.split(frame_conv(rms_norm(x, block.norm.gamma), block.to_qkv), 3, axis=-1)
    if part is not None:
        k, v = part.whole(k), part.whole(v)
    (n, _, h, w, _), (b, *_) = q.shape, k.shape
    q = rearrange(q, "(b parts) t h w c -> (b t) (parts h w) 1 c", b=b)
    k, v = (rearrange(y, "b t h w c -> (b t) (h w) 1 c") for y in (k, v))
    y = rearrange(attention(q, k, v), "(b t) (parts h w) 1 c -> (b parts) t h w c", b=b, parts=n // b, h=h, w=w)
    return x + frame_conv(y, block.proj)


def mid_block(x: Float[Array, "b t h w c"], block: MidBlock, name: str, cache: Cache, way: Way) -> tuple[Float[Array, "b t h w c"], Cache]:
    """Residual block, attention, residual block."""
    x, cache = residual_block(x, block.resnets[0], f"{name}.resnets.0", cache, way)
    x = attention_block(x, block.attentions[0], way.part)
    return residual_block(x, block.resnets[1], f"{name}.resnets.1", cache, way)


@computed_again
def downsample(
    x: Float[Array, "b t h w c"], block: Resample, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t2 h//2 w//2 c"], Cache]:
    """Halves height and width (zero row below, zero column to the right) and then, with a `time_conv`, the frame rate."""
    x = halve_size(x, block.conv, way.part)
    if block.time_conv is None:
        return x, cache
    name = f"{name}.time_conv"
    latest = {**cache, name: x[:, -1:]}
    if way.first is True:
        return x, latest
    halved = causal_conv(x, block.time_conv, cache.get(name, jnp.zeros_like(x[:, :1])), stride=2)
    return halved if way.first is False else jnp.where(way.first, x[:, 1::2], halved), latest


@computed_again
def upsample(
    x: Float[Array, "b t h w c"], block: Resample, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t2 2*h 2*w c2"], Cache]:
    """Doubles the frame rate, with a `time_conv`, and then height and width.

    The first frame is not doubled and leaves no history: the time convolution begins at the second chunk, after zeros.
    """
    if block.time_conv is not None:
        name, nothing = f"{name}.time_conv", jnp.zeros((x.shape[0], HISTORY, *x.shape[2:]), x.dtype)
        if way.first is True:
            cache = {**cache, name: nothing}
        else:
            doubled, cache = cached_conv(x, block.time_conv, name, cache, way)
            doubled = rearrange(doubled, "b t h w (two c) -> b (t two) h w c", two=2)
            if way.first is not False:
                doubled = jnp.where(way.first, jnp.repeat(x, 2, axis=1), doubled)
                cache = {**cache, name: jnp.where(way.first, nothing, cache[name])}
            x = doubled
    return double_size(x, block.conv, way.part), cache


def average_down(x: Float[Array, "b t h w c"], cout: int, ft: int, fs: int) -> Float[Array, "b t2 h2 w2 {cout}"]:
    """The parameter-free shortcut of a 2.2 encoder level: (ft, fs, fs) cells folded into channels, groups of them averaged.

    Zero frames before x fill its first cell.
    """
    x = jnp.pad(x, ((0, 0), (-x.shape[1] % ft, 0), (0, 0), (0, 0), (0, 0)))
    x = rearrange(x, "b (t ft) (h fh) (w fw) c -> b t h w (c ft fh fw)", ft=ft, fh=fs, fw=fs)
    return reduce(x, "b t h w (c group) -> b t h w c", "mean", c=cout)


def duplicate_up(x: Float[Array, "b t h w c"], cout: int, ft: int, fs: int, first: First) -> Float[Array, "b t2 h2 w2 {cout}"]:
    """The parameter-free shortcut of a 2.2 decoder level: channels repeated, then spread over (ft, fs, fs) cells.

    Of the first frame only the last of its ft copies is kept.
    """
    x = repeat(x, "b t h w c -> b t h w (c copies)", copies=cout * ft * fs * fs // x.shape[-1])
    x = rearrange(x, "b t h w (c ft fh fw) -> b (t ft) (h fh) (w fw) c", ft=ft, fh=fs, fw=fs)
    return x[:, ft - 1 :] if first is True else x


def residual_down_block(
    x: Float[Array, "b t h w c"], block: ResidualDownBlock, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """A level of the 2.2 encoder: residual blocks and downsampler, plus the averaged input."""
    y, x = x, existing(x, way.first)
    y, cache = residual_blocks(y, block.resnets, f"{name}.resnets", cache, way)
    sampler = block.downsampler
    if sampler is None:
        return y + average_down(x, y.shape[-1], 1, 1), cache
    y, cache = downsample(y, sampler, f"{name}.downsampler", cache, way)
    return y + average_down(x, y.shape[-1], 1 if sampler.time_conv is None else 2, 2), cache


def residual_up_block(
    x: Float[Array, "b t h w c"], block: ResidualUpBlock, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """A level of the 2.2 decoder: residual blocks and upsampler, plus the duplicated input; the last level has neither."""
    y = x
    y, cache = residual_blocks(y, block.resnets, f"{name}.resnets", cache, way)
    sampler = block.upsampler
    if sampler is None:
        return y, cache
    y, cache = upsample(y, sampler, f"{name}.upsampler", cache, way)
    return y + duplicate_up(x, y.shape[-1], 1 if sampler.time_conv is None else 2, 2, way.first), cache


def up_block(
    x: Float[Array, "b t h w c"], block: UpBlock, name: str, cache: Cache, way: Way
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """A level of the 2.1 decoder: residual blocks, then the upsampler where there is one."""
    x, cache = residual_blocks(x, block.resnets, f"{name}.resnets", cache, way)
    for i, sampler in enumerate(block.upsamplers):
        x, cache = upsample(x, sampler, f"{name}.upsamplers.{i}", cache, way)
    return x, cache


def init_conv(key: PRNGKeyArray, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Uniform kernel weights in +-1/sqrt(fan in), for a kernel that ends in (cin, cout)."""
    fan_in = 1
    for size in shape[:-1]:
        fan_in *= size
    return jax.random.uniform(key, shape, dtype, -1, 1) * jnp.asarray(fan_in**-0.5, dtype)


def init_causal_conv(key: PRNGKeyArray, size: tuple[int, int, int], cin: int, cout: int, dtype: DTypeLike) -> CausalConv3d:
    """A causal convolution with random weights and a zero bias."""
    return CausalConv3d(init_conv(key, (*size, cin, cout), dtype), jnp.zeros(cout, dtype))


def init_conv2d(key: PRNGKeyArray, size: int, cin: int, cout: int, dtype: DTypeLike) -> Conv2d:
    """A convolution within frames with random weights and a zero bias."""
    return Conv2d(init_conv(key, (size, size, cin, cout), dtype), jnp.zeros(cout, dtype))


def init_residual_block(key: PRNGKeyArray, cin: int, cout: int, dtype: DTypeLike) -> ResidualBlock:
    """A residual block with random weights, with a shortcut convolution where the channel count changes."""
    keys = jax.random.split(key, 3)
    return ResidualBlock(
        Norm(jnp.ones(cin, dtype)),
        init_causal_conv(keys[0], (3, 3, 3), cin, cout, dtype),
        Norm(jnp.ones(cout, dtype)),
        init_causal_conv(keys[1], (3, 3, 3), cout, cout, dtype),
        None if cin == cout else init_causal_conv(keys[2], (1, 1, 1), cin, cout, dtype),
    )


def init_residual_blocks(key: PRNGKeyArray, count: int, cin: int, cout: int, dtype: DTypeLike) -> tuple[ResidualBlock, ...]:
    """`count` residual blocks in a row, the first of which changes the channel count."""
    keys = jax.random.split(key, count)
    return tuple(init_residual_block(k, cin if i == 0 else cout, cout, dtype) for i, k in enumerate(keys))


def init_mid_block(key: PRNGKeyArray, c: int, dtype: DTypeLike) -> MidBlock:
    """A middle block with random weights."""
    keys = jax.random.split(key, 4)
    attention = AttentionBlock(
        FrameNorm(jnp.ones(c, dtype)), init_conv2d(keys[0], 1, c, 3 * c, dtype), init_conv2d(keys[1], 1, c, c, dtype)
    )
    return MidBlock((init_residual_block(keys[2], c, c, dtype), init_residual_block(keys[3], c, c, dtype)), (attention,))


def init_resample(key: PRNGKeyArray, cin: int, cout: int, time_channels: int | None, dtype: DTypeLike) -> Resample:
    """A resampler with random weights; `time_channels` are those its time convolution puts out, None for no such convolution."""
    keys = jax.random.split(key)
    time_conv = None if time_channels is None else init_causal_conv(keys[1], (3, 1, 1), cin, time_channels, dtype)
    return Resample(init_conv2d(keys[0], 3, cin, cout, dtype), time_conv)
