"""`python -m benchmarks.gate`: how often `optigpu gate` is wrong, and how often it finds what it says it finds.

Simulated: pairs of runs on machines that are disturbed in eleven ways, with changes of 0, 2, 5 and 10% planted.
`--real N` adds N gates of a real command against itself beside one busy core, and N / 10 of each planted change;
`--bisect N` searches 32 commits for a planted 5%. Runs are added to those of the file of `--output`.
"""

import argparse
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.document import say, write
from benchmarks.load import Load, beside
from optigpu.documents.fields import read_json
from optigpu.documents.gates import GateVerdict
from optigpu.gate.bisect import Search
from optigpu.gate.decision import loss_of, verdicts
from optigpu.gate.figures import wanted
from optigpu.gate.states import worktrees
from optigpu.gate.turns import GateError, Rules, Side, compare
from optigpu.report.formats import console, tabulated, terminal
from optigpu.statistics.estimates import Array

LIMIT = 0.03
CHANGES = (0.0, 0.02, 0.05, 0.10)
PAIRS = (12, 40, 120)
RUNS, CLAIMS, AT_ONCE = 1000, 200, 100
MOST_FALSE, LEAST_FOUND, LEAST_BISECTED = 0.02, 0.8, 0.9
COMMITS = 32
LOOP = (
    "import sys, time; count = int(sys.argv[1]); begun = time.perf_counter(); [None for _ in range(count)]; "
    "print('ms:', 1000 * (time.perf_counter() - begun))"
)
COUNT = 2_000_000


def _states(draw: np.random.Generator, shape: tuple[int, int], begins: float, ends: float) -> Array:
    """1 while a neighbour works, which begins and ends at random, else 0."""
    found = np.zeros(shape)
    for run in range(1, shape[1]):
        toss = draw.random(shape[0])
        found[:, run] = np.where(found[:, run - 1] > 0, toss > ends, toss < begins)
    return found


def _correlated(draw: np.random.Generator, shape: tuple[int, int], of: float, spread: float) -> Array:
    found = draw.normal(0, spread, shape)
    for run in range(1, shape[1]):
        found[:, run] = of * found[:, run - 1] + np.sqrt(1 - of**2) * found[:, run]
    return found


Noise = Callable[[np.random.Generator, tuple[int, int]], Array]
NOISES: Mapping[str, Noise] = {
    "0.5%": lambda draw, shape: draw.normal(0, 0.005, shape),
    "2%": lambda draw, shape: draw.normal(0, 0.02, shape),
    "5%": lambda draw, shape: draw.normal(0, 0.05, shape),
    "15%": lambda draw, shape: draw.normal(0, 0.15, shape),
    "heavy tails": lambda draw, shape: 0.015 * draw.standard_t(2, shape),
    "slow drift": lambda draw, shape: _correlated(draw, shape, 0.95, 0.06) + draw.normal(0, 0.01, shape),
    "fast drift": lambda draw, shape: _correlated(draw, shape, 0.5, 0.06) + draw.normal(0, 0.01, shape),
    "a neighbour of 35%": lambda draw, shape: (
        0.35 * _states(draw, shape, 0.03, 0.06) + draw.normal(0, 0.02, shape)
    ),
    "spikes of 30% in 12%": lambda draw, shape: (
        draw.exponential(0.3, shape) * (draw.random(shape) < 0.12) + draw.normal(0, 0.01, shape)
    ),
    "two modes 8% apart": lambda draw, shape: (
        0.08 * (draw.random(shape) < 0.5) + draw.normal(0, 0.005, shape)
    ),
    "the second run is 3% slower": lambda draw, shape: (
        0.03 * (np.arange(shape[1]) % 2) + draw.normal(0, 0.01, shape)
    ),
}
"""Logarithms of run times [runs, 2 * pairs], in the order of time."""


@dataclass(frozen=True)
class Simulated:
    """Shares of runs that ended `worse` and `no worse`, by planted change; what the median run without a change says
    is the smallest loss that it would have found, and the share of runs that found what one of these said."""

    noise: str
    pairs: int
    worse: tuple[float, ...]
    no_worse: tuple[float, ...]
    said: float
    found: float


@dataclass(frozen=True)
class Real:
    """One gate of the real command: its verdict or error, the loss with its interval (None: too few pairs for one), and
    the smallest loss that it says it would have found."""

    planted: float
    verdict: str
    loss: float
    ci: tuple[float, float] | None
    said: float | None
    pairs: int
    seconds: float


def simulated(noise: str, pairs: int, draw: np.random.Generator) -> Simulated:
    """All planted changes under one noise."""
    limit = float(np.log1p(LIMIT))
    ended = [_ended(_losses(noise, pairs, RUNS, draw) + np.log1p(change), limit) for change in CHANGES]
    without = _losses(noise, pairs, CLAIMS, draw)
    said = np.array([_said(losses, limit) for losses in without])
    found = _ended(_losses(noise, pairs, CLAIMS, draw) + said[:, None], limit)
    return Simulated(
        noise,
        pairs,
        tuple(float((each == 1).mean()) for each in ended),
        tuple(float((each == -1).mean()) for each in ended),
        float(np.expm1(np.median(said))),
        float((found == 1).mean()),
    )


def _losses(noise: str, pairs: int, runs: int, draw: np.random.Generator) -> Array:
    """[runs, pairs] of the same against the same: which of a pair's two runs is the head's is drawn."""
    times = NOISES[noise](draw, (runs, 2 * pairs)).reshape(runs, pairs, 2)
    return np.asarray(draw.choice((-1.0, 1.0), (runs, pairs)) * (times[..., 1] - times[..., 0]))


