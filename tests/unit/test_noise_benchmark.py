"""Each goal of the benchmark of noise can be missed. Runs are made up."""

from collections.abc import Callable

import pytest

from benchmarks import noise
from benchmarks.load import NAME, Load, Pattern
from benchmarks.noise_goals import Figure, Ratio, Run, goals_of

SPEEDS = {"baseline": 30.0, "int8_weight_only": 150.0}
USED = f"Other processes used 1.00 of 2 cores ({NAME} 1.00) during replicate 1."


def a_run(
    load: Load | None,
    speed: float = 1.0,
    ratio: float | None = 5.0,
    reasons: tuple[str, ...] = (),
    warnings: tuple[str, ...] = (),
    note: str = USED,
) -> Run:
    """A run at `speed` times the quiet one, with intervals of a tenth to each side."""
    marked = bool(reasons or warnings)
    figures = tuple(
        Figure(
            label,
            value * speed,
            (value * speed * 0.9, value * speed * 1.1),
            reasons,
            warnings,
            (note,) if marked else (),
        )
        for label, value in SPEEDS.items()
    )
    return Run(load, 0.0, figures, Ratio(ratio, (ratio * 0.9, ratio * 1.1), ()) if ratio else None)


FOREIGN, DISTURBED = ("foreign_process",), ("disturbed",)


def good_runs() -> list[Run]:
    """Five runs of each load that meet every goal."""
    made = []
    for load in (None, *noise.LOADS):
        cores = load.cores if load else 0.0
        if cores < 1:
            made += [a_run(load, speed=1 - cores / 20)] * 5
        else:
            made += [a_run(load, speed=0.4, ratio=4.0, reasons=FOREIGN)] * 5
    return made


def with_one(runs: list[Run], load: Load | None, changed: Run) -> list[Run]:
    """The runs with the first one beside `load` changed."""
    place = next(number for number, run in enumerate(runs) if run.load == load)
    return [*runs[:place], changed, *runs[place + 1 :]]


def missed(runs: list[Run]) -> list[int]:
    return [number for number, goal in enumerate(goals_of(runs)) if not goal.met]


LIGHT, HEAVY = Load(0.5), Load(1.0)
BURSTS, HEAVY_BURSTS = Load(0.2, Pattern.BURSTS), Load(1.0, Pattern.BURSTS)
RESTLESS = noise.LOADS[-1]


@pytest.mark.parametrize(
    ("load", "changed", "goals"),
    [
        (LIGHT, lambda load: a_run(load, ratio=5.3), [0]),
        (LIGHT, lambda load: a_run(load, ratio=None), [0]),
        (BURSTS, lambda load: a_run(load, speed=0.96), [2]),
        (HEAVY, lambda load: a_run(load, 0.4, None, FOREIGN), [3]),
        (HEAVY, lambda load: a_run(load, 0.4, reasons=("drift",)), [4]),
        (HEAVY, lambda load: a_run(load, 0.4, reasons=(*FOREIGN, "interrupted")), [4]),
        (HEAVY, lambda load: a_run(load, 0.4, reasons=FOREIGN, note="Another process used them."), [4]),
        (HEAVY, lambda load: a_run(load, 0.99), []),
        (HEAVY, lambda load: a_run(load, 0.5), [4]),
        (HEAVY, lambda load: a_run(load, 0.9, warnings=DISTURBED), []),
        (HEAVY_BURSTS, lambda load: a_run(load, 0.99), []),
        (HEAVY_BURSTS, lambda load: a_run(load, 0.5), [4]),
        (RESTLESS, lambda load: a_run(load, 0.99), [5]),
        (RESTLESS, lambda load: a_run(load, 0.99, reasons=("throttled",)), [5]),
        (None, lambda load: a_run(load, warnings=("not_converged",)), [6]),
        (None, lambda load: a_run(load, reasons=FOREIGN), [6]),
    ],
)
def test_each_goal_can_be_missed(
    load: Load | None, changed: Callable[[Load | None], Run], goals: list[int]
) -> None:
    assert missed(with_one(good_runs(), load, changed(load))) == goals
