"""The self-test: what is right passes, and what is wrong, idle, dead or hanging fails by itself, with its name."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from optigpu.conductor.selftest import SELFTEST, SelfTester
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfTest
from optigpu.hardware import probe
from optigpu.paths import data_dir
from optigpu.vocabulary import CancelledError, DeviceKind, SpecError
from tests.engine.command import optigpu
from tests.engine.processes import STARTED, program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]
CPU = DeviceKind.CPU
MADE = program("selftest_made")
TWO = ("--only", "swiglu", "--only", "latency")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data folder of the test's own, but for what TorchInductor keeps, by what it was compiled from."""
    compiled = data_dir() / "inductor"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "inductor").symlink_to(compiled)
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))


def results_of(
    *names: str, command: Sequence[str] = MADE, limit_s: float = 180.0, device: DeviceKind | None = CPU
) -> dict[str, CheckResult]:
    """The results by the names of their checks, in the order in which they ran."""
    tester = SelfTester(lambda: None, lambda _: None, lambda _: None, program=command, limit_s=limit_s)
    (outcome,) = tester.run(tester.checks(names, device))
    return {result.check.label: result for result in outcome.results}


def reasons(found: dict[str, CheckResult]) -> dict[str, tuple[CheckStatus, str]]:
    return {name: (result.status, result.reason or "") for name, result in found.items()}


def test_a_technique_that_is_wrong_or_idle_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five end their process, or are ended with it; the one that must be alone leaves it to the next."""
    monkeypatch.setenv(STARTED, str(tmp_path / "started"))
    found = reasons(
        results_of(
            *("made_idle", "made_wrong", "made_lone", "made_rounding", "made_nan", "made_raising"),
            *("made_refusing", "made_hungry", "made_dying", "made_right"),
        )
    )
    failed = {name: why for name, (status, why) in found.items() if status is CheckStatus.FAILED}
    assert list(failed) == [
        *("made_idle", "made_wrong", "made_rounding", "made_nan", "made_raising", "made_hungry", "made_dying")
    ]
    assert "changed nothing" in failed["made_idle"]
    assert "of the largest logit, and the bound is 0.001" in failed["made_wrong"]
    assert "had no effect" in failed["made_rounding"]
    assert "NaN or infinite" in failed["made_nan"]
    assert failed["made_raising"] == "RuntimeError: a layer is missing"
    assert "out of memory" in failed["made_hungry"]
    assert "killed by signal 11" in failed["made_dying"]
    assert found["made_refusing"] == (CheckStatus.NOT_POSSIBLE, "It needs another machine.")
    assert found["made_lone"] == found["made_right"] == (CheckStatus.OK, "")
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 1 + 1 + (5 + 1), "to list the checks, for the one alone, and for the others"


def test_a_check_that_hangs_is_killed_and_named() -> None:
    (result,) = results_of("made_hanging", limit_s=3).values()
    assert result.status is CheckStatus.FAILED
    assert result.reason == "It hung: it had not ended after 3 s, and was killed."


def test_an_unknown_name_is_refused_and_the_nearest_is_named() -> None:
    tester = SelfTester(lambda: None, lambda _: None, lambda _: None)
    with pytest.raises(SpecError, match=r"There is no check 'fp61'. Did you mean fp16\?"):
        tester.checks(("fp61",), None)
    with pytest.raises(SpecError, match="gguf has no check on cuda"):
        tester.checks(("gguf",), DeviceKind.CUDA)


def test_it_stops_when_it_is_asked_to() -> None:
    doing: list[str] = []
    tester = SelfTester(lambda: "Enough." if doing else None, lambda _: None, lambda _: None, program=MADE)
    checks = tester.checks(("made_hanging",), CPU)
    doing.append("stopping")
    with pytest.raises(CancelledError, match="Enough"):
        list(tester.run(checks))


def test_a_device_that_is_not_there_is_never_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (result,) = results_of("fp16", command=SELFTEST, device=DeviceKind.CUDA).values()
    assert result.status is CheckStatus.NOT_POSSIBLE
    assert str(result.reason).startswith("This machine has no NVIDIA GPU that works (")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_everything_passes_on_this_machine() -> None:
    """The whole command: nothing fails, and what a device that is not there would run is not possible."""
    done = optigpu({}, "selftest", "--format", "json")
    outcomes = [SelfTest.model_validate(each) for each in json.loads(done.stdout)]
    failed = [(result.check.label, result.reason) for outcome in outcomes for result in outcome.failed]
    assert failed == []
    assert done.returncode == 0, done.stderr
    assert "Kept as" in done.stderr
    by_device = {outcome.device: outcome.results for outcome in outcomes}
    assert set(by_device) == set(DeviceKind)
    ok = {result.check.name for result in by_device[CPU] if result.status is CheckStatus.OK}
    assert {"unmodified model", "int8_linear", "decode_step_w4", "bf16", "torch_compile", "latency"} <= ok
    missing = [device for device in by_device if not probe().has(device)]
    assert {result.status for device in missing for result in by_device[device]} <= {CheckStatus.NOT_POSSIBLE}


@pytest.mark.long
def test_the_command_prints_a_table_and_wrong_names_end_with_status_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "optigpu", "selftest", *TWO, "--device", "cpu", "--format", "md"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "| swiglu | cpu | ok |" in done.stdout
    assert "2 ok, 0 failed, 0 not possible here." in done.stdout
    wrong = optigpu({}, "selftest", "--only", "swigul")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "Did you mean swiglu?" in wrong.stderr
