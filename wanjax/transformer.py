"""The diffusion transformer: `velocity(latents, timestep, text, weights)`.

Latents become tokens of 1 x 2 x 2 patches; every block reads the timestep as six numbers a channel (shift, scale and gate
for its attention and for its feed-forward), attends over all tokens with rotary positions, then over the text. Blocks
lie stacked on a leading axis and are scanned, so compile time does not grow with depth.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, PRNGKeyArray

from wanjax.attention import Attend, attention
from wanjax.kernels import on_platform, rotations
from wanjax.layers import LayerNorm, Linear, RMSNorm, gelu, init_linear, layer_norm, linear, rms_norm, silu
from wanjax.weights import Sizes, stored


@dataclass(frozen=True)
class TransformerConfig:
    """Architecture of a Wan transformer, in the field names and with the defaults of its config.json in diffusers."""

    patch_size: tuple[int, int, int] = (1, 2, 2)
    num_attention_heads: int = 40
    attention_head_dim: int = 128
    in_channels: int = 16
    out_channels: int = 16
    text_dim: int = 4096
    freq_dim: int = 256
    ffn_dim: int = 13824
    num_layers: int = 40
    eps: float = 1e-6

    @property
    def width(self) -> int:
        """Channels of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "TransformerConfig":
        """The architecture that a diffusers config.json describes; absent keys take the defaults.

        ValueError for a kind of Wan transformer that is not here yet (image, VACE, Animate) or an unknown variant.
        """
        if (kind := config.get("_class_name", "WanTransformer3DModel")) != "WanTransformer3DModel":
            raise ValueError(f"config.json describes a {kind}; wanjax runs WanTransformer3DModel (text to video).")
        if config.get("image_dim") is not None or config.get("added_kv_proj_dim") is not None:
            raise ValueError(f"config.json has image_dim {config.get('image_dim')}: image-to-video checkpoints are not supported yet.")
        if config.get("qk_norm", "rms_norm_across_heads") != "rms_norm_across_heads" or not config.get("cross_attn_norm", True):
            raise ValueError("only qk_norm rms_norm_across_heads with cross_attn_norm is implemented, which every Wan checkpoint has.")
        known = {field.name for field in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in known}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The config.json that diffusers loads."""
        return {
            "_class_name": "WanTransformer3DModel",
            **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()},
            "qk_norm": "rms_norm_across_heads",
            "cross_attn_norm": True,
            "image_dim": None,
            "added_kv_proj_dim": None,
            "rope_max_seq_len": 1024,
            "pos_embed_seq_len": None,
        }

    @classmethod
    def from_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> "TransformerConfig":
        """The architecture of a checkpoint without a config.json, read off its tensors' shapes.

        Heads are taken to be 128 wide, as in every Wan. ValueError where the tensors are of no Wan transformer.
        """
        try:
            width, channels, pt, ph, pw = shapes["patch_embedding.weight"]
            out, text = shapes["proj_out.weight"][0], shapes["condition_embedder.text_embedder.linear_1.weight"][1]
            freq, ffn = shapes["condition_embedder.time_embedder.linear_1.weight"][1], shapes["blocks.0.ffn.net.0.proj.weight"][0]
        except KeyError as error:
            raise ValueError(f"these are not the tensors of a Wan transformer: {error.args[0]} is missing; give config=.") from None
        if extra := next((name for name in shapes if "image_embedder" in name or name.startswith(("vace_", "face_", "motion_"))), None):
            raise ValueError(f"this checkpoint has {extra}: image, VACE and Animate checkpoints are not supported yet.")
        layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("blocks."))
        return cls(
            patch_size=(pt, ph, pw),
            num_attention_heads=max(width // 128, 1),
            attention_head_dim=min(width, 128),
            in_channels=channels,
            out_channels=out // (pt * ph * pw),
            text_dim=text,
            freq_dim=freq,
            ffn_dim=ffn,
            num_layers=layers,
        )


T2V_1_3B = TransformerConfig(num_attention_heads=12, ffn_dim=8960, num_layers=30)
T2V_14B = TransformerConfig()
T2V_A14B = T2V_14B
"""Each of the two experts of Wan 2.2 A14B has the 14B's architecture."""
TI2V_5B = TransformerConfig(num_attention_heads=24, in_channels=48, out_channels=48, ffn_dim=14336, num_layers=30)


