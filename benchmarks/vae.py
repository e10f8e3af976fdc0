"""The VAE against diffusers on CPU: decode and encode of the same inputs with the same weights, timed in turn in one process.

    python benchmarks/vae.py                           # everything: both VAEs, 9 and 17 frames, 128 and 256 pixels
    python benchmarks/vae.py --vae 2.1 --size 128 --frames 9 --direction decode --json vae.json

Needs the `parity` extra. Weights are random and of full size, in float32; all cores are used by both. Of each side the
fastest run counts, since what disturbs a run only ever slows it down. Peak memory is measured in a process of its own: the
growth of the resident set over that of the loaded weights. Compile seconds are of the program that is timed, uncached.
"""

import argparse
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import AutoencoderKLWan
from vae_memory import second_pass

from wanjax.vae import VAE, VAE_2_1, VAE_2_2, decode, encode, init_vae
from wanjax.weights import fill

CONFIGS = {"2.1": VAE_2_1, "2.2": VAE_2_2}
Run = Callable[[], Any]


def diffusers_vae(name: str) -> AutoencoderKLWan:
    """diffusers' model with weights of its own random initialisation."""
    torch.manual_seed(0)
    options = {key: value for key, value in CONFIGS[name].to_json().items() if key != "_class_name"}
    return AutoencoderKLWan(**options).eval()


def our_vae(name: str, model: AutoencoderKLWan) -> VAE:
    """The same weights."""
    template = jax.eval_shape(lambda: init_vae(CONFIGS[name], jax.random.key(0)))
    return fill(template, {key: value.numpy() for key, value in model.state_dict().items()})


def given(name: str, direction: str, frames: int, size: int) -> np.ndarray:
    """Latents to decode or a video to encode."""
    rng = np.random.default_rng(0)
    if direction == "encode":
        return rng.uniform(-1, 1, (1, 3, frames, size, size)).astype(np.float32)
    config = CONFIGS[name]
    latent = size // config.stride
    return rng.normal(size=(1, config.z_dim, (frames - 1) // 4 + 1, latent, latent)).astype(np.float32)


def our_run(vae: VAE, direction: str, array: np.ndarray, chunk: int | None) -> Run:
    """One pass of ours, as a numpy array."""
    x = jnp.asarray(array)
    if direction == "decode":
        return lambda: np.asarray(decode(x, vae, chunk=chunk))
    return lambda: np.asarray(encode(x, vae, chunk=chunk).mean)


def diffusers_run(model: AutoencoderKLWan, direction: str, array: np.ndarray) -> Run:
    """One pass of diffusers', as a numpy array."""
    x = torch.from_numpy(array)

    def run() -> np.ndarray:
        with torch.no_grad():
            return (model.decode(x).sample if direction == "decode" else model.encode(x).latent_dist.mean).numpy()

    return run


def seconds(run: Run) -> float:
    """Of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(
    vae: VAE, model: AutoencoderKLWan, name: str, direction: str, frames: int, size: int, runs: int, chunk: int | None
) -> dict[str, Any]:
    """One row of the table: seconds of each side, in turn, and how far the results are apart."""
    array = given(name, direction, frames, size)
    ours, theirs = our_run(vae, direction, array, chunk), diffusers_run(model, direction, array)
    first = seconds(ours)
    a, b = ours(), theirs()
    times = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    best_ours, best_theirs = (min(side) for side in zip(*times, strict=True))
    return {
        "vae": name,
        "direction": direction,
        "frames": frames,
        "size": size,
        "ours_s": best_ours,
        "diffusers_s": best_theirs,
        "ratio": best_theirs / best_ours,
        "compile_s": first - best_ours,
        "relative_l2": float(np.linalg.norm(a - b) / np.linalg.norm(b)),
    }


def peak(side: str, name: str, direction: str, frames: int, size: int, chunk: int | None) -> float:
    """GB that one pass adds to the loaded weights."""
    model = diffusers_vae(name)
    array = given(name, direction, frames, size)
    if side == "ours":
        vae = our_vae(name, model)
        del model
        return second_pass(our_run(vae, direction, array, chunk))[0]
    return second_pass(diffusers_run(model, direction, array))[0]


def peak_elsewhere(side: str, row: dict[str, Any], chunk: int | None) -> float:
    """`peak` in a process of its own."""
    case = [side, row["vae"], row["direction"], row["frames"], row["size"], chunk]
    done = subprocess.run([sys.executable, __file__, "--peak", json.dumps(case)], capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def show(row: dict[str, Any]) -> str:
    """A row of the Markdown table."""
    memory = f"{row['ours_gb']:.2f} / {row['diffusers_gb']:.2f}" if "ours_gb" in row else "-"
    return (
        f"| {row['vae']} | {row['direction']} | {row['frames']} x {row['size']} px | {row['ours_s']:.2f} | {row['diffusers_s']:.2f} "
        f"| {row['ratio']:.2f} | {memory} | {row['compile_s']:.1f} | {row['relative_l2']:.1e} |"
    )


def main() -> None:
    """Print the table, row by row, and write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vae", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--direction", nargs="+", choices=["decode", "encode"], default=["decode", "encode"])
    parser.add_argument("--frames", nargs="+", type=int, default=[9, 17])
    parser.add_argument("--size", nargs="+", type=int, default=[128, 256])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunk", type=int, help="latent frames at a time (ours; default: what decode and encode choose)")
    parser.add_argument("--no-memory", action="store_true", help="leave the peaks out, which take a process and a compilation each")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--peak", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peak:
        print(peak(*args.peak))
        return
    jax.config.update("jax_enable_compilation_cache", False)
    versions = ", ".join(f"{package} {version(package)}" for package in ("jax", "torch", "diffusers"))
    print(f"{platform.machine()}, {torch.get_num_threads()} threads; {versions}\n")
    print("| VAE | direction | video | wanjax s | diffusers s | times as fast | peak GB, wanjax / diffusers | compile s | relative L2 |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for name in args.vae:
        model = diffusers_vae(name)
        vae = our_vae(name, model)
        for direction, size, frames in itertools.product(args.direction, args.size, args.frames):
            row = compare(vae, model, name, direction, frames, size, args.runs, args.chunk)
            if not args.no_memory:
                row |= {f"{side}_gb": peak_elsewhere(side, row, args.chunk) for side in ("ours", "diffusers")}
            rows.append(row)
            print(show(row), flush=True)
        del model, vae
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
