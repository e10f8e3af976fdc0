"""Trains the tiny text-to-video model that wanjax ships, from nothing, on clips that tiny_world.py draws.

    python examples/train_tiny.py --out tiny --minutes 90

Each phase goes on where it was stopped: the VAE's halves are fitted to a hand-made latent, then trained together on pixels
alone; the transformer and its text encoder learn that latent, then what the finished encoder makes of clips. The models
are wanjax's own functions, `encode`, `decode`, `embed_text` and `velocity`, inside one optax loop, `train`. Phases that do
not need each other may run side by side: `--only encoder` in one process, `--only crops,decoder` in another.
"""

import argparse
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray
from tiny_world import FRAMES, Clip, Teacher, Words, fit_teacher, render, split
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from wanjax.loading import Wan, save
from wanjax.presets import TINY
from wanjax.text_encoder import TextEncoderConfig, embed_text, init_text_encoder, tokenize
from wanjax.transformer import TransformerConfig, init_transformer, transformer_sizes, velocity
from wanjax.vae import VAE, VAEConfig, decode, encode, init_vae, normalize_latents
from wanjax.weights import entries

# 8x8 pixels and 4 frames a latent, as every Wan 2.1 VAE; folding 2x2 pixels into channels, as 2.2 does, makes it cheap.
VAE_CONFIG = VAEConfig(
    base_dim=32,
    dim_mult=(1, 2, 2),
    num_res_blocks=1,
    temperal_downsample=(True, True),
    patch_size=2,
    in_channels=12,
    out_channels=12,
    latents_mean=(0.0,) * 16,  # the teacher's statistics; `with_statistics` writes the finished encoder's
    latents_std=(1.0,) * 16,
)
WHOLE = 8  # latent frames in one piece: no scan, in which the gradient of a convolution is slow on CPU
ROWS = 14  # text rows in training: the longest caption's tokens and at least one row of padding
WAN_ROWS = 512  # text rows the Wan pipelines use
TRANSFORMER_CONFIG = TransformerConfig(num_attention_heads=4, attention_head_dim=32, text_dim=96, freq_dim=256, ffn_dim=512, num_layers=6)
TEXT_CONFIG = TextEncoderConfig(d_model=96, d_kv=24, d_ff=192, num_layers=2, num_heads=4)

Batch = Any
Tree = Any


# ---- the tokenizer


def build_tokenizer() -> Tokenizer:
    """A T5 tokenizer (unigram, `</s>` appended) over the world's words; every other word becomes `<unk>`."""
    trained, held_out = split()
    words = sorted({word for words in trained + held_out for word in str(words).split()})
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"\u2581{word}", -1.0) for word in [*words, "A"]), (".", -2.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=2, byte_fallback=False))
    space = {"replacement": "\u2581", "prepend_scheme": "always", "split": True}
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(**space)])
    tokenizer.decoder = decoders.Metaspace(**space)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    return tokenizer


def caption(words: Words, rng: np.random.Generator) -> str:
    """A caption as people may write it: now and then a capital, a full stop, an unknown word, or nothing at all."""
    if rng.random() < 0.05:
        return ""
    text = ["?" if i in (1, 2, 4, 7) and rng.random() < 0.02 else word for i, word in enumerate(str(words).split())]
    if rng.random() < 0.1:
        text[0] = "A"
    return " ".join(text) + ("." if rng.random() < 0.1 else "")


# ---- the loop that every phase runs


def optimizer(weights: Tree) -> optax.GradientTransformation:
    """Muon on matrices and convolution kernels, Adam on everything else, with one scale of step for both."""

    def axes(entry: Any) -> optax.contrib.MuonDimensionNumbers | None:
        other = ("norm", "gamma", "shared", "relative_attention_bias", "scale_shift_table", "proj_out")
        if len(entry.file_shape) < 2 or any(part in entry.names[0] for part in other):
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(int(entry.stacked), entry.leaf.ndim - 1)), (entry.leaf.ndim - 1,))

    kinds = jax.tree.unflatten(jax.tree.structure(weights), [axes(entry) for entry in entries(weights, transformer_sizes_of(weights))])
    return optax.contrib.muon(1.0, consistent_rms=0.2, adam_b2=0.99, muon_weight_dimension_numbers=kinds)


