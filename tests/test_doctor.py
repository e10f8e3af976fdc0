"""`wanjax doctor`: right on this machine, and not silent when something is wrong."""

import jax.numpy as jnp
import numpy as np

from wanjax import doctor
from wanjax.cli import main


def test_everything_is_right_here(capsys):
    """On eight CPU devices, so across devices too."""
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "jax" in said
    assert said.count("device ") == 8
    for way in ("plain", "in blocks", "ring over 8 devices", "ulysses, bfloat16", "2d over 8 devices", "decode over 8 devices", "encode"):
        assert f"{way}: " in said, way
    assert "WRONG" not in said


def test_a_wrong_result_is_told(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_vae_checks", lambda bound: iter(()))
    monkeypatch.setattr(doctor, "blocked_attention", lambda q, k, v, **blocks: jnp.asarray(v) * 0.5)
    assert main(["doctor"]) == 1
    captured = capsys.readouterr()
    assert "WRONG  attention, in blocks" in captured.out
    assert "give wrong results on this machine: attention, in blocks; attention, in blocks, bfloat16" in captured.err


def test_nan_and_errors_are_wrong():
    expected = np.ones(3, np.float32)
    assert not doctor._check("nan", lambda x: x * jnp.nan, [expected], expected, 1.0).passed
    raised = doctor._check("raises", lambda x: x.reshape(2), [expected], expected, 1.0)
    assert not raised.passed
    assert "TypeError" in str(raised)
