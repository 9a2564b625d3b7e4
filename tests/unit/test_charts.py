"""Charts as files: what they say, that they stand alone and are the same each time, and the commands that write."""

import json
import re
import shlex
import struct
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from optigpu.cli import app, main
from optigpu.report.catalog import combined
from optigpu.report.charts import CHARTS, Report
from optigpu.report.charts.files import write_charts
from optigpu.report.charts.marks import ChartData, Form, Mark, Panel
from optigpu.report.charts.svg.picture import picture
from optigpu.vocabulary import OptiGPUError, Role, SpecError
from tests.unit.made_reports import (
    ATTENTION_REPORT,
    LADDER_REPORT,
    REPORTS,
    RESULTS,
    THREE,
    VALID,
    made,
    run_of,
)
from tests.unit.made_results import metric
from tests.unit.svg_pages import SVG

PIXELS = 2


def texts(svg: str) -> str:
    """What a picture says, without what only a pointer shows."""
    root = ElementTree.fromstring(svg)
    return " ".join(_shown(each) for each in root.iter(f"{SVG}text"))


def _shown(element: ElementTree.Element) -> str:
    parts = [element.text or ""]
    for each in element:
        parts += ["" if each.tag == f"{SVG}title" else each.text or "", each.tail or ""]
    return "".join(parts)


def said(kind: str, report: Report | None = None) -> str:
    return texts(picture(CHARTS[kind].data(report or REPORTS[kind])))


@pytest.mark.parametrize("kind", CHARTS)
def test_a_file_says_all_of_its_data(kind: str) -> None:
    data, whole = CHARTS[kind].data(REPORTS[kind]), said(kind)
    words = [data.title, *data.note.split(), "Measured", "Test CPU"]
    for panel in data.panels:
        words += [panel.title[1:], panel.axis, panel.x_axis, *panel.missing, *panel.missing.values()]
        words += [word for each in panel.marks for word in (*_names(each, panel).split(), each.text)]
    for box in data.boxes:
        words += [box.heading, *box.lines]
    for row in data.table.rows if data.table else ():
        words += row
    for heading in data.table.headings if data.table else ():
        words += heading.split()
    assert [each for each in words if each not in whole] == []


def _names(each: Mark, panel: Panel) -> str:
    """What a mark is named by: points that are joined by their series."""
    return each.series if panel.form is Form.LINES else each.label


@pytest.mark.parametrize("kind", CHARTS)
def test_a_file_stands_alone(kind: str) -> None:
    """Nothing is fetched, and every colour is one that programs without variables know."""
    drawn = picture(CHARTS[kind].data(REPORTS[kind]))
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
        CHARTS["ladder"]("preset:gpt2 on 2x Test CPU", RESULTS, path)
    assert first.read_bytes() == second.read_bytes()
    assert first.read_bytes().startswith(b"\x89PNG" if suffix == ".PNG" else b"<svg ")


@pytest.mark.parametrize("kind", ["ladder", "overview", "comparison", "architecture"])
def test_a_png_is_the_drawing_in_twice_its_size_with_letters_in_it(tmp_path: Path, kind: str) -> None:
    from PIL import Image

    CHARTS[kind].draw(REPORTS[kind], tmp_path / "c.svg")
    CHARTS[kind].draw(REPORTS[kind], tmp_path / "c.png")
    root = ElementTree.parse(tmp_path / "c.svg").getroot()
    size = struct.unpack(">II", (tmp_path / "c.png").read_bytes()[16:24])
    assert size == pytest.approx([PIXELS * float(root.attrib[side]) for side in ("width", "height")], abs=1)
    whole = Image.open(tmp_path / "c.png").convert("L")
    darkest, _ = whole.crop((0, 0, 600, 80)).getextrema()
    assert isinstance(darkest, float | int)
    assert darkest < 80, "the title has dark letters"
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


def test_a_file_writes_an_unequal_interval_by_its_bounds_and_marks_the_goal() -> None:
    skewed = metric("tokens_per_s", 42.1, (30.2, 247.1)).model_dump(mode="json")
    results = [each | {"metrics": each["metrics"] | {"tokens_per_s": skewed}} for each in RESULTS]
    for kind in ("ladder", "quality", "throughput"):
        assert "42.1 [30.2, 247.1]" in said(kind, Report("t", results))
    assert "goal: at most 0.1% lost" in said("quality")


@pytest.mark.parametrize("kind", ["ladder", "roofline", "quality", "throughput"])
@pytest.mark.parametrize("count", [1, 50])
def test_a_file_names_every_variant(kind: str, count: int) -> None:
    results = [
        made(index, f"{index}: {THREE}", Role.SINGLE, 44.0, 124_800_000, "bfloat16", 0.971, VALID)
        for index in range(count)
    ]
    whole = said(kind, Report("t", results))
    assert [index for index in range(count) if f"{index}: bf16" not in whole] == []


