"""Video and image files: what is written reads back, whole or not at all, and every failure is one sentence."""

import itertools
import os
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from PIL import Image

from wanjax.video import VideoWriter, check_writable, contact_sheet, iterate_frames, read_image, read_metadata, read_video, save_video

METADATA = {"prompt": 'ein Kätzchen 🐈, 一只猫 \n "quoted"', "seed": 2**40, "size": "64x48", "steps": 12, "version": "wanjax 0"}
ONLY_AS_ROOT = getattr(os, "geteuid", lambda: 1)() == 0


@pytest.fixture
def clip() -> np.ndarray:
    """Smooth colours that move: 17 frames of 64x48."""
    y, x, t = np.meshgrid(np.linspace(0, 1, 48), np.linspace(0, 1, 64), np.linspace(0, 1, 17), indexing="ij")
    return np.round(np.stack([x, y, t], -1).transpose(2, 0, 1, 3) * 255).astype(np.uint8)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Shape checks off, as in use: what is tested is our own message."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def left(folder: Path) -> list[str]:
    """The names in a folder."""
    return sorted(entry.name for entry in folder.iterdir())


def write_all(path: Path, chunks: Sequence[np.ndarray], failure: type[BaseException] | None = None) -> None:
    """Write chunk after chunk; raise `failure` before the end."""
    with VideoWriter(path, 16) as writer:
        for chunk in chunks:
            writer.write(chunk)
        if failure:
            raise failure


def distance(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a.astype(np.float32) - b).mean())


# What is written reads back.


def test_mp4_reads_back_with_its_metadata(tmp_path: Path, clip: np.ndarray) -> None:
    path = tmp_path / "a.mp4"
    save_video(path, clip, 16, METADATA)
    frames, fps = read_video(path)
    assert fps == 16
    assert frames.shape == clip.shape
    assert frames.dtype == np.uint8
    assert distance(frames, clip) < 2.5
    assert read_metadata(path) == METADATA
    assert all(np.array_equal(a, b) for a, b in itertools.zip_longest(iterate_frames(path), frames))
    assert left(tmp_path) == ["a.mp4"]


def test_mp4_is_what_players_expect(tmp_path: Path, clip: np.ndarray) -> None:
    path = tmp_path / "a.mp4"
    save_video(path, clip, 16)
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        frame = next(container.decode(stream))
        assert (int(frame.colorspace), int(frame.color_range)) == (1, 1), "untagged colours are guessed differently by different players"
    head = path.read_bytes()
    assert head.index(b"moov") < head.index(b"mdat"), "the index comes first, so that a browser can start at once"


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0), (128, 64, 200), (16, 22, 86)])
def test_colours_survive(tmp_path: Path, colour: tuple[int, int, int]) -> None:
    save_video(tmp_path / "a.mp4", np.broadcast_to(np.array(colour, np.uint8), (3, 64, 64, 3)), 16)
    frames, _ = read_video(tmp_path / "a.mp4")
    assert np.abs(frames.astype(int) - colour).max() <= 2


def test_chunks_make_the_same_video_as_the_whole(tmp_path: Path, clip: np.ndarray) -> None:
    save_video(tmp_path / "whole.mp4", clip, 16)
    with VideoWriter(tmp_path / "chunks.mp4", 16) as writer:
        for chunk in (clip[:1], clip[1:5], clip[5:5], clip[5:16], jnp.asarray(clip[16:])):
            writer.write(chunk)
    assert np.array_equal(read_video(tmp_path / "chunks.mp4")[0], read_video(tmp_path / "whole.mp4")[0])


@pytest.mark.parametrize(("height", "width"), [(1, 1), (2, 2), (47, 33), (48, 33), (1, 64), (130, 2)])
def test_odd_and_tiny_sizes_repeat_the_last_row_or_column(tmp_path: Path, height: int, width: int) -> None:
    video = np.full((5, height, width, 3), 90, np.uint8)
    save_video(tmp_path / "a.mp4", video, 8)
    frames, _ = read_video(tmp_path / "a.mp4")
    assert frames.shape == (5, height + height % 2, width + width % 2, 3)
    assert np.abs(frames.astype(int) - 90).max() <= 2


