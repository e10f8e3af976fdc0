"""Whole models to folders and back: identity, dtypes, presets, and what is said when a folder does not fit."""

import json
import subprocess
import sys
from dataclasses import replace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import small_vae, small_wan

import wanjax
from wanjax.checkpoint import save_component
from wanjax.presets import PRESETS, Preset, preset_for
from wanjax.transformer import T2V_1_3B, T2V_14B, init_transformer, transformer_sizes
from wanjax.weights import expected

KINDS = ["2.1", "a14b", "5b"]


def same(a, b):
    """Whether two modules hold the same bits."""
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(jnp.array_equal(x, y)), a, b)))


@pytest.mark.parametrize("kind", KINDS)
def test_save_then_load_is_the_identity(kind, tmp_path):
    wan = small_wan(kind)
    wanjax.save(tmp_path, wan)
    back = wanjax.load(tmp_path)
    for part in ("text_encoder", "transformer", "transformer_2", "vae"):
        assert same(getattr(wan, part), getattr(back, part)), part
    assert back.preset == wan.preset
    assert back.tokenizer.to_str() == wan.tokenizer.to_str()
    latents = [wanjax.generate(model, "a red circle", output_type="latent") for model in (wan, back)]
    np.testing.assert_array_equal(*latents)


def test_components_load_alone_from_either_folder(tmp_path):
    wan = small_wan()
    wanjax.save(tmp_path, wan)
    for load, part, folder in (
        (wanjax.load_vae, wan.vae, "vae"),
        (wanjax.load_transformer, wan.transformer, "transformer"),
        (wanjax.load_text_encoder, wan.text_encoder, "text_encoder"),
    ):
        assert same(part, load(tmp_path))
        assert same(part, load(tmp_path / folder))
        assert same(part, load(tmp_path, subfolder=folder))


def test_bfloat16_keeps_what_must_stay_float32(tmp_path):
    wanjax.save(tmp_path, small_wan())
    wan = wanjax.load(tmp_path, dtype=jnp.bfloat16)
    weights = wan.transformer
    assert weights.blocks.attn1.to_q.weight.dtype == weights.proj_out.weight.dtype == jnp.bfloat16
    assert weights.blocks.attn1.norm_q.weight.dtype == weights.condition_embedder.time_proj.weight.dtype == jnp.bfloat16
    for kept in (
        weights.blocks.scale_shift_table,
        weights.scale_shift_table,
        weights.blocks.norm2.weight,
        weights.condition_embedder.time_embedder.linear_1.weight,
        wan.vae.decoder.conv_in.weight,
    ):
        assert kept.dtype == jnp.float32
    assert wan.text_encoder.shared.weight.dtype == jnp.bfloat16


def test_a_half_precision_folder_computes_in_float32_on_cpu(tmp_path):
    wanjax.save(tmp_path, small_wan(), dtype=jnp.float16)
    wan = wanjax.load(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves((wan.transformer, wan.text_encoder, wan.vae))} == {jnp.dtype(jnp.float32)}


def test_a_missing_component_is_named(tmp_path):
    wanjax.save(tmp_path, small_wan())
    for path in (tmp_path / "vae").iterdir():
        path.unlink()
    (tmp_path / "vae").rmdir()
    with pytest.raises(ValueError, match="vae"):
        wanjax.load(tmp_path)


def test_the_wrong_vae_is_told_everything_at_once(tmp_path):
    wanjax.save(tmp_path, small_wan())
    with pytest.raises(ValueError, match=r"vae.* does not fit VAE: .*missing .*unused .*wrong shape") as error:
        wanjax.load_vae(tmp_path, config=small_vae("2.2"))
    assert "\n" not in str(error.value)


def test_nowhere_is_one_sentence(tmp_path):
    with pytest.raises((ValueError, OSError), match="nothing"):
        wanjax.load(tmp_path / "nothing")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole(name):
    preset = PRESETS[name]
    assert preset.num_frames % 4 == 1
    assert (preset.guidance_scale_2 is None) == (preset.boundary_ratio is None)
    stride = 32 if name == "ti2v-5b" else 16
    assert all(side % stride == 0 for size in preset.sizes for side in size)
    assert replace(Preset.from_json(json.loads(json.dumps(preset.to_json()))), repo=preset.repo, architecture=preset.architecture) == preset


def test_public_checkpoints_are_known_by_architecture_and_experts():
    scheduler = {"_class_name": "UniPCMultistepScheduler", "flow_shift": 3.0}
    assert preset_for(T2V_14B, {}, scheduler) == PRESETS["t2v-14b"]
    assert preset_for(T2V_14B, {"boundary_ratio": 0.875}, scheduler) == PRESETS["t2v-a14b"]
    other = preset_for(replace(T2V_14B, num_layers=3), {}, {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 7.0})
    assert (other.name, other.solver, other.flow_shift) == ("custom", "euler", 7.0)
    with pytest.raises(ValueError, match="names Heun; known here: UniPC"):
        preset_for(replace(T2V_14B, num_layers=3), {}, {"_class_name": "Heun"})


def test_an_unknown_entry_in_a_preset_is_an_error():
    with pytest.raises(ValueError, match="unknown entries shfit"):
        Preset.from_json({**PRESETS["tiny"].to_json(), "shfit": 3})


MEASURE = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from wanjax.loading import load_transformer
jax.block_until_ready(jnp.zeros(3) + 1)
status = lambda: Path("/proc/self/status").read_text()  # getrusage would count the peak of the process that started this one
peak = lambda: int(next(line for line in status().splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
before = peak()
weights = jax.block_until_ready(load_transformer(sys.argv[1], dtype=sys.argv[2]))
held = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
print(peak() - before - held)
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_holds_little_beside_the_weights(tmp_path, dtype):
    """At most 1.2 times the largest file over what ends up on the device, here a checkpoint of 200 MB in four files."""
    config = replace(T2V_1_3B, num_attention_heads=4, ffn_dim=2048, num_layers=11, text_dim=512)
    template = jax.eval_shape(lambda: init_transformer(config, jax.random.key(0)))
    tensors = {name: np.ones(shape, np.float32) for name, shape in expected(template, transformer_sizes(config)).items()}
    save_component(tmp_path, tensors, config.to_json(), stem="diffusion_pytorch_model", max_shard_size=50_000_000)
    files = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    assert sum(files) > 180e6
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), dtype], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 1.2 * max(files)


def test_tensors_that_are_not_finite_are_named_when_asked_for(tmp_path):
    wan = small_wan("2.1")
    broken = wan.transformer.blocks.ffn.up.weight.at[1, 0, 0].set(jnp.nan)
    wan = replace(wan, transformer=eqx.tree_at(lambda w: w.blocks.ffn.up.weight, wan.transformer, broken))
    wanjax.save(tmp_path, wan)
    wanjax.load(tmp_path)
    with pytest.raises(ValueError, match=r"transformer.* has NaNs or infinities in 1 tensors: blocks\.1\.ffn\.net\.0\.proj\.weight\."):
        wanjax.load(tmp_path, check_finite=True)
