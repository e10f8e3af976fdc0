"""Softmax attention as plain functions of (q, k, v).

Models take an `Attend` as an argument and never ask where it runs. `attention` is the default: the platform's kernel where
one fits (kernels.py), else it writes the scores out where they are small and never holds more than a block of them where they
are not. Its pieces are here for attention over parts of the keys, on this device or from another one: `partial_attention`
of each part, `merge`, `finish`.
"""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Int

from wanjax.kernels import Partial, finish, kernels, merge, on_platform

WRITTEN_OUT = 1 << 26
"""Scores of up to so many numbers (256 MB) are written out whole."""
QUERIES, KEYS = 1024, 1024
"""Block sizes of `blocked_attention`: at 40 heads a block of scores takes 160 MB."""


@runtime_checkable
class Attend(Protocol):
    """softmax(q k^T / sqrt(d)) v over all keys, or over the first `valid` ones; arrays are (batch, sequence, heads, head_dim)."""

    def __call__(
        self, q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], valid: int | None = None
    ) -> Float[Array, "b s n d"]: ...


def attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], valid: int | None = None
) -> Float[Array, "b s n d"]:
    """softmax(q k^T / sqrt(d)) v with float32 scores and softmax, in the dtype of q; keys from `valid` on are left out."""
    k, v = k[:, :valid], v[:, :valid]
    b, s, n, _ = q.shape
    plain = plain_attention if b * n * s * k.shape[1] <= WRITTEN_OUT else blocked_attention
    return on_platform({platform: kernel.whole for platform, kernel in kernels(q, k).items()}, plain, q, k, v)


def plain_attention(q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"]) -> Float[Array, "b s n d"]:
    """`attention` with all scores at once."""
    scores = jnp.einsum("bsnd,blnd->bnsl", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bnsl,blnd->bsnd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(q.dtype)


def blocked_attention(
    q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], *, queries: int = QUERIES, keys: int = KEYS
) -> Float[Array, "b s n d"]:
    """`attention` with the scores of `queries` x `keys` pairs at a time, recomputed in the backward pass.

    Blocks are cut off the whole: what remains is a smaller block, so nothing is padded and nothing is masked.
    """

    return finish(partial_in_blocks(q, k, v, None, queries, keys), q.dtype)


def partial_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
) -> Partial:
    """The part of attention that these keys have, with the part `before` of others; only the first `valid` keys count, maybe none."""
    fast = {platform: kernel.part for platform, kernel in kernels(q, k).items()}
    return on_platform(fast, _part, q, k, v, valid, before)


def last_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
) -> Float[Array, "b s n d"]:
    """`partial_attention` of the last keys, which makes the attention whole."""
    fast = {platform: kernel.whole for platform, kernel in kernels(q, k).items()}
    return on_platform(fast, lambda *inputs: finish(_part(*inputs), q.dtype), q, k, v, valid, before)


def _part(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None,
    before: Partial | None,
) -> Partial:
    """`partial_attention` in plain JAX."""
    part = partial_in_blocks(q, k, v, valid)
    return part if before is None else merge(before, part)


def partial_in_blocks(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> Partial:
    """`partial_attention` in plain JAX, `queries` x `keys` scores at a time."""
    if q.shape[1] > queries:
        return _in_blocks(lambda q: partial_in_blocks(q, k, v, valid, queries, keys), q, queries)
    whole = k.shape[1]
    size = min(keys, whole)
    blocks = whole // size
    some = jax.checkpoint(_some_keys)
    if blocks == 1:
        result = some(q, k[:, :size], v[:, :size], valid)
    else:
        cut = lambda x: rearrange(x[:, : blocks * size], "b (m l) n d -> m b l n d", m=blocks)
        first = jnp.arange(blocks) * size

        def step(result: Partial, block: tuple[Array, Array, Array]) -> tuple[Partial, None]:
            k, v, first = block
            return merge(result, some(q, k, v, None if valid is None else valid - first)), None

        result, _ = lax.scan(step, nothing(q), (cut(k), cut(v), first))
    if rest := whole - blocks * size:
        left = None if valid is None else valid - blocks * size
        result = merge(result, some(q, k[:, -rest:], v[:, -rest:], left))
    return result


def nothing(q: Float[Array, "b s n d"]) -> Partial:
    """Attention over no keys, which merges with any other and changes nothing."""
    zero = q.astype(jnp.float32) * 0
    return Partial(zero, zero[..., 0], jnp.full_like(zero[..., 0], -jnp.inf))


def _some_keys(q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"], valid: Int[Array, ""] | None) -> Partial:
    """`partial_attention` at once."""
    scores = jnp.einsum("bsnd,blnd->bsnl", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    if valid is not None:
        scores = jnp.where(jnp.arange(k.shape[1]) < valid, scores, -jnp.inf)
    # Whatever is subtracted cancels, so no gradient goes through it.
    top = lax.stop_gradient(jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top)[..., None])
    out = jnp.einsum("bsnl,blnd->bsnd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return Partial(out, jnp.sum(weights, axis=-1), top)


def _in_blocks(rows: Callable[[Array], Partial], q: Float[Array, "b s n d"], size: int) -> Partial:
    """A function of queries over blocks of them, then over what remains."""
    count = q.shape[1] // size
    blocks = rearrange(q[:, : count * size], "b (m s) n d -> m b s n d", m=count)
    parts = [jax.tree.map(lambda x: rearrange(x, "m b s ... -> b (m s) ..."), lax.map(jax.checkpoint(rows), blocks))]
    if q.shape[1] % size:
        parts.append(rows(q[:, count * size :]))
    return jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)
