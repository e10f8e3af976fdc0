"""Architecture of the Wan VAE: the two that were published, and any other that a config.json or the tensors' shapes describe."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

# Statistics of each latent channel, from the public config.json files.
# fmt: off
MEAN_2_1 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)
STD_2_1 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)
MEAN_2_2 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813, 0.0891,
    0.1570, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230, -0.0313, -0.1649, 0.0117, 0.0723,
    -0.2839, -0.2083, -0.0520, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)
STD_2_2 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
    0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
    0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)
# fmt: on


@dataclass(frozen=True)
class VAEConfig:
    """Architecture of a Wan VAE, in diffusers' field names, with 2.1's values as defaults.

    `dim_mult` times `base_dim` (the decoder's own in `decoder_base_dim`) are the channels of each level, and
    `temperal_downsample` (the checkpoint's spelling) says which changes of level halve the frame rate. `is_residual`
    is 2.2's kind of level, and `patch_size` its folding of pixels into channels. `latents_mean` and `latents_std`
    are the statistics that the diffusion model's latents are normalised with.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    patch_size: int | None = None
    latents_mean: tuple[float, ...] = MEAN_2_1
    latents_std: tuple[float, ...] = STD_2_1

    @property
    def stride(self) -> int:
        """Pixels in each direction that one latent covers."""
        return 2 ** (len(self.dim_mult) - 1) * (self.patch_size or 1)

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> "VAEConfig":
        """The architecture that a diffusers config.json describes; its other keys are ignored, absent ones take the defaults."""
        if config.get("attn_scales"):
            raise ValueError(f"attn_scales must be empty, as in every public Wan VAE; got {config['attn_scales']}.")
        known = {f.name for f in fields(cls)}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in known}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The config.json that diffusers loads."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "_class_name": "AutoencoderKLWan",
            **{k: list(v) if isinstance(v, tuple) else v for k, v in own.items()},
            "attn_scales": [],
            "dropout": 0.0,
            "scale_factor_temporal": 2 ** sum(self.temperal_downsample),
            "scale_factor_spatial": self.stride,
        }


VAE_2_1 = VAEConfig()
VAE_2_2 = VAEConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    in_channels=12,
    out_channels=12,
    patch_size=2,
    latents_mean=MEAN_2_2,
    latents_std=STD_2_2,
)


def config_from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> VAEConfig:
    """The architecture whose checkpoint has tensors of these names and shapes, in diffusers' names; either half may be absent.

    A published VAE where they fit one. Otherwise the statistics, which no tensor tells, are mean 0 and deviation 1, and the
    base of an encoder that is not there is the decoder's. ValueError where the names or shapes are those of no Wan VAE.
    """
    halves = [half for half in ("encoder", "decoder") if f"{half}.conv_in.weight" in shapes]
    if not halves:
        raise ValueError(f"a Wan VAE's weights have encoder.conv_in.weight or decoder.conv_in.weight; got {list(shapes)[:4]}.")
    try:
        found = {half: _levels(shapes, half) for half in halves}
        first, last = ({half: shapes[f"{half}.{conv}.weight"] for half in halves} for conv in ("conv_in", "conv_out"))
    except KeyError as missing:
        raise ValueError(f"these are the weights of no Wan VAE in diffusers' names: {missing.args[0]} is missing.") from None
    levels = found[halves[0]]
    base = {half: found[half][0][0] for half in halves}
    z_dim = first["decoder"][1] if "decoder" in halves else last["encoder"][0] // 2
    pixels = last["decoder"][0] if "decoder" in halves else first["encoder"][1]
    config = VAEConfig(
        base_dim=base[halves[0]],
        decoder_base_dim=base.get("decoder"),
        z_dim=z_dim,
        dim_mult=tuple(channels // levels[0][0] for channels, _, _ in levels),
        num_res_blocks=levels[0][1],
        temperal_downsample=tuple(time for _, _, time in levels[:-1]),
        is_residual=any(re.search(r"\.(down|up)sampler\.", name) for name in shapes),
        in_channels=pixels,
        out_channels=pixels,
        patch_size=None if pixels == 3 else 2,
        latents_mean=(0.0,) * z_dim,
        latents_std=(1.0,) * z_dim,
    )
    for known in (VAE_2_1, VAE_2_2):
        free = {"latents_mean": known.latents_mean, "latents_std": known.latents_std, "decoder_base_dim": known.decoder_base_dim}
        if "encoder" not in halves:
            free["base_dim"] = known.base_dim
        same_base = "decoder" not in halves or base["decoder"] == (known.decoder_base_dim or known.base_dim)
        if same_base and replace(config, **free) == known:
            return known
    return config


def _levels(shapes: Mapping[str, tuple[int, ...]], half: str) -> list[tuple[int, int, bool]]:
    """Channels, residual blocks of the encoder's count, and change of frame rate of each level of a half, highest resolution first."""
    blocks, samplers = {}, {}
    for name, shape in shapes.items():
        if found := re.fullmatch(rf"{half}\.(?:down|up)_blocks\.(\d+)(?:\.resnets\.(\d+))?\.conv2\.weight", name):
            blocks[int(found[1]), int(found[2] or 0)] = shape[0]
        elif found := re.fullmatch(rf"({half}\.(?:down|up)_blocks\.(\d+)(?:\.(?:down|up)samplers?(?:\.0)?)?)\.resample\.1\.weight", name):
            samplers[int(found[2])] = f"{found[1]}.time_conv.weight" in shapes
    flat = (0, 1) not in blocks and half == "encoder" and not any(".resnets." in name for name in shapes if name.startswith("encoder.down"))
    level = {(i, j): sum(s < i for s in samplers) if flat else i for i, j in blocks}
    count = len(samplers) + 1
    times = [samplers[i] for i in sorted(samplers)]
    channels = [blocks[max(key for key in blocks if level[key] == n)] for n in range(count) if n in level.values()]
    resnets = sum(n == 0 for n in level.values())
    if len(channels) != count:
        raise KeyError(f"{half}'s level {len(channels)}")
    if half == "decoder":
        channels, times, resnets = channels[::-1], times[::-1], resnets - 1
    return [(c, resnets, time) for c, time in zip(channels, [*times, False], strict=True)]
