"""Hand-written kernels, by platform: the only module that has any.

`kernels` gives the attention kernels that fit some shapes; attention.py has the same in plain JAX, for everywhere else and for
gradients. On a GPU it is cuDNN's. On a TPU it is `flash`, our own, because of what the libraries' splash kernel cannot do and a ring
needs: go on from an earlier part in float32, unnormalised; leave out a number of keys known only when it runs; and read heads where
the projections wrote them, side by side in a token's channels, so that no transpose stands around it.
"""

import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

LANES, SUBLANES = 128, 16
"""A TPU's registers: heads and blocks of keys are whole multiples of the one, blocks of queries of the other."""
QUERIES, KEYS = 4736, 1024
"""Queries and keys in a core's fast memory: a block is no larger, for heads of `LANES` channels."""
QUERIES_AT_ONCE, KEYS_AT_ONCE, LAST_KEYS = 1184, 512, 256
"""Those that are multiplied at once, written out; loops over them go through a block. Of the last keys, which do not fill one, fewer."""
ROWS = 256
"""Tokens that are rotated at once."""
MEMORY = 56 << 20
"""Bytes of fast memory that a kernel may take; a core of the smallest generation has 64 MiB."""
FEWEST = 256
"""Queries and keys below which a kernel is not worth calling."""
LOWEST = -1e30
"""The largest score where there are no keys; finite, so that differences of it are numbers."""


class Partial(NamedTuple):
    """Attention over some of the keys: the sum of exp(score - top) v, the sum of exp(score - top), and the largest score."""

    out: Float32[Array, "b s n d"]
    total: Float32[Array, "b s n"]
    top: Float32[Array, "b s n"]


class Kernel(NamedTuple):
    """Attention over the first `valid` keys together with a part `before`, either of which may be None: as (q, k, v, valid, before).

    `part` returns a part again, `whole` the attention.
    """

    whole: Callable[..., Float[Array, "b s n d"]]
    part: Callable[..., Partial]


def kernels(q: Float[Array, "b s n d"], k: Float[Array, "b l n d"]) -> dict[str, Kernel]:
    """The kernels for these shapes, by JAX's name of the platform they run on; none where plain JAX is as good."""
    found: dict[str, Kernel] = {}
    if min(q.shape[1], k.shape[1]) < FEWEST:
        return found
    if q.shape[3] % LANES == 0 and q.dtype in (jnp.bfloat16, jnp.float32):
        found["tpu"] = Kernel(flash, flash_part)
    if q.shape[3] <= LANES and q.shape[3] % 8 == 0 and q.dtype in (jnp.bfloat16, jnp.float16) and _have_gpu():
        found["cuda"] = Kernel(cudnn, cudnn_part)
    return found


def rotations(x: Float[Array, "b s c"], cos: Float32[Array, "s d"]) -> dict[str, Callable[..., Float[Array, "b s c"]]]:
    """The kernels that rotate heads of this width, by platform."""
    return {"tpu": rotate} if cos.shape[1] == LANES and x.shape[1] >= FEWEST else {}


def on_platform(found: Mapping[str, Callable[..., Any]], plain: Callable[..., Any], *inputs: Any) -> Any:
    """What `plain` computes, by the kernel of the platform that the program is for, where one is `found`; gradients are plain's."""
    if not found:
        return plain(*inputs)
    fast = {platform: partial(_with_gradients_of, plain, kernel) for platform, kernel in found.items()}
    return lax.platform_dependent(*inputs, default=plain, **fast)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _with_gradients_of(plain: Callable[..., Any], fast: Callable[..., Any], *inputs: Any) -> Any:
    """`fast`, which has no gradients of its own; `plain` is the same function."""
    return fast(*inputs)


_with_gradients_of.defvjp(
    lambda plain, fast, *inputs: (fast(*inputs), inputs),
    lambda plain, fast, inputs, gradient: jax.vjp(plain, *inputs)[1](gradient),
)


