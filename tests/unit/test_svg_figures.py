"""What charts for pages show: figures, names, links, ties and fronts; and how they look by their style sheet."""

import re
from typing import Any

import pytest

from optigpu.documents.result import Gain
from optigpu.documents.views import Board, History, HistoryPoint, LevelChange, Standing
from optigpu.report.charts import CHARTS
from optigpu.report.charts.fronts import AXES, front_panel, speed_axis
from optigpu.report.charts.history import history_data, samples_data
from optigpu.report.charts.ladders import Step, Steps, steps_data
from optigpu.report.charts.marks import Form, Mark, Panel, Report
from optigpu.report.charts.svg import figure
from optigpu.report.charts.svg.points import steps
from optigpu.vocabulary import Better, DeviceKind, SpecError, utc_now
from tests.pages import ROOT
from tests.unit.contrast import contrast
from tests.unit.made_reports import BROKEN_REPORT, LADDER_REPORT, REPORTS
from tests.unit.made_results import a_row, metric
from tests.unit.svg_pages import SVG, assert_sound, drawings, words_of

STYLES = (ROOT / "optigpu/report/charts/svg/charts.css").read_text()


def bars(*marks: Mark) -> Panel:
    return Panel(title="Speed", form=Form.BARS, axis="tokens/s", marks=marks)


def said(svg: str) -> list[str]:
    """The texts of the wide drawing."""
    return [each.text for each in words_of(drawings(svg)[0])]


DRAWN = [(kind, place) for kind in REPORTS for place, _ in enumerate(CHARTS[kind].data(REPORTS[kind]).panels)]


@pytest.mark.parametrize(("kind", "place"), DRAWN)
def test_every_panel_that_files_are_drawn_from_is_a_chart_for_pages_too(kind: str, place: int) -> None:
    panel = CHARTS[kind].data(REPORTS[kind]).panels[place]
    made = figure(panel, id_prefix="c", link=lambda source: f"/results/{source}")
    assert_sound(made.svg, "c")
    assert len(made.table.rows) == len(panel.marks)
    assert panel.axis in "".join(said(made.svg))


def test_bars_say_name_figure_and_interval_and_mark_who_shares_a_rank() -> None:
    rows = [
        Mark(
            label=f"variant {number}",
            value=value,
            ci=(value - 2, value + 2),
            text=f"{value:g} ±2",
            rank=rank,
            source="r",
        )
        for number, (value, rank) in enumerate(((30.0, 1), (20.0, 2), (19.0, 2)))
    ]
    made = figure(bars(*rows), id_prefix="b", link=lambda source: f"/results/{source}")
    assert_sound(made.svg, "b")
    texts = said(made.svg)
    assert [each for each in texts if each.endswith("=")] == ["2=", "2="]
    assert {"1", "variant 0", "30 ±2", "19 ±2", "tokens/s"} <= set(texts)
    page = drawings(made.svg)[0]
    assert [each.get("href") for each in page.iter(f"{SVG}a")] == ["/results/r"] * 3
    (ties,) = (each for each in page.iter(f"{SVG}g") if each.get("class") == "c-ties")
    assert len(ties) == 1
    assert made.table.rows[1] == ("2", "variant 1", "20.0", "[18.0, 22.0]")


def test_an_interval_that_dwarfs_the_values_ends_in_an_arrow_and_not_the_axis() -> None:
    made = figure(
        bars(Mark(label="a", value=10.0, ci=(8.0, 5000.0)), Mark(label="b", value=12.0)), id_prefix="b"
    )
    ticks = [float(each) for each in said(made.svg) if re.fullmatch(r"\d+", each)]
    assert 12 <= max(ticks) < 50
    assert (
        figure(bars(Mark(label="a", value=10.0, ci=(8.0, 5000.0))), id_prefix="b").table.rows[0][2]
        == "[8.00, 5,000]"
    )


def test_a_long_name_is_cut_and_whole_in_its_title() -> None:
    name = "int8_weight_only + " * 500
    made = figure(bars(Mark(label=name, value=1.0)), id_prefix="b")
    assert_sound(made.svg, "b")
    titles = [each.text for page in drawings(made.svg) for each in page.iter(f"{SVG}title")]
    assert titles.count(" ".join(name.split())) == 2
    assert max(len(each) for each in said(made.svg)) < 100


@pytest.mark.parametrize(
    ("panel", "words"),
    [
        (bars(), "there is no result to draw yet"),
        (bars(Mark(label="a", value=1e300)), "no value is a finite number"),
        (bars(Mark.model_construct(label="a", value=float("nan"), start=0.0)), "no value is a finite number"),
        (bars().model_copy(update={"missing": {"a": "random weights"}}), "Reason: random weights"),
    ],
)
def test_what_cannot_be_drawn_is_a_sentence(panel: Panel, words: str) -> None:
    svg = figure(panel, id_prefix="b").svg
    assert svg.startswith('<p class="c-empty">')
    assert words in svg


