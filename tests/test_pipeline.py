"""`generate` and its parts on small random models: what comes out, what it depends on, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import small_wan

import wanjax
from wanjax import pipeline

PROMPTS = ["a red circle moves left", "a blue square"]


@pytest.fixture(scope="module")
def wan():
    return small_wan()


@pytest.fixture(scope="module")
def latents(wan):
    """Two prompts, seeds 3 and 4, two videos each."""
    return wanjax.generate(wan, PROMPTS, seed=[3, 4], num_videos_per_prompt=2, output_type="latent")


def test_outputs_agree(wan):
    latent = wanjax.generate(wan, PROMPTS[0], output_type="latent")
    assert latent.shape == (1, 4, 2, 4, 4)
    frames, values = wanjax.generate(wan, PROMPTS[0]), wanjax.generate(wan, PROMPTS[0], output_type="float")
    assert frames.shape == values.shape == (1, 5, 32, 32, 3)
    assert frames.dtype == np.uint8
    assert values.dtype == np.float32
    assert values.min() >= 0
    assert values.max() <= 1
    assert np.abs(frames / 255 - values).max() <= 0.51 / 255
    decoded = wanjax.decode(wanjax.denormalize_latents(latent, wan.vae.config), wan.vae)
    np.testing.assert_allclose(np.moveaxis(np.asarray(decoded), 1, -1) / 2 + 0.5, values, atol=1e-5)


def test_a_video_is_the_same_at_any_batch_position(wan, latents):
    """Item (prompt, video j) of a batch equals the same prompt and seed alone; several videos of a prompt differ."""
    alone = wanjax.generate(wan, PROMPTS[1], seed=4, output_type="latent")
    np.testing.assert_allclose(latents[2], alone[0], atol=1e-5)
    swapped = wanjax.generate(wan, PROMPTS[::-1], seed=[4, 3], num_videos_per_prompt=2, output_type="latent")
    np.testing.assert_allclose(latents[:2], swapped[2:], atol=1e-5)
    assert np.abs(latents[0] - latents[1]).max() > 0.1


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"guidance_scale": 2.0}, {"guidance_scale": 1.0}, {"flow_shift": 5.0}, {"negative_prompt": "red"}, {"solver": "euler"}],
)
def test_every_choice_matters(wan, other):
    plain = wanjax.generate(wan, PROMPTS[0], output_type="latent")
    assert np.abs(plain - wanjax.generate(wan, PROMPTS[0], output_type="latent", **other)).max() > 1e-3


def test_guidance_branches_one_at_a_time_give_the_same(wan):
    together = wanjax.generate(wan, PROMPTS[0], output_type="latent")
    apart = wanjax.generate(wan, PROMPTS[0], output_type="latent", one_branch_at_a_time=True)
    assert np.linalg.norm(apart - together) <= 1e-5 * np.linalg.norm(together)


def test_other_numbers_compile_nothing(wan):
    wanjax.generate(wan, PROMPTS[0])
    before = pipeline._denoise_step._cache_size(), pipeline._embed._cache_size()
    wanjax.generate(
        wan, "a green circle", seed=9, guidance_scale=2.0, flow_shift=7.0, negative_prompt="black", num_inference_steps=3, solver="dpm"
    )
    assert (pipeline._denoise_step._cache_size(), pipeline._embed._cache_size()) == before


def test_two_experts_share_the_steps_at_the_boundary():
    wan = small_wan("a14b")
    request = pipeline.make_request(wan, PROMPTS[0], num_inference_steps=10)
    high = request.steps.high_noise
    assert high[0]
    assert not high[-1]
    np.testing.assert_array_equal(request.steps.guidance_scale, np.where(high, 4.0, 2.0).astype(np.float32))
    both = wanjax.generate(wan, PROMPTS[0], num_inference_steps=10, output_type="latent")
    one = wanjax.generate(replace(wan, transformer_2=wan.transformer), PROMPTS[0], num_inference_steps=10, output_type="latent")
    assert np.abs(both - one).max() > 1e-3


def test_callback_sees_every_step_and_may_replace_latents(wan):
    seen = []
    wanjax.generate(wan, PROMPTS[0], output_type="latent", callback=lambda i, t, x: seen.append((i, t, x.shape)))
    assert [i for i, _, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1] == 999
    assert seen[0][2] == (1, 4, 2, 4, 4)
    zeroed = wanjax.generate(wan, PROMPTS[0], output_type="latent", callback=lambda i, t, x: jnp.zeros_like(x) if i == 3 else None)
    assert not np.asarray(zeroed).any()


def test_given_latents_take_the_place_of_noise(wan):
    noise = wanjax.sampler.initial_noise(wanjax.sampler.video_keys(5), (4, 2, 4, 4))
    given = wanjax.generate(wan, PROMPTS[0], latents=noise, output_type="latent")
    np.testing.assert_array_equal(given, wanjax.generate(wan, PROMPTS[0], seed=5, output_type="latent"))


def test_the_whole_sampling_works_inside_one_jit(wan):
    request = pipeline.make_request(wan, PROMPTS[0])
    text, negative = (pipeline.embed_prompts(wan, prompts) for prompts in (request.prompts, request.negative_prompts))

    @jax.jit
    def whole(noise, steps, weights, text, negative):
        return wanjax.sampler.sample(wanjax.sampler.guided(wanjax.velocity, [weights], [text, negative]), noise, steps)

    noise = wanjax.sampler.initial_noise(wanjax.sampler.video_keys(0), request.latent_shape)
    latents = whole(noise, request.steps, wan.transformer, text, negative)
    np.testing.assert_allclose(latents, wanjax.generate(wan, PROMPTS[0], output_type="latent"), atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": []}, "prompt is a string or a list of at least one string"),
        ({"prompt": [1]}, "prompt is a string or a list"),
        ({"height": 40}, "height must be a multiple of 16 .* got 40 x 32: try 32 x 32|got 40 x 32: try 48 x 32"),
        ({"width": -16}, "got 32 x -16: try 32 x 16"),
        ({"num_frames": 15}, "num_frames is 4 n \\+ 1 .* got 15: try 13|got 15: try 17"),
        ({"num_frames": 0}, "got 0: try 1"),
        ({"num_inference_steps": 0}, "at least 1 step; got 0"),
        ({"flow_shift": 0.0}, "shift must be a number above 0"),
        ({"guidance_scale": float("nan")}, "guidance scales are finite"),
        ({"guidance_scale_2": 3.0}, "guidance_scale_2=3.0 is for the low-noise expert"),
        ({"negative_prompt": ["a", "b"]}, "got 2 for 1 prompts"),
        ({"seed": [1, 2]}, "seed is one for all or one a prompt; got 2"),
        ({"seed": -1}, "needs seeds in 0"),
        ({"num_videos_per_prompt": 0}, "num_videos_per_prompt is at least 1; got 0"),
        ({"solver": "heun"}, "solver is one of unipc, dpm, euler; got 'heun'"),
        ({"output_type": "pil"}, "output_type is"),
        ({"latents": np.zeros((1, 4, 1, 4, 4), np.float32)}, r"latents must be \(1, 4, 2, 4, 4\)"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments_are_one_sentence(wan, arguments, message):
    with pytest.raises(ValueError, match=message):
        wanjax.generate(wan, **{"prompt": PROMPTS[0], **arguments})


@pytest.mark.parametrize("kind", ["2.1", "a14b", "5b"])
def test_latents_are_diffusers_latents(kind):
    """Against numbers that golden/make_pipeline.py took from diffusers."""
    wan = small_wan(kind)
    expected = np.load(Path(__file__).parent / "golden" / "pipeline.npz")[kind]
    noise = np.random.default_rng(0).normal(size=expected.shape).astype(np.float32)
    size = 4 * wan.vae.config.stride
    options = {"guidance_scale_2": 2.0} if kind == "a14b" else {}
    latents = wanjax.generate(
        wan, PROMPTS, latents=noise, height=size, width=size, num_inference_steps=6, guidance_scale=4.0, output_type="latent", **options
    )
    assert np.linalg.norm(latents - expected) <= 1e-5 * np.linalg.norm(expected)
