"""What charts show of reports, as data and as files that stand alone; and the commands that write them."""

import json
import re
import shlex
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from PIL import Image

from optigpu.cli import app
from optigpu.report.catalog import combined
from optigpu.report.charts import CHARTS, Report, write_charts
from optigpu.report.charts.marks import ChartData, Form, Mark
from optigpu.report.charts.svg import picture, write_picture
from optigpu.report.charts.variants import rungs_of
from optigpu.vocabulary import OptiGPUError, SpecError
from tests.unit.made_reports import (
    ATTENTION_REPORT,
    BATCHES_REPORT,
    LADDER_REPORT,
    LADDER_RESULTS,
    PARETO_REPORT,
    REPORTS,
    RESULTS,
    THREE,
    run_of,
    with_metrics,
)  # fmt: skip
from tests.unit.made_results import metric
from tests.unit.svg_pages import SVG, shown_by
from tests.unit.test_cli import Command, optigpu

__all__ = ["optigpu"]  # the fixture


def data_of(kind: str) -> ChartData:
    return CHARTS[kind](REPORTS[kind])


def marks_of(kind: str, panel: str) -> tuple[Mark, ...]:
    (found,) = [each for each in data_of(kind).panels if each.title == panel]
    return found.marks


def test_precisions_stand_side_by_side_in_latency_and_memory() -> None:
    latency, memory = marks_of("precision", "Latency"), marks_of("precision", "Memory")
    assert [each.label for each in memory] == ["fp32: baseline", "bf16", "int8_weight_only"]
    assert [each.value for each in memory] == pytest.approx([497.8, 248.9, 281.6])
    assert latency[0].value == pytest.approx(1e3 * LADDER_RESULTS[0]["metrics"]["latency_s"]["value"])
    assert latency[0].source == LADDER_RESULTS[0]["id"]


def test_the_four_panels_are_of_the_rungs_and_relative_to_the_baseline() -> None:
    data = data_of("overview")
    speedup, memory, use, loss = (panel.marks for panel in data.panels)
    assert [round(each.value, 2) for each in speedup] == [1.0, 1.44, 2.91, 4.72]
    assert speedup[3].ci == pytest.approx((4.486, 4.911), abs=1e-3)
    assert [round(each.value, 1) for each in memory] == [100.0, 50.0, 28.3, 28.3]
    assert {each.series for each in use} == {"mbu", "mfu"}
    assert [each.text for each in loss] == ["0%", "0.69%", "2.90%", "3.00%"]
    assert "0.1% lost" in data.note
    alone = CHARTS["overview"](replace(LADDER_REPORT, attribution=None)).panels[0].marks
    assert [round(each.value, 2) for each in alone] == [1.0, 1.44, 2.91, 4.72]
    assert {each.ci for each in alone} == {None}, "only an attribution has intervals of ratios"


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


def test_attention_has_a_line_for_each_implementation() -> None:
    for panel, expected in (("Time", [6.1, 3.2]), ("Memory", [14.0, 3.1])):
        marks = marks_of("lengths", panel)
        assert [each.value for each in marks if each.x == 512] == pytest.approx(expected)
        assert {each.series for each in marks} == {"standard", "fused"}


def test_batches_stand_at_the_95th_percentile_and_not_at_the_median() -> None:
    (panel,) = data_of("batches").panels
    assert [(each.text, each.x) for each in panel.marks] == [
        ("batch 8", 2400.0), ("batch 1", 900.0), ("batch 4", 1600.0),
    ]  # fmt: skip
    assert all(each.ci for each in panel.marks)
    assert panel.missing.keys() == {"batch 16"}
    without = [each for each in BATCHES_REPORT.results if each["metrics"]["latency_s"].get("p95") is None]
    with pytest.raises(SpecError, match="--max-seconds 60"):
        CHARTS["batches"](Report("t", without))


def test_the_front_is_of_what_no_other_valid_result_surpasses() -> None:
    over_bytes, over_divergence = (panel.marks for panel in data_of("pareto").panels)
    assert [each.label for each in over_bytes if each.on_front] == [f"{THREE} + torch_compile"]
    assert [each.label for each in over_divergence if each.on_front] == [
        "baseline", "bf16", "int8_weight_only", "static_kv_cache", f"{THREE} + torch_compile",
    ]  # fmt: skip
    fastest = with_metrics(dict(PARETO_REPORT.results[-1]), tokens_per_s=(900.0,), weight_bytes=(1e6,))
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results[:-1], fastest])
    front = [each.label for each in CHARTS["pareto"](report).panels[0].marks if each.on_front]
    assert front == [f"{THREE} + torch_compile"], "what is not valid surpasses nothing"


