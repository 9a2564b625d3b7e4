"""How long a job will take, guessed before anything of it is measured, and how long it may, until its deadline.

Parts that earlier runs on this machine had take as long as they took there; others are guessed by the size of the model
and the work of the workload. A guess says no more than an order of magnitude.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from optigpu.backends.torch import load_options, overriding
from optigpu.documents.events import Estimated
from optigpu.job.spec import JobSpec, Variant, digest
from optigpu.meters import METERS
from optigpu.meters.base import QualityOptions
from optigpu.meters.latency import LONG_S
from optigpu.models.described import Size, size_of
from optigpu.models.reference import parse_reference
from optigpu.paths import cache_dir, draft_of
from optigpu.techniques.base import Choice
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.base import DecodeShape, PrefillShape

NEWEST = 0.5
"""The share that a longer newest run has in what is kept. A shorter one has all: what a first run packs or compiles is
kept on disk for the next ones."""
MOST = 4000
"""Numbers that are kept: the oldest make room for others."""


@dataclass(frozen=True)
class Rates:
    """Seconds of parts by what they are of, and how many times what is guessed a stack takes of them."""

    seconds: Mapping[str, float] = field(default_factory=dict)

    def expected(self, variant: Variant, part: str, guessed_s: float) -> float | None:
        """What the part took of the same variant, or what was guessed times as much as it took of the same stack on
        another model or workload; None if neither was measured."""
        return self._expected(_keys(variant, part), guessed_s)

    def preparing(self, need: "Need") -> float:
        """What a part of a job's preparation took, for this model or another one, else what is guessed."""
        known = self._expected(need.keys, need.guessed_s)
        return need.guessed_s if known is None else known

    def _expected(self, keys: tuple[str, str], guessed_s: float) -> float | None:
        own, shared = keys
        if own in self.seconds:
            return self.seconds[own]
        return guessed_s * self.seconds[shared] if shared in self.seconds else None

    def with_run(
        self,
        parts: Mapping[tuple[Variant, str], "Took"],
        preparing: Mapping["Need", float] = MappingProxyType({}),
        slowed: float = 1.0,
    ) -> "Rates":
        """After a run in which parts and the preparation took so long. A first run of something tells of others like
        it; a later one finds what is kept of it.

        Other processes made the run take about `slowed` times as long. A first run then counts as that much shorter,
        and a longer later one does not count.
        """
        newest = NEWEST if slowed == 1 else 0.0
        took = {_keys(variant, part): each for (variant, part), each in parts.items()}
        took |= {need.keys: Took(seconds, need.guessed_s) for need, seconds in preparing.items()}
        found = {
            own: each.seconds if own in self.seconds else each.again * each.seconds / slowed
            for (own, _), each in took.items()
        }
        new = {
            keys: each for keys, each in took.items() if keys[0] not in self.seconds and each.guessed_s > 0
        }
        found |= {shared: each.seconds / each.guessed_s / slowed for (_, shared), each in new.items()}
        blended = {
            key: min(value, value + (1 - newest) * (self.seconds.get(key, value) - value))
            for key, value in found.items()
        }
        others = {key: value for key, value in self.seconds.items() if key not in blended}
        return Rates(dict([*others.items(), *blended.items()][-MOST:]))


class Took(NamedTuple):
    """What a part took, and what was guessed before any run; `again` is the share of it that the next run of the same
    variant is expected to take, where what it made is kept on disk."""

    seconds: float
    guessed_s: float
    again: float = 1.0


class Need(NamedTuple):
    """A part of a job's preparation: its name, the model that it is for, and what it takes by a first guess."""

    part: str
    model: str
    guessed_s: float

    @property
    def keys(self) -> tuple[str, str]:
        return f"prepare {self.part} {self.model}", f"times prepare {self.part}"


NO_RATES = Rates()


def known_rates() -> Rates:
    """Those of this machine; none where no run has ended yet, or the file cannot be read."""
    with suppress(OSError, ValueError, UnsupportedError):
        found = json.loads(_file().read_text(encoding="utf-8"))
        if isinstance(found, dict):
            numbers = {key: each for key, each in found.items() if isinstance(each, int | float)}
            return Rates({key: each for key, each in numbers.items() if 0 <= each < math.inf})
    return NO_RATES


