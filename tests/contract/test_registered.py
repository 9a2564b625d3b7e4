"""To add something is one file and one name. This fails when the name, the documentation or the test is forgotten."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends import BACKENDS
from optigpu.engines.environments import RECIPES
from optigpu.job.spec import JobSpec, Measure, resolve
from optigpu.meters import METER_NAMES
from optigpu.models.families import FAMILIES
from optigpu.selftest.checks import SELF_TESTS, case_of, engine_checks, technique_checks, workload_for
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT, Technique
from optigpu.vocabulary import METRICS
from optigpu.workloads import WORKLOADS, kinds_with
from optigpu.workloads.base import Workload
from optigpu.workloads.generate import Generate
from tools.reference_pages import metrics_page, techniques_page

ROOT = Path(__file__).resolve().parents[2]
NOT_PARTS = {"requests", "__init__", "base"}


def parts(folder: str, pattern: str) -> list[Path]:
    """The files of a folder of the engine that each hold one part."""
    return [path for path in sorted((ROOT / "optigpu" / folder).glob(pattern)) if path.stem not in NOT_PARTS]


def classes_in(path: Path, base: type) -> list[type]:
    """The subclasses of `base` that a file defines, or that a package defines and offers."""
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    members = inspect.getmembers(importlib.import_module(name), inspect.isclass)
    return [
        member
        for _, member in members
        if issubclass(member, base) and f"{member.__module__}.".startswith(f"{name}.")
    ]


def packages() -> list[Path]:
    """The packages of a layer: techniques with parts of their own."""
    return [path.parent for path in sorted((ROOT / "optigpu" / "techniques").glob("*/*/__init__.py"))]


@pytest.mark.parametrize("path", [*parts("techniques", "*/*.py"), *packages()], ids=lambda path: path.stem)
def test_a_module_or_package_of_a_layer_offers_exactly_one_technique(path: Path) -> None:
    (kind,) = classes_in(path, Technique)
    assert TECHNIQUES.get(path.stem) is kind


@pytest.mark.parametrize("path", parts("workloads", "*.py"), ids=lambda path: path.stem)
def test_a_workload_s_file_holds_one_and_it_is_in_the_union(path: Path) -> None:
    (kind,) = classes_in(path, Workload)
    assert WORKLOADS.get(path.stem) is kind


def test_every_meter_s_file_can_be_asked_for() -> None:
    assert {path.stem for path in parts("meters", "*.py")} == set(METER_NAMES)
    assert Measure(meters=METER_NAMES).meters == METER_NAMES


def test_every_backend_can_be_asked_for() -> None:
    folders = {path.parent.name for path in (ROOT / "optigpu" / "backends").glob("*/__init__.py")}
    assert folders == set(BACKENDS) == {backend.name for backend in BACKENDS.values()}
    schema = JobSpec.model_json_schema()["properties"]["backend"]
    assert schema.get("enum", [schema.get("const")]) == list(BACKENDS)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_names_only_others_that_exist(name: str) -> None:
    kind = TECHNIQUES[name]
    assert {*kind.requires, *kind.conflicts, *kind.compared_with} <= set(TECHNIQUES)
    assert kinds_with(kind.tasks)


@pytest.mark.parametrize("name", TECHNIQUES)
def test_what_is_said_to_be_measured_stands_on_the_page_that_it_names(name: str) -> None:
    measured = [part for part in TECHNIQUES[name].expected if part.basis == "measured here"]
    for part in measured:
        assert part.source
        page = (ROOT / "docs" / part.source).read_text()
        assert [figure for figure in re.findall(r"\d+\.\d+", part.text) if figure not in page] == []


@pytest.mark.parametrize("kind", WORKLOADS.values(), ids=str)
def test_a_workload_s_metrics_exist(kind: type[Workload]) -> None:
    assert set(kind.metrics) <= set(METRICS)
    assert kind.primary in kind.metrics


@pytest.mark.parametrize("name", [*TECHNIQUES, *WORKLOADS])
def test_what_can_be_asked_for_has_a_test_of_what_it_does(name: str) -> None:
    """Among the tests of the engine, which run it."""
    tests = "\n".join(path.read_text() for path in (ROOT / "tests" / "engine").rglob("*.py"))
    assert re.search(rf"\b{name}\b", tests)


def names_in(node: ast.AST) -> set[str]:
    """The identifiers of a piece of code."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def disabled_in(path: Path) -> set[str]:
    """Classes named by a test that checks its own failure without a hook, or listed in the constants that it names."""
    tree = ast.parse(path.read_text())
    constants: dict[str, set[str]] = {}
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            constants |= {name: names_in(node.value) for target in targets for name in names_in(target)}
    tests = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = set().union(*(names_in(test) for test in tests if "assert_needs_hook" in names_in(test)))
    for _ in constants:
        found = found.union(*(constants[name] for name in found & set(constants)))
    return found


