"""Does wanjax compute rightly here? Small problems on the devices at hand, every way there is, against the plain answer in float32.

The plain answer is computed on a CPU where JAX has one beside the accelerator, and in full precision.
"""

import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from wanjax.attention import attention, blocked_attention, plain_attention
from wanjax.loading import load
from wanjax.sharding import Layout, make_mesh
from wanjax.vae import decode, encode

PACKAGES = ("wanjax", "jax", "jaxlib", "libtpu", "equinox", "numpy")
EXACT, ROUNDED = 2e-5, 3e-2
"""Relative error, in L2, that float32 arithmetic may have, and arithmetic in bfloat16, which accelerators also use for float32."""


@dataclass(frozen=True)
class Check:
    """One way of computing something: how far it was off, how far it may be, or the error that it raised."""

    name: str
    error: float
    bound: float
    raised: str = ""

    @property
    def passed(self) -> bool:
        """Whether the result is what it should be; NaN is not."""
        return not self.raised and self.error <= self.bound

    def __str__(self) -> str:
        said = self.raised or f"{self.error:.1e} (at most {self.bound:.0e})"
        return f"{'ok   ' if self.passed else 'WRONG'}  {self.name}: {said}"


def describe_machine() -> str:
    """Versions, devices and their memory, a line each."""
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    lines = [f"Python {platform.python_version()} on {platform.machine()}: {', '.join(versions)}"]
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        lines.append(f"device {device.id}: {device.device_kind} ({device.platform})" + (f", {limit / 2**30:.1f} GiB" if limit else ""))
    return "\n".join(lines)


def run_checks() -> Iterator[Check]:
    """Every check that these devices allow, as it is done."""
    bound = EXACT if jax.default_backend() == "cpu" else ROUNDED
    yield from _attention_checks(bound)
    yield from _vae_checks(bound)


def _attention_checks(bound: float) -> Iterator[Check]:
    """Attention written out, in blocks and across devices, with some keys left out, on scores as large as real ones.

    On an accelerator there are enough tokens on every device for its own kernel.
    """
    rng = np.random.default_rng(0)
    heads = 2 * jax.device_count()
    tokens, dim = (210, 64) if jax.default_backend() == "cpu" else (300 * jax.device_count(), 128)
    q, k, v = (rng.normal(size=(1, tokens, heads, dim)).astype(np.float32) * scale for scale in (3, 3, 1))
    expected = _plain_answer(plain_attention, q, k, v)
    expected_some = _plain_answer(plain_attention, q, k[:, : tokens - 11], v[:, : tokens - 11])
    half = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    yield _check("attention, plain", plain_attention, (q, k, v), expected, bound)
    yield _check("attention, in blocks", partial(blocked_attention, queries=64, keys=48), (q, k, v), expected, bound)
    yield _check("attention, in blocks, bfloat16", partial(blocked_attention, queries=64, keys=48), half, expected, ROUNDED)
    yield _check("attention, as models use it here", attention, (q, k, v), expected, bound)
    yield _check("attention, as models use it here, bfloat16", attention, half, expected, ROUNDED)
    yield _check("attention, some keys left out", partial(attention, valid=tokens - 11), (q, k, v), expected_some, bound)
    if jax.device_count() > 1:
        mesh = make_mesh(context=-1)
        for kind in ("ring", "ulysses", "2d"):
            across = partial(_across, Layout(mesh, kind))
            yield _check(f"attention, {kind} over {mesh.size} devices", across, (q, k, v), expected, bound)
            yield _check(f"attention, {kind}, bfloat16", across, half, expected, ROUNDED)


def _across(layout: Layout, q: Float[Array, "b s n d"], k: Float[Array, "b s n d"], v: Float[Array, "b s n d"]) -> Float[Array, "b s n d"]:
    """Attention between devices, of tokens that need not divide."""
    tokens = q.shape[1]
    q, k, v = (layout.rows(x, 1) for x in (q, k, v))
    return layout.attend(q, k, v, None if q.shape[1] == tokens else tokens)[:, :tokens]


def _vae_checks(bound: float) -> Iterator[Check]:
    """The tiny VAE both ways, in chunks, and with the picture over all devices."""
    vae = load("tiny").vae
    z = np.random.default_rng(1).normal(size=(1, vae.config.z_dim, 3, 5, 8)).astype(np.float32)
    video = _plain_answer(partial(decode, chunk=2), z, vae)
    mean = _plain_answer(lambda video, vae: encode(video, vae, chunk=2).mean, video, vae)
    yield _check("VAE, decode", decode, (z, vae), video, bound)
    yield _check("VAE, decode, bfloat16", partial(decode, dtype=jnp.bfloat16), (z, vae), video, 2 * ROUNDED)
    yield _check("VAE, encode", lambda video, vae: encode(video, vae).mean, (video, vae), mean, bound)
    if jax.device_count() > 1:
        mesh = make_mesh(context=-1)
        yield _check(f"VAE, decode over {mesh.size} devices", partial(decode, mesh=mesh), (z, vae), video, bound)
        yield _check(
            f"VAE, encode over {mesh.size} devices", lambda video, vae: encode(video, vae, mesh=mesh).mean, (video, vae), mean, bound
        )


def _plain_answer(function: Callable[..., Array], *args: Any) -> np.ndarray:
    """The result in full float32 precision, on a CPU where there is one."""
    try:
        device = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    with jax.default_device(device), jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(function)(*jax.device_put(args, device)), np.float32)


def _check(name: str, function: Callable[..., Array], args: Sequence[Any], expected: np.ndarray, bound: float) -> Check:
    """Compare one way with the plain answer; whatever it raises is its result."""
    try:
        found = np.asarray(jax.jit(function)(*args), np.float32)
    except Exception as error:
        return Check(name, float("nan"), bound, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return Check(name, float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), bound)
