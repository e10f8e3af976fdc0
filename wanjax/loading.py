"""Folders, files and hub ids to models, and back.

`load` gives everything a prompt needs, `load_vae`, `load_transformer` and `load_text_encoder` one component each, `save`
writes either in the layout that diffusers opens. Which dtype each weight has on the device is decided here and nowhere else.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike
from tokenizers import Tokenizer

from wanjax import checkpoint, sharding, text_encoder, transformer, weights
from wanjax.presets import PRESETS, TINY, Preset, preset_for
from wanjax.text_encoder import UMT5_XXL, TextEncoder, TextEncoderConfig, init_text_encoder
from wanjax.transformer import Transformer, TransformerConfig, init_transformer
from wanjax.vae_config import VAE_2_1, VAE_2_2, VAEConfig, config_from_shapes
from wanjax.vae_model import VAE, init_vae


@dataclass(frozen=True)
class Wan:
    """All that one checkpoint needs to make videos; swap any part with `dataclasses.replace`.

    `transformer` is the only expert or the high-noise one, `transformer_2` the low-noise one. `vae_dtype` is what the VAE
    computes in, whatever its weights are.
    """

    preset: Preset
    tokenizer: Tokenizer
    text_encoder: TextEncoder
    transformer: Transformer
    transformer_2: Transformer | None
    vae: VAE
    vae_dtype: DTypeLike = jnp.float32
    mesh: Mesh | None = None


@dataclass(frozen=True)
class _Component:
    """How one kind of module is stored: its folder, its config, its template and the sizes its layouts need."""

    folder: str
    stem: str
    module: type
    read_config: Callable[..., Any]
    config_from_shapes: Callable[..., Any]
    init: Callable[..., Any]
    sizes: Callable[[Any], weights.Sizes]
    keep_float32: Callable[[str], bool]


_VAE = _Component(
    folder="vae",
    stem="diffusion_pytorch_model",
    module=VAE,
    read_config=VAEConfig.from_json,
    config_from_shapes=config_from_shapes,
    init=init_vae,
    sizes=lambda config: {},
    keep_float32=lambda name: False,
)
_TRANSFORMER = _Component(
    folder="transformer",
    stem="diffusion_pytorch_model",
    module=Transformer,
    read_config=TransformerConfig.from_json,
    config_from_shapes=TransformerConfig.from_shapes,
    init=init_transformer,
    sizes=transformer.transformer_sizes,
    keep_float32=transformer.keep_float32,
)
_TEXT_ENCODER = _Component(
    folder="text_encoder",
    stem="model",
    module=TextEncoder,
    read_config=TextEncoderConfig.from_json,
    config_from_shapes=TextEncoderConfig.from_shapes,
    init=init_text_encoder,
    sizes=lambda config: {},
    keep_float32=lambda name: False,
)


def load(
    path_or_repo_or_preset: str | Path = "tiny",
    *,
    dtype: Any = None,
    vae_dtype: Any = None,
    mesh: Mesh | None = None,
    check_finite: bool = False,
) -> Wan:
    """Everything that one checkpoint needs to make videos.

    A preset's name (`PRESETS`; "tiny" comes with the package), a folder in the diffusers layout, or a hub id. `dtype` is what
    transformer and text encoder compute in (default: float32 on CPU, else bfloat16; time embedding, modulation and
    norms stay float32), `vae_dtype` what the VAE does (default: bfloat16 on TPU, else float32; its weights are float32).
    With a `mesh` every device reads its own slice of the weights. ValueError says what is missing or does not fit, and with
    `check_finite` which tensors have NaNs or infinities.
    """
    _keep_compiled_programs()
    source = resolve(path_or_repo_or_preset)
    index = checkpoint.read_json(source, "model_index.json")
    accelerated = jax.default_backend() != "cpu"
    dtype = jnp.dtype(dtype or (jnp.bfloat16 if accelerated else jnp.float32))
    vae_dtype = jnp.dtype(vae_dtype or (jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float32))
    options: dict[str, Any] = {"mesh": mesh, "check_finite": check_finite}
    first = load_transformer(source, "transformer", dtype=dtype, **options)
    second = load_transformer(source, "transformer_2", dtype=dtype, **options) if (index.get("transformer_2") or [None])[0] else None
    return Wan(
        preset_of(path_or_repo_or_preset),
        load_tokenizer(source),
        load_text_encoder(source, "text_encoder", dtype=dtype, **options),
        first,
        second,
        load_vae(source, "vae", **options),
        vae_dtype,
        mesh,
    )


def load_vae(
    path_or_repo: str | Path,
    subfolder: str | None = None,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    config: VAEConfig | None = None,
    check_finite: bool = False,
) -> VAE:
    """The VAE of a component folder, a pipeline folder, a hub id or a single file, under diffusers' names or the original ones.

    `dtype` is that of the weights: float32 unless given, whatever the file has.
    """
    return _load(_VAE, path_or_repo, subfolder, dtype or jnp.float32, mesh, config, check_finite)


def load_transformer(
    path_or_repo: str | Path,
    subfolder: str | None = None,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    config: TransformerConfig | None = None,
    check_finite: bool = False,
) -> Transformer:
    """The diffusion transformer of a component folder, a pipeline folder, a hub id or a single file, under either names.

    `dtype` is that of the weights (default: as stored), except those that stay float32: time embedding, modulation tables, norms.
    """
    return _load(_TRANSFORMER, path_or_repo, subfolder, dtype, mesh, config, check_finite)


def load_text_encoder(
    path_or_repo: str | Path,
    subfolder: str | None = None,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    *,
    config: TextEncoderConfig | None = None,
    check_finite: bool = False,
) -> TextEncoder:
    """The UMT5 encoder of a component folder, a pipeline folder, a hub id or a single file, under either names."""
    return _load(_TEXT_ENCODER, path_or_repo, subfolder, dtype, mesh, config, check_finite)


def _load(
    component: _Component,
    source: str | Path,
    subfolder: str | None,
    dtype: DTypeLike | None,
    mesh: Mesh | None,
    config: Any,
    check_finite: bool,
) -> Any:
    """Read one component, tensor by tensor, each straight to its place."""
    source = resolve(source)
    if subfolder is None and checkpoint.is_pipeline(source):
        subfolder = component.folder
    opened = checkpoint.open_checkpoint(source, subfolder)
    config = config or _config(component, opened)
    template = jax.eval_shape(lambda: component.init(config, jax.random.key(0)))
    place = None
    if mesh is not None:
        place = partial(sharding.weight_sharding, mesh)
    module = weights.fill(
        template,
        opened.tensors,
        component.sizes(config),
        dtype=lambda name: jnp.float32 if component.keep_float32(name) else dtype,
        place=place,
        what=opened.where,
    )
    if check_finite and (bad := weights.not_finite(module, component.sizes(config))):
        more = ", ..." if len(bad) > 8 else ""
        raise ValueError(f"{opened.where} has NaNs or infinities in {len(bad)} tensors: {', '.join(bad[:8])}{more}.")
    return module


def shardings(module: VAE | Transformer | TextEncoder, mesh: Mesh) -> Any:
    """Where each weight of a module (or of its shapes) lies on a mesh, as a tree like it."""
    component = _component_of(module)
    leaves = weights.entries(module, component.sizes(module.config))
    places = [sharding.weight_sharding(mesh, entry.names[0], entry.leaf.shape) for entry in leaves]
    return jax.tree.unflatten(jax.tree.structure(module), places)


def on_mesh(wan: Wan, mesh: Mesh) -> Wan:
    """The same model with every weight where `shardings` says; to load it there in the first place takes less memory."""
    names = ("text_encoder", "transformer", "transformer_2", "vae")
    parts = {name: getattr(wan, name) for name in names if getattr(wan, name) is not None}
    return replace(wan, mesh=mesh, **{name: jax.device_put(part, shardings(part, mesh)) for name, part in parts.items()})


def _component_of(module: VAE | Transformer | TextEncoder) -> _Component:
    """How this kind of module is stored."""
    return next(component for component in (_VAE, _TRANSFORMER, _TEXT_ENCODER) if isinstance(module, component.module))


def save(path: str | Path, model: Wan | VAE | Transformer | TextEncoder, *, dtype: DTypeLike | None = None) -> None:
    """Write a model (a pipeline folder) or one component (a component folder) in the layout that diffusers opens.

    `dtype` rounds the weights on the way; they load back identically without it. Files appear under their names when complete.
    """
    if isinstance(model, Wan):
        return _save_pipeline(Path(path), model, dtype)
    component = _component_of(model)
    tensors = weights.to_tensors(model, component.sizes(model.config))
    if dtype is not None:
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    checkpoint.save_component(path, tensors, model.config.to_json(), stem=component.stem)


def _save_pipeline(path: Path, wan: Wan, dtype: DTypeLike | None) -> None:
    """Every component in its folder, the tokenizer, the scheduler's config, the index and the preset."""
    parts = {"text_encoder": wan.text_encoder, "transformer": wan.transformer, "transformer_2": wan.transformer_2, "vae": wan.vae}
    for folder, module in parts.items():
        if module is not None:
            save(path / folder, module, dtype=dtype)
    tokenizer = {
        "tokenizer_class": "T5TokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "extra_ids": 0,
        "model_max_length": 512,
    }
    special = {name: tokenizer[name] for name in ("pad_token", "eos_token", "unk_token")}
    written = {
        "tokenizer/tokenizer.json": json.loads(wan.tokenizer.to_str()),
        "tokenizer/tokenizer_config.json": tokenizer,
        "tokenizer/special_tokens_map.json": special,
        "scheduler/scheduler_config.json": scheduler_config(wan.preset),
        "model_index.json": model_index(wan),
        "preset.json": wan.preset.to_json(),
    }
    for name, content in written.items():
        checkpoint.write_json(path / name, content)