def test_bytes_and_divergence_have_a_front_of_their_own() -> None:
    (panel,) = data_of("bits").panels
    found = {each.label: (round(each.value, 1), each.x) for each in panel.marks if each.on_front}
    assert found == {
        "baseline": (497.8, 0.0), "bf16": (248.9, 0.004), "static_kv_cache": (497.8, 0.0),
        THREE: (140.8, 0.03), f"{THREE} + torch_compile": (140.8, 0.031),
    }  # fmt: skip
    assert {each.label for each in panel.marks if not each.valid} == {"no_kv_cache (invalid)"}


@pytest.mark.parametrize(
    ("kind", "part", "change", "words"),
    [
        ("bits", "variant", {"model": "bundled:small"}, "of one model"),
        ("pareto", "environment", {"hardware_class": "NVIDIA L4"}, "cannot surpass each other"),
    ],
)
def test_results_of_several_models_or_machines_have_no_front(
    kind: str, part: str, change: dict[str, str], words: str
) -> None:
    first = dict(PARETO_REPORT.results[0])
    report = replace(PARETO_REPORT, results=[*PARETO_REPORT.results, first | {part: first[part] | change}])
    with pytest.raises(SpecError, match=words):
        CHARTS[kind](report)


def test_rates_stand_at_the_95th_percentile_in_a_line_for_each_engine() -> None:
    first, *others = REPORTS["loads"].results
    server = {"backend": "endpoint", "endpoint": "http://127.0.0.1:8000/v1#tiny"}
    elsewhere = dict(first) | {"variant": first["variant"] | server}
    (panel,) = CHARTS["loads"](Report("t", [elsewhere, *others])).panels
    assert [(each.text, each.x) for each in panel.marks] == [("1/s", 900.0), ("4/s", 2400.0), ("2/s", 1200.0)]
    assert [each.series for each in panel.marks] == [
        "baseline, endpoint tiny at 127.0.0.1:8000", "baseline, torch", "baseline, torch",
    ]  # fmt: skip


def test_the_waterfall_begins_each_rung_at_the_one_before() -> None:
    marks = data_of("waterfall").panels[0].marks
    assert [each.label for each in marks] == ["baseline", "+ bf16", "+ static_kv_cache", "+ torch_compile"]
    assert [each.start for each in marks] == [0.0, 1.0, *(each.value for each in marks[1:3])]
    assert "added 1.62x [1.54, 1.68]" in marks[3].text


def test_a_baseline_of_the_card_is_a_claim_and_only_the_same_work_stands_beside_it() -> None:
    (panel,) = data_of("baselines").panels
    claim, measured = panel.marks
    assert (claim.claimed, claim.value, claim.source) == (True, 40.0, "5090-matmul-fp32")
    assert "(claim)" in claim.label
    assert (measured.claimed, measured.label) == (False, "float32 4096")
    assert "has not measured" in data_of("baselines").note


@pytest.mark.parametrize(
    ("kind", "without"),
    [("ladder", "tokens_per_s"), ("quality", "top1_agreement")],
)
def test_where_nothing_was_measured_the_reason_is_said(kind: str, without: str) -> None:
    with pytest.raises(SpecError, match="No result has"):
        CHARTS[kind](Report("t", with_null(RESULTS, without, "no")))


def test_only_charts_that_need_it_are_not_drawn_of_results_that_lack_their_primary_metric() -> None:
    lacking = [each | {"metrics": {"latency_s": each["metrics"]["latency_s"]}} for each in RESULTS]
    drawn = set()
    for name, chart in CHARTS.items():
        with suppress(SpecError):
            chart(Report("t", lacking))
            drawn.add(name)
    assert drawn == {"roofline", "precision"}


def with_null(results: list[dict[str, Any]], name: str, reason: str) -> list[dict[str, Any]]:
    """The results without a metric."""
    null = metric(name, None, reason=reason).model_dump(mode="json")
    return [each | {"metrics": each["metrics"] | {name: null}} for each in results]


ROOFLINE = RESULTS[0]["facts"]["roofline"]
NO_PRODUCT = ROOFLINE | {"step": ROOFLINE["step"] | {"flops": 0.0, "flops_per_byte": 0.0}}


@pytest.mark.parametrize(
    "facts", [{}, {"roofline": {"step": None, "reason": "no peaks"}}, {"roofline": NO_PRODUCT}]
)
def test_without_a_roofline_none_is_drawn(facts: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"facts\.roofline\.reason"):
        CHARTS["roofline"](Report("t", [each | {"facts": facts} for each in RESULTS]))


