"""benchmarks.weight_kinds: kinds of packed weights take turns, and are compared with w4 in the same turn."""

import argparse
import random

import pytest

from benchmarks.weight_kinds import Row, decodings_of, is_goal, is_reached, measured
from optigpu.ops.decode.cpu.decoder import best_instruction_set


def options(**others: object) -> argparse.Namespace:
    given = {"preset": "tiny-llama-test", "group": 32, "threads": 1, "turns": 5, "steps": 2}
    return argparse.Namespace(
        **given | {"kinds": ["w3k", "w4k", "w8"], "instruction_sets": ["best"]} | others
    )


def row(ratios: tuple[float, ...]) -> Row:
    return Row("w4k", best_instruction_set(), 1, ratios, ratios)


def test_kinds_take_turns_and_read_what_their_bits_say() -> None:
    asked = options(instruction_sets=["best", "portable"])
    rows = measured(decodings_of(asked), asked.turns, asked.steps)
    assert [(each.kind, each.instruction_set == "portable") for each in rows] == [
        *(("w4", False), ("w3k", False), ("w3k", True), ("w4k", False), ("w4k", True), ("w8", False)),
    ]
    sizes = {each.kind: each.bytes for each in rows}
    assert sizes["w3k"] < sizes["w4"] == sizes["w4k"] < sizes["w8"]
    assert all(len(each.rates) == asked.turns and min(each.rates) > 0 for each in rows)
    assert rows[0].ratios == (1.0,) * asked.turns
    for each in rows:
        pairs = zip(each.rates, rows[0].rates, strict=True)
        assert each.ratios == pytest.approx([ours / theirs for ours, theirs in pairs])
    assert [is_goal(each) for each in rows] == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("middle", "spread", "turns", "reached"),
    [
        (1.0, 0.01, 31, True),
        (0.95, 0.01, 31, False),
        (1.0, 0.3, 31, False),  # as fast in the middle, and nobody knows
        (1.0, 0.01, 1, False),
    ],
)
def test_the_goal_is_reached_where_the_interval_says_so(
    middle: float, spread: float, turns: int, reached: bool
) -> None:
    source = random.Random(0)
    assert is_reached([row(tuple(source.gauss(middle, spread) for _ in range(turns)))]) is reached


def test_without_the_kind_that_the_goal_is_about_nothing_is_reached() -> None:
    assert not is_reached([])
