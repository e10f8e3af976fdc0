"""Noise schedules, solvers, guidance and the two-expert switch, as rows of numbers and one step that runs them.

Flow matching: x = (1 - sigma) * video + sigma * noise, the model gives velocity = noise - video, so x0 = x - sigma * velocity is
what it takes the clean video to be. Every solver here is linear in x, velocity and the newest three x0, so a step is

    x' = w[0] * x + w[1] * velocity + w[2] * x0 + w[3] * previous x0 + w[4] * the one before (+ noise[i] * fresh noise)

with numbers worked out beforehand in float64 on the host. UniPC, DPM++ and Euler, any shift, any guidance and any expert boundary
are therefore the same compiled program on other data, and nothing branches inside it.

Latents, x0 and guidance are float32 whatever the model computes in; only the model rounds. (diffusers rounds the guided velocity
and sigma * velocity to a bfloat16 model's dtype, and with Euler and DPM++ the latents too.)
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int, Key

Grid = Literal["diffusers", "official"]

# The timestep of a model is 1000 * sigma, and the finest level of noise it was trained at is 1 / 1000.
TRAIN_TIMESTEPS = 1000


@dataclass(frozen=True)
class Schedule:
    """The noise levels of a sampling: `timesteps` (0..1000) is what the model is told, `sigmas` (1..0) where x is, and ends.

    Raises ValueError unless the sigmas fall strictly from at most 1 to at least 0.
    """

    timesteps: Float32[np.ndarray, " n"]
    sigmas: Float32[np.ndarray, " n_and_1"]

    def __post_init__(self):
        if len(self.timesteps) < 1 or len(self.sigmas) != len(self.timesteps) + 1:
            raise ValueError(
                f"a schedule has n >= 1 timesteps and n + 1 sigmas, the last where sampling ends; got {len(self.timesteps)} and "
                f"{len(self.sigmas)}: append 0 to the sigmas."
            )
        if not (self.sigmas[0] <= 1 and self.sigmas[-1] >= 0 and np.all(np.diff(self.sigmas) < 0)):
            raise ValueError(
                f"sigmas must fall strictly from at most 1 to at least 0; got {_listed(self.sigmas)}: "
                "sort them, drop repeats, or use a smaller shift."
            )


def unipc_schedule(steps: int, shift: float, *, grid: Grid = "diffusers") -> Schedule:
    """The whole-number timesteps and sigmas UniPC samples Wan on.

    `shift` > 0 moves them towards high noise. The "diffusers" grid starts at 1 - 1e-6, the "official" one (the checkpoints' authors')
    at shift(0.999); they differ by about 5e-4 at the same shift. The first of several equal timesteps is the first step.
    """
    _check_steps(steps, shift)
    if _check_grid(grid) == "official":
        # The authors' scheduler keeps 0.999 in float32; the timesteps below are cut off, so the eighth digit counts.
        sigmas = _shift(np.linspace(float(np.float32(0.999)), 0, steps + 1)[:-1], shift)
    else:
        sigmas = _shift(np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1)[:-1], shift)
        sigmas[0] = 1 - 1e-6
    return _whole_timesteps(sigmas)


def dpm_schedule(steps: int, shift: float, *, grid: Grid = "diffusers") -> Schedule:
    """The whole-number timesteps and sigmas DPM++ samples Wan on: from shift(0.999) ("diffusers") or from 1 ("official")."""
    _check_steps(steps, shift)
    if _check_grid(grid) == "official":
        return _whole_timesteps(_shift(np.linspace(1, 0, steps + 1)[:-1], shift))
    return _whole_timesteps(_shift(1 - np.linspace(1, 1 / TRAIN_TIMESTEPS, steps + 1), shift)[:0:-1])


def euler_schedule(steps: int, shift: float) -> Schedule:
    """The timesteps and sigmas of diffusers' FlowMatchEulerDiscreteScheduler: from 1 to shift(shift(0.001)).

    It shifts its training grid, takes an even grid between the ends, and shifts that again. For the sigmas a distilled checkpoint
    was trained at use `given_schedule`.
    """
    _check_steps(steps, shift)
    lowest = _shift(np.float32(1 / TRAIN_TIMESTEPS), np.float32(shift))
    timesteps = np.linspace(TRAIN_TIMESTEPS, float(lowest) * TRAIN_TIMESTEPS, steps)
    return given_schedule(_shift(timesteps / TRAIN_TIMESTEPS, shift))


def given_schedule(
    sigmas: Sequence[float] | np.ndarray | None = None, *, timesteps: Sequence[float] | np.ndarray | None = None, shift: float = 1.0
) -> Schedule:
    """The schedule of a checkpoint distilled to certain noise levels; sampling ends at 0, which is not listed.

    Give `sigmas` (`shift` is applied to them and the timesteps are 1000 * sigma), or `timesteps`, or both (used as they are).
    Four steps of a distilled Wan are `given_schedule([1, .75, .5, .25], shift=5)`; three of a DMD one, `timesteps=[1000, 757, 522]`.
    Raises ValueError for neither, for a shift beside timesteps, and for sigmas that do not fall.
    """
    if sigmas is None and timesteps is None:
        raise ValueError("a given schedule needs sigmas or timesteps, and has neither: pass sigmas=[1, 0.75, 0.5, 0.25] or the like.")
    if timesteps is not None and shift != 1:
        raise ValueError(f"timesteps are used as given and are not shifted; got shift={shift}: leave it out, or give sigmas only.")
    _check_steps(1, shift)
    if sigmas is None:
        sigmas = np.asarray(timesteps, np.float64) / TRAIN_TIMESTEPS
    levels = _shift(np.asarray(sigmas, np.float64), shift).astype(np.float32)
    told = levels * np.float32(TRAIN_TIMESTEPS) if timesteps is None else np.asarray(timesteps, np.float32)
    return Schedule(told, np.append(levels, np.float32(0)))


def partial_schedule(schedule: Schedule, strength: float) -> Schedule:
    """The last int(n * strength) steps, for a video that starts from another: `add_noise(z, noise, schedule.sigmas[0])`.

    `strength` is 0..1; 1 keeps every step. Raises ValueError when no step is left.
    """
    n = len(schedule.timesteps)
    if not 1 <= n * strength <= n:
        raise ValueError(f"strength must leave a step: with {n} steps it is {1 / n:.3g} to 1; got {strength}.")
    start = n - int(n * strength)
    return Schedule(schedule.timesteps[start:], schedule.sigmas[start:])


class Steps(eqx.Module):
    """Every number of a sampling, one row a step; `steps[i]` is one step, and what `denoise_step` takes.

    index: which step, for fresh noise; timestep: 0..1000, for the model; sigma: the noise in x before the step; weights: of x,
    velocity, x0, the previous x0 and the one before; noise: the amount of fresh noise, None where the solver adds none;
    guidance_scale; high_noise: whether the high-noise expert rules. They are numpy arrays: pass them to `jit` as an argument, and
    new values recompile nothing.
    """

    index: Int[Array | np.ndarray, "*n"]
    timestep: Float[Array | np.ndarray, "*n"]
    sigma: Float[Array | np.ndarray, "*n"]
    weights: Float[Array | np.ndarray, "*n 5"]
    noise: Float[Array | np.ndarray, "*n"] | None
    guidance_scale: Float[Array | np.ndarray, "*n"]
    high_noise: Bool[Array | np.ndarray, "*n"]

    def __len__(self) -> int:
        """The number of steps."""
        return len(self.index)

    def __getitem__(self, i: int) -> "Steps":
        """Step i alone."""
        return jax.tree.map(lambda numbers: numbers[i], self)


def euler_steps(schedule: Schedule) -> Steps:
    """Euler's method, x' = x + (sigma' - sigma) * velocity."""
    weights = np.zeros((len(schedule.timesteps), 5))
    weights[:, 0], weights[:, 1] = 1, np.diff(schedule.sigmas.astype(np.float64))
    return _steps(schedule, weights)


def dmd_steps(schedule: Schedule) -> Steps:
    """Few-step sampling of distribution-matched (DMD) weights: fresh noise on the clean video, x' = (1 - sigma') * x0 + sigma' * noise.

    The same as FlowMatchEulerDiscreteScheduler with stochastic_sampling. These steps need `keys`.
    """
    after = schedule.sigmas[1:].astype(np.float64)
    weights = np.zeros((len(after), 4))
    weights[:, 1] = 1 - after
    return _steps(schedule, weights, noise=after)


def dpm_steps(schedule: Schedule) -> Steps:
    """DPM-Solver++(2M), midpoint form (https://arxiv.org/abs/2211.01095); first and last steps are first-order."""
    return _steps(schedule, _predictor(schedule, _middle(schedule)))


def unipc_steps(schedule: Schedule) -> Steps:
    """UniPC of order 2 with B(h) = e^h - 1 (https://arxiv.org/abs/2302.04867); first and last steps are first-order.

    Its predictor is DPM++'s. Its corrector redoes the step before with the x0 found since, which moves x by a multiple of x0's and
    so folds into the same row: nothing but x0's is carried from step to step.
    """
    weights = _predictor(schedule, _middle(schedule))
    weights[:, 1:] += weights[:, :1] * _correction(schedule)
    return _steps(schedule, weights)


def with_guidance(steps: Steps, guidance_scale: float, guidance_scale_2: float | None = None, boundary_ratio: float | None = None) -> Steps:
    """The steps with the guidance of each, and of two experts the one that rules it.

    The high-noise expert rules where timestep >= 1000 * boundary_ratio, at `guidance_scale`; the low-noise one the rest, at
    `guidance_scale_2` (default: the same). Without a boundary there is one expert. Raises ValueError for a boundary outside 0..1,
    and for a second scale without a boundary.
    """
    if boundary_ratio is None:
        if guidance_scale_2 is not None:
            raise ValueError(
                f"guidance_scale_2={guidance_scale_2} is for two experts: give boundary_ratio too (Wan 2.2 A14B: 0.875 or 0.9)."
            )
        high = np.ones(len(steps), bool)
    elif 0 <= boundary_ratio <= 1:
        high = np.asarray(steps.timestep) >= np.float32(boundary_ratio * TRAIN_TIMESTEPS)
    else:
        raise ValueError(f"boundary_ratio is a timestep / 1000 and lies in 0..1; got {boundary_ratio} (Wan 2.2 A14B has 0.875 or 0.9).")
    low_scale = guidance_scale if guidance_scale_2 is None else guidance_scale_2
    return replace(steps, guidance_scale=np.where(high, guidance_scale, low_scale).astype(np.float32), high_noise=high)


class State(eqx.Module):
    """What one step hands to the next: latents, and the two newest predictions x0 of the clean ones (the first is a preview)."""

    latents: Float32[Array, "b *dims"]
    denoised: Float32[Array, "b *dims"]
    denoised_before: Float32[Array, "b *dims"]


class Known(eqx.Module):
    """Frames that are given: `latents` where `mask` is 0; the model generates where it is 1, and is told timestep 0 elsewhere."""

    latents: Float[Array, "#b c #t h w"]
    mask: Float[Array, "#b 1 t h w"]


# From the latents and the step to the velocity, guided and by the right expert: what `guided` makes of a model.
Predict = Callable[[Float32[Array, "b *dims"], Steps], Float[Array, "b *dims"]]


def init_state(noise: Float[Array, "b *dims"], known: Known | None = None) -> State:
    """The state before the first step, from noise (or noised latents), in float32."""
    latents = impose(noise.astype(jnp.float32), known)
    return State(latents, jnp.zeros_like(latents), jnp.zeros_like(latents))


def solver_step(
    step: Steps,
    state: State,
    velocity: Float[Array, "b *dims"],
    *,
    keys: Key[Array, " b"] | None = None,
    known: Known | None = None,
) -> State:
    """The state after a step, given the model's velocity at `state.latents`.

    `keys` (one a video, the same at every step) are for steps that add noise. Raises ValueError when such steps get none.
    """
    velocity = velocity.astype(jnp.float32)
    denoised = state.latents - step.sigma * velocity
    x, v, new, old, older = (step.weights[i] for i in range(5))
    latents = x * state.latents + v * velocity + new * denoised + old * state.denoised + older * state.denoised_before
    if step.noise is not None:
        if keys is None:
            raise ValueError("these steps add fresh noise and need keys=, one a video: pass video_keys(seeds).")
        latents = latents + step.noise * _normal(keys, step.index + 1, latents.shape[1:])
    return State(impose(latents, known), denoised, state.denoised)


def denoise_step(step: Steps, state: State, predict: Predict, *, keys: Key[Array, " b"] | None = None, known: Known | None = None) -> State:
    """One step of sampling: ask the model, move the latents. `sample` scans it; a loop with a progress bar or callbacks jits it:

    >>> for i in range(len(steps)):
    ...     state = jitted(steps[i], state, weights, text)  # denoise_step(step, state, guided(velocity, [weights], [text]))
    """
    return solver_step(step, state, predict(state.latents, step), keys=keys, known=known)


def sample(
    predict: Predict,
    noise: Float[Array, "b *dims"],
    steps: Steps,
    *,
    keys: Key[Array, " b"] | None = None,
    known: Known | None = None,
) -> Float32[Array, "b *dims"]:
    """The latents at the end of all steps, as one `lax.scan`: works inside jit, under vmap over noise and grad to it.

    `predict(latents, step)` is the velocity; `guided` makes one of a model. For a gradient through many steps of a large model pass
    `jax.checkpoint(predict)`.
    """
    one = lambda state, step: (denoise_step(step, state, predict, keys=keys, known=known), None)
    return lax.scan(one, init_state(noise, known), steps)[0].latents


def guide(cond: Float[Array, "b *dims"], uncond: Float[Array, "b *dims"], scale: Float[Any, ""] | float) -> Float32[Array, "b *dims"]:
    """Classifier-free guidance, uncond + scale * (cond - uncond), in float32."""
    cond, uncond = cond.astype(jnp.float32), uncond.astype(jnp.float32)
    return uncond + scale * (cond - uncond)


def guided(
    velocity: Callable[..., Float[Array, "b *dims"]],
    experts: Sequence[Any],
    branches: Sequence[Any],
    *,
    mask: Float[Array, "#b 1 t h w"] | None = None,
    together: bool = True,
) -> Predict:
    """The `predict` of a model: `velocity(latents, timestep, branch, weights)` with guidance and the expert of the step.

    experts: the weights, or (high-noise, low-noise) weights. branches: what the model is conditioned on, [text] for no guidance or
    [text, negative text]; any pytree whose arrays start with the batch axis. mask: of `Known`, or ones; with it the timestep is per
    token, as TI2V-5B always wants. together: both branches as one batch of twice the size, or one after the other in half the memory.
    Raises ValueError for other than one or two experts or branches.
    """
    for what, given in (("experts", experts), ("branches", branches)):
        if len(given) not in (1, 2):
            raise ValueError(f"{what} must be one or two, in a list; got {len(given)}.")

    def predict(latents: Float32[Array, "b *dims"], step: Steps) -> Float32[Array, "b *dims"]:
        b = len(latents)
        timestep = jnp.broadcast_to(step.timestep, b)
        if mask is not None:
            timestep = jnp.repeat(token_timesteps(step.timestep, mask), b // len(mask), axis=0)

        def rule(weights: Any) -> Float32[Array, "b *dims"]:
            if len(branches) == 1:
                return velocity(latents, timestep, branches[0], weights).astype(jnp.float32)
            if together:
                twice = lambda array, other: jnp.concatenate([array, other])
                both = velocity(twice(latents, latents), twice(timestep, timestep), jax.tree.map(twice, *branches), weights)
                cond, uncond = jnp.split(both, 2)
            else:
                stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *branches)
                cond, uncond = lax.map(lambda branch: velocity(latents, timestep, branch, weights), stacked)
            return guide(cond, uncond, step.guidance_scale)

        if len(experts) == 1:
            return rule(experts[0])
        return lax.cond(step.high_noise, lambda: rule(experts[0]), lambda: rule(experts[1]))

    return predict


def add_noise(video: Float[Array, "*dims"], noise: Float[Array, "*dims"], sigma: Float[Any, ""] | float) -> Float32[Array, "*dims"]:
    """Latents at noise level sigma (0..1): (1 - sigma) * video + sigma * noise, in float32."""
    return (1 - sigma) * video.astype(jnp.float32) + sigma * noise.astype(jnp.float32)


def impose(latents: Float32[Array, "b *dims"], known: Known | None) -> Float32[Array, "b *dims"]:
    """The latents with the known frames put in place."""
    if known is None:
        return latents
    mask = known.mask.astype(jnp.float32)
    return mask * latents + (1 - mask) * known.latents.astype(jnp.float32)


def first_frame(image: Float[Array, "b c 1 h w"], frames: int) -> Known:
    """The known frames of image-to-video with TI2V-5B: the first of `frames` latent frames is the encoded image."""
    b, _, _, h, w = image.shape
    return Known(image, jnp.ones((b, 1, frames, h, w), jnp.float32).at[:, :, 0].set(0))


def token_timesteps(
    timestep: Float[Any, ""] | float, mask: Float[Array, "b 1 t h w"], patch: tuple[int, int, int] = (1, 2, 2)
) -> Float32[Array, "b s"]:
    """The timestep of every token: `timestep` where the mask is 1, and 0 for the clean tokens where it is 0."""
    corners = mask[:, 0, :: patch[0], :: patch[1], :: patch[2]]
    return rearrange(corners, "b t h w -> b (t h w)").astype(jnp.float32) * timestep


def video_keys(seeds: int | Sequence[int], videos: int = 1) -> Key[Array, " b"]:
    """The random key of each video: `videos` of them for every seed in turn, video j of a seed from fold_in(key(seed), j).

    So a video's noise depends on its seed and j alone, not on the batch it is made in. Raises ValueError for a seed outside 0..2^32 - 1.
    """
    seeds = [seeds] if isinstance(seeds, int) else list(seeds)
    if not seeds or videos < 1 or not all(0 <= seed < 2**32 for seed in seeds):
        raise ValueError(f"needs seeds in 0..2^32 - 1, at least one, and at least 1 video of each; got seeds {seeds}, {videos} videos.")
    return jnp.stack([jax.random.fold_in(jax.random.key(seed), j) for seed in seeds for j in range(videos)])


def initial_noise(keys: Key[Array, " b"], shape: Sequence[int]) -> Float32[Array, "b *dims"]:
    """Standard normal noise of the given shape (without the batch axis), each video's from its own key."""
    return _normal(keys, 0, tuple(shape))


def _normal(keys: Key[Array, " b"], draw: Int[Any, ""] | int, shape: tuple[int, ...]) -> Float32[Array, "b *dims"]:
    # Draw 0 is the initial noise, draw i + 1 that of step i: no key is ever used twice.
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, draw), shape, jnp.float32))(keys)


