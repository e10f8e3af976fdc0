"""Several processes, one computation: a video, and one training step, over the devices of all of them.

Start the same command in every process, each with its own id (on a TPU pod without the three arguments):

    python examples/multihost.py --coordinator localhost:9911 --num-processes 2 --process-id 0 -o out.mp4
    python examples/multihost.py --coordinator localhost:9911 --num-processes 2 --process-id 1

With no arguments it is an ordinary program on the devices at hand, and makes the same video.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import wanjax
from wanjax.sharding import Layout, join_processes, make_mesh, replicated
from wanjax.transformer import Transformer


def main() -> None:
    """Join, generate, and take one step of gradient descent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--prompt", default="a red circle moves left on a black background")
    parser.add_argument("-o", "--output", default="multihost.mp4")
    args = parser.parse_args()
    join_processes(args.coordinator, args.num_processes, args.process_id)

    # Every process runs the same lines; arrays on the mesh are parts of one array, wherever their devices are.
    mesh = make_mesh(context=2, fsdp=-1) if jax.device_count() % 2 == 0 else make_mesh(fsdp=-1)
    wan = wanjax.load("tiny", mesh=mesh)
    latents = wanjax.generate(wan, args.prompt, seed=0, output_type="latent")
    frames = np.concatenate(list(wanjax.decode_frames(wan, latents[0])))

    text = wanjax.embed_prompts(wan, [args.prompt])
    noise = replicated(mesh, np.random.default_rng(0).normal(size=latents.shape).astype(np.float32))

    # Arrays that span processes are arguments: a `jit` may not close over them.
    def loss(weights: Transformer, latents: jax.Array, noise: jax.Array, text: jax.Array) -> jax.Array:
        predicted = wanjax.velocity((latents + noise) / 2, jnp.full(1, 500.0), text, weights, layout=Layout(mesh))
        return jnp.mean(jnp.square(predicted - (noise - latents)))

    @jax.jit
    def step(weights: Transformer, *batch: jax.Array) -> tuple[jax.Array, Transformer]:
        value, gradients = jax.value_and_grad(loss)(weights, *batch)
        return value, jax.tree.map(lambda w, g: w - 1e-2 * g, weights, gradients)

    before, weights = step(wan.transformer, latents, noise, text)
    after, _ = step(weights, latents, noise, text)
    if jax.process_index() == 0:
        wanjax.save_video(args.output, frames, wan.preset.fps)
        spread = float(jnp.std(latents.addressable_data(0)))
        print(f"{jax.process_count()} processes, {jax.device_count()} devices: latents' deviation {spread:.6f}, ", end="")
        print(f"loss {float(before):.6f} -> {float(after):.6f}, {args.output} written")


if __name__ == "__main__":
    main()
