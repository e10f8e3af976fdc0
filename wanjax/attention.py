"""Softmax attention as plain functions of (q, k, v).

Models take an `Attend` as an argument and never ask where it runs. `attention` is the default: it writes the scores out
where they are small and never holds more than a block of them where they are not. Its pieces are here for attention
over parts of the keys, on this device or from another one: `partial_attention` of each part, `merge`, `finish`.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jaxtyping import Array, Float, Float32, Int

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
    if b * n * s * k.shape[1] <= WRITTEN_OUT:
        return plain_attention(q, k, v)
    return blocked_attention(q, k, v)


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

    return finish(partial_attention(q, k, v, queries=queries, keys=keys), q.dtype)


class Partial(NamedTuple):
    """Attention over some of the keys: the sum of exp(score - top) v, the sum of exp(score - top), and the largest score."""

    out: Float32[Array, "b s n d"]
    total: Float32[Array, "b s n"]
    top: Float32[Array, "b s n"]


def partial_attention(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    *,
    queries: int = QUERIES,
    keys: int = KEYS,
) -> Partial:
    """The part of attention that these keys have, `queries` x `keys` scores at a time; only the first `valid` keys count, maybe none."""
    if q.shape[1] > queries:
        return _in_blocks(lambda q: partial_attention(q, k, v, valid, queries=queries, keys=keys), q, queries)
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


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over the keys of both; exact, in float32, in any order."""
    top = jnp.maximum(a.top, b.top)
    of = lambda part: jnp.where(part.top == -jnp.inf, 0, jnp.exp(part.top - jnp.where(top == -jnp.inf, 0, top)))
    x, y = of(a), of(b)
    return Partial(a.out * x[..., None] + b.out * y[..., None], a.total * x + b.total * y, top)


def finish(part: Partial, dtype: jnp.dtype) -> Float[Array, "b s n d"]:
    """The attention of a part that is the whole; zero where there were no keys."""
    return (part.out / jnp.where(part.total == 0, 1, part.total)[..., None]).astype(dtype)


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
