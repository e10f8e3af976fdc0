"""The transformer without torch: golden numbers, equalities that hold for any weights, gradients, and what wrong input says."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import initialised, randomised

from wanjax.loading import load_transformer, save
from wanjax.transformer import (
    T2V_1_3B,
    T2V_14B,
    T2V_A14B,
    TI2V_5B,
    TransformerConfig,
    init_transformer,
    keep_float32,
    rope_table,
    transformer_sizes,
    velocity,
)
from wanjax.weights import fill

CONFIG = replace(
    T2V_1_3B,
    num_attention_heads=2,
    attention_head_dim=12,
    text_dim=16,
    freq_dim=16,
    ffn_dim=32,
    num_layers=2,
    in_channels=4,
    out_channels=4,
)
run = jax.jit(velocity, static_argnames=("attend", "cross_attend", "remat"))
GOLDEN = Path(__file__).parent / "golden" / "transformer.npz"


@pytest.fixture(scope="module")
def weights():
    return initialised(init_transformer, CONFIG)


@pytest.fixture(scope="module")
def given():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return draw(2, 4, 2, 4, 6), np.array([900.0, 250.0], np.float32), draw(2, 7, 16)


def close(a, b, tolerance=2e-6):
    """Whether two arrays are equal but for float32 rounding."""
    assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= tolerance * np.linalg.norm(np.asarray(b))


def test_velocity_is_what_diffusers_computed():
    """Weights and outputs were written by tests/golden/make_transformer.py."""
    with np.load(GOLDEN) as stored:
        tensors = {name[8:]: stored[name] for name in stored.files if name.startswith("weights/")}
        inputs = [stored[name] for name in ("latents", "timestep", "text")]
        tokens, scalar, per_token = stored["timestep_tokens"], stored["velocity"], stored["velocity_tokens"]
    template = jax.eval_shape(lambda: init_transformer(CONFIG, jax.random.key(0)))
    weights = fill(template, tensors, transformer_sizes(CONFIG))
    close(run(*inputs, weights), scalar)
    close(run(inputs[0], tokens, inputs[2], weights), per_token)


def test_a_video_equals_itself_alone_in_any_batch(weights, given):
    together = run(*given, weights)
    for i in range(2):
        close(run(*(array[i : i + 1] for array in given), weights), together[i : i + 1])


def test_one_timestep_equals_the_same_for_every_token(weights, given):
    latents, timestep, text = given
    tokens = np.repeat(timestep[:, None], 2 * 2 * 3, axis=1)
    close(run(latents, tokens, text, weights), run(*given, weights))


def test_order_of_text_rows_does_not_matter(weights, given):
    latents, timestep, text = given
    close(run(latents, timestep, text[:, ::-1], weights), run(*given, weights))


def test_jit_remat_and_another_attention_change_nothing(weights, given):
    plain = run(*given, weights)
    close(jax.jit(velocity)(*given, weights), plain)
    close(run(*given, weights, remat=True), plain)

    def by_hand(q, k, v):
        scores = jnp.einsum("bsnd,blnd->bnsl", q, k) * q.shape[-1] ** -0.5
        return jnp.einsum("bnsl,blnd->bsnd", jax.nn.softmax(scores), v)

    close(run(*given, weights, attend=by_hand, cross_attend=by_hand), plain)


@pytest.mark.parametrize("remat", [False, jax.checkpoint_policies.dots_saveable], ids=["no remat", "remat"])
def test_gradients_match_finite_differences(weights, given, remat):
    latents, timestep, text = (jnp.asarray(array) for array in given)
    direction = randomised(weights, 5, 0.1)
    moved = lambda step: jax.tree.map(lambda w, d: w + step * d, weights, direction)
    loss = jax.jit(lambda step: jnp.sum(jnp.sin(velocity(latents, timestep, text, moved(step), remat=remat))))
    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert float(jax.jit(jax.grad(loss))(0.0)) == pytest.approx(float(slope), rel=2e-2)


def test_vmap_over_videos_equals_a_batch(weights, given):
    one = lambda latents, timestep, text: velocity(latents[None], timestep[None], text[None], weights)[0]
    close(jax.jit(jax.vmap(one))(*given), run(*given, weights))


def test_bfloat16_keeps_what_must_be_float32(tmp_path, weights, given):
    save(tmp_path, weights)
    half = load_transformer(tmp_path, dtype=jnp.bfloat16)
    assert half.blocks.attn1.to_q.weight.dtype == jnp.bfloat16
    assert half.condition_embedder.time_embedder.linear_1.weight.dtype == jnp.float32
    assert half.scale_shift_table.dtype == half.blocks.scale_shift_table.dtype == half.blocks.norm2.weight.dtype == jnp.float32
    assert keep_float32("blocks.3.scale_shift_table")
    assert not keep_float32("blocks.3.attn1.norm_q.weight")
    out = run(jnp.asarray(given[0], jnp.bfloat16), given[1], jnp.asarray(given[2], jnp.bfloat16), half)
    assert out.dtype == jnp.bfloat16
    assert 0 < np.linalg.norm(np.asarray(out, np.float32) - run(*given, weights)) < 0.05 * np.linalg.norm(run(*given, weights))


def test_save_and_load_are_bitwise_inverse(tmp_path, weights):
    save(tmp_path, weights)
    again = load_transformer(tmp_path)
    assert again.config == weights.config
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("config", [T2V_1_3B, T2V_14B, T2V_A14B, TI2V_5B])
def test_configs_survive_json(config):
    assert TransformerConfig.from_json(config.to_json()) == config


def test_rope_turns_time_rows_and_columns_by_their_own_angles():
    rope = rope_table((3, 2, 4), 128)
    assert rope.cos.shape == rope.sin.shape == (24, 128)
    np.testing.assert_allclose(rope.cos[0], 1)
    np.testing.assert_array_equal(rope.cos[:, :64], rope.cos[:, 64:])
    np.testing.assert_array_equal(rope.sin[:, :64], -rope.sin[:, 64:])
    last = np.concatenate([2 * 10000.0 ** -(np.arange(22) / 22), 10000.0 ** -(np.arange(21) / 21), 3 * 10000.0 ** -(np.arange(21) / 21)])
    np.testing.assert_allclose(rope.sin[-1, 64:], np.sin(last), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, t, y: (x[:, :3], t, y), "latents have 3 channels, this model takes 4"),
        (lambda x, t, y: (x[..., :5], t, y), r"multiples of \(1, 2, 2\)"),
        (lambda x, t, y: (x, t, y[..., :8]), "text has 8 channels, this model takes 16"),
        (lambda x, t, y: (x, np.repeat(t[:, None], 5, 1), y), r"one a token \(2, 12\); got \(2, 5\)"),
        (lambda x, t, y: (x[:, :3], t, y[..., :8]), "3 channels.*8 channels"),
    ],
)
def test_wrong_input_is_told_in_one_message(weights, given, unchecked, change, message):
    with pytest.raises(ValueError, match=message):
        velocity(*change(*given), weights)


def test_image_checkpoints_and_other_variants_are_refused_by_name():
    with pytest.raises(ValueError, match="image-to-video"):
        TransformerConfig.from_json({"image_dim": 1280})
    with pytest.raises(ValueError, match="WanVACETransformer3DModel"):
        TransformerConfig.from_json({"_class_name": "WanVACETransformer3DModel"})
    with pytest.raises(ValueError, match="rms_norm_across_heads"):
        TransformerConfig.from_json({"qk_norm": "rms_norm"})
