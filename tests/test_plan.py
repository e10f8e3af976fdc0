"""The analyser against programs whose cost is known by hand, and the plan of small models."""

import json
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from wanjax.chips import CHIPS, topology_devices
from wanjax.cli import main
from wanjax.flops import transformer_flops
from wanjax.loading import read_configs, shardings
from wanjax.plan import candidates
from wanjax.program import analyse, analyse_text, compile_and_analyse
from wanjax.sharding import Layout, make_mesh
from wanjax.transformer import T2V_14B, init_transformer, velocity


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


def test_an_exchange_that_another_core_does_is_seen_beside_what_is_computed():
    """As programs for a TPU with SparseCores have it."""
    text = """HloModule jit_f, num_partitions=4

%called (param: bf16[256,128], token: token[]) -> bf16[1024,128] {
  %token = token[] parameter(1)
  %param = bf16[256,128]{1,0} parameter(0)
  ROOT %all-gather = bf16[1024,128]{1,0} all-gather(%param), replica_groups=[1,4]<=[4], dimensions={0}
}, execution_thread="sparsecore"

%copied (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0} parameter(0)
  ROOT %copy = bf16[8,128]{1,0} copy(%x), backend_config={"estimated_cycles":"1000"}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[256,128], b: bf16[8,128]) -> bf16[1024,128] {
  %a = bf16[256,128]{1,0} parameter(0)
  %b = bf16[8,128]{1,0} parameter(1)
  %gather-start = ((bf16[256,128]{1,0}, token[]), bf16[1024,128]{1,0}) call-start(%a), async_execution_thread="sparsecore", to_apply=%called
  %copy-start = ((bf16[8,128]{1,0}), bf16[8,128]{1,0}) call-start(%b), async_execution_thread="sparsecore", to_apply=%copied
  %work = bf16[8,128]{1,0} negate(%b), backend_config={"estimated_cycles":"500"}
  %copy-done = bf16[8,128]{1,0} call-done(%copy-start)
  ROOT %gather-done = bf16[1024,128]{1,0} call-done(%gather-start)
}
"""
    report = analyse_text(text)
    (gather,) = report.collectives
    assert (gather.kind, gather.bytes, gather.group, gather.asynchronous, gather.hidden_cycles) == ("all-gather", 1024 * 256, 4, True, 500)
    assert report.cycles == 500


def test_report_prints_its_sums():
    report = analyse(jax.jit(scanned_matmuls).lower(jnp.zeros((32, 64)), jnp.zeros((7, 64, 64))).compile())
    assert f"{report.flops:.3e}" in str(report)
    assert report.to_dict()["flops"] == report.flops


def test_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        analyse_text("hello")


def test_programs_of_another_libtpu_are_told(monkeypatch):
    def as_text(_):
        raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    monkeypatch.setattr(jax.stages.Compiled, "as_text", as_text)
    with pytest.raises(RuntimeError, match=r'another version has made: pip install "wanjax\[tpu\]"'):
        analyse(compiled)


# --- programs compiled for a TPU ---


@pytest.fixture(scope="module")
def v6e() -> Mesh:
    pytest.importorskip("libtpu")
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


# --- programs of models ---


