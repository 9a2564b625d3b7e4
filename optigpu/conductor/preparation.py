"""Prepares a job before its turns: the machine's peak rates, cached for a day, and the quality reference."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from optigpu.child.messages import Metered, Ready, RunPeaks, RunReference
from optigpu.conductor.processes.child import TASKS, Child, ask
from optigpu.conductor.processes.confinement import PATIENT, child_variables
from optigpu.conductor.processes.residents import MOST_RESIDENT
from optigpu.conductor.processes.room import HOST_SLACK
from optigpu.conductor.progress import JobProgress
from optigpu.conductor.quiet import share_cpus, wait_for_quiet
from optigpu.conductor.session import Session
from optigpu.documents.facts import RunFacts
from optigpu.documents.peaks import Peaks
from optigpu.documents.result import Environment, MetricSummary
from optigpu.fit.memory import predicted_weight_bytes
from optigpu.hardware.catalog import Device
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.job.estimate import FirstGuess, Need
from optigpu.job.spec import JobSpec, Variant, digest
from optigpu.meters.quality import QUALITY_FOLDER
from optigpu.models.held import KERAS, TFLITE
from optigpu.models.reference import parse_reference
from optigpu.paths import cache_dir, draft_of
from optigpu.quality.reference import keeps_reference, refuse_reference
from optigpu.roofline import Roofline, roofline_of
from optigpu.vocabulary import (
    CancelledError,
    DeadlineError,
    DeviceKind,
    ReplicateError,
    Role,
    Task,
    UnsupportedError,
    utc_now,
)
from optigpu.workloads.base import Workload

REFERENCE = "computing the quality reference"
REFERENCE_BACKEND = "torch"
"""Makes the reference for variants of every backend, so that their quality is a distance from the same predictions."""

_log = logging.getLogger(__name__)


KEPT_FOR = timedelta(days=1)
PEAKS_METHOD = 2
"""Part of a cached file's name. Increase it when the way of measuring peaks changes."""


MEASURING_PEAKS = "measuring the peak rates of this machine"
PEAKS_S = 7.0
"""On two cores."""


def _peaks_file(environment: Environment, device: DeviceKind, threads: int) -> Path:
    """One for each of what a peak depends on."""
    key = digest(
        {
            "method": PEAKS_METHOD,
            "hardware_class": environment.hardware_class,
            "host_id": environment.host_id,
            "device": device,
            "threads": threads,
            "torch": environment.software.get("torch"),
        }
    )
    return cache_dir() / "peaks" / f"{key}.json"


def _kept_peaks(path: Path) -> Peaks | None:
    with suppress(OSError, UnicodeDecodeError, ValidationError):
        peaks = Peaks.model_validate_json(path.read_text())
        if timedelta(0) <= utc_now() - peaks.measured_at < KEPT_FOR:
            return peaks
    return None


class MachinePeaks:
    """The peak rates of `device` with that many threads: those of the last day, else measured at the first `known`.

    They are measured while the conductor holds the device's lock and before any variant's process runs; and once more
    at a job's end where a variant was faster than they allow. The file keeps the best of each rate. `keep` are
    descriptors that the measuring process inherits.
    """

    def __init__(
        self,
        environment: Environment,
        device: DeviceKind,
        threads: int,
        progress: JobProgress,
        *,
        keep: Sequence[int] = (),
        program: Sequence[str] = TASKS,
    ) -> None:
        self._order = RunPeaks(device=device, threads=threads)
        self._progress = progress
        self._keep, self._program = keep, program
        self._path = _peaks_file(environment, device, threads)
        self._again = False

    @cached_property
    def known(self) -> Peaks | None:
        """None if they cannot be measured; the log says why. Raises what `progress.check` raises."""
        peaks = _kept_peaks(self._path)
        if peaks is None and (found := self._measured(MEASURING_PEAKS)):
            peaks = self._stored(found)
        return peaks

    def better(self) -> Peaks | None:
        """The better of each rate that is known and of a second measurement. None if that was made before, fails, or
        would outlast the job: what is measured is worth keeping."""
        if self._again or self.known is None:
            return None
        self._again = True
        try:
            found = self._measured("measuring the peak rates again: a variant was faster than they allow")
        except (CancelledError, DeadlineError):
            return None
        if found is None:
            return None
        self.known = self._stored(self.known.with_better(found))
        return self.known

    def _measured(self, doing: str) -> Peaks | None:
        self._progress.show(doing)
        try:
            with Child(self._program, child_variables(self._order.threads), keep=self._keep) as child:
                return ask(child, self._order, Peaks, self._progress)
        except (ReplicateError, UnsupportedError) as error:
            _log.warning("the machine's peak rates could not be measured: %s", error)
            return None

    def _stored(self, peaks: Peaks) -> Peaks:
        """Writes the file completely or not at all. If the folder cannot be written, the next job measures again."""
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with draft_of(self._path) as draft:
                draft.write_text(peaks.model_dump_json())
        return peaks