def test_an_empty_panel_says_why_in_its_place() -> None:
    null = {"value": None, "ci": None, "reason": "random weights: their predictions mean nothing"}
    results = [each | {"metrics": each["metrics"] | {"top1_agreement": null}} for each in RESULTS]
    assert "Reason: random weights" in said("overview", Report("t", results))


@pytest.mark.parametrize("name", ["chart.pdf", "chart", "chart.svg.txt"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"must end with \.svg or \.png"):
        CHARTS["ladder"]("t", RESULTS, tmp_path / name)


def test_a_folder_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(OptiGPUError, match="cannot be written"):
        CHARTS["ladder"]("t", RESULTS, tmp_path / "nowhere" / "c.svg")


def commands_in(text: str) -> list[str]:
    return [each for each in re.findall(r"`(optigpu [^`]*)`", text) if "show" not in each]


@pytest.mark.parametrize("kind", sorted({*CHARTS} - {"roofline", "quality", "throughput"}))
def test_without_its_figures_a_chart_says_what_to_run(kind: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        CHARTS[kind].draw(Report("t", []), tmp_path / "c.svg")
    (line, *_) = commands_in(str(raised.value))
    _, name, *arguments = shlex.split(line)
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    command.commands[name].make_context(name, arguments)
    assert not list(tmp_path.iterdir())


# The commands


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["optigpu", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "results.json"
    path.write_text(json.dumps(run_of(LADDER_REPORT)))
    return path


def test_the_command_draws_what_a_run_printed(
    report: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = report.with_name("chart.svg")
    assert command(monkeypatch, "chart", str(report), "--output", str(output), "--kind", "waterfall") == 0
    assert "static_kv_cache" in texts(output.read_text())
    assert capsys.readouterr().out.strip() == str(output)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON"),
        ("[1]", "holds no run"),
        ('{"results": []}', "holds no run"),
        ('{"spec": {}, "results": [{}], "attribution": {"metric": "m", "rows": []}}', "holds no run"),
        (
            '{"spec": {"workload": {"kind": "matmul"}}, "results": [], "attribution": {"metric": "m", "rows": []}}',
            "has a result to draw",
        ),
    ],
)
def test_a_file_with_something_else_is_a_wrong_request(
    report: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: str,
    words: str,
) -> None:
    report.write_text(content)
    assert command(monkeypatch, "chart", str(report), "-o", str(report.with_name("c.svg"))) == 2
    assert words in capsys.readouterr().err


def test_the_command_writes_every_picture_with_its_data_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text(json.dumps(run_of(ATTENTION_REPORT)))
    folder = tmp_path / "new" / "charts"
    assert command(monkeypatch, "charts", str(tmp_path / "run.json"), "--out", str(folder)) == 0
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
    (tmp_path / "run.json").write_text(json.dumps(run_of(Report("t", []))))
    assert command(monkeypatch, "charts", str(tmp_path / "run.json"), "--out", str(tmp_path / "charts")) == 2
    assert commands_in(capsys.readouterr().err)
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
        for each in RESULTS
    ]
    with pytest.raises(SpecError, match=r"No chart can be drawn.*overview: No result is a baseline"):
        write_charts(Report("t", empty), tmp_path)


def on(results: list[dict[str, Any]], hardware: str) -> list[dict[str, Any]]:
    """The results as another machine's."""
    return [each | {"environment": each["environment"] | {"hardware_class": hardware}} for each in results]


def run(results: list[dict[str, Any]], **spec: str) -> dict[str, Any]:
    found = run_of(Report("t", results))
    return found | {"spec": found["spec"] | spec}


def test_reports_of_one_chart_are_told_apart_by_what_differs() -> None:
    here, there = run(RESULTS[:2]), run(on(RESULTS[:2], "NVIDIA L4"))
    title, results = combined([here, there])
    labels = [each["variant"]["label"] for each in results]
    assert labels == [
        "baseline (2x Test CPU)",
        "bf16 (2x Test CPU)",
        "baseline (NVIDIA L4)",
        "bf16 (NVIDIA L4)",
    ]
    assert "Test CPU" not in title
    _, named = combined([run(RESULTS[:1], name="before"), run(RESULTS[:1], name="after")])
    assert [each["variant"]["label"] for each in named] == ["baseline (before)", "baseline (after)"]
    _, twice = combined([here, here])
    assert len({each["variant"]["label"] for each in twice}) == 4


def test_one_chart_has_one_unit() -> None:
    product = RESULTS[0] | {"variant": RESULTS[0]["variant"] | {"primary_metric": "tflops"}}
    with pytest.raises(SpecError, match="TFLOP/s, tokens/s; draw them apart"):
        combined([run(RESULTS), run([product])])
