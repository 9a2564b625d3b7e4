"""How long the parts of a job's replicates take: guessed at first, then as they were measured."""

from collections.abc import Iterable, Mapping

from optigpu.job.estimate import COMPILE, SAMPLE, START, Guess

Unit = tuple[int, int]
"""A replicate of a variant: the variant's index and the replicate's number."""


class Pace:
    """What is left of each replicate, and how long that is expected to take.

    A part of a replicate is expected to take as long as in the same variant's replicate before, or as guessed, times
    the factor by which that part of other variants in this replicate differed from what was expected of it. Guesses
    are taken to be wrong all alike; of what was measured before, only the known share of the variants is.
    """

    def __init__(self, guesses: Mapping[int, Guess], replicates: int) -> None:
        self._guesses, self._replicates = dict(guesses), replicates
        self._left = {
            (index, number): dict.fromkeys(guess.parts(number))
            for index, guess in guesses.items()
            for number in range(replicates)
        }
        # What each part took, in seconds: by its name and the replicate's number, then by the variant's index.
        self._took: dict[tuple[str, int], dict[int, float]] = {}
        self._expected: dict[tuple[str, int], dict[int, float]] = {}
        # How long a replicate that is being sampled has been.
        self._sampled: dict[Unit, float] = {}
        for part in {part for guess in guesses.values() for part in guess.seconds}:
            self._expect(part)

    @property
    def has_measured(self) -> bool:
        """Whether anything is known but guesses."""
        return bool(self._took)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return not self._left

    def has(self, unit: Unit) -> bool:
        """Whether something of this replicate is left to do."""
        return unit in self._left

    def add(self, unit: Unit) -> None:
        """One more replicate of a variant, as long as its last one."""
        index, number = unit
        if unit not in self._left and index in self._guesses:
            self._left[unit] = dict.fromkeys(self._guesses[index].parts(number))
            self._replicates = max(self._replicates, number + 1)
            for part in self._left[unit]:
                self._expect(part)

    def drop(self, units: Iterable[Unit]) -> None:
        """These replicates are over, whatever of them was left."""
        for unit in units:
            self._left.pop(unit, None)

    def skip(self, unit: Unit, parts: Iterable[str]) -> None:
        """The replicate does not need these parts, whatever they take elsewhere."""
        for part in parts:
            self._left.get(unit, {}).pop(part, None)

    def units_of(self, index: int) -> list[Unit]:
        """What is left of a variant."""
        return [unit for unit in self._left if unit[0] == index]

    def take(self, unit: Unit, part: str, seconds: float) -> None:
        """The part is done and took so long."""
        self._left.get(unit, {}).pop(part, None)
        self._learn(unit, part, seconds)

    def compiled(self, unit: Unit, seconds: float) -> None:
        """Of the replicate's start so much was compiling, which its later ones are not expected to repeat."""
        if COMPILE in self._left.get(unit, {}):
            self._learn(unit, START, max(0.0, self.expected_s(unit, START) - seconds))
            self.take(unit, COMPILE, seconds)

    def sample(self, unit: Unit, seconds: float) -> None:
        """A round of the replicate is done."""
        self._sampled[unit] = self._sampled.get(unit, 0.0) + seconds

    def sample_on(self, unit: Unit, seconds: float) -> None:
        """A round of so many seconds begins: sampling takes that much longer than it has at least."""
        least_s = self._sampled.get(unit, 0.0) + seconds
        if least_s > self.expected_s(unit, SAMPLE):
            self._learn(unit, SAMPLE, least_s)

    def end_sampling(self, unit: Unit) -> None:
        """No round follows."""
        if SAMPLE in self._left.get(unit, {}):
            self.take(unit, SAMPLE, self._sampled.get(unit, 0.0))

    def expected_s(self, unit: Unit, part: str) -> float:
        """How long the part takes in all."""
        index, number = unit
        return self._expected.get((part, number), {}).get(index, 0.0)

    def part_left_s(self, unit: Unit, part: str, most_sample_s: float) -> float:
        """How long the part still takes, if it is not done. A replicate is sampled for `most_sample_s` at most."""
        if part not in self._left.get(unit, {}):
            return 0.0
        expected_s = self.expected_s(unit, part)
        if part != SAMPLE:
            return expected_s
        return max(0.0, min(expected_s, most_sample_s) - self._sampled.get(unit, 0.0))

    def left_s(self, most_sample_s: float, units: Iterable[Unit] | None = None) -> float:
        """How long these replicates, or all, still take."""
        chosen = self._left if units is None else [unit for unit in units if unit in self._left]
        return sum(
            self.part_left_s(unit, part, most_sample_s) for unit in chosen for part in self._left[unit]
        )

    def to_sample(self) -> int:
        """How many replicates are not sampled yet, or not to their end."""
        return sum(SAMPLE in parts for parts in self._left.values())

    def _learn(self, unit: Unit, part: str, seconds: float) -> None:
        index, number = unit
        self._took.setdefault((part, number), {})[index] = seconds
        self._expect(part)

    def _expect(self, part: str) -> None:
        """Works out again what is expected of a part, replicate by replicate."""
        expected = {index: guess.seconds.get(part, 0.0) for index, guess in self._guesses.items()}
        for number in range(self._replicates):
            took = self._took.get((part, number), {})
            known = {index for index in took if index in expected} if number == 0 else set(expected)
            foreseen_s = sum(expected[index] for index in known)
            factor = (
                sum(took.get(index, expected[index]) for index in known) / foreseen_s if foreseen_s else 1.0
            )
            expected = {index: took.get(index, seconds * factor) for index, seconds in expected.items()}
            self._expected[part, number] = expected