def transformer_sizes_of(weights: Tree) -> dict[str, int]:
    """The sizes that the transformer's layouts need, where there is one among the weights."""
    return dict(transformer_sizes(weights["transformer"].config)) if isinstance(weights, dict) else {}


def train(
    name: str,
    weights: Tree,
    loss: Callable[[Tree, Tree, Batch, PRNGKeyArray], Float[Array, ""]],
    batches: Iterator[Batch],
    *,
    minutes: float,
    rate: float,
    folder: Path,
    steps: int | None = None,
    frozen: Tree = None,
    hold: float = 0.0,
) -> Tree:
    """Minimises `loss(weights, frozen, batch, key)` for so many minutes, or steps if given; returns the average of the last weights.

    The step size rises over 60 steps to `rate`, stays until the share `hold` of the run, then falls to zero. Once a
    minute everything is written to `folder`, from where the next call goes on.
    """
    chosen = optimizer(weights)

    @jax.jit
    def step(weights: Tree, state: Tree, average: Tree, frozen: Tree, batch: Batch, rate: Array, count: Array) -> tuple[Tree, ...]:
        key = jax.random.fold_in(jax.random.key(0), count)
        value, gradient = jax.value_and_grad(loss)(weights, frozen, batch, key)
        updates, state = chosen.update(gradient, state, weights)
        weights = jax.tree.map(lambda w, u: w + rate * u, weights, updates)
        decay = jnp.minimum(0.998, (1 + count) / (10 + count)).astype(jnp.float32)
        return weights, state, jax.tree.map(lambda a, w: a + (1 - decay) * (w - a), average, weights), value

    state, average, spent, count = chosen.init(weights), weights, 0.0, 0
    file = folder / f"{name}.eqx"
    if file.exists():
        weights, state, average, spent, count = eqx.tree_deserialise_leaves(file, (weights, state, average, spent, count))
        print(f"{name}: goes on at {spent / 60:.1f} min, step {count}", flush=True)

    def write() -> None:
        eqx.tree_serialise_leaves(file.with_suffix(".part"), (weights, state, average, spent, count))
        file.with_suffix(".part").replace(file)

    def share() -> float:
        return count / steps if steps else spent / (60 * minutes) if minutes else 1.0

    if share() >= 1:
        return average
    losses, written, began = [], time.monotonic(), time.monotonic() - spent
    while share() < 1:
        now = rate * min(1, (count + 1) / 60) * min(1, (1 - share()) / (1 - hold))
        weights, state, average, value = step(weights, state, average, frozen, next(batches), jnp.float32(now), jnp.int32(count))
        losses.append(float(value))
        count, spent = count + 1, time.monotonic() - began
        if count == 1 or len(losses) == 20 or share() >= 1:
            print(f"{name}: {spent / 60:.1f} min, step {count}, loss {np.mean(losses):.4f}, rate {now:.1e}", flush=True)
            losses = []
        if time.monotonic() - written > 60:
            write()
            written = time.monotonic()
    write()
    return average


def ahead(make: Callable[[], Batch], depth: int = 3) -> Iterator[Batch]:
    """Makes batches in another thread while the step computes."""
    ready: queue.Queue[Batch] = queue.Queue(depth)

    def work() -> None:
        while True:
            ready.put(make())

    threading.Thread(target=work, daemon=True).start()
    while True:
        yield ready.get()


# ---- the VAE


def random_clip(rng: np.random.Generator, frames: int = FRAMES) -> Clip:
    """A clip of one of the trained combinations."""
    words = split()[0]
    return render(words[rng.integers(len(words))], rng, frames)


