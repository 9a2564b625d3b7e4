"""What charts show and how they look: sound markup for any data, with labels that keep apart, and a table of it."""

import re
from datetime import UTC, datetime
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.charts import Figure, figure
from api.histograms import samples_data
from api.pages.board import AXES, front_panel, speed_axis
from optigpu.documents.views import LevelChange
from optigpu.report.charts import CHARTS
from optigpu.report.charts.marks import Form, Interval, Mark, Panel, Report, Roof
from optigpu.report.charts.svg import PANELS, TWO
from optigpu.report.charts.svg.labels import Box, Wanted, around, placed
from optigpu.report.charts.svg.markup import element, escaped, shortened, text_width
from optigpu.report.charts.svg.plane import SMALLEST, axis, drawable
from optigpu.report.charts.svg.points import steps
from optigpu.report.formats import prefixed
from optigpu.vocabulary import Better, SpecError
from tests.pages import ROOT
from tests.unit.made_reports import BROKEN_REPORT, LADDER_REPORT
from tests.unit.made_results import a_board, a_history, a_point, a_row, metric
from tests.unit.svg_pages import (
    SVG,
    assert_apart,
    assert_inside,
    assert_sound,
    contrast,
    drawings,
    said,
    words_of,
)

STYLES = (ROOT / "optigpu/report/charts/svg/charts.css").read_text()


numbers = st.floats(-1e12, 1e12) | st.floats(0, 1e4) | st.floats(-1e300, 1e300) | st.just(0.0)


HOSTILE = [
    "<script>alert(1)</script>",
    "\" onload='x'",
    "😀👩\u200d👩\u200d👧",
    "שלום",
    "مرحبا\u202e",
    "a" * 10_000,
    "]]>&amp;\x00",
]
labels = st.text(max_size=60) | st.sampled_from(HOSTILE)
intervals = st.none() | st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))


def marks(*, points: bool) -> st.SearchStrategy[Mark]:
    return st.builds(
        Mark,
        label=labels,
        value=numbers,
        ci=intervals,
        x=numbers if points else st.none(),
        x_ci=intervals if points else st.none(),
        series=st.sampled_from(["", "torch", "baseline"]) | labels,
        valid=st.booleans(),
        claimed=st.booleans(),
        on_front=st.booleans(),
        rank=st.none() | st.integers(1, 4),
        limit=st.none() | numbers,
        source=st.none() | labels,
    )


roofs = st.builds(Roof, text=labels, gb_per_s=st.none() | numbers, gflop_per_s=st.none() | numbers)


def panels(form: Form) -> st.SearchStrategy[Panel]:
    return st.builds(
        Panel,
        title=labels,
        form=st.just(form),
        axis=labels,
        x_axis=labels,
        logarithmic=st.booleans(),
        better=st.sampled_from(Better),
        x_better=st.sampled_from(Better),
        marks=st.lists(marks(points=form is not Form.BARS), min_size=1, max_size=12).map(tuple),
        roofs=st.lists(roofs, max_size=4 if form is Form.ROOFLINE else 0).map(tuple),
        missing=st.dictionaries(labels, labels, max_size=1),
    )


def address(source: str) -> str:
    return f"/results/{source}"


def assert_shows(made: Figure, drawn: int) -> None:
    """A sound drawing where there is something to draw, else a sentence."""
    if drawn:
        assert_sound(made.svg, "any")
    else:
        sentence = ElementTree.fromstring(made.svg)
        assert sentence.tag == "p"
        assert (sentence.text or "").strip()


@pytest.mark.slow
@pytest.mark.parametrize("form", Form)
@settings(max_examples=15)
@given(data=st.data())
def test_any_panel_is_sound_markup_whose_labels_keep_apart(form: Form, data: st.DataObject) -> None:
    panel = data.draw(panels(form))
    made = figure(panel, id_prefix="any", link=address)
    shown = [each for each in panel.marks if drawable(each.value, 0.0 if form is Form.BARS else each.x)]
    if form is Form.ROOFLINE:
        shown = [each for each in shown if min(each.value, each.x or 0.0) > SMALLEST]
    assert_shows(made, len(shown))
    assert len(made.table.rows) == len(panel.marks)
    sketch = PANELS[form](panel)
    if not isinstance(sketch, str):
        drawn = sketch.draw(TWO)
        size = f"0 0 {TWO.width} {drawn.height}"
        (page,) = drawings(element("svg", *drawn.parts, xmlns="http://www.w3.org/2000/svg", viewBox=size))
        assert_inside(page)
        assert_apart(words_of(page))


