"""What knows a family of models is the one table: to add a family is to add one entry."""

import ast
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from optigpu.models.families import FAMILIES

PACKAGE = Path(__file__).resolve().parents[2] / "optigpu"
TABLE = "models/families.py"
EXCEPTIONS = {
    "backends/llama_cpp/gguf_families.py": "how llama.cpp's files have each family, in one entry for each",
    "backends/llama_cpp/gguf_tokenizer.py": "llama.cpp calls kinds of tokenizers so",
    "techniques/decoding/native_decode/families.py": "the roles of modules, of more families than others know",
    "models/presets.py": "presets are architectures of named models",
    "surgery/fused_blocks.py": "rewrites the forward functions of blocks, by the table's `forwards`",
    "techniques/kernels/fused_qkv/attention.py": "rewrites those of attentions, by the same",
}
"""Files that name a family beside the table, and why."""


def classes(value: Any) -> Iterator[str]:
    """transformers' classes that an entry of the table names: what begins with a capital letter."""
    if isinstance(value, str):
        if value[:1].isupper():
            yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from classes(each)
    elif is_dataclass(value):
        for field in fields(value):
            if field.name != "title":
                yield from classes(getattr(value, field.name))


NAMES = set(FAMILIES)
CLASSES = {name for family in FAMILIES.values() for name in classes(family)} - {"LayerNorm", "RMSNorm"}


def named_in(path: Path) -> set[str]:
    """The families and their classes that a file names in its code; docstrings and comments may name them."""
    tree = ast.parse(path.read_text("utf-8"))
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & (NAMES | CLASSES)
        elif isinstance(node, (ast.Name, ast.Attribute)):
            found |= {node.id if isinstance(node, ast.Name) else node.attr} & CLASSES
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} & CLASSES
            found |= (
                set((node.module or "").split(".")) & NAMES
                if "transformers" in (node.module or "")
                else set()
            )
    return found


@pytest.mark.slow
def test_a_family_is_named_by_the_table_alone() -> None:
    files = {str(path.relative_to(PACKAGE)): named_in(path) for path in PACKAGE.rglob("*.py")}
    naming = {name: sorted(found) for name, found in files.items() if found and name not in EXCEPTIONS}
    assert naming.keys() == {TABLE}, naming
    assert all(files[name] for name in EXCEPTIONS), "an exception is no longer needed"
