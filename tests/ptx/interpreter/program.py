"""PTX text -> kernels as lists of instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .errors import PtxError
from .operands import Operand, parse_operand, split_operands

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", re.S)
PARAMETER = re.compile(r"\.param\s+\.(\w+)\s+(?:\.ptr[^,]*?\s)?([\w$]+)$")
SHARED = re.compile(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]")
REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
LABEL = re.compile(r"([\w$]+):\s*")
GUARD = re.compile(r"@(!?)(%?[\w$]+)\s+")
STATEMENT = re.compile(r"\s*((?:[\w$]+:)|\{|\}|[^;{}]*(?:\{[^{}]*\}[^;{}]*)*;)", re.S)
IGNORED = (".pragma", ".maxntid", ".minnctapersm")


@dataclass(frozen=True)
class Instruction:
    """One instruction; `guard` is (predicate register, its required value) or None."""

    opcode: str
    suffixes: tuple[str, ...]
    operands: tuple[Operand, ...]
    guard: tuple[str, bool] | None
    text: str

    @property
    def type(self) -> str:
        """The last suffix: the type it works in."""
        return self.suffixes[-1]


@dataclass
class Kernel:
    """One entry.

    parameters  name -> (index, type)
    registers   name -> type
    labels      name -> index of code
    """

    name: str
    parameters: dict[str, tuple[int, str]]
    registers: dict[str, str] = field(default_factory=dict)
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One PTX module. shared: symbol -> shared address; shared_bytes: all of them."""

    kernels: dict[str, Kernel]
    shared: dict[str, int]
    shared_bytes: int


def parse(text: str) -> Program:
    """The program in `text`; PtxError for what is not modelled."""
    text = COMMENT.sub("", text)
    shared, used = _shared_symbols(text)
    kernels = {}
    for match in ENTRY.finditer(text):
        body = text[match.end() : _closing_brace(text, match.end())]
        kernels[match[1]] = _kernel(match[1], match[2], body)
    return Program(kernels, shared, used)


def _shared_symbols(text: str) -> tuple[dict[str, int], int]:
    """Each symbol where the assembler might put it: no better aligned than it asks for."""
    symbols, top = {}, 0
    for alignment, name, size in SHARED.findall(text):
        start = -(-top // int(alignment)) * int(alignment)
        if start % 16 == 0 and int(alignment) < 16:
            start += int(alignment)
        symbols[name] = start
        top = start + int(size)
    return symbols, top


def _closing_brace(text: str, start: int) -> int:
    depth, position = 1, start
    while depth:
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        position += 1
    return position - 1


def _kernel(name: str, parameters: str, body: str) -> Kernel:
    declared = [PARAMETER.match(p.strip()) for p in parameters.split(",") if p.strip()]
    if not all(declared):
        raise PtxError(f"{name}: parameters that are not numbers or addresses are not modelled")
    kernel = Kernel(name, {m[2]: (i, m[1]) for i, m in enumerate(declared) if m})
    for statement in _unscoped(body):
        if LABEL.fullmatch(statement):
            kernel.labels[statement[:-1]] = len(kernel.code)
        elif statement.startswith(".reg"):
            kernel.registers.update(_registers(statement))
        elif not statement.startswith(IGNORED):
            kernel.code.append(parse_instruction(statement))
    return kernel


def _statements(body: str) -> Iterator[str]:
    """Braces, labels, and statements without their semicolons."""
    position = 0
    while match := STATEMENT.match(body, position):
        position = match.end()
        yield match[1].rstrip(";").strip()
    if body[position:].strip():
        raise PtxError(f"cannot be read: {body[position : position + 60]!r}")


def _unscoped(body: str) -> Iterator[str]:
    """Statements with the registers of each inner scope renamed apart."""
    scopes: list[dict[str, str]] = [{}]
    for number, statement in enumerate(_statements(body)):
        if statement == "{":
            scopes.append({})
        elif statement == "}":
            scopes.pop()
        elif not statement:
            continue
        else:
            if statement.startswith(".reg") and len(scopes) > 1:
                scopes[-1].update({name: f"{name}.{number}" for name in _registers(statement)})
            yield _renamed(statement, scopes)


def _renamed(statement: str, scopes: list[dict[str, str]]) -> str:
    for name, unique in (pair for scope in scopes for pair in scope.items()):
        statement = re.sub(rf"(?<![\w.%$]){re.escape(name)}(?![\w.])", unique, statement)
    return statement


def _registers(statement: str) -> dict[str, str]:
    match = REGISTERS.match(statement)
    assert match is not None, statement
    found = {}
    for name in split_operands(match[2]):
        numbered = re.fullmatch(r"([%\w$]+)<(\d+)>", name)
        names = [f"{numbered[1]}{i}" for i in range(int(numbered[2]))] if numbered else [name]
        found.update(dict.fromkeys(names, match[1]))
    return found


def parse_instruction(statement: str) -> Instruction:
    """One statement without label or semicolon."""
    guard = GUARD.match(statement)
    bare = statement[guard.end() :] if guard else statement
    operation, _, rest = bare.replace("\t", " ").partition(" ")
    opcode, *suffixes = operation.split(".")
    operands = tuple(parse_operand(text) for text in split_operands(rest))
    condition = (guard[2], guard[1] == "") if guard else None
    return Instruction(opcode, tuple(suffixes), operands, condition, statement)
