"""`benchmarks.launch_breakdown`: what it makes of a list of kernels."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.launch_breakdown import Interval, breakdown, busy

STEPS = [
    Interval("product", 0.0, 4e-6),
    Interval("norm", 5e-6, 6e-6),
    Interval("product", 10e-6, 14e-6),
    Interval("norm", 13e-6, 15e-6),
]
"""Two steps; in the second the norm begins before the product has ended."""


def test_a_step_is_its_kernels_and_the_gap_between() -> None:
    found = breakdown(STEPS, steps=2, step_s=9e-6)
    assert found.busy_s == pytest.approx(5e-6)
    assert found.gap_s == pytest.approx(4e-6)
    assert found.launches == 2
    assert found.gap_per_launch_s == pytest.approx(2e-6)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), min_size=1))
def test_time_in_which_kernels_overlap_counts_once(spans: list[tuple[int, int]]) -> None:
    intervals = [Interval("k", start, start + length) for start, length in spans]
    covered = {second for start, length in spans for second in range(start, start + length)}
    assert busy(intervals) == len(covered)


def test_what_is_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match="not 0 kernels in 1 steps"):
        breakdown([], 1, 1e-3)
    with pytest.raises(ValueError, match="not 4 kernels in 0 steps"):
        breakdown(STEPS, 0, 1e-3)
    with pytest.raises(ValueError, match="norm ends before it starts"):
        breakdown([Interval("norm", 2.0, 1.0)], 1, 1e-3)
