"""Small VAEs of every kind of architecture, their weights drawn by tensor name, so that diffusers and wanjax are given the same ones."""

from dataclasses import replace

import jax
import numpy as np
from models import small_vae

from wanjax.vae import VAE, VAEConfig, init_vae
from wanjax.weights import expected, fill

CONFIGS: dict[str, VAEConfig] = {
    "2.1": small_vae("2.1"),
    "2.2": small_vae("2.2"),
    # 2.1's levels on 2.2's patches, another order of frame rates, and as many blocks as the real ones have
    "patches": replace(
        small_vae("2.1"), num_res_blocks=2, in_channels=12, out_channels=12, patch_size=2, temperal_downsample=(True, True, False)
    ),
}

# The shortest that halves the frame rate twice: for tests that compile many programs.
SHORT: dict[str, VAEConfig] = {
    kind: replace(small_vae(kind), dim_mult=(1, 2, 2), temperal_downsample=(True, True)) for kind in ("2.1", "2.2")
}


def template(config: VAEConfig) -> VAE:
    """A VAE of shapes."""
    return jax.eval_shape(lambda: init_vae(config, jax.random.key(0)))


def random_tensors(config: VAEConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors by checkpoint name: kernels by fan-in, gains near 1, biases not zero, so that none is at its default.

    The last convolution is halved, for a video that lies within [-1, 1] for the most part: clipping would hide differences.
    """
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, shape in sorted(expected(template(config)).items()):
        values = rng.normal(size=shape)
        if name.endswith("gamma"):
            values = 1 + 0.3 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        else:
            values = values * np.prod(shape[1:]) ** -0.5
        if name.startswith("decoder.conv_out"):
            values = values / 2
        drawn[name] = values.astype(np.float32)
    return drawn


def random_vae(config: VAEConfig, seed: int = 0) -> VAE:
    """The VAE of `random_tensors`."""
    return fill(template(config), random_tensors(config, seed))


def random_latents(config: VAEConfig, seed: int, *, batch: int = 1, frames: int = 3, size: tuple[int, int] = (2, 3)) -> np.ndarray:
    """Latents of about the real ones' spread."""
    return np.random.default_rng(seed).normal(size=(batch, config.z_dim, frames, *size)).astype(np.float32)


def random_video(config: VAEConfig, seed: int, *, batch: int = 1, frames: int = 9, size: tuple[int, int] = (2, 3)) -> np.ndarray:
    """A video of uniform noise, `size` latents large."""
    pixels = (config.stride * size[0], config.stride * size[1])
    return np.random.default_rng(seed).uniform(-1, 1, (batch, 3, frames, *pixels)).astype(np.float32)
