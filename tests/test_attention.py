"""Attention in blocks and in parts equals attention written out, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax.attention import attention, blocked_attention, finish, merge, nothing, partial_attention, partial_in_blocks, plain_attention


def drawn(s, l, seed=0, scale=1.0, heads=3, dim=8, dtype=jnp.float32):
    """q, k and v; `scale` makes the scores large."""
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(2, s, heads, dim), (2, l, heads, dim), (2, l, heads, dim)]
    q, k, v = (jax.random.normal(key, shape, jnp.float32) for key, shape in zip(keys, shapes, strict=True))
    return (scale * q).astype(dtype), k.astype(dtype), v.astype(dtype)


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def with_gradients(function):
    """A weighted sum of the outputs, its gradients, and the outputs."""
    weigh = lambda out: jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))
    return jax.jit(lambda *qkv: (function(*qkv), *jax.grad(lambda *qkv: weigh(function(*qkv)), argnums=(0, 1, 2))(*qkv)))


def written_out(q, k, v):
    """Attention by its formula, in the dtype of q."""
    scores = jnp.einsum("bsnd,blnd->bnsl", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bnsl,blnd->bsnd", jax.nn.softmax(scores, axis=-1), v)


REFERENCE = with_gradients(written_out)


def exact(given):
    """Outputs and gradients in float64."""
    with jax.enable_x64(True):
        return [np.asarray(x) for x in REFERENCE(*(np.asarray(x, np.float64) for x in given))]


@pytest.mark.parametrize("scale", [1.0, 30.0], ids=["usual", "large logits"])
@pytest.mark.parametrize(("s", "l", "queries", "keys"), [(37, 37, 8, 16), (16, 48, 16, 16), (33, 9, 32, 4)])
def test_blocks_change_nothing(s, l, queries, keys, scale):
    """Large logits amplify the rounding of every score, which is chance: there the measure is plain attention's mean error over draws."""
    blocked = with_gradients(lambda *qkv: blocked_attention(*qkv, queries=queries, keys=keys))
    plain = with_gradients(plain_attention)
    draws = [drawn(s, l, seed, scale) for seed in range(8)]
    errors = np.array([[distances(function(*given), exact(given)) for function in (blocked, plain)] for given in draws]).mean(0)
    assert (errors[0] <= np.maximum(1e-6, 1.5 * errors[1])).all(), errors


def distances(found, wanted):
    """Of the output and each gradient."""
    return [distance(a, b) for a, b in zip(found, wanted, strict=True)]


def test_parts_merge_in_any_order():
    q, k, v = drawn(9, 30)
    cuts = [slice(0, 7), slice(7, 8), slice(8, 30)]
    parts = [partial_attention(q, k[:, cut], v[:, cut]) for cut in cuts]
    whole = plain_attention(q, k, v)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        total = nothing(q)
        for i in order:
            total = merge(total, parts[i])
        assert distance(finish(total, q.dtype), whole) <= 1e-6


@pytest.mark.parametrize("valid", [0, 1, 13, 16, 17, 40, 45])
def test_only_valid_keys_count(valid):
    q, k, v = drawn(9, 40)
    some = jax.jit(lambda q, k, v, n: finish(partial_in_blocks(q, k, v, n, keys=16), q.dtype))(q, k, v, jnp.int32(valid))
    assert np.isfinite(some).all()
    if valid == 0:
        assert not some.any()
    else:
        assert distance(some, plain_attention(q, k[:, :valid], v[:, :valid])) <= 1e-6
        assert distance(attention(q, k, v, valid), plain_attention(q, k[:, :valid], v[:, :valid])) <= 1e-6


def test_no_keys_have_no_gradient():
    q, k, v = drawn(4, 6)
    loss = lambda q, k, v: jnp.sum(finish(partial_attention(q, k, v, jnp.int32(0)), q.dtype))
    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert not gradient.any()


def test_bfloat16_blocks_are_no_farther_from_float32_than_plain():
    given = drawn(200, 200, dtype=jnp.bfloat16, dim=32)
    exact = plain_attention(*(x.astype(jnp.float32) for x in given))
    blocked = blocked_attention(*given, queries=64, keys=64)
    assert blocked.dtype == jnp.bfloat16
    assert 0 < distance(blocked.astype(jnp.float32), exact) <= 1.02 * distance(plain_attention(*given).astype(jnp.float32), exact)


def test_large_attention_holds_only_blocks_of_scores():
    shape = jax.ShapeDtypeStruct((1, 14400, 1, 384), jnp.float32)
    compiled = jax.jit(attention).lower(shape, shape, shape).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 200e6  # the scores whole are 829 MB
