"""The benchmark of noise: its load does what it says, each of its goals can be missed, and without a load nothing is
measured."""

import itertools
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import noise
from benchmarks.document import write
from benchmarks.load import NAME, PERIOD_S, PROGRAM, Load, Pattern, beside, schedule
from benchmarks.noise_goals import Figure, Goal, Ratio, Run, goals_of, grid_of
from optigpu.report import markdown
from optigpu.vocabulary import OptiGPUError

SPEEDS = {"baseline": 30.0, "int8_weight_only": 150.0}
USED = f"Other processes used 1.00 of 2 cores ({NAME} 1.00) during replicate 1."
NOT_A_PROGRAM = ("no-such-program",)
SILENT = (sys.executable, "-c", "import sys; sys.exit('The licence has expired.')")


@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("cores", [0.2, 0.5])
def test_a_schedule_has_the_mean_that_was_asked_for(pattern: Pattern, cores: float) -> None:
    parts = list(itertools.islice(schedule(pattern, cores, seed=1), 4000))
    work_s, rest_s = (sum(column) for column in zip(*parts, strict=True))
    assert work_s / (work_s + rest_s) == pytest.approx(cores, rel=0.03)
    longest = max(work for work, _ in parts)
    assert longest <= PERIOD_S if pattern is Pattern.STEADY else longest > 1


def test_bursts_are_the_same_for_one_seed_and_others_for_another() -> None:
    first, again, other = (
        list(itertools.islice(schedule(Pattern.BURSTS, 0.5, seed), 20)) for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_whole_core_never_rests() -> None:
    assert {rest for _, rest in itertools.islice(schedule(Pattern.STEADY, 1.0, 0), 100)} == {0.0}


@pytest.mark.parametrize(
    ("load", "shares"),
    [
        (Load(0.2), (0.2,)),
        (Load(1.0), (1.0,)),
        (Load(0.5, Pattern.BURSTS), (0.5,)),
        (Load(1.0, Pattern.BURSTS), (0.5, 0.5)),
    ],
)
def test_a_load_is_shared_among_processes_that_can_bear_it(load: Load, shares: tuple[float, ...]) -> None:
    assert load.shares == shares


def test_the_load_runs_under_its_name_and_ends_with_the_block() -> None:
    with beside(Load(1.0, Pattern.BURSTS, nice=19), seed=3) as running:
        processes = running.processes
        assert [process.name() for process in processes] == [NAME] * 2
        assert {process.nice() for process in processes} == {19}
        assert running.used_cores() >= 0
    assert not any(process.is_running() for process in processes)


def test_a_load_that_has_ended_spoils_the_figure() -> None:
    with beside(Load(0.2), seed=0) as running:
        running.processes[0].kill()
        running.processes[0].wait()
        with pytest.raises(OptiGPUError, match="ended before the measurement did"):
            running.used_cores()


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (NOT_A_PROGRAM, "No such file or directory: no-such-program"),
        (SILENT, "The licence has expired"),
    ],
)
def test_a_load_program_that_cannot_start_is_one_sentence_and_no_figure(
    program: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "noise.json"
    monkeypatch.setattr(sys, "argv", ["noise", "--output", str(output)])
    monkeypatch.setenv("COLUMNS", "300")
    assert noise.main(program) == 2
    printed = capsys.readouterr()
    assert f"The load program could not start ({why}), so nothing was measured." in printed.err
    assert printed.out == ""
    assert not output.exists()


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


def test_good_runs_meet_every_goal_with_all_their_counts() -> None:
    goals = goals_of(good_runs())
    assert [(goal.held, goal.of, goal.least) for goal in goals] == [
        (20, 20, 20), (40, 40, 38), (10, 10, 10), (10, 10, 10), (20, 20, 20), (10, 10, 10), (10, 10, 10),
        (20, 20, 19),
    ]  # fmt: skip
    assert missed(good_runs()) == []


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


def test_one_interval_of_twenty_may_miss_the_quiet_figure() -> None:
    runs = with_one(good_runs(), LIGHT, a_run(LIGHT, speed=0.7))
    assert missed(runs) == []  # two of 40 figures
    assert missed([*runs, a_run(LIGHT, speed=0.7)]) == [1]


def test_one_interval_of_twenty_of_a_ratio_may_miss_the_quiet_mean() -> None:
    runs = with_one(good_runs(), LIGHT, a_run(LIGHT, ratio=7.0))
    assert missed(runs) == [0]
    assert missed(with_one(runs, BURSTS, a_run(BURSTS, ratio=7.0))) == [0, 7]


def test_without_runs_no_goal_is_met() -> None:
    assert missed([]) == list(range(8))
    assert not Goal("", 0, 0, 0).met


def test_the_table_has_a_line_for_each_load() -> None:
    text = markdown(grid_of(good_runs()))
    assert "| quiet | 0.00 | 30.0 (+0.0%) | 150 (+0.0%) | 5.00 (+0.0%) |" in text
    assert "| 0.5 cores, steady | 0.00 | 29.2 (-2.5%) |" in text
    assert (
        "| 1 core, bursts | 0.00 | 12.0 (-60.0%) | 60.0 (-60.0%) | 4.00 (-20.0%) | foreign_process 10 |"
        in text
    )
    assert "1 core, steady, nice 19" in text


def test_the_load_has_its_own_priority_whatever_that_of_who_starts_it() -> None:
    """Not one relative to a starter, who may measure at the highest."""
    start = ["nice", "-n", "5", *PROGRAM]
    with beside(Load(0.2, nice=7), seed=0, program=start) as running:
        assert {process.nice() for process in running.processes} == {7}


def test_runs_are_compared_with_the_quiet_ones_of_their_sitting() -> None:
    """On a machine of half the speed, where the ratio is another one too."""

    def elsewhere(run: Run) -> Run:
        figures = [
            replace(each, value=each.value / 2, ci=each.ci and (each.ci[0] / 2, each.ci[1] / 2))
            for each in run.figures
        ]
        ratio = run.ratio and Ratio(run.ratio.value / 2, (2.2, 2.8), run.ratio.reasons)
        return replace(run, figures=tuple(figures), ratio=ratio, sitting=1)

    both = [*good_runs(), *map(elsewhere, good_runs())]
    assert missed(both) == []
    assert 0 in missed([replace(run, sitting=0) for run in both])


def test_a_sitting_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    options = Namespace(
        model="preset:tiny-llama-test", stack="int8_weight_only", new_tokens=8, replicates=2, seconds=0.5,
        usual_priority=False, output=tmp_path / "noise.json",
    )  # fmt: skip
    runs = good_runs()
    write(options.output, "noise", noise.document_of(options, runs))
    assert noise.runs_before(options) == runs
    assert noise.turns_done(runs) == 5
    assert noise.turns_done([run for run in runs if run.load != LIGHT]) == 0
    options.seconds = 1.0
    with pytest.raises(OptiGPUError, match="has nothing of the same job; leave out --resume"):
        noise.runs_before(options)
