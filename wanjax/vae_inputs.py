"""What `encode` and `decode` accept: weights as a VAE or as named arrays, and inputs of the right size, kind and range.

Sizes and dtypes are checked always; values only where they are there to be seen, that is outside `jit`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from wanjax.vae_config import VAE_2_1, VAE_2_2, VAEConfig, config_from_shapes
from wanjax.vae_model import VAE, init_vae
from wanjax.weights import fill

Weights = VAE | Mapping[str, Any]
"""A VAE, or its tensors by checkpoint name; those of the half that is not used may be left out."""

AnyArray = Array | np.ndarray


def as_vae(weights: Weights) -> VAE:
    """The VAE of a mapping of checkpoint names to arrays in the file's layout (jax, also traced, or numpy); a VAE as it is.

    The config is read off the shapes. ValueError, naming every tensor, where they are those of no Wan VAE.
    """
    if isinstance(weights, VAE):
        return weights
    config = config_from_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()})
    template = jax.eval_shape(lambda: init_vae(config, jax.random.key(0)))
    for half, conv in (("encoder", "quant_conv"), ("decoder", "post_quant_conv")):
        if not any(name.startswith(f"{half}.") for name in weights):
            template = replace(template, **{half: None})
            if f"{conv}.weight" not in weights:
                template = replace(template, **{conv: None})
    return fill(template, weights, what="the mapping given as weights")


def check_latents(z: Shaped[AnyArray, "..."], weights: VAE) -> None:
    """Raise unless `z` can be decoded: five axes, none empty, this VAE's channels, floating point and finite."""
    if weights.decoder is None:
        raise ValueError("decode needs the VAE's decoder, and these weights are of an encoder alone.")
    channels = weights.config.z_dim
    if z.ndim != 5:
        raise ValueError(f"latents must be (batch, {channels} channels, latent frames, height, width); got {z.shape}.")
    if z.shape[1] != channels:
        raise ValueError(f"latents must have this VAE's {channels} channels on axis 1; got {z.shape}{_looks_like(z.shape[1])}.")
    if 0 in z.shape:
        raise ValueError(f"latents must have at least one of everything; got {z.shape}.")
    _check_floating(z, "latents", "")
    if is_concrete(z):
        wrong = _number(lambda: (~jnp.isfinite(z)).sum())
        if wrong:
            raise ValueError(f"latents must be finite; got {wrong:.0f} NaN or infinite of {z.size}.")


def check_video(video: Shaped[AnyArray, "..."], weights: VAE) -> None:
    """Raise unless `video` can be encoded: (batch, 3, 4 n + 1 frames, height, width), floating point; warn once outside [-1, 1]."""
    check_frames(video, weights)
    frames = video.shape[2]
    if frames % 4 != 1:
        nearest = max(round((frames - 1) / 4), 0) * 4 + 1
        raise ValueError(f"a video has 4 n + 1 frames (one, then four for each latent frame); got {frames}: cut or repeat to {nearest}.")


def check_frames(video: Shaped[AnyArray, "..."], weights: VAE) -> None:
    """`check_video` of a part of a video, of any number of frames."""
    if weights.encoder is None:
        raise ValueError("encode needs the VAE's encoder, and these weights are of a decoder alone.")
    if video.ndim != 5 or video.shape[1] != 3:
        hint = " (channels come before frames: move the last axis to 1)" if video.ndim == 5 and video.shape[-1] == 3 else ""
        raise ValueError(f"video must be (batch, 3 colours, frames, height, width); got {video.shape}{hint}.")
    if 0 in video.shape:
        raise ValueError(f"video must have at least one of everything; got {video.shape}.")
    _check_floating(video, "video", ": frames from a file become one by frames / 127.5 - 1")
    check_size(video.shape[3], video.shape[4], weights.config)
    if is_concrete(video):
        low, high = _number(lambda: jnp.min(video)), _number(lambda: jnp.max(video))
        if not (low >= -1.001 and high <= 1.001):
            warnings.warn(f"video should be in [-1, 1]; got {low:.4g} to {high:.4g}: encoded as it is.", stacklevel=3)


def check_size(height: int, width: int, config: VAEConfig) -> None:
    """Raise unless height and width are whole latents."""
    stride = config.stride
    if height % stride or width % stride:
        nearest = [max(round(size / stride), 1) * stride for size in (height, width)]
        raise ValueError(f"height and width must be multiples of {stride}; got {height} x {width}: try {nearest[0]} x {nearest[1]}.")


def is_concrete(x: Any) -> bool:
    """Whether the values are there to be looked at, which inside `jit` they are not."""
    return not isinstance(x, jax.core.Tracer)


def _number(compute: Callable[[], Array]) -> float:
    """What is computed of concrete arrays, also where they are constants inside somebody's `jit`."""
    try:
        return float(compute())
    except jax.errors.ConcretizationTypeError:
        with jax.ensure_compile_time_eval():
            return float(compute())


def _check_floating(x: Shaped[AnyArray, "..."], what: str, hint: str) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{what} must be floating point; got {x.dtype}{hint}.")


def _looks_like(channels: int) -> str:
    """Which published VAE latents of so many channels are of."""
    for name, config in (("2.1", VAE_2_1), ("2.2", VAE_2_2)):
        if channels == config.z_dim:
            return f": {channels} channels are those of VAE {name}, so load that one"
    return ""
