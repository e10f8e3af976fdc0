"""Videos and images as files: frames are uint8 arrays `f h w 3`, RGB.

`VideoWriter` takes frames as they come and encodes them at once, so a video is written while its later frames are still
decoded. Whatever happens, the target is either the whole file or untouched: everything goes to a temporary name in the
same folder and is renamed at the end. The path's suffix decides the format.
"""

import json
import math
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError
from av.video.reformatter import Interpolation
from jaxtyping import Array, Float, UInt8
from PIL import Image, ImageDraw, ImageFont, ImageOps, PngImagePlugin

Frame = UInt8[np.ndarray, "h w 3"]
Frames = UInt8[np.ndarray, "f h w 3"]
Rate = int | float | Fraction

_IMAGE_DESCRIPTION = 0x010E  # EXIF tag


class Mp4File:
    """H.264, yuv420p, BT.709: what browsers, phones and editors play.

    yuv420p halves both axes of the colours, so an odd height or width gets its last row or column once more.
    """

    def __init__(self, path: Path, rate: Fraction, metadata: str) -> None:
        self.container = av.open(str(path), "w", format="mp4", options={"movflags": "+faststart"})
        self.container.metadata["comment"] = metadata
        self.rate, self.count, self.stream = rate, 0, None

    def add(self, frame: Frame) -> None:
        """Encode one frame; the first one sets the size."""
        height, width = frame.shape[:2]
        frame = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), mode="edge")
        if self.stream is None:
            self.stream = self.container.add_stream("libx264", rate=self.rate, options={"crf": "16", "preset": "fast"})
            self.stream.height, self.stream.width, self.stream.pix_fmt = *frame.shape[:2], "yuv420p"
            context = self.stream.codec_context
            # Say which matrix was used: untagged files are guessed as BT.601 by some players and BT.709 by others.
            context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709
            context.color_range = 1  # limited
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24").reformat(
            format="yuv420p",
            src_colorspace="ITU709",
            dst_colorspace="ITU709",
            dst_color_range="MPEG",
            interpolation=Interpolation.BICUBIC | Interpolation.ACCURATE_RND,
        )
        picture.pts, picture.time_base = self.count, 1 / self.rate
        self.count += 1
        self.container.mux(self.stream.encode(picture))

    def close(self) -> None:
        """Encode what the encoder still holds and finish the file."""
        if self.stream is not None:
            self.container.mux(self.stream.encode(None))
        self.container.close()


class AnimatedImage:
    """GIF or WebP that repeats for ever; the frames are kept in memory until the end."""

    def __init__(self, path: Path, rate: Fraction, metadata: str, options: dict[str, Any], tick: Fraction) -> None:
        self.path, self.rate, self.options, self.tick = path, rate, options, tick
        self.frames: list[Image.Image] = []

    def add(self, frame: Frame) -> None:
        """Keep one frame."""
        self.frames.append(Image.fromarray(frame))

    def close(self) -> None:
        """Encode all frames. Durations are whole ticks whose sum stays right: 6, 6, 7, 6 hundredths at 16 frames a second."""
        ends = [round(i / self.rate / self.tick) for i in range(len(self.frames) + 1)]
        durations = [int((b - a) * self.tick * 1000) for a, b in pairwise(ends)]
        first, *rest = self.frames
        first.save(self.path, save_all=True, append_images=rest, duration=durations, loop=0, **self.options)


def gif(path: Path, rate: Fraction, metadata: str) -> AnimatedImage:
    """A GIF, whose clock ticks in hundredths of a second."""
    return AnimatedImage(path, rate, metadata, {"format": "GIF", "comment": metadata.encode()}, Fraction(1, 100))


def webp(path: Path, rate: Fraction, metadata: str) -> AnimatedImage:
    """An animated WebP, whose clock ticks in milliseconds."""
    exif = Image.Exif()
    exif[_IMAGE_DESCRIPTION] = json.dumps(json.loads(metadata))  # EXIF texts are ASCII
    return AnimatedImage(path, rate, metadata, {"format": "WEBP", "quality": 90, "exif": exif.tobytes()}, Fraction(1, 1000))


class StillImage:
    """One frame as a PNG."""

    def __init__(self, path: Path, rate: Fraction, metadata: str) -> None:
        self.path, self.metadata, self.count = path, metadata, 0

    def add(self, frame: Frame) -> None:
        """Write the frame; a second one is an error."""
        self.count += 1
        if self.count > 1:
            raise ValueError(f"a .png holds one frame, and a second came: {_OTHER_FORMATS}")
        save_png(self.path, frame, self.metadata)

    def close(self) -> None:
        """Nothing is left to do."""


