"""Data movement of one run of a compiled program: links between chips, links between slices, and chip memory.

Loop bodies count as often as they run; a conditional counts its most expensive branch. All figures are for one
chip.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prb_jax.measure.plan.hlo import Computation, Instruction, Module

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip

DCN = "dcn "  # prefix of collectives between slices, which use the hosts' network

# Instructions that move no data. "-done" halves count with their "-start".
_FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "iota", "while", "conditional", "call", "domain", "add-dependency",
)  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")


@dataclass(frozen=True)
class Collective:
    """Total of all collectives of one kind."""

    count: int  # number of runs
    # bytes that a chip sends if each collective uses the shortest way round a ring. For an array of S bytes on each of
    # n chips: all-gather (S is the result, of which 1/n is local), reduce-scatter and all-to-all send (n - 1)/n of S,
    # all-reduce twice that, a permute all of S. Between slices n is the number of slices; this traffic is in
    # addition to what the same collective sends within each slice.
    bytes: float


@dataclass(frozen=True)
class Costs:
    """Costs of one run of a program on one chip: collectives by kind, and bytes read and written in main memory."""

    collectives: Mapping[str, Collective] = field(default_factory=dict)
    memory_bytes: float = 0.0
    unknown_loops: int = 0  # loops without a known trip count

    @property
    def link_bytes(self) -> float:
        """Bytes that a chip sends over its links in all collectives."""
        return sum(sent.bytes for kind, sent in self.collectives.items() if not kind.startswith(DCN))

    def __add__(self, other: Costs) -> Costs:
        both = dict(self.collectives)
        for kind, more in other.collectives.items():
            mine = both.get(kind, Collective(0, 0.0))
            both[kind] = Collective(mine.count + more.count, mine.bytes + more.bytes)
        return Costs(both, self.memory_bytes + other.memory_bytes, self.unknown_loops + other.unknown_loops)

    def times(self, count: float) -> Costs:
        """Return the costs of ``count`` runs."""
        scaled = {
            kind: Collective(round(e.count * count), e.bytes * count) for kind, e in self.collectives.items()
        }
        return Costs(scaled, self.memory_bytes * count, self.unknown_loops)


def program_costs(module: Module, *, chips: int, steps: float = 1.0) -> Costs:
    """Return the costs of a compiled program on ``chips`` chips; loops of unknown length run ``steps`` times."""
    known: dict[tuple[str, frozenset[_Fused]], Costs] = {}

    def of(name: str, outside: frozenset[_Fused] = frozenset()) -> Costs:
        """Return the costs of a computation; collectives ``outside`` are started by the computation that runs it."""
        if (name, outside) not in known:
            inside, total = module.computations[name], Costs()
            # A collective may overlap with a loop: the loop's body then has steps of it, which send nothing more.
            # Only starts are compared, because combined collectives share a channel in several computations.
            starts = [one.called("calls") for one in inside if one.name.startswith(_START)]
            around = outside.union(*(_fused(one, module, chips) for one in starts if one))
            seen = set(outside)
            for instruction in inside:
                total += one(instruction, inside, seen, around)
            known[name, outside] = total
        return known[name, outside]

    def one(
        instruction: Instruction, inside: Computation, seen: set[_Fused], around: frozenset[_Fused]
    ) -> Costs:
        opcode = instruction.opcode
        if opcode == "while":
            body = instruction.called("body")
            assert body is not None
            trips = module.trip_count(instruction, inside)
            inner = of(body, around).times(steps if trips is None else trips)
            return inner + Costs(unknown_loops=int(trips is None))
        if opcode == "conditional":
            branches = [of(branch, around) for branch in instruction.branches()]
            return max(branches, key=lambda costs: (costs.memory_bytes, costs.link_bytes), default=Costs())
        called = instruction.called("calls") or (instruction.called("to_apply") if opcode == "call" else None)
        if called is not None and opcode in ("call", "async-start"):
            return of(called, around)
        if opcode.endswith(("-done", "-update")) and opcode != "dynamic-update-slice":
            return Costs()
        costs = Costs(memory_bytes=_memory(instruction, inside, module))
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            group = group_size(instruction.rest, chips=chips)
            costs += Costs({kind: Collective(1, _sent(kind, instruction, inside, group))})
        elif opcode == "send" and (between := _between_slices(instruction, inside)) is not None:
            costs += Costs({between[0]: Collective(1, between[1])})
        elif called is not None:  # a fusion
            for fused in _fused(called, module, chips):
                if fused not in seen:
                    seen.add(fused)
                    costs += Costs({fused[0]: Collective(1, fused[2])})
        return costs

    return of(module.entry)


_Fused = tuple[str, str, float]
_START = "async-collective-start"  # name of the fusion that starts a collective which others continue


def _fused(name: str, module: Module, chips: int) -> Iterator[_Fused]:
    """Yield (kind, channel, bytes sent) of the collectives in a fusion.

    On TPUs one collective can be spread over several fusions that overlap with it: all name its channel.
    An all-reduce from which each chip keeps only its part is a reduce-scatter.
    """
    inside = module.computations[name]
    for instruction in inside:
        kind = instruction.opcode.removesuffix("-start")
        if kind in KINDS:
            channel = re.search(r"channel_id=(\d+)", instruction.rest)
            identity = channel[1] if channel else f"{name}/{instruction.name}"
            if kind == "all-reduce" and name.startswith("all-reduce-scatter"):
                # It runs whole in this fusion. Several of them may share a channel.
                kind, identity = "reduce-scatter", name
            yield kind, identity, _sent(kind, instruction, inside, group_size(instruction.rest, chips=chips))
        called = instruction.called("calls")
        if called is not None:
            yield from _fused(called, module, chips)


def _between_slices(instruction: Instruction, inside: Computation) -> tuple[str, float] | None:
    """Return (kind, bytes) that a chip hands to its host for other slices; None for any other send."""
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
    if match is None:
        return None
    kind = match[1].lower().replace("_", "-")
    slices = re.search(r'_xla_megascale_target="\{([\d,:]+)\}', instruction.rest)
    # e.g. "1,2" or "0:3"
    ranges = [part.split(":") for part in slices[1].split(",")] if slices else [["1", "2"]]
    return DCN + kind, _sent(
        kind, instruction, inside, sum(int(part[-1]) - int(part[0]) + 1 for part in ranges)
    )


def _sent(kind: str, instruction: Instruction, inside: Computation, group: int) -> float:
    """Return the bytes that each member of a group sends, on the shortest way round a ring."""
    size = sum(array.bytes for operand in inside.operands(instruction) for array in operand.arrays)
    if kind in ("collective-permute", "collective-broadcast"):
        return size
    if kind == "all-gather":
        return size * (group - 1)
    share = size * (group - 1) / group
    return 2 * share if kind == "all-reduce" else share


def group_size(attributes: str, *, chips: int) -> int:
    """Return the number of chips in one collective; all of the program's chips if no groups are named.

    ``attributes`` contain the instruction's ``replica_groups`` in any of the compiler's spellings.
    """
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    if listed is not None:
        return len(listed[1].split(","))
    strided = re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes)
    if strided is not None:
        return int(strided[1])
    named = re.search(r"replica_groups=\w+\[([^\]]*)\][^{]*\{([^}]*)\}", attributes)
    if named is not None:
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
        # An axis may be split: 'x':(1)2 is a part of size 2.
        parts = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[name] for name, part in parts)
    return chips


def _memory(instruction: Instruction, inside: Computation, module: Module) -> float:
    """Return the bytes of main memory that an instruction reads and writes."""
    if instruction.opcode in _FREE or 'custom_call_target="AllocateBuffer"' in instruction.rest:
        return 0.0
    operands = inside.operands(instruction)
    if instruction.opcode in ("send", "recv"):  # the result also names the operand and a context
        moved = operands[0].arrays if instruction.opcode == "send" else instruction.arrays
        return moved[0].bytes if moved[0].space == 0 else 0.0
    if instruction.opcode == "fusion":
        called = instruction.called("calls")
        fusion = module.computations[called] if called else None
        read = sum(_read_by_fusion(operand, place, fusion, module) for place, operand in enumerate(operands))
        return read + _written(instruction, fusion)
    if instruction.opcode in _SLICES:
        size = _in_memory(instruction)
        return size + (size if operands and _in_memory(operands[0]) else 0.0)
    if instruction.opcode == "dynamic-update-slice":
        return 2 * _in_memory(operands[1]) if _in_memory(operands[0]) else 0.0
    if instruction.opcode.endswith("-start"):  # the result is a tuple that also names the operand
        copied = instruction.arrays[
            0 if instruction.opcode == "copy-start" else min(1, len(instruction.arrays) - 1)
        ]
        source = _in_memory(operands[0]) if operands else 0.0
        return (copied.bytes if copied.space == 0 else 0.0) + (min(source, copied.bytes) if source else 0.0)
    return _in_memory(instruction) + sum(_in_memory(operand) for operand in operands)


def _in_memory(instruction: Instruction) -> float:
    return sum(array.bytes for array in instruction.arrays if array.space == 0)


def _read_by_fusion(operand: Instruction, place: int, fusion: Computation | None, module: Module) -> float:
    """Return the bytes read of an operand in main memory: all, or only the slices that are used."""
    whole = _in_memory(operand)
    if not whole or fusion is None or place not in fusion.parameters:
        return whole
    return min(whole, _read_inside(fusion.parameters[place], fusion, module, whole=whole))


def _read_inside(value: Instruction, fusion: Computation, module: Module, *, whole: float) -> float:
    """Return the bytes that a fusion and nested fusions read of a parameter. Bytes that only an overlapping
    collective uses, or that are only passed on, do not count."""
    read = 0.0
    for user in fusion.users[value.name]:
        inner = user.called("calls") if user.opcode == "fusion" else None
        if user.opcode in _SLICES and user.operands[0] == value.name:
            read += sum(array.bytes for array in user.arrays)
        elif user.opcode == "bitcast":
            read += _read_inside(user, fusion, module, whole=whole)
        elif inner is not None:
            within = module.computations[inner]
            for place, name in enumerate(user.operands):
                if name == value.name:
                    read += _read_inside(within.parameters[place], within, module, whole=whole)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            continue  # updated in place
        elif user.opcode not in (*KINDS, "tuple"):
            return whole
    return read


def _written(instruction: Instruction, fusion: Computation | None) -> float:
    """Return the bytes of the result; for results updated in place, only the update."""
    if fusion is None:
        return _in_memory(instruction)
    made = fusion.operands(fusion.root) if fusion.root.opcode == "tuple" else [fusion.root]
    if len(made) != len(instruction.arrays):
        return _in_memory(instruction)
    parts = zip(instruction.arrays, made, strict=True)
    return sum(_written_part(array.bytes, part, fusion) for array, part in parts if array.space == 0)


def _written_part(whole: float, made: Instruction, fusion: Computation) -> float:
    while made.opcode == "bitcast" and made.operands[0] in fusion.instructions:
        made = fusion.instructions[made.operands[0]]
    if made.opcode in (*KINDS, "parameter"):
        return 0.0
    if made.opcode == "dynamic-update-slice" and made.operands[1] in fusion.instructions:
        update = fusion.instructions[made.operands[1]]
        return min(whole, sum(array.bytes for array in update.arrays))
    return whole
