"""How long a job will take, guessed before anything of it is measured, and how long it may, until its deadline. A guess
says no more than an order of magnitude."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from optigpu.documents.events import Estimated
from optigpu.job.rates import NO_RATES, Rates
from optigpu.job.spec import JobSpec, Variant
from optigpu.meters import METERS
from optigpu.techniques.base import Phase
from optigpu.vocabulary import SpecError

START, COMPILE, SAMPLE, AUDIT = "start", "compile", "sample", "audit"
"""The parts of a replicate, in this order. Its meters, by their names, are the others.

What the first process of a variant compiles is kept on disk for the others.
"""
START_S, OPERATOR_START_S, COMPILE_S = 6.0, 4.0, 40.0
"""Of a process that loads a model, of one that has none, and what compiling adds to the first of a variant."""
AUDIT_S, METER_S = 1.0, 2.0
LONG_METERS_S = {"highest_rate": 60.0}
"""A search over rates has some ten of them, with several runs each."""


@dataclass(frozen=True)
class Guess:
    """Seconds that each part of a variant's replicate takes. Those in `once` are parts of its first replicate alone.
    `measured` says whether earlier runs took so long."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    once: frozenset[str] = frozenset()
    measured: bool = False

    def parts(self, replicate: int) -> list[str]:
        return [part for part in self.seconds if replicate == 0 or part not in self.once]


@dataclass(frozen=True)
class Plan:
    """The variants of a job with their guesses, and how many processes measure each of them."""

    spec: JobSpec
    guesses: Mapping[int, Guess]
    replicates: int
    # Before the first of them starts.
    prepare_s: float = 0.0

    @property
    def processes(self) -> int:
        return len(self.guesses) * self.replicates

    @property
    def beside_sampling_s(self) -> float:
        """The time in which the job is prepared, and processes start, are checked and read their meters."""
        return self.prepare_s + sum(
            guess.seconds[part]
            for guess in self.guesses.values()
            for replicate in range(self.replicates)
            for part in guess.parts(replicate)
            if part != SAMPLE
        )

    @property
    def most_sample_s(self) -> float:
        """How long one process may be measured so that all of them fit into the limit; never less than it must."""
        measure, limits = self.spec.measure, self.spec.limits
        share = (limits.timeout_s - self.beside_sampling_s) / max(self.processes, 1)
        return max(measure.min_seconds, min(measure.max_seconds, share))

    @property
    def seconds(self) -> float:
        return self.beside_sampling_s + self.processes * min(sample_s(self.spec), self.most_sample_s)

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
            text += (
                " What does not fit is left out, replicates first; raise limits.timeout_s or measure less."
            )
        elif self.most_sample_s < measure.max_seconds:
            text += f" So that all fit, a process is measured for {spoken(self.most_sample_s)} at most."
        return text


def plan_time(spec: JobSpec, variants: Sequence[Variant], rates: Rates = NO_RATES) -> Plan:
    """The plan for the variants that are to be measured, with as many replicates as can fit into the job's limit, by
    what earlier runs took. Raises SpecError if even one process for each variant cannot, measured for the least
    time."""
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
        prepare_s=rates.preparing(spec.model, quality="quality" in spec.measure.meters) or 0.0,
    )


def guess_of(spec: JobSpec, variant: Variant, rates: Rates = NO_RATES) -> Guess:
    """What the request and earlier runs tell of a variant's replicates."""
    compiles = any(technique.phase in (Phase.COMPILATION, Phase.CAPTURE) for technique in variant.stack)
    start_s = START_S if variant.model else OPERATOR_START_S
    meters = [name for name in spec.measure.meters if name in METERS]
    guessed = (
        {START: start_s}
        | ({COMPILE: COMPILE_S} if compiles else {})
        | {SAMPLE: sample_s(spec), AUDIT: AUDIT_S}
        | {name: LONG_METERS_S.get(name, METER_S) for name in meters}
    )
    known = {part: seconds for part in guessed if (seconds := rates.of(variant, part)) is not None}
    return Guess(
        seconds=guessed | known,
        once=frozenset([COMPILE, *(name for name in meters if METERS[name].once)]),
        measured=START in known,
    )


def sample_s(spec: JobSpec) -> float:
    """Between the least and the most time: as likely to be too long by a factor as too short."""
    return math.sqrt(spec.measure.min_seconds * spec.measure.max_seconds)


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
