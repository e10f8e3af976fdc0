"""Peak memory of the full-size VAE where it must not grow: streams of 9 and 81 frames, and the gradient of decoding 17 frames.

    python benchmarks/vae_memory.py
    python benchmarks/vae_memory.py --vae 2.1 --case gradient

Random weights, float32, on a CPU. Each figure is what the second pass adds to the resident set, in a process of its own,
so that neither weights nor compiling count. Needs Linux, and no extra.
"""

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from wanjax.vae import VAE, VAE_2_1, VAE_2_2, decode, decode_stream, encode_stream, init_vae

CONFIGS = {"2.1": VAE_2_1, "2.2": VAE_2_2}
CASES = {
    "decode_stream": [(9, 128), (81, 128)],
    "encode_stream": [(9, 128), (81, 128)],
    "gradient": [(17, 256)],
}


def resident(field: str) -> float:
    """GB of this process: VmRSS is what it holds now, VmHWM the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 2**20


def second_pass(run: Callable[[], Any]) -> tuple[float, float]:
    """GB that a second pass adds to what the process holds, so that compiling is not counted, and its seconds."""
    run()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the first pass has freed would hide what the second one takes
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    before, start = resident("VmRSS"), time.perf_counter()
    run()
    return resident("VmHWM") - before, time.perf_counter() - start


def latents_of(vae: VAE, frames: int, size: int) -> np.ndarray:
    """Noise to decode."""
    side = size // vae.config.stride
    return np.random.default_rng(0).normal(size=(1, vae.config.z_dim, (frames - 1) // 4 + 1, side, side)).astype(np.float32)


def case_run(case: str, vae: VAE, frames: int, size: int) -> Callable[[], Any]:
    """One pass, nothing of which is kept."""

    def decoded() -> None:
        for part in decode_stream(latents_of(vae, frames, size), vae, uint8=True):
            np.asarray(part)

    def encoded() -> None:
        rng = np.random.default_rng(0)
        drawn: Iterator[np.ndarray] = (rng.integers(0, 256, (1, 1, size, size, 3), np.uint8) for _ in range(frames))
        for posterior in encode_stream(drawn, vae):
            np.asarray(posterior.mean)

    if case != "gradient":
        return decoded if case == "decode_stream" else encoded
    z = jnp.asarray(latents_of(vae, frames, size))
    step = jax.jit(jax.grad(lambda vae, z: jnp.mean(jnp.square(decode(z, vae, remat=True))), argnums=(0, 1)))

    def gradient() -> None:
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(step(vae, z))):
            raise FloatingPointError("a gradient is not finite")

    return gradient


def measure(name: str, case: str, frames: int, size: int) -> tuple[float, float]:
    """GB and seconds, in this process."""
    vae = jax.jit(lambda: init_vae(CONFIGS[name], jax.random.key(0)))()
    return second_pass(case_run(case, vae, frames, size))


def main() -> None:
    """Print the table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    print("| VAE | case | video | peak GB | seconds |")
    print("| --- | --- | --- | --- | --- |")
    for name in args.vae:
        for case in args.case:
            for frames, size in CASES[case]:
                row = json.dumps([name, case, frames, size])
                done = subprocess.run([sys.executable, __file__, "--measure", row], stdout=subprocess.PIPE, text=True, check=True)
                gb, seconds = json.loads(done.stdout.splitlines()[-1])
                print(f"| {name} | {case} | {frames} x {size} px | {gb:.2f} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
