"""Schedules and solvers against golden tables and a reference from the formulas; the sampler's equalities; its errors."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import wanjax.sampler as sampler
from wanjax.sampler import (
    Known,
    Schedule,
    add_noise,
    denoise_step,
    dmd_steps,
    dpm_schedule,
    dpm_steps,
    euler_schedule,
    euler_steps,
    first_frame,
    given_schedule,
    guide,
    guided,
    init_state,
    initial_noise,
    partial_schedule,
    sample,
    solver_step,
    token_timesteps,
    unipc_schedule,
    unipc_steps,
    video_keys,
    with_guidance,
)

GOLDEN = np.load(Path(__file__).parent / "golden" / "sampler.npz")
SOLVERS = {
    "unipc": (unipc_schedule, unipc_steps),
    "dpm": (dpm_schedule, dpm_steps),
    "euler": (euler_schedule, euler_steps),
}
SHAPE = (2, 3, 2, 4, 4)  # b c t h w
one_step = jax.jit(solver_step)


def steps_of(solver, n=5, shift=3.0):
    schedule, rows = SOLVERS[solver]
    return rows(schedule(n, shift))


def trajectory(steps, x, velocities):
    state, latents = init_state(jnp.asarray(x)), []
    for i in range(len(steps)):
        state = one_step(steps[i], state, jnp.asarray(velocities[i]))
        latents.append(np.asarray(state.latents, np.float64))
    return np.stack(latents)


def toy_velocity(latents, timestep, text, weights):
    """A smooth stand-in for the transformer that mixes positions and uses every argument; timestep is per item or per token."""
    b, _, t, h, w = latents.shape
    if timestep.ndim == 2:
        timestep = jnp.repeat(jnp.repeat(timestep.reshape(b, 1, t, h // 2, w // 2), 2, 3), 2, 4)
    else:
        timestep = timestep[:, None, None, None, None]
    mixed = jnp.tanh(jnp.roll(latents, 1, axis=-1) * weights + text[:, None, None, None, None])
    return mixed * (1 + timestep / 1000) + 0.1 * latents


WEIGHTS, LOW_WEIGHTS = jnp.float32(0.7), jnp.float32(-0.4)
TEXT, NEGATIVE = jnp.array([0.3, -0.2], jnp.float32), jnp.array([-0.5, 0.1], jnp.float32)


def noise_of(seed=0, shape=SHAPE):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# --- schedules


@pytest.mark.parametrize("solver", SOLVERS)
def test_schedules_are_those_of_diffusers(solver):
    for name in {key.rsplit("/", 1)[0] for key in GOLDEN if key.startswith(solver)}:
        _, n, shift = name.split("/")
        schedule = SOLVERS[solver][0](int(n), float(shift))
        np.testing.assert_array_equal(schedule.timesteps, GOLDEN[f"{name}/timesteps"])
        np.testing.assert_array_equal(schedule.sigmas, GOLDEN[f"{name}/sigmas"])


def test_schedules_match_the_published_tables():
    assert unipc_schedule(4, 3.0).timesteps.tolist() == [999, 900, 750, 500]
    np.testing.assert_allclose(unipc_schedule(4, 3.0).sigmas, [0.999999, 0.90012, 0.7503748, 0.500999, 0], atol=1e-6)
    assert unipc_schedule(10, 5.0).timesteps.tolist() == [999, 978, 952, 921, 882, 833, 769, 682, 556, 359]
    a14b = [999, 997, 995, 993, 990, 988, 985, 982, 979, 976, 973, 969, 965, 961, 957, 952, 947, 942, 936, 930, 923, 915, 907, 898, 889]
    a14b += [878, 866, 852, 837, 820, 800, 777, 750, 719, 680, 633, 573, 496, 391, 242]
    assert unipc_schedule(40, 12.0).timesteps.tolist() == a14b
    t50 = [999, 993, 986, 979, 971, 964, 956, 948, 940, 931, 923, 914, 904, 895, 885, 875, 864, 853, 842, 830, 818, 805, 792, 779, 765]
    t50 += [750, 735, 719, 702, 685, 667, 648, 628, 607, 586, 563, 539, 514, 487, 459, 429, 398, 365, 329, 292, 251, 208, 162, 113, 60]
    assert unipc_schedule(50, 3.0).timesteps.tolist() == t50
    np.testing.assert_allclose(euler_schedule(4, 3.0).timesteps, [1000, 857.692, 602.151, 8.92857], rtol=1e-6)
    np.testing.assert_allclose(euler_schedule(2, 7.0).timesteps, [1000, 46.7557], rtol=1e-6)
    np.testing.assert_allclose(euler_schedule(4, 5.0).timesteps, [1000, 909.707, 717.317, 24.4141], rtol=2e-6)
    official = unipc_schedule(4, 3.0, grid="official")
    assert official.timesteps.tolist() == [999, 899, 749, 499]
    np.testing.assert_allclose(official.sigmas, [0.999666, 0.899640, 0.749625, 0.499667, 0], atol=1e-6)
    assert unipc_schedule(3, 1.0, grid="official").timesteps.tolist() == [999, 666, 333]
    assert dpm_schedule(4, 3.0, grid="official").timesteps.tolist() == [1000, 900, 750, 500]


def test_given_schedules():
    distilled = given_schedule([1.0, 0.75, 0.5, 0.25], shift=5.0)
    np.testing.assert_allclose(distilled.timesteps, [1000, 937.5, 833.3333, 625], rtol=1e-7)
    np.testing.assert_allclose(distilled.sigmas, [1, 0.9375, 0.8333333, 0.625, 0], rtol=1e-7)
    dmd = given_schedule(timesteps=[1000.0, 757.0, 522.0])
    assert dmd.timesteps.tolist() == [1000, 757, 522]
    np.testing.assert_allclose(dmd.sigmas, [1, 0.757, 0.522, 0], rtol=1e-7)
    both = given_schedule([0.9, 0.4], timesteps=[950.0, 410.0])
    assert both.timesteps.tolist() == [950, 410]
    np.testing.assert_allclose(both.sigmas, [0.9, 0.4, 0], rtol=1e-7)


def test_partial_schedule_is_the_tail():
    whole = unipc_schedule(50, 3.0)
    tail = partial_schedule(whole, 0.8)
    np.testing.assert_array_equal(tail.timesteps, whole.timesteps[10:])
    np.testing.assert_array_equal(tail.sigmas, whole.sigmas[10:])
    np.testing.assert_array_equal(partial_schedule(whole, 1.0).sigmas, whole.sigmas)
    assert len(partial_schedule(whole, 0.02).timesteps) == 1


# --- solvers


@pytest.mark.parametrize("solver", SOLVERS)
def test_steps_are_those_of_diffusers(solver):
    worst = 0.0
    for name in {key.rsplit("/", 1)[0] for key in GOLDEN if key.startswith(solver) and key.endswith("/x")}:
        _, n, shift = name.split("/")
        ours = trajectory(steps_of(solver, int(n), float(shift)), GOLDEN[f"{name}/x"], GOLDEN[f"{name}/velocities"])
        worst = max(worst, np.abs(ours - GOLDEN[f"{name}/latents"]).max() / np.abs(GOLDEN[f"{name}/latents"]).max())
    assert worst <= 1e-6


def reference_trajectory(schedule, x, velocities, corrector):
    """UniPC (bh2, order 2) or, without the corrector, DPM-Solver++(2M), step by step from the papers' formulas in float64."""
    sigmas = schedule.sigmas.astype(np.float64)
    with np.errstate(divide="ignore"):
        alphas, lambdas = 1 - sigmas, np.log(1 - sigmas) - np.log(sigmas)
    n, x, latents = len(velocities), x.astype(np.float64), []
    last_x, last_order, x0s = None, 0, []
    for i in range(n):
        x0 = x - sigmas[i] * velocities[i]
        if corrector and i > 0:
            h = lambdas[i] - lambdas[i - 1]
            phi = np.expm1(-h)
            g1 = phi / -h - 1
            g2 = g1 / -h - 0.5
            base = sigmas[i] / sigmas[i - 1] * last_x - alphas[i] * phi * x0s[-1]
            if last_order == 1:
                terms = 0.5 * (x0 - x0s[-1])
            else:
                r = (lambdas[i - 2] - lambdas[i - 1]) / h
                rho = np.linalg.solve([[1.0, 1.0], [r, 1.0]], [g1 / phi, 2 * g2 / phi])
                terms = rho[0] * (x0s[-2] - x0s[-1]) / r + rho[1] * (x0 - x0s[-1])
            x = base - alphas[i] * phi * terms
        x0s.append(x0)
        last_x, last_order = x, min(2, n - i, i + 1)
        h = lambdas[i + 1] - lambdas[i]
        phi = np.expm1(-h)
        x = sigmas[i + 1] / sigmas[i] * last_x - alphas[i + 1] * phi * x0
        if last_order == 2:
            r = (lambdas[i] - lambdas[i - 1]) / h
            x = x - 0.5 * alphas[i + 1] * phi * (x0 - x0s[-2]) / r
        latents.append(x)
    return np.stack(latents)


