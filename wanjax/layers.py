"""The few layers that two models share: linear maps and norms, as weights and functions of them.

A linear map computes in the dtype of its weights; norms take their statistics in float32 and return the dtype of x.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from wanjax.weights import stored


class Linear(eqx.Module):
    """Weights of an affine map of the last axis."""

    weight: Float[Array, "cin cout"] = stored("cout cin -> cin cout")
    bias: Float[Array, " cout"] | None = None


class RMSNorm(eqx.Module):
    """Gain of a root-mean-square norm."""

    weight: Float[Array, " c"]


class LayerNorm(eqx.Module):
    """Gain and offset of a layer norm."""

    weight: Float[Array, " c"]
    bias: Float[Array, " c"]


def init_linear(key: PRNGKeyArray, cin: int, cout: int, *, bias: bool = True, dtype: DTypeLike = jnp.float32) -> Linear:
    """A linear map with uniform weights in +-1/sqrt(cin) and a zero bias."""
    weight = jax.random.uniform(key, (cin, cout), dtype, -1, 1) * cin**-0.5
    return Linear(weight, jnp.zeros(cout, dtype) if bias else None)


def linear(x: Float[Array, "*b cin"], weights: Linear) -> Float[Array, "*b cout"]:
    """x @ weight + bias in the dtype of the weights, rounded to it once."""
    dtype = weights.weight.dtype
    y = jnp.matmul(x.astype(dtype), weights.weight, preferred_element_type=jnp.float32)
    return (y if weights.bias is None else y + weights.bias.astype(jnp.float32)).astype(dtype)


def gelu(x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
    """The tanh form of GELU, computed in float32, in the dtype of x."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def silu(x: Float[Array, "*b c"]) -> Float[Array, "*b c"]:
    """x sigmoid(x), computed in float32, in the dtype of x."""
    return jax.nn.silu(x.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: Float[Array, "*b c"], weights: RMSNorm, eps: float) -> Float[Array, "*b c"]:
    """x / sqrt(mean(x^2) + eps) times the gain, computed in float32 and rounded once, to the dtype of the gain."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return (normed * weights.weight.astype(jnp.float32)).astype(weights.weight.dtype)


def layer_norm(x: Float[Array, "*b c"], eps: float, weights: LayerNorm | None = None) -> Float[Array, "*b c"]:
    """(x - mean) / sqrt(var + eps), with gain and offset when given; computed and returned in float32."""
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return normed if weights is None else normed * weights.weight.astype(jnp.float32) + weights.bias.astype(jnp.float32)
