"""Checkpoints to pytrees and back.

A module's fields are its checkpoint: the path of a leaf is the tensor's name in the file, and `stored` says where
the two differ (a name that is no Python identifier, another axis order, a stack of layers under one field).
"""

from typing import Any

import equinox as eqx


def stored(layout: str | None = None, *, name: str | None = None, stacked: bool = False, **options: Any) -> Any:
    """A dataclass field that says how the checkpoint file stores it.

    `layout` is an einops pattern from the file's axes to the field's ("cout cin -> cin cout"); `name` is the dotted
    name in the file where it is not the field's own ("to_out.0"); `stacked` marks a module whose leaves have a
    leading layer axis, stored in the file as `name.0`, `name.1`, and so on.
    """
    return eqx.field(metadata={"layout": layout, "name": name, "stacked": stacked}, **options)