moments = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


@pytest.mark.slow
@settings(max_examples=15)
@example(  # its axis begins at -100
    [datetime(1999 + year, 1, 1, tzinfo=UTC) for year in range(7)],
    [(189.0 * (n == 6), None) for n in range(12)],
    {},
)
@given(
    st.lists(moments, min_size=1, max_size=12, unique=True).map(sorted),
    st.lists(st.tuples(numbers, intervals), min_size=12, max_size=12),
    st.dictionaries(st.integers(0, 11), st.tuples(labels, st.booleans()), max_size=10),
)
def test_any_history_is_sound_markup(
    at: list[datetime], values: list[tuple[float, Interval | None]], changed: dict[int, tuple[str, bool]]
) -> None:
    found = tuple(
        a_point(value, result_id=f"r{number}", measured_at=moment, ci=ci)
        for number, (moment, (value, ci)) in enumerate(zip(at, values, strict=False))
    )
    changes = tuple(
        LevelChange(
            result_id=each.result_id, measured_at=each.measured_at, ratio=1.5, improved=changed[number][1], chance=0.01,
            versions={changed[number][0]: (None, changed[number][0])},
        )
        for number, each in enumerate(found)
        if number in changed
    )  # fmt: skip
    made = figure(a_history(*found, changes=changes), id_prefix="any", link=address)
    assert_shows(made, sum(drawable(each.value) for each in found))
    assert len(made.table.rows) == len(found)


some_samples = st.lists(st.floats(-1e9, 1e9) | st.floats(0, 10), min_size=1, max_size=40)


@settings(max_examples=15)
@given(st.lists(some_samples, min_size=1, max_size=5))
def test_any_samples_are_sound_markup_and_each_is_counted_once(samples: list[list[float]]) -> None:
    found = samples_data("any", "latency (ms)", samples)
    assert [sum(each.counts) + each.beyond for each in found.replicates] == [len(each) for each in samples]
    made = figure(found, id_prefix="any")
    assert_shows(made, len(found.replicates))
    counted = [sum(int(row[place + 1]) for row in made.table.rows) for place in range(len(samples))]
    assert counted == [len(each) for each in samples]


finite = st.floats(-1e30, 1e30) | st.floats(-100, 100)


@settings(max_examples=60)
@given(finite, finite, st.booleans(), st.floats(60, 900))
def test_the_labels_of_an_axis_keep_apart_and_reach_around_the_values(
    one: float, other: float, logarithmic: bool, length: float
) -> None:
    low, high = sorted((abs(one) + 1e-9, abs(other) + 1e-9) if logarithmic else (one, other))
    scale = axis(low, high, 10.0, 10.0 + length, logarithmic=logarithmic)
    assert len(scale.ticks) >= 2
    slack = 1e-6 * max(abs(low), abs(high), 1e-30)
    assert scale.ticks[0].value <= low + slack
    assert scale.ticks[-1].value >= high - slack
    places = [(scale(tick.value), text_width(tick.text)) for tick in scale.ticks]
    if len(scale.ticks) > 2:
        assert all(b - a >= (wide + next_wide) / 2 for (a, wide), (b, next_wide) in pairwise(places))
    assert len({tick.text for tick in scale.ticks}) == len(scale.ticks)
    assert all(10.0 <= scale(value) <= 10.0 + length for value in (low, high, -1e300, 1e300))


@pytest.mark.parametrize(
    ("numbers", "step", "texts"),
    [
        ((0.0, 5_000.0), 5_000.0, ["0", "5,000"]),
        ((0.0, 5_000.0, 10_000.0), 5_000.0, ["0", "5k", "10k"]),
        ((198.6, 198.8), 0.2, ["198.6", "198.8"]),
        ((-2e9, 0.0, 2e9), 2e9, ["-2G", "0", "2G"]),
    ],
)
def test_numbers_of_an_axis_have_one_prefix_and_the_decimals_they_need(
    numbers: tuple[float, ...], step: float, texts: list[str]
) -> None:
    assert prefixed(numbers, step) == texts


