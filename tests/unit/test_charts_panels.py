"""Charts of panels, tables and boxes: what their data says, what the picture shows, and who can read it."""

import json
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from optigpu.cli import app, main
from optigpu.report.canvas import (
    CLAIMED,
    HATCHES,
    INVALID,
    LINES,
    bar_look,
    mark,
)
from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.files import write_charts
from optigpu.report.charts.marks import ChartData, Form, Mark
from optigpu.report.charts.metrics import rungs_of
from optigpu.vocabulary import Document, OptiGPUError, SpecError
from tests.unit.contrast import contrast
from tests.unit.made_reports import (
    ATTENTION_REPORT,
    BATCHES_REPORT,
    LADDER_REPORT,
    LADDER_RESULTS,
    PARETO_REPORT,
    REPORTS,
    with_metrics,
)
from tests.unit.test_charts import THREE, report_of

SVG = "{http://www.w3.org/2000/svg}"


def data_of(kind: str) -> ChartData:
    return CHARTS[kind].data(REPORTS[kind])


def marks_of(kind: str, panel: str) -> tuple[Mark, ...]:
    (found,) = [each for each in data_of(kind).panels if each.title == panel]
    return found.marks


def drawn_marks(path: Path) -> list[str]:
    """The names of the marks of an SVG file."""
    groups = ElementTree.parse(path).iter(f"{SVG}g")
    return [
        name.removeprefix("mark: ") for each in groups if (name := each.get("id", "")).startswith("mark: ")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", REPORTS)
def test_the_picture_shows_every_mark_of_the_data(tmp_path: Path, kind: str) -> None:
    data, path = data_of(kind), tmp_path / "c.svg"
    CHARTS[kind].draw(REPORTS[kind], path)
    said = path.read_text()
    expected = [f"{each.label} {each.series}".strip() for panel in data.panels for each in panel.marks]
    assert sorted(drawn_marks(path)) == sorted(expected)
    for panel in data.panels:
        assert panel.title in said
        assert all(each.text in said for each in panel.marks)
        assert panel.axis in said
    for box in data.boxes:
        assert all(text in said for text in (box.heading, *box.lines))
    for row in data.table.rows if data.table else ():
        assert all(cell in said for cell in row)
    assert "Test CPU" in said


def test_precisions_stand_side_by_side_in_latency_and_memory() -> None:
    latency, memory = marks_of("precision", "Latency"), marks_of("precision", "Memory")
    assert [each.label for each in memory] == ["fp32: baseline", "bf16", "int8_weight_only"]
    assert [each.value for each in memory] == pytest.approx([497.8, 248.9, 281.6])
    assert latency[0].value == pytest.approx(1e3 * LADDER_RESULTS[0]["metrics"]["latency_s"]["value"])
    assert latency[0].ci is not None
    assert latency[0].source == LADDER_RESULTS[0]["id"]


def test_the_four_panels_are_of_the_rungs_and_relative_to_the_baseline() -> None:
    data = data_of("overview")
    assert [panel.title for panel in data.panels] == [
        "Cumulative speedup", "Memory", "Utilization", "Speedup over the loss of quality",
    ]  # fmt: skip
    speedup, memory, use, loss = (panel.marks for panel in data.panels)
    assert [round(each.value, 2) for each in speedup] == [1.0, 1.44, 2.91, 4.72]
    assert speedup[3].ci == pytest.approx((4.486, 4.911), abs=1e-3)
    assert [round(each.value, 1) for each in memory] == [100.0, 50.0, 28.3, 28.3]
    assert {each.series for each in use} == {"mbu", "mfu"}
    assert [each.text for each in loss] == ["0%", "0.69%", "2.90%", "3.00%"]
    assert "0.1% lost" in data.note


def test_a_speedup_without_an_attribution_has_no_interval() -> None:
    data = CHARTS["overview"].data(replace(LADDER_REPORT, attribution=None))
    assert [round(each.value, 2) for each in data.panels[0].marks] == [1.0, 1.44, 2.91, 4.72]
    assert {each.ci for each in data.panels[0].marks} == {None}


def test_the_rungs_are_of_one_workload_and_begin_with_the_technique_that_was_added_first() -> None:
    labels = [each["variant"]["label"] for each in rungs_of(LADDER_REPORT)]
    assert labels == ["baseline", "bf16", THREE, f"{THREE} + torch_compile"]
    without_first = replace(
        LADDER_REPORT, results=[each for each in LADDER_RESULTS if each["variant"]["index"] != 1]
    )
    assert [each["variant"]["label"] for each in rungs_of(without_first)] == ["baseline", *labels[2:]]
    other = [each | {"variant": each["variant"] | {"workload_digest": "other"}} for each in LADDER_RESULTS]
    assert rungs_of(replace(LADDER_REPORT, results=[*LADDER_RESULTS, *other])) == rungs_of(LADDER_REPORT)
    assert rungs_of(replace(LADDER_REPORT, results=LADDER_RESULTS[1:])) == []


@pytest.mark.slow
def test_a_panel_without_figures_says_why(tmp_path: Path) -> None:
    reason = "random weights: their predictions mean nothing"
    null = {"value": None, "ci": None, "reason": reason}
    results = [each | {"metrics": each["metrics"] | {"top1_agreement": null}} for each in LADDER_RESULTS]
    report = replace(LADDER_REPORT, results=results)
    assert set(CHARTS["overview"].data(report).panels[3].missing.values()) == {reason}
    CHARTS["overview"].draw(report, tmp_path / "c.svg")
    assert "Not measured: random weights" in (tmp_path / "c.svg").read_text()


def test_attention_has_a_line_for_each_implementation() -> None:
    for panel, expected in (("Time", [6.1, 3.2]), ("Memory", [14.0, 3.1])):
        marks = marks_of("lengths", panel)
        assert [each.value for each in marks if each.x == 512] == pytest.approx(expected)
        assert {each.series for each in marks} == {"standard", "fused"}


def test_batches_stand_at_the_95th_percentile_and_not_at_the_median() -> None:
    marks = marks_of("batches", "Throughput against latency")
    assert [(each.text, each.x) for each in marks] == [
        ("batch 8", 2400.0), ("batch 1", 900.0), ("batch 4", 1600.0),
    ]  # fmt: skip
    assert data_of("batches").panels[0].missing.keys() == {"batch 16"}
    assert "batch 16" in data_of("batches").note


def test_the_front_is_of_what_no_other_valid_result_surpasses() -> None:
    over_bytes, over_divergence = (panel.marks for panel in data_of("pareto").panels)
    assert [each.label for each in over_bytes if each.on_front] == [f"{THREE} + torch_compile"]
    assert [each.label for each in over_divergence if each.on_front] == [
        "baseline", "bf16", "int8_weight_only", "static_kv_cache", f"{THREE} + torch_compile",
    ]  # fmt: skip
    assert [each.text for each in over_bytes if each.text] == [f"{THREE} + torch_compile"]
    assert [each.x for each in over_bytes] == pytest.approx([497.8, 248.9, 281.6, 497.8, 140.8, 140.8, 497.8])
    assert not next(each for each in over_divergence if each.label == "no_kv_cache (invalid)").on_front


def test_a_result_that_is_not_valid_surpasses_nothing() -> None:
    fastest = with_metrics(dict(PARETO_REPORT.results[-1]), tokens_per_s=(900.0,), weight_bytes=(1e6,))
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results[:-1], fastest])
    front = [each.label for each in CHARTS["pareto"].data(report).panels[0].marks if each.on_front]
    assert front == [f"{THREE} + torch_compile"]


