"""The `wanjax` command: generate, info, convert, plan, doctor.

Each subcommand is a function of its parsed arguments that calls the same public functions a Python user would. A
user's mistake prints one sentence and exits with status 2; a traceback means a fault of ours.
"""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import jax
from tqdm import tqdm

import wanjax
from wanjax import convert, doctor, pipeline, presets, video
from wanjax.sharding import AXES, join_processes, make_mesh

_COMPILE_EVENTS = ("/jax/core/compile/", "/jax/compilation_cache/cache_retrieval_time")


@dataclass
class Timings:
    """Seconds by stage, with compilation taken out of the stage it happened in."""

    seconds: dict[str, float] = field(default_factory=dict)
    compiling: float = 0.0

    def listen(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Add what JAX reports of tracing, lowering and compiling."""
        if event.startswith(_COMPILE_EVENTS):
            self.compiling += duration_secs

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, without the compilation inside it."""
        start, compiling = time.perf_counter(), self.compiling
        yield
        own = time.perf_counter() - start - (self.compiling - compiling)
        self.seconds[name] = self.seconds.get(name, 0.0) + max(own, 0.0)

    def summary(self, steps: int) -> str:
        """One line: load, compile, text, denoise and its share a step, decode, write."""
        parts = [f"{name} {seconds:.1f} s" for name, seconds in self.seconds.items() if name != "first frame"]
        parts.insert(1, f"compile {self.compiling:.1f} s")
        return " · ".join(parts) + f" · {self.seconds['denoise'] / steps:.2f} s a step"


def size(text: str) -> tuple[int, int]:
    """Height and width from WIDTHxHEIGHT, as sizes are usually said."""
    try:
        width, height = (int(part) for part in text.lower().replace("*", "x").split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"a size is WIDTHxHEIGHT in pixels, like 832x480; got {text!r}") from None
    return height, width


def run_generate(args: argparse.Namespace) -> int:
    """Prompt to mp4, one file a video."""
    timings = Timings()
    jax.monitoring.register_event_duration_secs_listener(timings.listen)
    start = time.perf_counter()
    join_processes(args.coordinator, args.num_processes, args.process_id)
    shows, alone = jax.process_index() == 0, jax.process_count() == 1
    quiet = args.quiet or not shows
    paths = _output_paths(args.output, len(args.prompt) * args.num_videos)
    for path in paths if shows else ():
        video.check_writable(path)
    mesh = make_mesh(**args.mesh) if args.mesh else None if alone else make_mesh(context=-1)
    with timings.stage("load"):
        wan = wanjax.load(args.model, dtype=args.dtype, mesh=mesh, check_finite=args.check_finite)
    height, width = args.size or (None, None)
    request = pipeline.make_request(
        wan,
        args.prompt,
        negative_prompt=args.negative_prompt,
        height=height,
        width=width,
        num_frames=args.frames,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        guidance_scale_2=args.guidance_scale_2,
        flow_shift=args.shift,
        solver=args.solver,
        seed=args.seed,
        num_videos_per_prompt=args.num_videos,
    )
    with timings.stage("text"), _bar("text", 1, quiet) as bar:
        text = pipeline.embed_prompts(wan, request.prompts)
        negative = pipeline.embed_prompts(wan, request.negative_prompts) if request.guided else None
        jax.block_until_ready((text, negative))
        bar.update()
    with timings.stage("denoise"), _bar("denoise", request.num_inference_steps, quiet) as bar:

        def progress(step: int, timestep: float, latents: jax.Array) -> None:
            jax.block_until_ready(latents)
            bar.update()

        latents = pipeline.denoise(wan, request, text, negative, callback=progress)
    for i, path in enumerate(paths):
        frames = pipeline.decode_frames(wan, latents[i], tile=args.tile)
        with _bar("decode", request.num_frames, quiet) as bar, contextlib.ExitStack() as stack:
            write = lambda frames: None  # other processes decode their part and leave the file to the first
            if shows:
                write = stack.enter_context(video.VideoWriter(path, args.fps or wan.preset.fps, metadata=_metadata(wan, request, i))).write
            while True:
                with timings.stage("decode"):
                    chunk = next(frames, None)
                if chunk is None:
                    break
                timings.seconds.setdefault("first frame", time.perf_counter() - start)
                with timings.stage("write"):
                    write(chunk)
                bar.update(len(chunk))
        if shows:
            print(f"wrote {path}")
    if not quiet:
        first, total = timings.seconds["first frame"], time.perf_counter() - start
        print(f"{timings.summary(request.num_inference_steps)} · first frame after {first:.1f} s, all after {total:.1f} s", file=sys.stderr)
    return 0


def run_info(args: argparse.Namespace) -> int:
    """Print what a checkpoint holds, from its headers alone."""
    print(convert.describe(args.path))
    return 0


def run_convert(args: argparse.Namespace) -> int:
    """Rewrite a checkpoint in the diffusers layout."""
    convert.convert(args.source, args.target, dtype=args.dtype)
    print(f"wrote {args.target}")
    return 0


def run_doctor(args: argparse.Namespace) -> int:
    """Print the machine and check every way of computing on it; status 1 where one is wrong."""
    print(doctor.describe_machine(), flush=True)
    wrong = []
    for check in doctor.run_checks():
        print(check, flush=True)
        wrong += [] if check.passed else [check.name]
    if wrong:
        print(f"wanjax: {len(wrong)} of these give wrong results on this machine: {'; '.join(wrong)}.", file=sys.stderr)
    return 1 if wrong else 0


def run_plan(args: argparse.Namespace) -> int:
    """Print what a video costs on a TPU slice; status 1 where it cannot be made there."""
    from wanjax import plan  # brings libtpu's settings into the environment, which nothing else wants

    height, width = args.size or (None, None)
    options = {"height": height, "width": width, "num_frames": args.frames, "num_inference_steps": args.steps}
    options |= {"dtype": args.dtype, "attention": args.attention}
    try:
        if args.mesh:
            plans = [plan.plan(args.model, args.topology, args.mesh, **options)]
        else:
            plans = plan.compare(args.model, args.topology, **options)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if args.json:
        print(json.dumps([p.to_dict() for p in plans], indent=2))
    else:
        print("\n\n".join(map(str, plans)))
        if len(plans) > 1:
            print("\nmeshes, the best first: " + "; ".join(plan.summary(p) for p in plans))
    if not plans[0].fits:
        print(f"wanjax: {plans[0].model} does not fit: {plans[0].reason}", file=sys.stderr)
    return 0 if plans[0].fits else 1


def mesh_sizes(text: str) -> dict[str, int]:
    """Mesh axes and their sizes from data=2,context=4."""
    try:
        sizes = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        sizes = {}
    if not sizes or not set(sizes) <= set(AXES):
        raise argparse.ArgumentTypeError(f"a mesh is axis=size,... of {', '.join(AXES)}; got {text!r}")
    return sizes


def _output_paths(output: Path, count: int) -> list[Path]:
    """One path a video: the one asked for, or name-0, name-1, ... for several."""
    return [output] if count == 1 else [output.with_stem(f"{output.stem}-{i}") for i in range(count)]


def _metadata(wan: wanjax.Wan, request: pipeline.Request, i: int) -> dict[str, str]:
    """What the file says about how video i was made."""
    prompt, take = divmod(i, request.num_videos_per_prompt)
    choices = {
        "prompt": request.prompts[prompt],
        "negative_prompt": request.negative_prompts[prompt] if request.guided else "",
        "seed": request.seeds[prompt],
        "take": take,
        "model": wan.preset.name,
        "size": f"{request.width}x{request.height}",
        "frames": request.num_frames,
        "steps": request.num_inference_steps,
        "shift": request.flow_shift,
        "guidance_scale": request.guidance_scale,
        "solver": request.solver,
        "version": f"wanjax {wanjax.__version__}",
    }
    return {name: str(value) for name, value in choices.items()}


def _bar(stage: str, total: int, quiet: bool) -> tqdm:
    """The progress bar of a stage."""
    return tqdm(desc=f"{stage:8}", total=total, disable=quiet, leave=True, bar_format="{desc} {bar:30} {n}/{total} {elapsed}")


def build_parser() -> argparse.ArgumentParser:
    """Every subcommand and its arguments."""
    parser = argparse.ArgumentParser(prog="wanjax", description="The Wan 2.1 and 2.2 video models in JAX.")
    parser.add_argument("--version", action="version", version=f"wanjax {wanjax.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    generate = commands.add_parser("generate", help="make a video of a prompt")
    generate.set_defaults(run=run_generate)
    generate.add_argument("prompt", nargs="+", help="what to show; several prompts make several videos")
    generate.add_argument("-o", "--output", type=Path, default=Path("video.mp4"), help="the mp4 to write (default: %(default)s)")
    generate.add_argument(
        "-m", "--model", default="tiny", help=f"a preset ({', '.join(presets.PRESETS)}), folder or hub id (default: %(default)s)"
    )
    generate.add_argument("--size", type=size, metavar="WxH", help="width x height in pixels")
    generate.add_argument("--frames", type=int, help="number of frames, 4 n + 1")
    generate.add_argument("--steps", type=int, help="denoising steps")
    generate.add_argument("--guidance-scale", type=float, help="classifier-free guidance; 1 is off")
    generate.add_argument("--guidance-scale-2", type=float, help="that of the low-noise expert")
    generate.add_argument("--shift", type=float, help="flow shift of the noise schedule")
    generate.add_argument("--solver", choices=("unipc", "euler", "dpm"))
    generate.add_argument("--negative-prompt", help="what not to show (default: the preset's)")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--num-videos", type=int, default=1, help="videos of each prompt")
    generate.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype (default: float32 on CPU, else bfloat16)")
    generate.add_argument("--tile", type=int, metavar="PIXELS", help="decode in overlapping tiles of this size, in less memory")
    generate.add_argument("--mesh", type=mesh_sizes, metavar="data=2,context=4", help="devices to use (default: the first)")
    generate.add_argument(
        "--coordinator", metavar="HOST:PORT", help="of process 0, to compute with other processes; on a TPU pod not needed"
    )
    generate.add_argument("--num-processes", type=int, help="how many processes there are")
    generate.add_argument("--process-id", type=int, help="which of them this is; 0 writes the file")
    generate.add_argument("--check-finite", action="store_true", help="look for NaNs and infinities in the weights")
    generate.add_argument("--fps", type=int, help="frames per second of the file (default: the preset's)")
    generate.add_argument("-q", "--quiet", action="store_true", help="no progress, no timings")

    info = commands.add_parser("info", help="print what a checkpoint holds")
    info.set_defaults(run=run_info)
    info.add_argument("path", help="a folder, file, preset or hub id")

    rewrite = commands.add_parser("convert", help="rewrite a checkpoint in the diffusers layout")
    rewrite.set_defaults(run=run_convert)
    rewrite.add_argument("source", help="a folder or a single .safetensors file, any naming")
    rewrite.add_argument("target", type=Path, help="the folder to write")
    rewrite.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="store as this dtype (default: as it is)")

    cost = commands.add_parser("plan", help="say what a video costs on a TPU slice, without one")
    cost.set_defaults(run=run_plan)
    cost.add_argument("model", help=f"a preset ({', '.join(presets.PRESETS)}), folder or hub id; weights are not read")
    cost.add_argument("--topology", required=True, metavar="v6e:2x4", help="TPU generation and shape: v5e, v5p, v6e, tpu7x")
    cost.add_argument("--size", type=size, metavar="WxH", help="width x height in pixels")
    cost.add_argument("--frames", type=int, help="number of frames, 4 n + 1")
    cost.add_argument("--steps", type=int, help="denoising steps")
    cost.add_argument("--mesh", type=mesh_sizes, metavar="data=2,context=4", help="one mesh (default: try several and rank them)")
    cost.add_argument("--attention", choices=("auto", "ring", "ulysses", "2d"), default="auto", help="across devices")
    cost.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="compute dtype (default: %(default)s)")
    cost.add_argument("--json", action="store_true", help="print plain numbers")

    check = commands.add_parser("doctor", help="check every way of computing on the devices at hand")
    check.set_defaults(run=run_doctor)

    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; a user's mistake is one sentence and status 2."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("stopped; nothing half-written is left", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("WANJAX_TRACEBACK"):
            raise
        print(f"wanjax: {error}", file=sys.stderr)
        return 2


def command() -> None:
    """Run the command and end the process."""
    status = main()
    if status == 130:
        # A computation may still be under way, and the interpreter's own end crashes beside it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    command()