@pytest.mark.parametrize("fps", [1, 8, 16, 24.0, 23.976, 30000 / 1001, Fraction(24000, 1001), 0.5, np.float32(12)])
def test_frame_rates(tmp_path: Path, clip: np.ndarray, fps: float) -> None:
    save_video(tmp_path / "a.mp4", clip[:4], float(fps) if isinstance(fps, np.floating) else fps)
    assert read_video(tmp_path / "a.mp4")[1] == pytest.approx(float(fps), rel=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, jnp.bfloat16])
def test_float_frames_are_rounded_not_cut(tmp_path: Path, dtype: type) -> None:
    values = np.array([0, 0.4 / 255, 0.6 / 255, 1], np.float32).reshape(1, 2, 2, 1).repeat(3, -1)
    save_video(tmp_path / "a.png", jnp.asarray(values, dtype) if dtype != np.float64 else values.astype(dtype), 1)
    assert read_image(tmp_path / "a.png")[..., 0].ravel().tolist() == [0, 0, 1, 255]


@pytest.mark.parametrize(("name", "error"), [("a.gif", 4.0), ("a.webp", 3.0)])
def test_animated_images(tmp_path: Path, clip: np.ndarray, name: str, error: float) -> None:
    save_video(tmp_path / name, clip, 16, METADATA)
    with Image.open(tmp_path / name) as image:
        frames, durations = [], []
        for i in range(image.n_frames):
            image.seek(i)
            frames.append(np.asarray(image.convert("RGB")))
            durations.append(image.info["duration"])
    assert distance(np.stack(frames), clip) < error
    assert sum(durations) == pytest.approx(1000 * 17 / 16, abs=5)
    assert read_metadata(tmp_path / name) == METADATA
    assert left(tmp_path) == [name]


def test_folder_of_pngs_and_one_png(tmp_path: Path, clip: np.ndarray) -> None:
    save_video(tmp_path / "frames", clip[:3], 16, METADATA)
    assert left(tmp_path / "frames") == ["00000.png", "00001.png", "00002.png"]
    assert all(np.array_equal(read_image(tmp_path / "frames" / f"{i:05d}.png"), clip[i]) for i in range(3))
    save_video(tmp_path / "one.PNG", clip[4:5], 16, METADATA)
    assert np.array_equal(read_image(tmp_path / "one.PNG"), clip[4])
    assert read_metadata(tmp_path / "frames") == read_metadata(tmp_path / "one.PNG") == METADATA
    assert left(tmp_path) == ["frames", "one.PNG"]


def test_an_existing_file_is_replaced(tmp_path: Path, clip: np.ndarray) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    save_video(tmp_path / "a.mp4", clip[:1], 16)
    assert read_video(tmp_path / "a.mp4")[0].shape == (1, 48, 64, 3)


def test_metadata_of_others_is_empty(tmp_path: Path, data: Path) -> None:
    assert read_metadata(data / "wan_output_720p.mp4") == {}
    assert read_metadata(data / "flf2v_first.png") == {}
    (tmp_path / "empty").mkdir()
    assert read_metadata(tmp_path / "empty") == {}


def test_text_that_is_no_unicode_does_not_lose_the_video(tmp_path: Path, clip: np.ndarray) -> None:
    save_video(tmp_path / "a.mp4", clip[:1], 16, {"prompt": "caf\udce9 \x00"})
    assert read_metadata(tmp_path / "a.mp4") == {"prompt": "caf? \x00"}


# Whole or not at all.


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png", "frames"])
@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("frames", [0, 1])
def test_an_exception_leaves_nothing(tmp_path: Path, clip: np.ndarray, name: str, failure: type[BaseException], frames: int) -> None:
    with pytest.raises(failure):
        write_all(tmp_path / name, [clip[:frames]], failure)
    assert left(tmp_path) == []


def test_an_exception_keeps_the_file_of_before(tmp_path: Path, clip: np.ndarray) -> None:
    (tmp_path / "a.mp4").write_bytes(b"old")
    with pytest.raises(RuntimeError):
        write_all(tmp_path / "a.mp4", [clip], RuntimeError)
    assert left(tmp_path) == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"old"


