"""The two networks of the Wan VAE, on one chunk of consecutive frames: `encode_chunk` and `decode_chunk`.

2.1 (16 latent channels, 8 pixels a latent) and 2.2 (48 channels, 16 pixels) differ in their kind of level only.
"""

import itertools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from wanjax.vae_blocks import (
    Cache,
    First,
    MidBlock,
    Norm,
    Resample,
    ResidualBlock,
    ResidualDownBlock,
    ResidualUpBlock,
    UpBlock,
    Way,
    cached_conv,
    downsample,
    init_causal_conv,
    init_mid_block,
    init_resample,
    init_residual_blocks,
    mid_block,
    residual_block,
    residual_down_block,
    residual_up_block,
    rms_norm,
    up_block,
)
from wanjax.vae_config import VAEConfig
from wanjax.vae_convs import CausalConv3d


class Encoder(eqx.Module):
    """Video to latents. 2.1's levels are a flat row of residual blocks and resamplers, 2.2's are blocks of their own."""

    conv_in: CausalConv3d
    down_blocks: tuple[ResidualBlock | Resample | ResidualDownBlock, ...]
    mid_block: MidBlock
    norm_out: Norm
    conv_out: CausalConv3d


class Decoder(eqx.Module):
    """Latents to video."""

    conv_in: CausalConv3d
    mid_block: MidBlock
    up_blocks: tuple[UpBlock | ResidualUpBlock, ...]
    norm_out: Norm
    conv_out: CausalConv3d


class VAE(eqx.Module):
    """Weights of a Wan VAE; the half that a caller does not need may be None."""

    encoder: Encoder | None
    quant_conv: CausalConv3d | None
    post_quant_conv: CausalConv3d | None
    decoder: Decoder | None
    config: VAEConfig = eqx.field(static=True)


Step = Callable[[Float[Array, "b t h w c"], Cache, First], tuple[Float[Array, "b t2 h2 w2 c2"], Cache]]
"""Consecutive frames, the cache of those before them, and whether they are the first, to their result and the cache for the next."""

Levels = Callable[[Float[Array, "b t h w c"], Cache, Way], tuple[Float[Array, "b t2 h2 w2 c2"], Cache]]
"""A step that is told more of the way: what part of a picture its frames are, too."""


def as_they_are(levels: Levels) -> Levels:
    """The levels in one."""
    return levels