class Rotary(Linear):
    """A projection whose output is rotated. Each head's channels are its pairs' first halves, then their second halves,
    where the file interleaves them: rotating halves moves no data between neighbours."""

    weight: Float[Array, "cin cout"] = stored("(n j pair) cin -> cin (n pair j)")
    bias: Float[Array, " cout"] | None = stored("(n j pair) -> (n pair j)")


class RotaryNorm(RMSNorm):
    """The gain of a norm over all heads of a rotated projection, in the same order."""

    weight: Float[Array, " c"] = stored("(n j pair) -> (n pair j)")


class SelfAttention(eqx.Module):
    """Attention of the tokens over all tokens."""

    to_q: Rotary
    to_k: Rotary
    to_v: Linear
    norm_q: RotaryNorm
    norm_k: RotaryNorm
    to_out: Linear = stored(name="to_out.0")


class CrossAttention(eqx.Module):
    """Attention of the tokens over the text."""

    to_q: Linear
    to_k: Linear
    to_v: Linear
    norm_q: RMSNorm
    norm_k: RMSNorm
    to_out: Linear = stored(name="to_out.0")


class FeedForward(eqx.Module):
    """down(gelu(up(x)))."""

    up: Linear = stored(name="net.0.proj")
    down: Linear = stored(name="net.2")


class Block(eqx.Module):
    """One transformer block; its table is added to the timestep's six numbers a channel."""

    scale_shift_table: Float32[Array, "six c"] = stored("1 six c -> six c")
    attn1: SelfAttention
    norm2: LayerNorm
    attn2: CrossAttention
    ffn: FeedForward


class TwoLayers(eqx.Module):
    """linear_2(act(linear_1(x)))."""

    linear_1: Linear
    linear_2: Linear


class Conditioning(eqx.Module):
    """What the timestep and the text become before the blocks read them."""

    time_embedder: TwoLayers
    time_proj: Linear
    text_embedder: TwoLayers


class PatchEmbedding(Linear):
    """A patch's values, channel first, to a token; a linear map stored as a convolution."""

    weight: Float[Array, "cin cout"] = stored("cout c pt ph pw -> (c pt ph pw) cout")


class Transformer(eqx.Module):
    """Weights of a Wan transformer; the leaves of `blocks` have a leading layer axis."""

    patch_embedding: PatchEmbedding
    condition_embedder: Conditioning
    blocks: Block = stored(stacked=True)
    proj_out: Linear
    scale_shift_table: Float32[Array, "two c"] = stored("1 two c -> two c")
    config: TransformerConfig = eqx.field(static=True)


class Rope(NamedTuple):
    """Cosine and sine of every token's angles, for both halves of a head; the first half's sine is negative.

    Float32, since bfloat16 would round position 257 to 256.
    """

    cos: Float32[Array, "s d"]
    sin: Float32[Array, "s d"]


@runtime_checkable
class Layout(Protocol):
    """How rows of tokens and a block's weights lie on devices, and attention between them; `wanjax.sharding` has one."""

    def rows(self, x: Array, axis: int, batch: int | None = None, length: int | None = None) -> Array:
        """The same rows, spread along an axis of tokens, padded at its end to `length` or as is best, and one of videos."""
        ...

    def block(self, weights: Block) -> Block:
        """The same weights as a device computes with them."""
        ...

    def locally(self, function: Callable[[Array, Rope], Array], x: Array, rope: Rope) -> Array:
        """A function of tokens, heads side by side in their channels, and of their angles, by each device of its own."""
        ...

    def warn_of_repeated_work(self, videos: int, heads: int) -> None:
        """Say which devices compute what others compute too."""
        ...

    attend: Attend
    cross_attend: Attend


class Modulation(NamedTuple):
    """Scale and shift of a norm's output, and the gate of what is computed from it; float32, one a token or one a video."""

    shift: Float32[Array, "b #s c"]
    scale: Float32[Array, "b #s c"]
    gate: Float32[Array, "b #s c"]


