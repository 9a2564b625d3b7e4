"""What is registered is in the self-test by itself."""

from pathlib import Path

import pytest

from optigpu.backends import BACKENDS
from optigpu.engines.recipes import RECIPES
from optigpu.job.spec import resolve
from optigpu.meters import METER_NAMES
from optigpu.selftest.checks import SELF_TESTS, case_of, engine_checks, technique_checks, workload_for
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT
from optigpu.workloads import WORKLOADS
from optigpu.workloads.generate import Generate

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