def test_bytes_and_divergence_have_a_front_of_their_own() -> None:
    (panel,) = data_of("bits").panels
    found = {each.label: (round(each.value, 1), each.x) for each in panel.marks if each.on_front}
    assert found == {
        "baseline": (497.8, 0.0),
        "bf16": (248.9, 0.004),
        "static_kv_cache": (497.8, 0.0),
        THREE: (140.8, 0.03),
        f"{THREE} + torch_compile": (140.8, 0.031),
    }
    assert {each.label for each in panel.marks if not each.valid} == {"no_kv_cache (invalid)"}
    assert panel.missing == {}


def test_bytes_of_several_models_have_no_front_and_none_without_a_divergence() -> None:
    other = {"variant": PARETO_REPORT.results[0]["variant"] | {"model": "bundled:small"}}
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results, dict(PARETO_REPORT.results[0]) | other])
    with pytest.raises(SpecError, match="of one model"):
        CHARTS["bits"].data(report)
    with pytest.raises(SpecError, match="No result has both"):
        CHARTS["bits"].data(BATCHES_REPORT)


def test_results_of_several_machines_have_no_front() -> None:
    there = {"environment": PARETO_REPORT.results[0]["environment"] | {"hardware_class": "NVIDIA L4"}}
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results, dict(PARETO_REPORT.results[0]) | there])
    with pytest.raises(SpecError, match="cannot surpass each other"):
        CHARTS["pareto"].data(report)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["batches", "loads"])
