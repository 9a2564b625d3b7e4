"""Which source files of this package a module is made of, by itself and through others. Nothing of them is run."""

import ast
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[3]
NATIVE = (".cpp", ".h")


@cache
def sources_of(module: str, package: Path = PACKAGE) -> tuple[Path, ...]:
    """The files of a module and of everything of `package` that it imports, at its top or within a function, and the
    C++ sources that these name and lie beside.

    `module` is a full name ("optigpu.surgery.places"). Imports for type checkers alone are not followed, and neither
    are the packages above a module: nothing is taken from them. In the order of their paths.
    """
    found: dict[str, Path] = {}
    native: set[Path] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        path = _file_of(name, package)
        if path is None or name in found:
            continue
        found[name] = path
        code = list(_run(ast.parse(path.read_text("utf-8"))))
        native |= set(_named_in(code, path.parent))
        waiting += _imported_by(name, path, code, package)
    return tuple(sorted({*found.values(), *native}))


def _file_of(module: str, package: Path) -> Path | None:
    """The file of a module of the package; None for other packages, and for a name that is not a module."""
    top, *parts = module.split(".")
    path = package.joinpath(*parts)
    if top != package.name:
        return None
    files = (path.with_name(f"{path.name}.py"), path / "__init__.py") if parts else (path / "__init__.py",)
    return next((file for file in files if file.is_file()), None)


def _named_in(code: Iterable[ast.AST], folder: Path) -> Iterator[Path]:
    for node in code:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(NATIVE):
            yield from (file for file in (folder / node.value,) if file.is_file())


def _imported_by(module: str, path: Path, code: Iterable[ast.AST], package: Path) -> Iterator[str]:
    parent = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in code:
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
