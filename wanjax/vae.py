"""The Wan VAE, 2.1 (16 channels, 8 pixels a latent) and 2.2 (48 channels, 16 pixels): `encode` and `decode`.

A video of 4 (t - 1) + 1 frames has t latent frames: the first stands for one frame, every other for four. Both ways
run chunk by chunk, the first latent frame alone and then `chunk` latent frames a step in a `lax.scan` whose carry is
the cache of past frames (see vae_blocks.py); a `chunk` that covers everything runs without a scan.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from wanjax.attention import attention
from wanjax.vae_blocks import (
    Cache,
    CausalConv3d,
    MidBlock,
    Norm,
    Resample,
    ResidualBlock,
    ResidualDownBlock,
    ResidualUpBlock,
    UpBlock,
    cached_conv,
    causal_conv,
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

# Statistics of each latent channel, from the public config.json files.
# fmt: off
MEAN_2_1 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
STD_2_1 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
MEAN_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
STD_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on


@dataclass(frozen=True)
class VAEConfig:
    """Architecture of a Wan VAE, in diffusers' field names, with 2.1's values as defaults.

    `dim_mult` times `base_dim` (the decoder's own in `decoder_base_dim`) are the channels of each level, and
    `temperal_downsample` (the checkpoint's spelling) says which changes of level halve the frame rate. `is_residual`
    is 2.2's kind of level, and `patch_size` its folding of pixels into channels. `latents_mean` and `latents_std`
    are the statistics that the diffusion model's latents are normalised with.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    latents_mean: tuple[float, ...] = MEAN_2_1
    latents_std: tuple[float, ...] = STD_2_1

    @property
    def stride(self) -> int:
        """Pixels in each direction that one latent covers."""
        return 2 ** (len(self.dim_mult) - 1) * (self.patch_size or 1)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "VAEConfig":
        """The architecture that a diffusers config.json describes; its other keys are ignored, absent ones take the defaults."""
        if config.get("attn_scales"):
            raise ValueError(f"attn_scales must be empty, as in every public Wan VAE; got {config['attn_scales']}.")
        known = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in known})

    def to_json(self) -> dict[str, Any]:
        """The config.json that diffusers loads."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "_class_name": "AutoencoderKLWan",
            **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()},
            "attn_scales": [],
            "dropout": 0.0,
            "scale_factor_temporal": 2 ** sum(self.temperal_downsample),
            "scale_factor_spatial": self.stride,
        }


VAE_2_1 = VAEConfig()
VAE_2_2 = VAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    latents_mean=MEAN_2_2,
    latents_std=STD_2_2,
)


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


class Posterior(NamedTuple):
    """The encoder's diagonal Gaussian over latents; its mode is the mean."""

    mean: Float[Array, "b c t h w"]
    logvar: Float[Array, "b c t h w"]


def normalize_latents(mean: Float[Array, "b c t h w"], config: VAEConfig) -> Float[Array, "b c t h w"]:
    """Raw VAE latents to the diffusion model's scale, (mean - latents_mean) / latents_std per channel, in float32."""
    offset, scale = _statistics(config)
    return (mean.astype(jnp.float32) - offset) / scale


def denormalize_latents(z: Float[Array, "b c t h w"], config: VAEConfig) -> Float[Array, "b c t h w"]:
    """The diffusion model's latents to raw VAE latents, z latents_std + latents_mean per channel, in float32."""
    offset, scale = _statistics(config)
    return z.astype(jnp.float32) * scale + offset


def _statistics(config: VAEConfig) -> tuple[Float[Array, "c 1 1 1"], Float[Array, "c 1 1 1"]]:
    """Mean and standard deviation of each latent channel, in float32: bfloat16 would be off by up to 0.4 %."""
    mean, std = (jnp.asarray(v, jnp.float32)[:, None, None, None] for v in (config.latents_mean, config.latents_std))
    return mean, std


def decode(z: Float[Array, "b c t h w"], weights: VAE, dtype: DTypeLike = jnp.float32, *, chunk: int = 1) -> Float[Array, "b 3 4*t-3 H W"]:
    """Latents to video.

    `z` are raw VAE latents (`denormalize_latents` makes them from the diffusion model's). The video is in [-1, 1], of
    `dtype`, in which everything but statistics is computed. `chunk` latent frames go through at a time: more is
    faster and takes more memory; at t - 1 or more nothing is scanned, the form to train with on CPU.
    """
    weights = cast(weights, dtype)
    x = causal_conv(rearrange(z.astype(dtype), "b c t h w -> b t h w c"), weights.post_quant_conv)
    step = lambda x, cache, first: decode_chunk(x, weights.decoder, cache, first)
    x = in_chunks(step, x[:, :1], x[:, 1:], chunk)
    p = weights.config.patch_size or 1
    return jnp.clip(rearrange(x, "b t h w (c q p) -> b c t (h p) (w q)", p=p, q=p), -1, 1)


