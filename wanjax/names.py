"""Names of the original releases to diffusers' names.

The authors' files, and the single-file repacks made of them, name tensors in their own way; what a file is shows in its
names. Each table is a list of substitutions applied in order, so that reading one from top to bottom is reading the rule.
"""

import re
from collections.abc import Iterable, Mapping

PREFIXES = ("model.diffusion_model.", "diffusion_model.")

# A trap: in the original, norm3 is the one with weights, before cross-attention; diffusers calls that one norm2.
TRANSFORMER = (
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^head\.head\.", "proj_out."),
    (r"blocks\.(\d+)\.modulation$", r"blocks.\1.scale_shift_table"),
    (r"\.ffn\.0\.", ".ffn.net.0.proj."),
    (r"\.ffn\.2\.", ".ffn.net.2."),
    (r"blocks\.(\d+)\.norm3\.", r"blocks.\1.norm2."),
    (r"^img_emb\.proj\.0\.", "condition_embedder.image_embedder.norm1."),
    (r"^img_emb\.proj\.1\.", "condition_embedder.image_embedder.ff.net.0.proj."),
    (r"^img_emb\.proj\.3\.", "condition_embedder.image_embedder.ff.net.2."),
    (r"^img_emb\.proj\.4\.", "condition_embedder.image_embedder.norm2."),
    (r"^img_emb\.emb_pos$", "condition_embedder.image_embedder.pos_embed"),
    (r"\.self_attn\.", ".attn1."),
    (r"\.cross_attn\.", ".attn2."),
    (r"\.(attn[12])\.([qkv])\.", r".\1.to_\2."),
    (r"\.(attn[12])\.o\.", r".\1.to_out.0."),
    (r"\.attn2\.k_img\.", ".attn2.add_k_proj."),
    (r"\.attn2\.v_img\.", ".attn2.add_v_proj."),
    (r"\.attn2\.norm_k_img\.", ".attn2.norm_added_k."),
    (r"\.before_proj\.", ".proj_in."),
    (r"\.after_proj\.", ".proj_out."),
)

_VAE_ENDS = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(encoder|decoder)\.conv1\.", r"\1.conv_in."),
    (r"^(encoder|decoder)\.middle\.0\.", r"\1.mid_block.resnets.0."),
    (r"^(encoder|decoder)\.middle\.1\.", r"\1.mid_block.attentions.0."),
    (r"^(encoder|decoder)\.middle\.2\.", r"\1.mid_block.resnets.1."),
    (r"^(encoder|decoder)\.head\.0\.", r"\1.norm_out."),
    (r"^(encoder|decoder)\.head\.2\.", r"\1.conv_out."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)

# Decoder levels lie in one row: three residual blocks and a resampler, four times, the last level without.
VAE_2_1 = (
    *_VAE_ENDS,
    (r"^encoder\.downsamples\.", "encoder.down_blocks."),
    *(
        (rf"^decoder\.upsamples\.{4 * level + i}\.", f"decoder.up_blocks.{level}.{'upsamplers.0' if i == 3 else f'resnets.{i}'}.")
        for level in range(4)
        for i in range(4)
    ),
)

VAE_2_2 = (
    *_VAE_ENDS,
    (r"^encoder\.downsamples\.(\d+)\.downsamples\.\d+\.(resample|time_conv)\.", r"encoder.down_blocks.\1.downsampler.\2."),
    (r"^encoder\.downsamples\.(\d+)\.downsamples\.(\d+)\.", r"encoder.down_blocks.\1.resnets.\2."),
    (r"^decoder\.upsamples\.(\d+)\.upsamples\.\d+\.(resample|time_conv)\.", r"decoder.up_blocks.\1.upsampler.\2."),
    (r"^decoder\.upsamples\.(\d+)\.upsamples\.(\d+)\.", r"decoder.up_blocks.\1.resnets.\2."),
)

TEXT_ENCODER = (
    (r"^token_embedding\.", "shared."),
    (r"^norm\.", "encoder.final_layer_norm."),
    (r"^blocks\.(\d+)\.norm1\.", r"encoder.block.\1.layer.0.layer_norm."),
    (r"^blocks\.(\d+)\.attn\.", r"encoder.block.\1.layer.0.SelfAttention."),
    (r"^blocks\.(\d+)\.pos_embedding\.embedding\.", r"encoder.block.\1.layer.0.SelfAttention.relative_attention_bias."),
    (r"^blocks\.(\d+)\.norm2\.", r"encoder.block.\1.layer.1.layer_norm."),
    (r"^blocks\.(\d+)\.ffn\.gate\.0\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_0."),
    (r"^blocks\.(\d+)\.ffn\.fc1\.", r"encoder.block.\1.layer.1.DenseReluDense.wi_1."),
    (r"^blocks\.(\d+)\.ffn\.fc2\.", r"encoder.block.\1.layer.1.DenseReluDense.wo."),
)

# A tensor that only one kind of original file has, and that kind's table. The order matters: 2.2's VAE has 2.1's names too.
_SIGNS = (
    (r"^head\.modulation$", TRANSFORMER),
    (r"^decoder\.upsamples\.\d+\.upsamples\.", VAE_2_2),
    (r"^decoder\.middle\.0\.residual\.0\.gamma$", VAE_2_1),
    (r"^token_embedding\.weight$", TEXT_ENCODER),
)

# Tensors that some files have and no model uses: copies of the embedding, and a norm that image checkpoints carry along.
IGNORED = re.compile(r"(^|\.)(encoder\.embed_tokens\.weight|norm_added_q\.weight)$")


def to_diffusers(names: Iterable[str]) -> Mapping[str, str]:
    """Each name of a file to the name that diffusers gives that tensor: itself where the file has diffusers' names already.

    Tensors that no model uses are left out.
    """
    kept = {name: _without_prefix(name) for name in names if not IGNORED.search(name)}
    table = next((table for sign, table in _SIGNS if any(re.search(sign, name) for name in kept.values())), ())
    return {name: _renamed(short, table) for name, short in kept.items()}


def _without_prefix(name: str) -> str:
    """The name without what single-file repacks put in front."""
    return next((name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)), name)


def _renamed(name: str, table: Iterable[tuple[str, str]]) -> str:
    """The name after every substitution of a table."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name