@pytest.mark.parametrize(
    ("better", "x_better", "corners"),
    [
        (Better.HIGHER, Better.LOWER, [(1, 1), (2, 1), (2, 3), (4, 3), (4, 5)]),
        (Better.LOWER, Better.LOWER, [(1, 1)]),
        (Better.HIGHER, Better.HIGHER, [(4, 5)]),
        (Better.LOWER, Better.HIGHER, [(4, 5), (2, 5), (2, 3), (1, 3), (1, 1)]),
    ],
)
def test_the_front_goes_in_steps_through_what_is_best(
    better: Better, x_better: Better, corners: list[tuple[float, float]]
) -> None:
    marks = [Mark(label="p", x=x, value=y, on_front=True) for x, y in ((4, 5), (1, 1), (2, 3))]
    marks.append(Mark(label="off", x=0.5, value=9, on_front=False))
    panel = Panel(title="t", form=Form.FRONT, axis="a", x_axis="x", better=better, x_better=x_better)
    assert steps(marks, panel) == corners


def board(*rows: dict[str, Any]) -> Board:
    return Board(
        workload_digest="w", workload={"kind": "generate"}, model="preset:gpt2", metric="tokens_per_s", unit="1/s",
        better=Better.HIGHER, row_count=len(rows), rows=tuple(a_row(**each) for each in rows),
    )  # fmt: skip


ROWS: tuple[dict[str, Any], ...] = (
    {"result_id": "fast", "weight_bytes": 400e6},
    {
        "result_id": "small",
        "rank": 2,
        "weight_bytes": 100e6,
        "value": metric("tokens_per_s", 90.0, (85.0, 95.0)),
    },
    {"result_id": "worse", "rank": 3, "weight_bytes": 450e6, "value": metric("tokens_per_s", 30.0)},
    {
        "result_id": "wrong",
        "standing": "invalid",
        "weight_bytes": 1e6,
        "value": metric("tokens_per_s", 999.0),
    },
    {"result_id": "unknown", "rank": 4, "weight_bytes": None},
)


ENGINES = ("torch", "openvino", "openvino", "torch", "torch")


def test_a_board_is_a_front_of_what_is_ranked() -> None:
    found = board(*(each | {"backend": name} for each, name in zip(ROWS, ENGINES, strict=True)))
    front = front_panel(found.rows, AXES["weights"], speed_axis(found))
    assert [each.source for each in front.marks if each.on_front] == ["fast", "small"]
    assert [each.x for each in front.marks] == [400.0, 100.0, 450.0, 1.0]
    assert [each.series for each in front.marks][:2] == ["torch", "openvino"]
    assert list(front.missing.values()) == ["weights (MB) or tokens/s was not measured"]
    assert_sound(figure(front, id_prefix="f").svg, "f")


def test_quality_over_bytes_is_a_front_too() -> None:
    rows = [each | {"kld_mean": lost} for each, lost in zip(ROWS, (1e-12, 0.01, 0.02, 0.0, 0.1), strict=True)]
    front = front_panel(board(*rows).rows, AXES["weights"], AXES["divergence"])
    assert [each.source for each in front.marks if each.on_front] == ["fast", "small"]
    assert (front.better, front.x_better) == (Better.LOWER, Better.LOWER)
    assert "↙ better" in said(figure(front, id_prefix="q").svg)


def test_a_ladder_says_what_each_technique_buys_added_alone_and_left_out() -> None:
    gain = {name: Gain(ratio=ratio, ci=(ratio * 0.9, ratio * 1.1), compared_with=0) for name, ratio in
            (("speedup", 8.0), ("added", 2.0), ("alone", 1.5), ("left_out", 1.8))}  # fmt: skip
    ladder = Steps(title="t", metric="tokens_per_s", steps=(Step(label="+ int8", before=4.0, **gain),))
    made = figure(ladder, id_prefix="w")
    assert_sound(made.svg, "w")
    texts = said(made.svg)
    assert "8.00x [7.20, 8.80]" in texts
    assert "times the baseline, log scale" in texts
    assert [column.heading for column in made.table.columns] == [
        "rung",
        "speedup",
        "added",
        "alone",
        "left out",
    ]
    assert made.table.rows[0][2] == "2.00x [1.80, 2.20]"


