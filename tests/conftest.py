"""Test set-up: eight CPU devices, strict dtype promotion, and the folder of real inputs where there is one."""

import os
from pathlib import Path

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real inputs; tests that need it are skipped, aloud, where it is not."""
    if not DATA.is_dir():
        pytest.skip(f"real inputs not found at {DATA}")
    return DATA
