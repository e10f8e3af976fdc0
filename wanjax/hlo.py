"""Reads the text of a compiled program and adds up what one device does in one run of it.

XLA's own cost analysis counts the body of a loop once; here every instruction counts as often as the loops around it turn. On
TPU the text carries the compiler's estimate of the cycles of each instruction, which is what kernels and layouts are tuned by.
The unit is always one device (one core of it) and one execution.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

_BITS = {"pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16}
_BITS |= {"s32": 32, "u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "f4e2m1fn": 4, "token": 0, "opaque": 0}
COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
TOGETHER = ("fusion", "call-start")
"""Opcodes whose computations are one piece of work: fused, or handed to another core (a TPU's SparseCore) as a whole."""
# Opcodes that only name, regroup or reinterpret what is already there, or whose cost is that of the computations they call.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call", "conditional", "after-all", "add-dependency"}
_FREE |= {"partition-id", "replica-id", "opt-barrier", "get-dimension-size", "domain"}
_MOVES = {"copy", "bitcast", "reshape", "parameter", "constant", "tuple", "get-tuple-element", "convert", "bitcast-convert"}
_SLICES = {"slice", "dynamic-slice", "dynamic-update-slice"}

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
_ARRAY = re.compile(r"(\w+)\[([\d,<=\s]*)\](\{[^}]*\})?")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_KERNEL_FLOPS = re.compile(r'"cost_estimate":\{"flops":"(\d+)"')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclass(frozen=True)
class Buffer:
    """One array in a shape: its element type, dimensions, and whether it lies in the chip's main memory."""

    dtype: str
    dims: tuple[int, ...]
    in_hbm: bool = True

    @property
    def size(self) -> int:
        """Number of bytes, without layout padding."""
        bits = _BITS.get(self.dtype, 8 if self.dtype.startswith("f8") else 32)
        return math.prod(self.dims) * bits // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, in the order in which it is scheduled."""

    name: str
    opcode: str
    shape: tuple[Buffer, ...]
    operands: tuple[str, ...]
    text: str
    root: bool

    @property
    def size(self) -> int:
        """Bytes of everything it returns."""
        return sum(buffer.size for buffer in self.shape)

    @property
    def op_name(self) -> str:
        """The path of the traced operation it comes from, "" when unknown."""
        found = _OP_NAME.search(self.text)
        return found.group(1) if found else ""

    @property
    def cycles(self) -> float:
        """The compiler's estimate for one execution; 0 where it gives none."""
        found = _CYCLES.search(self.text)
        return float(found.group(1)) if found else 0.0

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations it runs."""
        branches = _BRANCHES.search(self.text)
        names = [name.strip().lstrip("%") for name in branches.group(1).split(",")] if branches else []
        return (*_CALLED.findall(self.text), *names)


@dataclass(frozen=True)
class Computation:
    """A named list of instructions."""

    name: str
    instructions: tuple[Instruction, ...]
    entry: bool
    by_name: Mapping[str, Instruction] = field(repr=False)

    @property
    def root(self) -> Instruction:
        """What it returns."""
        return next(i for i in reversed(self.instructions) if i.root)

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions an instruction reads."""
        return [self.by_name[name] for name in instruction.operands if name in self.by_name]


@dataclass(frozen=True)
class Module:
    """A whole program: its computations and over how many devices it is partitioned."""

    computations: Mapping[str, Computation]
    entry: Computation
    devices: int


def _matching(text: str, start: int) -> int:
    """Index just past the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        if text[i] in "([{":
            depth += 1
        elif text[i] in ")]}":
            depth -= 1
            if depth == 0:
                return i + 1
    raise ValueError(f"Unbalanced brackets in a compiled program: {text[start : start + 80]!r}.")


def _instruction(root: bool, name: str, rest: str) -> Instruction | None:
    end = _matching(rest, 0) if rest.startswith("(") else rest.find(" ")
    shape_text, rest = rest[:end], rest[end:].lstrip()
    bracket = rest.find("(")
    if bracket < 0:
        return None
    closing = _matching(rest, bracket)
    shape = tuple(
        Buffer(dtype, tuple(int(n.strip(" <=")) for n in dims.split(",") if n.strip()), not re.search(r"S\([1-9]", layout or ""))
        for dtype, dims, layout in _ARRAY.findall(shape_text)
    )
    inside = rest[bracket + 1 : closing - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside)) or ((inside.strip(),) if rest[:bracket] in ("parameter", "constant") else ())
    return Instruction(name, rest[:bracket], shape, operands, rest[closing:], root)


def parse(text: str) -> Module:
    """Parses the text of a compiled (scheduled) module.

    Raises:
        ValueError: when no entry computation is in the text.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    header: tuple[str, bool] | None = None
    lines: list[str] = []

    def close() -> None:
        nonlocal entry
        assert header is not None
        parsed = [_INSTRUCTION.match(line) for line in lines]
        made = [_instruction(bool(m.group(1)), m.group(2), m.group(3)) for m in parsed if m]
        instructions = tuple(i for i in made if i is not None)
        computation = Computation(header[0], instructions, header[1], {i.name: i for i in instructions})
        computations[header[0]] = computation
        entry = computation if header[1] else entry

    for line in text.splitlines():
        if header is None:
            start = _COMPUTATION.match(line)
            if start and not line.startswith("HloModule"):
                header, lines = (start.group(2), bool(start.group(1))), []
        elif line.startswith("}, execution_thread=") or (line.startswith("}") and not line.startswith(("},", "}}"))):
            close()
            header = None
        elif _INSTRUCTION.match(line):
            lines.append(line)
        elif lines:  # a kernel's metadata may hold line breaks
            lines[-1] += " " + line
    if entry is None:
        raise ValueError("The text holds no entry computation: pass the text of a compiled program, compiled.as_text().")
    partitions = re.search(r"num_partitions=(\d+)", text[:20000])
    return Module(computations, entry, int(partitions.group(1)) if partitions else 1)


# --- how often things run ---


def _integer(module: Module, where: Computation, name: str, outside: tuple[Computation, Instruction] | None) -> int | None:
    """The value of a scalar if it is a constant seen through copies and the loop's initial tuple."""
    instruction = where.by_name.get(name)
    for _ in range(20):
        if instruction is None:
            return None
        if instruction.opcode == "constant":
            try:
                return int(instruction.operands[0])
            except (ValueError, IndexError):
                return None
        if instruction.opcode == "get-tuple-element":
            source = where.by_name.get(instruction.operands[0])
            found = re.search(r"index=(\d+)", instruction.text)
            if source is None or found is None:
                return None
            if source.opcode == "parameter" and outside is not None:
                where, loop = outside[0], outside[1]
                source, outside = where.by_name[loop.operands[0]], None
            if source.opcode != "tuple":
                return None
            instruction = where.by_name.get(source.operands[int(found.group(1))])
        elif instruction.opcode in ("copy", "bitcast", "convert", "reshape") and instruction.operands:
            instruction = where.by_name.get(instruction.operands[0])
        else:
            return None
    return None


def loop_trips(module: Module, where: Computation, loop: Instruction) -> int | None:
    """How often a while loop turns; None when the text does not say.

    Read from the compiler's known_trip_count, else from a condition `counter < constant` with a step of one.
    """
    known = _TRIPS.search(loop.text)
    if known:
        return int(known.group(1))
    found = re.search(r"condition=%?([\w.\-]+)", loop.text)
    if not found:
        return None
    condition = module.computations[found.group(1)]
    compare, inner = condition.root, condition
    arguments = list(compare.operands)
    if compare.opcode == "fusion":
        inner = module.computations[compare.called[0]]
        compare = inner.root
        numbers = {i.name: int(i.operands[0]) for i in inner.instructions if i.opcode == "parameter"}
        arguments = [arguments[numbers[name]] if name in numbers else name for name in compare.operands]
    if compare.opcode != "compare" or len(arguments) != 2:
        return None
    direction = re.search(r"direction=(\w+)", compare.text)
    values = [_integer(module, condition if name in condition.by_name else inner, name, (where, loop)) for name in arguments]
    counter = [condition.by_name.get(name) for name in arguments]
    kind = direction.group(1) if direction else ""
    if kind in ("LT", "LE") and values[1] is not None:
        start, stop = values[0] if counter[0] is not None else 0, values[1]
    elif kind in ("GT", "GE") and values[0] is not None:
        start, stop = values[1] if counter[1] is not None else 0, values[0]
    else:
        return None
    return max(0, stop - (start or 0) + (kind in ("LE", "GE")))


@dataclass(frozen=True)
class Occurrence:
    """An instruction of a scheduled computation, and how often it runs."""

    instruction: Instruction
    where: Computation
    trips: float


def walk(module: Module, unknown: list[str]) -> list[Occurrence]:
    """Every scheduled instruction with its trips; names of loops of unknown length, counted once, are appended to `unknown`.

    Of a conditional's branches the one with the most estimated cycles counts.
    """
    return _walk(module, module.entry, 1.0, unknown)


def below(module: Module, where: Computation, instruction: Instruction, trips: float = 1.0) -> list[Occurrence]:
    """The same for the computations that one instruction runs as loops, branches or calls (not fusions)."""
    return _below(module, where, instruction, trips, [])


def _walk(module: Module, where: Computation, trips: float, unknown: list[str]) -> list[Occurrence]:
    seen: list[Occurrence] = []
    for instruction in where.instructions:
        seen.append(Occurrence(instruction, where, trips))
        seen += _below(module, where, instruction, trips, unknown)
    return seen


def _below(module: Module, where: Computation, instruction: Instruction, trips: float, unknown: list[str]) -> list[Occurrence]:
    if instruction.opcode == "while":
        turns = loop_trips(module, where, instruction)
        if turns is None:
            unknown.append(instruction.name)
        body = re.search(r"body=%?([\w.\-]+)", instruction.text)
        assert body is not None
        return _walk(module, module.computations[body.group(1)], trips * (1 if turns is None else turns), unknown)
    branches = [
        _walk(module, module.computations[name], trips, unknown) for name in instruction.called if instruction.opcode not in TOGETHER
    ]
    if instruction.opcode == "conditional":
        return max(branches, key=lambda branch: sum(o.instruction.cycles * o.trips for o in branch) or len(branch))
    if instruction.opcode in ("call", "async-start"):
        return [occurrence for branch in branches for occurrence in branch]
    return []


def inside(module: Module, instruction: Instruction) -> Iterator[tuple[Instruction, Computation]]:
    """Everything in the fused computations of an instruction, nested ones too, or in what it has another core do meanwhile."""
    if instruction.opcode not in TOGETHER:
        return
    for name in instruction.called:
        computation = module.computations[name]
        for inner in computation.instructions:
            yield inner, computation
            yield from inside(module, inner)


# --- what one instruction costs ---


def _valid_pairs(size: int, out: int, kernel: int, stride: int, low: int, dilation: int, kernel_dilation: int) -> int:
    """How many (output position, tap) pairs of one window dimension fall on an input element and not on padding."""
    position = np.arange(out)[:, None] * stride + np.arange(kernel)[None, :] * kernel_dilation - low
    return int(np.sum((position >= 0) & (position % dilation == 0) & (position // dilation < size)))


def _window(text: str, key: str, count: int, default: str) -> list[str]:
    found = re.search(rf"\b{key}=([\d_x\-]+)", text)
    return found.group(1).split("x") if found else [default] * count


def flops(instruction: Instruction, where: Computation) -> float:
    """Multiplications and additions (2 each) of one dot or convolution, from its shapes; taps that fall on padding are not counted."""
    operands = where.operands(instruction)
    if len(operands) < 2 or not instruction.shape:
        return 0.0
    left, right, out = operands[0].shape[0].dims, operands[1].shape[0].dims, instruction.shape[0].dims
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
        axes = [int(a) for a in contracted.group(1).split(",") if a] if contracted else []
        return 2.0 * math.prod(out) * math.prod(left[a] for a in axes)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.text)
    if instruction.opcode != "convolution" or labels is None:
        return 0.0
    lhs, rhs, result = labels.groups()
    spatial = sorted(c for c in lhs if c.isdigit())
    window = re.search(r"window=\{([^}]*)\}", instruction.text)
    text = window.group(1) if window else ""
    groups = re.search(r"batch_group_count=(\d+)", instruction.text)
    pairs = 1
    strides, pads = _window(text, "stride", len(spatial), "1"), _window(text, "pad", len(spatial), "0_0")
    dilations, taps = _window(text, "lhs_dilate", len(spatial), "1"), _window(text, "rhs_dilate", len(spatial), "1")
    for i, axis in enumerate(spatial):
        pairs *= _valid_pairs(
            left[lhs.index(axis)], out[result.index(axis)], right[rhs.index(axis)], int(strides[i]), int(pads[i].split("_")[0]),
            int(dilations[i]), int(taps[i])
        )  # fmt: skip
    batch = left[lhs.index("b")] // (int(groups.group(1)) if groups else 1)
    return 2.0 * batch * out[result.index("f")] * right[rhs.index("i")] * pairs


def kernel_flops(instruction: Instruction) -> float:
    """Floating-point operations that a hand-written kernel says it needs; 0 where it says nothing."""
    found = _KERNEL_FLOPS.search(instruction.text)
    return float(found.group(1)) if found else 0.0


def category(instruction: Instruction, module: Module) -> str:
    """What kind of work a scheduled instruction is: the most telling thing inside it."""
    base = instruction.opcode.removesuffix("-start").removesuffix("-done").removesuffix("-update")
    if instruction.opcode in _FREE:
        return "free"
    if base in COLLECTIVES or base in ("send", "recv"):
        return "collective"
    if instruction.opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.text)
        name = target.group(1) if target else ""
        if "matmul" in name or "conv" in name.lower():
            return "matmul"
        return "kernel" if name in ("tpu_custom_call", "triton_kernel_call", "__gpu$xla.gpu.triton", "mosaic_gpu") else "custom call"
    if base in ("copy", "async", "call") and instruction.opcode != base:
        return "collective" if any(collective_kind(i) for i, _ in inside(module, instruction)) else "async copy"
    inner = [instruction] if instruction.opcode != "fusion" else [i for i, _ in inside(module, instruction)]
    codes = {i.opcode for i in inner}
    if codes & {"convolution", "dot"}:
        worker = next(i for i in inner if i.opcode in ("convolution", "dot"))
        convolves = worker.opcode == "convolution" and "dot_general" not in worker.op_name
        return "convolution" if convolves and ("conv_general" in worker.op_name or "window={" in worker.text) else "matmul"
    if any(code.removesuffix("-start").removesuffix("-done") in COLLECTIVES for code in codes):
        return "collective"
    if "custom-call" in codes:
        return "custom call"
    for code, name in (("gather", "gather"), ("scatter", "gather"), ("sort", "sort"), ("reduce", "reduce"), ("reduce-window", "reduce")):
        if code in codes:
            return name
    work = codes - _MOVES
    layout = {"transpose": "transpose", "pad": "pad", "concatenate": "concatenate", "broadcast": "broadcast", "iota": "broadcast"}
    if not work:
        return "copy"
    if work <= _SLICES | {"select", "compare", "add", "broadcast", "clamp"} and codes & _SLICES:
        return "slice"
    if work <= {*layout, *_SLICES}:
        return next(name for code, name in layout.items() if code in work)
    if "pad" in work and work <= {"pad", "maximum", "select", "compare", "and", "iota", "broadcast"}:
        return "pad"
    return "elementwise"


def hbm_bytes(instruction: Instruction, where: Computation, module: Module) -> int:
    """Bytes of main memory one execution reads and writes: whole operands, or only the slices that a fusion takes of them."""
    if instruction.opcode in _FREE or instruction.opcode.endswith("-done"):
        return 0
    operands = where.operands(instruction)
    computation = module.computations[instruction.called[0]] if instruction.opcode == "fusion" else None
    read = 0
    for position, operand in enumerate(operands):
        whole = sum(b.size for b in operand.shape if b.in_hbm)
        if computation is not None:
            whole = min(whole, _taken(module, computation, position))
        elif instruction.opcode in ("dynamic-slice", "slice", "gather") and position == 0:
            whole = min(whole, instruction.size)
        elif instruction.opcode == "dynamic-update-slice" and position == 0:
            whole = 0
        read += whole
    written = sum(b.size for b in instruction.shape if b.in_hbm)
    if instruction.opcode == "dynamic-update-slice":
        written = min(written, operands[1].size)
    elif computation is not None and len(instruction.shape) == 1 and computation.root.opcode == "dynamic-update-slice":
        written = min(written, computation.operands(computation.root)[1].size)
    elif instruction.opcode == "copy-start":  # returns (destination, source, context)
        written = instruction.shape[0].size if instruction.shape[0].in_hbm else 0
    elif instruction.opcode.endswith("-start"):
        written = 0
    return read + written


def _taken(module: Module, computation: Computation, position: int) -> int:
    """Bytes a fused computation reads of its parameter: all of it unless every use is a slice."""
    parameter = next((i for i in computation.instructions if i.opcode == "parameter" and i.operands == (str(position),)), None)
    if parameter is None:
        return 1 << 62
    taken = 0
    for user in computation.instructions:
        if parameter.name not in user.operands:
            continue
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
            taken += user.size
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name:
            continue
        elif user.opcode == "fusion":
            inner = module.computations[user.called[0]]
            taken += sum(min(_taken(module, inner, i), parameter.size) for i, name in enumerate(user.operands) if name == parameter.name)
        else:
            return 1 << 62
    return taken


# --- exchanges between devices ---


def collective_kind(instruction: Instruction) -> str | None:
    """ "all-gather", ... for a collective or the start of one, else None (also for its end)."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else None


def group_size(instruction: Instruction, module: Module) -> int:
    """How many devices take part in one group of a collective."""
    text = instruction.text
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text)
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh.group(1))}
        whole = [(name, part) for name, part in re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh.group(2))]
        return math.prod(int(part) if part else sizes[name] for name, part in whole)
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]", text)
    if iota:
        return int(iota.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", text)
    if listed:
        return len(listed.group(1).split(","))
    return module.devices