def load_tokenizer(path_or_repo: str | Path) -> Tokenizer:
    """The tokenizer of a pipeline folder, a `tokenizer` folder, a tokenizer.json or a hub id."""
    return text_encoder.load_tokenizer(checkpoint.local_file(resolve(path_or_repo), "tokenizer/tokenizer.json"))


def scheduler_config(preset: Preset) -> dict[str, Any]:
    """The scheduler_config.json with which diffusers samples as the preset does."""
    if preset.solver == "euler":
        return {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": preset.flow_shift}
    common = {
        "num_train_timesteps": 1000,
        "prediction_type": "flow_prediction",
        "use_flow_sigmas": True,
        "flow_shift": preset.flow_shift,
        "solver_order": 2,
        "lower_order_final": True,
        "final_sigmas_type": "zero",
        "timestep_spacing": "linspace",
    }
    if preset.solver == "dpm":
        return {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver++", "solver_type": "midpoint", **common}
    return {"_class_name": "UniPCMultistepScheduler", "solver_type": "bh2", "predict_x0": True, "disable_corrector": [], **common}


def model_index(wan: Wan) -> dict[str, Any]:
    """The model_index.json of diffusers' WanPipeline."""
    denoiser = ["diffusers", "WanTransformer3DModel"]
    return {
        "_class_name": "WanPipeline",
        "_diffusers_version": "0.42.1",
        "boundary_ratio": wan.preset.boundary_ratio,
        "expand_timesteps": wan.preset.expand_timesteps,
        "scheduler": ["diffusers", scheduler_config(wan.preset)["_class_name"]],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "transformer": denoiser,
        "transformer_2": denoiser if wan.transformer_2 is not None else [None, None],
        "vae": ["diffusers", "AutoencoderKLWan"],
    }


def resolve(source: str | Path) -> str | Path:
    """A preset's name to its folder or hub id; anything else as it is."""
    if source == TINY.name:
        return Path(str(files("wanjax"))) / "assets" / "tiny"
    preset = PRESETS.get(str(source))
    return source if preset is None or preset.repo is None else preset.repo


def preset_of(path_or_repo_or_preset: str | Path) -> Preset:
    """The preset that was asked for by name, else the folder's own, else that of the public checkpoint it looks like."""
    if str(path_or_repo_or_preset) in PRESETS:
        return PRESETS[str(path_or_repo_or_preset)]
    source = resolve(path_or_repo_or_preset)
    if own := checkpoint.read_json(source, "preset.json", missing_ok=True):
        return Preset.from_json(own)
    architecture = TransformerConfig.from_json(checkpoint.read_json(source, "transformer/config.json"))
    index, scheduler = (checkpoint.read_json(source, name) for name in ("model_index.json", "scheduler/scheduler_config.json"))
    return preset_for(architecture, index, scheduler)


def read_configs(path_or_repo_or_preset: str | Path) -> tuple[Preset, dict[str, Any]]:
    """A model's preset and the configs of its `text_encoder`, `transformer` and `vae`; of a public checkpoint without opening it."""
    model, public = str(path_or_repo_or_preset), {preset.repo: preset for preset in PRESETS.values()}
    preset = PRESETS.get(model) or (None if Path(model).exists() else public.get(model))
    if preset is not None and preset.architecture is not None:
        latents = preset.architecture.in_channels
        return preset, {
            "text_encoder": UMT5_XXL,
            "transformer": preset.architecture,
            "vae": VAE_2_2 if latents == VAE_2_2.z_dim else VAE_2_1,
        }
    source = resolve(path_or_repo_or_preset)
    parts = {part.folder: _config(part, checkpoint.open_checkpoint(source, part.folder)) for part in (_TEXT_ENCODER, _TRANSFORMER, _VAE)}
    return preset_of(path_or_repo_or_preset), parts


def identify(opened: checkpoint.Checkpoint) -> tuple[_Component, Any]:
    """What kind of component a checkpoint is, and its config, from its config.json or its tensors."""
    sign = {_VAE: "decoder.conv_in.weight", _TRANSFORMER: "patch_embedding.weight", _TEXT_ENCODER: "shared.weight"}
    for component, name in sign.items():
        if name in opened.tensors:
            return component, _config(component, opened)
    raise ValueError(f"{opened.where} is no VAE, transformer or text encoder of Wan: it has none of {', '.join(sign.values())}.")


def _config(component: _Component, opened: checkpoint.Checkpoint) -> Any:
    """The config that a checkpoint's config.json describes, or where it has none the one its tensors' shapes show."""
    if opened.config:
        return component.read_config(opened.config)
    return component.config_from_shapes({name: tensor.shape for name, tensor in opened.tensors.items()})


def _keep_compiled_programs() -> None:
    """Turn JAX's persistent compilation cache on, unless the user has said anything about it."""
    if jax.config.values["jax_compilation_cache_dir"] is None and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "wanjax" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(cache))
