"""Two processes of four devices each, on one machine, against one process on one device."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wanjax.sharding import join_processes
from wanjax.video import read_image

EXAMPLE = [sys.executable, str(Path(__file__).resolve().parents[1] / "examples" / "multihost.py")]
GENERATE = [sys.executable, "-m", "wanjax.cli", "generate", "a red circle moves left on a black background", "-q"]


def start(command, devices, folder):
    env = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process):
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err
    return out


def two_processes(command, tmp_path):
    """What each prints, each in a folder of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    processes = []
    for i in range(2):
        folder = tmp_path / str(i)
        folder.mkdir()
        processes.append(start([*command, "--coordinator", coordinator, "--num-processes", "2", "--process-id", str(i)], 4, folder))
    return [finish(process) for process in processes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What the example prints, and the video it makes, in one process on one device."""
    folder = tmp_path_factory.mktemp("alone")
    said = finish(start([*EXAMPLE, "-o", "out"], 1, folder))
    return numbers(said), frames_of(folder / "out")


def frames_of(folder):
    """A folder of frames, which loses nothing."""
    return np.stack([read_image(path) for path in sorted(folder.glob("*.png"))]).astype(int)


def numbers(said):
    """The latents' deviation and the losses before and after a step."""
    return np.array([float(number) for number in re.findall(r"\d+\.\d{6}", said)])


@pytest.mark.slow
def test_generating_and_training_in_two_processes_equal_one(alone, tmp_path):
    said, other = two_processes([*EXAMPLE, "-o", "out"], tmp_path)
    assert "2 processes, 8 devices" in said
    assert "processes" not in other
    assert not (tmp_path / "1" / "out").exists()
    np.testing.assert_allclose(numbers(said), alone[0], atol=2e-6)
    assert len(alone[0]) == 3
    assert np.abs(frames_of(tmp_path / "0" / "out") - alone[1]).max() <= 1


def test_the_command_in_two_processes(alone, tmp_path):
    said, other = two_processes([*GENERATE, "-o", "out"], tmp_path)
    assert "wrote out" in said
    assert "wrote" not in other
    assert not (tmp_path / "1" / "out").exists()
    assert np.abs(frames_of(tmp_path / "0" / "out") - alone[1]).max() <= 1


def test_half_said_is_refused():
    with pytest.raises(ValueError, match="needs coordinator, number of processes and its id"):
        join_processes("localhost:1234")
    with pytest.raises(ValueError, match="process ids are 0 to 1 of 2 processes; got 2"):
        join_processes("localhost:1234", 2, 2)
