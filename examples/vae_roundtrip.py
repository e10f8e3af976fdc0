"""A video through the VAE and back, a few frames at a time: python examples/vae_roundtrip.py IN.mp4 OUT.mp4 [--vae FOLDER_OR_HUB_ID]

Any length goes through in constant memory but for its latents. The picture is cut, on the right and below, to whole latents,
and the video to 4 n + 1 frames. The shipped `tiny` VAE has only ever seen moving shapes: of other videos expect little.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import wanjax
from wanjax.video import VideoWriter, iterate_frames, opened_video


def whole_latents(path: str, stride: int, most: int | None) -> Iterator[np.ndarray]:
    """4 n + 1 frames (H W 3, uint8), each cut to multiples of the stride: frames wait until the last of their four is there."""
    waiting: list[np.ndarray] = []
    for i, frame in enumerate(iterate_frames(path)):
        if i == most:
            break
        waiting.append(frame[: frame.shape[0] // stride * stride, : frame.shape[1] // stride * stride])
        if i % 4 == 0:
            yield from waiting
            waiting = []


def main() -> None:
    """Encode and decode, and say what was lost."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("target")
    parser.add_argument("--vae", help="a folder or hub id (default: the tiny one)")
    parser.add_argument("--frames", type=int, help="at most so many")
    args = parser.parse_args()
    vae = wanjax.load("tiny").vae if args.vae is None else wanjax.load_vae(args.vae)
    source = lambda: whole_latents(args.source, vae.config.stride, args.frames)
    with opened_video(Path(args.source)) as (_, stream):
        fps = stream.average_rate or 16

    z = np.concatenate([posterior.mean for posterior in wanjax.encode_stream(source(), vae)], axis=2)
    squares, values, originals = 0.0, 0, source()
    with VideoWriter(args.target, fps) as writer:
        for chunk in wanjax.decode_stream(z, vae, uint8=True):
            frames = np.asarray(chunk[0])
            writer.write(frames)
            for frame in frames:
                squares += float(np.square(frame.astype(np.float64) - next(originals)).sum())
                values += frame.size
    print(f"{args.target}: latents {z.shape}, PSNR {10 * np.log10(255**2 * values / squares):.2f} dB")


if __name__ == "__main__":
    main()
