"""Many devices give what one gives: attention across them, weights in parts, and whole videos on any mesh. Eight CPU devices."""

import warnings
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models import initialised, small_wan

from wanjax.attention import plain_attention
from wanjax.loading import load, load_transformer, on_mesh, save
from wanjax.pipeline import generate
from wanjax.sharding import RULES, Layout, choose_way, make_mesh, weight_sharding
from wanjax.text_encoder import UMT5_XXL, init_text_encoder
from wanjax.transformer import T2V_14B, TI2V_5B, init_transformer, transformer_sizes, velocity
from wanjax.vae import VAE_2_1, VAE_2_2, init_vae
from wanjax.weights import entries


def distance(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def drawn(tokens, heads, scale=1.0, dim=8, batch=2):
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.random.normal(key, (batch, tokens, heads, dim)) for key in keys)
    return scale * q, k, v


def with_gradients(attend):
    weigh = lambda out: jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))
    return jax.jit(lambda *qkv: (attend(*qkv), *jax.grad(lambda *qkv: weigh(attend(*qkv)), argnums=(0, 1, 2))(*qkv)))


def across(layout, tokens):
    """Attention as `velocity` asks for it: rows padded to divide, cut again after."""

    def attend(q, k, v):
        padded = [layout.rows(x, 1, 0) for x in (q, k, v)]
        valid = tokens if padded[0].shape[1] > tokens else None
        return layout.attend(*padded, valid=valid)[:, :tokens]

    return attend


@pytest.mark.parametrize("kind", ["auto", "ring"])
@pytest.mark.parametrize(
    ("sizes", "tokens", "heads"),
    [
        (dict(context=8), 40, 3),
        (dict(context=8), 37, 4),
        (dict(context=8), 9, 2),  # the last three devices have padding alone
        (dict(data=2, context=4), 21, 4),
        (dict(context=4, tensor=2), 30, 6),
        (dict(data=2, fsdp=2, context=2), 11, 1),
    ],
    ids=str,
)
def test_attention_across_devices_is_attention(sizes, tokens, heads, kind):
    given = drawn(tokens, heads)
    layout = Layout(make_mesh(**sizes), kind)
    for ours, wanted in zip(with_gradients(across(layout, tokens))(*given), with_gradients(plain_attention)(*given), strict=True):
        assert distance(ours, wanted) <= 1e-6


def test_large_logits_across_a_ring():
    """Scores of hundreds: float32 rounds each by 1e-5, so the measure is plain attention's own distance from float64."""
    given = drawn(37, 3, 30.0)
    exact = [np.asarray(x, np.float64) for x in given]
    scores = np.einsum("bsnd,blnd->bnsl", *exact[:2]) * 8**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("bnsl,blnd->bsnd", weights / weights.sum(-1, keepdims=True), exact[2])
    ours = jax.jit(across(Layout(make_mesh(context=8), "ring"), 37))(*given)
    assert distance(ours, wanted) <= max(1e-6, 1.2 * distance(plain_attention(*given), wanted))


def test_ring_moves_keys_and_values_once_a_hop_and_gathers_nothing():
    mesh = make_mesh(context=8)
    given = drawn(40, 3)
    text = jax.jit(across(Layout(mesh, "ring"), 40)).lower(*given).compile().as_text()
    hops = sum(line.count(" collective-permute(") + line.count(" collective-permute-start(") for line in text.splitlines())
    assert 7 <= hops <= 14  # k and v, together or each alone
    assert "all-gather" not in text.split("ENTRY")[0]
    assert "all-to-all" not in text


@pytest.mark.parametrize(
    ("devices", "heads", "kind", "way"),
    [
        (8, 40, "auto", (8, 1)),
        (8, 12, "auto", (4, 2)),
        (8, 3, "auto", (1, 8)),
        (8, 40, "ring", (1, 8)),
        (6, 40, "2d", (2, 3)),
        (4, 40, "ulysses", (4, 1)),
    ],
)
def test_the_way_is_chosen_by_what_divides(devices, heads, kind, way):
    chosen = choose_way(devices, heads, kind, tokens=4095)
    assert chosen[:2] == way
    assert f"{heads} heads on {devices} devices" in chosen.why


def test_many_tokens_go_around_a_ring():
    chosen = choose_way(8, 40, tokens=9450)
    assert chosen[:2] == (1, 8)
    assert "9450 tokens" in chosen.why
    assert choose_way(8, 40, "2d", tokens=9450)[:2] == (8, 1)


def test_ways_and_meshes_that_cannot_be():
    with pytest.raises(ValueError, match="12 heads do not divide"):
        choose_way(8, 12, "ulysses")
    with pytest.raises(ValueError, match="got 'star'"):
        choose_way(8, 8, "star")
    with pytest.raises(ValueError, match="8 here; got data=3"):
        make_mesh(data=3)
    with pytest.raises(ValueError, match="one may be -1"):
        make_mesh(data=-1, context=-1)
    with pytest.raises(ValueError, match="at least 1"):
        make_mesh(data=0)
    assert dict(make_mesh(data=2, context=-1).shape) == {"data": 2, "fsdp": 1, "context": 4, "tensor": 1}


