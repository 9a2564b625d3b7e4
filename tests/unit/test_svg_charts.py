"""Charts for pages: sound markup for any data, with labels that keep apart, and the same data as a table."""

from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from optigpu.documents.result import Gain
from optigpu.report.charts.history import Change, Moment, Timeline, samples_data
from optigpu.report.charts.ladders import Step, Steps
from optigpu.report.charts.marks import Form, Interval, Mark, Panel, Roof
from optigpu.report.charts.svg import PANELS, Figure, figure
from optigpu.report.charts.svg.axes import SMALLEST, drawable
from optigpu.report.charts.svg.markup import element
from optigpu.report.charts.svg.picture import TWO
from optigpu.vocabulary import Better
from tests.unit.svg_pages import assert_apart, assert_inside, assert_sound, drawings, words_of

numbers = st.floats(-1e12, 1e12) | st.floats(0, 1e4) | st.floats(-1e300, 1e300) | st.just(0.0)
labels = st.text(max_size=60) | st.sampled_from(
    [
        "<script>alert(1)</script>",
        "\" onload='x'",
        "😀👩‍👩‍👧 family",
        "שלום עולם",
        "مرحبا\u202e",
        "a" * 10_000,
        "]]>&amp;\x00\x1b",
    ]
)
intervals = st.none() | st.tuples(numbers, numbers).map(lambda pair: (min(pair), max(pair)))


@st.composite
def marks(draw: st.DrawFn, *, points: bool) -> Mark:
    return Mark(
        label=draw(labels),
        value=draw(numbers),
        ci=draw(intervals),
        x=draw(numbers) if points else None,
        x_ci=draw(intervals) if points else None,
        series=draw(st.sampled_from(["", "torch", "baseline"]) | labels),
        valid=draw(st.booleans()),
        claimed=draw(st.booleans()),
        on_front=draw(st.booleans()),
        rank=draw(st.none() | st.integers(1, 4)),
        limit=draw(st.none() | numbers),
        source=draw(st.none() | labels),
    )


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
        roofs=st.lists(
            st.builds(Roof, text=labels, gb_per_s=st.none() | numbers, gflop_per_s=st.none() | numbers),
            max_size=4,
        ).map(tuple)
        if form is Form.ROOFLINE
        else st.just(()),
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


ratios = st.floats(1e-6, 1e6) | st.floats(0.5, 3)
gains = st.builds(
    lambda ratio, low, high, known: Gain(
        ratio=ratio, ci=(ratio * low, ratio * high) if known else None, compared_with=0
    ),
    ratios,
    st.floats(0.01, 1),
    st.floats(1, 100),
    st.booleans(),
)
some_gain = st.none() | gains


@settings(max_examples=15)
@given(
    st.builds(
        Steps,
        title=labels,
        metric=st.just("tokens_per_s"),
        steps=st.lists(
            st.builds(
                Step,
                label=labels,
                before=ratios,
                speedup=gains,
                added=some_gain,
                alone=some_gain,
                left_out=some_gain,
                source=st.none() | labels,
            ),
            max_size=8,
        ).map(tuple),
    )
)
def test_any_ladder_is_sound_markup(steps: Steps) -> None:
    made = figure(steps, id_prefix="any", link=address)
    assert_shows(made, len(steps.steps))
    assert len(made.table.rows) == len(steps.steps)


moments = st.datetimes(datetime(1990, 1, 1), datetime(2100, 1, 1), timezones=st.just(UTC))


@settings(max_examples=15)
@example(  # its axis begins at -100
    [datetime(1999 + year, 1, 1, tzinfo=UTC) for year in range(7)],
    [(189.0 * (n == 6), None) for n in range(12)],
    [],
)
@given(
    st.lists(moments, min_size=1, max_size=12, unique=True).map(sorted),
    st.lists(st.tuples(numbers, intervals), min_size=12, max_size=12),
    st.lists(st.tuples(st.integers(0, 11), labels, st.booleans()), max_size=10),
)
def test_any_history_is_sound_markup(
    at: list[datetime], values: list[tuple[float, Interval | None]], changed: list[tuple[int, str, bool]]
) -> None:
    found = tuple(
        Moment(at=moment, value=value, ci=ci, source=f"r{number}")
        for number, (moment, (value, ci)) in enumerate(zip(at, values, strict=False))
    )
    changes = sorted({number % len(at): (text, better) for number, text, better in changed}.items())
    timeline = Timeline(
        title="any",
        axis="tokens/s",
        better=Better.HIGHER,
        moments=found,
        changes=tuple(
            Change(at=at[number], text=text, improved=better, source=f"r{number}")
            for number, (text, better) in changes
        ),
    )
    made = figure(timeline, id_prefix="any", link=address)
    assert_shows(made, sum(drawable(each.value) for each in found))
    assert len(made.table.rows) == len(found)


@settings(max_examples=15)
@given(
    st.lists(
        st.lists(st.floats(-1e9, 1e9) | st.floats(0, 10), min_size=1, max_size=40), min_size=1, max_size=5
    )
)
def test_any_samples_are_sound_markup_and_each_is_counted_once(samples: list[list[float]]) -> None:
    found = samples_data("any", "latency (ms)", samples)
    assert [sum(each.counts) + each.beyond for each in found.replicates] == [len(each) for each in samples]
    made = figure(found, id_prefix="any")
    assert_shows(made, len(found.replicates))
    counted = [sum(int(row[place + 1]) for row in made.table.rows) for place in range(len(samples))]
    assert counted == [len(each) for each in samples]
