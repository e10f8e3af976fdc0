"""Reads colour, shape, direction and background from a video of the tiny model's world, from its pixels alone.

The background is the median pixel, the foreground the pixels far from it. Their colours place every pixel on a line from
background (0) to foreground (1): how much of it the shape covers. Areas, widths and centres of that coverage do the rest.
"""

from dataclasses import astuple, dataclass

import numpy as np

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 190, 70),
    "blue": (50, 90, 240),
    "yellow": (240, 220, 50),
    "white": (245, 245, 245),
    "magenta": (220, 50, 210),
}
BACKGROUNDS = {"black": (8, 8, 8), "grey": (120, 120, 120), "navy": (16, 22, 86)}


@dataclass(frozen=True)
class Reading:
    """What the pixels show; None where they show nothing of the kind."""

    colour: str | None
    shape: str | None
    direction: str | None
    background: str | None


def nearest(rgb: np.ndarray, names: dict[str, tuple[int, int, int]], limit: float) -> str | None:
    """The name of the nearest colour, if it is within `limit` (Euclidean, of 0..255)."""
    distances = {name: float(np.linalg.norm(rgb - np.array(value))) for name, value in names.items()}
    name = min(distances, key=distances.__getitem__)
    return name if distances[name] <= limit else None


def middle(cover: np.ndarray) -> tuple[float, float]:
    """Centre of mass (x, y) of a coverage map `(h, w)`, in pixels."""
    total = cover.sum()
    return float((cover.sum(0) * np.arange(cover.shape[1])).sum() / total), float((cover.sum(1) * np.arange(cover.shape[0])).sum() / total)


def outline(cover: np.ndarray) -> str:
    """circle, square or triangle, by the share of its bounding box that a coverage map fills (pi/4, 1, 1/2)."""
    fill = cover.sum() / (cover.sum(1).max() * cover.sum(0).max())
    return "triangle" if fill < 0.7 else "circle" if fill < 0.89 else "square"


def read(frames: np.ndarray) -> Reading:
    """Reads a video `(f, h, w, 3)` of uint8, or of floats in [0, 1]."""
    video = frames.astype(np.float32) * (1 if frames.dtype == np.uint8 else 255)
    back = np.median(video.reshape(-1, 3), axis=0)
    background = nearest(back, BACKGROUNDS, 45)
    distance = np.linalg.norm(video - back, axis=-1)
    far = np.percentile(distance, 98)
    if far < 40:
        return Reading(None, None, None, background)
    front = np.median(video[distance > 0.8 * far], axis=0)
    line = front - back
    cover = np.clip((video - back) @ line / (line @ line), 0, 1)
    cover = np.where(cover < 0.15, 0, cover)
    seen = [c for c in cover if c.sum() > 60]
    if len(seen) < len(video) / 2:
        return Reading(nearest(front, COLOURS, 80), None, None, background)
    path = np.array([middle(c) for c in seen])
    travel = path[-3:].mean(0) - path[:3].mean(0)
    axis = int(abs(travel[1]) > abs(travel[0]))
    direction = None
    if abs(travel[axis]) > 8 and abs(travel[axis]) > 2 * abs(travel[1 - axis]):
        direction = (("left", "right"), ("up", "down"))[axis][int(travel[axis] > 0)]
    outlines = [outline(c) for c in seen]
    shape = max(set(outlines), key=outlines.count)
    return Reading(nearest(front, COLOURS, 80), shape if outlines.count(shape) > len(seen) / 2 else None, direction, background)


def agreement(reading: Reading, wanted: tuple[str, str, str, str]) -> tuple[bool, bool, bool, bool]:
    """Which of (colour, shape, direction, background) are as wanted."""
    return tuple(seen == word for seen, word in zip(astuple(reading), wanted, strict=True))
