"""The forms of a causal convolution, each for a platform or sizes of its own: the same numbers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import vae_blocks, vae_convs


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 1), (2, 0))], ids=["centred", "uneven"])
@pytest.mark.parametrize(("frames", "cin", "h"), [(1, 4, 5), (3, 4, 5), (6, 4, 5), (1, 520, 5), (5, 520, 5), (9, 520, 5), (8, 520, 6)])
def test_all_forms_are_the_same(padding, frames, cin, h):
    x, kernel = drawn(2, frames, h, 7, cin), drawn(3, 3, 3, cin, 3)
    once = vae_convs._causal_at_once(x, kernel, padding, 1)
    others = [
        vae_convs._causal_by_frames(x, kernel, padding, 1),
        vae_convs._causal_by_taps(x, kernel, padding),
    ]
    for other in others:
        assert other.shape == once.shape
        assert np.linalg.norm(other - once) <= 2e-6 * np.linalg.norm(once)


def test_gradients_of_wide_convolutions_are_those_of_one_convolution():
    x, kernel = drawn(1, 5, 8, 6, 520), drawn(3, 3, 3, 520, 2) / 100
    wanted = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(vae_convs._causal_at_once(x, kernel, ((1, 1), (1, 1)), 1))), (0, 1))(x, kernel)
    got = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(vae_convs._causal_by_frames(x, kernel, ((1, 1), (1, 1)), 1))), (0, 1))(x, kernel)
    for a, b in zip(got, wanted, strict=True):
        assert np.linalg.norm(a - b) <= 4e-6 * np.linalg.norm(b)


@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 0), (1, 1))], ids=["whole", "a part with its edges"])
def test_both_ways_to_double_are_the_same(padding):
    """All quarters at once, or one after the other; values and gradients."""
    x, kernel = drawn(2, 3, 5, 7, 8), drawn(3, 3, 8, 6)
    forms = [lambda x, kernel, form=form: form(x, kernel, padding) for form in (vae_convs._double_at_once, vae_convs._double_in_turn)]
    a, b = (form(x, kernel) for form in forms)
    assert a.shape == b.shape
    np.testing.assert_allclose(a, b, atol=2e-5)
    gradient = lambda form: jax.grad(lambda x, kernel: jnp.sum(jnp.sin(form(x, kernel))), (0, 1))(x, kernel)
    for a, b in zip(*map(gradient, forms), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.parametrize("cin", [256, 512])
def test_a_scan_has_no_sums_of_kernels_made_before_it(cin):
    """They would be two thirds of the kernel more of a convolution, and 16/9 of one of a doubling."""
    weights = jax.ShapeDtypeStruct((3, 3, 3, cin, cin), jnp.float32), jax.ShapeDtypeStruct((3, 3, 512, 256), jnp.float32)

    def scanned(chunks, kernel, doubling):
        def one(carry, x):
            y = vae_convs._causal_by_frames(x, kernel, ((1, 1), (1, 1)), 1)
            up = vae_convs._double_in_turn(jnp.tile(y, 512 // cin), doubling, ((1, 1), (1, 1)))
            return carry + jnp.sum(up), None

        return jax.lax.scan(one, jnp.zeros(()), chunks)[0]

    program = jax.jit(scanned).lower(jax.ShapeDtypeStruct((4, 1, 6, 8, 8, cin), jnp.float32), *weights).compile().as_text()
    carried = [
        line for line in program.splitlines() if " while(" in line and f"f32[3,3,3,{cin},{cin}]" in line and "f32[3,3,512,256]" in line
    ]
    assert len(carried) == 1
    assert f"f32[3,3,{cin},{cin}]" not in carried[0].split(" while(")[0]
    assert not re.search(r"f32\[(2,)+512,", carried[0].split(" while(")[0])


def test_a_wide_convolution_holds_no_second_kernel():
    """What is made of the kernels of all convolutions would be computed before anything else, and lie in memory together."""
    shapes = jax.ShapeDtypeStruct((1, 6, 16, 8, 512), jnp.float32), jax.ShapeDtypeStruct((3, 3, 3, 512, 512), jnp.float32)

    def both(x, kernel, other):
        return vae_convs._causal_by_frames(vae_convs._causal_by_frames(x, kernel, ((1, 1), (1, 1)), 1)[:, :3], other, ((1, 1), (1, 1)), 1)

    memory = jax.jit(both).lower(*shapes, shapes[1]).compile().memory_analysis()
    kernel_bytes = np.prod(shapes[1].shape) * 4
    assert memory is not None
    assert memory.temp_size_in_bytes < kernel_bytes


def test_a_kernel_s_gradient_is_made_tap_by_tap():
    """What comes back once padded, cut and turned (4 times the frames' size), rather than so for all nine taps (12 times)."""
    x, kernel = jax.ShapeDtypeStruct((4, 64, 64, 32), jnp.float32), jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)
    loss = lambda x, kernel: jnp.sum(jnp.sin(vae_convs._conv2d_for_cpu(x, kernel, ((1, 1), (1, 1)), 1)))
    memory = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernel).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 6 * np.prod(x.shape) * 4


@pytest.mark.parametrize(
    ("size", "kernel", "padding", "stride"),
    [
        ((6, 7), (3, 3), ((1, 1), (1, 1)), 1),
        ((6, 7), (3, 3), ((2, 0), (0, 1)), 1),
        ((5, 6), (2, 2), ((0, 0), (0, 0)), 1),
        ((8, 6), (3, 3), ((0, 1), (0, 1)), 2),
        ((7, 10), (3, 3), ((0, 1), (0, 1)), 2),
        ((7, 8), (1, 3), ((0, 0), (1, 1)), 3),
    ],
)
def test_gradients_of_a_convolution_are_the_compiler_s_own(size, kernel, padding, stride):
    """A stride may leave rows and columns that nothing sees."""
    x, kernel = drawn(2, *size, 4), drawn(*kernel, 4, 5)
    gradient = lambda conv: jax.grad(lambda x, kernel: jnp.sum(jnp.sin(conv(x, kernel, padding, stride))), (0, 1))(x, kernel)
    for a, b in zip(gradient(vae_convs._conv2d_for_cpu), gradient(vae_convs._conv2d), strict=True):
        assert np.linalg.norm(a - b) <= 2e-6 * np.linalg.norm(b)


def test_a_gradient_of_pairs_of_frames_adds_halves():
    """Of strided slices it would add four arrays as large as the frames: 11 times their size; measured here: 7 times."""
    history, x = (jax.ShapeDtypeStruct((1, frames, 64, 64, 96), jnp.float32) for frames in (2, 4))
    conv = lambda history, x, kernel: vae_convs._causal_by_frames(jnp.concatenate([history, x], 1), kernel, ((1, 1), (1, 1)), 1)
    backward = jax.jit(lambda history, x, kernel, g: jax.vjp(conv, history, x, kernel)[1](g))
    memory = backward.lower(history, x, jax.ShapeDtypeStruct((3, 3, 3, 96, 96), jnp.float32), x).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 9 * np.prod(x.shape) * 4


def test_a_norm_of_nothing_has_a_gradient():
    """Frames before the first are zero where all chunks go through alike."""
    x = jnp.concatenate([jnp.zeros((1, 8)), drawn(1, 8)])
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(vae_blocks.rms_norm(x, jnp.ones(8)))[1]))(x)
    assert np.isfinite(gradient).all()
    assert not gradient[0].any()
    assert gradient[1].any()
