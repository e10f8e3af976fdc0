"""The text encoder without torch: golden rows and tokens, equalities that hold for any weights, and what wrong input says."""

import lzma
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import initialised, randomised, small_tokenizer

from wanjax.loading import load_text_encoder, save
from wanjax.text_encoder import (
    UMT5_XXL,
    TextEncoderConfig,
    clean_prompt,
    embed_text,
    init_text_encoder,
    load_tokenizer,
    position_buckets,
    relative_bias,
    tokenize,
    wrapped_offset_buckets,
)
from wanjax.weights import fill

CONFIG = TextEncoderConfig(vocab_size=50, d_model=24, d_kv=8, d_ff=40, num_layers=3, num_heads=4)
GOLDEN = Path(__file__).parent / "golden" / "text_encoder.npz"
PROMPTS = [
    "A cat walks on the grass, realistic",
    "  two   spaces,\ta tab\nand a line  ",
    "schÃ¶n &amp; na&iuml;ve &amp;lt;b&amp;gt;",
    "“curly” quotes… and – dashes",
    "一只猫在草地上走",
    "\ufb01ligree \u200bzero width",
    "",
    "a " * 600,
]
run = jax.jit(embed_text)


@pytest.fixture(scope="module")
def weights():
    return initialised(init_text_encoder, CONFIG)


def close(a, b, tolerance=2e-6):
    """Whether two arrays are equal but for float32 rounding."""
    assert np.linalg.norm(np.asarray(a) - np.asarray(b)) <= tolerance * np.linalg.norm(np.asarray(b))


def test_rows_are_what_transformers_computed():
    """Weights and rows were written by tests/golden/make_text_encoder.py."""
    with np.load(GOLDEN) as stored:
        tensors = {name[8:]: stored[name] for name in stored.files if name.startswith("weights/")}
        ids, mask, rows = stored["ids"], stored["mask"], stored["rows"]
    template = jax.eval_shape(lambda: init_text_encoder(CONFIG, jax.random.key(0)))
    close(run(ids, mask, fill(template, tensors)), rows)


def test_a_prompt_equals_itself_alone_and_at_any_padding(weights):
    rng = np.random.default_rng(0)
    lengths, rows = (3, 11, 20), 20
    mask = (np.arange(rows) < np.array(lengths)[:, None]).astype(np.int32)
    ids = rng.integers(3, 50, (3, rows)).astype(np.int32)
    together = np.asarray(run(ids, mask, weights))
    for row, length in enumerate(lengths):
        close(run(ids[row : row + 1, :length], mask[row : row + 1, :length], weights)[0], together[row, :length])
        assert not together[row, length:].any()


def test_ids_under_the_mask_do_not_matter(weights):
    ids, mask = np.full((1, 8), 7, np.int32), np.array([[1, 1, 1, 0, 0, 0, 0, 0]], np.int32)
    other = np.where(mask, ids, 49)
    np.testing.assert_array_equal(run(ids, mask, weights), run(other, mask, weights))


def test_order_matters_through_the_relative_bias_alone(weights):
    ids, mask = np.array([[5, 6, 7, 8]], np.int32), np.ones((1, 4), np.int32)
    assert np.abs(np.asarray(run(ids, mask, weights))[0, ::-1] - np.asarray(run(ids[:, ::-1].copy(), mask, weights))[0]).max() > 1e-2
    flat = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * (0 if "relative" in str(path) else 1), weights)
    close(np.asarray(run(ids, mask, flat))[0, ::-1], np.asarray(run(ids[:, ::-1].copy(), mask, flat))[0])


def test_buckets_grow_from_single_positions_to_one_for_everything_far():
    offsets = np.array([0, -1, -7, -8, -15, -127, -128, -1000, 1, 7, 8, 127, 500])
    assert list(position_buckets(offsets, 32, 128)) == [0, 1, 7, 8, 9, 15, 15, 15, 17, 23, 24, 31, 31]


