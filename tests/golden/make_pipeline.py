"""Writes pipeline.npz: the latents that diffusers' WanPipeline makes with the small random models of tests/models.py.

Run from the repository root, with the `parity` extra installed: PYTHONPATH=tests python tests/golden/make_pipeline.py
"""

import tempfile
from pathlib import Path

import diffusers
import numpy as np
import torch
from models import small_wan

import wanjax

PROMPTS = ["a red circle moves left", "a blue square"]
OPTIONS = {"num_frames": 5, "num_inference_steps": 6, "guidance_scale": 4.0}


def noise(wan: wanjax.Wan) -> np.ndarray:
    """The noise that both sides start from."""
    return np.random.default_rng(0).normal(size=(2, wan.vae.config.z_dim, 2, 4, 4)).astype(np.float32)


def main() -> None:
    latents = {}
    for kind in ("2.1", "a14b", "5b"):
        wan = small_wan(kind)
        size = 4 * wan.vae.config.stride
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            wanjax.save(folder, wan)
            pipeline = diffusers.WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
            second = {"guidance_scale_2": 2.0} if kind == "a14b" else {}
            given = {"latents": torch.from_numpy(noise(wan)), "height": size, "width": size, "output_type": "latent"}
            latents[kind] = pipeline(PROMPTS, negative_prompt="", **given, **OPTIONS, **second).frames.numpy()
    np.savez(Path(__file__).parent / "pipeline.npz", **latents)


if __name__ == "__main__":
    main()
