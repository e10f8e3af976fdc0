"""A short fine-tune of a VAE on one clip, in a training loop of one's own: python examples/finetune_vae.py CLIP.mp4 [--steps 40]

`encode` and `decode` are functions of weights, so freezing is a partition of the pytree: here the decoder learns and the
encoder stays. Prints the PSNR of the clip before and after.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import wanjax
from wanjax import decode, encode
from wanjax.vae import VAE
from wanjax.video import iterate_frames


def read_clip(path: str, frames: int, height: int, width: int) -> jax.Array:
    """The first frames of a file as `1 3 f H W` in [-1, 1], made smaller to the size asked for."""
    stack = np.stack([frame for frame, _ in zip(iterate_frames(path), range(frames), strict=False)])
    small = jax.image.resize(stack.astype(np.float32) / 127.5 - 1, (len(stack), height, width, 3), "linear")
    return jnp.clip(jnp.moveaxis(small, -1, 0)[None], -1, 1)


def psnr(a: jax.Array, b: jax.Array) -> float:
    """Of two videos in [-1, 1]."""
    return float(10 * jnp.log10(4 / jnp.mean(jnp.square(a - b))))


def main() -> None:
    """Fine-tune the decoder of the tiny VAE."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clip")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--frames", type=int, default=9, help="4 n + 1")
    parser.add_argument("--size", type=int, default=64)
    args = parser.parse_args()
    vae = wanjax.load("tiny").vae
    clip = read_clip(args.clip, args.frames, args.size, args.size)
    z = encode(clip, vae).mean

    learns = eqx.tree_at(lambda tree: tree.decoder, jax.tree.map(lambda _: False, vae), jax.tree.map(lambda _: True, vae.decoder))
    trained, frozen = eqx.partition(vae, learns)
    optimizer = optax.adam(1e-3)

    def loss(trained: VAE, frozen: VAE) -> jax.Array:
        return jnp.mean(jnp.abs(decode(z, eqx.combine(trained, frozen)) - clip))

    @jax.jit
    def update(trained: VAE, state: optax.OptState) -> tuple[VAE, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(trained, frozen)
        changes, state = optimizer.update(gradients, state)
        return optax.apply_updates(trained, changes), state, value

    before, state = psnr(decode(z, vae), clip), optimizer.init(trained)
    for step in range(args.steps):
        trained, state, value = update(trained, state)
        if step % 10 == 0:
            print(f"step {step}: mean absolute error {float(value):.4f}", flush=True)
    print(f"PSNR {before:.2f} -> {psnr(decode(z, eqx.combine(trained, frozen)), clip):.2f} dB")


if __name__ == "__main__":
    main()
