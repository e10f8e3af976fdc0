"""The text encoder against transformers' UMT5EncoderModel, and prompts' cleaning and tokens against the Wan pipelines'."""

import lzma
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pipeline_wan = pytest.importorskip("diffusers.pipelines.wan.pipeline_wan")

from test_text_encoder import CONFIG, PROMPTS

from wanjax.loading import load_text_encoder
from wanjax.text_encoder import UMT5_XXL, clean_prompt, embed_text, init_text_encoder, load_tokenizer, tokenize
from wanjax.weights import expected, fill

pytestmark = pytest.mark.parity


def theirs(config, device="cpu"):
    """transformers' model of our config."""
    with torch.device(device):
        return transformers.UMT5EncoderModel(transformers.UMT5Config(**{**config.to_json(), "dropout_rate": 0.0})).eval()


def randomised(model, seed):
    """Every parameter drawn: maps scaled by fan-in, the bias tables strong enough to matter, gains near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(generator=generator)
            if "layer_norm" in name:
                parameter.mul_(0.3).add_(1)
            elif "shared" not in name and "relative" not in name:
                parameter.mul_(parameter.shape[1] ** -0.5)
            if name.endswith("SelfAttention.q.weight"):
                parameter.mul_(model.config.d_kv**-0.5)
    return model


def tensors(model):
    """Their tensors by name, the embedding under the name it has in Wan checkpoints."""
    return {name: value for name, value in model.state_dict().items() if name != "encoder.embed_tokens.weight"}


def ours(model, config):
    """Our weights, read from theirs."""
    template = jax.eval_shape(lambda: init_text_encoder(config, jax.random.key(0)))
    return fill(template, {name: value.detach().numpy() for name, value in tensors(model).items()})


def prompts(config, seed, lengths, rows):
    """Random ids and masks."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(rows) < np.array(lengths)[:, None]).astype(np.int32)
    return rng.integers(3, config.vocab_size, (len(lengths), rows)).astype(np.int32) * mask, mask


def run(model, ids, mask):
    """What the Wan pipelines make of it: rows past the prompt zeroed."""
    with torch.no_grad():
        rows = model(torch.from_numpy(ids).long(), torch.from_numpy(mask).long()).last_hidden_state
    return rows.double().numpy() * mask[..., None]


def distance(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)


def test_tensors_of_the_real_checkpoint():
    template = jax.eval_shape(lambda: init_text_encoder(UMT5_XXL, jax.random.key(0)))
    assert expected(template) == {name: tuple(value.shape) for name, value in tensors(theirs(UMT5_XXL, "meta")).items()}


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_equal_transformers(seed):
    model = randomised(theirs(CONFIG), seed)
    given = prompts(CONFIG, seed, (1, 9, 300), 300)
    assert distance(jax.jit(embed_text)(*given, ours(model, CONFIG)), run(model, *given)) <= 2e-6


def test_a_layer_at_real_width_equals_transformers():
    config = replace(UMT5_XXL, num_layers=1, vocab_size=500)
    model = randomised(theirs(config), 0)
    given = prompts(config, 0, (30,), 40)
    assert distance(jax.jit(embed_text)(*given, ours(model, config)), run(model, *given)) <= 2e-6


def test_bfloat16_is_no_farther_from_float64_than_transformers_is(tmp_path):
    """Rounding is chance, so errors of several models and prompts are compared together."""
    errors = []
    for seed in range(4):
        model = randomised(theirs(CONFIG), seed)
        model.save_pretrained(tmp_path / str(seed))
        half = transformers.UMT5EncoderModel.from_pretrained(tmp_path / str(seed), dtype=torch.bfloat16).eval()
        weights = load_text_encoder(tmp_path / str(seed), dtype=jnp.bfloat16)
        given = prompts(CONFIG, seed, (5, 20, 33, 40), 40)
        exact = run(model.double(), *given)
        mine = jax.jit(embed_text)(*given, weights)
        assert mine.dtype == jnp.bfloat16
        errors.append([distance(mine.astype(jnp.float32), exact), distance(run(half, *given), exact)])
    mine, peer = np.mean(errors, axis=0)
    assert 0 < mine <= peer


def test_prompts_are_cleaned_as_the_pipelines_do():
    for prompt in PROMPTS:
        assert clean_prompt(prompt) == pipeline_wan.prompt_clean(prompt)


def test_tokens_of_the_real_tokenizer_equal_transformers(data, tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(lzma.decompress((data / "umt5_tokenizer.json.xz").read_bytes()))
    peer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    cleaned = [clean_prompt(prompt) for prompt in PROMPTS if len(prompt) < 2000]
    ids, mask = tokenize(load_tokenizer(file), cleaned)
    for row, prompt in enumerate(cleaned):
        wanted = peer(prompt, add_special_tokens=False)["input_ids"][:511] + [1]
        assert list(ids[row, : mask[row].sum()]) == wanted
        assert not ids[row, mask[row].sum() :].any()
