"""`benchmarks.launch_gaps`: what it makes of a list of kernels, and what it says where there is no GPU."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from benchmarks.launch_breakdown import Breakdown, Interval, KernelTime, breakdown, busy
from benchmarks.launch_gaps import Rung, figures, kernels_shown, shown

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


def test_the_costliest_kernels_are_named_with_their_share_of_a_step() -> None:
    product, norm = breakdown(STEPS, steps=2, step_s=9e-6).costliest
    assert (product.name, product.launches, norm.name, norm.launches) == ("product", 1, "norm", 1)
    assert product.seconds == pytest.approx(4e-6)
    assert norm.seconds == pytest.approx(1.5e-6)
    many = [Interval(str(index), index, index + 0.1 * index) for index in range(9)]
    assert [kernel.name for kernel in breakdown(many, 1, 9.0).costliest] == ["8", "7", "6", "5", "4"]


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


def test_the_table_has_the_time_of_a_rung_and_what_it_is_made_of() -> None:
    rung = Rung("eager", 3_000_000, Breakdown(9e-6, 5e-6, 2, (KernelTime("product", 1, 4e-6),)))
    screen = Console(width=140)
    with screen.capture() as printed:
        screen.print(shown("a step", [rung], bandwidth=1e12))
        screen.print(kernels_shown(rung))
    text = " ".join(printed.get().split())
    for words in (
        "eager",
        "9.0 us",
        "5.0 us",
        "4.0 us",
        "2.00 us",
        "3.0 us",
        "33%",
        "product",
    ):
        assert words in text, text
    document = figures(rung)
    assert (document["rung"], document["busy_s"], document["launches"]) == ("eager", 5e-6, 2)
    assert document["gap_s"] == pytest.approx(4e-6)
    assert document["costliest"] == [{"name": "product", "launches": 1, "seconds": 4e-6}]


def test_without_a_gpu_nothing_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.launch_gaps"],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "Not measured: this machine has no NVIDIA GPU.\n"