def test_bias_is_that_of_each_pairs_offset():
    table = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    bias = np.asarray(relative_bias(jnp.asarray(table), wrapped_offset_buckets(40, 32, 128)))
    offsets = np.arange(40)[None] - np.arange(40)[:, None]
    wanted = table[position_buckets(offsets.reshape(-1), 32, 128)].reshape(40, 40, 3)
    np.testing.assert_array_equal(bias, wanted.transpose(2, 0, 1))


def test_gradients_are_finite_and_match_finite_differences(weights):
    ids, mask = np.array([[5, 6, 7, 0]], np.int32), np.array([[1, 1, 1, 0]], np.int32)
    direction = randomised(weights, 3, 0.1)
    moved = lambda step: jax.tree.map(lambda w, d: w + step * d, weights, direction)
    loss = jax.jit(lambda step: jnp.sum(jnp.sin(embed_text(ids, mask, moved(step)))))
    slope = (loss(1e-2) - loss(-1e-2)) / 2e-2
    assert float(jax.jit(jax.grad(loss))(0.0)) == pytest.approx(float(slope), rel=2e-2)


def test_save_and_load_are_bitwise_inverse(tmp_path, weights):
    save(tmp_path, weights)
    again = load_text_encoder(tmp_path)
    assert again.config == weights.config
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(a, b)
    assert TextEncoderConfig.from_json(UMT5_XXL.to_json()) == UMT5_XXL


@pytest.mark.parametrize(
    ("prompt", "clean"),
    [
        (PROMPTS[1], "two spaces, a tab and a line"),
        (PROMPTS[2], "schön & naïve <b>"),
        (PROMPTS[3], '"curly" quotes… and – dashes'),
        (PROMPTS[5], "filigree \u200bzero width"),
        ("", ""),
    ],
)
def test_cleaning(prompt, clean):
    assert clean_prompt(prompt) == clean


def test_the_real_tokenizers_ids(data, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(lzma.decompress((data / "umt5_tokenizer.json.xz").read_bytes()))
    ids, mask = tokenize(load_tokenizer(tmp_path), [PROMPTS[0], ""])
    assert ids.shape == mask.shape == (2, 512)
    assert list(ids[0, :10]) == [320, 6283, 14869, 281, 369, 312, 70279, 275, 124690, 1]
    assert list(mask.sum(1)) == [10, 1]
    assert ids[1, 0] == 1


def test_a_prompt_too_long_is_cut_with_a_warning_and_keeps_its_end():
    with pytest.warns(UserWarning, match="prompt 1 has 9 tokens, of which the model reads the first 5"):
        ids, mask = tokenize(small_tokenizer(), ["a", "a red circle moves left on a black background"], 6)
    assert list(mask.sum(1)) == [2, 6]
    assert ids[1, -1] == 1


def test_wrong_input_is_told_in_one_sentence(weights, tmp_path, unchecked):
    ids, mask = np.zeros((1, 4), np.int32), np.ones((1, 4), np.int32)
    with pytest.raises(ValueError, match=r"ids \(1, 4\) and mask \(1, 3\)"):
        embed_text(ids, mask[:, :3], weights)
    with pytest.raises(ValueError, match=r"\[0, 50\); got ids from 0 to 50"):
        embed_text(np.array([[0, 50]], np.int32), mask[:, :2], weights)
    with pytest.raises(TypeError, match="one string"):
        tokenize(small_tokenizer(), "a cat")
    with pytest.raises(ValueError, match="at least one prompt"):
        tokenize(small_tokenizer(), [])
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="not a readable tokenizer"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match='says "t5"'):
        TextEncoderConfig.from_json({"model_type": "t5"})


def test_an_id_out_of_the_vocabulary_inside_jit_is_nan(weights):
    out = run(np.array([[1, 2], [3, 60]], np.int32), np.ones((2, 2), np.int32), weights)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).any()
