"""The `wanjax` command as its users meet it: a subprocess, its files, its messages and its exit status."""

import os
import signal
import subprocess
import sys
import time

import pytest

from wanjax import video

PROMPT = "a red circle moves left on a black background"


def wanjax(*arguments, cwd, **options):
    """Run the command in a folder, as a user would."""
    command = [sys.executable, "-m", "wanjax.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **options)


def test_generate_writes_an_mp4_that_says_how_it_was_made(tmp_path):
    done = wanjax("generate", PROMPT, "-o", "out.mp4", "--seed", "7", "--steps", "2", "--frames", "5", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "wrote out.mp4" in done.stdout
    for stage in ("text", "denoise", "decode", "load", "compile", "a step"):
        assert stage in done.stderr
    frames, fps = video.read_video(tmp_path / "out.mp4")
    assert frames.shape == (5, 64, 64, 3)
    assert fps == 8
    metadata = video.read_metadata(tmp_path / "out.mp4")
    assert metadata["prompt"] == PROMPT
    assert (metadata["seed"], metadata["steps"], metadata["size"], metadata["model"]) == ("7", "2", "64x64", "tiny")
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]


def test_several_prompts_make_several_files(tmp_path):
    done = wanjax("generate", PROMPT, "a blue square", "-o", "out.mp4", "--steps", "1", "--frames", "1", "-q", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out-0.mp4", "out-1.mp4"]
    assert not done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--frames", "6"], "num_frames is 4 n + 1"),
        (["--size", "60x64"], "height must be a multiple of 16"),
        (["--size", "big"], "a size is WIDTHxHEIGHT"),
        (["--steps", "0"], "at least 1 step"),
        (["--model", "nowhere/at/all"], "nowhere/at/all"),
        (["-o", "missing/out.mp4"], "missing"),
        (["-o", "out.xyz"], "out.xyz"),
    ],
)
def test_a_mistake_is_one_sentence_and_status_2(tmp_path, arguments, message):
    done = wanjax("generate", PROMPT, *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_interrupt_leaves_nothing_half_written(tmp_path):
    # A shell's background jobs ignore the interrupt, and what they start does too unless it says otherwise.
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from wanjax.cli import command; command()"
    command = [sys.executable, "-c", heed, "generate", PROMPT, "-o", "out.mp4", "--steps", "100000"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    seen = ""
    while "denoise" not in seen:
        more = os.read(process.stderr.fileno(), 1000).decode()
        assert more, f"the command ended before it denoised: {seen}"
        seen += more
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not list(tmp_path.iterdir())


def test_videos_on_a_mesh_of_devices(tmp_path):
    flags = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    options = ["--steps", "1", "--frames", "1", "-q"]
    done = wanjax("generate", PROMPT, "-o", "out.mp4", "--mesh", "data=2,context=2", *options, cwd=tmp_path, env=flags)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.mp4").exists()
    done = wanjax("generate", PROMPT, "--mesh", "context=3", cwd=tmp_path, env=flags)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "as many places as devices, 4 here" in done.stderr
    assert "of data, fsdp, context, tensor" in wanjax("generate", PROMPT, "--mesh", "rows=3", cwd=tmp_path).stderr


def test_info_prints_components_and_preset(tmp_path):
    done = wanjax("info", "tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for word in ("transformer", "text_encoder", "vae", "float16", "tiny"):
        assert word in done.stdout


def test_version_and_help(tmp_path):
    assert "wanjax" in wanjax("--version", cwd=tmp_path).stdout
    assert "generate" in wanjax("--help", cwd=tmp_path).stdout