def test_batches_and_loads_are_one_chart_with_its_data_beside_it(tmp_path: Path, kind: str) -> None:
    (panel,) = data_of(kind).panels
    assert (panel.title, panel.form, panel.axis) == ("Throughput against latency", Form.LINES, "tokens/s")
    assert panel.x_axis == "95th percentile of the latency of a request (ms)"
    assert all(each.ci for each in panel.marks)
    (written,) = [each for each in write_charts(REPORTS[kind], tmp_path) if each.name == kind]
    assert [file.name for file in written.files] == [f"{kind}.svg", f"{kind}.png", f"{kind}.json"]
    assert ChartData.model_validate_json((tmp_path / f"{kind}.json").read_text()) == data_of(kind)
    assert sorted(drawn_marks(tmp_path / f"{kind}.svg")) == sorted(
        f"{each.label} baseline" for each in panel.marks
    )


def test_rates_stand_at_the_95th_percentile_in_a_line_for_each_engine() -> None:
    marks = marks_of("loads", "Throughput against latency")
    assert [(each.text, each.x) for each in marks] == [("1/s", 900.0), ("4/s", 2400.0), ("2/s", 1200.0)]
    first, *others = REPORTS["loads"].results
    server = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000/v1#tiny"}
    elsewhere = dict(first) | {"variant": first["variant"] | server}
    (panel,) = CHARTS["loads"].data(Report("t", [elsewhere, *others])).panels
    assert [each.series for each in panel.marks] == [
        "baseline, endpoint tiny at 127.0.0.1:8000", "baseline, torch", "baseline, torch",
    ]  # fmt: skip


def test_the_waterfall_begins_each_rung_at_the_one_before() -> None:
    (panel,) = data_of("waterfall").panels
    assert [each.label for each in panel.marks] == [
        "baseline", "+ bf16", "+ static_kv_cache", "+ torch_compile",
    ]  # fmt: skip
    assert [each.start for each in panel.marks] == [0.0, 1.0, *(each.value for each in panel.marks[1:3])]
    assert "added 1.62x [1.54, 1.68]" in panel.marks[3].text
    assert panel.marks[3].ci is not None


def test_the_table_has_the_rows_that_were_measured() -> None:
    table = data_of("comparison").table
    assert table is not None
    cells = {row[0]: row[1:] for row in table.rows}
    assert table.headings[1] == "baseline"
    assert cells["speedup"][:2] == ("1", "1.44x [1.37, 1.49]")
    assert cells["weights (MB)"][2] == "282"
    assert "energy (J)" not in cells


def test_a_baseline_of_the_card_is_a_claim_and_only_the_same_work_stands_beside_it() -> None:
    (panel,) = data_of("baselines").panels
    claim, measured = panel.marks
    assert (claim.claimed, claim.value, claim.source) == (True, 40.0, "5090-matmul-fp32")
    assert "(claim)" in claim.label
    assert (measured.claimed, measured.label) == (False, "float32 4096")
    assert "has not measured" in data_of("baselines").note


def test_the_diagram_is_of_the_best_variant() -> None:
    boxes = {box.heading: box.lines for box in data_of("architecture").boxes}
    assert boxes["Quantization"] == ("bf16", "int8_weight_only")
    assert boxes["Compilation"] == ("torch_compile",)
    assert "4.72x [4.49, 4.91] the baseline" in boxes["Measured"]
    assert boxes["Machine"] == ("2x Test CPU",)


def commands_in(text: str) -> list[str]:
    return [each for each in re.findall(r"`(optigpu [^`]*)`", text) if "show" not in each]