@pytest.mark.parametrize("grid", ["diffusers", "official"])
@pytest.mark.parametrize("shift", [1.0, 5.0, 16.0])
@pytest.mark.parametrize("solver", ["unipc", "dpm"])
def test_steps_follow_the_papers_formulas(solver, shift, grid):
    rng = np.random.default_rng(int(shift))
    schedule, rows = SOLVERS[solver]
    for n in (1, 2, 3, 4, 10, 40):
        x = rng.standard_normal((1, 16)).astype(np.float32)
        velocities = 1.4 * rng.standard_normal((n, 1, 16)).astype(np.float32)
        levels = schedule(n, shift, grid=grid)
        expected = reference_trajectory(levels, x, velocities, corrector=solver == "unipc")
        assert np.abs(trajectory(rows(levels), x, velocities) - expected).max() <= 1e-6 * np.abs(expected).max()


def test_unipc_from_pure_noise_is_finite():
    """Sigma 1 is minus infinity in log signal-to-noise: its rows are limits, which nearly pure noise approaches."""
    pure, nearly = given_schedule([1.0, 0.9, 0.7, 0.4]), given_schedule([1 - 6e-8, 0.9, 0.7, 0.4])
    for rows in (unipc_steps, dpm_steps):
        assert np.isfinite(rows(pure).weights).all()
        np.testing.assert_allclose(rows(pure).weights, rows(nearly).weights, atol=0.05)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_a_straight_path_is_followed_exactly(solver, n):
    """With one clean video to predict the velocity is constant along the path, and every solver lands on it."""
    video, noise = jnp.full(SHAPE, 0.25, jnp.float32), noise_of()
    steps = steps_of(solver, n)
    start = add_noise(video, noise, steps.sigma[0])
    assert jnp.abs(sample(lambda latents, step: noise - video, start, steps) - video).max() <= 2e-6