def test_less_than_the_floor_of_an_axis_lies_at_its_beginning_and_the_label_says_so() -> None:
    scale = axis(1e-12, 0.1, 0.0, 400.0, logarithmic=True, floor=1e-5)
    assert scale.ticks[0].text == "≤10⁻⁵"
    assert scale(0.0) == scale(1e-12) == 0.0
    assert scale(0.1) == 400.0


@given(
    st.lists(
        st.builds(Wanted, st.floats(0, 300), st.floats(0, 200), st.floats(5, 120), st.just(13.0)), max_size=12
    )
)
def test_labels_of_points_lie_on_no_other_label_and_on_no_point(wanted: list[Wanted]) -> None:
    page = Box(0, 0, 300, 200)
    dots = [around(each.x, each.y, 5) for each in wanted]
    boxes = [box for box in placed(wanted, page, dots, ()) if box]
    assert not any(one.meets_any([other]) for one, other in combinations(boxes, 2))
    assert not any(box.meets_any(dots) for box in boxes)
    assert all(page.holds(box) for box in boxes)


def test_a_label_with_room_stands_right_of_its_point_and_goes_elsewhere_where_a_line_is() -> None:
    wanted, page = [Wanted(100, 100, 50, 13)], Box(0, 0, 300, 200)
    assert placed(wanted, page, (), ()) == [Box(108, 93.5, 158, 106.5)]
    (other,) = placed(wanted, page, (), [Box(100, 90, 300, 110)])
    assert other is not None
    assert other.right < 100


def test_what_belongs_together_is_not_cut_apart() -> None:
    family = "👩\u200d👩\u200d👧"
    assert shortened(f"{family}{family}", text_width(family) + 14) == f"{family}…"
    assert shortened("ae\u0301e\u0301e\u0301", text_width("ae") + text_width("…") - 1) == "a…"
    assert shortened("bf16 + int8_weight_only + torch_compile", 150, tail=0.5).endswith("_compile")


def test_text_is_escaped_and_cannot_turn_what_is_around_it() -> None:
    assert (
        escaped("<b a=\"x\" c='y'> & \x00\x1b[31m")
        == "&lt;b a=&quot;x&quot; c=&#39;y&#39;&gt; &amp; \ufffd\ufffd[31m"
    )
    assert escaped("אבג 3") == "\u2068אבג 3\u2069"
    assert escaped("a\u202eb\u2069\ud800") == "ab\ufffd"
    assert escaped("two\n lines\t") == "two lines"


def bars(*marks: Mark) -> Panel:
    return Panel(title="Speed", form=Form.BARS, axis="tokens/s", marks=marks)


def test_bars_say_name_figure_and_interval_and_mark_who_shares_a_rank() -> None:
    rows = [
        Mark(
            label=f"variant {value:g}",
            value=value,
            ci=(value - 2, value + 2),
            text="±2",
            rank=rank,
            source="r",
        )
        for value, rank in ((30.0, 1), (20.0, 2), (19.0, 2))
    ]
    made = figure(bars(*rows), id_prefix="b", link=address)
    assert_sound(made.svg, "b")
    texts = said(made.svg)
    assert [each for each in texts if each.endswith("=")] == ["2=", "2="]
    assert {"1", "variant 30", "±2", "tokens/s"} <= set(texts)
    page = drawings(made.svg)[0]
    assert [each.get("href") for each in page.iter(f"{SVG}a")] == ["/results/r"] * 3
    assert len([each for each in page.iter(f"{SVG}g") if each.get("class") == "c-ties"]) == 1
    assert made.table.rows[1] == ("2", "variant 20", "20.0", "[18.0, 22.0]")


def test_an_interval_that_dwarfs_the_values_ends_in_an_arrow_and_not_the_axis() -> None:
    marks = Mark(label="a", value=10.0, ci=(8.0, 5000.0)), Mark(label="b", value=12.0)
    made = figure(bars(*marks), id_prefix="b")
    ticks = [float(each) for each in said(made.svg) if re.fullmatch(r"\d+", each)]
    assert 12 <= max(ticks) < 50
    assert made.table.rows[0][2] == "[8.00, 5,000]"


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
    ],
)
def test_the_front_goes_in_steps_through_what_is_best(
    better: Better, x_better: Better, corners: list[tuple[float, float]]
) -> None:
    marks = [Mark(label="p", x=x, value=y, on_front=True) for x, y in ((4, 5), (1, 1), (2, 3))]
    marks.append(Mark(label="off", x=0.5, value=9, on_front=False))
    panel = Panel(title="t", form=Form.FRONT, axis="a", x_axis="x", better=better, x_better=x_better)
    assert steps(marks, panel) == corners


