"""The VAE without torch: golden numbers from diffusers, and equalities that hold for any weights."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vae_models import CONFIGS, SHORT, random_latents, random_tensors, random_vae, random_video, template

import wanjax
from wanjax.loading import load_vae, save
from wanjax.vae import VAE_2_1, VAE_2_2, VAEConfig, decode, decode_stream, denormalize_latents, encode, encode_stream, normalize_latents
from wanjax.vae_config import config_from_shapes
from wanjax.vae_inputs import as_vae
from wanjax.video import iterate_frames
from wanjax.weights import expected, fill

GOLDEN = Path(__file__).parent / "golden" / "vae.npz"
TINY = Path(wanjax.__file__).parent / "assets" / "tiny" / "vae"
GOLDEN_KINDS = ("2.1", "2.2")


@pytest.fixture(scope="module", params=SHORT)
def vae(request):
    return random_vae(SHORT[request.param])


@pytest.fixture(scope="module")
def latents(vae):
    """Two videos of four latent frames."""
    return random_latents(vae.config, 1, batch=2, frames=4)


@pytest.fixture(scope="module")
def video(vae):
    """Two videos of thirteen frames."""
    return random_video(vae.config, 2, batch=2, frames=13)


@pytest.fixture(scope="module")
def decoded(vae, latents):
    return np.asarray(decode(latents, vae))


@pytest.fixture(scope="module")
def encoded(vae, video):
    return np.asarray(encode(video, vae).mean)


def close(a, b, tolerance=1e-5):
    """Whether two arrays of order one are equal but for float32 rounding."""
    assert np.shape(a) == np.shape(b)
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", GOLDEN_KINDS)
def test_numbers_are_those_of_diffusers(kind):
    """The golden file was written by tests/golden/make_vae.py."""
    config = CONFIGS[kind]
    vae = random_vae(config)
    with np.load(GOLDEN) as stored:
        video, mean, logvar = (stored[f"{kind}/{name}"] for name in ("video", "mean", "logvar"))
    close(decode(random_latents(config, 1), vae)[..., ::3, ::3], video)
    posterior = encode(random_video(config, 2), vae)
    close(posterior.mean, mean)
    close(posterior.logvar, logvar)


@pytest.mark.parametrize("chunk", [2, 3], ids=["chunks and a rest", "all at once"])
def test_any_chunking_gives_the_same(vae, latents, video, decoded, encoded, chunk):
    close(decode(latents, vae, chunk=chunk), decoded)
    close(encode(video, vae, chunk=chunk).mean, encoded)


def test_what_comes_later_changes_nothing_before(vae, latents, video, decoded, encoded):
    """All at once, where nothing but the convolutions themselves keeps the future out."""
    changed = np.concatenate([latents[:, :, :-1], -latents[:, :, -1:]], 2)
    other = np.asarray(decode(changed, vae, chunk=3))
    close(other[:, :, :-4], decoded[:, :, :-4])
    assert (np.abs(other - decoded).max((0, 1, 3, 4))[-4:] > 1e-2).all()
    changed = np.concatenate([video[:, :, :-4], -video[:, :, -4:]], 2)
    other = np.asarray(encode(changed, vae, chunk=3).mean)
    close(other[:, :, :-1], encoded[:, :, :-1])
    assert np.abs(other - encoded)[:, :, -1].max() > 1e-2


def test_part_of_a_batch_and_of_a_length_is_that_part_of_the_result(vae, latents, video, decoded, encoded):
    close(decode(latents[1:, :, :2], vae), decoded[1:, :, :5])
    close(encode(video[1:, :, :5], vae).mean, encoded[1:, :, :2])


def test_decode_stream_gives_the_same_frames(vae, latents, decoded):
    parts = list(decode_stream(latents, vae))
    assert [part.shape[2] for part in parts] == [1, 4, 4, 4]
    close(np.concatenate(parts, 2), decoded)


def test_decode_stream_gives_frames_for_files(vae, latents, decoded):
    parts = list(decode_stream(latents, vae, uint8=True, chunk=2))
    assert [part.shape[1] for part in parts] == [1, 8, 4]
    frames = np.concatenate(parts, 1)
    assert frames.dtype == np.uint8
    exact = 255 * (decoded.transpose(0, 2, 3, 4, 1) / 2 + 0.5)
    assert np.abs(frames - exact).max() <= 0.501


def test_encode_stream_takes_parts_of_any_length(vae, video, encoded):
    parts = np.split(video, [2, 3, 9], axis=2)
    posteriors = list(encode_stream(iter(parts), vae))
    assert [posterior.mean.shape[2] for posterior in posteriors] == [1, 1, 1, 1]
    close(np.concatenate([posterior.mean for posterior in posteriors], 2), encoded)


def test_encode_stream_takes_frames_as_files_give_them(vae, video):
    frames = np.round((video[0] + 1) * 127.5).astype(np.uint8).transpose(1, 2, 3, 0)
    means = [posterior.mean for posterior in encode_stream(iter(frames), vae)]
    exact = encode(frames.transpose(3, 0, 1, 2)[None].astype(np.float32) / 127.5 - 1, vae).mean
    close(np.concatenate(means, 2), exact)


def test_nothing_is_computed_before_it_is_asked_for(vae, latents):
    """A stream that is left early costs the frames that were looked at, and one step."""
    parts = []
    stream = encode_stream(
        (parts.append(i) or np.zeros((1, 3, 1, 8 * vae.config.stride, 8 * vae.config.stride), np.float32) for i in range(99)), vae
    )
    assert parts == []
    next(stream)
    assert len(parts) <= 10


def test_weights_may_be_named_tensors(vae, latents, decoded):
    """The whole checkpoint or the half that is used; also those of the original mapping type, a plain dict."""
    tensors = random_tensors(vae.config, 0)
    read = as_vae(tensors)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), replace(read, config=vae.config), vae))
    half = {name: jnp.asarray(tensor) for name, tensor in tensors.items() if name.split(".")[0] in ("decoder", "post_quant_conv")}
    close(decode(latents, half), decoded)
    close(jax.jit(decode)(latents, half), decoded)
    assert as_vae(half).encoder is None


@pytest.mark.parametrize("config", [VAE_2_1, VAE_2_2, *CONFIGS.values(), *SHORT.values()])
def test_the_architecture_is_read_off_the_tensors(config):
    unknown = replace(config, decoder_base_dim=config.decoder_base_dim or config.base_dim)
    if config not in (VAE_2_1, VAE_2_2):
        unknown = replace(unknown, latents_mean=(0.0,) * config.z_dim, latents_std=(1.0,) * config.z_dim)
    assert config_from_shapes(expected(template(config))) == (config if config in (VAE_2_1, VAE_2_2) else unknown)


def test_a_config_survives_its_file():
    for config in (VAE_2_1, VAE_2_2, *CONFIGS.values()):
        assert VAEConfig.from_json(config.to_json()) == config
    with pytest.raises(ValueError, match="attn_scales must be empty"):
        VAEConfig.from_json({"attn_scales": [1.0]})


def test_latents_are_scaled_in_float32():
    """In bfloat16 the statistics alone would be off by 0.4 %."""
    raw = random_latents(VAE_2_2, 0)
    mean, std = (np.array(values)[:, None, None, None] for values in (VAE_2_2.latents_mean, VAE_2_2.latents_std))
    normal = normalize_latents(jnp.asarray(raw), VAE_2_2)
    np.testing.assert_allclose(normal, (raw - mean) / std, rtol=1e-5, atol=1e-6)
    close(denormalize_latents(normal, VAE_2_2), raw, 1e-6)
    half = jnp.asarray(raw, jnp.bfloat16)
    scaled = normalize_latents(half, VAE_2_2)
    assert scaled.dtype == jnp.float32
    np.testing.assert_allclose(scaled, (np.asarray(half, np.float64) - mean) / std, rtol=1e-5, atol=1e-6)


def test_streams_do_not_copy_weights(vae, latents):
    """Twice the weights would be gigabytes; those of another dtype, or in the host's memory, are made anew once."""
    alive = lambda: sum(x.nbytes for x in jax.live_arrays())
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(vae))
    before = alive()
    stream = decode_stream(latents, vae)
    assert alive() - before < weights / 4
    next(stream)
    half = decode_stream(latents, vae, jnp.bfloat16)
    assert alive() - before > weights / 8
    assert next(half).dtype == jnp.bfloat16
    close(next(decode_stream(latents, jax.tree.map(np.asarray, vae))), next(decode_stream(latents, vae)))