# The writer's file alone, without the package's other modules: the process starts in a fraction of a second.
WRITE = """
import importlib.util, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job of a shell would ignore
import numpy as np
spec = importlib.util.spec_from_file_location("video", {source!r})
video = importlib.util.module_from_spec(spec)
spec.loader.exec_module(video)
frames = np.random.default_rng(0).integers(0, 256, (8, 96, 96, 3), dtype=np.uint8)
"""


def start(code: str) -> subprocess.Popen[str]:
    """A process that has read video.py and `frames`, and runs `code`."""
    source = str(Path(sys.modules["wanjax.video"].__file__ or ""))
    command = [sys.executable, "-c", WRITE.format(source=source) + code]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("wait", [0.0, 0.25])
def test_ctrl_c_leaves_nothing(tmp_path: Path, wait: float) -> None:
    code = f"""
with video.VideoWriter({str(tmp_path / "a.mp4")!r}, 16) as writer:
    while True:
        writer.write(frames)
"""
    process = start(code)
    deadline = time.monotonic() + 30
    while not left(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(wait)
    assert [name.endswith(".partial") for name in left(tmp_path)] == [True], "it is written beside the target"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert left(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    names, limits = ("a.mp4", "a.gif", "a.webp", "frames"), (0, 1000, 20_000)
    code = f"""
import os, resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for name in {names}:
    for limit in {limits}:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            video.save_video({str(tmp_path)!r} + "/" + name, frames, 16)
        except OSError as error:
            print(name, error)
"""
    output, errors = start(code).communicate(timeout=60)
    lines = output.splitlines()
    assert len(lines) == len(names) * len(limits), errors
    message = r"(\S+) writing \S+/\1 failed \(File too large\): nothing was kept; free some space or write elsewhere"
    assert all(re.fullmatch(message, line) for line in lines), output
    assert left(tmp_path) == []


# Paths, frames and rates that cannot be.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.avi", r"unknown suffix \.avi: name it \.mp4, \.gif or \.webp"),
        ("missing/a.mp4", "there is no folder .*missing"),
        ("file/a.mp4", "there is no folder .*file"),
        ("folder.mp4", "a folder or a device"),
        ("full", "is no empty folder"),
        ("file", "is no empty folder"),
        ("x" * 300 + ".mp4", "File name too long"),
    ],
)
def test_paths_that_cannot_be_written(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    before = left(tmp_path)
    with pytest.raises(ValueError, match=message):
        check_writable(tmp_path / name)
    with pytest.raises(ValueError, match=message):
        VideoWriter(tmp_path / name, 16)
    assert left(tmp_path) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_devices_are_no_videos() -> None:
    with pytest.raises(ValueError, match=r"/dev/full exists and is no empty folder"):
        check_writable("/dev/full")


@pytest.mark.skipif(ONLY_AS_ROOT and not Path("/proc/self").exists(), reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path: Path) -> None:
    folder = Path("/proc/self") if ONLY_AS_ROOT else tmp_path / "closed"
    if not ONLY_AS_ROOT:
        folder.mkdir(mode=0o500)
    with pytest.raises(ValueError, match=r"a\.mp4 cannot be written \(.+\): choose a folder you can write to"):
        check_writable(folder / "a.mp4")


def test_check_writable_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("a.mp4", "a.gif", "frames", "empty", "a.png"):
        check_writable(tmp_path / name, 1)
    assert left(tmp_path) == ["empty"]
    with pytest.raises(ValueError, match=r"a \.png holds one frame, and .*a\.png is to hold 17"):
        check_writable(tmp_path / "a.png", 17)


def test_a_png_takes_one_frame(tmp_path: Path, clip: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"a \.png holds one frame, and a second came"):
        save_video(tmp_path / "a.png", clip, 16)
    assert left(tmp_path) == []


@pytest.mark.usefixtures("unchecked")
def test_frames_that_are_no_frames(tmp_path: Path, clip: np.ndarray) -> None:
    wrong = {
        r"uint8 \(frames, height, width, 3\); got uint8 \(48, 64, 3\)": clip[0],
        r"got uint8 \(1, 17, 48, 64, 3\)": clip[None],
        r"got uint8 \(17, 3, 48, 64\)": clip.transpose(0, 3, 1, 2),
        r"floats in \[0, 1\]; got int64": clip.astype(np.int64),
        r"one size of at least 1x1; got \(0, 64\)": clip[:, :0],
        r"must be in \[0, 1\]; got values from -1 to 1 .*\(x \+ 1\) / 2": clip / 127.5 - 1,
        r"must be in \[0, 1\]; got values from 0 to 255": clip.astype(np.float32),
        r"must be in \[0, 1\]; got values from nan to nan": np.full((1, 2, 2, 3), np.nan),
    }
    for message, frames in wrong.items():
        with pytest.raises(ValueError, match=message):
            save_video(tmp_path / "a.mp4", frames, 16)
    with VideoWriter(tmp_path / "b.mp4", 16) as writer:
        writer.write(clip[:2])
        with pytest.raises(ValueError, match=r"one size of at least 1x1; got \(24, 64\) \(height, width\) after \(48, 64\)"):
            writer.write(clip[:, :24])
    assert left(tmp_path) == ["b.mp4"], "a chunk that was refused does not spoil the rest"


def test_no_frames_is_an_error(tmp_path: Path, clip: np.ndarray) -> None:
    for name, chunks in itertools.product(("a.mp4", "a.gif", "a.png", "frames"), ([], [clip[:0]])):
        with pytest.raises(ValueError, match=f"no frames were given for .*{name}"):
            write_all(tmp_path / name, chunks)
    assert left(tmp_path) == []


@pytest.mark.parametrize("fps", [0, -1, float("nan"), float("inf"), 1e-9])
def test_rates_that_are_no_rates(tmp_path: Path, fps: float) -> None:
    with pytest.raises(ValueError, match="fps must be a positive number of frames per second"):
        VideoWriter(tmp_path / "a.mp4", fps)


def test_metadata_that_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="metadata must be what JSON can hold"):
        VideoWriter(tmp_path / "a.mp4", 16, metadata={"seed": object()})


