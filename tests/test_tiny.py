"""The tiny model that comes with the package does what its captions say, and its training runs from pixels to a folder."""

import re
from dataclasses import astuple

import jax
import jax.numpy as jnp
import judge
import numpy as np
import pytest
import tiny_world
import train_tiny

from wanjax.attention import attention
from wanjax.loading import Wan, load
from wanjax.pipeline import generate
from wanjax.text_encoder import tokenize
from wanjax.vae import decode, encode


@pytest.fixture(scope="module")
def tiny() -> Wan:
    return load("tiny")


def test_videos_show_what_their_captions_say(tiny):
    trained, held_out = tiny_world.split()
    words = [*trained[3::23], *held_out[1::9]]
    videos = generate(tiny, [str(w) for w in words], seed=list(range(len(words))))
    assert videos.shape == (12, 17, 64, 64, 3)
    right = np.array([judge.agreement(judge.read(video), astuple(w)) for video, w in zip(videos, words, strict=True)])
    assert (right.sum(0) >= (11, 9, 10, 11)).all(), right  # colour, shape, direction, background


@pytest.mark.parametrize("frames", [1, 5, 9, 17])
def test_the_autoencoder_keeps_clips_of_every_length(tiny, frames):
    rng = np.random.default_rng(frames)
    clips = [train_tiny.random_clip(rng, frames) for _ in range(4)]
    video = np.stack([clip.frames for clip in clips])
    error = np.asarray(decode(encode(video, tiny.vae).mean, tiny.vae)) - video
    psnr = -10 * np.log10(np.mean(error**2, axis=(1, 2, 3, 4)) / 4)
    assert psnr.min() > 25, psnr


def test_every_caption_is_made_of_known_words(tiny):
    captions = [str(words) for words in tiny_world.every_combination()]
    ids, mask = tokenize(tiny.tokenizer, captions, train_tiny.ROWS)
    assert tiny.tokenizer.token_to_id("<unk>") not in ids
    assert (mask.sum(1) == 10).all()
    assert [tiny.tokenizer.decode(list(row[:9])) for row in ids] == captions


def test_the_last_text_row_stands_for_all_padding():
    q, k, v = (jax.random.normal(key, (2, rows, 2, 8)) for key, rows in zip(jax.random.split(jax.random.key(0), 3), (5, 4, 4), strict=True))
    padded = [jnp.concatenate([x, jnp.repeat(x[:, -1:], 512 - 4, 1)], 1) for x in (k, v)]
    np.testing.assert_allclose(train_tiny.attend_to_all_rows(q, k, v), attention(q, *padded), atol=1e-5)


@pytest.fixture
def optax_promotes():
    """optax mixes dtypes, which this folder's strict promotion forbids."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("optax_promotes")
def test_quick_training_learns_and_resumes(tmp_path, capsys):
    phases = ("crops", "encoder", "teacher", "latents", "transformer")
    arguments = ["--quick", "--only", ",".join(phases), "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    train_tiny.main(arguments)
    losses: dict[str, list[float]] = {}
    for name, loss in re.findall(r"(\w+): .* loss ([\d.]+)", capsys.readouterr().out):
        losses.setdefault(name, []).append(float(loss))
    assert set(losses) == set(phases) - {"latents"}
    assert np.isfinite([loss for values in losses.values() for loss in values]).all()
    # The first value is of a single clip, the others are means of twenty steps; of the other phases sixty say too little.
    assert losses["crops"][-1] < 0.9 * losses["crops"][1], losses
    train_tiny.main(arguments)
    told = capsys.readouterr().out
    assert "goes on" in told
    assert "loss" not in told  # nothing was left to do
    video = generate(load(tmp_path / "out"), "a red circle moves left on a black background", num_inference_steps=2)
    assert video.shape == (1, 17, 64, 64, 3)
