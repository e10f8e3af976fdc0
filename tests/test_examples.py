"""The examples as their users run them."""

import subprocess
import sys
from pathlib import Path

from wanjax.video import read_video

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def test_prompt_to_video_from_python(tmp_path):
    assert len((EXAMPLES / "t2v.py").read_text().splitlines()) <= 60
    command = [sys.executable, str(EXAMPLES / "t2v.py"), "a red circle moves left on a black background", "-o", "out.mp4", "--seed", "3"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    frames, fps = read_video(tmp_path / "out.mp4")
    assert (frames.shape, fps) == ((17, 64, 64, 3), 8)
