"""The analyser against programs whose cost is known by hand, and the plan of small models."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax.program import analyse, analyse_text


def cpu_mesh() -> Mesh:
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def shaped(mesh: Mesh, shape: tuple[int, ...], *spec: str | None, dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def scanned_matmuls(x, weights):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


def ring(x, w):
    """Seven hops of x around eight devices, a product beside each."""

    def step(carry, _):
        x, total = carry
        return (jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)]), total + x @ w), None

    zero = jnp.zeros((x.shape[0], w.shape[1]), x.dtype) + 0 * x[:, :1]
    return jax.lax.scan(step, (x, zero), length=7)[0][1]


def ring_on(mesh: Mesh):
    return jax.shard_map(ring, mesh=mesh, in_specs=(P("x"), P("x")), out_specs=P("x"))


def gathered(mesh: Mesh):
    return lambda x, w: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())) @ w


def test_flops_count_every_turn_of_nested_loops():
    def f(x, weights):
        return jax.lax.fori_loop(0, 5, lambda _, x: scanned_matmuls(x, weights), x)

    report = analyse(jax.jit(f).lower(jnp.zeros((32, 64)), jnp.zeros((7, 64, 64))).compile())
    assert report.flops == 5 * 7 * 2 * 32 * 64 * 64
    assert report.unknown_loops == ()


def test_convolution_flops_agree_with_the_compilers():
    """On one convolution XLA's own count is right: strides, padding, dilation and groups."""
    for strides, padding, dilation, groups in [
        ((1, 1), "SAME", (1, 1), 1),
        ((2, 2), "SAME", (1, 1), 4),
        ((1, 1), ((1, 1), (0, 2)), (2, 2), 1),
    ]:

        def f(x, w, strides=strides, padding=padding, dilation=dilation, groups=groups):
            labels = ("NHWC", "HWIO", "NHWC")
            return jax.lax.conv_general_dilated(
                x, w, strides, padding, lhs_dilation=dilation, dimension_numbers=labels, feature_group_count=groups
            )

        lowered = jax.jit(f).lower(jnp.zeros((2, 17, 20, 8)), jnp.zeros((3, 3, 8 // groups, 12)))
        expected = lowered.cost_analysis()["flops"]
        assert analyse(lowered.compile()).flops == pytest.approx(expected), (strides, padding, dilation, groups)


def test_ring_hops_and_their_bytes():
    mesh = cpu_mesh()
    report = analyse(jax.jit(ring_on(mesh)).lower(shaped(mesh, (8 * 16, 64), "x"), shaped(mesh, (8 * 64, 32), "x")).compile())
    (hop,) = report.collectives
    assert (hop.kind, hop.trips, hop.bytes) == ("collective-permute", 7, 16 * 64 * 4)
    assert report.wire_bytes == 7 * 16 * 64 * 4
    assert report.flops == 7 * 2 * 16 * 64 * 32


def test_gather_bytes_and_group():
    mesh = cpu_mesh()
    report = analyse(jax.jit(gathered(mesh)).lower(shaped(mesh, (8 * 16, 64), "x"), shaped(mesh, (64, 32), None, "x")).compile())
    (gather,) = report.collectives
    assert (gather.kind, gather.group, gather.bytes) == ("all-gather", 8, 8 * 16 * 64 * 4)
    assert report.collective_bytes == {"all-gather": 8 * 16 * 64 * 4}
    assert report.wire_bytes == 7 * 16 * 64 * 4
    assert not gather.asynchronous


def test_a_loop_of_unknown_length_is_named():
    report = analyse(jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: x @ x, x)).lower(jnp.zeros((8, 8)), 3).compile())
    assert len(report.unknown_loops) == 1
    assert report.flops == 2 * 8**3


def test_report_prints_its_sums():
    report = analyse(jax.jit(scanned_matmuls).lower(jnp.zeros((32, 64)), jnp.zeros((7, 64, 64))).compile())
    assert f"{report.flops:.3e}" in str(report)
    assert report.to_dict()["flops"] == report.flops


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        analyse_text("hello")


# --- programs compiled for a TPU ---


@pytest.fixture(scope="module")
def v6e() -> Mesh:
    pytest.importorskip("libtpu")
    from wanjax.plan import topology_devices

    return Mesh(np.array(topology_devices("v6e:2x4")), ("x",))


@pytest.mark.tpu
def test_tpu_scan_of_matmuls(v6e):
    x, w = shaped(v6e, (8 * 512, 2048), "x", dtype=jnp.bfloat16), shaped(v6e, (7, 2048, 2048), dtype=jnp.bfloat16)
    report = analyse(jax.jit(scanned_matmuls).lower(x, w).compile())
    assert report.flops == 7 * 2 * 512 * 2048 * 2048
    assert report.cycles_by_category["matmul"] > 0.5 * report.cycles
    assert report.devices == 8
    assert report.memory.arguments == 2 * (512 * 2048 + 7 * 2048 * 2048)


@pytest.mark.tpu
def test_tpu_ring_is_seen_to_overlap(v6e):
    x, w = shaped(v6e, (8 * 1024, 2048), "x", dtype=jnp.bfloat16), shaped(v6e, (8 * 2048, 2048), "x", dtype=jnp.bfloat16)
    report = analyse(jax.jit(ring_on(v6e)).lower(x, w).compile())
    (hop,) = report.collectives
    assert (hop.kind, hop.trips, hop.bytes, hop.asynchronous) == ("collective-permute", 7, 2 * 1024 * 2048, True)
    assert hop.hidden_cycles > 0
    assert report.exposed_wire_bytes == 0
    assert report.flops == 7 * 2 * 1024 * 2048 * 2048


@pytest.mark.tpu
def test_tpu_gather_waits(v6e):
    x, w = shaped(v6e, (8 * 1024, 2048), "x", dtype=jnp.bfloat16), shaped(v6e, (2048, 2048), None, "x", dtype=jnp.bfloat16)
    report = analyse(jax.jit(gathered(v6e)).lower(x, w).compile())
    (gather,) = report.collectives
    assert (gather.kind, gather.group, gather.bytes, gather.asynchronous) == ("all-gather", 8, 2 * 8192 * 2048, False)
