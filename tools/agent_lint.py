"""Finds in esp32_agent what a board cannot run: `python -m tools.agent_lint`; exit 1 where it finds something.

Everything but the files of HOST runs on MicroPython: its modules, built-in names, methods, syntax and format specs.
`core` computes on integers alone, because a board's floats have 24 bits, and knows of the port only its interfaces.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tools.agent_rules import (
    CORE_MODULES,
    CORE_OURS,
    DECORATORS,
    LACKING_KEYWORDS,
    LACKING_METHODS,
    LACKING_NAMES,
    LACKING_SYNTAX,
    MODULES,
    PERCENT,
    SPEC,
)

ROOT = Path(__file__).resolve().parent.parent
FOLDER = "esp32_agent"
HOST = ("port/host", "tiny/lines.py", "tiny/__main__.py")
"""What runs on CPython alone: folders and files."""


@dataclass(frozen=True)
class Finding:
    path: Path
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.message}"


def check_folder(folder: Path) -> list[Finding]:
    """Findings in the files of the agent that run on a board."""
    found: list[Finding] = []
    for path in board_files(folder):
        is_core = path.relative_to(folder).parts[0] == "core"
        found += check_text(path.read_text(encoding="utf-8"), path, is_core=is_core)
    return found


def board_files(folder: Path) -> list[Path]:
    """The Python files under the agent's folder that run on a board."""
    files = sorted(folder.rglob("*.py"))
    return [path for path in files if not any(path.relative_to(folder).is_relative_to(each) for each in HOST)]


def check_text(text: str, path: Path, *, is_core: bool) -> list[Finding]:
    """Findings in one file, by line."""
    found = [*_joined_strings(text)]
    for node in _running(ast.parse(text)):
        found += [(getattr(node, "lineno", 1), message) for message in _board(node)]
        if is_core:
            found += [(getattr(node, "lineno", 1), message) for message in _core(node)]
    return [Finding(path, line, message) for line, message in sorted(set(found))]


def _running(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING:`, which run nowhere."""
    for node in ast.iter_child_nodes(tree):
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from _running(node)


def _board(node: ast.AST) -> Iterator[str]:
    """What MicroPython lacks."""
    yield from _imports(node)
    yield from _displays(node)
    yield from _formats(node)
    for kind, name in LACKING_SYNTAX:
        if isinstance(node, kind):
            yield f"MicroPython has no {name}"
    if isinstance(node, ast.Name) and node.id in LACKING_NAMES:
        yield f"MicroPython has no {node.id}"
    if isinstance(node, ast.Attribute) and node.attr in LACKING_METHODS:
        yield f"MicroPython has no .{node.attr}()"
    if isinstance(node, ast.arguments) and node.posonlyargs:
        yield "MicroPython has no positional-only parameters"
    if isinstance(node, ast.ClassDef) and node.keywords:
        yield "MicroPython has no metaclasses or class keywords"
    if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
        for decorator in node.decorator_list:
            name = ast.unparse(decorator)
            if name not in DECORATORS and not name.endswith(".setter"):
                yield f"MicroPython has no decorator {name}"
    if isinstance(node, ast.Call):
        yield from _calls(node)


def _imports(node: ast.AST) -> Iterator[str]:
    for name in _imported(node):
        if name.split(".")[0] != FOLDER and name not in MODULES:
            yield f"MicroPython on the board has no module {name}, and the agent imports none of ours"
    if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
        yield "a star import takes more heap than the names that are used"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []


def _displays(node: ast.AST) -> Iterator[str]:
    """[*a, b] and {**a}."""
    if isinstance(node, ast.List | ast.Tuple | ast.Set) and not _is_target(node) and _unpacks(node.elts):
        yield "MicroPython does not unpack in a list, tuple or set display"
    if isinstance(node, ast.Dict) and None in node.keys:
        yield "MicroPython does not unpack in a dict display"


def _is_target(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def _unpacks(nodes: list[ast.expr]) -> bool:
    return any(isinstance(each, ast.Starred) for each in nodes)


def _formats(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.FormattedValue):
        if node.conversion == ord("a"):
            yield "MicroPython has no conversion !a"
        spec = _spec(node)
        if spec is None:
            yield "MicroPython does not nest format specs"
        elif not re.fullmatch(SPEC, spec):
            yield f"MicroPython has no format spec {spec!r}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant):
        text = node.left.value
        if isinstance(text, str) and not re.fullmatch(PERCENT, text):
            yield f"MicroPython has no format {text!r}"


def _spec(node: ast.FormattedValue) -> str | None:
    """The format spec, empty where there is none; None for a spec that is computed."""
    if node.format_spec is None:
        return ""
    values = node.format_spec.values if isinstance(node.format_spec, ast.JoinedStr) else []
    texts = [each.value for each in values if isinstance(each, ast.Constant)]
    return "".join(map(str, texts)) if len(texts) == len(values) else None


def _calls(node: ast.Call) -> Iterator[str]:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    for keyword in node.keywords:
        if (name, keyword.arg) in LACKING_KEYWORDS:
            yield f"MicroPython's {name}() has no {keyword.arg}"
    if name in ("startswith", "endswith") and node.args and isinstance(node.args[0], ast.Tuple):
        yield f"MicroPython's {name}() takes one string"


def _core(node: ast.AST) -> Iterator[str]:
    """What core may not do."""
    for name in _imported(node):
        is_ours = name in CORE_OURS or name.startswith(f"{FOLDER}.core")
        if not is_ours and name not in CORE_MODULES:
            yield f"core does not import {name}"
    if isinstance(node, ast.Constant) and isinstance(node.value, float | complex):
        yield f"core computes on integers: {node.value!r}"
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Pow):
        yield "core computes on integers: use // instead of /, and a shift or product instead of **"
    if isinstance(node, ast.Name) and node.id in ("float", "complex", "round"):
        yield f"core computes on integers: {node.id}"
    if isinstance(node, ast.FormattedValue) and re.search("[eEfFgGn%]$", _spec(node) or ""):
        yield "core computes on integers: a format for floats"
    if isinstance(node, ast.Slice) and node.step is not None:
        yield "MicroPython's bytes and strings have no slices with a step"
    if isinstance(node, ast.FunctionDef) and _calls_itself(node):
        yield f"core does not recurse: {node.name} calls itself"


def _calls_itself(function: ast.FunctionDef) -> bool:
    """By its name, or by `self` and its name."""
    called = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return any(ast.unparse(each) in (function.name, f"self.{function.name}") for each in called)


def _joined_strings(text: str) -> Iterator[tuple[int, str]]:
    """Adjacent literals of which one is an f-string: MicroPython formats them wrongly."""
    last: tokenize.TokenInfo | None = None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NL, tokenize.COMMENT):
            continue
        is_pair = last is not None and _is_literal(last, "END") and _is_literal(token, "START")
        if last is not None and is_pair and (_is_formatted(last) or _is_formatted(token)):
            yield token.start[0], "MicroPython does not join an f-string to a literal beside it: use +"
        last = token


def _is_literal(token: tokenize.TokenInfo, end: str) -> bool:
    """A string, or the beginning or end of an f-string: Python 3.12 has tokens of their own for these."""
    return token.type == tokenize.STRING or tokenize.tok_name[token.type] == f"FSTRING_{end}"


def _is_formatted(token: tokenize.TokenInfo) -> bool:
    return token.type != tokenize.STRING or "f" in re.match("[a-zA-Z]*", token.string)[0].lower()  # type: ignore[index]


def main() -> int:
    found = check_folder(ROOT / FOLDER)
    for finding in found:
        print(finding)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
