"""Prepares a job before its first variant: the machine's peak rates and the quality reference."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from optigpu.child.messages import Metered, Ready, RunReference
from optigpu.conductor.peak_cache import MachinePeaks
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.session import Session
from optigpu.documents.facts import RunFacts
from optigpu.documents.result import MetricSummary
from optigpu.hardware.catalog import Device
from optigpu.job.spec import Variant
from optigpu.models.held import FILES
from optigpu.models.reference import parse_reference
from optigpu.roofline import Roofline, roofline_of
from optigpu.vocabulary import ReplicateError, Role, Task, UnsupportedError
from optigpu.workloads.base import Workload

REFERENCE_BACKEND = "torch"
"""Makes the reference for variants of every backend, so that their quality is a distance from the same predictions."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Preparation:
    """The results of the preparation."""

    # None where there is nothing to measure.
    peaks: MachinePeaks | None

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


def prepare(session: Session, variants: Sequence[Variant]) -> Preparation:
    """Measures the peak rates and writes each model's quality reference. If one fails, the metrics that need it are
    missing."""
    if not variants:
        return Preparation(None)
    first = variants[0]
    session.progress.begin(first.index, 0, "preparing")
    peaks = MachinePeaks(
        session.environment, session.spec.device, session.threads, session.progress, keep=session.descriptors
    )
    _ = peaks.known
    make_references(session, variants)
    return Preparation(peaks)


def make_references(session: Session, variants: Sequence[Variant]) -> None:
    """Writes the quality reference of each model of the variants that has a quality, if the job measures it."""
    if "quality" in session.spec.measure.meters:
        for variant in _first_of_each_model(variants):
            if _has_quality(variant):
                _make_reference(session, variant)


def _first_of_each_model(variants: Sequence[Variant]) -> list[Variant]:
    first: dict[str | None, Variant] = {}
    for variant in variants:
        first.setdefault(variant.model, variant)
    return list(first.values())


def _has_quality(variant: Variant) -> bool:
    """Only trained weights have a quality to measure, and a converted file has no fp32 model beside it; losses of
    training can be compared from random weights as well."""
    if variant.model is None or variant.model.endswith(tuple(FILES)):
        return False
    workload: Workload = variant.workload
    return workload.task is Task.TRAINING or parse_reference(variant.model).kind != "preset"


def _make_reference(session: Session, like: Variant) -> None:
    """The plain fp32 model writes its logits into the folder; without them, the quality meter says what is missing."""
    session.progress.show("computing the quality reference")
    plain = {"role": Role.BASELINE, "stack": (), "label": "baseline", "backend": REFERENCE_BACKEND}
    baseline = like.model_copy(update=plain)
    try:
        with session.child(baseline) as child:
            ask(child, session.assignment(baseline, 0), Ready, session.progress)
            ask(child, RunReference(), Metered, session.progress)
    except (UnsupportedError, ReplicateError) as error:
        _log.warning("the quality reference could not be computed: %s", error)