def gaussian_error(rows, n):
    """How far a solver ends from the exact solution when the data is N(0.5, 0.3^2), on an even grid in log signal-to-noise."""
    mean, std = 0.5, 0.3
    sigmas = (1 / (1 + np.exp(np.linspace(-4, 4, n + 1)))).astype(np.float32)
    spread = lambda sigma: ((1 - sigma) ** 2 * std**2 + sigma**2) ** 0.5

    def predict(latents, step):
        sigma = step.sigma
        x0 = mean + (1 - sigma) * std**2 / spread(sigma) ** 2 * (latents - (1 - sigma) * mean)
        return (latents - x0) / sigma

    z = np.linspace(-2, 2, 16, dtype=np.float32)[None]
    exact = lambda sigma: (1 - sigma) * mean + spread(sigma) * z
    steps = rows(Schedule(1000 * sigmas[:-1], sigmas))
    return np.abs(sample(predict, jnp.asarray(exact(sigmas[0])), steps) - exact(sigmas[-1])).max()


@pytest.mark.parametrize(("rows", "order"), [(euler_steps, 1), (dpm_steps, 2), (unipc_steps, 3)])
def test_order_of_convergence(rows, order):
    coarse, fine = gaussian_error(rows, 40), gaussian_error(rows, 160)
    assert np.log(coarse / fine) / np.log(4) >= order - 0.1