def clip_batch(rng: np.random.Generator, teacher: Teacher, *, lengths: Sequence[int], clips: int, crop: int | None = None) -> Batch:
    """Clips of one of the lengths, `clips` at 17 frames and more of shorter ones, with teacher latents, maybe cut around the shape."""
    frames = int(rng.choice(lengths))
    videos, latents = [], []
    for _ in range(max(1, min(4 * clips, clips * FRAMES // frames))):
        clip = random_clip(rng, frames)
        video, latent = clip.frames, teacher.latents(clip)
        if crop:
            ys, xs = np.nonzero(clip.mask[rng.integers(frames)])
            y, x = (int(np.clip(np.median(v) / 8 - crop / 2 + rng.uniform(-1, 1.5), 0, 8 - crop)) for v in (ys, xs))
            latent = latent[:, :, y : y + crop, x : x + crop]
            video = video[:, :, 8 * y : 8 * (y + crop), 8 * x : 8 * (x + crop)]
        videos.append(video)
        latents.append(latent)
    return {"video": np.stack(videos), "latents": np.stack(latents)}


def pixel_loss(predicted: Float[Array, "b c f h w"], video: Float[Array, "b c f h w"]) -> Float[Array, ""]:
    """Absolute and squared error, seven times as heavy within two pixels of an edge of the video."""
    window, ones = (1, 1, 1, 5, 5), (1, 1, 1, 1, 1)
    high = jax.lax.reduce_window(video, -jnp.inf, jax.lax.max, window, ones, "SAME")
    low = jax.lax.reduce_window(video, jnp.inf, jax.lax.min, window, ones, "SAME")
    weight = jnp.where(jnp.max(high - low, axis=1, keepdims=True) > 0.2, 7.0, 1.0)
    weight = weight / jnp.mean(weight)
    error = jnp.abs(predicted - video)
    return jnp.mean(weight * error) + 2 * jnp.mean(weight * error**2)


def encoder_loss(weights: VAE, frozen: None, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
    """Distance of the encoder's latents from the teacher's."""
    posterior = encode(batch["video"], weights, chunk=WHOLE)
    error = posterior.mean - batch["latents"]
    return jnp.mean(3 * error**2 + jnp.abs(error)) + 0.01 * jnp.mean((posterior.logvar + 6) ** 2)


def decoder_loss(weights: VAE, frozen: None, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
    """Distance of the video decoded from the teacher's latents, a little disturbed, as a sampler's are."""
    return pixel_loss(decode(disturb(batch["latents"], key), weights, chunk=WHOLE), batch["video"])


def autoencoder_loss(weights: VAE, frozen: None, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
    """Distance of decode(encode(video)) from the video: pixels alone."""
    posterior = encode(batch["video"], weights, chunk=WHOLE)
    video = decode(disturb(posterior.mean, key), weights, chunk=WHOLE)
    return pixel_loss(video, batch["video"]) + 1e-4 * jnp.mean((posterior.logvar + 6) ** 2)


def disturb(latents: Float[Array, "b c t h w"], key: PRNGKeyArray) -> Float[Array, "b c t h w"]:
    """Adds noise of a standard deviation that each clip draws from 0 to 0.15."""
    strength, noise = jax.random.split(key)
    strength = 0.15 * jax.random.uniform(strength, (latents.shape[0], 1, 1, 1, 1))
    return latents + strength * jax.random.normal(noise, latents.shape)


def half(vae: VAE, name: str) -> VAE:
    """The encoder's or the decoder's weights alone."""
    return replace(vae, decoder=None, post_quant_conv=None) if name == "encoder" else replace(vae, encoder=None, quant_conv=None)


def with_statistics(vae: VAE, latents: Float[np.ndarray, "n c t h w"]) -> VAE:
    """Writes the latents' mean and overall deviation into the config.

    One deviation for all channels keeps their relative strengths, which the teacher chose.
    """
    mean = latents.mean((0, 2, 3, 4))
    std = np.sqrt(np.mean((latents - mean[:, None, None, None]) ** 2))
    config = replace(vae.config, latents_mean=tuple(round(float(m), 4) for m in mean), latents_std=(round(float(std), 4),) * len(mean))
    return replace(vae, config=config)


# ---- the transformer and its text encoder


def init_denoiser(plan: "Plan", vocabulary: int) -> Tree:
    """Random weights of both. Cross-attention starts with low scores for padding, or its 500 zero rows would drown the prompt."""
    text, transformer, direction = jax.random.split(jax.random.key(1), 3)
    weights = init_transformer(plan.transformer, transformer)
    cross = weights.blocks.attn2
    away = jax.random.normal(direction, cross.to_q.bias.shape)
    cross = eqx.tree_at(
        lambda c: (c.to_q.bias, c.to_k.bias, c.norm_q.weight, c.norm_k.weight),
        cross,
        (1.5 * away, -0.05 * away, 1.4 * cross.norm_q.weight, 1.4 * cross.norm_k.weight),
    )
    weights = eqx.tree_at(lambda w: w.blocks.attn2, weights, cross)
    encoder = init_text_encoder(replace(plan.text_encoder, vocab_size=vocabulary), text)
    return {"text_encoder": encoder, "transformer": weights}


def attend_to_all_rows(q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"]) -> Float[Array, "b s n d"]:
    """Attention over 512 text rows given the first few: the last one, padding like all after it, counts for all of them."""
    copies = jnp.ones(k.shape[1]).at[-1].set(WAN_ROWS - k.shape[1] + 1)
    scores = jnp.einsum("bsnd,blnd->bnsl", q, k) * q.shape[-1] ** -0.5 + jnp.log(copies)
    return jnp.einsum("bnsl,blnd->bsnd", jax.nn.softmax(scores, axis=-1), v)


def flow_loss(weights: Tree, frozen: None, batch: Batch, key: PRNGKeyArray) -> Float[Array, ""]:
    """Squared error of the velocity at logit-normal noise levels, shifted by 3 towards high noise as the sampler is."""
    level, draw = jax.random.split(key)
    latents = batch["latents"]
    u = jax.nn.sigmoid(jax.random.normal(level, latents.shape[:1]))
    sigma = 3 * u / (1 + 2 * u)
    noise = jax.random.normal(draw, latents.shape)
    s = sigma[:, None, None, None, None]
    text = embed_text(batch["ids"], batch["mask"], weights["text_encoder"])
    noisy = (1 - s) * latents + s * noise
    predicted = velocity(noisy, 1000 * sigma, text, weights["transformer"], cross_attend=attend_to_all_rows)
    return jnp.mean((predicted - (noise - latents)) ** 2)


def caption_batch(rng: np.random.Generator, tokenizer: Tokenizer, words: Sequence[Words], latents: np.ndarray, size: int) -> Batch:
    """A draw of latents with captions of theirs."""
    chosen = rng.integers(len(words), size=size)
    ids, mask = tokenize(tokenizer, [caption(words[i], rng) for i in chosen], ROWS)
    return {"latents": latents[chosen], "ids": ids, "mask": mask}


def teacher_latents(rng: np.random.Generator, teacher: Teacher, count: int) -> tuple[list[Words], np.ndarray]:
    """Captions' words and teacher latents of fresh clips."""
    words, latents = [], []
    for _ in range(count):
        clip = random_clip(rng)
        words.append(clip.words)
        latents.append(teacher.latents(clip))
    return words, np.stack(latents)


def encoded_latents(rng: np.random.Generator, vae: VAE, count: int) -> tuple[list[Words], np.ndarray]:
    """Captions' words and raw latents of fresh clips, as the encoder makes them from pixels."""
    words, latents = [], []
    for _ in range(0, count, 8):
        clips = [random_clip(rng) for _ in range(8)]
        words += [clip.words for clip in clips]
        latents.append(np.asarray(encode(np.stack([clip.frames for clip in clips]), vae, chunk=WHOLE).mean))
    return words, np.concatenate(latents)


# ---- everything in order

PHASES = ("crops", "decoder", "encoder", "joint_crops", "autoencoder", "teacher", "latents", "transformer")


@dataclass(frozen=True)
class Plan:
    """Architectures, amounts of data, and each phase's share of the time."""

    vae: VAEConfig = VAE_CONFIG
    transformer: TransformerConfig = TRANSFORMER_CONFIG
    text_encoder: TextEncoderConfig = TEXT_CONFIG
    shares: Mapping[str, float] = field(
        default_factory=lambda: {
            "crops": 0.08,
            "decoder": 0.05,
            "encoder": 0.11,
            "joint_crops": 0.11,
            "autoencoder": 0.09,
            "teacher": 0.26,
            "transformer": 0.3,
        }
    )
    clips: int = 4  # of 17 frames in a step of the VAE's
    teacher_latents: int = 12288
    encoded_latents: int = 4096
    batch: int = 64
    steps: int | None = None


QUICK = Plan(
    vae=replace(VAE_CONFIG, base_dim=8, dim_mult=(1, 1, 1)),
    transformer=TransformerConfig(num_attention_heads=2, attention_head_dim=12, text_dim=16, freq_dim=16, ffn_dim=32, num_layers=1),
    text_encoder=TextEncoderConfig(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
    clips=1,
    teacher_latents=64,
    encoded_latents=16,
    batch=8,
    steps=60,
)


def run(plan: Plan, folder: Path, minutes: float, only: Sequence[str] = PHASES, seed: int = 0) -> tuple[Tokenizer, VAE, Tree]:
    """Runs the phases, or some of them on what the others have left in `folder`; returns tokenizer, VAE and denoiser."""
    folder.mkdir(parents=True, exist_ok=True)
    teacher, tokenizer = fit_teacher(), build_tokenizer()

    Make = Callable[[np.random.Generator], Batch]

    def phase(name: str, weights: Tree, loss: Callable[..., Any], make: Make, rate: float, hold: float) -> Tree:
        amount = (minutes * plan.shares[name], plan.steps) if name in only else (0, None)
        # Another run goes on with other clips; a quick one is there to be repeated.
        rng = np.random.default_rng([seed, PHASES.index(name), 0 if plan.steps else time.time_ns()])
        return train(name, weights, loss, ahead(lambda: make(rng)), minutes=amount[0], steps=amount[1], rate=rate, folder=folder, hold=hold)

    def clips(*lengths: int, crop: int | None = None) -> Callable[[np.random.Generator], Batch]:
        return lambda rng: clip_batch(rng, teacher, lengths=lengths, clips=plan.clips * (2 if crop else 1), crop=crop)

    def captioned(words: Sequence[Words], latents: np.ndarray) -> Callable[[np.random.Generator], Batch]:
        return lambda rng: caption_batch(rng, tokenizer, words, latents, plan.batch)

    vae = init_vae(plan.vae, jax.random.key(0))
    decoder = phase("crops", half(vae, "decoder"), decoder_loss, clips(9, crop=4), 2e-3, 0.7)
    decoder = phase("decoder", decoder, decoder_loss, clips(FRAMES), 1.5e-3, 0.3)
    encoder = phase("encoder", half(vae, "encoder"), encoder_loss, clips(FRAMES), 2e-3, 0.3)
    vae = replace(decoder, encoder=encoder.encoder, quant_conv=encoder.quant_conv)
    vae = phase("joint_crops", vae, autoencoder_loss, clips(9, crop=4), 1.5e-3, 0.3)
    vae = phase("autoencoder", vae, autoencoder_loss, clips(1, 5, 9, FRAMES, FRAMES), 1e-3, 0.3)

    weights = init_denoiser(plan, tokenizer.get_vocab_size())
    words, latents = teacher_latents(np.random.default_rng([seed, 1]), teacher, plan.teacher_latents if "teacher" in only else 1)
    weights = phase("teacher", weights, flow_loss, captioned(words, latents), 2e-3, 0.4)

    file = folder / "latents.npz"
    if "latents" in only and not file.exists():
        words, latents = encoded_latents(np.random.default_rng([seed, 2]), vae, plan.encoded_latents)
        np.savez(file, words=[astuple(w) for w in words], latents=latents)
    if file.exists():
        with np.load(file) as stored:
            words, latents = [Words(*w) for w in stored["words"].tolist()], stored["latents"]
        vae = with_statistics(vae, latents)
        latents = np.asarray(normalize_latents(latents, vae.config))
    return tokenizer, vae, phase("transformer", weights, flow_loss, captioned(words, latents), 1.5e-3, 0.4)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tiny"), help="folder for the pipeline, in the diffusers layout")
    parser.add_argument("--work", type=Path, default=Path("tiny_training"), help="folder for what each phase has reached")
    parser.add_argument("--minutes", type=float, default=90, help="of training in all")
    parser.add_argument("--only", default=",".join(PHASES), help="phases to run, of " + ",".join(PHASES))
    parser.add_argument("--quick", action="store_true", help="a few steps of far smaller models, to see that everything works")
    chosen = parser.parse_args(arguments)
    tokenizer, vae, weights = run(QUICK if chosen.quick else Plan(), chosen.work, chosen.minutes, chosen.only.split(","))
    save(chosen.out, Wan(TINY, tokenizer, weights["text_encoder"], weights["transformer"], None, vae), dtype=jnp.float16)


if __name__ == "__main__":
    main()
