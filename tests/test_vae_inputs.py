"""What `encode` and `decode` say of wrong input: one sentence with the rule, the value seen and the likely fix."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vae_models import SHORT, random_latents, random_tensors, random_vae, random_video, template

from wanjax.vae import VAE_2_1, VAE_2_2, decode, decode_stream, encode, encode_stream
from wanjax.vae_inputs import as_vae, check_latents
from wanjax.vae_model import VAE
from wanjax.weights import expected

CONFIG = SHORT["2.1"]  # 4 channels, 4 pixels a latent

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def vae():
    return random_vae(CONFIG)


def latents(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("z", "error", "sentence"),
    [
        (latents(4, 3, 2, 2), ValueError, r"latents must be \(batch, 4 channels, latent frames, height, width\); got \(4, 3, 2, 2\)"),
        (latents(1, 5, 3, 2, 2), ValueError, r"this VAE's 4 channels on axis 1; got \(1, 5, 3, 2, 2\)\.$"),
        (latents(1, 16, 3, 2, 2), ValueError, r"got \(1, 16, 3, 2, 2\): 16 channels are those of VAE 2\.1, so load that one"),
        (latents(1, 48, 3, 2, 2), ValueError, r"got \(1, 48, 3, 2, 2\): 48 channels are those of VAE 2\.2, so load that one"),
        (latents(0, 4, 3, 2, 2), ValueError, r"latents must have at least one of everything; got \(0, 4, 3, 2, 2\)"),
        (latents(1, 4, 0, 2, 2), ValueError, r"latents must have at least one of everything; got \(1, 4, 0, 2, 2\)"),
        (latents(1, 4, 3, 2, 2, dtype=np.int32), TypeError, r"latents must be floating point; got int32"),
        (np.full((1, 4, 3, 2, 2), np.nan), ValueError, r"latents must be finite; got 48 NaN or infinite of 48"),
        (
            np.pad(latents(1, 4, 3, 1, 2), ((0, 0),) * 3 + ((0, 1), (0, 0)), constant_values=np.inf),
            ValueError,
            r"got 24 NaN or infinite of 48",
        ),
    ],
)
def test_wrong_latents(vae, z, error, sentence):
    with pytest.raises(error, match=sentence):
        decode(z, vae)
    with pytest.raises(error, match=sentence):  # at the call, not at the first frame
        decode_stream(z, vae)


@pytest.mark.parametrize(
    ("video", "error", "sentence"),
    [
        (latents(3, 5, 8, 8), ValueError, r"video must be \(batch, 3 colours, frames, height, width\); got \(3, 5, 8, 8\)\.$"),
        (latents(1, 5, 8, 8, 3), ValueError, r"got \(1, 5, 8, 8, 3\) \(channels come before frames: move the last axis to 1\)"),
        (latents(1, 4, 5, 8, 8), ValueError, r"3 colours, frames, height, width\); got \(1, 4, 5, 8, 8\)\.$"),
        (latents(0, 3, 5, 8, 8), ValueError, r"video must have at least one of everything; got \(0, 3, 5, 8, 8\)"),
        (latents(1, 3, 5, 8, 8, dtype=np.uint8), TypeError, r"video must be floating point; got uint8: .* frames / 127\.5 - 1"),
        (latents(1, 3, 5, 10, 12), ValueError, r"height and width must be multiples of 4; got 10 x 12: try 8 x 12"),
        (latents(1, 3, 5, 1, 8), ValueError, r"multiples of 4; got 1 x 8: try 4 x 8"),
        (latents(1, 3, 6, 8, 8), ValueError, r"4 n \+ 1 frames \(one, then four for each latent frame\); got 6: cut or repeat to 5"),
        (latents(1, 3, 8, 8, 8), ValueError, r"got 8: cut or repeat to 9"),
        (latents(1, 3, 2, 8, 8), ValueError, r"got 2: cut or repeat to 1"),
    ],
)
def test_wrong_video(vae, video, error, sentence):
    with pytest.raises(error, match=sentence):
        encode(video, vae)


def test_video_out_of_range_is_encoded_as_it_is_and_warned_of_once(vae):
    video = random_video(CONFIG, 0, frames=1)
    inside = encode(video, vae).mean  # compiling forgets which warnings were given
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        beyond = [encode(3 * video, vae).mean for _ in range(2)]
        encode(video * np.float32(1.0005), vae)  # rounding is not worth a word
    assert [str(warning.message)[:38] for warning in caught] == ["video should be in [-1, 1]; got -2.998"]
    assert not np.allclose(beyond[0], inside, atol=1e-2)


@pytest.mark.parametrize("chunk", [0, -1])
def test_chunks_are_at_least_one_frame(vae, chunk):
    for verb, array in ((decode, latents(1, 4, 1, 2, 2)), (decode_stream, latents(1, 4, 1, 2, 2)), (encode, latents(1, 3, 1, 8, 8))):
        with pytest.raises(ValueError, match=f"chunk is the number of latent frames that go through at a time, at least 1; got {chunk}"):
            verb(array, vae, chunk=chunk)
    with pytest.raises(ValueError, match="chunk is the number"):
        encode_stream([], vae, chunk=chunk)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([], "4 n . 1 frames .*; got 0 in all"),
        ([latents(1, 3, 1, 8, 8), latents(1, 3, 2, 8, 8)], "4 n . 1 frames .*; got 3 in all"),
        ([latents(10, 8, 3, dtype=np.uint8)], "multiples of 4; got 10 x 8: try 8 x 8"),
        ([latents(1, 4, 1, 8, 8)], "3 colours"),
        ([latents(8, 8, 4, dtype=np.uint8)], "3 colours"),
    ],
)
def test_wrong_streams(vae, parts, sentence):
    with pytest.raises(ValueError, match=sentence):
        list(encode_stream(iter(parts), vae))


def test_halves():
    whole = random_vae(CONFIG)
    encoder = VAE(whole.encoder, whole.quant_conv, None, None, CONFIG)
    decoder = VAE(None, None, whole.post_quant_conv, whole.decoder, CONFIG)
    with pytest.raises(ValueError, match="decode needs the VAE's decoder, and these weights are of an encoder alone"):
        decode(latents(1, 4, 1, 2, 2), encoder)
    with pytest.raises(ValueError, match="encode needs the VAE's encoder, and these weights are of a decoder alone"):
        encode(latents(1, 3, 1, 8, 8), decoder)


def test_named_tensors_of_something_else():
    with pytest.raises(
        ValueError, match=r"a Wan VAE's weights have encoder.conv_in.weight or decoder.conv_in.weight; got \['blocks.0.weight'\]"
    ):
        as_vae({"blocks.0.weight": latents(1)})
    tensors = random_tensors(CONFIG, 0)
    extra = {**tensors, "encoder.nothing": latents(3)}
    extra["decoder.mid_block.resnets.0.norm1.gamma"] = latents(7, 1, 1, 1)
    del extra["quant_conv.bias"]
    found = (
        r"does not fit VAE: missing 1 \(quant_conv\.bias\); unused 1 \(encoder\.nothing\); "
        r"wrong shape 1 \(decoder\.mid_block.*\(7, 1, 1, 1\), model"
    )
    with pytest.raises(ValueError, match=found):
        as_vae(extra)
    cut = {name: tensor for name, tensor in tensors.items() if ".conv_out." not in name}
    with pytest.raises(ValueError, match=r"these are the weights of no Wan VAE in diffusers' names: .*conv_out.weight is missing"):
        as_vae(cut)


def test_values_are_not_looked_at_inside_jit():
    """There they are not known; shapes and kinds are checked as ever."""
    vae = random_vae(CONFIG)
    jax.eval_shape(lambda z: check_latents(z, vae), jnp.zeros((1, 4, 1, 2, 2)))
    with pytest.raises(ValueError, match=r"48 channels are those of VAE 2\.2"):
        jax.eval_shape(lambda z: decode(z, vae), jnp.zeros((1, 48, 1, 2, 2)))


@pytest.mark.parametrize(("config", "other"), [(VAE_2_1, "2.2"), (VAE_2_2, "2.1")])
def test_latents_of_the_other_published_vae(config, other):
    """Nothing is computed: the weights are shapes."""
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in expected(template(config)).items()}
    channels = {"2.1": 16, "2.2": 48}[other]
    z = jax.ShapeDtypeStruct((1, channels, 3, 2, 2), jnp.float32)
    with pytest.raises(ValueError, match=f"{channels} channels are those of VAE {other}"):
        jax.eval_shape(decode, z, shapes)


def test_constants_inside_jit_are_looked_at():
    """Latents that a training step closes over, not an argument of it."""
    vae = random_vae(SHORT["2.1"])
    z = random_latents(vae.config, 1, frames=1)
    video = jax.jit(lambda vae: decode(z, vae))(vae)
    assert video.shape[2] == 1
    assert jax.jit(lambda vae: encode(jnp.zeros(video.shape), vae).mean)(vae).shape == z.shape
    with pytest.raises(ValueError, match="must be finite"):
        jax.jit(lambda vae: decode(z * np.float32(np.nan), vae))(vae)