def transformer_sizes(config: TransformerConfig) -> Sizes:
    """The sizes that the layouts of the stored weights need."""
    pt, ph, pw = config.patch_size
    return {"pair": 2, "j": config.attention_head_dim // 2, "pt": pt, "ph": ph, "pw": pw}


def keep_float32(name: str) -> bool:
    """Whether a checkpoint tensor stays float32 in a model of smaller dtype: time embedding, modulation tables, norms with an offset."""
    parts = name.split(".")
    return any(part in ("time_embedder", "scale_shift_table", "norm2") for part in parts)


def velocity(
    latents: Float[Array | np.ndarray, "b c t h w"],
    timestep: Float[Array | np.ndarray, " b"] | Float[Array | np.ndarray, "b s"],
    text: Float[Array | np.ndarray, "b l k"],
    weights: Transformer,
    *,
    attend: Attend = attention,
    cross_attend: Attend = attention,
    remat: Callable[..., bool] | bool = False,
    layout: Layout | None = None,
) -> Float[Array, "b c_out t h w"]:
    """The flow velocity, noise - video, that the model sees in noisy latents.

    `latents` are normalised; t, h and w are multiples of the patch (1, 2, 2). `timestep` is 0..1000, one a video or one a
    token (t-major, then rows, then columns). `text` is what `embed_text` returns, zero rows included: the model attends
    to all of them. Computes in the dtype of the weights, with time embedding, modulation, norms and rotation in float32,
    and returns that dtype. `attend` is the tokens' attention over themselves, `cross_attend` over the text. `remat`
    recomputes each block in the backward pass: True for everything, or a `jax.checkpoint_policies` policy. `layout` spreads
    tokens and weights over devices (`wanjax.sharding.Layout`) and then says how they attend.
    Source: Wan (https://arxiv.org/abs/2503.20314); numbers as diffusers' WanTransformer3DModel.
    """
    check_inputs(latents, timestep, text, weights)
    latents, timestep, text = jnp.asarray(latents), jnp.asarray(timestep), jnp.asarray(text)
    config = weights.config
    dtype = weights.patch_embedding.weight.dtype
    pt, ph, pw = config.patch_size
    grid = tuple(size // patch for size, patch in zip(latents.shape[2:], config.patch_size, strict=True))
    patches = rearrange(latents, "b c (t pt) (h ph) (w pw) -> b (t h w) (c pt ph pw)", pt=pt, ph=ph, pw=pw)
    x = linear(patches, weights.patch_embedding)
    embedder = weights.condition_embedder
    time = embed_time(timestep, config.freq_dim, embedder.time_embedder).astype(dtype)
    modulation = rearrange(linear(silu(time), embedder.time_proj), "b s (six c) -> six b s c", six=6)
    text = two_layers(text, embedder.text_embedder, gelu)
    rope = rope_table(grid, config.attention_head_dim)
    tokens, turn = x.shape[1], rotate
    if layout is not None:
        layout.warn_of_repeated_work(x.shape[0], config.num_attention_heads)
        x = layout.rows(x, 1, 0)
        spread = partial(layout.rows, length=x.shape[1])
        rope = Rope(*(spread(table, 0) for table in rope))
        time, modulation = (y if y.shape[-2] == 1 else spread(y, y.ndim - 2, y.ndim - 3) for y in (time, modulation))
        attend, cross_attend, turn = layout.attend, layout.cross_attend, partial(layout.locally, rotate)
    if x.shape[1] > tokens:
        attend = partial(attend, valid=tokens)

    def step(x: Float[Array, "b s c"], block: Block) -> tuple[Float[Array, "b s c"], None]:
        block = block if layout is None else layout.block(block)
        return apply_block(x, block, text, modulation, partial(turn, rope=rope), config, attend, cross_attend), None

    if remat:
        step = jax.checkpoint(step, policy=None if remat is True else remat)
    x, _ = lax.scan(step, x, weights.blocks)
    shift, scale = (row + time.astype(jnp.float32) for row in weights.scale_shift_table)
    x = linear((layer_norm(x, config.eps) * (1 + scale) + shift).astype(dtype), weights.proj_out)
    t, h, w = grid
    return rearrange(x[:, :tokens], "b (t h w) (pt ph pw c) -> b c (t pt) (h ph) (w pw)", t=t, h=h, w=w, pt=pt, ph=ph, pw=pw)


def apply_block(
    x: Float[Array, "b s c"],
    block: Block,
    text: Float[Array, "b l c"],
    modulation: Float[Array, "six b #s c"],
    turn: Callable[[Array], Array],
    config: TransformerConfig,
    attend: Attend,
    cross_attend: Attend,
) -> Float[Array, "b s c"]:
    """Self-attention and feed-forward, each modulated and gated, and cross-attention between them."""
    numbers = [row + m.astype(jnp.float32) for row, m in zip(block.scale_shift_table, modulation, strict=True)]
    first, second = Modulation(*numbers[:3]), Modulation(*numbers[3:])
    gated = lambda x, y, gate: (x.astype(jnp.float32) + y.astype(jnp.float32) * gate).astype(x.dtype)
    modulated = lambda x, m: (layer_norm(x, config.eps) * (1 + m.scale) + m.shift).astype(x.dtype)

    x = gated(x, self_attention(modulated(x, first), block.attn1, turn, config, attend), first.gate)
    x = x + cross_attention(layer_norm(x, config.eps, block.norm2).astype(x.dtype), text, block.attn2, config, cross_attend)
    hidden = gelu(linear(modulated(x, second), block.ffn.up))
    return gated(x, linear(hidden, block.ffn.down), second.gate)


def self_attention(
    x: Float[Array, "b s c"], weights: SelfAttention, turn: Callable[[Array], Array], config: TransformerConfig, attend: Attend
) -> Float[Array, "b s c"]:
    """Attention of the tokens over themselves; q and k are normed over all heads together, then turned by their tokens' angles."""
    heads = lambda y: rearrange(y, "b s (n d) -> b s n d", n=config.num_attention_heads)
    q = turn(rms_norm(linear(x, weights.to_q), weights.norm_q, config.eps))
    k = turn(rms_norm(linear(x, weights.to_k), weights.norm_k, config.eps))
    out = attend(heads(q), heads(k), heads(linear(x, weights.to_v)))
    return linear(rearrange(out, "b s n d -> b s (n d)"), weights.to_out)


def cross_attention(
    x: Float[Array, "b s c"], text: Float[Array, "b l c"], weights: CrossAttention, config: TransformerConfig, attend: Attend
) -> Float[Array, "b s c"]:
    """Attention of the tokens over the text."""
    heads = lambda y: rearrange(y, "b s (n d) -> b s n d", n=config.num_attention_heads)
    q = heads(rms_norm(linear(x, weights.to_q), weights.norm_q, config.eps))
    k = heads(rms_norm(linear(text, weights.to_k), weights.norm_k, config.eps))
    out = attend(q, k, heads(linear(text, weights.to_v)))
    return linear(rearrange(out, "b s n d -> b s (n d)"), weights.to_out)


def embed_time(timestep: Float[Array, " b"] | Float[Array, "b s"], freq_dim: int, weights: TwoLayers) -> Float32[Array, "b one_or_s c"]:
    """Cosines and sines of the timestep at `freq_dim` / 2 frequencies, through two linear maps; one row a video or a token."""
    timestep = timestep[:, None] if timestep.ndim == 1 else timestep
    # Exponents rounded to float32, as in diffusers: at timestep 1000 a frequency's last digit is 1e-4 of an angle.
    exponents = np.float32(-np.log(10000)) * np.arange(freq_dim // 2, dtype=np.float32) / np.float32(freq_dim // 2)
    angles = timestep.astype(jnp.float32)[..., None] * np.exp(exponents.astype(np.float64)).astype(np.float32)
    return two_layers(jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1), weights, silu)


def two_layers(x: Float[Array, "*b cin"], weights: TwoLayers, act: Callable[[Array], Array]) -> Float[Array, "*b cout"]:
    """linear_2(act(linear_1(x)))."""
    return linear(act(linear(x, weights.linear_1)), weights.linear_2)


def rope_table(grid: tuple[int, ...], head_dim: int) -> Rope:
    """Angles of every token of a (t, h, w) grid: its time, row and column at frequencies 10000^(-2j/n) of the axis's share n of the head.

    Rows and columns have head_dim // 6 pairs each, time has the rest. Computed in float64.
    """
    pairs = [head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6]
    tables = [np.outer(np.arange(size), 10000.0 ** -(np.arange(n) / n)) for size, n in zip(grid, pairs, strict=True)]

    def over_grid(function: Callable[[np.ndarray], np.ndarray]) -> Float32[Array, "s half"]:
        t, h, w = (jnp.asarray(function(table), jnp.float32) for table in tables)
        axes = [t[:, None, None], h[None, :, None], w[None, None]]
        spread = [jnp.broadcast_to(axis, (*grid, axis.shape[-1])) for axis in axes]
        return rearrange(jnp.concatenate(spread, axis=-1), "t h w half -> (t h w) half")

    cos, sin = over_grid(np.cos), over_grid(np.sin)
    return Rope(jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1))


def rotate(x: Float[Array, "b s c"], rope: Rope) -> Float[Array, "b s c"]:
    """Each pair of a head (channel j, channel j + d/2) turned by its token's angle, in float32."""

    def plain(x: Float[Array, "b s c"], cos: Float32[Array, "s d"], sin: Float32[Array, "s d"]) -> Float[Array, "b s c"]:
        half = cos.shape[-1] // 2
        first, second = rearrange(x.astype(jnp.float32), "b s (n two half) -> two b s n half", two=2, half=half)
        cos, sin = cos[:, None, :half], sin[:, None, half:]
        turned = jnp.stack([first * cos - second * sin, first * sin + second * cos], axis=-2)
        return rearrange(turned.astype(x.dtype), "b s n two half -> b s (n two half)")

    return on_platform(rotations(x, rope.cos), plain, x, *rope)


def check_inputs(
    latents: Float[Array | np.ndarray, "b c t h w"],
    timestep: Float[Array | np.ndarray, "*ts"],
    text: Float[Array | np.ndarray, "b l k"],
    weights: Transformer,
) -> None:
    """ValueError, everything wrong at once, unless the inputs fit the weights."""
    config = weights.config
    problems = []
    if latents.shape[1] != config.in_channels:
        problems.append(f"latents have {latents.shape[1]} channels, this model takes {config.in_channels} (16: VAE 2.1, 48: VAE 2.2)")
    if any(size % patch for size, patch in zip(latents.shape[2:], config.patch_size, strict=True)):
        problems.append(f"latents are {latents.shape[2:]} in time, height and width, which must be multiples of {config.patch_size}")
    if text.shape[-1] != config.text_dim:
        problems.append(f"text has {text.shape[-1]} channels, this model takes {config.text_dim}: encode it with the checkpoint's encoder")
    tokens = int(np.prod([size // patch for size, patch in zip(latents.shape[2:], config.patch_size, strict=True)]))
    b = latents.shape[0]
    if timestep.shape not in ((b,), (b, tokens)):
        problems.append(f"timestep is one a video {(b,)} or one a token {(b, tokens)}; got {timestep.shape}")
    if problems:
        raise ValueError("velocity: " + "; ".join(problems) + ".")


def init_transformer(config: TransformerConfig, key: PRNGKeyArray, dtype: DTypeLike = jnp.float32) -> Transformer:
    """Random weights to train from scratch: gates open (1), output projections halved, a zero head, float32 where `keep_float32` says."""
    width, keys = config.width, iter(jax.random.split(key, 8))
    maps = lambda key, *widths, dtype=dtype: [
        init_linear(k, cin, cout, dtype=dtype) for k, (cin, cout) in zip(jax.random.split(key, len(widths)), widths, strict=True)
    ]
    half = lambda layer: Linear(layer.weight * jnp.asarray(0.5, dtype), layer.bias)
    table = jnp.zeros((6, width), jnp.float32).at[jnp.array([2, 5])].set(1)

    def block(key: PRNGKeyArray) -> Block:
        q, k, v, o, cross_q, cross_k, cross_v, cross_o, up, down = maps(
            key, *[(width, width)] * 8, (width, config.ffn_dim), (config.ffn_dim, width)
        )
        gain, ones = RotaryNorm(jnp.ones(width, dtype)), jnp.ones(width, jnp.float32)
        norm = RMSNorm(jnp.ones(width, dtype))
        return Block(
            table,
            SelfAttention(Rotary(q.weight, q.bias), Rotary(k.weight, k.bias), v, gain, gain, half(o)),
            LayerNorm(ones, jnp.zeros(width, jnp.float32)),
            CrossAttention(cross_q, cross_k, cross_v, norm, norm, half(cross_o)),
            FeedForward(up, half(down)),
        )

    time = TwoLayers(*maps(next(keys), (config.freq_dim, width), (width, width), dtype=jnp.float32))
    text = TwoLayers(*maps(next(keys), (config.text_dim, width), (width, width)))
    (projection,) = maps(next(keys), (width, 6 * width))
    patch = int(np.prod(config.patch_size))
    (embedding,) = maps(next(keys), (config.in_channels * patch, width))
    return Transformer(
        PatchEmbedding(embedding.weight, embedding.bias),
        Conditioning(time, Linear(projection.weight * jnp.asarray(0.3, dtype), projection.bias), text),
        jax.vmap(block)(jax.random.split(next(keys), config.num_layers)),
        Linear(jnp.zeros((width, config.out_channels * patch), dtype), jnp.zeros(config.out_channels * patch, dtype)),
        jnp.zeros((2, width), jnp.float32),
        config,
    )