def keep_rates(rates: Rates) -> None:
    """Writes the file, whole or not at all; where it cannot be written the next run guesses."""
    with suppress(OSError, UnsupportedError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with draft_of(_file()) as draft:
            draft.write_text(json.dumps(rates.seconds, indent=0), encoding="utf-8")


def _file() -> Path:
    return cache_dir() / "rates.json"


def _keys(variant: Variant, part: str) -> tuple[str, str]:
    """Of the variant's own seconds, and of how many times what is guessed its stack takes."""
    stack = [technique.identity() for technique in variant.stack]
    where = f"{part} {variant.backend} {variant.device}"
    own = digest({"stack": stack, "model": variant.model, "workload": variant.workload.identity()})
    return f"{where} {own}", f"times {where} {digest({'stack': stack})}"


IMPORT_S, OPERATOR_IMPORT_S = 2.5, 2.0
"""Of a process that will load a model, and of one that has none, until its libraries are there."""
ROUGH_LOOK_S, ROUGH_QUALITY_S = 2.0, 2.0
"""In which a variant's first process shows a rough speed, and predicts a few tokens to show their quality."""
LOAD_BYTES_PER_S = 1e9
CPU_BYTES_PER_S, GPU_BYTES_PER_S = 2e10, 1e12
"""At which a step reads the weights."""
CPU_FLOP_PER_S, GPU_FLOP_PER_S = 2e11, 5e13
MATRIX_S, OWN_LOOP_MATRIX_S = 6e-5, 2e-6
"""Of a step for each matrix beside reading it: by torch's modules, and compiled, or by an engine or a loop of its own.
A plain step of SmolLM2-135M takes 40 ms."""
WIDTHS: Mapping[str, float] = {"bfloat16": 2.0, "float16": 2.0}
FLOAT_BYTES, QUANTIZED_BYTES = 4.0, 0.75
COMPILE_S, COMPILE_MATRIX_S = 12.0, 0.13
"""torch.compile took 20 to 50 s for the 211 matrices of SmolLM2-135M."""
COMPILED_AGAIN, PACKED_AGAIN = 0.6, 0.1
"""The share of that, and of packing, that the next run takes: torch traces a model again before it finds its code."""
UNKNOWN = Size(100_000_000, 150)
"""Of a model that is not described here, or not on this machine: about GPT-2 small."""
REQUEST_S, CALL_S = 0.5, 0.05
"""Of a request that is no pass of a decoder, and of an operator."""
TEXT_TOKENS = 128
"""Of a prompt whose tokens only a run knows."""
OBSERVE_S, CHECKED_S, WARM_UP_S, AUDIT_S = 1.0, 2.0, 5.0, 4.0
"""What a process does beside its requests, and how long it checks an output, warms up and audits if they are short."""
METER_S, PASSES = 1.0, 4.0
"""Of a meter beside its request; quality is read by passes so many times as fast as steps."""
LONG_METERS_S = {"highest_rate": 60.0}
"""A search over rates has some ten of them, with several runs each."""


def made_again(variant: Variant) -> float:
    """The share of what a variant's first process made that the next run takes to find it."""
    return COMPILED_AGAIN if variant.compiles else PACKED_AGAIN


@dataclass(frozen=True)
class FirstGuess:
    """Of one variant."""

    variant: Variant

    @cached_property
    def size(self) -> Size:
        model = self.variant.model
        return (size_of(parse_reference(model)) if model else Size(0, 0)) or UNKNOWN

    @property
    def load_s(self) -> float:
        return FLOAT_BYTES * self.size.parameters / LOAD_BYTES_PER_S

    @property
    def make_s(self) -> float:
        """Compiling, and what the stack makes of the weights."""
        variant, size = self.variant, self.size
        compile_s = COMPILE_S + COMPILE_MATRIX_S * size.matrices if variant.compiles else 0.0
        return compile_s + sum(each.applying_s(size.parameters, variant.device) for each in variant.stack)

    @cached_property
    def request_s(self) -> float:
        if self.variant.model is None:
            return CALL_S
        match self.variant.workload.shape_after(TEXT_TOKENS):
            case DecodeShape() as shape:
                prompt_s = self._pass_s(shape.prompt_tokens * shape.batch_size)
                return prompt_s + shape.new_tokens * self._pass_s(shape.batch_size)
            case PrefillShape() as shape:
                return self._pass_s(shape.prompt_tokens * shape.batch_size)
            case _:
                return REQUEST_S

    @property
    def start_s(self) -> float:
        """Loading, a checked request, and the warm-up."""
        is_long = self.request_s >= LONG_S  # one is enough
        warm_up_s = self.request_s if is_long else min(4 * self.request_s, WARM_UP_S)
        return self.load_s + OBSERVE_S + self._check_s + warm_up_s

    @property
    def audit_s(self) -> float:
        return max(2 * self.request_s, min(16 * self.request_s, AUDIT_S)) + self._check_s

    def meter_s(self, meter: str, quality: QualityOptions) -> float:
        if meter == "quality":
            return METER_S + min(quality.most_seconds, quality.tokens * self._pass_s(1) / PASSES)
        return LONG_METERS_S.get(meter, METER_S + self.request_s)

    def reference_s(self, quality: QualityOptions) -> float:
        """Of the process that makes the reference for this model, which writes the text itself, or reads one."""
        return IMPORT_S + self.load_s + METER_S + 2 * quality.tokens * self._pass_s(1) / PASSES

    @property
    def kept_reference_s(self) -> float:
        return IMPORT_S + self.load_s + METER_S

    @property
    def _check_s(self) -> float:
        return min(self.request_s, CHECKED_S)

    def _pass_s(self, tokens: int) -> float:
        """Of so many tokens at once."""
        stack, on_cpu = self.variant.stack, self.variant.device is DeviceKind.CPU
        is_quantized = any(Choice.WEIGHTS in each.chosen() for each in stack)
        width = QUANTIZED_BYTES if is_quantized else WIDTHS.get(load_options(stack).dtype, FLOAT_BYTES)
        has_own_loop = self.variant.backend != "torch" or bool(overriding(stack, "loop"))
        reading_s = width * self.size.parameters / (CPU_BYTES_PER_S if on_cpu else GPU_BYTES_PER_S)
        computing_s = 2.0 * self.size.parameters * tokens / (CPU_FLOP_PER_S if on_cpu else GPU_FLOP_PER_S)
        each_s = OWN_LOOP_MATRIX_S if has_own_loop or self.variant.compiles else MATRIX_S
        return max(reading_s, computing_s) + each_s * self.size.matrices


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