def encode(video: Float[Array, "b c f H W"], weights: VAE, dtype: DTypeLike = jnp.float32, *, chunk: int = 1) -> Posterior:
    """Video to the posterior over its raw VAE latents, whose mean is what pipelines use.

    `video` is in [-1, 1], of 4 n + 1 frames, height and width multiples of the config's `stride`. See `decode` for
    `dtype` and `chunk`.
    """
    weights = cast(weights, dtype)
    p = weights.config.patch_size or 1
    x = rearrange(video.astype(dtype), "b c t (h p) (w q) -> b t h w (c q p)", p=p, q=p)
    step = lambda x, cache, first: encode_chunk(x, weights.encoder, cache, first)
    x = in_chunks(step, x[:, :1], x[:, 1:], 4 * chunk)
    moments = rearrange(causal_conv(x, weights.quant_conv), "b t h w c -> b c t h w")
    mean, logvar = jnp.split(moments, 2, axis=1)
    return Posterior(mean, jnp.clip(logvar, -30, 20))


def cast(weights: VAE, dtype: DTypeLike) -> VAE:
    """The same weights in another dtype."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), weights)


Step = Callable[[Float[Array, "b t h w c"], Cache, bool], tuple[Float[Array, "b t2 h2 w2 c2"], Cache]]


def in_chunks(step: Step, head: Float[Array, "b one h w c"], rest: Float[Array, "b t h w c"], size: int) -> Float[Array, "b t2 h2 w2 c2"]:
    """`step` over the first frame alone, then over `size` frames at a time, then over what remains."""
    y, cache = step(head, {}, True)
    parts = [y]
    count = rest.shape[1] // size
    if count > 1:
        chunks = rearrange(rest[:, : count * size], "b (n t) h w c -> n b t h w c", n=count)
        scanned = lambda cache, x: step(x, cache, False)[::-1]
        cache, ys = lax.scan(scanned, cache, chunks)
        parts.append(rearrange(ys, "n b t h w c -> b (n t) h w c"))
        rest = rest[:, count * size :]
    while rest.shape[1]:
        y, cache = step(rest[:, :size], cache, False)
        parts.append(y)
        rest = rest[:, size:]
    return jnp.concatenate(parts, axis=1)


def decode_chunk(x: Float[Array, "b t h w c"], decoder: Decoder, cache: Cache, first: bool) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """The decoder on consecutive latent frames, given the cache that the frames before them left."""
    x, cache = cached_conv(x, decoder.conv_in, "decoder.conv_in", cache)
    x, cache = mid_block(x, decoder.mid_block, "decoder.mid_block", cache, attention)
    for i, block in enumerate(decoder.up_blocks):
        level = residual_up_block if isinstance(block, ResidualUpBlock) else up_block
        x, cache = level(x, block, f"decoder.up_blocks.{i}", cache, first)
    x = jax.nn.silu(rms_norm(x, decoder.norm_out.gamma))
    return cached_conv(x, decoder.conv_out, "decoder.conv_out", cache)


def encode_chunk(x: Float[Array, "b t h w c"], encoder: Encoder, cache: Cache, first: bool) -> tuple[Float[Array, "b t2 h2 w2 c2"], Cache]:
    """The encoder on consecutive frames, the first alone or a multiple of four, given the cache of the frames before them."""
    x, cache = cached_conv(x, encoder.conv_in, "encoder.conv_in", cache)
    for i, block in enumerate(encoder.down_blocks):
        name = f"encoder.down_blocks.{i}"
        if isinstance(block, ResidualDownBlock):
            x, cache = residual_down_block(x, block, name, cache, first)
        elif isinstance(block, Resample):
            x, cache = downsample(x, block, name, cache, first)
        else:
            x, cache = residual_block(x, block, name, cache)
    x, cache = mid_block(x, encoder.mid_block, "encoder.mid_block", cache, attention)
    x = jax.nn.silu(rms_norm(x, encoder.norm_out.gamma))
    return cached_conv(x, encoder.conv_out, "encoder.conv_out", cache)


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
