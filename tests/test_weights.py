"""Names, layouts and stacks between modules and checkpoint tensors."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array, Float

from wanjax.weights import expected, fill, stored, to_tensors


class Map(eqx.Module):
    weight: Float[Array, "*layer cin cout"] = stored("cout cin -> cin cout")
    bias: Float[Array, "*layer cout"] | None = None


class Block(eqx.Module):
    q: Map = stored(name="attn.to_q.0")
    rows: Float[Array, "*layer cin nj"] = stored("(n j pair) cin -> cin (n pair j)")
    gain: Float[Array, "*layer c"] = stored("c 1 1 -> c")


class Model(eqx.Module):
    patch: Float[Array, "cin cout"] = stored("cout c ph pw -> (c ph pw) cout", name="patch_embedding.weight")
    blocks: Block = stored(stacked=True)
    parts: tuple[Map, ...]
    absent: Map | None
    size: int = eqx.field(static=True)


SIZES = {"pair": 2, "j": 3, "ph": 2, "pw": 2, "unused": 7}


def random_model(dtype=jnp.float32) -> Model:
    numbers = iter(jax.random.split(jax.random.key(0), 20))
    draw = lambda *shape: jax.random.normal(next(numbers), shape, dtype)
    block = Block(Map(draw(3, 4, 5), draw(3, 5)), draw(3, 4, 12), draw(3, 6))
    return Model(draw(8, 4), block, (Map(draw(4, 2)), Map(draw(2, 3), draw(3))), None, 9)


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(x.dtype == y.dtype and bool((x == y).all()) for x, y in leaves)


def test_names_and_file_shapes_of_a_template():
    template = jax.eval_shape(random_model)
    layers = [{f"blocks.{i}.attn.to_q.0.weight": (5, 4), f"blocks.{i}.attn.to_q.0.bias": (5,)} for i in range(3)]
    layers += [{f"blocks.{i}.rows": (12, 4), f"blocks.{i}.gain": (6, 1, 1)} for i in range(3)]
    names = {name: shape for layer in layers for name, shape in layer.items()}
    names |= {"patch_embedding.weight": (4, 2, 2, 2), "parts.0.weight": (2, 4), "parts.1.weight": (3, 2), "parts.1.bias": (3,)}
    assert expected(template, SIZES) == names


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_tensors_and_back_is_the_identity(dtype):
    model = random_model(dtype)
    tensors = to_tensors(model, SIZES)
    assert {name: tensor.shape for name, tensor in tensors.items()} == expected(model, SIZES)
    assert same(fill(jax.eval_shape(random_model), tensors, SIZES), model)


def test_a_layout_says_where_each_number_goes():
    tensors = to_tensors(random_model(), SIZES)
    tensors["blocks.1.rows"] = np.arange(48, dtype=np.float32).reshape(12, 4)
    rows = fill(random_model(), tensors, SIZES).blocks.rows[1]
    assert rows[0].tolist() == [0, 8, 16, 4, 12, 20, 24, 32, 40, 28, 36, 44]


def test_traced_arrays_fill_a_template():
    model = random_model()
    tensors = {name: jnp.asarray(tensor) for name, tensor in to_tensors(model, SIZES).items()}
    assert same(jax.jit(lambda tensors: fill(model, tensors, SIZES))(tensors), model)


def test_dtype_is_one_for_all_or_by_name():
    model = random_model()
    tensors = to_tensors(model, SIZES)
    assert {leaf.dtype for leaf in jax.tree.leaves(fill(model, tensors, SIZES, dtype=jnp.bfloat16))} == {jnp.dtype("bfloat16")}
    kept = fill(model, tensors, SIZES, dtype=lambda name: jnp.float32 if "gain" in name else jnp.bfloat16)
    assert kept.blocks.gain.dtype == jnp.float32
    assert kept.blocks.rows.dtype == jnp.bfloat16


def test_everything_that_does_not_fit_is_in_one_error():
    tensors = to_tensors(random_model(), SIZES)
    del tensors["blocks.2.gain"]
    tensors["parts.1.bias"] = np.zeros(4, np.float32)
    tensors["extra"] = np.zeros(1, np.float32)
    problems = r"missing 1 \(blocks.2.gain\); unused 1 \(extra\); wrong shape 1 \(parts.1.bias: file \(4,\), model \(3,\)\)\."
    with pytest.raises(ValueError, match=f"^vae/ does not fit Model: {problems}$"):
        fill(random_model(), tensors, SIZES, what="vae/")