def test_a_board_is_a_front_of_what_is_ranked() -> None:
    slower, slowest = metric("tokens_per_s", 90.0), metric("tokens_per_s", 30.0)
    rows = (
        a_row(result_id="fast", weight_bytes=400e6, backend="torch"),
        a_row(result_id="small", weight_bytes=100e6, backend="openvino", rank=2, value=slower),
        a_row(result_id="worse", weight_bytes=450e6, rank=3, value=slowest),
        a_row(result_id="wrong", weight_bytes=1e6, standing="invalid", value=metric("tokens_per_s", 999.0)),
        a_row(result_id="unknown", weight_bytes=None, rank=4),
    )
    board = a_board(*rows)
    front = front_panel(board.rows, AXES["weights"], speed_axis(board))
    assert [each.source for each in front.marks if each.on_front] == ["fast", "small"]
    assert [each.x for each in front.marks] == [400.0, 100.0, 450.0, 1.0]
    assert [each.series for each in front.marks][:2] == ["torch", "openvino"]
    assert list(front.missing.values()) == ["weights (MB) or tokens/s was not measured"]
    assert_sound(figure(front, id_prefix="f").svg, "f")


def test_a_ladder_on_a_page_has_a_row_for_each_rung_that_was_measured() -> None:
    (panel,) = CHARTS["waterfall"](BROKEN_REPORT).panels
    assert [each.valid for each in panel.marks] == [True, False]
    with pytest.raises(SpecError, match="No report is of one ladder"):
        CHARTS["waterfall"](Report("t", LADDER_REPORT.results, None))


def test_a_history_says_what_changed() -> None:
    points = tuple(
        a_point(value, result_id=f"r{number}", ci=(value - 1, value + 1), versions={"torch": torch})
        for number, (value, torch) in enumerate(((100.0, "2.12"), (90.0, "2.13")))
    )
    change = LevelChange(
        result_id="r1", measured_at=points[1].measured_at, ratio=0.9, improved=False, chance=0.01,
        versions={"torch": ("2.12", "2.13")},
    )  # fmt: skip
    made = figure(a_history(*points, changes=(change,)), id_prefix="h")
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


def test_svg_is_not_escaped_by_a_template() -> None:
    from jinja2 import Environment

    made = figure(bars(Mark(label="<i>", value=1.0)), id_prefix="b")
    page = Environment(autoescape=True).from_string("{{ chart.svg }} {{ chart.title }}").render(chart=made)
    assert page.startswith('<div class="c-chart"><svg')
    assert "&lt;i&gt;" in page
    assert "<i>" not in page


@pytest.mark.parametrize("kind", [0, 1], ids=["light", "dark"])
def test_colours_have_the_contrast_of_wcag_on_their_ground(kind: int) -> None:
    pairs = re.findall(r"(--chart-[\w-]+): (?:var\([\w-]+, )?light-dark\((#\w+), (#\w+)\)", STYLES)
    found = {name: pair[kind] for name, *pair in pairs}
    ground = found["--chart-paper"]
    for name in ("--chart-ink", "--chart-faint", "--chart-loss"):
        assert contrast(found[name], ground) >= 4.5, name
    for name in ("--chart-plain", *(f"--chart-{number}" for number in range(1, 7))):
        assert contrast(found[name], ground) >= 3, name


def test_every_class_that_is_drawn_has_a_style() -> None:
    drawings = (ROOT / "optigpu/report/charts/svg").glob("*.py")
    modules = [*drawings, ROOT / "api/charts.py", ROOT / "api/histograms.py"]
    used = {name for module in modules for name in re.findall(r"\bc-[a-z][a-z0-9-]*\b", module.read_text())}
    assert used - set(re.findall(r"\.(c-[a-z][a-z0-9-]*)", STYLES)) == {"c-s", "c-l"}, "beginnings alone"