class FrameFolder:
    """A folder of PNGs, 00000.png and on."""

    def __init__(self, path: Path, rate: Fraction, metadata: str) -> None:
        self.path, self.metadata, self.count = path, metadata, 0
        path.mkdir()

    def add(self, frame: Frame) -> None:
        """Write the next PNG."""
        save_png(self.path / f"{self.count:05d}.png", frame, self.metadata)
        self.count += 1

    def close(self) -> None:
        """Nothing is left to do."""


def save_png(path: Path, frame: Frame, metadata: str) -> None:
    """One frame, with the metadata as a text chunk."""
    chunks = PngImagePlugin.PngInfo()
    chunks.add_itxt("Comment", metadata)
    Image.fromarray(frame).save(path, format="PNG", pnginfo=chunks)


Sink = Mp4File | AnimatedImage | StillImage | FrameFolder
FORMATS: dict[str, Callable[[Path, Fraction, str], Sink]] = {
    ".mp4": Mp4File,
    ".gif": gif,
    ".webp": webp,
    ".png": StillImage,
    "": FrameFolder,
}
_OTHER_FORMATS = "name it .mp4, .gif or .webp for a video, or give a name without a suffix for a folder of PNGs"


class VideoWriter:
    """Writes frames to a file as they come: `with VideoWriter("out.mp4", fps=16) as writer: writer.write(frames)`.

    The suffix of `path` decides the format: .mp4, .gif, .webp, .png (one frame), or none for a folder of PNGs. `metadata`
    (anything JSON can hold, such as prompt and seed) is kept in the file; `read_metadata` gives it back. An existing
    file is replaced at the end, by a rename; if the `with` block raises (Ctrl-C included) nothing is left behind.

    ValueError for a path that cannot be written (see `check_writable`), for frames that are not uint8 `f h w 3` or change
    size, and for no frames at all; OSError when the disk fails or is full.
    """

    def __init__(self, path: str | Path, fps: Rate, *, metadata: Mapping[str, Any] | None = None) -> None:
        check_writable(path)
        self.path, self.rate = Path(path), frame_rate(fps)
        try:
            text = json.dumps(dict(metadata or {}), ensure_ascii=False)
        except TypeError as error:
            raise TypeError(f"metadata must be what JSON can hold (texts, numbers, lists, dicts): {error}") from None
        self.metadata = text.encode(errors="replace").decode()
        self.temporary = temporary_beside(self.path)
        self.size: tuple[int, int] | None = None
        self.count = 0
        self.sink: Sink | None = None

    def __enter__(self) -> "VideoWriter":
        return self

    def write(self, frames: UInt8[Array | np.ndarray, "f h w 3"]) -> None:
        """Append frames; all calls together make one video."""
        frames = np.asarray(frames)
        if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
            raise ValueError(f"frames must be uint8 (frames, height, width, 3); got {frames.dtype} {frames.shape}")
        size = frames.shape[1:3]
        if 0 in size or size != (self.size or size):
            raise ValueError(f"all frames of a video have one size of at least 1x1; got {size} (height, width) after {self.size}")
        self.size = size
        with explained(self.path):
            if self.sink is None:
                self.sink = FORMATS[self.path.suffix.lower()](self.temporary, self.rate, self.metadata)
            for frame in frames:
                self.sink.add(frame)
                self.count += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                if self.sink is None or not self.count:
                    raise ValueError(f"no frames were given for {self.path}: a video has at least one")
                with explained(self.path):
                    self.sink.close()
                    os.replace(self.temporary, self.path)
        finally:
            self._discard()

    def _discard(self) -> None:
        """Remove what is left of the temporary file or folder; after the rename there is nothing."""
        if isinstance(self.sink, Mp4File):
            with suppress(FFmpegError, OSError):  # it is thrown away: that it cannot be finished no longer matters
                self.sink.container.close()
        if self.temporary.is_dir():
            shutil.rmtree(self.temporary, ignore_errors=True)
        else:
            self.temporary.unlink(missing_ok=True)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn what the disk or the encoder says into one sentence about the file that was asked for."""
    try:
        yield
    except OSError as error:
        raise OSError(f"writing {path} failed ({error.strerror or error}): nothing was kept; free some space or write elsewhere") from error
    except FFmpegError as error:
        raise ValueError(f"{path} cannot be encoded ({error.strerror}): {_OTHER_FORMATS}") from error


def frame_rate(fps: Rate) -> Fraction:
    """Frames per second as a fraction that video files can hold; ValueError unless positive."""
    rate = Fraction(fps if isinstance(fps, Fraction) else float(fps)).limit_denominator(1001) if math.isfinite(fps) else Fraction(0)
    if rate <= 0:
        raise ValueError(f"fps must be a positive number of frames per second, like 16; got {fps}")
    return rate


def temporary_beside(path: Path) -> Path:
    """A name in the folder of `path` that nothing has; hidden, and short, so that it is valid where `path` is."""
    return path.parent / f".wanjax-{secrets.token_hex(6)}.partial"


def check_writable(path: str | Path, num_frames: int | None = None) -> None:
    """ValueError, in one sentence, unless `VideoWriter` can write `num_frames` frames to `path`; leaves nothing there.

    Call it before long work. Rules: a known suffix, one frame for .png, a folder that exists and can be written to, and
    nothing in the way: an existing file is replaced, a folder only if it is empty.
    """
    path = Path(path)
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"{path} has the unknown suffix {path.suffix}: {_OTHER_FORMATS}")
    if path.suffix.lower() == ".png" and num_frames not in (None, 1):
        raise ValueError(f"a .png holds one frame, and {path} is to hold {num_frames}: {_OTHER_FORMATS}")
    try:
        if not path.parent.is_dir():
            raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it first, or check the path")
        if path.suffix and path.exists() and not path.is_file():
            raise ValueError(f"{path} cannot be written: it is a folder or a device; give the name of a file")
        if not path.suffix and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise ValueError(f"{path} exists and is no empty folder; a name without a suffix is a new folder of PNGs: {_OTHER_FORMATS}")
        probe = temporary_beside(path)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{path} cannot be written ({error.strerror or error}): choose a folder you can write to") from None


def save_video(
    path: str | Path,
    frames: UInt8[Array | np.ndarray, "f h w 3"] | Float[Array | np.ndarray, "f h w 3"],
    fps: Rate,
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Write one video (or image) whole: uint8 frames, or float frames in [0, 1]. Formats and errors as `VideoWriter`."""
    with VideoWriter(path, fps, metadata=metadata) as writer:
        writer.write(to_uint8(frames))