def test_unipc_beats_dpm_beats_euler():
    assert gaussian_error(unipc_steps, 40) < gaussian_error(dpm_steps, 40) < gaussian_error(euler_steps, 40)


def test_dmd_renoises_the_prediction():
    steps = dmd_steps(given_schedule(timesteps=[1000.0, 757.0, 522.0]))
    keys, noise = video_keys([3, 4]), noise_of()
    predict = guided(toy_velocity, [WEIGHTS], [TEXT])
    expected = noise
    for i, (sigma, after) in enumerate([(1, 0.757), (0.757, 0.522), (0.522, 0)]):
        x0 = expected - np.float32(sigma) * predict(expected, steps[i])
        fresh = jnp.stack([jax.random.normal(jax.random.fold_in(key, i + 1), SHAPE[1:]) for key in keys])
        expected = np.float32(1 - after) * x0 + np.float32(after) * fresh
    np.testing.assert_allclose(sample(predict, noise, steps, keys=keys), expected, atol=2e-6)


# --- the whole of sampling


def same(a, b):
    """Two programs of the same sums may round differently, in proportion to the largest latent (4 to 14 here); measured: 4e-7."""
    assert np.abs(a - b).max() <= 1e-6 * np.abs(b).max()


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("together", [True, False])
def test_scan_equals_a_loop_over_the_jitted_step(solver, together):
    steps, noise = with_guidance(steps_of(solver), 4.0), noise_of()

    def predict(weights):
        return guided(toy_velocity, [weights], [TEXT, NEGATIVE], together=together)

    jitted = jax.jit(lambda step, state, weights: denoise_step(step, state, predict(weights)))
    state = init_state(noise)
    for i in range(len(steps)):
        state = jitted(steps[i], state, WEIGHTS)
    whole = jax.jit(lambda noise, steps, weights: sample(predict(weights), noise, steps))(noise, steps, WEIGHTS)
    same(whole, state.latents)
    np.testing.assert_array_equal(state.latents, state.denoised)  # the last step ends on its prediction


def test_vmap_over_noise_equals_each_alone():
    steps = with_guidance(steps_of("unipc", 6, 12.0), 4.0, 3.0, 0.875)
    predict = guided(toy_velocity, [WEIGHTS, LOW_WEIGHTS], [TEXT, NEGATIVE])
    noises = jnp.stack([noise_of(seed) for seed in range(3)])
    one = jax.jit(lambda noise: sample(predict, noise, steps))
    many = jax.jit(jax.vmap(one))(noises)
    for noise, latents in zip(noises, many, strict=True):
        np.testing.assert_allclose(latents, one(noise), atol=1e-6)