def decode_chunk(
    x: Float[Array, "b t h w c"],
    weights: VAE,
    cache: Cache,
    way: Way,
    wrap: Callable[[Levels], Levels] = as_they_are,
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """The decoder on consecutive latent frames, given the cache that the frames before them left.

    `wrap` is told how the levels from the latents' size up are computed, which is where memory goes.
    """
    decoder = weights.decoder
    assert decoder is not None

    def levels(x: Float[Array, "b t h w c"], cache: Cache, way: Way) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        last = len(decoder.up_blocks) - 1
        for i in range(last):
            x, cache = level(i, x, cache, way)

        def end(x: Float[Array, "b t h w c"], cache: Cache) -> tuple[Float[Array, "b t h w c2"], Cache]:
            x, cache = level(last, x, cache, way)
            x = jax.nn.silu(rms_norm(x, decoder.norm_out.gamma))
            return cached_conv(x, decoder.conv_out, "decoder.conv_out", cache, way)

        return _few_at_a_time(end, x, cache, way, f"decoder.up_blocks.{last}.", "decoder.conv_out")

    def level(i: int, x: Float[Array, "b t h w c"], cache: Cache, way: Way) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        name, block = f"decoder.up_blocks.{i}", decoder.up_blocks[i]
        if isinstance(block, ResidualUpBlock):
            return residual_up_block(x, block, name, cache, way)
        return up_block(x, block, name, cache, way)

    ends, between = _apart(cache, "decoder.conv_in", "decoder.mid_block")
    x, ends = cached_conv(x, decoder.conv_in, "decoder.conv_in", ends, way)
    x, ends = mid_block(x, decoder.mid_block, "decoder.mid_block", ends, way)
    x, between = wrap(levels)(x, between, way)
    return x, {**ends, **between}


def encode_chunk(
    x: Float[Array, "b t h w c"],
    weights: VAE,
    cache: Cache,
    way: Way,
    wrap: Callable[[Levels], Levels] = as_they_are,
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """The encoder on consecutive frames, the first alone or a multiple of four, given the cache of the frames before them.

    `wrap` is told how the levels down to the latents' size are computed, which is where memory goes.
    """
    encoder = weights.encoder
    assert encoder is not None

    def levels(x: Float[Array, "b t h w c"], cache: Cache, way: Way) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        halved = next(i for i, block in enumerate(encoder.down_blocks) if isinstance(block, Resample | ResidualDownBlock))

        def begin(x: Float[Array, "b t h w c"], cache: Cache) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
            x, cache = cached_conv(x, encoder.conv_in, "encoder.conv_in", cache, way)
            for i in range(halved + 1):
                x, cache = level(i, x, cache, way)
            return x, cache

        x, cache = _few_at_a_time(begin, x, cache, way, "encoder.conv_in", *(f"encoder.down_blocks.{i}." for i in range(halved + 1)))
        for i in range(halved + 1, len(encoder.down_blocks)):
            x, cache = level(i, x, cache, way)
        return x, cache

    def level(i: int, x: Float[Array, "b t h w c"], cache: Cache, way: Way) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
        name, block = f"encoder.down_blocks.{i}", encoder.down_blocks[i]
        if isinstance(block, ResidualDownBlock):
            return residual_down_block(x, block, name, cache, way)
        if isinstance(block, Resample):
            return downsample(x, block, name, cache, way)
        return residual_block(x, block, name, cache, way)

    ends, between = _apart(cache, "encoder.conv_out", "encoder.mid_block")
    x, between = wrap(levels)(x, between, way)
    x, ends = mid_block(x, encoder.mid_block, "encoder.mid_block", ends, way)
    x = jax.nn.silu(rms_norm(x, encoder.norm_out.gamma))
    x, ends = cached_conv(x, encoder.conv_out, "encoder.conv_out", ends, way)
    return x, {**ends, **between}


def _few_at_a_time(
    step: Callable[[Array, Cache], tuple[Array, Cache]], x: Float[Array, "b t h w c"], cache: Cache, way: Way, *names: str
) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """A step at the video's size on a few frames at a time: most memory goes there.

    `names` are what its cache's begin with.
    """
    if not isinstance(way.first, bool) or x.shape[1] % way.few or x.shape[1] == way.few:
        return step(x, cache)
    own, others = _apart(cache, *names)

    def scanned(cache: Cache, x: Float[Array, "b few h w c"]) -> tuple[Cache, Float[Array, "b few2 h2 w2 c2"]]:
        y, cache = step(x, cache)
        return cache, y

    own, y = lax.scan(scanned, own, rearrange(x, "b (n few) h w c -> n b few h w c", few=way.few))
    return rearrange(y, "n b t h w c -> b (n t) h w c"), {**others, **own}


def _apart(cache: Cache, *names: str) -> tuple[Cache, Cache]:
    """The cache of what these names begin, and the rest."""
    own = {name: frames for name, frames in cache.items() if name.startswith(names)}
    return own, {name: frames for name, frames in cache.items() if name not in own}


def init_vae(config: VAEConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> VAE:
    """A VAE with random weights, to train from scratch or, under `jax.eval_shape`, to serve as the template for loading."""
    keys = jax.random.split(key, 4)
    z = config.z_dim
    return VAE(
        encoder=init_encoder(config, keys[0], dtype),
        quant_conv=init_causal_conv(keys[1], (1, 1, 1), 2 * z, 2 * z, dtype),
        post_quant_conv=init_causal_conv(keys[2], (1, 1, 1), z, z, dtype),
        decoder=init_decoder(config, keys[3], dtype),
        config=config,
    )


def init_encoder(config: VAEConfig, key: PRNGKeyArray, dtype: DTypeLike) -> Encoder:
    """An encoder with random weights."""
    widths = [config.base_dim * m for m in (1, *config.dim_mult)]
    last = len(config.dim_mult) - 1
    keys = iter(jax.random.split(key, 3 + 2 * len(config.dim_mult)))
    blocks: list[ResidualBlock | Resample | ResidualDownBlock] = []
    for i, (cin, cout) in enumerate(itertools.pairwise(widths)):
        resnets = init_residual_blocks(next(keys), config.num_res_blocks, cin, cout, dtype)
        sampler = None if i == last else init_resample(next(keys), cout, cout, cout if config.temperal_downsample[i] else None, dtype)
        if config.is_residual:
            blocks.append(ResidualDownBlock(resnets, sampler))
        else:
            blocks.extend(resnets if sampler is None else (*resnets, sampler))
    return Encoder(
        init_causal_conv(next(keys), (3, 3, 3), config.in_channels, widths[0], dtype),
        tuple(blocks),
        init_mid_block(next(keys), widths[-1], dtype),
        Norm(jnp.ones(widths[-1], dtype)),
        init_causal_conv(next(keys), (3, 3, 3), widths[-1], 2 * config.z_dim, dtype),
    )


def init_decoder(config: VAEConfig, key: PRNGKeyArray, dtype: DTypeLike) -> Decoder:
    """A decoder with random weights. 2.1's upsamplers halve the channels, 2.2's keep them."""
    base = config.decoder_base_dim or config.base_dim
    widths = [base * m for m in (config.dim_mult[-1], *config.dim_mult[::-1])]
    last = len(config.dim_mult) - 1
    keys = iter(jax.random.split(key, 3 + 2 * len(config.dim_mult)))
    blocks: list[UpBlock | ResidualUpBlock] = []
    for i, (cin, cout) in enumerate(itertools.pairwise(widths)):
        if i > 0 and not config.is_residual:
            cin //= 2
        resnets = init_residual_blocks(next(keys), config.num_res_blocks + 1, cin, cout, dtype)
        sampler = None
        if i < last:
            doubles_time = config.temperal_downsample[::-1][i]
            sampler = init_resample(next(keys), cout, cout if config.is_residual else cout // 2, 2 * cout if doubles_time else None, dtype)
        blocks.append(ResidualUpBlock(resnets, sampler) if config.is_residual else UpBlock(resnets, () if sampler is None else (sampler,)))
    return Decoder(
        init_causal_conv(next(keys), (3, 3, 3), config.z_dim, widths[0], dtype),
        init_mid_block(next(keys), widths[0], dtype),
        tuple(blocks),
        Norm(jnp.ones(widths[-1], dtype)),
        init_causal_conv(next(keys), (3, 3, 3), widths[-1], config.out_channels, dtype),
    )
