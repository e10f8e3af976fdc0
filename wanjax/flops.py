"""How many multiplications and additions the models need, by formula: what a compiled program is measured against.

Every multiplication and every addition of a matrix product or convolution counts one; norms, activations and softmax count nothing.
"""

from itertools import pairwise
from typing import NamedTuple

from wanjax.text_encoder import TextEncoderConfig
from wanjax.transformer import TransformerConfig
from wanjax.vae import VAEConfig


class Count(NamedTuple):
    """Operations in products with weights, and in attention's two products of activations."""

    products: float
    attention: float

    @property
    def total(self) -> float:
        """Both."""
        return self.products + self.attention


def transformer_flops(config: TransformerConfig, tokens: int, text: int = 512) -> Count:
    """One evaluation of `velocity` for one video: `tokens` patches of latents, `text` rows of text."""
    c = config.num_attention_heads * config.attention_head_dim
    patch = config.patch_size[0] * config.patch_size[1] * config.patch_size[2]
    layer = tokens * (6 * c * c + 2 * c * config.ffn_dim) + text * 2 * c * c
    ends = tokens * patch * c * (config.in_channels + config.out_channels)
    conditions = text * (config.text_dim * c + c * c) + config.freq_dim * c + c * c + c * 6 * c
    attention = 4 * tokens * (tokens + text) * c
    return Count(2.0 * (config.num_layers * layer + ends + conditions), float(config.num_layers * attention))


def text_encoder_flops(config: TextEncoderConfig, tokens: int = 512) -> Count:
    """One prompt of `tokens` tokens, padding included."""
    inner = config.num_heads * config.d_kv
    layer = tokens * (4 * config.d_model * inner + 3 * config.d_model * config.d_ff)
    return Count(2.0 * config.num_layers * layer, float(config.num_layers * 4 * tokens * tokens * inner))


def decode_flops(config: VAEConfig, frames: int, height: int, width: int) -> Count:
    """Decoding `frames` latent frames of `height` x `width` latents, as the architecture is written.

    Taps that only see padding are counted, and nearest doubling followed by a 3 x 3 convolution at the doubled size: a program that
    knows better needs fewer.
    """
    base = config.decoder_base_dim or config.base_dim
    widths = [base * m for m in (config.dim_mult[-1], *config.dim_mult[::-1])]
    last = len(config.dim_mult) - 1
    area = height * width
    products = frames * area * (config.z_dim**2 + 27 * config.z_dim * widths[0] + 4 * 27 * widths[0] ** 2 + 4 * widths[0] ** 2)
    attention = 4.0 * frames * area * area * widths[0]
    for i, (cin, cout) in enumerate(pairwise(widths)):
        if i > 0 and not config.is_residual:
            cin //= 2
        blocks = 27 * (cin * cout + cout * cout) + (cin * cout if cin != cout else 0) + config.num_res_blocks * 54 * cout * cout
        products += frames * area * blocks
        if i == last:
            break
        if config.temperal_downsample[::-1][i]:
            products += (frames - 1) * area * 3 * cout * 2 * cout
            frames = 2 * frames - 1
        area *= 4
        products += frames * area * 9 * cout * (cout if config.is_residual else cout // 2)
    products += frames * area * 27 * widths[-1] * config.out_channels
    return Count(2.0 * products, attention)
