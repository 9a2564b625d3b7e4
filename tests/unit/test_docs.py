"""The documentation is right about settings, commands, links, the threat model and an example; and its site builds."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field, TypeAdapter
from pydantic_settings import BaseSettings

import api.settings
import worker.context
from optigpu.cli import app
from optigpu.exports import EXPORTS
from optigpu.techniques import TECHNIQUES, AnyTechnique
from optigpu.techniques.base import Notes, Technique, conflict_between
from optigpu.variables import KNOWN
from optigpu.vocabulary import UnsupportedError
from tests.pages import ADD, ROOT, SERVICE, blocks, commands, part
from tests.pages import PAGES as CODED

SETTINGS_CLASSES: tuple[type[BaseSettings], ...] = (
    api.settings.ServiceSettings,
    worker.context.WorkerSettings,
    worker.context.PilotSettings,
    worker.context.LauncherSettings,
)
NAMES = ROOT / "optigpu" / "variables.py"
"""It lists every name, read or not."""
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
OWN_COMMANDS = [
    line.split(" > ")[0] for page in CODED for line in commands(page) if line.startswith("optigpu ")
]


def documented_settings() -> dict[str, str]:
    """Each variable of the table with its default."""
    return dict(re.findall(r"^\| `(OPTIGPU_\w+)` \| (.*?) \|", SERVICE.read_text(), re.MULTILINE))


def read_settings() -> set[str]:
    """Each variable that a settings class has, or that any of our code names."""
    fields = {f"OPTIGPU_{name.upper()}" for kind in SETTINGS_CLASSES for name in kind.model_fields}
    folders = ("optigpu", "api", "worker", "migrations", "examples", "tests/servers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path != NAMES] + [
        ROOT / "tests" / "conftest.py",
        ROOT / "tests" / "edge" / "tools.py",
    ]
    return fields | {
        name for path in files for name in re.findall(r"\bOPTIGPU_[A-Z_]*[A-Z]\b", path.read_text())
    }


def test_the_table_of_settings_has_every_variable_and_no_other() -> None:
    assert set(documented_settings()) == read_settings()


def test_the_names_that_programs_know_are_those_of_the_table() -> None:
    assert sorted(KNOWN) == sorted(documented_settings())


@pytest.mark.parametrize("kind", SETTINGS_CLASSES, ids=lambda kind: kind.__module__)
def test_the_table_of_settings_has_the_defaults(kind: type[BaseSettings]) -> None:
    documented = documented_settings()
    for name, field in kind.model_fields.items():
        if isinstance(field.default, (str, int, float)):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert (
                documented[f"OPTIGPU_{name.upper()}"]
                == f"`{default.lower() if isinstance(field.default, bool) else default}`"
            )


@pytest.mark.parametrize("line", OWN_COMMANDS)
def test_a_command_of_the_documentation_is_one(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command: Any = typer.main.get_command(app)
    command.commands[name].make_context(name, arguments)


def links_of(page: Path) -> list[tuple[str, str]]:
    """The path and the heading of each link that stays in the repository; either may be empty."""
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", page.read_text())
    return [(path, heading) for path, heading in links if "://" not in path]


def headings_of(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert [path for path, _ in links_of(page) if not (page.parent / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_find_it(page: Path) -> None:
    targets = [(page.parent / path if path else page, heading) for path, heading in links_of(page) if heading]
    assert [heading for target, heading in targets if heading not in headings_of(target)] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [each for page in CODED for each in blocks(page, "python") if "from optigpu" in each],
    ids=lambda source: source.splitlines()[0],
)
def test_what_the_documentation_imports_is_there(source: str) -> None:
    imports = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom) and node.module
    ]
    names = [(str(node.module), alias.name) for node in imports for alias in node.names]
    assert names
    assert [pair for pair in names if not hasattr(importlib.import_module(pair[0]), pair[1])] == []


@pytest.fixture(scope="module")
def example() -> type[Technique]:
    """The technique that the page adds."""
    (source,) = blocks(ADD, "python")
    module: dict[str, Any] = {"__name__": "example"}
    exec(compile(source, ADD.name, "exec"), module)
    kind: type[Technique] = module["RegionalCompile"]
    return kind


def test_the_example_fits_into_the_union(example: type[Technique]) -> None:
    annotation: Any = Annotated[AnyTechnique | example, Field(discriminator="name")]
    union: TypeAdapter[Any] = TypeAdapter(annotation)
    assert union.validate_python({"name": "regional_compile"}) == example(name="regional_compile")
    assert conflict_between(example, TECHNIQUES["torch_compile"])
    assert example.model_fields["name"].default not in TECHNIQUES


@pytest.mark.slow
def test_the_example_changes_a_model(example: type[Technique]) -> None:
    from torch import nn
    from transformers import GPT2Config, GPT2LMHeadModel

    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=16))
    notes = Notes()
    example(name="regional_compile").modules(model, notes)
    assert notes.facts == {"compiled_modules": 2}
    assert all(block.mlp._compiled_call_impl is not None for block in model.transformer.h)
    other: Any = nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match="no MLP"):
        example(name="regional_compile").modules(other, notes)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, module_monkeypatch: pytest.MonkeyPatch) -> Path:
    """The built site; a warning stops the build."""
    module_monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    module_monkeypatch.chdir(ROOT)
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder)))
    return folder


@pytest.fixture(scope="module")
def module_monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.mark.long
def test_the_site_has_every_page_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {page.relative_to(ROOT / "docs").with_suffix(".html") for page in (ROOT / "docs").rglob("*.md")}
    built = {page.relative_to(site) for page in site.rglob("*.html")}
    assert {page for page in pages if page.name != "README.html"} <= built
    loads = re.compile(
        r"""<(?:script|img|iframe)[^>]+src="https?://|<link[^>]+rel="(?:stylesheet|preconnect)"[^>]+http"""
    )
    assert [page for page in built if loads.search((site / page).read_text())] == []


@pytest.mark.long
def test_the_reference_has_every_public_name(site: Path) -> None:
    said = (site / "reference" / "library.html").read_text()
    assert [name for name, module in EXPORTS.items() if f'id="{module}.{name}"' not in said] == []


LINES = [
    line.split(" | ")
    for line in re.findall(r"^\| (.*) \|$", part(SERVICE, "Threat model"), re.MULTILINE)
    if line.count(" | ") == 2 and not line.startswith(("attack", "---"))
]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line[0])
def test_a_line_is_shown_by_tests_that_are_there(line: list[str]) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", line[2])
    assert named
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"
