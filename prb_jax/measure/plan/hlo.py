"""Parser for a compiled program's text (HLO), deep enough to follow its loops.

An instruction keeps only the parts that planning needs: name, type, operation, operands, and the computations
it calls. A loop's trip count comes from the compiler's note if there is one, else from the loop's counter: its
start, its step and its limit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from prb_jax.errors import RunError

_HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*->.*\{\s*$")
# A computation for another core ends in '}, execution_thread="sparsecore"'. "}}, ..." is no end: a kernel's metadata
# runs over several lines.
_END = re.compile(r"^\}(\s|$|, execution_thread=)")
_INSTRUCTION = re.compile(r"^\s+(ROOT\s+)?%?([\w.\-]+) = ")
_CALLED = re.compile(r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"?(\d+)')
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^{}]*\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_COMMENT = re.compile(r"/\*.*?\*/")
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Array:
    """One array of a type, with its bytes without padding; space 0 is main memory, other spaces are on the core."""

    bytes: float
    space: int


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. ``rest`` is the text after the operands."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    argument: str
    rest: str
    is_root: bool

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result; arrays of a tuple in order."""
        return parse_arrays(self.type)

    def called(self, role: str) -> str | None:
        """Return the computation it calls as ``role``: calls, body, condition, to_apply, ..."""
        return next((name for kind, name in _CALLED.findall(self.rest) if kind == role), None)

    def branches(self) -> tuple[str, ...]:
        """Return the computations of a conditional."""
        listed = _BRANCHES.search(self.rest)
        if listed is not None:
            return tuple(name.strip().lstrip("%") for name in listed[1].split(",") if name.strip())
        sides = (self.called("true_computation"), self.called("false_computation"))
        return tuple(name for name in sides if name is not None)


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order of the text."""

    instructions: Mapping[str, Instruction] = field(repr=False)

    @cached_property
    def root(self) -> Instruction:
        """The instruction that makes the result."""
        return next(instruction for instruction in self.instructions.values() if instruction.is_root)

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """Parameters by number."""
        return {int(one.argument): one for one in self if one.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """Users of each instruction's result, by the instruction's name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions that make its operands."""
        return [self.instructions[name] for name in instruction.operands if name in self.instructions]

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())


@dataclass(frozen=True)
class Module:
    """A program: computations by name, and the name of the entry computation."""

    computations: Mapping[str, Computation] = field(repr=False)
    entry: str

    def trip_count(self, loop: Instruction, inside: Computation) -> int | None:
        """Return how often the body of a while loop runs; None if unknown."""
        noted = _TRIPS.search(loop.rest)
        if noted is not None:
            return int(noted[1])
        condition, body = loop.called("condition"), loop.called("body")
        if condition is None or body is None:
            return None
        return _counted(loop, inside, self.computations[condition], self.computations[body])


def parse_module(text: str) -> Module:
    """Parse the text of ``compiled.as_text()``.

    Raises:
      RunError: the text has no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry, name, lines = None, None, {}
    for line in text.splitlines():
        if name is None:
            header = _HEADER.match(line)
            if header is not None:
                name, lines = header[2], {}
                entry = name if header[1] else entry
        elif _END.match(line):
            computations[name] = Computation(lines)
            name = None
        else:
            instruction = _parse_instruction(line)
            if instruction is not None:
                lines[instruction.name] = instruction
    if entry is None:
        raise RunError("the compiler's text of the program contains no ENTRY computation")
    return Module(computations, entry)


def parse_arrays(text: str) -> tuple[Array, ...]:
    """Return the arrays of a type such as ``(bf16[2,8]{1,0:T(8,128)S(1)}, f32[])``."""
    arrays = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        count = math.prod(int(size) for size in sizes.split(",") if size)
        arrays.append(Array(count * _width(dtype), int(space[1]) if space else 0))
    return tuple(arrays)


def _width(dtype: str) -> float:
    """Return the bytes of an element: the digits in a name such as f8e4m3fn or bf16 are its bits."""
    if dtype in ("token", "opaque"):
        return 0.0
    if dtype == "pred":
        return 1.0
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 0.0


def _parse_instruction(line: str) -> Instruction | None:
    start = _INSTRUCTION.match(line)
    if start is None:
        return None
    text = _COMMENT.sub("", line[start.end() :])
    end = _balanced(text) if text.startswith("(") else text.index(" ")
    kind, after = text[:end], text[end:].lstrip()
    opcode, _, behind = after.partition("(")
    close = _balanced("(" + behind) - 1
    argument, rest = behind[: close - 1], behind[close:]
    operands = tuple(re.findall(r"%([\w.\-]+)", argument))
    return Instruction(start[2], kind, opcode.strip(), operands, argument.strip(), rest, bool(start[1]))


def _balanced(text: str) -> int:
    """Return the position after the bracket that closes the one at the start."""
    depth = 0
    for place, letter in enumerate(text):
        if letter in _OPEN:
            depth += 1
        elif letter in _CLOSE:
            depth -= 1
            if depth == 0:
                return place + 1
    return len(text)


def _counted(loop: Instruction, inside: Computation, condition: Computation, body: Computation) -> int | None:
    """Return the trip count of ``for (i = start; i < limit; i += step)``."""
    test = condition.root
    if test.opcode != "compare" or "direction=LT" not in test.rest or len(test.operands) != 2:
        return None
    initial = inside.operands(loop)
    if len(initial) != 1 or initial[0].opcode != "tuple" or body.root.opcode != "tuple":
        return None

    def value(name: str) -> tuple[int | None, int | None]:
        """Return (constant, place in the loop's tuple) of an operand of the condition."""
        made = _source(condition, name)
        if made is None:
            return None, None
        if made.opcode == "get-tuple-element":
            place = _place(made)
            return _constant(inside, initial[0].operands[place]), place
        return _constant(condition, name), None

    start, counter = value(test.operands[0])
    limit, _ = value(test.operands[1])
    if start is None or limit is None or counter is None:
        return None
    step = _step(body, body.root.operands[counter], counter)
    return None if not step else max(0, -(-(limit - start) // step))


def _step(body: Computation, name: str, counter: int) -> int | None:
    """Return the constant that the body adds to its counter."""
    added = _source(body, name)
    if added is None or added.opcode != "add" or len(added.operands) != 2:
        return None
    for mine, other in (added.operands, added.operands[::-1]):
        side = _source(body, mine)
        if side is not None and side.opcode == "get-tuple-element" and _place(side) == counter:
            return _constant(body, other)
    return None


def _source(inside: Computation, name: str) -> Instruction | None:
    """Return the instruction that makes a value, looking through copies."""
    made = inside.instructions.get(name)
    while made is not None and made.opcode in ("copy", "bitcast"):
        made = inside.instructions.get(made.operands[0])
    return made


def _place(element: Instruction) -> int:
    match = re.search(r"index=(\d+)", element.rest)
    return int(match[1]) if match else -1


def _constant(inside: Computation, name: str) -> int | None:
    made = _source(inside, name)
    if made is None or made.opcode != "constant" or not re.fullmatch(r"-?\d+", made.argument):
        return None
    return int(made.argument)
