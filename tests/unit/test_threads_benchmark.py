"""The benchmark of threads: its model of the cost and its rows. Figures are made up."""

from itertools import pairwise

import pytest

from benchmarks.thread_costs import (
    StepWork,
    Terms,
    meets_s,
    memory_s,
    predicted,
    products_s,
    step_s,
)
from benchmarks.threads import Study, cores, rows_of, table_of, taken_in_turns

STEP = StepWork(bytes=1e9, flops=2e9, meets=100)
ONE = Terms(1, bytes_per_s=10e9, flops_per_s=100e9, meet_s=0.0)
TWO = Terms(2, bytes_per_s=16e9, flops_per_s=100e9, meet_s=1e-6)
SAMPLES = {
    1: {
        "tokens_per_s": (8.0, 9.0, 7.0),
        "bytes_per_s": (10e9, 11e9, 9e9),
        "flops_per_s": (100e9,) * 3,
        "meet_s": (0.0,) * 3,
    },
    2: {
        "tokens_per_s": (12.0, 18.0, 14.0),
        "bytes_per_s": (16e9, 15e9, 17e9),
        "flops_per_s": (100e9,) * 3,
        "meet_s": (1e-6, 2e-6, 1e-7),
    },
}


def test_a_step_takes_the_longer_of_memory_and_products_and_all_meetings() -> None:
    assert step_s(STEP, TWO) == pytest.approx(1 / 16 + 1e-4)
    assert (memory_s(STEP, TWO), products_s(STEP, TWO)) == pytest.approx((1 / 16, 0.01))
    assert meets_s(STEP, TWO) == pytest.approx(1e-4)
    slow = Terms(2, 16e9, flops_per_s=10e9, meet_s=0.0)
    assert step_s(STEP, slow) == pytest.approx(0.1)


def test_more_threads_are_predicted_between_the_same_bandwidth_and_that_of_one_each() -> None:
    found = predicted(STEP, [ONE, TWO], 4)
    assert found is not None
    assert found.least_s == pytest.approx(1 / 40 + 2e-4)
    assert found.most_s == pytest.approx(1 / 16 + 2e-4)


def test_a_prediction_is_no_better_than_the_products_allow() -> None:
    slow = [Terms(1, 10e9, 10e9, 0.0), Terms(2, 20e9, 10e9, 1e-6)]
    found = predicted(STEP, slow, 4)
    assert found is not None
    assert (found.least_s, found.most_s) == pytest.approx((0.05 + 2e-4, 0.05 + 2e-4))


def test_bandwidth_that_more_than_doubled_is_not_taken_back() -> None:
    found = predicted(STEP, [ONE, Terms(2, 50e9, 100e9, 0.0)], 4)
    assert found is not None
    assert (found.least_s, found.most_s) == pytest.approx((1 / 50, 1 / 50))


def test_one_core_predicts_nothing() -> None:
    assert predicted(STEP, [ONE], 4) is None


def test_rows_are_medians_and_ratios_are_of_the_same_turn() -> None:
    one, two = rows_of(STEP, (1, 2), SAMPLES)
    assert (one.tokens_per_s, one.ratio, one.bytes_per_s) == (8.0, 1.0, 10e9)
    assert (two.tokens_per_s, two.ratio) == (14.0, 2.0)  # of 1.5, 2 and 2
    assert two.share == pytest.approx(14 / 17)
    assert two.read_bytes_per_s == pytest.approx(14e9)
    assert two.model_s == pytest.approx(
        {"step": 1 / 16 + 1e-4, "memory": 1 / 16, "products": 0.01, "meetings": 1e-4}
    )
    assert [(row.reason, row.predicted) for row in (one, two)] == [(None, None)] * 2


def test_what_was_not_measured_is_null_with_a_sentence_and_a_prediction() -> None:
    row = rows_of(STEP, (1, 2, 1000), SAMPLES)[-1]
    assert [row.tokens_per_s, row.ratio, row.share, row.model_s] == [None] * 4
    assert row.reason == (
        f"Not measured: 1000 threads need as many physical cores, and this process may use {cores()}."
    )
    assert row.predicted == predicted(STEP, [ONE, Terms(2, 16e9, 100e9, 1e-6)], 1000)
    alone = rows_of(STEP, (1, 1000), {1: SAMPLES[1]})[-1]
    assert alone.predicted is None
    assert alone.reason is not None
    assert alone.reason.endswith("Not predicted: what a meeting of threads costs needs two cores.")


def test_without_one_thread_there_is_no_ratio() -> None:
    (two,) = rows_of(STEP, (2,), {2: SAMPLES[2]})
    assert two.ratio is None


def test_numbers_of_threads_take_turns_and_the_first_changes() -> None:
    asked: list[int] = []

    def sampled(count: int) -> dict[str, float]:
        asked.append(count)
        return {"order": float(len(asked))}

    found = taken_in_turns((1, 2, 4), 3, sampled)
    assert asked == [1, 2, 4, 2, 4, 1, 4, 1, 2]
    assert found == {
        1: {"order": (1.0, 6.0, 8.0)},
        2: {"order": (2.0, 4.0, 9.0)},
        4: {"order": (3.0, 5.0, 7.0)},
    }
    assert all(before < after for rows in found.values() for before, after in pairwise(rows["order"]))


def test_the_table_says_what_is_predicted() -> None:
    study = Study("made-up", STEP, {}, rows_of(STEP, (1, 2, 1000), SAMPLES))
    columns = {str(column.header): list(column.cells) for column in table_of(study).columns}
    assert columns["threads"] == ["1", "2", "1000"]
    assert columns["tokens/s"] == ["8.00", "14.00", "not measured"]
    assert str(columns["model, tokens/s"][2]).startswith("predicted: ")
