"""What is kept of a self-test, who goes by it, and how it is shown."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from optigpu.conductor.processes.room import hold
from optigpu.conductor.session import environment_for, open_session
from optigpu.documents.result import Accelerator
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfCheck, SelfTest, Subject
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.report.catalog import technique_facts
from optigpu.report.formats import markdown
from optigpu.report.progress import selftest_grid
from optigpu.selftest import kept
from optigpu.vocabulary import DeviceKind

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data" / "selftest"


def result(
    name: str, status: CheckStatus = CheckStatus.OK, subject: Subject = Subject.TECHNIQUE, case: str = ""
) -> CheckResult:
    return CheckResult(
        check=SelfCheck(subject=subject, name=name, case=case, device=CPU),
        status=status,
        error=0.25 if status is not CheckStatus.NOT_POSSIBLE else None,
        bound=0.5,
        of="the largest logit",
        seconds=1.5,
        reason=None if status is CheckStatus.OK else f"{name} is broken.",
    )


FAILED, OK = result("fp16", CheckStatus.FAILED, case="kernel=math"), result("bf16")
ABSENT = result("llm_int8", CheckStatus.NOT_POSSIBLE)
KERNEL = result("swiglu", CheckStatus.FAILED, Subject.KERNEL)


def outcome(*results: CheckResult, device: DeviceKind = CPU) -> SelfTest:
    return kept.outcome_of(probe(), device, results)


def test_it_is_read_as_it_was_kept_and_nothing_else_lies_beside_it(folder: Path) -> None:
    made = outcome(FAILED, OK, ABSENT, KERNEL)
    path = kept.keep(made, probe())
    assert [*folder.iterdir()] == [path]
    assert kept.read(environment_for(CPU), CPU) == kept.Kept(made)
    summary = made.summary
    assert (summary.ok, summary.failed, summary.not_possible) == (1, 2, 1)
    assert summary.failed_names == ("fp16", "swiglu")


def test_only_a_technique_that_failed_is_refused_with_its_reason() -> None:
    kept.keep(outcome(FAILED, OK, ABSENT, KERNEL), probe())
    refused = kept.read(probe(), CPU).failed_techniques
    assert list(refused) == ["fp16"]
    assert refused["fp16"].startswith("fp16 failed its self-test here, with kernel=math: fp16 is broken. ")
    assert "optigpu selftest --only fp16" in refused["fp16"]
    problems = {fact["name"]: fact["problem"] for fact in technique_facts(probe(), CPU)}
    assert problems["fp16"] == refused["fp16"]
    assert problems["bf16"] is None


def test_a_device_and_a_gpu_have_files_of_their_own() -> None:
    gpus = tuple(Accelerator(name="GPU", memory_bytes=2**34, uuid=f"GPU-{n}") for n in range(2))
    both = probe().model_copy(update={"accelerators": gpus})
    first, second = (both.model_copy(update={"accelerators": (gpu,)}) for gpu in gpus)
    assert kept.path_of(both, CUDA) == kept.path_of(first, CUDA) != kept.path_of(second, CUDA)
    assert kept.path_of(both, CPU) == kept.path_of(second, CPU) != kept.path_of(second, CUDA)


def test_one_of_other_software_is_ignored_with_a_sentence() -> None:
    kept.keep(outcome(FAILED), probe())
    newer = probe().model_copy(update={"software": probe().software | {"torch": "99.0"}})
    found = kept.read(newer, CPU)
    assert found.outcome is None
    assert found.ignored is not None
    assert "other software" in found.ignored
    assert "optigpu selftest" in found.ignored
    kept.keep(kept.outcome_of(newer, CPU, (OK,)), newer)
    assert kept.read(newer, CPU).failed_techniques == {}


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"format": 1}', b"null"])
def test_a_broken_file_is_ignored_with_a_sentence_and_written_over(content: bytes) -> None:
    path = kept.keep(outcome(FAILED), probe())
    path.write_bytes(content)
    found = kept.read(probe(), CPU)
    assert (found.outcome, found.failed_techniques) == (None, {})
    assert "holds no self-test" in str(found.ignored)
    kept.keep(outcome(OK), probe())
    assert kept.read(probe(), CPU).ignored is None


def test_a_job_goes_by_a_self_test_that_ended_while_it_waited_for_its_device(tmp_path: Path) -> None:
    spec = JobSpec.model_validate({"workload": {"kind": "matmul"}, "device": CPU})
    with ExitStack() as other:
        other.enter_context(hold(tmp_path, CPU, probe(), lambda: pytest.fail("The device is free.")))

        def ends() -> None:
            kept.keep(outcome(FAILED), probe())
            other.close()

        with open_session(spec, [0], print, program=(), cancelled=ends, lock_dir=tmp_path) as session:
            assert list(session.failed_techniques) == ["fp16"]


def test_the_table_names_what_failed_first_and_says_how_many() -> None:
    grid = selftest_grid([outcome(OK, ABSENT, FAILED)], [probe()])
    assert [row[0] for row in grid.rows] == ["fp16 (kernel=math)", "bf16", "llm_int8"]
    assert grid.rows[0][1:] == (
        *("cpu", "failed", "0.25", "0.5", "the largest logit", "1.5", "fp16 is broken."),
    )
    assert grid.notes[0] == "1 ok, 1 failed, 1 not possible here. Failed: fp16."
    assert grid.notes[1].startswith("Measured ")
    assert grid.faint == {2}
    assert "| bf16 | cpu | ok |" in markdown(grid)
