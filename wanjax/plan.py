"""What a model costs on a TPU slice, told by compiling its real programs for it on a machine that has none."""

import importlib.util
import os
from typing import Any

from wanjax.program import Report, analyse, compile_and_analyse

__all__ = ["Report", "analyse", "compile_and_analyse", "topology_devices"]


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU slice that need not be there, e.g. "v6e:2x4", "tpu7x:2x2x1"; programs can be compiled for them, not run.

    Raises:
        RuntimeError: without libtpu, or when another process is compiling for TPU (libtpu serves one at a time).
        ValueError: for a topology that libtpu does not know.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError('Compiling for a TPU needs libtpu, which is not installed: pip install "wanjax[tpu]".')
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(topology, platform="tpu").devices)
