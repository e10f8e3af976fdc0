"""wanjax: the Wan 2.1 and 2.2 video models as pure functions in JAX.

Three ways in: `wanjax generate` on the command line; `load` and `generate` here; and every part alone, as a function of
arrays and weights inside your own jit, grad or shard_map.
"""

from importlib.metadata import version

from wanjax.loading import Wan, load, load_text_encoder, load_tokenizer, load_transformer, load_vae, save
from wanjax.pipeline import decode_frames, denoise, embed_prompts, generate, make_request
from wanjax.presets import PRESETS, Preset
from wanjax.text_encoder import clean_prompt, embed_text, init_text_encoder, tokenize
from wanjax.transformer import init_transformer, velocity
from wanjax.vae import decode, decode_stream, denormalize_latents, encode, encode_stream, init_vae, normalize_latents
from wanjax.video import read_image, read_video, save_video

__version__ = version("wanjax")

# In the order a reader meets them.
__all__ = [  # noqa: RUF022
    # prompt to video
    "load", "generate", "save_video", "Wan", "save", "PRESETS", "Preset",
    # the steps of generate
    "make_request", "embed_prompts", "denoise", "decode_frames",
    # the parts: functions of arrays and weights
    "encode", "decode", "encode_stream", "decode_stream", "normalize_latents", "denormalize_latents",
    "velocity", "embed_text", "clean_prompt", "tokenize",
    # their weights, from files or random
    "load_vae", "load_transformer", "load_text_encoder", "load_tokenizer", "init_vae", "init_transformer", "init_text_encoder",
    # files
    "read_video", "read_image",
]  # fmt: skip
