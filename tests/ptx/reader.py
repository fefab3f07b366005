"""Read PTX, as Triton writes it: instructions, labels, parameters and registers of one kernel. Knows no semantics."""

from __future__ import annotations

import re
from dataclasses import dataclass

WIDTHS = {
    "pred": 0, "f16x2": 4, "bf16x2": 4, "f16": 2, "bf16": 2,
    **{f"{kind}{bits}": bits // 8 for kind in "busf" for bits in (8, 16, 32, 64)},
}  # fmt: skip
"""Bytes of a register by its declared type; 0 for predicates."""


@dataclass(frozen=True)
class Constant:
    """A number. bits: of a floating-point number its bits, of an integer itself, which may be negative."""

    bits: int


@dataclass(frozen=True)
class Address:
    """[base + offset]. base: a register, a parameter or a symbol of shared memory."""

    base: str
    offset: int


Operand = str | Constant | Address | tuple["Operand", ...]
"""A string is a register, a label or a symbol."""


@dataclass(frozen=True)
class Instruction:
    """guard: the predicate register under which threads execute it, and whether they do where it is false."""

    text: str
    name: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None

    @property
    def kind(self) -> str:
        """The last modifier: the type of the operands, or of the source."""
        return self.modifiers[-1]


@dataclass(frozen=True)
class Kernel:
    """labels: the index of the instruction that follows each. widths: of registers, in bytes, by their prefix."""

    name: str
    parameters: tuple[tuple[str, str], ...]
    threads: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    widths: dict[str, int]


def read(ptx: str) -> Kernel:
    """Read the first entry. Raises ValueError for what is no PTX of Triton's."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    entry = re.search(r"\.visible \.entry (\w+)\s*\((.*?)\)(.*?)\{", ptx, re.DOTALL)
    if entry is None:
        raise ValueError("no '.visible .entry' in the PTX")
    threads = re.search(r"\.reqntid\s+(\d+)", entry[3])
    if threads is None:
        raise ValueError(f"{entry[1]} has no .reqntid, so that its number of threads is unknown")
    parameters = re.findall(r"\.param \.(\w+)[^,]*?(\w+_param_\d+)", entry[2])
    body = _block(ptx[entry.end() - 1 :])
    body = re.sub(r"^\s*\.(loc|file|section)\b[^\n]*", "", body, flags=re.MULTILINE)
    widths = {}
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]+);", body):
        for name in names.split(","):
            widths[name.strip().lstrip("%").partition("<")[0]] = WIDTHS[kind]
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for statement in re.sub(r"(\$?\w+):(?=\s)", r"\1:;", body).split(";"):
        # Braces before a statement open and close scopes; others are of its operands.
        text = " ".join(statement.lstrip(" \t\n{}").split())
        if text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        elif text and not text.startswith("."):
            instructions.append(_instruction(text))
    return Kernel(entry[1], tuple(parameters), int(threads[1]), tuple(instructions), labels, widths)


def _block(text: str) -> str:
    """What is between the brace with which the text begins and the one that closes it."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[1:place]
    raise ValueError("a brace is not closed")


def _instruction(text: str) -> Instruction:
    guard = None
    if (guarded := re.match(r"@(!?)(%\w+)\s+(.*)", text)) is not None:
        guard, text_of = (guarded[2], guarded[1] == "!"), guarded[3]
    else:
        text_of = text
    operation, _, rest = text_of.partition(" ")
    name, *modifiers = operation.replace("::", "_").split(".")
    return Instruction(text, name, tuple(modifiers), tuple(map(_operand, _split(rest))), guard)


def _split(text: str) -> list[str]:
    """The operands, which commas separate outside of braces and brackets."""
    if text.count("{") != text.count("}") or text.count("[") != text.count("]"):
        raise ValueError(f"a brace is not closed: {text}")
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(map(_operand, _split(text[1:-1])))
    if text.startswith("["):
        inside = re.fullmatch(r"\[\s*([%\w$]+)\s*(?:\+\s*(-?\w+))?\s*\]", text)
        if inside is None:
            raise ValueError(f"an address of an unknown form: {text}")
        return Address(inside[1], int(inside[2], 0) if inside[2] else 0)
    if (bits := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text)) is not None:
        return Constant(int(bits[1], 16))
    if (number := re.fullmatch(r"(-?(?:0x[0-9A-Fa-f]+|\d+))U?", text)) is not None:
        return Constant(int(number[1], 0))
    return text
