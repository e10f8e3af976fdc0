"""Pictures cut over devices, cut in tiles, and computed again in the backward pass: the same numbers every way."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from vae_models import SHORT, random_latents, random_vae

import wanjax
from wanjax.program import analyse
from wanjax.sharding import choose_cut, make_mesh, split_picture
from wanjax.vae import (
    VAE_2_1,
    VAE_2_2,
    _decode,
    _decode_step,
    _encode,
    _encode_step,
    decode,
    decode_stream,
    encode,
    encode_stream,
    init_vae,
)
from wanjax.vae_passes import choose_passes, choose_strips, overlap, tile_starts


@pytest.fixture(scope="module", params=SHORT)
def vae(request):
    return random_vae(SHORT[request.param])


def close(a, b, tolerance=1e-5):
    assert np.shape(a) == np.shape(b)
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    ("devices", "height", "width", "cut"),
    [
        (8, 60, 104, (1, 8)),
        (8, 90, 160, (1, 8)),
        (4, 160, 90, (4, 1)),
        (8, 160, 90, (8, 1)),
        (16, 60, 104, (4, 4)),
        (8, 104, 60, (8, 1)),
        (4, 64, 64, (1, 4)),
        (6, 3, 2, (3, 2)),
        (8, 9, 9, (2, 4)),
        (1, 5, 7, (1, 1)),
    ],
)
def test_the_cut_is_chosen_from_the_latents(devices, height, width, cut):
    assert choose_cut(devices, height, width) == cut


def test_videos_go_to_devices_of_their_own_first():
    split = split_picture(make_mesh(data=2, context=4), 6, 4, 8)
    assert dict(split.mesh.shape) == {"videos": 2, "rows": 1, "columns": 4}
    assert list(split.mesh.devices.flat) == jax.devices()


CUTS = {
    "portrait": (1, 8, 3, {"context": 8}),
    "both ways, and videos": (2, 2, 6, {"data": 2, "fsdp": 4}),
    "nothing divides, one device has nothing": (1, 5, 3, {"data": 2, "tensor": 4}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case == "both ways, and videos" else pytest.mark.slow) for case in CUTS])
def test_cut_over_devices_is_the_same(vae, case):
    """Both ways, whole and in streams, on 8 devices and on one."""
    batch, height, width, axes = CUTS[case]
    mesh = make_mesh(**axes)
    z = jnp.asarray(random_latents(vae.config, 1, batch=batch, frames=3, size=(height, width)))
    video = decode(z, vae)
    close(decode(z, vae, mesh=mesh), video)
    encoded = encode(video, vae)
    close(encode(video, vae, mesh=mesh).mean, encoded.mean)
    if case == "portrait":
        close(np.concatenate(list(decode_stream(z, vae, mesh=mesh)), 2), video)
        close(np.concatenate([p.logvar for p in encode_stream([video], vae, mesh=mesh)], 2), encoded.logvar)


@pytest.mark.parametrize(
    ("size", "over", "strips"),
    [
        ((60, 104), (1, 8), (2, 15)),
        ((90, 160), (1, 8), (2, 15)),
        ((160, 90), (8, 1), (3, 15)),
        ((60, 104), (1, 1), (3, 13)),
        ((90, 94), (1, 1), (2, 15)),
        ((60, 104), (4, 4), (2, 1)),
        ((7, 34), (1, 1), (2, 1)),
    ],
)
def test_strips_are_chosen_along_what_is_not_cut_over_devices(size, over, strips):
    assert choose_strips(size, over) == strips


@pytest.mark.parametrize(
    ("size", "devices"),
    [
        pytest.param((8, 3), 1, id="rows", marks=pytest.mark.slow),
        pytest.param((3, 9), 1, id="columns", marks=pytest.mark.slow),
        pytest.param((9, 7), 4, id="rows, devices padded"),
        pytest.param((6, 9), 2, id="columns, devices", marks=pytest.mark.slow),
    ],
)
def test_strips_are_the_same(vae, size, devices):
    """As on a TPU: side by side, on one device and on several, both ways."""
    mesh = make_mesh(context=devices, devices=jax.devices()[:devices])
    z = jnp.asarray(random_latents(vae.config, 1, batch=2 if devices == 1 else 1, size=size))
    passes = choose_passes(vae.config, z.shape, chunk=1, tile=None, mesh=mesh)
    assert not passes.strips
    video = _decode(z, vae, jnp.float32, passes)
    on_tpu = passes._replace(strips=True, alike=True)
    close(_decode(z, vae, jnp.float32, on_tpu), video)
    close(_encode(video, vae, jnp.float32, on_tpu).mean, _encode(video, vae, jnp.float32, passes).mean)


def test_few_frames_at_a_time_are_the_same(vae):
    """As on a CPU where pictures are large: at the video's size two frames of a chunk's four."""
    z = jnp.asarray(random_latents(vae.config, 1, frames=2))
    passes = choose_passes(vae.config, z.shape, chunk=1, tile=None, mesh=None)
    assert (passes.few, choose_passes(vae.config, (1, 16, 2, 64, 64), chunk=1, tile=None, mesh=None).few) == (4, 2)
    video = _decode(z, vae, jnp.float32, passes)
    few = passes._replace(few=2)
    close(_decode(z, vae, jnp.float32, few), video)
    close(_encode(video, vae, jnp.float32, few).mean, _encode(video, vae, jnp.float32, passes).mean)


@pytest.mark.parametrize(("kind", "devices"), [("2.1", 1), ("2.2", 2)])
def test_streams_on_a_tpu_are_the_same_of_one_program_each(kind, devices, monkeypatch):
    """The first latent frame's, which goes through as the others do, and theirs."""
    vae = random_vae(SHORT[kind])
    mesh = None if devices == 1 else make_mesh(context=2, devices=jax.devices()[:2])
    vae = jax.device_put(vae, jax.devices()[0] if mesh is None else NamedSharding(mesh, P()))
    z = jnp.asarray(random_latents(vae.config, 1, size=(3, 4)))
    video = decode(z, vae, mesh=mesh)
    mean = encode(video, vae, mesh=mesh).mean
    monkeypatch.setattr("wanjax.vae.choose_passes", lambda *args, **options: choose_passes(*args, **options)._replace(alike=True))
    before = [step._cache_size() for step in (_decode_step, _encode_step)]
    close(np.concatenate(list(decode_stream(z, vae, mesh=mesh)), 2), video)
    close(np.concatenate([p.mean for p in encode_stream([video], vae, mesh=mesh)], 2), mean)
    assert [step._cache_size() for step in (_decode_step, _encode_step)] == [count + 1 for count in before]


