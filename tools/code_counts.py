"""Counts patterns that the code should avoid, and how large the repository is; with `--check` exit 1 above a bound."""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("optigpu", "api", "worker")
LIBRARIES = ("torch", "transformers")
CACHES = ("cache", "lru_cache")
BUILT = ("build", "dist", "data", "__pycache__", "optigpu.egg-info")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Counts:
    """The counts; in BOUNDS, the largest allowed value of each."""

    inner_imports: int
    """Functions that import torch or transformers inside."""
    any_types: int
    """Uses of typing.Any."""
    type_ignores: int
    """Comments that silence the type checker."""
    cached_classes: int
    """Cached functions that define a class."""


@dataclass(frozen=True)
class Sizes:
    """Of what git holds: all files, and the lines of Python of three folders. In LARGEST, the largest of each."""

    files: int
    optigpu_lines: int
    tests_lines: int
    benchmarks_lines: int


BOUNDS = Counts(inner_imports=15, any_types=349, type_ignores=15, cached_classes=0)
LARGEST = Sizes(files=1312, optigpu_lines=85000, tests_lines=71900, benchmarks_lines=6930)
Counted = TypeVar("Counted", Counts, Sizes)


def count(folders: Sequence[Path]) -> Counts:
    """The counts over all Python files under the folders."""
    texts = [path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.rglob("*.py"))]
    trees = [ast.parse(text) for text in texts]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, Function)]
    return Counts(
        inner_imports=sum(map(_imports_library, functions)),
        any_types=sum(map(_is_any, nodes)),
        type_ignores=sum(map(_type_ignores, texts)),
        cached_classes=sum(map(_is_cached_class, functions)),
    )


def sizes(root: Path) -> Sizes:
    """The sizes of a checkout, or of the same files without git."""
    files = _held(root)

    def lines(folder: str) -> int:
        code = (path for path in files if path.parts[0] == folder and path.suffix == ".py")
        return sum((root / path).read_bytes().count(b"\n") for path in code)

    return Sizes(len(files), lines("optigpu"), lines("tests"), lines("benchmarks"))


def _held(root: Path) -> list[Path]:
    """What git holds; without git, all files outside of hidden folders and of what is built."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        return [Path(name) for name in listed.stdout.split("\0") if name and (root / name).is_file()]
    found = (path.relative_to(root) for path in root.rglob("*") if path.is_file())
    return [
        path for path in found if not any(part.startswith(".") or part in BUILT for part in path.parts[:-1])
    ]


def report(counts: Counted, bounds: Counted) -> str:
    """A line for each count with its bound."""
    names = [field.name for field in fields(counts)]
    return "\n".join(
        f"{name:16} {getattr(counts, name):5} (at most {getattr(bounds, name)})" for name in names
    )


def exceeds(counts: Counted, bounds: Counted) -> bool:
    """Whether one of the counts is above its bound."""
    return any(getattr(counts, field.name) > getattr(bounds, field.name) for field in fields(counts))


def _imports_library(function: Function) -> bool:
    """Whether the function itself imports one; what a function inside it imports is counted there."""
    return any(name.split(".")[0] in LIBRARIES for node in _own_nodes(function) for name in _imported(node))


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Function | ast.ClassDef):
            yield child
            yield from _own_nodes(child)


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def _is_any(node: ast.AST) -> bool:
    """`Any`, or `typing.Any`."""
    if isinstance(node, ast.Attribute):
        return node.attr == "Any" and isinstance(node.value, ast.Name) and node.value.id == "typing"
    return isinstance(node, ast.Name) and node.id == "Any"


def _type_ignores(text: str) -> int:
    if "type: ignore" not in text:  # reading the tokens of all files takes seconds
        return 0
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type == tokenize.COMMENT and "type: ignore" in token.string for token in tokens)


def _is_cached_class(function: Function) -> bool:
    cached = any(_name(decorator) in CACHES for decorator in function.decorator_list)
    return cached and any(isinstance(node, ast.ClassDef) for node in ast.walk(function))


def _name(decorator: ast.expr) -> str:
    """`cache` of `@cache`, `@functools.cache` and `@cache(...)`."""
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")


def main(arguments: Sequence[str]) -> int:
    """Prints the counts. 1 when --check finds one above its bound, else 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="exit with status 1 when a count is above its bound"
    )
    check = parser.parse_args(arguments).check
    counts, size = count([ROOT / folder for folder in FOLDERS]), sizes(ROOT)
    print(report(counts, BOUNDS), report(size, LARGEST), sep="\n")
    return 1 if check and (exceeds(counts, BOUNDS) or exceeds(size, LARGEST)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
