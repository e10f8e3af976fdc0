"""Schedules, steps, partial starts, noise and bfloat16 against diffusers' schedulers, over many step counts and shifts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")

from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler
from golden.make_sampler import FLOW, exact_trajectory, scheduler, trajectory

from wanjax import sampler

pytestmark = pytest.mark.parity

SOLVERS = {
    "unipc": (sampler.unipc_schedule, sampler.unipc_steps),
    "dpm": (sampler.dpm_schedule, sampler.dpm_steps),
    "euler": (sampler.euler_schedule, sampler.euler_steps),
}
SHIFTS = (1.0, 3.0, 5.0, 12.0, 16.0)
one_step = jax.jit(sampler.solver_step)


def ours(steps, x, velocities):
    state, latents = sampler.init_state(jnp.asarray(x)), []
    for i in range(len(steps)):
        state = one_step(steps[i], state, velocities[i])
        latents.append(np.asarray(state.latents, np.float64))
    return np.stack(latents)


def draws(n, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((1, 64)).astype(np.float32), 1.4 * rng.standard_normal((n, 1, 64)).astype(np.float32)


def error(latents, exact):
    """The largest relative L2 error of any step."""
    return (np.linalg.norm(latents - exact, axis=-1) / np.linalg.norm(exact, axis=-1)).max()


@pytest.mark.parametrize("solver", SOLVERS)
def test_every_schedule_is_identical(solver):
    for shift in (*SHIFTS, 2.5, 4.7, 7.0, 8.0):
        theirs = scheduler(solver, shift)
        for n in (*range(1, 61), 100, 200, 1000):
            theirs.set_timesteps(n)
            schedule = SOLVERS[solver][0](n, shift)
            np.testing.assert_array_equal(schedule.timesteps, theirs.timesteps.numpy().astype(np.float32))
            np.testing.assert_array_equal(schedule.sigmas, theirs.sigmas.numpy())


@pytest.mark.parametrize("n", [1, 2, 3, 4, 10, 20, 40, 50])
@pytest.mark.parametrize("solver", SOLVERS)
def test_whole_trajectories(solver, n):
    """Within 1e-6 of diffusers' update in float64, and no farther from it than 1.5 times diffusers' own float32."""
    schedule, rows = SOLVERS[solver]
    for shift in SHIFTS:
        x, velocities = draws(n)
        theirs = scheduler(solver, shift)
        theirs.set_timesteps(n)
        theirs32 = trajectory(theirs, x, velocities)
        theirs.set_timesteps(n)
        exact = exact_trajectory(theirs, x, velocities)
        latents = ours(rows(schedule(n, shift)), x, velocities)
        assert error(theirs32, exact) <= 1e-5  # the float64 path is the same update
        assert error(latents, exact) <= 1e-6
        assert error(latents, exact) <= max(1.5 * error(theirs32, exact), 2e-7)


@pytest.mark.parametrize("solver", SOLVERS)
def test_bfloat16_velocities_round_only_once(solver):
    """With a bfloat16 model diffusers rounds sigma * v, or even the latents: our float32 state is closer to the exact update."""
    schedule, rows = SOLVERS[solver]
    x, velocities = draws(20)
    rounded = jnp.asarray(velocities, jnp.bfloat16)
    theirs = scheduler(solver, 5.0)
    theirs.set_timesteps(20)
    theirs16 = trajectory(theirs, x, velocities, dtype=torch.bfloat16)
    theirs.set_timesteps(20)
    exact = exact_trajectory(theirs, x, np.asarray(rounded, np.float32))
    latents = ours(rows(schedule(20, 5.0)), x, rounded)
    assert error(latents, exact) <= 1e-6 < 1e-4 < error(theirs16, exact)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("strength", [0.08, 0.58, 0.8, 1.0])
def test_partial_start(solver, strength):
    """As WanVideoToVideoPipeline starts: the last int(n * strength) steps, warming up afresh, from noised latents."""
    n, (schedule, rows) = 25, SOLVERS[solver]
    start = max(n - min(int(n * strength), n), 0)
    part = sampler.partial_schedule(schedule(n, 3.0), strength)
    theirs = scheduler(solver, 3.0)
    theirs.set_timesteps(n)
    np.testing.assert_array_equal(part.timesteps, theirs.timesteps[start:].numpy().astype(np.float32))

    video, velocities = draws(n - start)
    noise = draws(1, seed=1)[0]
    theirs.set_begin_index(start)
    noisify = theirs.scale_noise if solver == "euler" else theirs.add_noise
    first = theirs.timesteps[start : start + 1]
    noised = (
        noisify(torch.tensor(video), first, torch.tensor(noise))
        if solver == "euler"
        else noisify(torch.tensor(video), torch.tensor(noise), first)
    )
    x = sampler.add_noise(jnp.asarray(video), jnp.asarray(noise), part.sigmas[0])
    np.testing.assert_allclose(x, noised.numpy(), rtol=1e-6, atol=1e-6)

    exact = exact_trajectory(theirs, np.asarray(x), velocities, start)
    assert error(ours(rows(part), x, velocities), exact) <= 1e-6


def test_given_sigmas_and_timesteps():
    theirs = FlowMatchEulerDiscreteScheduler(shift=5.0)
    theirs.set_timesteps(sigmas=[1.0, 0.75, 0.5, 0.25])
    schedule = sampler.given_schedule([1.0, 0.75, 0.5, 0.25], shift=5.0)
    np.testing.assert_allclose(schedule.timesteps, theirs.timesteps.numpy(), rtol=1e-7)
    np.testing.assert_allclose(schedule.sigmas, theirs.sigmas.numpy(), rtol=1e-7)
    theirs = FlowMatchEulerDiscreteScheduler(shift=1.0)
    theirs.set_timesteps(timesteps=[1000.0, 757.0, 522.0])
    schedule = sampler.given_schedule(timesteps=[1000.0, 757.0, 522.0])
    np.testing.assert_array_equal(schedule.timesteps, theirs.timesteps.numpy())
    np.testing.assert_allclose(schedule.sigmas, theirs.sigmas.numpy(), rtol=1e-7)


def test_unipc_on_given_sigmas():
    """diffusers moves a first sigma of 1 to 1 - 1e-6; the same sigmas given here make the same steps."""
    theirs = UniPCMultistepScheduler(flow_shift=5.0, **FLOW)
    theirs.set_timesteps(sigmas=np.array([1.0, 0.75, 0.5, 0.25]))
    schedule = sampler.Schedule(theirs.timesteps.numpy().astype(np.float32), theirs.sigmas.numpy())
    x, velocities = draws(4)
    latents = ours(sampler.unipc_steps(schedule), x, velocities)
    assert error(latents, exact_trajectory(theirs, x, velocities)) <= 1e-6


def test_dmd_is_stochastic_euler(monkeypatch):
    keys = sampler.video_keys(3)
    fresh = iter([torch.tensor(np.asarray(jax.random.normal(jax.random.fold_in(keys[0], i + 1), (64,)))[None]) for i in range(3)])
    monkeypatch.setattr("diffusers.schedulers.scheduling_flow_match_euler_discrete.randn_tensor", lambda *args, **kwargs: next(fresh))
    theirs = FlowMatchEulerDiscreteScheduler(shift=8.0, stochastic_sampling=True)
    theirs.set_timesteps(sigmas=[1.0, 0.6, 0.3])
    x, velocities = draws(3)
    expected = trajectory(theirs, x, velocities)
    steps, state = sampler.dmd_steps(sampler.given_schedule([1.0, 0.6, 0.3], shift=8.0)), sampler.init_state(jnp.asarray(x))
    for i in range(3):
        state = one_step(steps[i], state, jnp.asarray(velocities[i]), keys=keys)
        np.testing.assert_allclose(state.latents, expected[i], atol=1e-6)