def test_a_technique_s_test_is_seen_to_fail_when_the_technique_does_nothing() -> None:
    files = (ROOT / "tests" / "engine").glob("test_techniques_*.py")
    disabled: set[str] = set().union(*map(disabled_in, files))
    assert {name for name, kind in TECHNIQUES.items() if kind.__name__ not in disabled} == set()


@pytest.mark.parametrize("name", [*TECHNIQUES, *WORKLOADS, *METRICS])
def test_every_name_is_documented(name: str) -> None:
    assert f"`{name}`" in techniques_page() + metrics_page()


# ---- What is registered is in the self-test by itself.


OPS = Path(__file__).resolve().parents[2] / "optigpu" / "ops"


def test_every_technique_is_checked_on_each_of_its_devices() -> None:
    found = {(check.name, check.device) for check in technique_checks()}
    assert found == {(name, device) for name, kind in TECHNIQUES.items() for device in kind.devices}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_the_trials_of_a_technique_differ_and_can_be_made(name: str) -> None:
    kind = TECHNIQUES[name]
    cases = [case_of(trial) for trial in kind.trials]
    assert len(set(cases)) == len(cases)
    for trial in kind.trials:
        technique = kind.model_validate({"name": name, **trial.parameters})
        workload = workload_for(technique)
        assert technique.fits(workload) is None
        beside = [TECHNIQUES[each](name=each) for each in trial.beside]
        assert technique in resolve((technique, *beside), workload.kind)
        assert WORKLOADS[workload.kind].task in kind.tasks
        bound = kind.error_bound if trial.error_bound is None else trial.error_bound
        assert EXACT <= bound <= 1


def test_every_engine_that_decodes_is_checked_on_each_of_its_devices() -> None:
    found = {(check.name, check.device) for check in engine_checks()}
    decoding = {name for name, backend in BACKENDS.items() if backend.supports(Generate(), None) is None}
    engines = decoding - {"torch", "endpoint"}
    assert found == {(name, device) for name in engines for device in BACKENDS[name].devices}
    assert {"vllm", "tensorrt_llm", "coreml"} <= engines
    alone = {check.name for check in engine_checks() if check.alone}
    assert alone == {name for name in engines if name in RECIPES}


def test_every_meter_is_checked() -> None:
    assert set(SELF_TESTS) == set(METER_NAMES)


def sources() -> list[Path]:
    """The kernels' files: C++ that is compiled, and Triton."""
    return sorted([*OPS.rglob("*.cpp"), *OPS.rglob("triton_*.py")])


@pytest.mark.parametrize("source", sources(), ids=lambda path: path.stem)
def test_a_folder_with_a_kernel_has_its_check(source: Path) -> None:
    above = [folder for folder in source.parents if folder.is_relative_to(OPS) and folder != OPS]
    assert any((folder / "selftest.py").is_file() for folder in above)


PACKAGE = Path(__file__).resolve().parents[2] / "optigpu"
TABLE = "models/families.py"
EXCEPTIONS = {
    "backends/llama_cpp/gguf_families.py": "how llama.cpp's files have each family, in one entry for each",
    "backends/llama_cpp/gguf_tokenizer.py": "llama.cpp calls kinds of tokenizers so",
    "techniques/decoding/native_decode/families.py": "the roles of modules, of more families than others know",
    "surgery/fused_blocks.py": "rewrites the forward functions of blocks, by the table's `forwards`",
    "surgery/fused_modules.py": "rewrites those of attentions, by the same",
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