# Reading what others wrote.


def test_real_video(data: Path) -> None:
    frames, fps = read_video(data / "vace_input_512x768.mp4")
    assert frames.shape[0] == 25
    assert sorted(frames.shape[1:3]) == [512, 768]
    assert fps > 0
    first = next(iterate_frames(data / "wan_output_720p.mp4"))
    assert first.shape == (720, 1280, 3)
    assert first.std() > 20


@pytest.mark.parametrize("turn", [0, 1, 2, 3])
def test_a_phone_s_video_is_turned_upright(tmp_path: Path, turn: int) -> None:
    clip = np.zeros((3, 32, 48, 3), np.uint8)
    clip[:, :8, :12] = 255
    save_video(tmp_path / "a.mp4", clip, 8)
    file = bytearray((tmp_path / "a.mp4").read_bytes())
    # The track header's display matrix (QuickTime file format, "tkhd"), for `turn` quarter turns clockwise.
    place, one = file.index(b"tkhd") + 44, 1 << 16
    matrix = [(one, 0, 0, one, 0, 0), (0, one, -one, 0, 32, 0), (-one, 0, 0, -one, 48, 32), (0, -one, one, 0, 0, 48)][turn]
    a, b, c, d, x, y = matrix
    file[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, x * one, y * one, 1 << 30)
    (tmp_path / "a.mp4").write_bytes(file)
    frames, _ = read_video(tmp_path / "a.mp4")
    assert distance(frames, np.rot90(clip, -turn, axes=(1, 2))) < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright(tmp_path: Path, orientation: int) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3) * 10
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    turned = [0, lambda p: p, np.fliplr, lambda p: np.rot90(p, 2), np.flipud, lambda p: p.swapaxes(0, 1)]
    turned += [lambda p: np.rot90(p, -1), lambda p: np.rot90(p, 2).swapaxes(0, 1), np.rot90]
    assert np.array_equal(read_image(tmp_path / "a.png"), turned[orientation](pixels))