@pytest.mark.parametrize("kind", REPORTS)
def test_without_its_figures_a_chart_says_what_to_run(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        CHARTS[kind].draw(Report("t", []), tmp_path / "c.svg")
    (line, *_) = commands_in(str(raised.value))
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    command.commands[name].make_context(name, arguments)
    assert not list(tmp_path.iterdir())


def test_a_sweep_without_percentiles_says_how_to_get_them() -> None:
    results = [each for each in BATCHES_REPORT.results if each["metrics"]["latency_s"].get("p95") is None]
    with pytest.raises(SpecError, match="--max-seconds 60"):
        CHARTS["batches"].data(Report("t", results))


# Who can read it


def test_no_two_series_differ_by_their_colour_alone() -> None:
    bars = [bar_look(number) for number in range(len(HATCHES))]
    assert len({look["hatch"] for look in bars}) == len(bars)
    assert all(contrast(look["edgecolor"], "#ffffff") >= 3 for look in bars)
    points = [mark(number, True) for number in range(len(LINES))]
    assert len({look["marker"] for look in points}) == len(set(LINES)) == len(points)
    assert all(contrast(look["markeredgecolor"], "#ffffff") >= 3 for look in points)


def test_what_is_not_valid_and_what_is_claimed_look_like_no_series() -> None:
    assert len({CLAIMED, INVALID, *HATCHES}) == len(HATCHES) + 2
    for look in (bar_look(0, valid=False), bar_look(0, claimed=True)):
        assert look["facecolor"] == "white"


@pytest.mark.slow
def test_a_claim_is_hatched_in_the_picture(tmp_path: Path) -> None:
    CHARTS["baselines"].draw(REPORTS["baselines"], tmp_path / "c.svg")
    assert "url(#h" in (tmp_path / "c.svg").read_text()


# Files and the command


def run_of(report: Report) -> Document:
    found = report_of([dict(each) for each in report.results])
    attribution = report.attribution.model_dump(mode="json") if report.attribution else found["attribution"]
    return found | {"attribution": attribution}


def charts(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["optigpu", "charts", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.mark.slow
def test_the_command_writes_pictures_with_their_data_beside_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_of(ATTENTION_REPORT)))
    folder = tmp_path / "new" / "charts"
    assert charts(monkeypatch, str(tmp_path / "run.json"), "--out", str(folder)) == 0
    printed = capsys.readouterr()
    assert {path.name for path in folder.iterdir()} >= {"lengths.svg", "lengths.png", "lengths.json"}
    assert str(folder / "lengths.svg") in printed.out
    assert "waterfall: not drawn. No report is of one ladder" in printed.err
    assert not (folder / "waterfall.svg").exists()
    read = ChartData.model_validate_json((folder / "lengths.json").read_text())
    assert read.panels == CHARTS["lengths"].data(ATTENTION_REPORT).panels


def test_a_run_without_results_is_a_wrong_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(report_of([])))
    assert charts(monkeypatch, str(tmp_path / "run.json"), "--out", str(tmp_path / "charts")) == 2
    assert commands_in(capsys.readouterr().err)
    with pytest.raises(SpecError, match="run `optigpu ladder"):
        write_charts(Report("t", []), tmp_path / "charts")
    assert not (tmp_path / "charts").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        OptiGPUError, match=r"file/charts cannot be written \(Not a directory\); make it writable"
    ):
        write_charts(LADDER_REPORT, tmp_path / "file" / "charts")


def test_a_report_of_nothing_that_was_measured_names_each_chart_with_its_reason(tmp_path: Path) -> None:
    empty = [
        each
        | {"metrics": {name: {"value": None, "reason": "stopped"} for name in each["metrics"]}, "facts": {}}
        for each in LADDER_RESULTS
    ]
    with pytest.raises(SpecError, match=r"No chart can be drawn.*overview: No result is a baseline"):
        write_charts(Report("t", empty), tmp_path)


def test_a_percentile_needs_requests(tmp_path: Path) -> None:
    few = [with_metrics(dict(each), latency_s=(1.0, 0.9, 1.1)) for each in BATCHES_REPORT.results]
    with pytest.raises(SpecError, match="95th percentile"):
        CHARTS["batches"].draw(Report("t", few), tmp_path / "c.svg")
