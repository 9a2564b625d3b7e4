"""Axes as arithmetic, labels of points, and text that is cut and escaped."""

import math
from datetime import UTC, datetime, timedelta
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optigpu.report.charts.svg.axes import axis, linear_ticks, log_ticks, tick_texts
from optigpu.report.charts.svg.history import time_axis
from optigpu.report.charts.svg.markup import escaped, shortened, text_width, wrapped
from optigpu.report.charts.svg.plane import Box, Wanted, around, placed
from optigpu.report.numbers import prefixed, superscript

finite = st.floats(-1e30, 1e30) | st.floats(-100, 100)
positive = st.floats(1e-29, 1e29) | st.floats(0.001, 1000)


@given(finite, finite, st.integers(2, 12))
def test_linear_ticks_reach_around_the_values_in_equal_steps_of_1_2_or_5(
    one: float, other: float, most: int
) -> None:
    low, high = sorted((one, other))
    ticks = linear_ticks(low, high, most)
    steps = [after - before for before, after in pairwise(ticks)]
    slack = 1e-6 * max(abs(low), abs(high), 1e-30)
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    assert 2 <= len(ticks) <= max(3, most)
    assert min(steps) == pytest.approx(max(steps), rel=1e-6)
    digits = steps[0] / 10 ** math.floor(math.log10(steps[0]) + 1e-6)
    assert any(digits == pytest.approx(each, rel=1e-3) for each in (1, 2, 5, 10))


@given(positive, positive, st.integers(2, 12))
def test_logarithmic_ticks_reach_around_the_values(one: float, other: float, most: int) -> None:
    low, high = sorted((one, other))
    ticks = log_ticks(low, high, most)
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= most + 1
    assert ticks == sorted(set(ticks))


@settings(max_examples=60)
@given(finite, finite, st.booleans(), st.floats(60, 900))
def test_the_labels_of_an_axis_keep_apart_and_lie_at_their_values(
    one: float, other: float, logarithmic: bool, length: float
) -> None:
    low, high = sorted((abs(one) + 1e-9, abs(other) + 1e-9) if logarithmic else (one, other))
    scale = axis(low, high, 10.0, 10.0 + length, logarithmic=logarithmic)
    assert len(scale.ticks) >= 2
    places = [(scale(tick.value), text_width(tick.text)) for tick in scale.ticks]
    if len(scale.ticks) > 2:
        assert all(b - a >= (wide + next_wide) / 2 for (a, wide), (b, next_wide) in pairwise(places))
    assert len({tick.text for tick in scale.ticks}) == len(scale.ticks)
    assert all(
        10.0 <= scale(value) <= 10.0 + length for value in (low, high, (low + high) / 2, -1e300, 1e300)
    )


@pytest.mark.parametrize(
    ("numbers", "step", "texts"),
    [
        ((0.0, 200.0, 400.0), 200.0, ["0", "200", "400"]),
        ((0.0, 5_000.0), 5_000.0, ["0", "5,000"]),
        ((0.0, 5_000.0, 10_000.0), 5_000.0, ["0", "5k", "10k"]),
        ((0.0, 500_000.0, 1_000_000.0, 1_500_000.0), 5e5, ["0", "0.5M", "1.0M", "1.5M"]),
        ((198.6, 198.8), 0.2, ["198.6", "198.8"]),
        ((-2e9, 0.0, 2e9), 2e9, ["-2G", "0", "2G"]),
    ],
)
def test_numbers_of_an_axis_have_one_prefix_and_the_decimals_they_need(
    numbers: tuple[float, ...], step: float, texts: list[str]
) -> None:
    assert prefixed(numbers, step) == texts


def test_numbers_of_a_logarithmic_axis_are_short() -> None:
    numbers = (2e-6, 1e-5, 0.003, 0.5, 200.0, 3000.0, 2e4, 1e6, 1e20)
    expected = ["2·10⁻⁶", "10⁻⁵", "0.003", "0.5", "200", "3,000", "20k", "1M", "10²⁰"]
    assert [superscript(each) for each in numbers] == expected
    assert tick_texts((1.0, 10.0), logarithmic=True) == ["1", "10"]


def test_less_than_the_floor_of_an_axis_lies_at_its_beginning_and_the_label_says_so() -> None:
    scale = axis(1e-12, 0.1, 0.0, 400.0, logarithmic=True, floor=1e-5)
    assert scale.ticks[0].text == "≤10⁻⁵"
    assert scale(0.0) == scale(1e-12) == 0.0
    assert scale(0.1) == 400.0


@given(
    st.datetimes(datetime(1980, 1, 1), datetime(2200, 1, 1)),
    st.floats(0, 6e9),
    st.floats(150, 800),
)
def test_the_labels_of_an_axis_of_time_keep_apart(begin: datetime, seconds: float, length: float) -> None:
    first = begin.replace(tzinfo=UTC)
    scale = time_axis([first, first + timedelta(seconds=seconds)], 40.0, 40.0 + length, most=8)
    assert 1 <= len(scale.ticks) <= 8
    places = [(scale(tick.value), text_width(tick.text, 11.0)) for tick in scale.ticks]
    assert all(b - a >= (wide + next_wide) / 2 for (a, wide), (b, next_wide) in pairwise(places))
    assert all(scale.low <= tick.value <= scale.high for tick in scale.ticks)


points = st.lists(
    st.builds(Wanted, st.floats(0, 300), st.floats(0, 200), st.floats(5, 120), st.just(13.0)),
    max_size=12,
)


@given(points)
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


@given(st.text(max_size=80), st.floats(12, 400), st.sampled_from([0.0, 0.5]))
def test_text_is_cut_to_its_width(text: str, width: float, tail: float) -> None:
    assert text_width(shortened(text, width, tail=tail)) <= max(width, text_width("…"))
    lines = wrapped(text, width, 2, tail=tail)
    assert 1 <= len(lines) <= 2
    assert all(text_width(each) <= max(width, text_width("…")) for each in lines)


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
