"""What the documentation says is so: settings, commands, links, and the example of a technique."""

import re
import shlex
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import Field, TypeAdapter
from pydantic_settings import BaseSettings

import api.settings
import worker.settings
from optigpu.cli import app
from optigpu.hardware import probe
from optigpu.techniques import TECHNIQUES, AnyTechnique
from optigpu.techniques.base import Notes, Technique, conflict_between
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.readme import README, ROOT, blocks, section

SETTINGS: tuple[type[BaseSettings], ...] = (api.settings.ServiceSettings, worker.settings.WorkerSettings)
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND_LINES = [
    line.split("#")[0] for block in blocks("") for line in block.splitlines() if line.startswith("optigpu ")
]


def documented_settings() -> dict[str, str]:
    """Each variable of the table with its default."""
    return dict(re.findall(r"^\| `(OPTIGPU_\w+)` \| (.*?) \|", section("Settings"), re.MULTILINE))


def read_settings() -> set[str]:
    """Each variable that a settings class has, or that any of our code names."""
    fields = {f"OPTIGPU_{name.upper()}" for kind in SETTINGS for name in kind.model_fields}
    folders = ("optigpu", "api", "worker", "migrations", "examples", "tests/servers")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")] + [
        ROOT / "tests" / "conftest.py"
    ]
    return fields | {
        name for path in files for name in re.findall(r"\bOPTIGPU_[A-Z_]*[A-Z]\b", path.read_text())
    }


def test_the_table_of_settings_has_every_variable_and_no_other() -> None:
    assert set(documented_settings()) == read_settings()


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__module__)
def test_the_table_of_settings_has_the_defaults(kind: type[BaseSettings]) -> None:
    documented = documented_settings()
    for name, field in kind.model_fields.items():
        if isinstance(field.default, (str, int, float)):
            default = f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
            assert (
                documented[f"OPTIGPU_{name.upper()}"]
                == f"`{default.lower() if default == 'True' else default}`"
            )


def test_the_sections_are_in_the_order_in_which_a_newcomer_needs_them() -> None:
    headings = re.findall(r"^## (.*)$", README, re.MULTILINE)
    assert headings[:5] == [
        "Two commands",
        "What the demo prints",
        "The service",
        "The command line",
        "On a machine with GPUs",
    ]
    assert headings[-1] == "What is not there yet"


def test_the_demo_s_output_was_captured() -> None:
    captured = section("What the demo prints")
    assert "speedup: relative to the baseline" in captured
    assert "Leaderboard by tokens/s" in captured


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_a_command_of_the_readme_is_one(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    command: Any = typer.main.get_command(app)
    command.commands[name].make_context(name, arguments)


def test_the_readme_has_commands() -> None:
    assert len(COMMAND_LINES) >= 6


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [target for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.fixture(scope="module")
def example() -> type[Technique]:
    """The technique that the README adds."""
    (source,) = [block for block in blocks("python") if "(Technique)" in block]
    module: dict[str, Any] = {"__name__": "readme_example"}
    exec(compile(source, "README.md", "exec"), module)
    kind: type[Technique] = module["RegionalCompile"]
    return kind


def test_the_example_fits_into_the_union(example: type[Technique]) -> None:
    annotation: Any = Annotated[AnyTechnique | example, Field(discriminator="name")]
    union: TypeAdapter[Any] = TypeAdapter(annotation)
    assert union.validate_python({"name": "regional_compile"}) == example(name="regional_compile")
    assert conflict_between(example, TECHNIQUES["torch_compile"])
    assert example.model_fields["name"].default not in TECHNIQUES


def test_the_example_says_when_it_cannot_run(example: type[Technique]) -> None:
    technique = example(name="regional_compile")
    without = probe().model_copy(update={"compiler": None})
    assert "install g++" in str(technique.check(without, DeviceKind.CPU, None))
    assert technique.check(without, DeviceKind.CUDA, None) is None


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
