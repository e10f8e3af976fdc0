"""The examples as their users run them."""

import subprocess
import sys
from pathlib import Path

import pytest

from wanjax.video import read_video

FILM = "big_buck_bunny_720p.mp4"
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_prompt_to_video_from_python(tmp_path):
    assert len((EXAMPLES / "t2v.py").read_text().splitlines()) <= 60
    command = [sys.executable, str(EXAMPLES / "t2v.py"), "a red circle moves left on a black background", "-o", "out.mp4", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    frames, fps = read_video(tmp_path / "out.mp4")
    assert (frames.shape, fps) == ((17, 64, 64, 3), 8)


def run(name, *args):
    """What an example prints."""
    done = subprocess.run([sys.executable, str(EXAMPLES / name), *map(str, args)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_film_goes_through_the_vae_and_back(data, tmp_path):
    said = run("vae_roundtrip.py", data / FILM, tmp_path / "out.mp4", "--frames", 6)
    frames, _ = read_video(tmp_path / "out.mp4")
    assert len(frames) == 5
    assert frames.shape[1] % 8 == frames.shape[2] % 8 == 0
    assert float(said.split("PSNR")[1].split()[0]) > 8


def test_finetuning_the_decoder_on_a_clip_helps(data):
    before, after = map(
        float, run("finetune_vae.py", data / FILM, "--steps", 12, "--frames", 5).split("PSNR ")[1].split(" dB")[0].split(" -> ")
    )
    assert after > before + 1
