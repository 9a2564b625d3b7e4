"""Finds the commit that made something worse: by halves, each commit by a gate against the good one.

The good and the bad commit are compared first. A commit in between counts as bad if it has more than half of the loss
that was found, so that commits without it and commits with it are equally easy to tell from that limit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from optigpu.gate.decision import Verdict
from optigpu.gate.states import Commit, Repository
from optigpu.gate.turns import GateError, Outcome, Rules, Side, Stop, compare

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """Where a search ended: the last commit without the loss and the first with it, which is its cause if nothing lies
    `between`. `outcome` compares `first_bad` with `last_good`, or is the one that decided nothing."""

    verdict: Verdict
    last_good: Commit
    first_bad: Commit
    between: tuple[Commit, ...]
    outcome: Outcome
    rules: Rules
    asked: int

    @property
    def is_cause(self) -> bool:
        return self.verdict is Verdict.WORSE and not self.between

    @property
    def exit_status(self) -> int:
        """0: the cause was found; 1: the bad commit is no worse than the good one; 2: it cannot be said."""
        if self.is_cause:
            return 0
        return 1 if self.verdict is Verdict.NO_WORSE and self.asked == 1 else 2


class Search:
    """A search among commits, oldest first, of which the first is good and the last is bad."""

    def __init__(
        self,
        repository: Repository,
        commits: list[Commit],
        command: str,
        rules: Rules,
        stop: Stop,
        tell: Tell,
    ) -> None:
        self._repository, self._commits, self._command = repository, commits, command
        self._rules, self._stop, self._tell = rules, stop, tell
        self.asked = 0

    def run(self) -> Found:
        """Raises GateError if the good or the bad commit cannot be measured."""
        good, bad = 0, len(self._commits) - 1
        whole = self._gate(good, bad, self._rules)
        if whole.verdict is not Verdict.WORSE:
            return self._found(good, bad, whole, self._rules)
        half = replace(self._rules, worse_than=abs(self._rules.share(whole.loss.estimate / 2)))
        left_out: set[int] = set()
        while candidates := [each for each in range(good + 1, bad) if each not in left_out]:
            middle = min(candidates, key=lambda each: abs(2 * each - good - bad))
            try:
                outcome = self._gate(0, middle, half)
            except GateError as error:
                self._tell(f"{self._commits[middle].shown} is left out: {error}")
                left_out.add(middle)
                continue
            if outcome.verdict is Verdict.CANNOT_SAY:
                return self._found(good, bad, outcome, half)
            good, bad = (good, middle) if outcome.verdict is Verdict.WORSE else (middle, bad)
        last = whole if (good, bad) == (0, len(self._commits) - 1) else self._gate(good, bad, half)
        return self._found(good, bad, last, half)

    def _found(self, good: int, bad: int, outcome: Outcome, rules: Rules) -> Found:
        between = tuple(self._commits[good + 1 : bad])
        return Found(
            outcome.verdict, self._commits[good], self._commits[bad], between, outcome, rules, self.asked
        )

    def _gate(self, good: int, bad: int, rules: Rules) -> Outcome:
        sides = self._side(good), self._side(bad)
        self.asked += 1
        outcome = compare(
            *sides, replace(rules, seed=self._rules.seed + self.asked), self._stop, lambda _: None
        )
        loss = rules.share(outcome.loss.estimate)
        self._tell(
            f"{self._commits[bad].shown}: {outcome.verdict} ({loss:+.1%} loss, {len(outcome.base)} pairs) than "
            f"{self._commits[good].sha[:10]}"
        )
        return outcome

    def _side(self, number: int) -> Side:
        commit = self._commits[number]
        return self._repository.side(commit.shown, commit, self._command)