def test_weights_survive_a_folder(tmp_path, vae, latents, decoded):
    save(tmp_path, vae)
    close(decode(latents, load_vae(tmp_path)), decoded, 0)


def of_pictures(config: VAEConfig):
    """Random weights that look at the present alone, and whose time convolutions hand frames on: what a VAE of pictures does to a video."""
    tensors = random_tensors(config)
    for name, x in tensors.items():
        if "time_conv" in name:
            x[:] = 0
            if x.ndim == 5:
                x[:, :, -1, 0, 0] = np.tile(np.eye(x.shape[1]), (x.shape[0] // x.shape[1], 1))
        elif x.ndim == 5:
            x[:, :, :-1] = 0
    return fill(template(config), tensors)


@pytest.mark.parametrize("chunk", [None, 1])
@pytest.mark.parametrize("kind", SHORT)
def test_of_a_vae_of_pictures_constant_frames_come_back_constant(kind, chunk):
    """The first frame takes its own way through every block, and must come out as the ninth does.

    2.2's decoder shows one latent channel in even frames and another in odd ones; its encoder averages the first frame with zeros.
    """
    vae = of_pictures(SHORT[kind])
    z = np.repeat(random_latents(vae.config, 0, frames=1), 3, axis=2)
    if kind == "2.1":
        mean = encode(np.repeat(random_video(vae.config, 0, frames=1), 9, axis=2), vae, chunk=chunk).mean
        close(mean, np.repeat(mean[:, :, :1], 3, axis=2))
        z = np.asarray(mean)
    video = np.asarray(decode(z, vae, chunk=chunk))
    assert np.ptp(video) > 0.5
    close(video[:, :, 0], video[:, :, 8])
    if kind == "2.1":
        close(video, np.repeat(video[:, :, :1], 9, axis=2))


def test_a_still_picture_stays_still():
    """The first frame goes another way than the rest; a trained VAE gives both the same colour.

    The tiny one has never seen an empty picture: grey is within 1/255, black and navy, darker in one channel, within 6/255.
    """
    vae = load_vae(TINY)
    colours = np.array([[120, 120, 120], [8, 8, 8], [16, 22, 86]], np.float32) / 127.5 - 1
    video = np.broadcast_to(colours[:, :, None, None, None], (3, 3, 9, 64, 64))
    back = np.asarray(decode(encode(video, vae).mean, vae)).mean((3, 4))
    change = np.abs(back[:, :, 0] - back[:, :, 8]).max(1) * 127.5
    assert (change <= [1, 6, 6]).all(), change


def test_real_frames_in_any_chunking(data):
    """Five frames of a film at a size that is no multiple of anything but the stride."""
    vae = random_vae(SHORT["2.2"])
    frames = np.stack([frame for frame, _ in zip(iterate_frames(data / "big_buck_bunny_720p.mp4"), range(5), strict=False)])
    small = jax.image.resize(frames.astype(np.float32) / 127.5 - 1, (5, 40, 72, 3), "linear")
    video = np.clip(np.asarray(small), -1, 1).transpose(3, 0, 1, 2)[None]
    means = [posterior.mean for posterior in encode_stream(iter([video]), vae)]
    assert np.std(means[0]) > 0.05
    close(np.concatenate(means, 2), encode(video, vae).mean)