def to_uint8(frames: Array | np.ndarray) -> UInt8[np.ndarray, "..."]:
    """Frames as uint8: uint8 as they are, floats in [0, 1] times 255, rounded. ValueError for anything else."""
    frames = np.asarray(frames)
    if frames.dtype == np.uint8:
        return frames
    if frames.dtype.kind not in "fV":  # bfloat16 is V to numpy
        raise ValueError(f"frames must be uint8, or floats in [0, 1]; got {frames.dtype}")
    frames = frames.astype(np.float32)
    low, high = (float(frames.min()), float(frames.max())) if frames.size else (0.0, 0.0)
    if not 0 <= low <= high <= 1:
        raise ValueError(f"float frames must be in [0, 1]; got values from {low:g} to {high:g} (video in [-1, 1] is (x + 1) / 2 as frames)")
    return np.round(frames * 255).astype(np.uint8)


def read_metadata(path: str | Path) -> dict[str, Any]:
    """What `metadata=` was when `path` (a video, an image or a folder of PNGs) was written; empty for files of others."""
    path = Path(path)
    if path.is_dir():
        first = min(path.glob("*.png"), default=None)
        return read_metadata(first) if first else {}
    if path.suffix.lower() in (".gif", ".webp", ".png"):
        with opened_image(path) as image:
            text = image.info.get("Comment") or image.info.get("comment") or image.getexif().get(_IMAGE_DESCRIPTION, "")
    else:
        with opened_video(path) as (container, _):
            text = container.metadata.get("comment", "")
    with suppress(ValueError):
        if isinstance(found := json.loads(text), dict):
            return found
    return {}