@pytest.mark.parametrize("sizes", [dict(fsdp=8), dict(fsdp=2, tensor=4), dict(data=2, context=4)], ids=str)
def test_every_weight_of_every_model_has_its_place(sizes):
    mesh = make_mesh(**sizes)
    for init, config, layout in (
        (init_transformer, T2V_14B, transformer_sizes(T2V_14B)),
        (init_transformer, TI2V_5B, transformer_sizes(TI2V_5B)),
        (init_text_encoder, UMT5_XXL, None),
        (init_vae, VAE_2_1, None),
        (init_vae, VAE_2_2, None),
    ):
        template = jax.eval_shape(lambda init=init, config=config: init(config, jax.random.key(0)))
        whole = there = 0
        for entry in entries(template, layout):
            sharding = weight_sharding(mesh, entry.names[0], entry.leaf.shape)
            whole += entry.leaf.size
            there += np.prod(sharding.shard_shape(entry.leaf.shape))
        if init is not init_vae:
            assert there < whole / (mesh.size / mesh.shape["data"]) * 1.1  # split evenly but for small tables


def test_a_weight_without_a_rule_and_one_that_does_not_divide():
    mesh = make_mesh(fsdp=4, tensor=2)
    with pytest.raises(ValueError, match=r"no rule says where weight blocks\.0\.new\.weight"):
        weight_sharding(mesh, "blocks.0.new.weight", (4, 4))
    assert weight_sharding(mesh, "blocks.0.attn1.to_q.weight", (2, 6, 8)).spec == P(None, None, "tensor")
    assert len({pattern for pattern, _ in RULES}) == len(RULES)


def test_load_puts_every_slice_in_its_place(tmp_path):
    config = replace(T2V_14B, num_attention_heads=2, attention_head_dim=16, text_dim=16, freq_dim=32, ffn_dim=48, num_layers=2)
    weights = initialised(init_transformer, config)
    save(tmp_path, weights)
    placed = load_transformer(tmp_path, mesh=make_mesh(fsdp=4, tensor=2))
    assert placed.blocks.ffn.up.weight.sharding.shard_shape((2, 32, 48)) == (2, 8, 24)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(weights), strict=True):
        np.testing.assert_array_equal(a, b)


OPTIONS = dict(height=48, width=32, num_frames=5, num_inference_steps=3, guidance_scale=3.0, output_type="latent")


@pytest.mark.parametrize("kind", ["2.1", "5b"])
def test_the_same_seed_is_the_same_video_on_every_mesh(kind, tmp_path):
    wan = small_wan(kind)
    size = dict(height=96, width=64) if kind == "5b" else {}
    options = {**OPTIONS, **size}
    alone = generate(wan, "a red circle moves left", seed=3, **options)
    meshes = [
        dict(context=8),
        dict(data=2, context=4),
        dict(fsdp=2, context=2, tensor=2),
        dict(data=2, devices=2),
        dict(context=4, devices=4),
    ]
    for sizes in meshes if kind == "2.1" else meshes[1:3]:
        sizes = dict(sizes)
        mesh = make_mesh(devices=jax.devices()[: sizes.pop("devices", 8)], **sizes)
        assert distance(generate(on_mesh(wan, mesh), "a red circle moves left", seed=3, **options), alone) <= 1e-5
    if kind == "2.1":
        pair = generate(wan, ["a blue square", "a red circle moves left"], seed=[1, 3], mesh=make_mesh(data=4, context=2), **options)
        assert distance(pair[1:], alone) <= 1e-5


@pytest.mark.parametrize("per_token", [False, True])
def test_tokens_in_whole_tiles_are_the_same(per_token, monkeypatch):
    """As on a TPU whose devices have several videos: here most devices have padding alone, and every table is as long."""
    wan, rng = small_wan("2.1"), np.random.default_rng(0)
    config = wan.transformer.config
    latents = jnp.asarray(rng.normal(size=(2, config.in_channels, 3, 6, 4)), jnp.float32)
    timestep = jnp.asarray(rng.uniform(0, 1000, (2, 3 * 3 * 2) if per_token else 2), jnp.float32)
    text = jnp.asarray(rng.normal(size=(2, 7, config.text_dim)), jnp.float32)
    given = (latents, timestep, text, wan.transformer)
    layout = Layout(make_mesh(context=8))
    monkeypatch.setattr(Layout, "_tiled", lambda *_: True)
    assert layout.rows(jnp.zeros((2, 18, 8)), 1, 0).shape == (2, 128, 8)
    assert distance(jax.jit(partial(velocity, layout=layout))(*given), jax.jit(velocity)(*given)) <= 1e-6


def test_devices_that_repeat_work_are_said():
    layout = Layout(make_mesh(data=2, fsdp=2, tensor=2))
    with pytest.warns(UserWarning, match="1 videos .* data x fsdp = 4 devices: every 4 of them do the same"):
        layout.warn_of_repeated_work(1, 2)
    with pytest.warns(UserWarning, match="every 2 of them"):
        layout.warn_of_repeated_work(2, 2)
    with pytest.warns(UserWarning, match="3 heads do not divide among tensor = 2"):
        layout.warn_of_repeated_work(4, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layout.warn_of_repeated_work(8, 4)


def test_frames_from_a_model_loaded_on_a_mesh(tmp_path):
    save(tmp_path, small_wan("2.1"))
    options = {**OPTIONS, "output_type": "float"}
    frames = generate(load(tmp_path), "a red circle", **options)
    spread = generate(load(tmp_path, mesh=make_mesh(data=2, context=4)), "a red circle", **options)
    assert np.abs(spread - frames).max() <= 1e-4
