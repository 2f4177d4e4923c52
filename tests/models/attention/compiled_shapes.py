"""What arrays a compiled program holds, read from its text."""

import re


def largest_square(text: str) -> int:
    """The largest n for which the compiled program holds an array with two axes of at least n."""
    shapes = re.findall(r"\b(?:f32|bf16|f16|pred|s32|u32|s8|u8)\[([\d,]+)\]", text)
    sides = [sorted(map(int, shape.split(",")))[-2] for shape in shapes if "," in shape]
    assert sides
    return max(sides)
