"""The TPU kernels, interpreted here, against plain attention in float64; and that they are what programs for a TPU use."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import kernels
from wanjax.attention import attention, last_attention, partial_attention, plain_attention
from wanjax.kernels import block_sizes, finish, flash, flash_part, rotations
from wanjax.transformer import Rope, rope_table, rotate

SIZES = [(300, 515), (256, 1024), (700, 1100), (1500, 2300)]  # neither, both, and one of several blocks whole; rows in two turns


def drawn(queries: int, keys: int, dtype=jnp.float32, loud: float = 1.0, heads: int = 2, dim: int = 128):
    shapes = ((1, queries, heads, dim), (1, keys, heads, dim), (1, keys, heads, dim))
    q, k, v = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i, shape in enumerate(shapes))
    return q * jnp.asarray(loud, dtype), k, v


def exact(q, k, v) -> np.ndarray:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("bsnd,blnd->bnsl", q, k) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnsl,blnd->bsnd", weights / weights.sum(-1, keepdims=True), v)


def distance(x, y) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - y) / np.linalg.norm(y))


@pytest.mark.parametrize("loud", [1, 12])
@pytest.mark.parametrize("sizes", SIZES)
def test_flash_is_attention(sizes, loud):
    """With scores of 60 the rounding of q k alone, in whichever order a CPU sums it, leaves plain attention 0.7e-6 to 2.0e-6 away."""
    given = drawn(*sizes, loud=loud)
    plain = distance(plain_attention(*given), exact(*given))
    assert distance(flash(*given, interpret=True), exact(*given)) <= (1e-6 if loud == 1 else max(2e-6, 1.1 * plain))


@pytest.mark.parametrize("loud", [1, 12])
def test_bfloat16_is_no_farther_than_plain(loud):
    given = drawn(300, 515, jnp.bfloat16, loud)
    ours = flash(*given, interpret=True)
    assert ours.dtype == jnp.bfloat16
    assert 0 < distance(ours, exact(*given)) <= distance(plain_attention(*given), exact(*given))


@pytest.mark.parametrize(("cut", "valid"), [(256, 515), (256, 300), (128, 128), (300, 257)])
def test_parts_go_on_from_parts(cut, valid):
    """Keys in two parts, of which `valid` count; the second part may be empty, and what is left out may be NaN."""
    q, k, v = drawn(300, 515)
    k, v = k.at[:, valid:].set(jnp.nan), v.at[:, valid:].set(jnp.nan)
    part = partial(flash_part, interpret=True)
    first = part(q, k[:, :cut], v[:, :cut], jnp.int32(valid))
    whole = part(q, k[:, cut:], v[:, cut:], jnp.int32(valid - cut), first)
    last = flash(q, k[:, cut:], v[:, cut:], jnp.int32(valid - cut), first, interpret=True)
    answer = exact(q, k[:, :valid], v[:, :valid])
    assert distance(finish(whole, q.dtype), answer) <= 1e-6
    assert distance(last, answer) <= 1e-6


def test_no_keys_at_all_are_zero():
    part = flash_part(*drawn(300, 515), jnp.int32(-7), interpret=True)
    assert not part.out.any()
    assert not part.total.any()
    assert not finish(part, jnp.float32).any()


def test_wide_heads_as_in_the_vae():
    given = drawn(300, 515, heads=1, dim=384)
    assert distance(flash(*given, interpret=True), exact(*given)) <= 1e-6


def test_rotation_is_that_of_plain_jax():
    x, rope = jax.random.normal(jax.random.key(0), (2, 300, 3 * 128)), rope_table((3, 10, 10), 128)
    np.testing.assert_allclose(kernels.rotate(x, *rope, interpret=True), rotate(x, rope), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tokens", [75600, 37800, 18900, 9450, 32760, 4095, 20280])
def test_blocks_pad_little_and_are_large(tokens):
    blocks = block_sizes(tokens, tokens)
    padded = lambda unit: -(-tokens // unit) * unit
    scores = padded(blocks.queries) * padded(blocks.last_keys)
    assert scores <= (1.01 if tokens != 20280 else 1.02) * tokens**2
    assert blocks.queries * blocks.keys >= 2**20  # so that a step of the grid is worth its start
    assert blocks.queries_at_once >= 512  # so that a turn of the loop is


@pytest.mark.parametrize("d", [128, 256, 384, 1024])
def test_blocks_are_whole_registers(d):
    for tokens in [*range(256, 6000, 61), 6240, 14400]:
        blocks = block_sizes(tokens, tokens, d)
        assert blocks.queries % kernels.LANES == blocks.keys % kernels.LANES == blocks.queries_at_once % kernels.SUBLANES == 0
        assert blocks.queries % blocks.queries_at_once == blocks.keys % blocks.keys_at_once == blocks.keys % blocks.last_keys == 0


def test_gradients_do_not_ask_the_kernel():
    """On the platform at hand the program is plain JAX's, and so are the gradients, whichever kernels there are."""
    given = drawn(300, 600, heads=1)
    loss = lambda attend: jax.grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv))), argnums=(0, 1, 2))(*given)
    parted = lambda q, k, v: last_attention(q, k[:, 300:], v[:, 300:], None, partial_attention(q, k[:, :300], v[:, :300]))
    for ours, plain in zip(loss(attention), loss(plain_attention), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-6)
    for ours, plain in zip(loss(parted), loss(plain_attention), strict=True):
        np.testing.assert_allclose(ours, plain, atol=1e-6)


def test_small_shapes_have_no_kernel():
    q, k, _ = drawn(300, 100)
    assert kernels.kernels(q, k) == {}
    assert kernels.kernels(q[..., :96], q[..., :96]) == {}
    assert set(kernels.kernels(q, q)) == {"tpu"}
    assert rotations(jnp.zeros((1, 300, 64)), jnp.zeros((300, 64))) == {}
    assert isinstance(rope_table((1, 2, 2), 64), Rope)
