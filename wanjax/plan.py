"""What a video costs on a TPU slice: the real programs, compiled for it on a machine that has none of it, without weights.

`plan` compiles the text encoder, one denoising step (guidance and solver included) and the VAE's exactly as `generate`
calls them, and reads what the compiler made of them. `print(plan(...))` is what `wanjax plan` shows.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from tokenizers import Tokenizer, models

from wanjax import pipeline, sampler, vae
from wanjax.chips import Chip, chip_of, topology_devices
from wanjax.flops import decode_flops, text_encoder_flops, transformer_flops
from wanjax.loading import Wan, read_configs, shardings
from wanjax.program import Report, compile_and_analyse
from wanjax.sharding import AXES, Layout, make_mesh
from wanjax.text_encoder import init_text_encoder
from wanjax.transformer import init_transformer
from wanjax.vae_model import init_vae
from wanjax.vae_passes import choose_passes


@dataclass(frozen=True)
class Program:
    """One compiled program: how often a video runs it, what one run costs a device, and what formulas say that it must.

    `beside` is the bytes of weights that lie on the device at the same time without being read by it.
    """

    name: str
    runs: int
    report: Report
    analytic_flops: float
    beside: int
    chip: Chip

    @property
    def compiler_seconds(self) -> float:
        """The compiler's cycles, hand-written kernels at the chip's peak, and exchanges that nothing hides, one after the other."""
        kernels = sum(max(c.flops / self.chip.flops, c.bytes / self.chip.bandwidth) * c.trips for c in self.report.kernels)
        return self.report.cycles / self.chip.clock + kernels + self.report.exposed_wire_bytes / self.chip.link

    @property
    def roofline_seconds(self) -> float:
        """The longest of arithmetic, main memory and links, each at its peak."""
        work = self.report.flops + self.report.kernel_flops
        return max(work / self.chip.flops, self.report.bytes / self.chip.bandwidth, self.report.wire_bytes / self.chip.link)

    @property
    def memory(self) -> int:
        """Bytes on a device while it runs."""
        return self.report.memory.peak + self.beside

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        own = {
            "runs": self.runs,
            "analytic_flops": self.analytic_flops,
            "compiler_seconds": self.compiler_seconds,
            "roofline_seconds": self.roofline_seconds,
            "memory": self.memory,
        }
        return {"name": self.name, **own, **self.report.to_dict()}


@dataclass(frozen=True)
class Plan:
    """What one video costs on one mesh; `reason` says why it cannot be made there, "" where it can."""

    model: str
    topology: str
    chip: Chip
    mesh: Mapping[str, int]
    size: tuple[int, int]
    num_frames: int
    num_inference_steps: int
    attention: str
    programs: tuple[Program, ...]
    reason: str = ""

    @property
    def seconds(self) -> float:
        """For a whole video, as the compiler estimates it."""
        return sum(p.compiler_seconds * p.runs for p in self.programs)

    @property
    def fits(self) -> bool:
        """Whether it can be made there."""
        return not self.reason

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "model": self.model,
            "topology": self.topology,
            "devices": int(np.prod(list(self.mesh.values()))),
            "mesh": dict(self.mesh),
            "height": self.size[0],
            "width": self.size[1],
            "num_frames": self.num_frames,
            "num_inference_steps": self.num_inference_steps,
            "attention": self.attention,
            "hbm": self.chip.hbm,
            "fits": self.fits,
            "reason": self.reason,
            "seconds": self.seconds,
            "programs": [p.to_dict() for p in self.programs],
        }

    def __str__(self) -> str:
        height, width = self.size
        lines = [
            f"{self.model}, {width}x{height}, {self.num_frames} frames, {self.num_inference_steps} steps on {self.topology}, "
            f"mesh {said(self.mesh)}; per device:",
            f"  attention: {self.attention}",
            f"  {'program':<14}{'runs':>5}{'TFLOPs':>9}{'(formula)':>10}{'main mem.':>11}{'compiler':>10}{'roofline':>10}"
            f"{'peak / HBM':>17}{'compile':>9}",
        ]
        for p in self.programs:
            report, work = p.report, (p.report.flops + p.report.kernel_flops) / 1e12
            lines.append(
                f"  {p.name:<14}{p.runs:>5}{work:>9.2f}{p.analytic_flops / 1e12:>10.2f}{report.bytes / 1e9:>8.1f} GB"
                f"{p.compiler_seconds:>8.3f} s{p.roofline_seconds:>8.3f} s{p.memory / 2**30:>7.2f}/{self.chip.hbm / 2**30:.2f} GiB"
                f"{report.compile_cpu_seconds or 0:>7.0f} s"
            )
            for kind, size in report.collective_bytes.items():
                these = [c for c in report.collectives if c.kind == kind]
                hidden = sum(c.bytes * c.trips for c in these if c.asynchronous) / size if size else 0
                if size >= 1e6:
                    lines.append(f"      {kind} {size / 1e9:.3f} GB, {hidden:.0%} of it beside compute")
        if self.programs:
            lines.append(
                f"  a video: {self.seconds:.1f} s as the compiler estimates, kernels at the chip's peak; loading and compiling not counted"
            )
        lines.append("  fits" if self.fits else f"  does not fit: {self.reason}")
        return "\n".join(lines)


def said(mesh: Mapping[str, int]) -> str:
    """A mesh as the command line takes it."""
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "data=1"


def summary(plan: Plan) -> str:
    """A mesh and what it comes to."""
    return f"{said(plan.mesh)} " + (f"{plan.seconds:.1f} s" if plan.fits else "does not fit")


def plan(
    model: str,
    topology: str,
    mesh: Mapping[str, int] | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    num_inference_steps: int | None = None,
    dtype: DTypeLike = jnp.bfloat16,
    attention: str = "auto",
    decoders: dict[str, Report] | None = None,
) -> Plan:
    """Compile a model's programs for a slice such as "v6e:2x4" and say what a video costs on it.

    `model` is a preset, a folder or a hub id, of which the configs alone are read; `mesh` the sizes of its axes (default: all devices on
    `context`, guidance's two branches on `data` where there are two and an even number of devices). What is not given is the preset's.
    `decoders` keeps what the VAE's programs cost from one call to the next on the same slice, on every mesh of which they are the same.
    ValueError for what cannot be; RuntimeError without libtpu.
    """
    chip, devices = chip_of(topology), topology_devices(topology)
    wan = _outline(model, dtype)
    request = pipeline.make_request(
        wan, "a prompt", height=height, width=width, num_frames=num_frames, num_inference_steps=num_inference_steps
    )
    if mesh is None:
        data = 2 if request.guided and len(devices) % 2 == 0 else 1
        mesh = {"data": data, "context": len(devices) // data}
    layout = Layout(make_mesh(**mesh, devices=devices), attention)
    wan = replace(wan, mesh=layout.mesh)
    tokens = int(np.prod(request.latent_shape[1:])) // int(np.prod(wan.transformer.config.patch_size))
    result = Plan(
        wan.preset.name,
        topology,
        chip,
        {axis: layout.mesh.shape[axis] for axis in AXES},
        (request.height, request.width),
        request.num_frames,
        request.num_inference_steps,
        layout.way(tokens, wan.transformer.config.num_attention_heads).why,
        (),
    )
    held = {name: _held(getattr(wan, name), layout.mesh) for name in ("text_encoder", "transformer", "transformer_2", "vae")}
    for name, reads, runs, analytic, lower in _programs(wan, request, layout):
        beside = sum(size for part, size in held.items() if part != reads)
        try:
            report = (decoders or {}).get(name) or compile_and_analyse(lower())[1]
        except jax.errors.JaxRuntimeError as error:
            return replace(result, reason=_too_large(name, error, chip))
        if decoders is not None and reads == "vae":
            decoders[name] = report
        program = Program(name, runs, report, analytic / len(devices), beside, chip)
        result = replace(result, programs=(*result.programs, program))
        if program.memory > chip.hbm:
            parts = ", ".join(f"{part} {size / 2**30:.2f}" for part, size in held.items() if size)
            need = f"{name} needs {program.memory / 2**30:.2f} GiB of {chip.hbm / 2**30:.2f} on a device (weights in GiB: {parts})"
            return replace(result, reason=f"{need}; {_REMEDY}.")
    return result


_REMEDY = "more devices on context or fsdp hold less each, and a smaller size or fewer frames need less"


def candidates(devices: int, guided: bool, heads: int) -> list[dict[str, int]]:
    """The meshes worth comparing: guidance's branches together or apart, and one or two devices to share heads and weights."""
    found = []
    for data in (2, 1) if guided else (1,):
        for tensor in (1, 2):
            if devices % (data * tensor) == 0 and heads % tensor == 0:
                found.append({"data": data, "context": devices // (data * tensor), "tensor": tensor})
    return found


def compare(model: str, topology: str, **options: Any) -> list[Plan]:
    """`plan` on every candidate mesh, the fastest that fits first. Arguments are those of `plan`, without `mesh`."""
    wan = _outline(model, options.get("dtype", jnp.bfloat16))
    guided, heads = wan.preset.guidance_scale > 1, wan.transformer.config.num_attention_heads
    meshes = candidates(len(topology_devices(topology)), guided, heads)
    decoders: dict[str, Report] = {}
    plans = [plan(model, topology, mesh, decoders=decoders, **options) for mesh in meshes]
    return sorted(plans, key=lambda p: (not p.fits, p.seconds))


def _outline(model: str, dtype: DTypeLike) -> Wan:
    """A model of shapes alone; its tokenizer knows no word."""
    preset, configs, dtype = *read_configs(model), jnp.dtype(dtype)
    shape = lambda init, config, dtype: jax.eval_shape(lambda: init(config, jax.random.key(0), dtype))
    transformer = shape(init_transformer, configs["transformer"], dtype)
    return Wan(
        preset,
        Tokenizer(models.WordLevel({}, unk_token="")),
        shape(init_text_encoder, configs["text_encoder"], dtype),
        transformer,
        transformer if preset.boundary_ratio is not None else None,
        shape(init_vae, configs["vae"], jnp.float32),
        dtype,
    )


def _programs(wan: Wan, request: pipeline.Request, layout: Layout) -> Iterator[tuple[str, str, int, float, Any]]:
    """Name, the component it reads, runs a video, FLOPs by formula of all devices together, and how to lower it."""
    mesh = layout.mesh
    whole = lambda shape, dtype: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))
    placed = lambda module: jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), module, shardings(module, mesh))
    likewise = lambda tree: jax.tree.map(lambda x: whole(x.shape, x.dtype), tree)

    ids = whole((1, 512), jnp.int32)
    encoder = placed(wan.text_encoder)
    branches = 2 if request.guided else 1
    yield (
        "text",
        "text_encoder",
        branches,
        text_encoder_flops(wan.text_encoder.config).total,
        lambda: pipeline._embed.lower(ids, ids, encoder),
    )

    text = likewise(jax.eval_shape(pipeline._embed, ids, ids, wan.text_encoder))
    state = likewise(jax.eval_shape(sampler.init_state, whole((1, *request.latent_shape), jnp.float32)))
    config = wan.transformer.config
    tokens = int(np.prod(request.latent_shape[1:])) // int(np.prod(config.patch_size))
    lower = partial(pipeline._denoise_step.lower, request.steps[0], state, placed(wan.transformer), [text] * branches)
    yield (
        "denoise step",
        "transformer",
        request.num_inference_steps,
        branches * transformer_flops(config, tokens).total,
        partial(lower, layout=layout, together=True),
    )

    weights = likewise(jax.eval_shape(partial(vae.cast, dtype=wan.vae_dtype), wan.vae))
    z = whole((1, *request.latent_shape), jnp.float32)
    passes = choose_passes(wan.vae.config, z.shape, chunk=1, tile=None, mesh=mesh)
    options = {"passes": passes, "uint8": True, "size": 1}
    start = whole((), jnp.int32)
    t, h, w = request.latent_shape[1:]
    flops = lambda frames: decode_flops(wan.vae.config, frames, h, w).total
    cache = jax.eval_shape(partial(vae.first_history, passes=passes, encodes=False), jax.eval_shape(lambda z: z[:, :, :1], z), weights)
    split = passes.split
    assert split is not None
    lie = NamedSharding(split.mesh, P("videos", None, "rows", "columns"))
    cache = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lie), cache)
    yield "VAE", "vae", t, flops(2) - flops(1), lambda: vae._decode_step.lower(z, weights, start, cache, **options)


def _held(module: Any, mesh: Mesh) -> int:
    """Bytes of a component's weights on one device."""
    if module is None:
        return 0
    places = jax.tree.leaves(shardings(module, mesh))
    parts = [(place.shard_shape(x.shape), x.dtype) for x, place in zip(jax.tree.leaves(module), places, strict=True)]
    return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in parts)


def _too_large(name: str, error: RuntimeError, chip: Chip) -> str:
    """Why the compiler gave up, as a sentence; any other error is raised again."""
    found = re.search(r"Used ([\d.]+\w?) of ([\d.]+\w?) hbm", str(error))
    if found is None:
        raise error
    return f"{name} needs {found.group(1)} of {found.group(2)} of memory on a {chip.name} device; {_REMEDY}."
