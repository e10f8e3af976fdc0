"""The forms of a causal convolution, each for a platform or sizes of its own: the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanjax import vae_convs


def drawn(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("padding", [((1, 1), (1, 1)), ((0, 1), (2, 0))], ids=["centred", "uneven"])
@pytest.mark.parametrize(("frames", "cin"), [(3, 4), (6, 4), (5, 520), (9, 520)])
def test_all_forms_are_the_same(padding, frames, cin):
    x, kernel = drawn(2, frames, 5, 7, cin), drawn(3, 3, 3, cin, 3)
    once = vae_convs._causal_at_once(x, kernel, padding, 1)
    others = [
        vae_convs._causal_by_frames(x, kernel, padding, 1),
        vae_convs._causal_as_product(x, kernel, padding),
    ]
    for other in others:
        assert np.linalg.norm(other - once) <= 2e-6 * np.linalg.norm(once)