def test_transparent_images_show_white(tmp_path: Path) -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = [200, 0, 0, 255]
    rgba[0, 1] = [200, 0, 0, 128]
    Image.fromarray(rgba).save(tmp_path / "a.png")
    image = read_image(tmp_path / "a.png")
    assert image[0, 0].tolist() == [200, 0, 0]
    assert np.abs(image[0, 1].astype(int) - [227, 127, 127]).max() <= 1
    assert (image[1] == 255).all()
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "L").convert("P")
    palette.save(tmp_path / "p.png", transparency=0)
    assert read_image(tmp_path / "p.png")[0].tolist() == [[255, 255, 255], [1, 1, 1]]


@pytest.mark.parametrize(
    ("mode", "value", "seen"), [("L", 77, 77), ("1", 1, 255), ("I;16", 0x4D4D, 77), ("I", 0x4D4D, 77), ("LA", (77, 255), 77)]
)
def test_grey_images(tmp_path: Path, mode: str, value: int, seen: int) -> None:
    Image.new(mode, (3, 2), value).save(path := tmp_path / ("a.tiff" if mode == "I" else "a.png"))
    assert (read_image(path) == np.full((2, 3, 3), seen)).all()


def test_other_kinds_of_image(tmp_path: Path, data: Path, clip: np.ndarray) -> None:
    Image.new("CMYK", (3, 2), (0, 255, 255, 0)).save(tmp_path / "a.jpg")
    assert np.abs(read_image(tmp_path / "a.jpg")[0, 0].astype(int) - [255, 0, 0]).max() <= 3
    save_video(tmp_path / "a.webp", clip, 16)
    assert distance(read_image(tmp_path / "a.webp"), clip[0]) < 3
    for name in ("i2v_input.jpg", "flf2v_first.png", "vace_reference_1.png"):
        image = read_image(data / name)
        assert image.ndim == 3
        assert image.std() > 10


def test_files_that_are_no_videos_or_images(tmp_path: Path, clip: np.ndarray) -> None:
    save_video(tmp_path / "a.mp4", clip, 16)
    save_video(tmp_path / "a.png", clip[:1], 16)
    Image.new("F", (2, 2)).save(tmp_path / "f.tiff")
    (tmp_path / "text.txt").write_text("no video")
    (tmp_path / "empty.mp4").touch()
    for kind, read in (("video", read_video), ("image", read_image)):
        with pytest.raises(ValueError, match=f"nothing is not there: give the name of a {kind}|of an {kind}"):
            read(tmp_path / "nothing")
        with pytest.raises(ValueError, match=f"is a folder: give the name of an? {kind} file"):
            read(tmp_path)
        for name in ("text.txt", "empty.mp4"):
            with pytest.raises(ValueError, match=f"{name} is not a readable {kind}"):
                read(tmp_path / name)
    with pytest.raises(ValueError, match="floating-point grey"):
        read_image(tmp_path / "f.tiff")
    whole = {name: (tmp_path / name).read_bytes() for name in ("a.mp4", "a.png")}
    # A png's last 20 bytes are check sums and an end mark: without them every pixel is still there.
    for name, read, missing in (("a.mp4", read_video, 20), ("a.png", read_image, 1000)):
        for size in (10, 100, len(whole[name]) // 2, len(whole[name]) - missing):
            (tmp_path / name).write_bytes(whole[name][:size])
            with pytest.raises(ValueError, match="cut short"):
                read(tmp_path / name)


def test_sound_alone_is_no_video(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "a.m4a"), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=48000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        sound.rate = 48000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    with pytest.raises(ValueError, match="has no pictures in it"):
        read_video(tmp_path / "a.m4a")


# The sheet.


def test_contact_sheet(clip: np.ndarray) -> None:
    sheet = contact_sheet([clip, clip, jnp.asarray(clip)], ["one", "two", "three"], times=3, columns=2, gap=2)
    assert sheet.shape == (2 * (48 + 16 + 2) + 2, 2 * (3 * 66 + 2), 3)
    assert np.array_equal(sheet[18:66, 2:66], clip[0])
    assert np.array_equal(sheet[18:66, 134:198], clip[16])
    assert contact_sheet([clip], times=1).shape == (56, 72, 3)
    with pytest.raises(ValueError, match=r"videos of one size.*got sizes \[\(24, 64\), \(48, 64\)\]"):
        contact_sheet([clip, clip[:, :24]])
    with pytest.raises(ValueError, match="1 captions"):
        contact_sheet([clip, clip], ["one"])
