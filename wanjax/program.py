"""What a compiled program costs on one device, in one run: cycles by kind of work, FLOPs, traffic, collectives, memory.

`analyse(compiled)` reads the compiled text (hlo.py) and the compiler's memory statistics; nothing is executed, so the program may
be for a TPU that is not there. `print(analyse(compiled))` is the table to tune by.
"""

import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from wanjax import hlo


@dataclass(frozen=True)
class Cost:
    """One scheduled instruction: what one run costs (`cycles`, `bytes`, `flops`) and how often it runs."""

    name: str
    category: str
    op_name: str
    shape: str
    cycles: float
    bytes: int
    flops: float
    trips: float


@dataclass(frozen=True)
class Collective:
    """One exchange between devices.

    `bytes` is the size of what one execution hands each device (for reduce-scatter and all-reduce, of what it takes);
    `wire` is what one device must send for it, at the least. `asynchronous` when compute is scheduled between its start and its end:
    `hidden_cycles` are that compute's estimated cycles, `hidden_kernels` the number of hand-written kernels in it (which have no estimate).
    """

    kind: str
    name: str
    op_name: str
    bytes: int
    wire: float
    group: int
    trips: float
    asynchronous: bool
    hidden_cycles: float
    hidden_kernels: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, from the compiler's buffer assignment."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    code: int
    peak: int


