"""What a model costs on a TPU slice, told by compiling its real programs for it on a machine that has none."""

from wanjax.chips import topology_devices
from wanjax.program import Report, analyse, compile_and_analyse

__all__ = ["Report", "analyse", "compile_and_analyse", "topology_devices"]
