"""The pixel judge reads what the renderer drew, through the damage that a codec or a decoder does."""

from dataclasses import astuple
from io import BytesIO

import judge
import numpy as np
import pytest
import tiny_world
from PIL import Image, ImageFilter


def as_is(frame: Image.Image, rng: np.random.Generator) -> Image.Image:
    return frame


def blurred(frame: Image.Image, rng: np.random.Generator) -> Image.Image:
    return frame.filter(ImageFilter.GaussianBlur(1.0))


def noisy(frame: Image.Image, rng: np.random.Generator) -> Image.Image:
    return Image.fromarray(np.clip(np.asarray(frame) + rng.normal(0, 10, (64, 64, 3)), 0, 255).astype(np.uint8))


def compressed(frame: Image.Image, rng: np.random.Generator) -> Image.Image:
    file = BytesIO()
    frame.save(file, "jpeg", quality=50)
    return Image.open(file).convert("RGB")


def pictures(clip: tiny_world.Clip) -> np.ndarray:
    """Frames `(f, h, w, 3)` in uint8."""
    return np.round((clip.frames.transpose(1, 2, 3, 0) + 1) * 127.5).astype(np.uint8)


@pytest.mark.parametrize("damage", [as_is, blurred, noisy, compressed], ids=lambda f: f.__name__)
def test_reads_rendered_clips(damage):
    rng = np.random.default_rng(3)
    right = []
    for words in tiny_world.every_combination():
        frames = np.stack([np.asarray(damage(Image.fromarray(f), rng)) for f in pictures(tiny_world.render(words, rng))])
        right.append(judge.agreement(judge.read(frames), astuple(words)))
    assert np.mean(right, axis=0).min() >= 0.98, np.mean(right, axis=0)


def test_reads_floats_as_it_reads_bytes():
    clip = tiny_world.render(tiny_world.every_combination()[5], np.random.default_rng(0))
    assert judge.read(pictures(clip)) == judge.read(pictures(clip).astype(np.float32) / 255)


def test_an_empty_video_shows_only_its_background():
    frames = np.full((17, 64, 64, 3), 120, np.uint8)
    assert judge.read(frames) == judge.Reading(None, None, None, "grey")


def test_a_still_shape_has_no_direction():
    clip = tiny_world.render(tiny_world.every_combination()[0], np.random.default_rng(0))
    reading = judge.read(np.repeat(pictures(clip)[:1], 17, axis=0))
    assert (reading.colour, reading.shape, reading.direction) == ("red", "circle", None)


def test_a_clip_played_backwards_moves_the_other_way():
    words = tiny_world.Words("green", "triangle", "up", "navy")
    clip = tiny_world.render(words, np.random.default_rng(1))
    assert judge.read(pictures(clip)[::-1]) == judge.Reading("green", "triangle", "down", "navy")


def test_noise_is_not_read_as_the_caption():
    frames = np.random.default_rng(0).integers(0, 256, (17, 64, 64, 3)).astype(np.uint8)
    assert judge.read(frames).direction is None


def test_the_split_is_balanced_and_every_pair_of_words_is_trained():
    trained, held_out = tiny_world.split()
    assert (len(trained), len(held_out)) == (180, 36)
    assert not set(trained) & set(held_out)
    pairs = {(i, j, astuple(w)[i], astuple(w)[j]) for w in trained for i in range(4) for j in range(i)}
    assert len(pairs) == 6 * 3 + 6 * 4 + 6 * 3 + 3 * 4 + 3 * 3 + 4 * 3


def test_paths_stay_inside_the_frame():
    rng = np.random.default_rng(2)
    for words in tiny_world.every_combination():
        mask = tiny_world.render(words, rng).mask
        assert max(mask[:, 0].max(), mask[:, -1].max(), mask[:, :, 0].max(), mask[:, :, -1].max()) == 0
