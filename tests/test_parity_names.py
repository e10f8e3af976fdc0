"""The original releases' names become what diffusers' own converters make of them, and those are the models' tensors."""

import jax
import pytest

torch = pytest.importorskip("torch")
single_file = pytest.importorskip("diffusers.loaders.single_file_utils")

from wanjax.names import to_diffusers
from wanjax.transformer import T2V_1_3B, init_transformer, transformer_sizes
from wanjax.vae import VAE_2_1, init_vae
from wanjax.weights import expected

pytestmark = pytest.mark.parity

BOTH = ("weight", "bias")


def original_transformer(layers):
    """The tensor names of an original Wan text-to-video transformer."""
    ends = [f"{name}.{end}" for name in ("patch_embedding", "time_projection.1", "head.head") for end in BOTH]
    ends += [f"{name}.{i}.{end}" for name in ("text_embedding", "time_embedding") for i in (0, 2) for end in BOTH]
    block = ["modulation", *(f"norm3.{end}" for end in BOTH), *(f"ffn.{i}.{end}" for i in (0, 2) for end in BOTH)]
    for attention in ("self_attn", "cross_attn"):
        block += [f"{attention}.{part}.{end}" for part in "qkvo" for end in BOTH]
        block += [f"{attention}.norm_{part}.weight" for part in "qk"]
    return [*ends, "head.modulation", *(f"blocks.{i}.{name}" for i in range(layers) for name in block)]


def original_vae():
    """The tensor names of the original Wan 2.1 VAE: rows of residual blocks and resamplers."""
    residual = ["residual.0.gamma", "residual.3.gamma", *(f"residual.{i}.{end}" for i in (2, 6) for end in BOTH)]
    shortcut, resample, in_time = ([f"{name}.{end}" for end in BOTH] for name in ("shortcut", "resample.1", "time_conv"))
    attention = ["norm.gamma", *(f"{name}.{end}" for name in ("to_qkv", "proj") for end in BOTH)]
    down = {2: resample, 5: resample + in_time, 8: resample + in_time}
    up = {3: resample + in_time, 7: resample + in_time, 11: resample}
    names = [f"{name}.{end}" for name in ("conv1", "conv2") for end in BOTH]
    for half, row, length, others, wider in (("encoder", "downsamples", 11, down, (3, 6)), ("decoder", "upsamples", 15, up, (4,))):
        parts = {f"{row}.{i}": others.get(i, residual + (shortcut if i in wider else [])) for i in range(length)}
        parts |= {"middle.0": residual, "middle.1": attention, "middle.2": residual, "head": ["0.gamma", "2.weight", "2.bias"]}
        parts["conv1"] = list(BOTH)
        names += [f"{half}.{part}.{end}" for part, ends in parts.items() for end in ends]
    return names


def theirs(names, converter):
    """Each name and the one that diffusers gives it."""
    found = converter({name: torch.tensor([i]) for i, name in enumerate(names)})
    return {names[int(value)]: name for name, value in found.items()}


def test_transformer_names():
    names = original_transformer(T2V_1_3B.num_layers)
    assert dict(to_diffusers(names)) == theirs(names, single_file.convert_wan_transformer_to_diffusers)
    template = jax.eval_shape(lambda: init_transformer(T2V_1_3B, jax.random.key(0)))
    assert set(to_diffusers(names).values()) == set(expected(template, transformer_sizes(T2V_1_3B)))
    repacked = [f"model.diffusion_model.{name}" for name in names]
    assert list(to_diffusers(repacked).values()) == list(to_diffusers(names).values())


def test_vae_names():
    names = original_vae()
    assert dict(to_diffusers(names)) == theirs(names, single_file.convert_wan_vae_to_diffusers)
    template = jax.eval_shape(lambda: init_vae(VAE_2_1, jax.random.key(0)))
    assert set(to_diffusers(names).values()) == set(expected(template))
