"""Whole pipelines against diffusers' WanPipeline: the same weights, text and noise give the same latents and frames.

The random models are saved by wanjax and opened by diffusers, so this is also the test that diffusers opens what we save.
"""

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from models import small_wan

import wanjax
from wanjax.loading import resolve

pytestmark = pytest.mark.parity

PROMPTS = ["a red circle moves left", "a blue square"]


def opened_by_diffusers(path, dtype=torch.float32):
    """The pipeline of a folder that wanjax wrote."""
    pipeline = diffusers.WanPipeline.from_pretrained(path, torch_dtype=dtype)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.mark.parametrize("kind", ["2.1", "a14b", "5b"])
def test_latents_and_frames_equal_diffusers(kind, tmp_path):
    wan = small_wan(kind)
    wanjax.save(tmp_path, wan)
    pipeline = opened_by_diffusers(tmp_path)
    channels, stride = wan.vae.config.z_dim, wan.vae.config.stride
    size = 4 * stride
    noise = np.random.default_rng(0).normal(size=(2, channels, 2, 4, 4)).astype(np.float32)
    options = dict(height=size, width=size, num_frames=5, num_inference_steps=6, guidance_scale=4.0)
    if kind == "a14b":
        options["guidance_scale_2"] = 2.0
    with torch.no_grad():
        theirs = pipeline(PROMPTS, negative_prompt="", latents=torch.from_numpy(noise), output_type="latent", **options).frames.numpy()
        frames = pipeline(PROMPTS, negative_prompt="", latents=torch.from_numpy(noise), output_type="np", **options).frames
    ours = np.asarray(wanjax.generate(wan, PROMPTS, latents=noise, output_type="latent", **options))
    assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)
    ours_frames = wanjax.generate(wan, PROMPTS, latents=noise, output_type="float", **options)
    assert ours_frames.shape == frames.shape
    assert np.abs(ours_frames - frames).max() <= 1e-3


def test_bfloat16_is_no_farther_from_float32_than_diffusers_is(tmp_path):
    """Rounding is chance, so the errors of four models and eight videos each are compared together."""
    prompts = PROMPTS * 4
    noise = np.random.default_rng(0).normal(size=(8, 4, 2, 4, 4)).astype(np.float32)
    options = dict(height=32, width=32, num_frames=5, num_inference_steps=6, guidance_scale=4.0, output_type="latent")
    errors = []
    for seed in (0, 10, 20, 30):
        wan = small_wan("2.1", seed)
        wanjax.save(tmp_path / str(seed), wan)
        exact = np.asarray(wanjax.generate(wan, prompts, latents=noise, **options))
        ours = np.asarray(wanjax.generate(wanjax.load(tmp_path / str(seed), dtype=jnp.bfloat16), prompts, latents=noise, **options))
        with torch.no_grad():
            pipeline = opened_by_diffusers(tmp_path / str(seed), torch.bfloat16)
            theirs = pipeline(prompts, negative_prompt="", latents=torch.from_numpy(noise), **options).frames.float().numpy()
        errors.append([np.linalg.norm(latents - exact) / np.linalg.norm(exact) for latents in (ours, theirs)])
    ours, theirs = np.mean(errors, axis=0)
    assert 0 < ours <= theirs


def test_the_model_that_comes_with_the_package_is_diffusers_too():
    """WanPipeline opens the shipped folder, tokenizer and half-precision weights included, and makes the same latents."""
    wan = wanjax.load("tiny")
    pipeline = opened_by_diffusers(resolve("tiny"))
    noise = np.random.default_rng(0).normal(size=(1, 16, 5, 8, 8)).astype(np.float32)
    prompt = "a red circle moves left on a black background"
    options = dict(height=64, width=64, num_frames=17, num_inference_steps=20, guidance_scale=1.0, output_type="latent")
    with torch.no_grad():
        theirs = pipeline([prompt], latents=torch.from_numpy(noise), **options).frames.numpy()
    ours = np.asarray(wanjax.generate(wan, prompt, latents=noise, **options))
    assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)
