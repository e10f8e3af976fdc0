"""Writes text_encoder.npz: weights, ids and rows of a small transformers UMT5EncoderModel. Needs the `parity` extra.

python tests/golden/make_text_encoder.py
"""

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_parity_text_encoder import prompts, randomised, run, tensors, theirs
from test_text_encoder import CONFIG, GOLDEN

if __name__ == "__main__":
    model = randomised(theirs(CONFIG), 0)
    ids, mask = prompts(CONFIG, 0, (1, 9, 40), 40)
    rows = run(model, ids, mask).astype(np.float32)
    np.savez_compressed(GOLDEN, ids=ids, mask=mask, rows=rows, **{f"weights/{k}": v.detach().numpy() for k, v in tensors(model).items()})