def _ended(losses: Array, limit: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    """How each run [runs] ended: its first verdict, else 0."""
    parts = [
        verdicts(losses[at : at + AT_ONCE], losses.shape[1], limit) for at in range(0, len(losses), AT_ONCE)
    ]
    all_of_them = np.concatenate(parts)
    first = (all_of_them != 0).argmax(axis=1)
    return np.asarray(np.take_along_axis(all_of_them, first[:, None], axis=1)[:, 0])


def _said(losses: Array, limit: float) -> float:
    """What a run says, which ends where it is decided."""
    decided = np.flatnonzero(verdicts(losses, len(losses), limit))
    found = loss_of(losses[: decided[0] + 1] if len(decided) else losses, len(losses), limit).findable
    assert found is not None
    return found


def rules_of(seconds: float, seed: int) -> Rules:
    return Rules(wanted("ms", None), LIMIT, seconds, seed)


def loop(change: float) -> str:
    return f'{sys.executable} -S -c "{LOOP}" {round(COUNT * (1 + change))}'


def real(change: float, seconds: float, seed: int) -> Real:
    """One gate of the loop against itself with so many more turns, beside one busy core."""
    base, head = (Side(name, name, loop(more), Path()) for name, more in (("base", 0.0), ("head", change)))
    rules = rules_of(seconds, seed)
    try:
        with beside(Load(1.0), seed):
            outcome = compare(base, head, rules, lambda: None, lambda _: None)
    except GateError as error:
        return Real(change, str(error), 0.0, None, None, 0, seconds)
    count = len(outcome.base_figures)
    return Real(
        change,
        outcome.verdict,
        outcome.loss,
        outcome.loss_ci,
        outcome.smallest_loss_found,
        count,
        outcome.seconds,
    )


def bisected(seconds: float, seed: int) -> bool:
    """Whether the planted one of 32 commits is found, beside one busy core."""
    bad = random.Random(seed).randrange(1, COMMITS)
    with tempfile.TemporaryDirectory() as folder:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")

        def git(*arguments: str) -> None:
            subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)

        git("init", "--quiet")
        for number in range(COMMITS):
            (Path(folder) / "run.sh").write_text(loop(0.05 if number >= bad else 0.0))
            git("add", "--all")
            git("commit", "--quiet", "--allow-empty", "--message", str(number))
        with beside(Load(1.0), seed), worktrees(Path(folder), None, lambda: None) as project:
            commits = project.between(project.commit(f"HEAD~{COMMITS - 1}"), project.commit("HEAD"))
            found = Search(project, commits, "sh run.sh", rules_of(seconds, seed), lambda: None, print).run()
    return found.is_cause and found.first_bad.subject == str(bad)


def main() -> int:
    """Simulates or measures, adds to the file, and prints the goals."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    parser.add_argument("--real", type=int, default=0, help="gates of the same against the same")
    parser.add_argument("--bisect", type=int, default=0, help="searches")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each real gate")
    parser.add_argument("--output", type=Path, default=Path("docs/results/gate.json"))
    options = parser.parse_args()
    before: Any = read_json(options.output) if options.output.exists() else {}
    figures: dict[str, Any] = {name: before.get(name, []) for name in ("simulated", "real", "bisected")}
    plan = [0.0] * options.real + [change for change in CHANGES[1:] for _ in range(options.real // 10)]
    for change in track(plan, "real gates", console=console(stderr=True), disable=not plan):
        figures["real"].append(asdict(real(change, options.seconds, len(figures["real"]))))
        write(options.output, "gate", figures)
    for _ in range(options.bisect):
        figures["bisected"].append(bisected(options.seconds, len(figures["bisected"])))
        write(options.output, "gate", figures)
    if not (options.real or options.bisect):
        draw = np.random.default_rng(0)
        found = [simulated(noise, pairs, draw) for pairs in PAIRS for noise in NOISES]
        figures["simulated"] = [asdict(each) for each in found]
        write(options.output, "gate", figures)
        show(found)
    return say(goals(figures))


def show(found: list[Simulated]) -> None:
    """A line for each noise and number of pairs: what ended `worse` and `no worse`, by planted change."""

    def cell(number: int) -> Callable[[Simulated], str]:
        return lambda each: f"{each.worse[number]:.1%} / {each.no_worse[number]:.0%}"

    cells: dict[str, Callable[[Simulated], str]] = {
        "noise of one run": lambda each: each.noise,
        "pairs:": lambda each: str(each.pairs),
        **{f"{change:.0%}:": cell(number) for number, change in enumerate(CHANGES)},
        "says it finds:": lambda each: f"{each.said:.1%}",
        "finds that:": lambda each: f"{each.found:.0%}",
    }
    console().print(terminal(tabulated("worse / no worse than 3%, by planted change", found, cells)))


def goals(figures: Mapping[str, Any]) -> list[tuple[str, bool]]:
    """The goals of what was simulated and measured so far."""
    found = []
    if figures["simulated"]:
        false = max(each["worse"][0] for each in figures["simulated"])
        power = np.mean([each["found"] for each in figures["simulated"]])
        found.append(
            (f"simulated: the same was called worse in at most {false:.1%} (2%)", false <= MOST_FALSE)
        )
        found.append((f"simulated: {power:.0%} found what was said to be found (80%)", power >= LEAST_FOUND))
    same = [each for each in figures["real"] if each["planted"] == 0]
    if same:
        false = np.mean([each["verdict"] == GateVerdict.WORSE for each in same])
        found.append((f"real: {false:.1%} of {len(same)} called worse (2%)", bool(false <= MOST_FALSE)))
    if figures["bisected"]:
        share = np.mean(figures["bisected"])
        count = len(figures["bisected"])
        found.append((f"bisect: {share:.0%} of {count} found (90%)", bool(share >= LEAST_BISECTED)))
    return found


if __name__ == "__main__":
    sys.exit(main())
