"""Rewriting checkpoints: original names, single files, dtypes, and what `info` says of the result."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import small_wan
from safetensors.numpy import load_file, save_file

import wanjax
from wanjax import names
from wanjax.cli import main
from wanjax.convert import convert, describe
from wanjax.loading import load_text_encoder, load_transformer, load_vae, save

PARTS = {"transformer": load_transformer, "vae": load_vae, "text_encoder": load_text_encoder}


def same(a, b):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: x.dtype == y.dtype and bool(jnp.array_equal(x, y)), a, b)))


def stored(folder):
    """All tensors of a folder by name."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def original_transformer(tensors):
    """The same tensors under the authors' names, made by turning the public table's few rules around by hand."""
    rules = [
        (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
        (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
        (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
        (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
        (r"^condition_embedder\.time_proj\.", "time_projection.1."),
        (r"^scale_shift_table$", "head.modulation"),
        (r"^proj_out\.", "head.head."),
        (r"\.scale_shift_table$", ".modulation"),
        (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
        (r"\.ffn\.net\.2\.", ".ffn.2."),
        (r"\.norm2\.", ".norm3."),
        (r"\.attn1\.", ".self_attn."),
        (r"\.attn2\.", ".cross_attn."),
        (r"\.to_([qkv])\.", r".\1."),
        (r"\.to_out\.0\.", ".o."),
    ]
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, new in rules:
            name = re.sub(pattern, new, name)
        renamed[name] = tensor
    return renamed


@pytest.mark.parametrize("part", PARTS)
def test_a_folder_is_rewritten_as_it_is(part, tmp_path):
    weights = getattr(small_wan("2.1"), part)
    save(tmp_path / "in", weights)
    convert(tmp_path / "in", tmp_path / "out")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert same(PARTS[part](tmp_path / "out"), weights)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_original_names_in_a_single_file_become_diffusers_names(prefix, tmp_path):
    weights = small_wan("2.1").transformer
    save(tmp_path / "in", weights)
    tensors = original_transformer(stored(tmp_path / "in"))
    assert dict(names.to_diffusers(list(tensors))).keys() == tensors.keys()
    save_file({prefix + name: tensor for name, tensor in tensors.items()}, tmp_path / "wan.safetensors")
    convert(tmp_path / "wan.safetensors", tmp_path / "out")
    before, after = stored(tmp_path / "in"), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert same(load_transformer(tmp_path / "wan.safetensors", config=weights.config), weights)


def test_another_dtype_is_that_of_every_tensor(tmp_path):
    weights = small_wan("2.1").transformer
    save(tmp_path / "in", weights)
    convert(tmp_path / "in", tmp_path / "out", dtype=jnp.bfloat16)
    assert {tensor.dtype.name for tensor in stored(tmp_path / "out").values()} == {"bfloat16"}
    back, rounded = load_transformer(tmp_path / "out", dtype=jnp.float32), weights.proj_out.weight.astype(jnp.bfloat16)
    assert jnp.array_equal(back.proj_out.weight, rounded.astype(jnp.float32))


def test_large_components_are_cut_in_several_files_with_an_index(tmp_path):
    weights = small_wan("2.1").transformer
    save(tmp_path / "in", weights)
    convert(tmp_path / "in", tmp_path / "out", max_shard_size=100_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1
    assert files[0] == f"diffusion_pytorch_model-00001-of-{len(files):05}.safetensors"
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    assert same(load_transformer(tmp_path / "out"), weights)


def test_the_command_rewrites_and_describes(tmp_path, capsys):
    save(tmp_path / "in", small_wan("2.1").vae)
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--dtype", "float16"]) == 0
    capsys.readouterr()
    assert main(["info", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "float16" in said
    assert "AutoencoderKLWan" in said
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "other")]) == 2
    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_pipeline_is_described_by_component(tmp_path):
    wan = small_wan("a14b")
    wanjax.save(tmp_path, wan)
    said = describe(tmp_path)
    count = sum(leaf.size for leaf in jax.tree.leaves(wan.transformer))
    assert f"{count:,}" in said
    for folder in ("text_encoder", "transformer", "transformer_2", "vae", "preset"):
        assert folder in said


def test_tensors_of_no_known_model_are_refused(tmp_path):
    save_file({"something.weight": np.zeros((2, 2), np.float32)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="is no VAE, transformer or text encoder of Wan"):
        convert(tmp_path / "other.safetensors", tmp_path / "out")
    assert not (tmp_path / "out").exists()
