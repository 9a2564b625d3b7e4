"""run and ladder as functions of the package: a report with tables, frames and charts; one job serves all tests."""

import sys
from pathlib import Path

import pytest
from rich.console import Console

import optigpu
from optigpu import runs
from optigpu.facade.job_report import JobReport
from optigpu.facade.measuring import job_spec, ladder_spec
from optigpu.hardware import probe
from optigpu.job.plan import default_stack, variants_of
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, OptiGPUError, SpecError, UnsupportedError
from optigpu.workloads.matmul import Matmul
from tests.engine.brief_jobs import BRIEF

pytestmark = pytest.mark.usefixtures("forked_children")


@pytest.fixture(scope="module")
def report(own_lock: None) -> JobReport:
    return optigpu.run(Matmul(sizes=(32, 64)), device="cpu", **BRIEF)


def test_a_report_has_what_was_measured(report: JobReport) -> None:
    assert [result.variant.label for result in report.results] == ["float32 32", "float32 64"]
    assert all((result.metrics["tflops"].value or 0) > 0 for result in report.results)
    assert repr(report) == "JobReport(matmul: 2 variants, 2 results)"
    assert report.stopped is None


def test_its_table_is_shown_on_a_terminal_and_in_a_notebook(report: JobReport) -> None:
    console = Console(width=140, record=True, file=sys.stderr)
    console.print(report)
    for shown in (console.export_text(), str(report), report._repr_html_()):
        assert "float32 64" in shown
        assert "TFLOP/s" in shown


def test_its_frame_has_a_row_for_each_variant(report: JobReport) -> None:
    table = report.to_frame()
    assert list(table["label"]) == ["float32 32", "float32 64"]
    assert list(table["value"]) == [result.metrics["tflops"].value for result in report.results]


def test_a_frame_without_pandas_says_what_to_install(
    report: JobReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UnsupportedError, match="pip install pandas"):
        report.to_frame()


def test_its_charts_are_pictures_and_files(report: JobReport, tmp_path: Path) -> None:
    drawn = report.plot("ladder", tmp_path / "matmul.svg")
    assert drawn._repr_svg_() == drawn.svg
    assert (tmp_path / "matmul.svg").read_text() == f"{drawn.svg}\n"
    assert "<svg" in (tmp_path / "matmul.svg").read_text("utf-8")
    with pytest.raises(SpecError, match=r"no chart 'laddr'. Did you mean ladder or loads\? The charts are "):
        report.plot("laddr")
    with pytest.raises(SpecError, match="quality"):
        report.plot("quality")


def test_what_it_saves_can_be_shown_again(report: JobReport, tmp_path: Path) -> None:
    kept = runs.read(report.save(tmp_path / "run.json"))
    assert [result["id"] for result in kept.results] == [result.id for result in report.results]
    with pytest.raises(OptiGPUError, match="cannot be written"):
        report.save(tmp_path / "missing" / "run.json")


def test_a_job_is_asked_for_by_names_by_json_and_by_objects() -> None:
    by_name = job_spec("generate", None, ["int8_weight_only"], {"device": "cpu"})
    by_json = job_spec({"kind": "generate"}, "preset:gpt2", [{"name": "int8_weight_only"}], {"device": "cpu"})
    by_object = job_spec(by_name.workload, "preset:gpt2", [Int8WeightOnly()], {"device": DeviceKind.CPU})
    assert by_name == by_json == by_object


def test_a_wrong_field_is_named() -> None:
    with pytest.raises(SpecError, match="planet"):
        optigpu.run("matmul", device="cpu", planet="ladder")
    with pytest.raises(SpecError, match="device"):
        optigpu.run("matmul", device="tpu")


def test_a_ladder_climbs_the_stack_that_is_named_or_the_usual_one() -> None:
    named = ladder_spec("generate", "preset:tiny-llama-test", ["bf16", "fused_qkv"], {"device": "cpu"})
    usual = ladder_spec("generate", "preset:tiny-llama-test", None, {"device": "cpu"})
    assert [each.name for each in named.stack] == ["bf16", "fused_qkv"]
    assert [variant.label for variant in variants_of(named)] == [
        "baseline", "bf16", "fused_qkv", "bf16 + fused_qkv",
    ]  # fmt: skip
    assert usual.stack == default_stack(probe(), DeviceKind.CPU, usual.workload, "torch")