class Blocks(NamedTuple):
    """Sizes of a kernel's blocks, and of the pieces of a block that are multiplied at once."""

    queries: int
    keys: int
    queries_at_once: int
    keys_at_once: int
    last_keys: int


def block_sizes(queries: int, keys: int, d: int = LANES) -> Blocks:
    """The blocks for so many queries and keys: 75,600 tokens on 1, 2, 4 or 8 devices are padded by less than 1 % of the scores."""
    wide, whole = d // LANES, lambda size, unit: -(-size // unit) * unit
    most = min(QUERIES // wide // LANES * LANES, whole(queries, LANES))
    work = lambda block: whole(queries, block) + 200 * (-(-queries // block))
    block_q = min(range(LANES, most + 1, LANES), key=lambda block: (work(block), -block))
    block_k = min(KEYS // wide // LANES * LANES, whole(keys, KEYS_AT_ONCE))
    at_once = next(n for n in range(QUERIES_AT_ONCE // wide // SUBLANES * SUBLANES, 0, -SUBLANES) if block_q % n == 0)
    return Blocks(block_q, block_k, at_once, math.gcd(block_k, KEYS_AT_ONCE), math.gcd(block_k, LAST_KEYS))


# --- TPU ---


def flash(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
    *,
    interpret: bool = False,
) -> Float[Array, "b s n d"]:
    """Attention on a TPU core; `interpret` runs it anywhere, slowly."""
    (out,) = _flash(q, k, v, valid, before, finished=True, interpret=interpret)
    return rearrange(out, "b s (n d) -> b s n d", n=q.shape[2])


def flash_part(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
    *,
    interpret: bool = False,
) -> Partial:
    """A part of attention on a TPU core."""
    out, statistics = _flash(q, k, v, valid, before, finished=False, interpret=interpret)
    total, top = rearrange(statistics, "b n two s -> two b s n")
    return Partial(rearrange(out, "b s (n d) -> b s n d", n=q.shape[2]), total, top)


def _flash(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None,
    before: Partial | None,
    *,
    finished: bool,
    interpret: bool,
) -> tuple[Array, ...]:
    """The kernel over a grid of videos, heads, blocks of queries and blocks of keys; arrays keep heads in their channels."""
    b, s, n, d = q.shape
    length = k.shape[1]
    blocks = block_sizes(s, length, d)
    block_q, block_k, *_ = blocks
    merged = lambda x: rearrange(x, "b s n d -> b s (n d)")
    rows = pl.BlockSpec((None, block_q, d), lambda b, h, i, j, _: (b, i, h))
    columns = pl.BlockSpec((None, block_k, d), lambda b, h, i, j, _: (b, j, h))
    numbers = pl.BlockSpec((None, None, 2, block_q), lambda b, h, i, j, _: (b, h, 0, i))
    inputs, specs = [merged(q), merged(k), merged(v)], [rows, columns, columns]
    if before is not None:
        inputs += [merged(before.out), rearrange(jnp.stack(before[1:]), "two b s n -> b n two s")]
        specs += [rows, numbers]
    outputs = [jax.ShapeDtypeStruct((b, s, n * d), q.dtype if finished else jnp.float32)]
    if not finished:
        outputs.append(jax.ShapeDtypeStruct((b, n, 2, s), jnp.float32))
    grid = (b, n, pl.cdiv(s, block_q), pl.cdiv(length, block_k))
    kernel = partial(
        _flash_block,
        scale=d**-0.5 * math.log2(math.e),
        blocks=blocks,
        all_valid=valid is None and length % block_k == 0,
        continued=before is not None,
        finished=finished,
    )
    call = pl.pallas_call(
        kernel,
        out_shape=outputs,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=specs,
            out_specs=[rows] if finished else [rows, numbers],
            scratch_shapes=[pltpu.VMEM((block_q, width), jnp.float32) for width in (d, LANES, LANES)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * n * s * length * d, transcendentals=b * n * s * length, bytes_accessed=2 * b * n * d * (2 * s + 2 * length)
        ),
        interpret=interpret,
        name="flash" if finished else "flash_part",
    )
    counted = jnp.minimum(length if valid is None else valid, length)
    return tuple(call(counted.astype(jnp.int32).reshape(1), *inputs))


def _flash_block(
    valid: Any, q: Any, k: Any, v: Any, *refs: Any, scale: float, blocks: Blocks, all_valid: bool, continued: bool, finished: bool
) -> None:
    """One block of queries meets one block of keys.

    While the keys go by, the sums are in scratch memory: `out` (queries, d), `total` and `top` (queries, lanes; the same in every lane).
    `top` is of products that are not yet scaled: `scale` comes after the subtraction, in float32, on the way to exponents of base 2.
    """
    before, (result, *statistics), (out, total, top) = refs[: 2 * continued], refs[2 * continued : -3], refs[-3:]
    j, d = pl.program_id(3), q.shape[1]
    left = valid[0] - j * blocks.keys
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    dot = partial(lax.dot_general, preferred_element_type=jnp.float32, precision=exact)
    wide = lambda x, width: jnp.tile(x, (1, width // LANES))

    @pl.when(j == 0)
    def _() -> None:
        out[...] = before[0][...] if continued else jnp.zeros_like(out)
        if continued:
            spread = lambda row: jnp.broadcast_to(row, (LANES, row.shape[1])).T
            total[...], top[...] = spread(before[1][0:1]), spread(before[1][1:2]) * d**0.5
        else:
            total[...], top[...] = jnp.zeros_like(total), jnp.full_like(top, LOWEST)

    def meet(rows: Any, place: Any, width: int, masked: bool) -> None:
        keys, values = k[pl.ds(place, width), :], v[pl.ds(place, width), :]
        products = dot(q[rows, :], keys, (((1,), (1,)), ((), ())))
        if masked:  # what lies behind the last key may be anything, NaN as well
            exists = lambda x, axis: lax.broadcasted_iota(jnp.int32, x.shape, axis) < left - place
            products, values = jnp.where(exists(products, 1), products, LOWEST), jnp.where(exists(values, 0), values, 0)
        highest = jnp.maximum(top[rows, :], jnp.max(products, axis=1, keepdims=True))
        weights = jnp.exp2((products - wide(highest, width)) * scale)
        older = jnp.exp2((top[rows, :] - highest) * scale)
        total[rows, :] = older * total[rows, :] + jnp.sum(weights, axis=1, keepdims=True)
        out[rows, :] = wide(older, d) * out[rows, :] + dot(weights.astype(v.dtype), values, (((1,), (0,)), ((), ())))
        top[rows, :] = highest

    def for_rows(function: Callable[[Any], None]) -> None:
        n = blocks.queries_at_once
        lax.fori_loop(0, blocks.queries // n, lambda i, _: function(pl.ds(pl.multiple_of(i * n, n), n)), None)

    whole = all_valid or left >= blocks.keys

    @pl.when(whole)
    def _() -> None:
        n = blocks.keys_at_once

        def some(rows: Any) -> None:
            for place in range(0, blocks.keys, n):
                meet(rows, place, n, False)

        for_rows(some)

    if not all_valid:

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            n = blocks.last_keys
            parts = lax.div(jnp.clip(left, 0, blocks.keys) + n - 1, n)
            lax.fori_loop(0, parts, lambda i, _: for_rows(lambda rows: meet(rows, pl.multiple_of(i * n, n), n, True)), None)

    @pl.when(j == pl.num_programs(3) - 1)
    def _() -> None:
        if finished:
            some = jnp.where(total[...] == 0, 1, total[...])
            result[...] = (out[...] / wide(some, d)).astype(result.dtype)
        else:
            result[...] = out[...]
            statistics[0][0:1, :] = total[...].T[0:1]
            statistics[0][1:2, :] = top[...].T[0:1] * d**-0.5


def rotate(
    x: Float[Array, "b s c"], cos: Float32[Array, "s d"], sin: Float32[Array, "s d"], *, interpret: bool = False
) -> Float[Array, "b s c"]:
    """x cos + y sin for each head of `d` channels, where y is x with the halves of every head exchanged, on a TPU core.

    In registers that is a rotation of lanes; to the compiler it is slices, and arrays of half the lanes.
    """
    b, s, c = x.shape
    rows = min(ROWS, -(-s // SUBLANES) * SUBLANES)
    tokens, tables = pl.BlockSpec((None, rows, c), lambda b, i: (b, i, 0)), pl.BlockSpec((rows, cos.shape[1]), lambda b, i: (i, 0))
    return pl.pallas_call(
        _rotate_block,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(b, pl.cdiv(s, rows)),
        in_specs=[tokens, tables, tables],
        out_specs=tokens,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(flops=3 * x.size, transcendentals=0, bytes_accessed=2 * x.size * x.dtype.itemsize + 8 * cos.size),
        interpret=interpret,
        name="rotate",
    )(x, cos, sin)


def _rotate_block(x: Any, cos: Any, sin: Any, result: Any) -> None:
    """Some tokens, a head at a time."""
    d = cos.shape[1]
    for first in range(0, x.shape[1], d):
        head = x[:, first : first + d].astype(jnp.float32)
        result[:, first : first + d] = (head * cos[...] + pltpu.roll(head, d // 2, 1) * sin[...]).astype(result.dtype)


# --- GPU ---


def cudnn(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
) -> Float[Array, "b s n d"]:
    """cuDNN's attention, by way of JAX."""
    if valid is None and before is None:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn")
    return finish(cudnn_part(q, k, v, valid, before), q.dtype)


def cudnn_part(
    q: Float[Array, "b s n d"],
    k: Float[Array, "b l n d"],
    v: Float[Array, "b l n d"],
    valid: Int[Array, ""] | None = None,
    before: Partial | None = None,
) -> Partial:
    """A part of attention: cuDNN gives the logarithm of the sum of exponents, which stands for the top, with a sum of 1."""
    lengths = None if valid is None else jnp.full(q.shape[0], jnp.clip(valid, 1, k.shape[1]), jnp.int32)
    options: Any = {"implementation": "cudnn", "return_residual": True}
    out, top = jax.nn.dot_product_attention(q, k, v, key_value_seq_lengths=lengths, **options)
    some = jnp.asarray(True if valid is None else valid > 0)
    total = jnp.broadcast_to(some, top.shape).astype(jnp.float32)
    part = Partial(jnp.where(some, out.astype(jnp.float32), 0), total, jnp.where(some, top.astype(jnp.float32), LOWEST))
    return part if before is None else merge(before, part)


@cache
def _have_gpu() -> bool:
    """Whether this process has a GPU; cuDNN is asked for while tracing, which fails without one."""
    return jax.default_backend() in ("gpu", "cuda")


# --- parts ---


def merge(a: Partial, b: Partial) -> Partial:
    """The attention over the keys of both; exact, in float32, in any order."""
    top = jnp.maximum(a.top, b.top)
    of = lambda part: jnp.where(part.top == -jnp.inf, 0, jnp.exp(part.top - jnp.where(top == -jnp.inf, 0, top)))
    x, y = of(a), of(b)
    return Partial(a.out * x[..., None] + b.out * y[..., None], a.total * x + b.total * y, top)


def finish(part: Partial, dtype: DTypeLike) -> Float[Array, "b s n d"]:
    """The attention of a part that is the whole; zero where there were no keys."""
    return (part.out / jnp.where(part.total == 0, 1, part.total)[..., None]).astype(dtype)