@pytest.mark.tpu
@pytest.mark.parametrize(("topology", "context", "peak"), [("v6e:2x4", 4, 3e9), ("v6e:2x4", 8, 3e9), ("tpu7x:2x2x1", 4, 4.2e9)])
def test_two_layers_of_14b_on_eight_devices_are_a_good_program(topology, context, peak):
    """720p, 81 frames, both branches of guidance: what 40 layers cost is 20 times the loop, and a little at the ends."""
    pytest.importorskip("libtpu")
    mesh = make_mesh(data=8 // context, context=context, devices=topology_devices(topology))
    config = replace(T2V_14B, num_layers=2)
    template = jax.eval_shape(lambda: init_transformer(config, jax.random.key(0), jnp.bfloat16))
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    weights = jax.tree.map(place, template, shardings(template, mesh))
    given = [((2, 16, 21, 90, 160), jnp.float32), ((2,), jnp.float32), ((2, 512, 4096), jnp.bfloat16)]
    inputs = [jax.ShapeDtypeStruct(*x, sharding=NamedSharding(mesh, P())) for x in given]
    lowered = jax.jit(partial(velocity, layout=Layout(mesh))).lower(*inputs, weights)
    _, report = compile_and_analyse(lowered)
    assert report.cycles <= 9e7  # measured 8.5e7, of which the ends 0.4e7
    assert report.share("matmul") >= 0.7
    assert report.share("copy") <= 0.05
    formula = transformer_flops(config, 75600)
    assert report.flops == pytest.approx(2 * formula.products / 8, rel=0.02)
    assert report.kernel_flops == pytest.approx(2 * formula.attention / 8, rel=0.01)
    hops = [c for c in report.collectives if c.kind == "collective-permute" and c.bytes > 1e6]
    assert sum(c.trips for c in hops) == 2 * (context - 1) * 2  # layers, hops around the devices, keys and values
    tokens = {4: 18900, 8: 9456}[context]  # two videos' in whole tiles
    assert all(c.bytes == context // 4 * tokens * 5120 * 2 and c.asynchronous and c.hidden_kernels for c in hops)
    assert report.memory.peak < peak


@pytest.mark.tpu
def test_plan_of_the_tiny_model(capsys):
    pytest.importorskip("libtpu")
    assert main(["plan", "tiny", "--topology", "v6e:2x2", "--mesh", "context=4", "--steps", "7", "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["fits"], told["devices"], told["mesh"]["context"]) == (True, 4, 4)
    assert [(p["name"], p["runs"]) for p in told["programs"]] == [("text", 1), ("denoise step", 7), ("VAE", 5)]
    step = told["programs"][1]
    assert 1 <= (step["flops"] + step["kernel_flops"]) / step["analytic_flops"] < 3  # every device has all of the text
    assert 0 < step["roofline_seconds"] <= step["compiler_seconds"]
    assert told["seconds"] == pytest.approx(sum(p["runs"] * p["compiler_seconds"] for p in told["programs"]))


@pytest.mark.tpu
def test_what_does_not_fit_is_said_with_status_1(monkeypatch, capsys):
    pytest.importorskip("libtpu")
    monkeypatch.setattr("wanjax.plan.chip_of", lambda topology: replace(CHIPS["v6e"], hbm=1e6))
    assert main(["plan", "tiny", "--topology", "v6e:2x2", "--mesh", "context=4"]) == 1
    shown = capsys.readouterr()
    assert "does not fit: text needs 0.0" in shown.out
    assert "more devices" in shown.err


def test_a_plan_without_libtpu_says_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["plan", "tiny", "--topology", "v6e:2x2"]) == 2
    assert 'pip install "wanjax[tpu]"' in capsys.readouterr().err


def test_meshes_that_are_compared():
    assert candidates(8, guided=True, heads=40) == [
        {"data": 2, "context": 4, "tensor": 1},
        {"data": 2, "context": 2, "tensor": 2},
        {"data": 1, "context": 8, "tensor": 1},
        {"data": 1, "context": 4, "tensor": 2},
    ]
    assert candidates(4, guided=False, heads=3) == [{"data": 1, "context": 4, "tensor": 1}]


def test_configs_of_public_checkpoints_need_no_file():
    preset, configs = read_configs("ti2v-5b")
    assert preset.name == "ti2v-5b"
    assert (configs["vae"].z_dim, configs["transformer"].in_channels, configs["text_encoder"].d_model) == (48, 48, 4096)
    assert read_configs("tiny")[1]["transformer"].width < 1000
    assert read_configs("Wan-AI/Wan2.2-TI2V-5B-Diffusers") == (preset, configs)