@contextmanager
def opened_video(path: Path) -> Iterator[tuple[InputContainer, av.VideoStream]]:
    """A file and its first video stream; ValueError, in one sentence, for whatever goes wrong inside the `with`."""
    if not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'not there'}: give the name of a video file")
    if ends_early(path):
        raise ValueError(f"{path} is cut short: the file ends inside the part that its header announces; copy or download it again")
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise ValueError(f"{path} has no pictures in it: it may be cut short, or hold sound alone")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (FFmpegError, IndexError) as error:  # PyAV fails with IndexError on some files cut short
        raise ValueError(
            f"{path} is not a readable video ({getattr(error, 'strerror', error)}): it may be cut short, or of another kind"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None


def ends_early(path: Path) -> bool:
    """Whether an mp4 or mov ends inside one of its boxes; the decoder would only give fewer frames. False for other kinds."""
    size, place = path.stat().st_size, 0
    with path.open("rb") as file:
        while place + 8 <= size:
            file.seek(place)
            length, kind, long_length = struct.unpack(">I4sQ", file.read(16).ljust(16, b"\0"))
            if place == 0 and kind != b"ftyp":
                return False
            place = size if length == 0 else place + max(8, long_length if length == 1 else length)
    return 0 < place != size


def iterate_frames(path: str | Path) -> Iterator[Frame]:
    """The frames of a video file one by one, turned upright where the file says how; ValueError if it cannot be read."""
    with opened_video(Path(path)) as (container, stream):
        for frame in container.decode(stream):
            yield np.rot90(frame.to_ndarray(format="rgb24"), frame.rotation // 90)


def read_video(path: str | Path) -> tuple[Frames, float]:
    """All frames of a video file, and its (average) frames per second; ValueError if it cannot be read or holds none."""
    with opened_video(Path(path)) as (_, stream):
        rate = stream.average_rate or stream.guessed_rate
    frames = list(iterate_frames(path))
    if not frames or not rate:
        raise ValueError(f"{path} holds no frames: it may be cut short, or of another kind")
    return np.stack(frames), float(rate)


@contextmanager
def opened_image(path: Path) -> Iterator[Image.Image]:
    """An image file, opened but not yet decoded; ValueError, in one sentence, for whatever goes wrong inside the `with`."""
    if not path.is_file():
        raise ValueError(f"{path} is {'a folder' if path.is_dir() else 'not there'}: give the name of an image file")
    try:
        with Image.open(path) as image:
            yield image
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:  # SyntaxError is what Pillow raises for broken PNGs
        raise ValueError(f"{path} is not a readable image ({error}): it may be cut short, or of a kind that Pillow does not read") from None


def read_image(path: str | Path) -> Frame:
    """An image file as RGB, turned upright by its EXIF orientation; of an animation the first frame.

    Transparent parts show white, as on the canvas the Wan models' reference images are put on. 16-bit grey is scaled to
    8 bits. ValueError if the file cannot be read.
    """
    with opened_image(Path(path)) as image:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):
            image = Image.fromarray(np.clip(np.round(np.asarray(image, np.float32) / 257), 0, 255).astype(np.uint8))
        if image.mode == "F":
            raise ValueError(f"{path} holds floating-point grey of unknown range: save it as 8-bit RGB")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return np.asarray(image.convert("RGB"))


def contact_sheet(
    videos: Sequence[UInt8[Array | np.ndarray, "f h w 3"]],
    captions: Sequence[str] | None = None,
    *,
    times: int = 5,
    columns: int = 1,
    gap: int = 4,
) -> UInt8[np.ndarray, "H W 3"]:
    """A white sheet with a strip of `times` evenly spaced frames per video, in `columns`, a caption above each.

    ValueError if the videos differ in size or the captions in number.
    """
    captions = [""] * len(videos) if captions is None else captions
    sizes = {tuple(video.shape[1:3]) for video in videos}
    if len(sizes) != 1 or len(captions) != len(videos):
        raise ValueError(f"a sheet needs videos of one size and a caption for each; got sizes {sorted(sizes)}, {len(captions)} captions")
    ((height, width),) = sizes
    text_height = 16 if any(captions) else 0
    cell_height, cell_width = height + text_height + gap, times * (width + gap) + gap
    rows = -(-len(videos) // columns)
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height + gap), "white")
    draw = ImageDraw.Draw(sheet)
    for i, (video, caption) in enumerate(zip(videos, captions, strict=True)):
        left, top = i % columns * cell_width + gap, i // columns * cell_height + gap
        draw.text((left, top), caption, fill="black", font=ImageFont.load_default(12))
        for j, time in enumerate(np.linspace(0, video.shape[0] - 1, times).round().astype(int)):
            sheet.paste(Image.fromarray(np.asarray(video[int(time)])), (left + j * (width + gap), top + text_height))
    return np.asarray(sheet)
