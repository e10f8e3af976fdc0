"""Softmax attention as plain functions of (q, k, v).

Models take an `Attend` as an argument and never ask where it runs.
"""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@runtime_checkable
class Attend(Protocol):
    """softmax(q k^T / sqrt(d)) v over all keys; arrays are (batch, sequence, heads, head_dim)."""

    def __call__(self, q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"]) -> Float[Array, "b s n d"]: ...


def attention(q: Float[Array, "b s n d"], k: Float[Array, "b l n d"], v: Float[Array, "b l n d"]) -> Float[Array, "b s n d"]:
    """softmax(q k^T / sqrt(d)) v with float32 softmax, in the dtype of q."""
    scores = jnp.einsum("bsnd,blnd->bnsl", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(scores, axis=-1)
    return jnp.einsum("bnsl,blnd->bsnd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32).astype(q.dtype)