@pytest.mark.slow
def test_gradients_cross_devices():
    """Of the latents and of the weights."""
    vae = random_vae(SHORT["2.1"])
    z = jnp.asarray(random_latents(vae.config, 1, frames=2, size=(3, 5)))
    loss = lambda z, vae, mesh=None: jnp.mean(jnp.square(decode(z, vae, mesh=mesh)))
    whole = jax.grad(loss, (0, 1))(z, vae)
    cut = jax.grad(lambda z, vae: loss(z, vae, make_mesh(context=8)), (0, 1))(z, vae)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * max(float(np.linalg.norm(a)), 1e-3)


def collectives(run, x, vae, mesh):
    """What devices exchange in the compiled program, as kind -> bytes of each."""
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))
    latents = x.shape if run is _decode else (1, 16, 3, x.shape[3] // vae.config.stride, x.shape[4] // vae.config.stride)
    passes = choose_passes(vae.config, latents, chunk=None, tile=None, mesh=mesh)
    report = analyse(run.lower(place(x), jax.tree.map(place, vae), jnp.float32, passes).compile())
    found: dict[str, list[int]] = {}
    for c in report.collectives:
        found.setdefault(c.kind, []).append(c.bytes)
    return found


@pytest.mark.parametrize("size", [(4, 8), (8, 4)], ids=["landscape", "portrait"])
@pytest.mark.parametrize("run", [_decode, _encode], ids=["decode", "encode"])
def test_only_edges_and_the_attention_s_keys_travel(vae, run, size):
    """Nothing as large as a picture above the latents' size."""
    config = vae.config
    z = random_latents(config, 0, frames=3, size=size)
    x = z if run is _decode else np.zeros((1, 3, 9, size[0] * config.stride, size[1] * config.stride), np.float32)
    assert_little_travels(collectives(run, x, vae, make_mesh(context=8)), config, size)


def assert_little_travels(found, config, size):
    """Edges, and the keys and values of the attention: two gathers for each of the first and the other chunks."""
    assert set(found) == {"collective-permute", "all-gather"}
    channels = (config.decoder_base_dim or config.base_dim) * config.dim_mult[-1]
    assert len(found["all-gather"]) <= 4
    assert max(found["all-gather"]) <= 2 * 4 * channels * size[0] * size[1] * 4


@pytest.mark.tpu
def test_only_edges_and_keys_travel_on_a_tpu():
    pytest.importorskip("libtpu")
    from wanjax.chips import topology_devices

    vae, size = random_vae(SHORT["2.1"]), (8, 6)
    mesh = make_mesh(data=2, context=4, devices=topology_devices("v6e:2x4"))
    assert_little_travels(collectives(_decode, random_latents(vae.config, 0, frames=3, size=size), vae, mesh), vae.config, size)


def test_tiles_cover_and_overlap():
    for whole, tile in [(8, 8), (9, 8), (25, 8), (90, 32), (160, 32), (33, 32)]:
        starts = tile_starts(whole, tile)
        assert starts[0] == 0
        assert starts[-1] == whole - tile
        assert all(0 < b - a <= tile - overlap(tile) for a, b in itertools.pairwise(starts)), starts


def psnr(a, b):
    """Of two videos in [-1, 1]."""
    return float(10 * np.log10(4 / np.mean(np.square(np.asarray(a, np.float64) - np.asarray(b)))))


def test_one_tile_is_the_whole(vae):
    z = random_latents(vae.config, 1, frames=3, size=(3, 4))
    tile = 8 * vae.config.stride
    close(decode(z, vae, tile=tile), decode(z, vae))
    video = decode(z, vae)
    close(encode(video, vae, tile=tile).mean, encode(video, vae).mean)


def test_tiles_leave_no_seams(data):
    """Real frames through the trained tiny VAE, at a size that is no multiple of the tile; measured: 91 and 85 dB."""
    vae = wanjax.load("tiny").vae
    frames = [frame for frame, _ in zip(wanjax.video.iterate_frames(data / "big_buck_bunny_720p.mp4"), range(5), strict=False)]
    small = jax.image.resize(np.stack(frames).astype(np.float32) / 127.5 - 1, (5, 200, 360, 3), "linear")
    video = np.clip(np.asarray(small), -1, 1).transpose(3, 0, 1, 2)[None]
    z = encode(video, vae).mean
    whole, tiled = decode(z, vae), decode(z, vae, tile=128)
    assert psnr(tiled, whole) >= 70
    close(np.concatenate(list(decode_stream(z, vae, tile=128)), 2), tiled)
    assert psnr(decode(encode(video, vae, tile=128).mean, vae), whole) >= 70


def test_sizes_that_cannot_be_are_refused(vae):
    z = random_latents(vae.config, 1, frames=1)
    stride = vae.config.stride
    with pytest.raises(ValueError, match=f"a multiple of {stride} and at least {8 * stride}; got {stride + 1}: try {8 * stride}"):
        decode(z, vae, tile=stride + 1)
    with pytest.raises(ValueError, match="give one of them"):
        decode(z, vae, tile=8 * stride, mesh=make_mesh(data=8))
    with pytest.raises(ValueError, match="at least 1; got 0"):
        next(encode_stream([], vae, chunk=0))


def test_by_default_chunks_are_large_where_pictures_are_small():
    chunk = lambda t, h, w, config=VAE_2_1: choose_passes(config, (1, config.z_dim, t, h, w), chunk=None, tile=None, mesh=None).chunk
    assert [chunk(21, 60, 104), chunk(5, 16, 16), chunk(5, 8, 8), chunk(21, 8, 8), chunk(1, 8, 8), chunk(8, 8, 10)] == [1, 2, 4, 5, 1, 1]
    assert [chunk(5, 8, 8, VAE_2_2), chunk(5, 4, 4, VAE_2_2), chunk(21, 30, 52, VAE_2_2)] == [2, 4, 1]  # as many pixels


@pytest.mark.slow
def test_gradients_match_finite_differences(vae):
    """Along one direction in latents and weights, in chunks that are scanned and computed again."""
    z = jnp.asarray(random_latents(vae.config, 1, frames=3))
    loss = jax.jit(lambda z, vae: jnp.mean(jnp.square(decode(z, vae, chunk=1, remat=True) - 0.1)))
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape) * np.std(leaf), jnp.float32), (z, vae))
    slope = sum(jnp.vdot(a, b) for a, b in zip(*map(jax.tree.leaves, (jax.grad(loss, (0, 1))(z, vae), direction)), strict=True))
    moved = lambda step: loss(*jax.tree.map(lambda x, d: x + step * d, (z, vae), direction))
    assert float(slope) == pytest.approx(float(moved(1e-3) - moved(-1e-3)) / 2e-3, rel=0.02)