def test_quality_is_the_loss_of_agreement_or_of_accuracy_where_that_was_measured() -> None:
    agreement = data_of("quality").panels[0].marks[1]
    assert agreement.x == pytest.approx(0.69)
    assert agreement.x_ci == pytest.approx((0.39, 1.09))
    measured = [
        with_metrics(each, accuracy_loss_percent=(loss, loss - 0.3, loss + 0.3))
        for each, loss in zip(RESULTS, (0.0, -0.4, 1.5), strict=False)
    ]
    (panel,) = CHARTS["quality"](Report("t", [*measured, *RESULTS[3:]])).panels
    assert panel.x_axis == "accuracy lost against fp32 (%)"
    assert [each.x for each in panel.marks] == [0.0, -0.4, 1.5]
    assert next(iter(panel.missing)) == "static_kv_cache"


def texts(svg: str) -> str:
    """What a picture says, without what only a pointer shows."""
    return " ".join(map(shown_by, ElementTree.fromstring(svg).iter(f"{SVG}text")))


def said(kind: str, report: Report | None = None) -> str:
    return texts(picture(CHARTS[kind](report or REPORTS[kind])))


@pytest.mark.parametrize("kind", CHARTS)
def test_a_file_says_all_of_its_data(kind: str) -> None:
    data, whole = CHARTS[kind](REPORTS[kind]), said(kind)
    words = [data.title, *data.note.split(), "Measured", "Test CPU"]
    for panel in data.panels:
        words += [panel.title[1:], panel.axis, panel.x_axis, *panel.missing, *panel.missing.values()]
        for each in panel.marks:
            name = each.series if panel.form is Form.LINES else each.label
            words += [*name.split(), each.text]
    assert [each for each in words if each not in whole] == []


@pytest.mark.parametrize("kind", CHARTS)
def test_a_file_stands_alone(kind: str) -> None:
    """Nothing is fetched, and every colour is one that programs without variables know."""
    drawn = picture(CHARTS[kind](REPORTS[kind]))
    root = ElementTree.fromstring(drawn)
    (style,) = (each.text or "" for each in root.iter(f"{SVG}style"))
    assert "var(" not in style
    assert "light-dark" not in style
    assert set(re.findall(r"(?:fill|stroke|color): ([^;#]+);", style)) <= {"none", "currentColor", "stroke"}
    assert not re.search(r"href|url\(|@import|<script", drawn)


@pytest.mark.parametrize("suffix", [".svg", ".PNG"])
def test_a_file_is_the_same_each_time(tmp_path: Path, suffix: str) -> None:
    first, second = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    for path in (first, second):
        write_picture(CHARTS["ladder"](Report("preset:gpt2 on 2x Test CPU", RESULTS)), path)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG" if suffix == ".PNG" else b"<svg ")


@pytest.mark.parametrize("kind", ["ladder", "overview"])
def test_a_png_is_the_drawing_in_twice_its_size_with_letters_in_it(tmp_path: Path, kind: str) -> None:
    write_picture(CHARTS[kind](REPORTS[kind]), tmp_path / "c.svg")
    write_picture(CHARTS[kind](REPORTS[kind]), tmp_path / "c.png")
    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    whole = Image.open(tmp_path / "c.png").convert("L")
    assert whole.size == pytest.approx([2 * float(root.attrib[side]) for side in ("width", "height")], abs=1)
    assert min(whole.crop((0, 0, 600, 80)).tobytes()) < 80, "the title has dark letters"
    assert whole.getpixel((1, 1)) == 255


def test_the_roofline_names_the_measured_roofs_and_what_bounds_each_variant() -> None:
    whole = said("roofline")
    share = 1 / RESULTS[0]["metrics"]["headroom"]["value"]
    for words in (
        "40.0 GB/s reading 64 MiB",
        "float32: 200 GFLOP/s",
        "bfloat16: 800 GFLOP/s",
        f"baseline: {share:.0%} of its roof of 5.00 GFLOP/s; bound: memory",
        "bound: launch",
    ):
        assert words in whole
    limits = [each.limit for each in data_of("roofline").panels[0].marks[:3]]
    assert limits == pytest.approx([4.995, 39.96, 76.97], rel=1e-3)


def test_a_file_writes_an_unequal_interval_by_its_bounds_and_marks_the_goal() -> None:
    skewed = metric("tokens_per_s", 42.1, (30.2, 247.1)).model_dump(mode="json")
    results = [each | {"metrics": each["metrics"] | {"tokens_per_s": skewed}} for each in RESULTS]
    for kind in ("ladder", "quality"):
        assert "42.1 [30.2, 247.1]" in said(kind, Report("t", results))
    assert "goal: at most 0.1% lost" in said("quality")


