"""Which module may import which: the arrows of the design, held by reading the source."""

import ast
from pathlib import Path

import pytest

import wanjax

PACKAGE = Path(wanjax.__file__).parent

# Every module and the modules of ours that it may import; a module that is not listed fails the test.
ALLOWED: dict[str, set[str]] = {
    # one layer each: no module of ours above them
    "kernels": set(),
    "attention": {"kernels"},
    "sampler": set(),
    "weights": set(),
    "names": set(),
    "tensor_file": set(),
    "video": set(),
    "vae_config": set(),
    # the models: attention -> layers -> vae | transformer | text_encoder
    "layers": {"weights"},
    "transformer": {"attention", "kernels", "layers", "weights"},
    "text_encoder": {"layers", "weights"},
    "vae_convs": {"weights"},
    "vae_blocks": {"attention", "vae_convs", "weights"},
    "vae_model": {"vae_blocks", "vae_config", "vae_convs"},
    "vae_inputs": {"vae_config", "vae_model", "weights"},
    "vae_passes": {"sharding", "vae_blocks", "vae_config", "vae_convs", "vae_model"},
    "vae": {"vae_blocks", "vae_config", "vae_convs", "vae_inputs", "vae_model", "vae_passes"},
    # meshes: the only module that knows one
    "sharding": {"attention"},
    # files to models
    "checkpoint": {"names", "tensor_file"},
    "presets": {"sampler", "transformer"},
    "loading": {"checkpoint", "presets", "sharding", "text_encoder", "transformer", "vae_config", "vae_model", "weights"},
    "convert": {"checkpoint", "loading", "tensor_file"},
    # prompt to video
    "pipeline": {"loading", "presets", "sampler", "sharding", "text_encoder", "transformer", "vae"},
    "doctor": {"attention", "loading", "sharding", "vae"},
    "cli": {"convert", "doctor", "pipeline", "plan", "presets", "sharding", "video"},
    # programs looked at before they run
    "hlo": set(),
    "chips": set(),
    "program": {"hlo"},
    "flops": {"text_encoder", "transformer", "vae"},
    "plan": {
        "checkpoint",
        "chips",
        "flops",
        "loading",
        "pipeline",
        "presets",
        "program",
        "sampler",
        "sharding",
        "text_encoder",
        "transformer",
        "vae",
        "vae_model",
        "vae_passes",
    },
}


def imports(path: Path) -> set[str]:
    """The modules of ours that a file imports, by name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "wanjax":
            parts = node.module.split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("wanjax.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_imports_point_one_way(path: Path) -> None:
    if path.stem == "__init__":
        return
    assert path.stem in ALLOWED, f"{path.name} is new: say in ALLOWED what it may import"
    extra = imports(path) - ALLOWED[path.stem]
    assert not extra, f"{path.name} may not import {sorted(extra)}"
