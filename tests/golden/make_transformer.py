"""Writes transformer.npz: weights, inputs and outputs of a small diffusers WanTransformer3DModel. Needs the `parity` extra.

python tests/golden/make_transformer.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_parity_transformer import inputs, randomised, run, theirs
from test_transformer import CONFIG, GOLDEN

if __name__ == "__main__":
    model = randomised(theirs(CONFIG), 0)
    latents, timestep, text = inputs(CONFIG, 0, grid=(2, 4, 6), tokens=7)
    tokens = inputs(CONFIG, 1, grid=(2, 4, 6), per_token=True)[1]
    np.savez_compressed(
        GOLDEN,
        latents=latents,
        timestep=timestep,
        timestep_tokens=tokens,
        text=text,
        velocity=run(model, latents, timestep, text).astype(np.float32),
        velocity_tokens=run(model, latents, tokens, text).astype(np.float32),
        **{f"weights/{name}": value.numpy() for name, value in model.state_dict().items()},
    )