@dataclass(frozen=True)
class Report:
    """A whole program on one device; every sum counts each instruction as often as its loops turn."""

    costs: tuple[Cost, ...]
    collectives: tuple[Collective, ...]
    memory: Memory
    instructions: int
    devices: int
    unknown_loops: tuple[str, ...]
    compile_seconds: float | None = None
    compile_cpu_seconds: float | None = None

    @property
    def cycles(self) -> float:
        """The compiler's estimate for everything but hand-written kernels and collectives, which it gives none for."""
        return sum((c.cycles * c.trips for c in self.costs), 0.0)

    @property
    def cycles_by_category(self) -> dict[str, float]:
        """The same by kind of work, largest first."""
        return _sums((c.category, c.cycles * c.trips) for c in self.costs)

    @property
    def flops(self) -> float:
        """Of matrix products and convolutions outside hand-written kernels, padding taps not counted."""
        return sum((c.flops * c.trips for c in self.costs if c.category != "kernel"), 0.0)

    @property
    def kernel_flops(self) -> float:
        """What the hand-written kernels say of themselves."""
        return sum((c.flops * c.trips for c in self.kernels), 0.0)

    @property
    def bytes(self) -> float:
        """Main-memory traffic of the instructions outside hand-written kernels' inner loops."""
        return sum((c.bytes * c.trips for c in self.costs), 0.0)

    @property
    def kernels(self) -> tuple[Cost, ...]:
        """The hand-written (Pallas) kernels."""
        return tuple(c for c in self.costs if c.category == "kernel")

    @property
    def collective_bytes(self) -> dict[str, float]:
        """`Collective.bytes` by kind, times trips."""
        return _sums((c.kind, c.bytes * c.trips) for c in self.collectives)

    @property
    def wire_bytes(self) -> float:
        """What one device must send, in all."""
        return sum((c.wire * c.trips for c in self.collectives), 0.0)

    @property
    def exposed_wire_bytes(self) -> float:
        """The part of `wire_bytes` that no compute is scheduled beside."""
        return sum((c.wire * c.trips for c in self.collectives if not c.asynchronous), 0.0)

    def share(self, *categories: str) -> float:
        """These categories' part of the estimated cycles, 0 to 1."""
        total = self.cycles
        return sum(self.cycles_by_category.get(name, 0.0) for name in categories) / total if total else 0.0

    def heaviest(self, count: int = 10, category: str | None = None) -> list[Cost]:
        """The instructions with the most estimated cycles."""
        of = [c for c in self.costs if category is None or c.category == category]
        return sorted(of, key=lambda c: -c.cycles * c.trips)[:count]

    def to_dict(self) -> dict[str, Any]:
        """The sums and the collectives as plain numbers, for JSON."""
        return {
            "cycles": self.cycles,
            "cycles_by_category": self.cycles_by_category,
            "flops": self.flops,
            "kernel_flops": self.kernel_flops,
            "hbm_bytes": self.bytes,
            "kernels": {c.name: {"trips": c.trips, "shape": c.shape, "flops": c.flops} for c in self.kernels},
            "collective_bytes": self.collective_bytes,
            "wire_bytes": self.wire_bytes,
            "exposed_wire_bytes": self.exposed_wire_bytes,
            "collectives": [asdict(c) for c in self.collectives],
            "memory": asdict(self.memory),
            "instructions": self.instructions,
            "devices": self.devices,
            "unknown_loops": list(self.unknown_loops),
            "compile_seconds": self.compile_seconds,
            "compile_cpu_seconds": self.compile_cpu_seconds,
        }

    def table(self, heaviest: int = 10) -> str:
        """The report as text, with the instructions that cost most."""
        memory, total = self.memory, self.cycles or 1.0
        lines = [
            f"per device ({self.devices} in all), one run; {self.instructions} instructions",
            f"estimated cycles {self.cycles:.3e}   FLOPs {self.flops:.3e}   main memory traffic {_size(self.bytes)}",
        ]
        lines += [f"  {name:<14}{cycles:>11.3e}{cycles / total:>7.1%}" for name, cycles in self.cycles_by_category.items() if cycles]
        for c in self.kernels:
            lines.append(f"  kernel x {c.trips:<8g}{c.name}  {c.shape}")
        for kind in self.collective_bytes:
            these = [c for c in self.collectives if c.kind == kind]
            runs, hidden = sum(c.trips for c in these), sum(c.trips for c in these if c.asynchronous)
            sent = sum(c.wire * c.trips for c in these)
            lines.append(
                f"  {kind} x {runs:g}: {_size(self.collective_bytes[kind])} (sends {_size(sent)}); {hidden:g} of them beside compute"
            )
        held = {"arguments": memory.arguments, "outputs": memory.outputs, "temporaries": memory.temporaries, "peak": memory.peak}
        lines.append("memory: " + ", ".join(f"{name} {_size(size)}" for name, size in held.items()))
        if self.compile_seconds is not None:
            lines.append(f"compiled in {self.compile_seconds:.1f} s ({self.compile_cpu_seconds:.1f} CPU seconds)")
        if self.unknown_loops:
            lines.append(f"loops whose number of turns the text does not say, counted once: {', '.join(self.unknown_loops)}")
        if heaviest:
            lines.append("heaviest instructions:")
        for c in self.heaviest(heaviest):
            if c.cycles:
                where = c.op_name.split("closed_call/")[-1][-70:]
                lines.append(f"  {c.cycles * c.trips:>10.3e} x{c.trips:<5g}{c.category:<12}{c.shape:<34} {where}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def _sums(pairs: Any) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for name, value in pairs:
        sums[name] += value
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _size(count: float | int) -> str:
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count:.0f} B"


def analyse(compiled: jax.stages.Compiled) -> Report:
    """Reads a compiled program: `analyse(jax.jit(f).lower(...).compile())`; for whichever device it was compiled.

    Estimated cycles are in the text of TPU programs only; the rest works for any backend. RuntimeError where a libtpu that is not
    the one of this JAX has made a program that cannot be read.
    """
    try:
        text = compiled.as_text() or ""
    except jax.errors.JaxRuntimeError as error:
        raise RuntimeError(
            f"jax {jax.__version__} cannot read this program, which a libtpu of another version has made: "
            'pip install "wanjax[tpu]" has its own.'
        ) from error
    return analyse_text(text, compiled.memory_analysis())


def compile_and_analyse(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Report]:
    """Compiles, timing it (CPU seconds over all threads of this process), and analyses.

    A program that comes out of the persistent compilation cache is timed as what it is: a read of a file.
    """
    wall, cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return compiled, replace(analyse(compiled), compile_seconds=wall, compile_cpu_seconds=cpu)


