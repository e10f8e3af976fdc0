"""The world of the tiny model: one coloured shape that moves across a plain background, drawn and captioned by code.

A clip is named by four words (colour, shape, direction, background) and placed by five numbers (radius, travel, two
coordinates, a start time). Every path lies inside the frame and crosses its centre, so the direction shows in the first
frame and few noises share a caption: that is what a small model learns in half an hour. A sixth of the 216 combinations
of words is held out of training. `Teacher.latents` is what the VAE's two halves are first fitted to.
"""

from dataclasses import dataclass
from itertools import product

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 190, 70),
    "blue": (50, 90, 240),
    "yellow": (240, 220, 50),
    "white": (245, 245, 245),
    "magenta": (220, 50, 210),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
BACKGROUNDS = {"black": (8, 8, 8), "grey": (120, 120, 120), "navy": (16, 22, 86)}

SIZE = 64
FRAMES = 17
FPS = 8

# Half of the bounding box over the radius, so that the three shapes have about the same area.
EXTENT = {"circle": 1.0, "square": 0.89, "triangle": 1.22}


@dataclass(frozen=True)
class Words:
    """The four words of a caption."""

    colour: str
    shape: str
    direction: str
    background: str

    def __str__(self) -> str:
        return f"a {self.colour} {self.shape} moves {self.direction} on a {self.background} background"


@dataclass(frozen=True)
class Clip:
    """A rendered clip: frames `(3, f, 64, 64)` in [-1, 1], the shape's coverage `(f, 64, 64)` in [0, 1], and both colours."""

    words: Words
    frames: np.ndarray
    mask: np.ndarray
    foreground: np.ndarray
    background: np.ndarray


def every_combination() -> list[Words]:
    """All 216 combinations, in a fixed order."""
    return [Words(*words) for words in product(COLOURS, SHAPES, DIRECTIONS, BACKGROUNDS)]