@pytest.mark.parametrize("together", [True, False])
def test_gradient_to_the_noise_equals_finite_differences(together):
    steps = with_guidance(steps_of("unipc", 6, 12.0), 4.0, 3.0, 0.875)
    predict = guided(toy_velocity, [WEIGHTS, LOW_WEIGHTS], [TEXT, NEGATIVE], together=together)
    loss = jax.jit(lambda noise: jnp.sum(jnp.square(sample(jax.checkpoint(predict), noise, steps))))
    noise, direction = noise_of(0), noise_of(1)
    gradient = jax.grad(loss)(noise)
    assert jnp.isfinite(gradient).all()
    difference = (loss(noise + 1e-2 * direction) - loss(noise - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(gradient, direction), difference, rtol=2e-3)


def test_new_numbers_compile_nothing():
    traces = []

    @jax.jit
    def whole(noise, steps, weights, text):
        traces.append("whole")
        return sample(guided(toy_velocity, weights, text), noise, steps)

    @jax.jit
    def step(step, state, weights, text):
        traces.append("step")
        return denoise_step(step, state, guided(toy_velocity, weights, text))

    results = []
    for solver, shift, scale, boundary, seed in [
        ("unipc", 3.0, 4.0, 0.9, 0),
        ("euler", 12.0, 1.5, 0.5, 7),
        ("dpm", 5.0, 6.0, 0.0, 2**32 - 1),
    ]:
        steps = with_guidance(steps_of(solver, 4, shift), scale, scale / 2, boundary)
        results.append(whole(noise_of(seed), steps, [WEIGHTS, LOW_WEIGHTS], [TEXT * scale, NEGATIVE]))
        state = init_state(noise_of(seed))
        for i in range(len(steps)):
            state = step(steps[i], state, [WEIGHTS, LOW_WEIGHTS], [TEXT * scale, NEGATIVE])
        same(results[-1], state.latents)
    assert traces == ["whole", "step"]
    assert whole._cache_size() == step._cache_size() == 1
    assert jnp.abs(results[0] - results[1]).max() > 0.1 < jnp.abs(results[1] - results[2]).max()


# --- guidance and experts


def test_guide_in_float32():
    cond, uncond = jnp.array([[1.0, 2.0]], jnp.bfloat16), jnp.array([[0.5, -1.0]], jnp.bfloat16)
    assert guide(cond, uncond, 5.0).tolist() == [[3.0, 14.0]]
    assert guide(cond, uncond, 1.0).dtype == jnp.float32
    np.testing.assert_array_equal(guide(cond, uncond, 1.0), cond.astype(jnp.float32))


def test_both_ways_of_guidance_are_the_two_branches_apart():
    step, latents = with_guidance(steps_of("unipc"), 4.0)[2], noise_of()
    expected = guide(
        toy_velocity(latents, jnp.full(2, step.timestep), TEXT, WEIGHTS),
        toy_velocity(latents, jnp.full(2, step.timestep), NEGATIVE, WEIGHTS),
        4.0,
    )
    for together in (True, False):
        np.testing.assert_allclose(guided(toy_velocity, [WEIGHTS], [TEXT, NEGATIVE], together=together)(latents, step), expected, atol=1e-6)


def test_branches_may_be_any_pytree():
    velocity = lambda latents, timestep, branch, weights: toy_velocity(latents, timestep, branch["text"] + branch["image"], weights)
    branches = [{"text": TEXT, "image": NEGATIVE}, {"text": NEGATIVE, "image": NEGATIVE}]
    step, latents = with_guidance(steps_of("unipc"), 4.0)[2], noise_of()
    both, apart = (guided(velocity, [WEIGHTS], branches, together=together)(latents, step) for together in (True, False))
    np.testing.assert_allclose(both, apart, atol=1e-6)


def test_the_high_noise_expert_rules_above_the_boundary():
    steps = with_guidance(unipc_steps(unipc_schedule(40, 12.0)), 4.0, 3.0, 0.875)
    assert steps.high_noise.tolist() == [True] * 26 + [False] * 14
    assert steps.guidance_scale.tolist() == [4.0] * 26 + [3.0] * 14
    assert with_guidance(steps, 3.5, boundary_ratio=0.9).guidance_scale.tolist() == [3.5] * 40
    assert with_guidance(steps, 3.5, boundary_ratio=1.0).high_noise.sum() == 0
    assert with_guidance(steps, 3.5).high_noise.all()
    at_boundary = with_guidance(euler_steps(given_schedule(timesteps=[1000.0, 875.0, 874.9])), 1.0, boundary_ratio=0.875)
    assert at_boundary.high_noise.tolist() == [True, True, False]


def test_experts_switch_inside_the_scan():
    steps = with_guidance(steps_of("unipc", 8, 12.0), 4.0, 3.0, 0.875)
    assert 0 < steps.high_noise.sum() < 8
    predict = guided(toy_velocity, [WEIGHTS, LOW_WEIGHTS], [TEXT, NEGATIVE])
    state = init_state(noise_of())
    for i in range(8):
        alone = guided(toy_velocity, [WEIGHTS if steps.high_noise[i] else LOW_WEIGHTS], [TEXT, NEGATIVE])
        state = denoise_step(steps[i], state, alone)
    np.testing.assert_allclose(jax.jit(lambda noise, steps: sample(predict, noise, steps))(noise_of(), steps), state.latents, atol=1e-6)


def test_one_expert_is_computed_a_step_also_under_vmap():
    """`lax.cond` must stay a conditional: as a select it would run both 14B experts at every step."""
    steps = with_guidance(steps_of("unipc"), 4.0, 3.0, 0.875)
    predict = guided(toy_velocity, [WEIGHTS, LOW_WEIGHTS], [TEXT, NEGATIVE])
    noises = jnp.stack([noise_of(seed) for seed in range(3)])
    compiled = jax.jit(lambda noises, steps: jax.vmap(lambda noise: sample(predict, noise, steps))(noises)).lower(noises, steps).compile()
    assert "conditional" in compiled.as_text()


def test_a_bfloat16_model_leaves_the_state_float32():
    velocity = lambda *args: toy_velocity(*args).astype(jnp.bfloat16)
    steps = with_guidance(steps_of("unipc"), 4.0)
    exact = sample(guided(toy_velocity, [WEIGHTS], [TEXT, NEGATIVE]), noise_of(), steps)
    rounded = sample(guided(velocity, [WEIGHTS], [TEXT, NEGATIVE]), noise_of(), steps)
    assert rounded.dtype == jnp.float32
    assert 0 < jnp.abs(rounded - exact).max() < 0.1
    assert (rounded != rounded.astype(jnp.bfloat16).astype(jnp.float32)).any()


# --- known frames


def test_token_timesteps():
    mask = jnp.ones((2, 1, 3, 4, 6), jnp.float32).at[:, :, 0].set(0)
    tokens = token_timesteps(937.0, mask)
    assert tokens.shape == (2, 3 * 2 * 3)
    assert tokens[:, :6].max() == 0
    assert (tokens[:, 6:] == 937.0).all()
    assert (token_timesteps(937.0, jnp.ones_like(mask)) == 937.0).all()


def test_first_frame_stays_and_the_rest_is_what_diffusers_does():
    """diffusers mixes the image into each step's input and into the result, and steps the latents unmixed."""
    image, noise = 0.1 * noise_of(5, (2, 3, 1, 4, 4)), noise_of()
    known = first_frame(image, 2)
    steps = with_guidance(steps_of("unipc"), 4.0)
    predict = guided(toy_velocity, [WEIGHTS], [TEXT, NEGATIVE], mask=known.mask)
    ours = jax.jit(lambda noise, steps: sample(predict, noise, steps, known=known))(noise, steps)
    np.testing.assert_array_equal(ours[:, :, :1], image)
    state = init_state(noise)
    for i in range(len(steps)):
        mixed = (1 - known.mask) * image + known.mask * state.latents
        state = solver_step(steps[i], state, predict(mixed, steps[i]))
    expected = state.latents[:, :, 1:]
    assert jnp.linalg.norm(ours[:, :, 1:] - expected) <= 1e-6 * jnp.linalg.norm(expected)


def test_a_mask_of_ones_is_no_mask():
    steps, noise = with_guidance(steps_of("unipc"), 4.0), noise_of()
    per_token = guided(toy_velocity, [WEIGHTS], [TEXT, NEGATIVE], mask=jnp.ones((1, 1, 2, 4, 4), jnp.float32))
    np.testing.assert_allclose(
        sample(per_token, noise, steps), sample(guided(toy_velocity, [WEIGHTS], [TEXT, NEGATIVE]), noise, steps), atol=1e-6
    )


def test_known_may_be_of_one_item_and_any_frames():
    known = Known(jnp.full((1, 3, 1, 4, 4), 2.0, jnp.float32), jnp.ones((1, 1, 2, 4, 4), jnp.float32).at[:, :, 1].set(0))
    latents = sample(guided(toy_velocity, [WEIGHTS], [TEXT], mask=known.mask), noise_of(), steps_of("dpm"), known=known)
    assert (latents[:, :, 1] == 2.0).all()
    assert (latents[:, :, 0] != 2.0).any()


# --- noise


def test_noise_depends_on_seed_and_video_alone():
    batch = initial_noise(video_keys([7, 8], 2), SHAPE[1:])
    assert batch.shape == (4, *SHAPE[1:])
    np.testing.assert_array_equal(batch[2], initial_noise(video_keys(8), SHAPE[1:])[0])
    np.testing.assert_array_equal(batch[1], initial_noise(video_keys(7, 3), SHAPE[1:])[1])
    assert len({float(video[0, 0, 0, 0]) for video in batch}) == 4
    assert (video_keys(5)[0] == jax.random.fold_in(jax.random.key(5), 0)).all()


def test_noise_is_standard_normal():
    noise = initial_noise(video_keys(0), (16, 8, 32, 32))
    assert noise.dtype == jnp.float32
    assert abs(float(noise.mean())) < 0.01
    assert abs(float(noise.std()) - 1) < 0.01


def test_fresh_noise_does_not_depend_on_the_batch():
    steps = dmd_steps(given_schedule(timesteps=[1000.0, 757.0, 522.0]))
    keys = video_keys([1, 2])
    run = lambda keys, text: sample(guided(toy_velocity, [WEIGHTS], [text]), initial_noise(keys, SHAPE[1:]), steps, keys=keys)
    np.testing.assert_allclose(run(keys, TEXT)[1:], run(keys[1:], TEXT[1:]), atol=1e-6)


def test_add_noise():
    video, noise = jnp.full((1, 4), 2.0, jnp.float32), jnp.full((1, 4), -1.0, jnp.float32)
    np.testing.assert_allclose(add_noise(video, noise, 0.25), np.full((1, 4), 1.25), rtol=1e-6)
    np.testing.assert_array_equal(add_noise(video, noise, 0.0), video)
    np.testing.assert_array_equal(add_noise(video, noise, 1.0), noise)


# --- errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: unipc_schedule(0, 3.0), "at least 1 step; got 0"),
        (lambda: dpm_schedule(-2, 3.0), "at least 1 step; got -2"),
        (lambda: euler_schedule(4, 0.0), "above 0 .*got 0.0"),
        (lambda: unipc_schedule(4, -3.0), "above 0 .*got -3"),
        (lambda: unipc_schedule(4, float("nan")), "above 0 .*got nan"),
        (lambda: unipc_schedule(50, 1e5), "fall strictly .*smaller shift"),
        (lambda: sampler._check_grid("offical"), '"diffusers" or "official"; got "offical"'),
        (lambda: given_schedule(), "needs sigmas or timesteps"),
        (lambda: given_schedule([0.5, 0.75]), "fall strictly .*got 0.5, 0.75, 0"),
        (lambda: given_schedule([0.9, 0.5, 0.5]), "fall strictly"),
        (lambda: given_schedule([1000.0, 750.0]), "at most 1"),
        (lambda: given_schedule([0.5, 0.0]), "fall strictly"),
        (lambda: given_schedule([]), "n >= 1 timesteps"),
        (lambda: given_schedule([0.5, 0.2], timesteps=[500.0]), "n \\+ 1 sigmas"),
        (lambda: given_schedule(timesteps=[1000.0, 500.0], shift=3.0), "not shifted; got shift=3"),
        (lambda: partial_schedule(unipc_schedule(50, 3.0), 0.01), "0.02 to 1; got 0.01"),
        (lambda: partial_schedule(unipc_schedule(50, 3.0), 1.5), "0.02 to 1; got 1.5"),
        (lambda: with_guidance(steps_of("unipc"), 4.0, 3.0, 875.0), "lies in 0..1; got 875"),
        (lambda: with_guidance(steps_of("unipc"), 4.0, boundary_ratio=-0.1), "lies in 0..1; got -0.1"),
        (lambda: with_guidance(steps_of("unipc"), 4.0, 3.0), "guidance_scale_2=3.0 .*boundary_ratio"),
        (lambda: guided(toy_velocity, [], [TEXT]), "experts must be one or two, in a list; got 0"),
        (lambda: guided(toy_velocity, [WEIGHTS], [TEXT] * 3), "branches must be one or two, in a list; got 3"),
        (lambda: sample(guided(toy_velocity, [WEIGHTS], [TEXT]), noise_of(), dmd_steps(given_schedule([1.0, 0.5]))), "need keys="),
        (lambda: video_keys(-1), "0..2\\^32 - 1.*got seeds \\[-1\\]"),
        (lambda: video_keys(2**32), "0..2\\^32 - 1"),
        (lambda: video_keys([]), "at least one"),
        (lambda: video_keys(3, 0), "0 videos"),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
