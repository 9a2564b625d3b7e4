"""Charts of panels, tables and boxes: what their data says, what the picture shows, and who can read it."""

import json
import re
import shlex
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from optigpu.cli import app, main
from optigpu.cli.charts import Kind
from optigpu.report.canvas import (
    CLAIMED,
    COLOURS,
    FAINT,
    HATCHES,
    INK,
    INVALID,
    LINES,
    RED,
    bar_look,
    mark,
)
from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.files import write_charts
from optigpu.report.charts.marks import ChartData, Form, Mark
from optigpu.report.charts.metrics import rungs_of
from optigpu.vocabulary import Document, OptiGPUError, SpecError
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
def test_bars_of_which_none_is_valid_still_name_their_series(tmp_path: Path) -> None:
    wrong = {"valid": False, "reasons": ["drift"], "warnings": [], "notes": ["n"]}
    report = replace(LADDER_REPORT, results=[each | {"verdict": wrong} for each in LADDER_RESULTS])
    CHARTS["overview"].draw(report, tmp_path / "c.svg")
    assert "<!-- mbu -->" in (tmp_path / "c.svg").read_text()


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
    elsewhere = first | {"variant": first["variant"] | server}
    (panel,) = CHARTS["loads"].data(Report("t", [elsewhere, *others])).panels
    assert [each.series for each in panel.marks] == [
        "baseline, endpoint tiny at 127.0.0.1:8000", "baseline, torch", "baseline, torch",
    ]  # fmt: skip