def test_the_steps_of_a_report_are_those_of_its_waterfall() -> None:
    marks = CHARTS["waterfall"].data(LADDER_REPORT).panels[0].marks[1:]
    found = steps_data(LADDER_REPORT)
    assert [(each.label, each.before, each.speedup.ratio) for each in found.steps] == [
        (each.label, each.start, each.value) for each in marks
    ]
    assert [each.speedup.valid for each in steps_data(BROKEN_REPORT).steps] == [False]
    with pytest.raises(SpecError, match="No report is of one ladder"):
        steps_data(Report("t", LADDER_REPORT.results, None))


def test_a_history_numbers_its_changes_and_says_what_changed() -> None:
    def point(number: int, torch: str) -> HistoryPoint:
        return HistoryPoint(
            result_id=f"r{number}", measured_at=utc_now(), standing=Standing.CURRENT, value=100.0 - 10 * number,
            ci=(99.0 - 10 * number, 101.0 - 10 * number), replicates=3, versions={"torch": torch}, warnings=(),
        )  # fmt: skip

    points = (point(0, "2.12"), point(1, "2.13"))
    change = LevelChange(
        result_id="r1",
        measured_at=points[1].measured_at,
        ratio=0.9,
        improved=False,
        versions={"torch": ("2.12", "2.13")},
    )
    found = History(
        workload={}, model=None, label="int8", backend="torch", device=DeviceKind.CPU, hardware="2x Test CPU",
        metric="tokens_per_s", unit="1/s", better=Better.HIGHER, points=points, changes=(change,),
    )  # fmt: skip
    made = figure(history_data(found), id_prefix="h")
    assert_sound(made.svg, "h")
    assert "10.0% lower (worse): torch 2.12 → 2.13" in " ".join(said(made.svg))
    assert [row[3] for row in made.table.rows] == ["10.0% lower (worse): torch 2.12 → 2.13", ""]


def test_few_samples_far_out_are_counted_beyond_the_last_bin() -> None:
    found = samples_data(
        "Latency", "ms", [[1.0 + 0.01 * number for number in range(200)] + [500.0]], scale=1e3
    )
    (replicate,) = found.replicates
    assert (replicate.beyond, sum(replicate.counts), replicate.n) == (1, 200, 201)
    assert found.edges[-1] < 4000
    assert "1 beyond" in " ".join(said(figure(found, id_prefix="s").svg))
    with pytest.raises(SpecError, match="no sample"):
        samples_data("Latency", "ms", [[float("nan")], []])


def test_a_roofline_names_its_roofs() -> None:
    panel = CHARTS["roofline"].data(LADDER_REPORT).panels[0]
    made = figure(panel, id_prefix="r")
    assert_sound(made.svg, "r")
    whole = " ".join(said(made.svg))
    for words in (
        "float32: 200 GFLOP/s",
        "bfloat16: 800 GFLOP/s",
        "40.0 GB/s reading 64 MiB; 10.0 GB/s reading",
    ):
        assert words in whole
    assert [each.limit for each in panel.marks[:3]] == pytest.approx([4.995, 39.96, 76.97], rel=1e-3)
    assert panel.marks[0].text == "75% of its roof of 5.00 GFLOP/s; bound: memory"


def test_svg_is_not_escaped_by_a_template() -> None:
    from jinja2 import Environment

    made = figure(bars(Mark(label="<i>", value=1.0)), id_prefix="b")
    page = Environment(autoescape=True).from_string("{{ chart.svg }} {{ chart.title }}").render(chart=made)
    assert page.startswith('<div class="c-chart"><svg')
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


def colours(kind: int) -> dict[str, str]:
    """The properties of the light (0) or the dark (1) page."""
    found = re.findall(r"(--chart-[\w-]+): (?:var\([\w-]+, )?light-dark\((#\w+), (#\w+)\)", STYLES)
    return {name: (light, dark)[kind] for name, light, dark in found}


@pytest.mark.parametrize("kind", [0, 1])
def test_colours_have_the_contrast_of_wcag_on_their_ground(kind: int) -> None:
    found = colours(kind)
    ground = found["--chart-paper"]
    for name in ("--chart-ink", "--chart-faint", "--chart-loss"):
        assert contrast(found[name], ground) >= 4.5, name
    for name in ("--chart-plain", *(f"--chart-{number}" for number in range(1, 7))):
        assert contrast(found[name], ground) >= 3, name


def test_every_class_that_is_drawn_has_a_style() -> None:
    modules = (ROOT / "optigpu/report/charts/svg").glob("*.py")
    used = {name for module in modules for name in re.findall(r"\bc-[a-z][a-z0-9-]*\b", module.read_text())}
    styled = set(re.findall(r"\.(c-[a-z][a-z0-9-]*)", STYLES))
    beginnings = {"c-s", "c-l"}
    assert used - styled == beginnings
    assert "style=" not in STYLES
