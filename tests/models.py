"""Small random models for tests: every architecture of the family at a size where a step takes milliseconds."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from wanjax.loading import Wan
from wanjax.presets import Preset
from wanjax.text_encoder import TextEncoderConfig, init_text_encoder
from wanjax.transformer import TransformerConfig, init_transformer
from wanjax.vae import VAE_2_1, VAE_2_2, VAEConfig, init_vae

WORDS = ["a", "red", "green", "blue", "circle", "square", "moves", "left", "right", "on", "black", "background"]


def randomised(module, seed: int, scale: float = 0.2):
    """The module with every array drawn anew: norms near 1, everything else small, so that no weight is at its default."""
    leaves, tree = jax.tree.flatten(module)
    rng = np.random.default_rng(seed)
    drawn = []
    for leaf in leaves:
        values = rng.normal(size=leaf.shape) * scale
        if leaf.ndim <= 2 and bool(np.all(np.asarray(leaf) == 1)):
            values = 1 + values
        elif leaf.ndim >= 2:
            values = values / scale * np.prod(leaf.shape[-2:-1]) ** -0.5
        drawn.append(jnp.asarray(values, leaf.dtype))
    return jax.tree.unflatten(tree, drawn)


def initialised(init, config, seed: int = 0):
    """Random weights of a config, no array at its default; drawn in one compiled program."""
    return randomised(jax.jit(init, static_argnums=0)(config, jax.random.key(0)), seed)


def small_vae(kind: str) -> VAEConfig:
    """2.1's or 2.2's VAE at a base of 8 channels and one residual block a level."""
    small = dict(base_dim=8, num_res_blocks=1)
    if kind == "2.1":
        return VAEConfig(**small, z_dim=4, latents_mean=VAE_2_1.latents_mean[:4], latents_std=VAE_2_1.latents_std[:4])
    return VAEConfig(
        **small,
        decoder_base_dim=8,
        z_dim=8,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=VAE_2_2.latents_mean[:8],
        latents_std=VAE_2_2.latents_std[:8],
    )


def small_tokenizer() -> Tokenizer:
    """A T5 tokenizer (unigram, `</s>` appended) of a few words."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -1.0) for word in WORDS)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="\u2581", prepend_scheme="always", split=True)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


def small_wan(kind: str = "2.1", seed: int = 0) -> Wan:
    """A whole random model: "2.1" (one expert), "a14b" (two experts) or "5b" (VAE 2.2, timesteps a token)."""
    vae_config = small_vae("2.2" if kind == "5b" else "2.1")
    architecture = TransformerConfig(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=vae_config.z_dim,
        out_channels=vae_config.z_dim,
        text_dim=16,
        freq_dim=32,
        ffn_dim=48,
        num_layers=2,
    )
    text_config = TextEncoderConfig(vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    preset = Preset(
        "small",
        None,
        None,
        sizes=((32, 32),),
        num_frames=5,
        fps=8,
        num_inference_steps=4,
        flow_shift=3.0,
        guidance_scale=4.0 if kind == "a14b" else 3.0,
        guidance_scale_2=2.0 if kind == "a14b" else None,
        boundary_ratio=0.875 if kind == "a14b" else None,
        expand_timesteps=kind == "5b",
        negative_prompt="",
    )
    return Wan(
        preset,
        small_tokenizer(),
        initialised(init_text_encoder, text_config, seed + 1),
        initialised(init_transformer, architecture, seed + 2),
        initialised(init_transformer, architecture, seed + 3) if kind == "a14b" else None,
        initialised(init_vae, vae_config, seed + 4),
    )


def count_parameters(module: eqx.Module) -> int:
    """Numbers in a module."""
    return sum(leaf.size for leaf in jax.tree.leaves(module))
