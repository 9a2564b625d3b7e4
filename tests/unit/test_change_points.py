"""Where the level of a series changes: what is found, and how often something is found where nothing is."""

import numpy as np
import pytest

from optigpu.documents.views import History, HistoryPoint, Standing
from optigpu.statistics.change_points import FEWEST, SHORTEST, change_points
from optigpu.statistics.levels import with_changes
from optigpu.vocabulary import Better, DeviceKind, utc_now


def test_a_series_without_a_change_has_one_in_a_twentieth_of_cases() -> None:
    random = np.random.default_rng(1)
    draws = [random.normal(size=20) for _ in range(100)] + [random.standard_t(3, size=20) for _ in range(100)]
    found = sum(bool(change_points(draw.tolist())) for draw in draws)
    assert found <= 20  # of 200, of which 10 are expected: more than 20 come in 1 of 600


def test_a_step_of_three_standard_deviations_is_found_where_it_is() -> None:
    random = np.random.default_rng(2)
    places = []
    for _ in range(50):
        draw = np.concatenate([random.normal(size=12), random.normal(3, size=12)])
        places += [min(change_points(draw.tolist()), key=lambda at: abs(at - 12), default=-1)]
    assert sum(abs(at - 12) <= 1 for at in places) >= 45


@pytest.mark.parametrize(
    "values",
    [[], [1.0], [1.0] * 50, [0.0, 1.0] * (FEWEST // 2 - 1), [1.0] * 10 + [9.0] * (SHORTEST - 2) + [1.0] * 10],
)
def test_nothing_is_found_in_too_little_in_what_stands_still_or_in_an_outlier(values: list[float]) -> None:
    assert change_points(values) == ()


def test_a_change_says_by_how_much_and_which_versions_came_with_it() -> None:
    before, after = {"torch": "2.13.0", "optigpu": "0.1.0"}, {"torch": "2.14.0", "optigpu": "0.1.0"}
    points = [
        *(point(10.0 + number % 2, before) for number in range(8)),
        *(point(21.0, after) for _ in range(8)),
    ]
    (change,) = with_changes(history(points)).changes
    assert change.ratio == pytest.approx(2.0, rel=0.01)
    assert (change.improved, change.result_id) == (True, points[8].result_id)
    assert change.versions == {"torch": ("2.13.0", "2.14.0")}
    assert not with_changes(history(points, Better.LOWER)).changes[0].improved
    assert with_changes(history([*points, point(0.0, after)])).changes == ()


def point(value: float, versions: dict[str, str]) -> HistoryPoint:
    return HistoryPoint(
        result_id=f"{value} {id(object())}",
        measured_at=utc_now(),
        standing=Standing.EARLIER,
        value=value,
        ci=None,
        replicates=3,
        versions=versions,
        warnings=(),
    )


def history(points: list[HistoryPoint], better: Better = Better.HIGHER) -> History:
    return History(
        workload={"kind": "generate"},
        model="preset:gpt2",
        label="bf16",
        backend="torch",
        device=DeviceKind.CPU,
        hardware="1x Test CPU",
        metric="tokens_per_s",
        unit="1/s",
        better=better,
        points=tuple(points),
    )
