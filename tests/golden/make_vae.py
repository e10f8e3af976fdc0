"""Writes vae.npz: what diffusers' AutoencoderKLWan makes of the random weights, latents and videos of tests/vae_models.py.

Run as `python tests/golden/make_vae.py`, with the `parity` extra. Of videos every third pixel each way is kept.
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_parity_vae import pair, their_decode, their_encode
from test_vae import GOLDEN, GOLDEN_KINDS
from vae_models import CONFIGS, random_latents, random_video

if __name__ == "__main__":
    arrays = {}
    for kind in GOLDEN_KINDS:
        config = CONFIGS[kind]
        _, model = pair(config)
        mean, logvar = their_encode(model, random_video(config, 2))
        arrays |= {
            f"{kind}/video": their_decode(model, random_latents(config, 1))[..., ::3, ::3],
            f"{kind}/mean": mean,
            f"{kind}/logvar": logvar,
        }
    np.savez_compressed(GOLDEN, **{name: array.astype(np.float32) for name, array in arrays.items()})
