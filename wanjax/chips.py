"""The TPU chips that programs are planned for, and the devices of a slice that need not be there."""

import importlib.util
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Chip:
    """One JAX device of a TPU generation: a chip, or one of TPU7x's two halves.

    `flops` is the peak in bfloat16 per second, `hbm` the bytes of main memory that the compiler may use, `bandwidth` its bytes per
    second, `clock` the cycles per second of the compiler's estimates, `link` the bytes per second one way over one of `links`
    connections to neighbours.
    """

    name: str
    flops: float
    hbm: float
    bandwidth: float
    clock: float
    link: float
    links: int


# Peaks, bandwidths and links: the system architecture pages of the Cloud TPU documentation (bidirectional bandwidth a chip / 2 / ports).
# hbm: what the compiler names in its out-of-memory error. clock: peak / (operations a cycle of the matrix units), 131072 for v5e,
# 262144 for v5p and 524288 for v6e and a TPU7x half; the compiler's estimates of large products come to 87 to 97 % of those.
CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", 197e12, 15.75 * 2**30, 819e9, 1.5e9, 50e9, 4),
        Chip("v5p", 459e12, 95.74 * 2**30, 2765e9, 1.75e9, 100e9, 6),
        Chip("v6e", 918e12, 31.25 * 2**30, 1640e9, 1.75e9, 100e9, 4),
        Chip("tpu7x", 1153.5e12, 94.75 * 2**30, 3690e9, 2.2e9, 100e9, 6),
    )
}


_QUIET = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
}


def chip_of(topology: str) -> Chip:
    """The chip of a topology such as "v6e:2x4".

    Raises:
        ValueError: for a generation that is not in the table, or a topology without a shape.
    """
    name, _, shape = topology.partition(":")
    if name not in CHIPS or not shape:
        raise ValueError(
            f"A topology is a TPU generation and the shape of its slice, such as v6e:2x4 or tpu7x:2x2x1; got {topology!r} "
            f"(generations: {', '.join(CHIPS)})."
        )
    return CHIPS[name]


def topology_devices(topology: str) -> list[Any]:
    """The devices of a TPU slice that need not be there, e.g. "v6e:2x4"; programs can be compiled for them, not run.

    Raises:
        RuntimeError: without libtpu.
        ValueError: for a topology that libtpu does not know.
    """
    chip_of(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise RuntimeError('Compiling for a TPU needs libtpu, which is not installed: pip install "wanjax[tpu]".')
    # Nothing runs, so it may share the machine with a process that does, and needs to ask nobody which machine this is.
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    sizes = [int(n) for n in topology.partition(":")[2].split("x") if n.isdigit()]
    options = {"chips_per_host_bounds": tuple(sizes + [1] * (3 - len(sizes)))} if math.prod(sizes) < 4 else {}
    try:
        return list(topologies.get_topology_desc(topology, platform="tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"libtpu knows no topology {topology!r}: {error}") from error
