"""What each public checkpoint is sampled with: steps, shift, guidance, boundary, sizes.

Architecture lives in the configs beside the models; a preset adds the numbers its authors sample it with, so that
no family-wide default is ever applied to the wrong checkpoint. To add a checkpoint, add a preset to `PRESETS`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from wanjax.sampler import Grid
from wanjax.transformer import T2V_1_3B, T2V_14B, T2V_A14B, TI2V_5B, TransformerConfig

Solver = Literal["unipc", "euler", "dpm"]

# The negative prompt of the official code, which it uses wherever the user gives none.
OFFICIAL_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，"
    "画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class Preset:
    """A checkpoint and the numbers to sample it with.

    `guidance_scale` is that of the only expert, or of the high-noise one; `guidance_scale_2` and `boundary_ratio` (the
    timestep / 1000 from which the high-noise expert rules) are for two-expert checkpoints and None elsewhere. `sizes`
    are the trained (height, width) pairs in pixels, the first one the default.
    """

    name: str
    repo: str | None
    architecture: TransformerConfig | None
    sizes: tuple[tuple[int, int], ...]
    num_frames: int
    fps: int
    num_inference_steps: int
    flow_shift: float
    guidance_scale: float
    guidance_scale_2: float | None = None
    boundary_ratio: float | None = None
    expand_timesteps: bool = False
    solver: Solver = "unipc"
    grid: Grid = "diffusers"
    negative_prompt: str = OFFICIAL_NEGATIVE_PROMPT

    def to_json(self) -> dict[str, Any]:
        """The numbers of a preset.json; the architecture is in the component's own config.json."""
        return {key: value for key, value in asdict(self).items() if key not in ("repo", "architecture")}

    @classmethod
    def from_json(cls, numbers: Mapping[str, Any]) -> "Preset":
        """The preset that a preset.json describes. Raises ValueError for names that no preset has."""
        known = {field.name for field in fields(cls)} - {"repo", "architecture"}
        if extra := sorted(set(numbers) - known):
            raise ValueError(f"preset.json has unknown entries {', '.join(extra)}; known: {', '.join(sorted(known))}.")
        return cls(repo=None, architecture=None, **{**numbers, "sizes": tuple(tuple(pair) for pair in numbers["sizes"])})


_480P = ((480, 832), (832, 480))
_720P = ((720, 1280), (1280, 720))

TINY = Preset(
    "tiny",
    None,
    None,
    sizes=((64, 64),),
    num_frames=17,
    fps=8,
    num_inference_steps=20,
    flow_shift=3.0,
    guidance_scale=1.0,
    negative_prompt="",
)

# Sources: the official generate defaults per task; shift 8 and guidance 6 of the 1.3B are its model card's advice.
PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        TINY,
        Preset("t2v-1.3b", "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", T2V_1_3B, _480P, 81, 16, 50, 8.0, 6.0),
        Preset("t2v-14b", "Wan-AI/Wan2.1-T2V-14B-Diffusers", T2V_14B, _720P + _480P, 81, 16, 50, 5.0, 5.0),
        Preset("t2v-a14b", "Wan-AI/Wan2.2-T2V-A14B-Diffusers", T2V_A14B, _720P + _480P, 81, 16, 40, 12.0, 4.0, 3.0, 0.875),
        Preset(
            "ti2v-5b", "Wan-AI/Wan2.2-TI2V-5B-Diffusers", TI2V_5B, ((704, 1280), (1280, 704)), 121, 24, 50, 5.0, 5.0, expand_timesteps=True
        ),
    )
}

_SOLVERS: Mapping[str, Solver] = {
    "UniPCMultistepScheduler": "unipc",
    "FlowMatchEulerDiscreteScheduler": "euler",
    "DPMSolverMultistepScheduler": "dpm",
}


def preset_for(architecture: TransformerConfig, model_index: Mapping[str, Any], scheduler: Mapping[str, Any]) -> Preset:
    """The preset of a pipeline folder.

    A public checkpoint is known by its architecture and by whether its model_index.json names two experts; any other folder gets
    its own scheduler_config.json's numbers, at diffusers' default size, steps and guidance.
    """
    boundary, expand = model_index.get("boundary_ratio"), bool(model_index.get("expand_timesteps", False))
    for preset in PRESETS.values():
        if preset.architecture == architecture and (preset.boundary_ratio is None) == (boundary is None):
            return preset
    solver = scheduler.get("_class_name", "UniPCMultistepScheduler")
    if solver not in _SOLVERS:
        raise ValueError(f"scheduler_config.json names {solver}; known here: {', '.join(_SOLVERS)}.")
    return Preset(
        "custom",
        None,
        architecture,
        sizes=_480P,
        num_frames=81,
        fps=24 if expand else 16,
        num_inference_steps=50,
        flow_shift=float(scheduler.get("flow_shift", scheduler.get("shift", 3.0))),
        guidance_scale=5.0,
        guidance_scale_2=None if boundary is None else 5.0,
        boundary_ratio=boundary,
        expand_timesteps=expand,
        solver=_SOLVERS[solver],
        negative_prompt="",
    )
