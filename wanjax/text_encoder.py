"""The UMT5 text encoder: a prompt becomes the rows that the transformer's cross-attention reads.

Prompt -> `clean_prompt` -> `tokenize` -> `embed_text`. What sets UMT5 apart from T5 is that every layer has a table of
relative position biases of its own; like T5 it neither scales the attention scores nor has any other bias. The Wan
models were trained on rows that are zero past the prompt's end, so `embed_text` returns them that way.
"""

import html
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import equinox as eqx
import ftfy
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, Int32, PRNGKeyArray
from tokenizers import Tokenizer

from wanjax.layers import Linear, RMSNorm, linear, rms_norm
from wanjax.weights import stored


@dataclass(frozen=True)
class TextEncoderConfig:
    """Architecture of a UMT5 encoder, in the field names and with the defaults of its config.json."""

    vocab_size: int = 250112
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 1024
    num_layers: int = 8
    num_heads: int = 6
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "TextEncoderConfig":
        """The config that a config.json describes; keys that say nothing about the encoder's shape are ignored.

        ValueError for another model type (T5 shares one bias table between its layers) or another activation.
        """
        if (kind := config.get("model_type", "umt5")) != "umt5":
            raise ValueError(f'the text encoder of the Wan models has model_type "umt5"; this config.json says "{kind}"')
        if (activation := config.get("feed_forward_proj", "gated-gelu")) != "gated-gelu":
            raise ValueError(f'only feed_forward_proj "gated-gelu" is implemented, which all UMT5 checkpoints use; got "{activation}"')
        return cls(**{field.name: config[field.name] for field in fields(cls) if field.name in config})

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> "TextEncoderConfig":
        """The architecture of a checkpoint without a config.json, read off its tensors' shapes; ValueError where they are of no UMT5."""
        layer = "encoder.block.0.layer."
        try:
            vocabulary, width = shapes["shared.weight"]
            buckets, heads = shapes[f"{layer}0.SelfAttention.relative_attention_bias.weight"]
            inner, ffn = shapes[f"{layer}0.SelfAttention.q.weight"][0], shapes[f"{layer}1.DenseReluDense.wi_0.weight"][0]
        except KeyError as error:
            raise ValueError(f"these are not the tensors of a UMT5 encoder: {error.args[0]} is missing; give config=.") from None
        layers = 1 + max(int(name.split(".")[2]) for name in shapes if name.startswith("encoder.block."))
        return cls(vocabulary, width, inner // heads, ffn, layers, heads, buckets)

    def to_json(self) -> dict[str, Any]:
        """The config.json that transformers' UMT5EncoderModel loads."""
        return {
            "architectures": ["UMT5EncoderModel"],
            "model_type": "umt5",
            **asdict(self),
            "feed_forward_proj": "gated-gelu",
            "is_encoder_decoder": True,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
            "tie_word_embeddings": True,
        }


UMT5_XXL = TextEncoderConfig(vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64)
"""The text encoder of every Wan 2.1 and 2.2 model: 5.7 B parameters."""


UMT5_XXL = TextEncoderConfig(vocab_size=256384, d_model=4096, d_ff=10240, num_layers=24, num_heads=64)
"""The encoder of every Wan checkpoint."""


class Embedding(eqx.Module):
    """A table of rows to look up."""

    weight: Float[Array, "rows c"]


class SelfAttention(eqx.Module):
    """Projections of one attention, and its table of biases: one row of all heads per bucket of relative positions."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    relative_attention_bias: Embedding


class AttentionLayer(eqx.Module):
    """An attention and the norm before it."""

    layer_norm: RMSNorm
    attention: SelfAttention = stored(name="SelfAttention")


class GatedFeedForward(eqx.Module):
    """wo(gelu(wi_0 x) * (wi_1 x))."""

    wi_0: Linear
    wi_1: Linear
    wo: Linear


class FeedForwardLayer(eqx.Module):
    """A feed-forward and the norm before it."""

    layer_norm: RMSNorm
    feed_forward: GatedFeedForward = stored(name="DenseReluDense")


class Block(eqx.Module):
    """One encoder layer."""

    attention: AttentionLayer = stored(name="layer.0")
    feed_forward: FeedForwardLayer = stored(name="layer.1")


class Stack(eqx.Module):
    """The encoder without its embedding; the leaves of `block` have a leading layer axis."""

    final_layer_norm: RMSNorm
    block: Block = stored(stacked=True)


class TextEncoder(eqx.Module):
    """Weights of a UMT5 encoder; `shared` embeds the tokens."""

    shared: Embedding
    encoder: Stack
    config: TextEncoderConfig = eqx.field(static=True)


def init_text_encoder(config: TextEncoderConfig, key: PRNGKeyArray, dtype: jnp.dtype | type = jnp.float32) -> TextEncoder:
    """Random weights that train from scratch: T5's own scheme, unit embeddings and fan-in scaled maps.

    q is smaller by sqrt(d_kv), which stands in for the scaling that the scores do not get.
    """
    c, inner = config.d_model, config.num_heads * config.d_kv

    def normal(key: PRNGKeyArray, shape: tuple[int, ...], std: float) -> Array:
        return std * jax.random.normal(key, shape, dtype)

    def block(key: PRNGKeyArray) -> Block:
        q, k, v, o, bias, wi_0, wi_1, wo = jax.random.split(key, 8)
        attention = SelfAttention(
            q=Linear(normal(q, (c, inner), (c * config.d_kv) ** -0.5)),
            k=Linear(normal(k, (c, inner), c**-0.5)),
            v=Linear(normal(v, (c, inner), c**-0.5)),
            o=Linear(normal(o, (inner, c), inner**-0.5)),
            relative_attention_bias=Embedding(normal(bias, (config.relative_attention_num_buckets, config.num_heads), c**-0.5)),
        )
        feed_forward = GatedFeedForward(
            wi_0=Linear(normal(wi_0, (c, config.d_ff), c**-0.5)),
            wi_1=Linear(normal(wi_1, (c, config.d_ff), c**-0.5)),
            wo=Linear(normal(wo, (config.d_ff, c), config.d_ff**-0.5)),
        )
        norm = RMSNorm(jnp.ones(c, dtype))
        return Block(AttentionLayer(norm, attention), FeedForwardLayer(norm, feed_forward))

    embedding, blocks = jax.random.split(key)
    stack = Stack(RMSNorm(jnp.ones(c, dtype)), jax.vmap(block)(jax.random.split(blocks, config.num_layers)))
    return TextEncoder(Embedding(normal(embedding, (config.vocab_size, c), 1.0)), stack, config)


def embed_text(
    ids: Int[Array | np.ndarray, "b L"], mask: Int[Array | np.ndarray, "b L"] | Bool[Array | np.ndarray, "b L"], weights: TextEncoder
) -> Float[Array, "b L c"]:
    """Embeddings of token ids; rows where the mask is 0 are zero, as the Wan pipelines make them.

    `ids` and `mask` come from `tokenize`: ids in [0, vocab_size), mask 1 on the prompt (its end-of-sequence token
    included) and 0 on padding, which changes nothing on the prompt's rows. Computes in the dtype of the weights, with
    the norms' statistics, the attention scores, their softmax and the activation in float32.
    Source: mT5/UMT5 (Xue et al. 2020, Chung et al. 2023); numbers as transformers' UMT5EncoderModel.

    ValueError for shapes that differ, and, where ids are known (not traced), for ids out of the vocabulary. Inside a jit
    such an id makes its prompt NaN.
    """
    if ids.ndim != 2 or ids.shape != mask.shape:
        raise ValueError(f"ids and mask must both be (prompts, tokens); got ids {tuple(ids.shape)} and mask {tuple(mask.shape)}")
    check_vocabulary(ids, weights.shared.weight.shape[0])
    keep = jnp.asarray(mask) != 0
    x = weights.shared.weight.at[jnp.asarray(ids)].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    config = weights.config
    offsets = wrapped_offset_buckets(ids.shape[1], config.relative_attention_num_buckets, config.relative_attention_max_distance)

    def step(x: Float[Array, "b L c"], block: Block) -> tuple[Float[Array, "b L c"], None]:
        layer = block.attention
        bias = relative_bias(layer.attention.relative_attention_bias.weight, offsets)
        x = x + attend_with_bias(rms_norm(x, layer.layer_norm, config.layer_norm_epsilon), keep, bias, layer.attention)
        layer = block.feed_forward
        return x + gated_feed_forward(rms_norm(x, layer.layer_norm, config.layer_norm_epsilon), layer.feed_forward), None

    x, _ = lax.scan(step, x, weights.encoder.block)
    x = rms_norm(x, weights.encoder.final_layer_norm, config.layer_norm_epsilon)
    return jnp.where(keep[..., None], x, jnp.zeros_like(x))


def check_vocabulary(ids: Int[Array | np.ndarray, "b L"], size: int) -> None:
    """ValueError for ids outside [0, size), where they are known: traced ids and those on other hosts are not."""
    known = isinstance(ids, np.ndarray) or (not isinstance(ids, Tracer) and ids.is_fully_addressable)
    if known and ids.size and not 0 <= (low := int(ids.min())) <= (high := int(ids.max())) < size:
        hint = "tokenize with the tokenizer that came with these weights"
        raise ValueError(f"token ids must be in [0, {size}); got ids from {low} to {high}: {hint}")


def attend_with_bias(
    x: Float[Array, "b L c"], keep: Bool[Array, "b L"], bias: Float[Array, "n L L"], weights: SelfAttention
) -> Float[Array, "b L c"]:
    """o(softmax(q k^T + bias) v) over the keys that are kept; scores and softmax in float32."""
    heads = bias.shape[0]
    q, k, v = (rearrange(linear(x, w), "b s (n d) -> b s n d", n=heads) for w in (weights.q, weights.k, weights.v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k, preferred_element_type=jnp.float32) + bias
    # A finite low score, not -inf: a prompt with nothing to keep then gets a mean (and zero rows later), never a NaN.
    scores = jnp.where(keep[:, None, None, :], scores, jnp.finfo(jnp.float32).min)
    out = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    return linear(rearrange(out, "b s n d -> b s (n d)"), weights.o)


def gated_feed_forward(x: Float[Array, "b L c"], weights: GatedFeedForward) -> Float[Array, "b L c"]:
    """wo(gelu(wi_0 x) * (wi_1 x)) with the tanh form of gelu; gelu and product in float32, rounded once."""
    gate, value = linear(x, weights.wi_0).astype(jnp.float32), linear(x, weights.wi_1).astype(jnp.float32)
    return linear((jax.nn.gelu(gate, approximate=True) * value).astype(x.dtype), weights.wo)


def position_buckets(offsets: Int[np.ndarray, " m"], num_buckets: int, max_distance: int) -> Int32[np.ndarray, " m"]:
    """Bucket of each offset (key position - query position): T5's scheme for an encoder.

    Half the buckets are for keys after the query. Of each half, the first half counts single positions, the rest grows
    by a constant factor up to max_distance, and the last one takes everything beyond.
    """
    half = num_buckets // 2
    exact = half // 2
    distance = np.abs(offsets)
    # In float32, as the checkpoints were trained: at powers of the factor float64 may fall in the next bucket.
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    far = np.minimum(exact + (ratio * np.float32(half - exact)).astype(np.int32), half - 1)
    return np.where(offsets > 0, half, 0).astype(np.int32) + np.where(distance < exact, distance, far).astype(np.int32)


def wrapped_offset_buckets(length: int, num_buckets: int, max_distance: int) -> Int32[np.ndarray, " m"]:
    """Buckets of the offsets 0 .. length - 1, -length .. -1, in this order: entry o mod 2 length belongs to offset o."""
    return position_buckets(np.r_[0:length, -length:0], num_buckets, max_distance)


def relative_bias(table: Float[Array, "buckets n"], buckets: Int32[np.ndarray, " m"]) -> Float[Array, "n m//2 m//2"]:
    """Bias of every query and key, in float32, from the bucket of each wrapped offset.

    Row i of the result is the row of offsets turned right by i. Repeating that row (m entries) and cutting the repeats
    into rows of m - 1 turns each by one more, so no gather over all pairs is needed, nor a scatter in the gradient.
    """
    m = buckets.shape[0]
    row = table.astype(jnp.float32)[buckets].T
    turned = jnp.tile(row, (1, m // 2))[:, : m // 2 * (m - 1)]
    return rearrange(turned, "n (q k) -> n q k", k=m - 1)[:, :, : m // 2]


def clean_prompt(prompt: str) -> str:
    """The prompt as the Wan pipelines clean it: mojibake repaired, HTML entities resolved (twice), whitespace runs made one space."""
    prompt = html.unescape(html.unescape(ftfy.fix_text(prompt))).strip()
    return re.sub(r"\s+", " ", prompt).strip()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a tokenizer.json, or of a folder that holds one (a `tokenizer/` inside a pipeline folder counts).

    ValueError where there is none, where it cannot be read, or where it lacks the <pad> and </s> of T5's tokenizers.
    """
    path = Path(path)
    candidates = [path / "tokenizer.json", path / "tokenizer" / "tokenizer.json"] if path.is_dir() else [path]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ValueError(f"no tokenizer.json at {path}: give the `tokenizer` folder of a Wan checkpoint, or the file itself")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} is not a readable tokenizer.json ({error}): download it again") from None
    if missing := [token for token in ("<pad>", "</s>") if tokenizer.token_to_id(token) is None]:
        raise ValueError(f"{file} has no token {' or '.join(missing)}: the Wan models need the UMT5 tokenizer")
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def tokenize(
    tokenizer: Tokenizer, prompts: Sequence[str], length: int = 512
) -> tuple[Int32[np.ndarray, "b {length}"], Int32[np.ndarray, "b {length}"]]:
    """Token ids and mask of prompts (already cleaned), each ended by </s>, cut or padded to `length` tokens.

    The Wan models read 512 tokens. A longer prompt is cut, keeps its </s>, and is told about in a warning.
    TypeError for one string where a list belongs; ValueError for an empty list or a length below 1.
    """
    if isinstance(prompts, str):
        raise TypeError(f"prompts must be a list of strings; got one string: pass [{prompts[:40]!r}]")
    if not prompts or length < 1:
        raise ValueError(f"tokenize needs at least one prompt and a length of at least 1; got {len(prompts)} prompts, length {length}")
    ids = np.full((len(prompts), length), tokenizer.token_to_id("<pad>"), np.int32)
    mask = np.zeros_like(ids)
    for row, encoding in enumerate(tokenizer.encode_batch(list(prompts), add_special_tokens=False)):
        tokens = [*encoding.ids[: length - 1], tokenizer.token_to_id("</s>")]
        if len(encoding.ids) >= length:
            cut = f"prompt {row} has {len(encoding.ids)} tokens, of which the model reads the first {length - 1}"
            warnings.warn(f"{cut}: {prompts[row][:40]!r}...", stacklevel=2)
        ids[row, : len(tokens)] = tokens
        mask[row, : len(tokens)] = 1
    return ids, mask
