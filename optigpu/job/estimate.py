"""How long a job will take, guessed before anything of it is measured, and how long it may, until its deadline. A guess
says no more than an order of magnitude."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from optigpu.documents.events import Estimated
from optigpu.job.first_guess import (
    IMPORT_S,
    OPERATOR_IMPORT_S,
    ROUGH_LOOK_S,
    ROUGH_QUALITY_S,
    FirstGuess,
)
from optigpu.job.rates import NO_RATES, Need, Rates
from optigpu.job.spec import JobSpec, Variant
from optigpu.meters import METERS
from optigpu.vocabulary import SpecError

START, MAKE, SAMPLE, AUDIT = "start", "make", "sample", "audit"
"""The parts of a replicate, in this order. Its meters, by their names, are the others.

What the first process of a variant compiles, packs or converts is kept on disk for the others.
"""
FEWEST_REQUESTS = 4
"""Of a process that is sampled, where requests are long: one of each of its first rounds."""
NAMED = 2
"""How many of the longest variants are named where a plan does not fit."""


@dataclass(frozen=True)
class Guess:
    """Seconds that each part of a variant's replicate takes. Those in `once` are parts of its first replicate alone.
    `measured` says whether earlier runs took so long."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    measured: bool = False

    def times(self, factor: float) -> "Guess":
        return replace(self, seconds={part: factor * seconds for part, seconds in self.seconds.items()})

    def parts(self, replicate: int) -> list[str]:
        return [part for part in self.seconds if replicate == 0 or part not in self.once]


@dataclass(frozen=True)
class Plan:
    """The variants of a job with their guesses, and how many processes measure each of them."""

    spec: JobSpec
    guesses: Mapping[int, Guess]
    replicates: int
    # Of what is done for all of them.
    prepare_s: float = 0.0
    # Of those that have techniques.
    labels: Mapping[int, str] = field(default_factory=dict)

    @property
    def processes(self) -> int:
        return len(self.guesses) * self.replicates

    @property
    def beside_sampling_s(self) -> float:
        """The time in which the job is prepared, and processes start, are checked and read their meters."""
        return self.prepare_s + sum(map(self._beside_s, self.guesses))

    def _beside_s(self, index: int) -> float:
        guess, spec = self.guesses[index], self.spec
        import_s = IMPORT_S if spec.workload.task.needs_model else OPERATOR_IMPORT_S
        rough_s = ROUGH_LOOK_S + (ROUGH_QUALITY_S if "quality" in spec.measure.meters else 0.0)
        parts = (part for number in range(self.replicates) for part in guess.parts(number) if part != SAMPLE)
        return self.replicates * import_s + rough_s + sum(guess.seconds[part] for part in parts)

    def _sampling_s(self, index: int) -> float:
        return self.replicates * min(self.guesses[index].seconds.get(SAMPLE, 0.0), self.most_sample_s)

    def variant_s(self, index: int) -> float:
        """All processes of a variant."""
        return self._beside_s(index) + self._sampling_s(index)

    @property
    def most_sample_s(self) -> float:
        """How long one process may be measured so that all of them fit into the limit; never less than it must."""
        measure, limits = self.spec.measure, self.spec.limits
        share = (limits.timeout_s - self.beside_sampling_s) / max(self.processes, 1)
        return max(measure.min_seconds, min(measure.max_seconds, share))

    @property
    def seconds(self) -> float:
        return self.beside_sampling_s + sum(map(self._sampling_s, self.guesses))

    def estimated(self) -> Estimated:
        """The event that tells it before the job starts."""
        return Estimated(
            seconds=self.seconds,
            limit_s=self.spec.limits.timeout_s,
            replicates=self.replicates,
            sentence=self.sentence(),
        )

    def sentence(self) -> str:
        """For example "9 variants x 3 processes, about 24 min; the limit is 30 min."."""
        measure, limit = self.spec.measure, self.spec.limits.timeout_s
        instead = f" instead of {measure.replicates}" if self.replicates < measure.replicates else ""
        text = (
            f"{_counted(len(self.guesses), 'variant', 'variants')} x "
            f"{_counted(self.replicates, 'process', 'processes')}{instead}, about {spoken(self.seconds)} (an "
            f"estimate); the limit is {spoken(limit)}."
        )
        if self.seconds > limit:
            text += f" What does not fit is left out, replicates first; {self._advice()}"
        elif self.most_sample_s < measure.max_seconds:
            text += f" So that all fit, a process is measured for {spoken(self.most_sample_s)} at most."
        return text

    def _advice(self) -> str:
        """What would make it fit, by the flags of the commands."""
        longest = sorted(self.labels, key=self.variant_s, reverse=True)[:NAMED]
        named = " and ".join(
            f"{self.labels[index]} (about {spoken(self.variant_s(index))})"
            for index in longest
            if len(self.guesses) > 1
        )
        once_s = replace(self, replicates=1).seconds
        fewer = f"ask for --replicates 1 (about {spoken(once_s)}), " if self.replicates > 1 else ""
        several = f", or leave out the longest with --stack: {named}" if named else ""
        return f"{fewer}lower --max-seconds, raise --timeout{several}."


