"""Which source files of this package a module imports, by itself and through others. Nothing of them is run."""

import ast
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3]


@cache
def sources_of(module: str, package: Path = PACKAGE) -> tuple[Path, ...]:
    """The file of a module and of everything of `package` that it imports, at its top or within a function.

    `module` is a full name ("optigpu.surgery.places"). Imports for type checkers alone are not followed, and neither
    are the packages above a module: nothing is taken from them. In the order of their names.
    """
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package)
        if path is None or name in found:
            continue
        found[name] = path
        waiting += _imported_by(name, path, package)
    return tuple(path for _, path in sorted(found.items()))


def _file_of(module: str, package: Path) -> Path | None:
    """The file of a module of the package; None for other packages, and for a name that is not a module."""
    top, *parts = module.split(".")
    path = package.joinpath(*parts)
    if top != package.name:
        return None
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((file for file in files if file.is_file()), None)


def _imported_by(module: str, path: Path, package: Path) -> Iterator[str]:
    parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in _run(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), parent)
            names = [f"{origin}.{alias.name}" for alias in node.names]
            # A name may be a module of a package, or something in a module.
            yield from (name if _file_of(name, package) else origin for name in names)


def _run(node: ast.AST) -> Iterator[ast.AST]:
    """All code except that under `if TYPE_CHECKING:`."""
    for child in ast.iter_child_nodes(node):
        if (
            isinstance(child, ast.If)
            and isinstance(child.test, ast.Name)
            and child.test.id == "TYPE_CHECKING"
        ):
            yield from (each for other in child.orelse for each in (other, *_run(other)))
        else:
            yield child
            yield from _run(child)
