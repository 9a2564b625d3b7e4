"""Finds the commit that made something worse: by halves, each commit by a gate against the good one.

The good and the bad commit are compared first. A commit in between counts as bad if it has more than half of the loss
that was found, so that commits without it and commits with it are equally easy to tell from that limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from optigpu.documents.gates import GateOutcome, GateVerdict
from optigpu.gate.states import Commit, Repository
from optigpu.gate.turns import GateError, Rules, Stop, compare


@dataclass(frozen=True)
class Found:
    """Where a search ended: the last commit without the loss and the first with it, which is its cause if nothing lies
    `between`. `outcome` compares `first_bad` with `last_good`, or is the one that decided nothing."""

    last_good: Commit
    first_bad: Commit
    between: tuple[Commit, ...]
    outcome: GateOutcome
    asked: int

    @property
    def is_cause(self) -> bool:
        return self.outcome.verdict is GateVerdict.WORSE and not self.between

    @property
    def exit_status(self) -> int:
        """0: the cause was found; 1: the bad commit is no worse than the good one; 2: it cannot be said."""
        if self.is_cause:
            return 0
        return 1 if self.outcome.verdict is GateVerdict.NO_WORSE and self.asked == 1 else 2


@dataclass
class Search:
    """A search among `commits`, oldest first: the first is good and the last is bad. `tell` hears of each step."""

    repository: Repository
    commits: list[Commit]
    command: str
    rules: Rules
    stop: Stop
    tell: Callable[[str], None]
    asked: int = 0

    def run(self) -> Found:
        """Raises GateError if the good or the bad commit cannot be measured."""
        good, bad = 0, len(self.commits) - 1
        outcome = self._gate(good, bad)
        if outcome.verdict is not GateVerdict.WORSE:
            return self._found(good, bad, outcome)
        self.rules = replace(self.rules, worse_than=outcome.loss / 2)
        left_out: set[int] = set()
        while candidates := [each for each in range(good + 1, bad) if each not in left_out]:
            middle = min(candidates, key=lambda each: abs(2 * each - good - bad))
            try:
                outcome = self._gate(0, middle)
            except GateError as error:
                self.tell(f"{self.commits[middle].shown} is left out: {error}")
                left_out.add(middle)
                continue
            if outcome.verdict is GateVerdict.CANNOT_SAY:
                return self._found(good, bad, outcome)
            good, bad = (good, middle) if outcome.verdict is GateVerdict.WORSE else (middle, bad)
        return self._found(good, bad, outcome if len(self.commits) == 2 else self._gate(good, bad))

    def _found(self, good: int, bad: int, outcome: GateOutcome) -> Found:
        between = tuple(self.commits[good + 1 : bad])
        return Found(self.commits[good], self.commits[bad], between, outcome, self.asked)

    def _gate(self, good: int, bad: int) -> GateOutcome:
        self.asked += 1
        base, head = (
            self.repository.side(commit.shown, commit, self.command)
            for commit in (self.commits[good], self.commits[bad])
        )
        rules = replace(self.rules, seed=self.rules.seed + self.asked)
        outcome = compare(base, head, rules, self.stop, lambda _: None)
        how = f"{outcome.verdict} than {base.name[:10]} ({outcome.loss:+.1%}, {len(outcome.base_figures)} pairs)"
        self.tell(f"{head.label}: {how}")
        return outcome