def plan_time(
    spec: JobSpec, variants: Sequence[Variant], rates: Rates = NO_RATES, needs: Sequence[Need] = ()
) -> Plan:
    """The plan for the variants that are to be measured, with as many replicates as can fit into the job's limit, by
    what earlier runs took; `needs` are what the job prepares before. Raises SpecError if even one process for each
    variant cannot, measured for the least time."""
    once_s = len(variants) * spec.measure.min_seconds
    limit = spec.limits.timeout_s
    if once_s > limit:
        raise SpecError(
            f"limits.timeout_s: {_counted(len(variants), 'variant', 'variants')} of at least "
            f"{spec.measure.min_seconds:g} s each take more than the limit of {limit:g} s; raise limits.timeout_s, "
            "lower measure.min_seconds, or measure fewer variants."
        )
    # Compared as floats: a tiny min_seconds makes the quotient infinite.
    fitting = limit / once_s if once_s else math.inf
    return Plan(
        spec=spec,
        guesses={variant.index: guess_of(spec, variant, rates) for variant in variants},
        replicates=int(min(spec.measure.replicates, fitting)),
        prepare_s=sum(map(rates.preparing, needs)),
        labels={variant.index: variant.label for variant in variants if variant.stack},
    )


def guess_of(spec: JobSpec, variant: Variant, rates: Rates = NO_RATES) -> Guess:
    """What the request and earlier runs tell of a variant's replicates."""
    first = FirstGuess(variant)
    meters = [name for name in spec.measure.meters if name in METERS]
    guessed = (
        {START: first.start_s, MAKE: first.make_s}
        | {SAMPLE: sample_s(spec, first.request_s), AUDIT: first.audit_s}
        | {name: first.meter_s(name, spec.measure.quality) for name in meters}
    )
    expected = {part: rates.expected(variant, part, seconds) for part, seconds in guessed.items()}
    known = {part: seconds for part, seconds in expected.items() if seconds is not None}
    if SAMPLE in known:  # of a run that may have had other limits
        known[SAMPLE] = max(spec.measure.min_seconds, min(spec.measure.max_seconds, known[SAMPLE]))
    return Guess(
        seconds=guessed | known,
        once=frozenset([MAKE, *(name for name in meters if METERS[name].once)]),
        measured=START in known,
    )


def sample_s(spec: JobSpec, request_s: float) -> float:
    """Between the least and the most time: as likely to be too long by a factor as too short."""
    measure = spec.measure
    likely_s = max(math.sqrt(measure.min_seconds * measure.max_seconds), FEWEST_REQUESTS * request_s)
    return max(request_s, min(measure.max_seconds, likely_s))


def spoken(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


def _counted(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def within_deadline(spec: JobSpec, now: datetime) -> JobSpec:
    """The job with its time limit cut to what is left until its deadline. Raises SpecError if nothing is left."""
    deadline = spec.limits.deadline
    if deadline is None:
        return spec
    left_s = (deadline - now).total_seconds()
    if left_s <= 0:
        raise SpecError(f"limits.deadline: {missed(deadline)}")
    if left_s >= spec.limits.timeout_s:
        return spec
    return spec.model_copy(update={"limits": spec.limits.model_copy(update={"timeout_s": left_s})})


def missed(deadline: datetime) -> str:
    return f"The deadline ({deadline:%Y-%m-%d %H:%M:%S} UTC) passed before the job began; post it with a later one."