def analyse_text(text: str, memory: Any = None) -> Report:
    """As `analyse`, from the text and (optionally) the memory statistics of the compiled program."""
    module = hlo.parse(text)
    unknown: list[str] = []
    occurrences = hlo.walk(module, unknown)
    costs = []
    for occurrence in occurrences:
        i, where = occurrence.instruction, occurrence.where
        kind = hlo.category(i, module)
        if kind == "free":
            continue
        inner = list(hlo.inside(module, i)) if i.opcode in hlo.TOGETHER else [(i, where)]
        work = hlo.kernel_flops(i) if kind == "kernel" else sum((hlo.flops(x, computation) for x, computation in inner), 0.0)
        of = [b for x in where.operands(i) for b in x.shape] if kind == "kernel" else i.shape
        largest = sorted((b for b in of if b.dims), key=lambda b: -b.size)[: 3 if kind == "kernel" else 1]
        shape = ", ".join(f"{b.dtype}[{','.join(map(str, b.dims))}]" for b in largest)
        costs.append(Cost(i.name, kind, i.op_name, shape, i.cycles, hlo.hbm_bytes(i, where, module), work, occurrence.trips))
    return Report(
        costs=tuple(costs),
        collectives=tuple(_collectives(module, occurrences)),
        memory=_memory(memory),
        instructions=sum(len(c.instructions) for c in module.computations.values()),
        devices=module.devices,
        unknown_loops=tuple(unknown),
    )


def _memory(stats: Any) -> Memory:
    if stats is None:
        return Memory(0, 0, 0, 0, 0, 0)
    arguments, outputs = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temporaries, aliased = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    peak = getattr(stats, "peak_memory_in_bytes", 0)
    return Memory(arguments, outputs, temporaries, aliased, stats.generated_code_size_in_bytes, max(peak, arguments + temporaries))


def _collectives(module: hlo.Module, occurrences: list[hlo.Occurrence]) -> list[Collective]:
    found = []
    by_computation: Mapping[str, dict[str, int]] = {
        name: {i.name: n for n, i in enumerate(c.instructions)} for name, c in module.computations.items()
    }
    for occurrence in occurrences:
        i, where, trips = occurrence.instruction, occurrence.where, occurrence.trips
        if i.opcode in hlo.TOGETHER:
            inner = [(x, c) for x, c in hlo.inside(module, i) if hlo.collective_kind(x)]
        else:
            inner = [(i, where)] if hlo.collective_kind(i) else []
        for x, computation in inner:
            kind = hlo.collective_kind(x)
            assert kind is not None
            group = hlo.group_size(x, module)
            # a start returns (operands, results, ...); a reduction's traffic is that of what it takes
            taken = sum(o.size for o in computation.operands(x))
            given = sum(b.size for b in x.shape)
            if x.opcode.endswith("-start"):
                given = taken * group if kind == "all-gather" else taken
            if i.opcode == "fusion" and kind == "all-reduce" and "reduce-scatter" in "".join(i.called) + i.text:
                kind = "reduce-scatter"  # the TPU compiler writes it as a fused all-reduce and slice
            size = taken if kind in ("all-reduce", "reduce-scatter") else given
            part = (group - 1) / group if group else 0.0
            wire = float(size) * {"all-reduce": 2 * part, "collective-permute": 1.0, "collective-broadcast": 1.0}.get(kind, part)
            cycles, kernels = _hidden(module, where, by_computation[where.name], i)
            found.append(
                Collective(kind, x.name, x.op_name or i.op_name, size, wire, group, trips, bool(cycles or kernels), cycles, kernels)
            )
    return found


def _hidden(module: hlo.Module, where: hlo.Computation, order: Mapping[str, int], start: hlo.Instruction) -> tuple[float, int]:
    """Estimated cycles and kernels scheduled between a start and its done; nothing for a collective that waits."""
    if not start.opcode.endswith("-start"):
        return 0.0, 0
    done = next((i for i in where.instructions if i.opcode.endswith("-done") and start.name in i.operands), None)
    if done is None:
        return 0.0, 0
    cycles, kernels = 0.0, 0
    for between in where.instructions[order[start.name] + 1 : order[done.name]]:
        inner = [hlo.Occurrence(between, where, 1.0), *hlo.below(module, where, between)]
        cycles += sum(o.instruction.cycles * o.trips for o in inner)
        kernels += sum(hlo.category(o.instruction, module) == "kernel" for o in inner)
    return cycles, kernels