@pytest.mark.slow
def test_encoding_has_gradients_too():
    vae = random_vae(SHORT["2.2"])
    video = decode(random_latents(vae.config, 1, frames=3), vae)
    loss = lambda vae, chunk, remat: jnp.mean(jnp.square(encode(video, vae, chunk=chunk, remat=remat).mean))
    whole, scanned = (jax.grad(loss)(vae, chunk, remat) for chunk, remat in [(2, False), (1, True)])
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(scanned), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * max(float(np.linalg.norm(a)), 1e-3)


@pytest.mark.slow
def test_gradients_are_finite_where_biases_are_zero():
    """Then frames before the first stay zero through every block."""
    vae = init_vae(SHORT["2.1"], jax.random.key(0))
    z = jnp.asarray(random_latents(vae.config, 0, frames=2))
    gradient = jax.jit(jax.grad(lambda vae, z: jnp.mean(jnp.square(decode(z, vae, chunk=1, remat=True))), (0, 1)))(vae, z)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_remat_takes_a_quarter_of_the_memory():
    """Of a gradient of the weights: 9.7 MB measured here, and 38.2 without."""
    vae = random_vae(SHORT["2.1"])
    z = jnp.asarray(random_latents(vae.config, 0, frames=5, size=(8, 8)))
    gradient = jax.jit(jax.grad(lambda vae: jnp.mean(jnp.square(decode(z, vae, chunk=1, remat=True)))))
    memory = gradient.lower(vae).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 15e6


@pytest.mark.slow
def test_gradients_work_under_vmap():
    vae = random_vae(SHORT["2.1"])
    z = jnp.asarray(random_latents(vae.config, 1, batch=2, frames=2))
    one = jax.grad(lambda z: jnp.mean(jnp.square(decode(z[None], vae))))
    close(jax.vmap(one)(z), jnp.stack([one(z[0]), one(z[1])]))


def test_other_shapes_of_the_real_architecture_can_be_traced():
    """Shapes only: the full-size decoder over a mesh, in tiles, and backwards."""
    vae = jax.eval_shape(lambda: init_vae(VAE_2_1, jax.random.key(0)))
    z = jax.ShapeDtypeStruct((1, 16, 5, 90, 160), jnp.float32)
    for options in ({"mesh": make_mesh(data=2, context=4)}, {"tile": 256}, {"remat": True}):
        assert jax.eval_shape(lambda z, vae, options=options: decode(z, vae, **options), z, vae).shape == (1, 3, 17, 720, 1280)
