"""Kernels that people bring: honest ones are measured beside their reference, and no exploit gets a valid figure."""

from pathlib import Path

import pytest

from optigpu.documents.result import Outcome, VerdictReason
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Variant
from optigpu.measure import Report, run
from optigpu.report.ladder import ladder_grid
from optigpu.vocabulary import VariantStatus
from optigpu.workloads.kernel import part_of
from tests.breadth import cases
from tests.engine.brought_kernels import FALSE, HEAD, HONEST, SLOW, WRONG
from tests.engine.sessions import AT_ONCE

pytestmark = pytest.mark.usefixtures("forked_children")


def measured(
    folder: Path,
    text: str,
    *implementations: str,
    device: str = "cpu",
    timeout_s: float = 300,
    **workload: object,
) -> Report:
    """A brief job of that file; without names its reference and its own function."""
    named = implementations or ("reference", "custom")
    document = {
        "workload": {"kind": "kernel", "kernel": text, "implementations": named, **workload},
        "measure": {"replicates": 1, "min_seconds": 0.2, "max_seconds": 2, "meters": ["latency"]},
        "limits": AT_ONCE | {"timeout_s": timeout_s},
        "device": device,
    }
    return run(JobSpec.model_validate(document), lambda _: None, lock_dir=folder, threads=1)


def outcome(report: Report, implementation: str = "custom") -> Outcome:
    (found,) = (
        each
        for each, variant in zip(report.outcomes, report.attribution.rows, strict=True)
        if variant.label.startswith(implementation)
    )
    return found


@pytest.mark.slow
def test_a_kernel_is_compared_with_its_reference_and_with_that_compiled(tmp_path: Path) -> None:
    report = measured(tmp_path, HONEST, "reference", "compiled", "custom")
    reference, compiled, custom = report.attribution.rows
    assert [row.status for row in report.attribution.rows] == [VariantStatus.SUCCEEDED] * 3, report.outcomes
    assert (reference.speedup, reference.over_compiled, compiled.over_compiled) == (None, None, None)
    assert custom.speedup is not None
    assert custom.over_compiled is not None
    assert (custom.speedup.compared_with, custom.over_compiled.compared_with) == (0, 1)
    for result in report.results[1:]:
        found = result.facts.kernel
        assert found is not None
        assert (found.inputs, found.dtype, found.tolerance) == ("64x384,384x384", "float32", 1e-4)
        assert found.error < found.tolerance
        assert found.answers >= 10
        reasons = set(result.verdict.reasons)
        assert not reasons & {VerdictReason.CLOCK_CONTRADICTED, VerdictReason.CACHED_RESULT}, result.verdict
    assert len({result.variant.workload_digest for result in report.results}) == 1
    table = ladder_grid(
        "kernel", report.attribution, [each.model_dump(mode="json") for each in report.results]
    )
    assert "over compiled" in [column.heading for column in table.columns]


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_and_broken_files_have_no_result(tmp_path: Path, name: str) -> None:
    code, words = WRONG[name]
    found = outcome(measured(tmp_path, HEAD + code))
    assert (found.status, found.result) == (VariantStatus.FAILED, None), name
    assert words in (found.reason or "")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(FALSE, by_default=3))
def test_times_that_are_not_those_of_the_answers_are_not_valid(tmp_path: Path, name: str) -> None:
    code, words = FALSE[name]
    found = outcome(measured(tmp_path, HEAD + code))
    assert found.result is not None, found.reason
    verdict = found.result.verdict
    assert not verdict.valid
    notes = dict(zip(verdict.reasons, verdict.reason_notes, strict=True))
    assert words in notes[VerdictReason.CLOCK_CONTRADICTED]


@pytest.mark.slow
def test_a_kernel_that_is_right_for_one_shape_alone_fails_for_the_others(tmp_path: Path) -> None:
    text = HEAD.replace("(384, 384))]", "(384, 384)), ((3, 384), (384, 384))]") + (
        "def custom(x, weight):\n    return reference(x, weight) if len(x) == 64 else torch.zeros(3, 384)\n"
    )
    right, wrong = (each for each in measured(tmp_path, text).outcomes if each.index % 2)
    assert right.status is VariantStatus.SUCCEEDED
    assert wrong.status is VariantStatus.FAILED
    assert "Wrong answers (custom float32 3x384,384x384)" in (wrong.reason or "")


@pytest.mark.slow
def test_a_reference_that_answers_everything_alike_proves_nothing(tmp_path: Path) -> None:
    text = HEAD.replace("torch.softmax(x @ weight, dim=-1)", "torch.zeros_like(x)") + "custom = reference\n"
    assert "gives the same answer to other inputs" in (outcome(measured(tmp_path, text)).reason or "")


@pytest.mark.slow
def test_without_its_reference_in_the_job_a_kernel_is_judged_by_a_process_for_that(tmp_path: Path) -> None:
    text = HEAD + "def custom(x, weight):\n    print('x' * 2**22)\n    return torch.zeros(64, 384)\n"
    (found,) = measured(tmp_path, text, "custom").outcomes
    assert "is off by" in (found.reason or "")


@pytest.mark.slow
def test_one_that_never_ends_costs_half_of_the_time_and_the_others_nothing(tmp_path: Path) -> None:
    report = measured(tmp_path, HEAD + "def custom(x, weight):\n    while True: pass\n", timeout_s=40)
    assert outcome(report, "reference").result is not None
    assert outcome(report).result is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_whole_numbers_scalars_and_sixteen_bits_are_inputs(tmp_path: Path, dtype: str) -> None:
    text = """
import torch
INPUTS = [((50, 64), {"shape": (8, 7), "below": 50}, 2.0, True)]
def reference(table, ids, scale, doubled):
    return table[ids] * scale, ids + 1
def custom(table, ids, scale, doubled):
    return torch.nn.functional.embedding(ids, table) * (2 if doubled else 1), ids + 1
"""
    found = outcome(measured(tmp_path, text, dtypes=[dtype]))
    assert found.result is not None, found.reason
    assert found.result.facts.kernel is not None
    assert found.result.facts.kernel.error == 0


def test_the_reference_s_process_has_nothing_of_the_file_but_what_the_reference_uses() -> None:
    text = (
        HEAD + SLOW + "torch.softmax = print\nsetattr(torch, 'exp', print)\nPAST = torch.set_num_threads(1)\n"
    )
    part = part_of(text, "reference")
    assert "return torch.softmax(x @ weight, dim=-1)" in part
    assert not [word for word in ("print", "slow", "INPUTS", "PAST", "set_num_threads") if word in part]


def test_files_with_the_same_reference_share_a_board_and_their_kernels_have_places_of_their_own() -> None:
    def variant(text: str) -> Variant:
        workload = {"kind": "kernel", "kernel": text, "implementations": ["custom"]}
        (found,) = variants_of(JobSpec.model_validate({"workload": workload}))
        return found

    one, same = variant(HONEST), variant(HEAD + "custom = reference  # faster\n")
    other = variant(HONEST.replace("dim=-1", "dim=0"))
    assert one.workload_digest == same.workload_digest != other.workload_digest
    assert one.digest != same.digest
