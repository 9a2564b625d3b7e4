"""The goals of benchmarks: which peers count, and that each goal can be missed. Figures are made up."""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks import noise
from benchmarks.load import NAME, Load, Pattern
from benchmarks.noise_goals import Figure, Ratio, Run, goals_of
from benchmarks.stacks import Q4_0
from benchmarks.vs_cases import (
    F16,
    FP32,
    IN_GOALS,
    OURS,
    Q4_0_HEAD,
)
from benchmarks.vs_goals import counting, quality_goal, speed_goals


def line(name: str, rates: tuple[float, ...], ours: tuple[float, ...] = (), **more: Any) -> dict[str, Any]:
    """A row of a job; `ours` are the rates of the goals' stack in it."""
    ratio = rates[0] / 100 if rates else None
    measured = {
        "ratio": ratio,
        "ratio_interval": ratio and (ratio, ratio),
        "rate": rates[0] if rates else None,
    }
    about: dict[str, Any] = {
        "weight_bytes": 83_000_000,
        "reason": None if rates else "no compiler",
        "verdict": (),
        "warnings": (),
        "details": {},
        "ours": ours,
        "ours_verdict": (),
        "group": 0,
    }
    return {"name": name, "rates": rates} | measured | about | more


def scored(**divergences: float) -> list[dict[str, Any]]:
    """Lines of a case of quality: ours at 0.01, and others by name."""
    return [{"name": IN_GOALS.name, "kld_mean": 0.01}] + [
        {"name": name, "kld_mean": value} for name, value in divergences.items()
    ]


def test_a_goal_is_a_ratio_of_pairs_of_processes_with_all_in_4_bits_beside_it() -> None:
    ours = (280.0, 140.0, 280.0)
    lines = [
        line(Q4_0.name, (100.0, 50.0, 100.0), ours),
        line(Q4_0_HEAD.name, (112.0, 56.0, 112.0), ours),
    ]
    over_q4_0, over_best = speed_goals("decode-gpt2", lines, scored(**{Q4_0.name: 0.02}))
    assert over_q4_0["reached"]
    assert over_q4_0["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 2.7x llama.cpp Q4_0: 2.80x [2.80, 2.80]; "
        "llama.cpp Q4_0, head too: 2.50x [2.50, 2.50]"
    )
    assert not over_best["reached"], "no peer counts"
    assert over_best["goal"].endswith("the best of the peers that count: not measured")
    short = [line(Q4_0.name, (100.0,), (269.0,)), line(Q4_0_HEAD.name, ())]
    below, _ = speed_goals("decode-gpt2", short, [])
    assert not below["reached"]
    assert below["goal"].endswith("2.69x; llama.cpp Q4_0, head too: not measured")


def test_peers_count_up_to_a_tenth_above_our_divergence() -> None:
    lines = scored(**{"as good": 0.011, "worse": 0.0111, OURS[0].name: 0.005, FP32.name: 0.0})
    assert counting([*lines, {"name": "missing", "reason": "not installed"}]) == frozenset(
        {"as good", FP32.name}
    )
    assert counting([each for each in lines if each["name"] != IN_GOALS.name]) is None


def test_the_best_peer_is_that_beside_which_ours_is_least_faster() -> None:
    divergences = scored(**{"slow": 0.0, "fast": 0.011, "rough": 0.02, F16.name: 0.0})
    lines = [
        line(Q4_0.name, ()),
        line("slow", (100.0,), (300.0,)),
        line("fast", (150.0,), (270.0,)),
        line("rough", (200.0,), (280.0,)),
        line(F16.name, (), left_out=True),
    ]
    _, best = speed_goals("decode-gpt2", lines, divergences)
    assert best["reached"]
    assert best["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 1.6x the best of the peers that count: 1.80x fast, of 2; "
        "1.40x rough, which does not count; left out: llama.cpp F16"
    )
    _, best = speed_goals(
        "decode-gpt2", [*lines, line("faster", (200.0,), (300.0,))], divergences + scored(faster=0.0)[1:]
    )
    assert not best["reached"]
    assert "1.50x faster, of 3" in best["goal"]


@pytest.mark.parametrize("whose", ["verdict", "ours_verdict"])
def test_a_result_that_is_not_valid_reaches_no_goal(whose: str) -> None:
    spoilt: dict[str, Any] = {whose: ("foreign_process",)}
    lines = [line(Q4_0.name, (100.0,), (900.0,), **spoilt), line(Q4_0_HEAD.name, ())]
    lines.append(line("peer", (100.0,), (900.0,), **spoilt))
    name = {"verdict": ("llama.cpp Q4_0", "peer"), "ours_verdict": (IN_GOALS.name, IN_GOALS.name)}[whose]
    for goal, of in zip(speed_goals("prefill-gpt2", lines, scored(peer=0.0)), name, strict=True):
        assert not goal["reached"]
        assert "9.00x" in goal["goal"]
        assert goal["goal"].endswith(f"; not valid ({of}: foreign_process)")


@pytest.mark.parametrize("ours", [0.004, 0.01, 0.02])
def test_quality_is_at_most_that_of_q4_0(ours: float) -> None:
    lines = [{"name": Q4_0.name, "kld_mean": 0.01}, {"name": IN_GOALS.name, "kld_mean": ours}]
    goal = quality_goal("quality-tiny", lines)
    assert goal["reached"] == (ours <= 0.01)
    assert goal["goal"].endswith(f"{ours:.5f} against 0.01000")
    assert not quality_goal("quality-tiny", lines[:1])["reached"]


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