@dataclass
class Preparation:
    """What a job measures before its variants' turns: the machine's peak rates, and each model's quality reference."""

    # None where there is nothing to measure.
    peaks: MachinePeaks | None
    # Measures both.
    work: Callable[[], None] = lambda: None
    _done: bool = False

    def complete(self) -> None:
        """Does the work, once. Metrics whose part fails are missing."""
        if not self._done:
            self._done = True
            self.work()

    def roofline(
        self,
        workload: Workload,
        metrics: Mapping[str, MetricSummary],
        facts: RunFacts,
        published: Device | None,
    ) -> Roofline:
        """Holds a variant against the machine's peaks. Peaks that it surpasses are measured once more."""
        found = roofline_of(workload, metrics, facts, self.peaks.known if self.peaks else None, published)
        better = self.peaks.better() if self.peaks and found.surpassed else None
        return roofline_of(workload, metrics, facts, better, published) if better else found


RESIDENT_AND_REFERENCE = 4
"""The process that makes the reference and the largest other one need so many times the fp32 model's bytes at most."""


def prepare(session: Session, variants: Sequence[Variant]) -> Preparation:
    """The preparation of a job, before which others get time to rest. It is completed at once on a GPU, and where the
    variants' processes would leave too little memory; else when they have shown their first figures."""
    if not variants:
        return Preparation(None)
    session.progress.turn_to(variants[0].index, 0)
    share_cpus(session)
    peaks = MachinePeaks(
        session.environment,
        session.spec.device,
        session.threads,
        session.progress,
        keep=session.descriptors,
    )

    def work() -> None:
        with session.progress.for_the_job("preparing"):
            wait_for_quiet(session)
            _ = peaks.known
            make_references(session, variants)

    found = Preparation(peaks, work)
    plain = predicted_weight_bytes(variants[0].model_copy(update={"stack": ()})) or 0
    beside = min(len(variants), MOST_RESIDENT)
    is_short = free_host_bytes() < (RESIDENT_AND_REFERENCE + beside) * plain + HOST_SLACK
    if session.spec.device is not DeviceKind.CPU or is_short:
        found.complete()
    return found


def make_references(session: Session, variants: Sequence[Variant]) -> None:
    """Writes the quality reference of each model of the variants that has a quality, if the job measures it."""
    for variant in _compared(session.spec, variants):
        _make_reference(session, variant)


def _compared(spec: JobSpec, variants: Sequence[Variant]) -> Iterator[Variant]:
    """The first variant of each model that has a reference."""
    first: dict[str | None, Variant] = {}
    is_fp32 = "quality" in spec.measure.meters and spec.measure.quality.reference is None
    for variant in variants if is_fp32 else ():
        first.setdefault(variant.model, variant)
    for variant in first.values():
        # Only trained weights have a quality to measure, and of converted files those alone whose numbers torch reads;
        # losses of training can be compared from random weights as well.
        workload: Workload = variant.workload
        if variant.model is not None and not variant.model.endswith((KERAS, TFLITE)):
            trains = workload.task is Task.TRAINING
            if trains or parse_reference(variant.model).kind != "preset":
                yield variant


PEAKS, REFERENCE_MADE, REFERENCE_KEPT = "peaks", "reference", "kept reference"


def needs(
    spec: JobSpec, variants: Sequence[Variant], environment: Environment, threads: int | None = None
) -> tuple[Need, ...]:
    """The parts of the preparation, of which some are kept from earlier jobs, with what they take by a first guess."""
    file = _peaks_file(environment, spec.device, threads or environment.cpu_cores)
    found = [Need(PEAKS, "", PEAKS_S)] if variants and _kept_peaks(file) is None else []
    quality = spec.measure.quality
    for variant in _compared(spec, variants):
        first = FirstGuess(_plain(variant))
        if keeps_reference(str(variant.model), spec.seed, quality.text, quality.tokens):
            found.append(Need(REFERENCE_KEPT, str(variant.model), first.kept_reference_s))
        else:
            found.append(Need(REFERENCE_MADE, str(variant.model), first.reference_s(quality)))
    return tuple(found)


def took(needed: Sequence[Need], seconds: Mapping[str, float]) -> dict[Need, float]:
    """What each of the parts took, by the seconds of each thing that was done for all variants."""
    peaks_s = seconds.get(MEASURING_PEAKS, 0.0)
    others_s = sum(seconds.values()) - peaks_s
    guessed_s = sum(need.guessed_s for need in needed if need.part != PEAKS)
    return {need: peaks_s if need.part == PEAKS else others_s * need.guessed_s / guessed_s for need in needed}


def _plain(like: Variant) -> Variant:
    plain = {"role": Role.BASELINE, "stack": (), "label": "baseline", "backend": REFERENCE_BACKEND}
    return like.model_copy(update=plain)


def _make_reference(session: Session, like: Variant) -> None:
    """The plain fp32 model writes its logits into the folder; without them, the quality meter says what is missing."""
    session.progress.show(REFERENCE)
    baseline = _plain(like)
    try:
        with session.child(baseline, more=PATIENT) as child:
            untimed = session.assignment(baseline, 0).model_copy(update={"timed": False})
            ask(child, untimed, Ready, session.progress)
            session.progress.show(REFERENCE)
            ask(child, RunReference(), Metered, session.progress)
    except (UnsupportedError, ReplicateError) as error:
        _log.warning("the quality reference could not be computed: %s", error)
        if isinstance(error, UnsupportedError):
            folder = Path(session.assignment(baseline, 0).folder) / QUALITY_FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            refuse_reference(folder, f"There is no fp32 model to compare with: {error}")