def test_an_empty_panel_says_why_in_its_place() -> None:
    results = with_null(RESULTS, "top1_agreement", "random weights: their predictions mean nothing")
    assert "Reason: random weights" in said("overview", Report("t", results))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("chart", r"must end with \.svg or \.png"),
        ("c.svg.txt", r"must end with"),
        ("none/c.svg", "cannot be written"),
    ],
)
def test_a_file_that_cannot_be_a_chart_is_refused(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(OptiGPUError, match=words):
        write_picture(CHARTS["ladder"](Report("t", RESULTS)), tmp_path / name)


def commands_in(text: str) -> list[str]:
    return [each for each in re.findall(r"`(optigpu [^`]*)`", text) if "show" not in each]


@pytest.mark.parametrize("kind", sorted({*CHARTS} - {"roofline", "quality"}))
def test_without_its_figures_a_chart_says_what_to_run(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        write_picture(CHARTS[kind](Report("t", [])), tmp_path / "c.svg")
    (line, *_) = commands_in(str(raised.value))
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    command.commands[name].make_context(name, arguments)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(run_of(LADDER_REPORT)))
    return path


def test_the_command_draws_what_a_run_printed(report: Path, optigpu: Command) -> None:
    output = report.with_name("chart.svg")
    ran = optigpu("chart", str(report), "--output", str(output), "--kind", "waterfall")
    assert (ran.status, ran.out.strip()) == (0, str(output))
    assert "static_kv_cache" in texts(output.read_text())


NO_RESULT = {
    "spec": {"workload": {"kind": "matmul"}},
    "results": [],
    "attribution": {"metric": "m", "rows": []},
}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ('{"results": []}', "holds no run"),
        (json.dumps(NO_RESULT | {"spec": {}, "results": [{}]}), "holds no run"),
        (json.dumps(NO_RESULT), "has a result to draw"),
    ],
)
def test_a_file_with_something_else_is_a_wrong_request(
    report: Path, optigpu: Command, content: str, words: str
) -> None:
    report.write_text(content)
    ran = optigpu("chart", str(report), "-o", str(report.with_name("c.svg")))
    assert ran.status == 2
    assert words in ran.err


@pytest.mark.slow
def test_the_command_writes_every_picture_with_its_data_beside_it(report: Path, optigpu: Command) -> None:
    report.write_text(json.dumps(run_of(ATTENTION_REPORT)))
    folder = report.parent / "new" / "charts"
    printed = optigpu("charts", str(report), "--out", str(folder))
    assert printed.status == 0
    assert {path.name for path in folder.iterdir()} >= {"lengths.svg", "lengths.png", "lengths.json"}
    assert str(folder / "lengths.svg") in printed.out
    assert "waterfall: not drawn. No report is of one ladder" in printed.err
    assert not (folder / "waterfall.svg").exists()
    read = ChartData.model_validate_json((folder / "lengths.json").read_text())
    assert read.panels == CHARTS["lengths"](ATTENTION_REPORT).panels
    report.write_text(json.dumps(run_of(Report("t", []))))
    refused = optigpu("charts", str(report), "--out", str(folder / "none"))
    assert refused.status == 2
    assert commands_in(refused.err)
    assert not (folder / "none").exists()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptiGPUError, match=r"file/charts cannot be written \(Not a directory\)"):
        write_charts(LADDER_REPORT, tmp_path / "file" / "charts")


def test_a_report_of_nothing_that_was_measured_names_each_chart_with_its_reason(tmp_path: Path) -> None:
    empty = [
        each
        | {"metrics": {name: {"value": None, "reason": "stopped"} for name in each["metrics"]}, "facts": {}}
        for each in RESULTS
    ]
    with pytest.raises(SpecError, match=r"No chart can be drawn.*overview: No result is a baseline"):
        write_charts(Report("t", empty), tmp_path)


def run(results: list[dict[str, Any]], **spec: str) -> dict[str, Any]:
    found = run_of(Report("t", results))
    return found | {"spec": found["spec"] | spec}


def test_reports_of_one_chart_are_told_apart_by_what_differs() -> None:
    card = {"environment": RESULTS[0]["environment"] | {"hardware_class": "NVIDIA L4"}}
    here = run(RESULTS[:1])
    title, results = combined([here, run([RESULTS[0] | card])])
    assert [each["variant"]["label"] for each in results] == [
        "baseline (2x Test CPU)",
        "baseline (NVIDIA L4)",
    ]
    assert "Test CPU" not in title
    _, named = combined([run(RESULTS[:1], name="before"), run(RESULTS[:1], name="after")])
    assert [each["variant"]["label"] for each in named] == ["baseline (before)", "baseline (after)"]
    _, twice = combined([here, here])
    assert len({each["variant"]["label"] for each in twice}) == 2


def test_one_chart_has_one_unit() -> None:
    product = RESULTS[0] | {"variant": RESULTS[0]["variant"] | {"primary_metric": "tflops"}}
    with pytest.raises(SpecError, match="TFLOP/s, tokens/s; draw them apart"):
        combined([run(RESULTS), run([product])])
