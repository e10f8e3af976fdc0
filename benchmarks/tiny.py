"""How well the tiny model does what captions say: the pixel judge over seeded prompts, a third of them never trained on.

    python benchmarks/tiny.py [--model FOLDER] [--videos 100] [--sheet docs/tiny.png]

Prints the share of videos in which each word of the caption is right, for trained and held-out combinations, and the
judge's own score on real clips. `--sheet` also draws the first, middle and last frames of twelve of the videos.
"""

import argparse
import sys
from dataclasses import astuple
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

import judge
import tiny_world
from PIL import Image

import wanjax

WORDS = ("colour", "shape", "direction", "background")


def chosen(count: int) -> tuple[list[tiny_world.Words], np.ndarray]:
    """Combinations spread over the world, every third one held out, and which those are."""
    trained, held_out = tiny_world.split()
    rng = np.random.default_rng(0)
    trained, held_out = (list(rng.permutation(np.array(part, dtype=object))) for part in (trained, held_out))
    unseen = np.arange(count) % 3 == 2
    return [(held_out if new else trained)[i // 3 % 36 if new else i % len(trained)] for i, new in enumerate(unseen)], unseen


def sheet(videos: list[np.ndarray], columns: int = 4, zoom: int = 2) -> Image.Image:
    """Three frames of each video side by side, `columns` videos in a row."""
    strips = [np.concatenate([np.pad(video[i], ((1, 1), (1, 1), (0, 0))) for i in (0, 8, 16)], 1) for video in videos]
    strips = [np.pad(strip, ((3, 3), (3, 3), (0, 0)), constant_values=255) for strip in strips]
    rows = [np.concatenate(strips[i : i + columns], 1) for i in range(0, len(strips), columns)]
    picture = Image.fromarray(np.concatenate(rows))
    return picture.resize((picture.width * zoom, picture.height * zoom), Image.Resampling.NEAREST)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--videos", type=int, default=100)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--shift", type=float)
    parser.add_argument("--solver", choices=("unipc", "euler", "dpm"))
    parser.add_argument("--seed", type=int, default=0, help="of the first video; the others follow")
    parser.add_argument("--sheet", type=Path)
    args = parser.parse_args()

    wan = wanjax.load(args.model)
    words, unseen = chosen(args.videos)
    options = dict(num_inference_steps=args.steps, flow_shift=args.shift, solver=args.solver)
    videos: list[np.ndarray] = []
    for start in range(0, args.videos, 10):
        prompts = [str(w) for w in words[start : start + 10]]
        videos += list(wanjax.generate(wan, prompts, seed=[args.seed + start + i for i in range(len(prompts))], **options))
    right = np.array([judge.agreement(judge.read(video), astuple(w)) for video, w in zip(videos, words, strict=True)])
    rng = np.random.default_rng(1)
    clips = [tiny_world.render(words[i % len(words)], rng) for i in range(200)]
    real = [((clip.frames.transpose(1, 2, 3, 0) + 1) / 2, clip.words) for clip in clips]
    own = np.array([judge.agreement(judge.read(frames), astuple(w)) for frames, w in real])
    print(f"{'':12}" + "".join(f"{word:>12}" for word in (*WORDS, "all four")))
    for name, rows in (("all", right), ("trained", right[~unseen]), ("held out", right[unseen]), ("real clips", own)):
        print(f"{name:12}" + "".join(f"{share:12.1%}" for share in (*rows.mean(0), rows.all(1).mean())) + f"   of {len(rows)}")
    for i in np.flatnonzero(~right.all(1))[:12]:
        print(f"  seed {args.seed + i}: {words[i]}: read as {' '.join(map(str, astuple(judge.read(videos[i]))))}")
    if args.sheet:
        args.sheet.parent.mkdir(parents=True, exist_ok=True)
        sheet(videos[:12]).save(args.sheet, optimize=True)


if __name__ == "__main__":
    main()