def split() -> tuple[list[Words], list[Words]]:
    """(trained, held out): 180 and 36 combinations.

    Each colour and shape is held out with two of its twelve directions and backgrounds, every word equally often.
    """
    trained, held_out = [], []
    indices = product(range(len(COLOURS)), range(len(SHAPES)), range(len(DIRECTIONS)), range(len(BACKGROUNDS)))
    for words, (c, s, d, b) in zip(every_combination(), indices, strict=True):
        away = ((d - c - s) % 4, (b - c - 2 * s - (c // 3)) % 3)
        (held_out if away in [(0, 0), (2, 1)] else trained).append(words)
    return trained, held_out


def signed_rgb(rgb: tuple[int, int, int]) -> np.ndarray:
    """0..255 to [-1, 1]."""
    return np.asarray(rgb, np.float32) / 127.5 - 1


def coverage(shape: str, radius: float, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How much of each pixel the shape covers, `(f, 64, 64)`; x and y `(f,)` are the centre of its bounding box in pixels."""
    pixel = np.arange(SIZE, dtype=np.float32) + 0.5
    dx, dy = pixel - x.astype(np.float32)[:, None, None], pixel[:, None] - y.astype(np.float32)[:, None, None]
    half = np.float32(EXTENT[shape] * radius)
    if shape == "circle":
        inside = half - np.sqrt(dx * dx + dy * dy)
        return np.clip(inside + 0.5, 0, 1)
    if shape == "square":
        return np.clip(half - abs(dx) + 0.5, 0, 1) * np.clip(half - abs(dy) + 0.5, 0, 1)
    slope = np.float32(5**-0.5)  # the sides rise 2 for 1
    side = slope * (half + dy - 2 * abs(dx))
    return np.clip(np.minimum(side, half - dy) + 0.5, 0, 1)


def render(words: Words, rng: np.random.Generator, frames: int = FRAMES) -> Clip:
    """Draws one clip, its size, speed and path chosen by `rng`; fewer than 17 frames are a piece of a 17-frame path."""
    radius = rng.uniform(9, 11.5)
    half = EXTENT[words.shape] * radius
    travel = min(rng.uniform(24, 30), SIZE - 2 * half - 4)
    room = (SIZE - 2 * half - travel) / 2 - 1  # how far the path may lie off the centre and still be inside
    along = SIZE / 2 + rng.uniform(-1, 1) * min(2, room)
    across = SIZE / 2 + rng.uniform(-7, 7)
    start = rng.integers(0, FRAMES - frames + 1)
    path = travel * ((start + np.arange(frames)) / (FRAMES - 1) - 0.5)
    step_x, step_y = DIRECTIONS[words.direction]
    x = along + step_x * path if step_x else np.full(frames, across)
    y = along + step_y * path if step_y else np.full(frames, across)
    mask = coverage(words.shape, radius, x, y)
    foreground, background = signed_rgb(COLOURS[words.colour]), signed_rgb(BACKGROUNDS[words.background])
    video = background[:, None, None, None] + mask * (foreground - background)[:, None, None, None]
    return Clip(words, video.astype(np.float32), mask, foreground, background)


# ---- the teacher

# Cosine frequencies (time, row, column) of the ten mask channels, for the 4x8x8 cells and for the first frame's 8x8 cells.
CELL = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 1, 1), (1, 0, 1), (1, 1, 0), (0, 0, 2), (0, 2, 0), (2, 0, 0)]
FIRST = [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (1, 2), (2, 1), (0, 3), (3, 0)]


def cosines(length: int) -> np.ndarray:
    """The discrete cosine basis `(length, length)`, each row of unit mean square."""
    k, n = np.arange(length)[:, None], np.arange(length)[None] + 0.5
    basis = np.cos(np.pi * k * n / length)
    return (basis / np.sqrt(np.mean(basis**2, axis=1, keepdims=True))).astype(np.float32)


def describe(clip: Clip) -> np.ndarray:
    """A clip as sixteen numbers per cell, `(16, t, 8, 8)`: ten cosine coefficients of the mask, mean mask x colour, background.

    Smooth, local, and with the reach of the Wan VAE's cells: 8x8 pixels of four frames, of one for the first.
    """
    rows = cosines(8)
    first = clip.mask[0].reshape(8, 8, 8, 8)
    plane = np.einsum("ypxq,ip,jq->ijyx", first, rows, rows) / 64
    head = np.stack([plane[i, j] for i, j in FIRST])[:, None]
    rest = clip.mask[1:].reshape(-1, 4, 8, 8, 8, 8)
    solid = np.einsum("tfypxq,kf,ip,jq->kijtyx", rest, cosines(4)[:3], rows[:3], rows[:3], optimize=True) / 256
    tail = np.stack([solid[k, i, j] for k, i, j in CELL])
    shape = np.concatenate([head, tail], axis=1)
    colour = shape[:1] * clip.foreground[:, None, None, None]
    background = np.broadcast_to(clip.background[:, None, None, None], colour.shape)
    return np.concatenate([shape, colour, background]).astype(np.float32)


@dataclass(frozen=True)
class Teacher:
    """Offset and scale, one for each of the sixteen channels, that make `describe` a latent of unit variance."""

    mean: np.ndarray
    scale: np.ndarray

    def latents(self, clip: Clip) -> np.ndarray:
        """The latent `(16, t, 8, 8)` that both halves of the VAE are first fitted to."""
        return (describe(clip) - self.mean[:, None, None, None]) * self.scale[:, None, None, None]


def fit_teacher(clips: int = 512) -> Teacher:
    """Measures the channels on seeded clips; dividing by std^0.75 lets the strong channels stay a little stronger."""
    rng = np.random.default_rng(0)
    words = split()[0]
    sample = np.stack([describe(render(words[rng.integers(len(words))], rng)) for _ in range(clips)])
    mean, std = sample.mean((0, 2, 3, 4)), sample.std((0, 2, 3, 4))
    scale = std**-0.75
    scale /= np.sqrt(np.mean((std * scale) ** 2))
    return Teacher(mean.astype(np.float32), scale.astype(np.float32))