def _steps(schedule: Schedule, weights: np.ndarray, noise: np.ndarray | None = None) -> Steps:
    """The rows of a solver, from its weights of x, x0, the previous x0 and the one before, and of velocity where it has one."""
    n = len(schedule.timesteps)
    if weights.shape[1] == 4:
        weights = np.insert(weights, 1, 0, axis=1)
    return Steps(
        np.arange(n, dtype=np.int32),
        schedule.timesteps,
        schedule.sigmas[:-1],
        weights.astype(np.float32),
        None if noise is None else noise.astype(np.float32),
        np.ones(n, np.float32),
        np.ones(n, bool),
    )


def _middle(schedule: Schedule) -> np.ndarray:
    """Which steps are second-order: not the first, which has no x0 before it, and not the last."""
    i = np.arange(len(schedule.timesteps))
    return (i > 0) & (i < len(i) - 1)


def _log_snr(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """The step h in lambda = log((1 - sigma) / sigma), infinite from sigma 1 or to 0, and the last h over this one (first: infinite)."""
    sigmas = schedule.sigmas.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        h = np.diff(np.log1p(-sigmas) - np.log(sigmas))
        return h, np.append(np.inf, h[:-1] / h[1:])


def _predictor(schedule: Schedule, second_order: np.ndarray) -> np.ndarray:
    """Rows of x' = r x + (1 - r) (x0 + slope / 2), r = sigma' / sigma; slope: the change of x0 over a step h, from its last change."""
    sigmas = schedule.sigmas.astype(np.float64)
    r = sigmas[1:] / sigmas[:-1]
    _, last = _log_snr(schedule)
    half = np.divide(0.5, last, out=np.zeros_like(last), where=second_order)
    return np.stack([r, (1 - r) * (1 + half), (1 - r) * -half, np.zeros_like(r)], 1)


def _correction(schedule: Schedule) -> np.ndarray:
    """Rows of what UniPC's corrector adds to x before step i, as multiples of x0, the previous x0 and the one before.

    It redoes step i - 1 with weights that integrate exactly through the x0 at its end and those before, in place of the predictor's.
    """
    sigmas = schedule.sigmas.astype(np.float64)
    h, last = _log_snr(schedule)
    rows = np.zeros((len(h), 3))
    for i in range(1, len(h)):
        amount = 1 - sigmas[i] / sigmas[i - 1]
        if i == 1:
            new, old = 0.5, 0.0
        else:
            decay = np.expm1(-h[i - 1])
            first = -decay / h[i - 1] - 1
            second = -first / h[i - 1] - 0.5
            slope, curve = first / decay, 2 * second / decay
            past = (slope - curve) / (1 + last[i - 1])
            new, old = slope - past, (past - 0.5) / last[i - 1]
        rows[i] = amount * np.array([new, old - new, -old])
    return rows


def _whole_timesteps(sigmas: np.ndarray) -> Schedule:
    timesteps = (sigmas * TRAIN_TIMESTEPS).astype(np.int64)
    return Schedule(timesteps.astype(np.float32), np.append(sigmas, 0).astype(np.float32))


def _shift(sigmas: Any, shift: Any) -> Any:
    return shift * sigmas / (1 + (shift - 1) * sigmas)


def _check_steps(steps: int, shift: float) -> None:
    if steps < 1:
        raise ValueError(f"sampling needs at least 1 step; got {steps}.")
    if not 0 < shift < np.inf:
        raise ValueError(f"shift must be a number above 0 (3 for 480p, 5 for 720p are usual); got {shift}.")


def _check_grid(grid: str) -> str:
    if grid not in ("diffusers", "official"):
        raise ValueError(f'grid must be "diffusers" or "official"; got "{grid}".')
    return grid


def _listed(numbers: np.ndarray) -> str:
    return ", ".join(f"{number:.6g}" for number in numbers[:12]) + (", ..." if len(numbers) > 12 else "")
