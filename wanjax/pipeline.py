"""Prompt to video: `generate` and the three functions it is made of.

`embed_prompts` turns words into what the transformer reads, `denoise` turns noise into latents, `decode_latents` turns
latents into frames; a `Request` holds every choice of one call, checked once. Any of them can be swapped for your own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32, UInt8

from wanjax import sampler, vae
from wanjax.loading import Wan, on_mesh
from wanjax.presets import Solver
from wanjax.sharding import Layout, replicated
from wanjax.text_encoder import clean_prompt, embed_text, tokenize
from wanjax.transformer import velocity

OutputType = Literal["uint8", "float", "latent"]
Callback = Callable[[int, float, Float32[Array, "b c t h w"]], Float32[Array, "b c t h w"] | None]

_SOLVERS = {
    "unipc": (sampler.unipc_schedule, sampler.unipc_steps),
    "dpm": (sampler.dpm_schedule, sampler.dpm_steps),
    "euler": (lambda steps, shift, grid: sampler.euler_schedule(steps, shift), sampler.euler_steps),
}


@dataclass(frozen=True)
class Request:
    """Every choice of one call of `generate`, checked against the model and filled in from its preset."""

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    flow_shift: float
    guidance_scale: float
    guidance_scale_2: float | None
    boundary_ratio: float | None
    solver: Solver
    grid: sampler.Grid
    seeds: tuple[int, ...]
    num_videos_per_prompt: int
    latent_shape: tuple[int, int, int, int]

    @property
    def guided(self) -> bool:
        """Whether any step uses classifier-free guidance, which asks the model twice."""
        return self.guidance_scale > 1

    @property
    def steps(self) -> sampler.Steps:
        """The rows of numbers that the sampling runs through."""
        schedule, steps = _SOLVERS[self.solver]
        rows = steps(schedule(self.num_inference_steps, self.flow_shift, grid=self.grid))
        return sampler.with_guidance(rows, self.guidance_scale, self.guidance_scale_2, self.boundary_ratio)


def generate(
    wan: Wan,
    prompt: str | Sequence[str],
    *,
    negative_prompt: str | Sequence[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_scale_2: float | None = None,
    flow_shift: float | None = None,
    solver: Solver | None = None,
    seed: int | Sequence[int] = 0,
    num_videos_per_prompt: int = 1,
    latents: Float[Array | np.ndarray, "b c t h w"] | None = None,
    output_type: OutputType = "uint8",
    callback: Callback | None = None,
    one_branch_at_a_time: bool = False,
    tile: int | None = None,
    mesh: Mesh | None = None,
) -> UInt8[np.ndarray, "b f H W 3"] | Float32[np.ndarray, "b f H W 3"] | Float32[Array, "b c t h w"]:
    """Make a video of each prompt.

    What is not given comes from the model's preset. `height` and `width` are pixels, `num_frames` is 4 n + 1. Guidance is
    off at `guidance_scale` <= 1; `guidance_scale_2` is the low-noise expert's. `seed` is one for all prompts or one a
    prompt; a video's noise depends on its seed and on which of `num_videos_per_prompt` it is, never on the batch.
    `latents` replaces that noise (standard normal, normalised latents). `callback(step, timestep, latents)` runs after
    every step and may return latents to go on with. `one_branch_at_a_time` asks for guidance's two branches one after
    the other: slower, half the memory. `tile` (pixels) decodes in tiles, as `decode` does. `mesh` (`wanjax.sharding.make_mesh`)
    is the devices to use, by default those that the model was loaded on; any mesh makes the same video.

    Returns "uint8" frames (b f H W 3), "float" ones in [0, 1], or the normalised "latent"s (b c t h w); videos of one
    prompt lie next to each other. Raises ValueError or TypeError, before anything is computed, for what does not fit the model.
    """
    if output_type not in ("uint8", "float", "latent"):
        raise ValueError(f'output_type is "uint8", "float" or "latent"; got {output_type!r}.')
    request = make_request(
        wan,
        prompt,
        negative_prompt=negative_prompt,
        height=height,
        width=width,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
        guidance_scale_2=guidance_scale_2,
        flow_shift=flow_shift,
        solver=solver,
        seed=seed,
        num_videos_per_prompt=num_videos_per_prompt,
    )
    if mesh is not None and mesh != wan.mesh:
        wan = on_mesh(wan, mesh)
    text = embed_prompts(wan, request.prompts)
    negative = embed_prompts(wan, request.negative_prompts) if request.guided else None
    latents = denoise(wan, request, text, negative, latents=latents, callback=callback, one_branch_at_a_time=one_branch_at_a_time)
    if output_type == "latent":
        return latents
    videos = [np.concatenate(list(decode_frames(wan, latents[i], output_type, tile=tile))) for i in range(len(latents))]
    return np.stack(videos)


def make_request(
    wan: Wan,
    prompt: str | Sequence[str],
    *,
    negative_prompt: str | Sequence[str] | None = None,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    guidance_scale: float | None = None,
    guidance_scale_2: float | None = None,
    flow_shift: float | None = None,
    solver: Solver | None = None,
    seed: int | Sequence[int] = 0,
    num_videos_per_prompt: int = 1,
) -> Request:
    """The choices of a call, filled in from the preset and checked; arguments and errors are those of `generate`."""
    preset = wan.preset
    prompts = _strings("prompt", prompt)
    if negative_prompt is None:
        negative_prompt = preset.negative_prompt
    negatives = (negative_prompt,) * len(prompts) if isinstance(negative_prompt, str) else _strings("negative_prompt", negative_prompt)
    if len(negatives) != len(prompts):
        raise ValueError(f"negative_prompt is one for all or one a prompt; got {len(negatives)} for {len(prompts)} prompts.")
    if num_videos_per_prompt < 1:
        raise ValueError(f"num_videos_per_prompt is at least 1; got {num_videos_per_prompt}.")
    seeds = (seed,) * len(prompts) if isinstance(seed, int) else tuple(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"seed is one for all or one a prompt; got {len(seeds)} for {len(prompts)} prompts.")
    if guidance_scale_2 is not None and preset.boundary_ratio is None:
        raise ValueError(
            f"guidance_scale_2={guidance_scale_2} is for the low-noise expert of a two-expert model; {preset.name} has one: leave it out."
        )
    if preset.boundary_ratio is not None and guidance_scale_2 is None:
        # A caller who sets one scale means it for both experts; the preset's pair goes together.
        guidance_scale_2 = preset.guidance_scale_2 if guidance_scale is None else guidance_scale
    height = preset.sizes[0][0] if height is None else height
    width = preset.sizes[0][1] if width is None else width
    frames = preset.num_frames if num_frames is None else num_frames
    config = wan.vae.config
    _, *patch = wan.transformer.config.patch_size
    _check_size(height, width, *(config.stride * p for p in patch))
    if frames < 1 or frames % 4 != 1:
        nearest = max(round((frames - 1) / 4), 0) * 4 + 1
        raise ValueError(
            f"num_frames is 4 n + 1 (one latent frame stands for the first frame, then one for each four); got {frames}: try {nearest}."
        )
    request = Request(
        prompts,
        negatives,
        height,
        width,
        frames,
        preset.num_inference_steps if num_inference_steps is None else num_inference_steps,
        preset.flow_shift if flow_shift is None else flow_shift,
        preset.guidance_scale if guidance_scale is None else guidance_scale,
        guidance_scale_2,
        preset.boundary_ratio,
        solver or preset.solver,
        preset.grid,
        seeds,
        num_videos_per_prompt,
        (config.z_dim, (frames - 1) // 4 + 1, height // config.stride, width // config.stride),
    )
    if not all(np.isfinite(scale) for scale in (request.guidance_scale, guidance_scale_2 or 0.0)):
        raise ValueError(
            f"guidance scales are finite numbers (1 is off, 3 to 6 are usual); got {request.guidance_scale}, {guidance_scale_2}."
        )
    if request.solver not in _SOLVERS:
        raise ValueError(f"solver is one of {', '.join(_SOLVERS)}; got {request.solver!r}.")
    _ = request.steps, sampler.video_keys(seeds, 1)  # raise for step counts, shifts and seeds that cannot be
    return request


def embed_prompts(wan: Wan, prompts: Sequence[str]) -> Float[Array, "b 512 k"]:
    """The text that the transformer reads of each prompt: cleaned, tokenised, encoded, zero past the prompt's end.

    Equal prompts are encoded once, and one at a time: one program serves any number of them.
    """
    rows = {}
    for prompt in dict.fromkeys(prompts):
        ids, mask = _placed(wan, tokenize(wan.tokenizer, [clean_prompt(prompt)]))
        rows[prompt] = _placed(wan, _embed(ids, mask, wan.text_encoder))
    return jnp.concatenate([rows[prompt] for prompt in prompts])


def denoise(
    wan: Wan,
    request: Request,
    text: Float[Array, "p 512 k"],
    negative: Float[Array, "p 512 k"] | None,
    *,
    latents: Float[Array | np.ndarray, "b c t h w"] | None = None,
    callback: Callback | None = None,
    one_branch_at_a_time: bool = False,
) -> Float32[Array, "b c t h w"]:
    """Noise to normalised latents, `num_videos_per_prompt` for each row of text; see `generate` for the arguments."""
    keys = jnp.concatenate([sampler.video_keys(seed, request.num_videos_per_prompt) for seed in request.seeds])
    shape = (len(keys), *request.latent_shape)
    if latents is None:
        latents = sampler.initial_noise(keys, request.latent_shape)
    elif latents.shape != shape:
        raise ValueError(
            f"latents must be {shape} (videos, channels, latent frames, height and width) for this request; got {latents.shape}."
        )
    branches = [text] if negative is None else [text, negative]
    branches = [jnp.repeat(branch, request.num_videos_per_prompt, axis=0) for branch in branches]
    steps, state = request.steps, sampler.init_state(_placed(wan, jnp.asarray(latents, jnp.float32)))
    layout = None if wan.mesh is None else Layout(wan.mesh)
    for i in range(len(steps)):
        expert = wan.transformer if wan.transformer_2 is None or steps.high_noise[i] else wan.transformer_2
        state = _denoise_step(steps[i], state, expert, branches, layout=layout, together=not one_branch_at_a_time)
        if callback is not None:
            moved = callback(i, float(steps.timestep[i]), state.latents)
            state = state if moved is None else replace(state, latents=moved)
    return state.latents


def decode_frames(
    wan: Wan, latents: Float[Array, "c t h w"], output_type: OutputType = "uint8", *, tile: int | None = None
) -> Iterator[np.ndarray]:
    """Normalised latents of one video to its frames (f H W 3), in the order and as soon as they are made: first one, then four at a time.

    "uint8" or "float" in [0, 1]. While one chunk is on its way to the host the next one is computed.
    """
    z = vae.denormalize_latents(latents[None], wan.vae.config)
    for frames in vae.decode_stream(z, wan.vae, wan.vae_dtype, uint8=output_type == "uint8", tile=tile, mesh=wan.mesh):
        frames = _placed(wan, frames)
        if output_type == "uint8":
            yield np.asarray(frames[0])
        else:
            yield rearrange(np.asarray(frames[0], np.float32) / 2 + 0.5, "c f h w -> f h w c")


_embed = jax.jit(embed_text)


@partial(jax.jit, static_argnames=("layout", "together"))
def _denoise_step(
    step: sampler.Steps, state: sampler.State, weights: Any, branches: list[Array], *, layout: Layout | None, together: bool
) -> sampler.State:
    """One step of one expert; every number of it is data, so other guidance, shift or seed compile nothing."""
    model = partial(velocity, layout=layout)
    return sampler.denoise_step(step, state, sampler.guided(model, [weights], branches, together=together))


def _placed(wan: Wan, tree: Any) -> Any:
    """Arrays whole on every device of the model's mesh, where it has one."""
    return tree if wan.mesh is None else replicated(wan.mesh, tree)


def _strings(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    """One string or several as a tuple of at least one."""
    strings = (value,) if isinstance(value, str) else tuple(value)
    if not strings or not all(isinstance(string, str) for string in strings):
        raise ValueError(f"{name} is a string or a list of at least one string; got {value!r}.")
    return strings


def _check_size(height: int, width: int, rows: int, columns: int) -> None:
    """Raise unless the size is whole tokens."""
    if height > 0 and width > 0 and height % rows == 0 and width % columns == 0:
        return
    nearest = max(round(height / rows), 1) * rows, max(round(width / columns), 1) * columns
    raise ValueError(
        f"height must be a multiple of {rows} and width of {columns} (VAE stride times patch) for this model; "
        f"got {height} x {width}: try {nearest[0]} x {nearest[1]}."
    )
