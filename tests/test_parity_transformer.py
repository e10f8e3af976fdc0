"""The transformer against diffusers' WanTransformer3DModel: tensors of every real checkpoint, and numbers at real widths."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from wanjax.loading import load_transformer
from wanjax.transformer import T2V_1_3B, T2V_14B, T2V_A14B, TI2V_5B, init_transformer, transformer_sizes, velocity
from wanjax.weights import expected, fill

pytestmark = pytest.mark.parity

REAL = {"1.3B": T2V_1_3B, "14B": T2V_14B, "A14B": T2V_A14B, "5B": TI2V_5B}
SMALL = replace(T2V_1_3B, num_attention_heads=3, attention_head_dim=20, text_dim=24, freq_dim=32, ffn_dim=80, num_layers=3)


def theirs(config, device="cpu"):
    """diffusers' model of our config."""
    options = {key: value for key, value in config.to_json().items() if key != "_class_name"}
    with torch.device(device):
        return diffusers.WanTransformer3DModel(**options).eval()


def randomised(model, seed):
    """Every parameter drawn: maps scaled by fan-in, gains near 1, tables, biases and offsets small but not zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if parameter.ndim >= 2 and "scale_shift_table" not in name:
                parameter.mul_(parameter[0].numel() ** -0.5)
            else:
                parameter.mul_(0.3)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1)
    return model


def ours(model, config):
    """Our weights, read from theirs."""
    template = jax.eval_shape(lambda: init_transformer(config, jax.random.key(0)))
    return fill(template, {name: p.detach().numpy() for name, p in model.state_dict().items()}, transformer_sizes(config))


def inputs(config, seed, grid=(3, 6, 8), tokens=21, batch=2, per_token=False):
    """Latents, timesteps and text."""
    rng = np.random.default_rng(seed)
    latents = rng.normal(size=(batch, config.in_channels, *grid)).astype(np.float32)
    shape = (batch, grid[0] * grid[1] * grid[2] // 4) if per_token else (batch,)
    timestep = rng.uniform(0, 1000, shape).astype(np.float32)
    return latents, timestep, rng.normal(size=(batch, tokens, config.text_dim)).astype(np.float32)


def run(model, latents, timestep, text, dtype=torch.float32):
    with torch.no_grad():
        out = model(torch.from_numpy(latents).to(dtype), torch.from_numpy(timestep), torch.from_numpy(text).to(dtype), return_dict=False)[0]
    return out.double().numpy()


def distance(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


@pytest.mark.parametrize("name", REAL)
def test_tensors_of_every_real_checkpoint(name):
    config = REAL[name]
    template = jax.eval_shape(lambda: init_transformer(config, jax.random.key(0)))
    shapes = {key: tuple(value.shape) for key, value in theirs(config, "meta").state_dict().items()}
    assert expected(template, transformer_sizes(config)) == shapes


@pytest.mark.parametrize("per_token", [False, True], ids=["timestep a video", "timestep a token"])
@pytest.mark.parametrize("seed", [0, 1])
def test_velocity_equals_diffusers(seed, per_token):
    model = randomised(theirs(SMALL), seed)
    given = inputs(SMALL, seed, per_token=per_token)
    assert distance(jax.jit(velocity)(*given, ours(model, SMALL)), run(model, *given)) <= 2e-6


@pytest.mark.parametrize(("name", "layers"), [("1.3B", 2), ("5B", 2), ("14B", 1)])
def test_first_blocks_at_real_width_equal_diffusers(name, layers):
    config = replace(REAL[name], num_layers=layers)
    model = randomised(theirs(config), 0)
    latents, timestep, text = inputs(config, 0, grid=(2, 4, 6), tokens=16, batch=1, per_token=name == "5B")
    mine = jax.jit(velocity)(latents, timestep, text, ours(model, config))
    peer = run(model, latents, timestep, text)
    exact = run(model.double(), latents, timestep, text, torch.float64)
    # At these widths float32 itself is about 2e-6 from float64, so the measure is diffusers' own distance.
    assert distance(mine, exact) <= max(2e-6, distance(peer, exact))


def test_bfloat16_is_no_farther_from_float64_than_diffusers_is(tmp_path):
    """Rounding is chance, so errors of several models and inputs are compared together."""
    errors = []
    for seed in range(4):
        model = randomised(theirs(SMALL), seed)
        model.save_pretrained(tmp_path / str(seed))
        half = diffusers.WanTransformer3DModel.from_pretrained(tmp_path / str(seed), torch_dtype=torch.bfloat16).eval()
        weights = load_transformer(tmp_path / str(seed), dtype=jnp.bfloat16)
        latents, timestep, text = inputs(SMALL, seed, batch=4)
        exact = run(model.double(), latents, timestep, text, torch.float64)
        mine = jax.jit(velocity)(jnp.asarray(latents, jnp.bfloat16), timestep, jnp.asarray(text, jnp.bfloat16), weights)
        assert mine.dtype == jnp.bfloat16
        peer = run(half, latents, timestep, text, torch.bfloat16)
        errors.append([distance(mine.astype(jnp.float32), exact), distance(peer, exact)])
    mine, peer = np.mean(errors, axis=0)
    assert 0 < mine <= peer
