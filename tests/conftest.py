"""Test set-up: eight CPU devices, strict dtype promotion, the folder of real inputs, and CI's word that nothing may be skipped."""

import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

# Most of a test's time is compiling: code that is not optimised is there in half the time, and computes the same.
_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0".strip()
# Without MLIR for each fusion in a third of that. Newer compilers have no other way, and neither they nor libtpu know the flag.
_FEWER_PASSES = " --xla_cpu_use_fusion_emitters=false" if version("jaxlib") < "0.11" else ""
os.environ["XLA_FLAGS"] = _FLAGS + _FEWER_PASSES
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jaxtyping
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.devices()  # flags are read here; what starts later, libtpu or another process, gets those that all know
os.environ["XLA_FLAGS"] = _FLAGS

MAPS = 32_000
DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real inputs; tests that need it are skipped, aloud, where it is not."""
    if not DATA.is_dir():
        pytest.skip(f"real inputs not found at {DATA}")
    return DATA


@pytest.fixture(autouse=True)
def few_programs_at_hand() -> Iterator[None]:
    """Compiled programs are dropped when they take half of the memory maps that Linux allows a process; beyond all of them it aborts."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAPS:
        jax.clear_caches()


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Annotations unchecked, as for users: to test what is said of arguments that no annotation allows."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def _forbid_skipping(report: pytest.TestReport | pytest.CollectReport) -> None:
    """With WANJAX_NO_SKIP set, a skipped test or file fails."""
    if os.environ.get("WANJAX_NO_SKIP") and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which WANJAX_NO_SKIP forbids: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    _forbid_skipping(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report():
    report = yield
    _forbid_skipping(report)
    return report
