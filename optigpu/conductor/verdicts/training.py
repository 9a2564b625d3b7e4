"""Whether a variant trains what fp32 trains, from the losses that the quality meter compared."""

from collections.abc import Iterator, Sequence

from optigpu.conductor.verdicts.cost import Evidence
from optigpu.documents.facts import LossQuality


def diverged(evidence: Sequence[Evidence]) -> str | None:
    """Where the losses left the band, and how far; None where they did not, or were not compared."""
    return next((note for found in _compared(evidence) if (note := _outside(found))), None)


def not_finite(evidence: Sequence[Evidence]) -> str | None:
    """The step whose loss is not a number, while losses were compared."""
    steps = (found.not_finite_step for found in _compared(evidence))
    step = next((step for step in steps if step is not None), None)
    if step is None:
        return None
    return f"The loss of step {step} of training is not finite; lower the learning rate, or leave the technique out."


def _outside(found: LossQuality) -> str | None:
    if found.course is None or found.jitter is None:
        return None
    notes = []
    if found.course > 1:
        notes.append(
            f"Over a quarter of {len(found.losses)} steps the mean loss is {found.course:.1f} times as far from "
            f"fp32's on the same samples as the band of {found.band:.2g} nat allows, which {found.seeds} seeds of fp32 "
            "make; lower the learning rate, or leave the technique out."
        )
    if found.jitter > 1:
        notes.append(
            f"From step to step the losses jump about fp32's on the same samples {found.jitter:.1f} times as much as "
            "they may, as they do where samples are left out."
        )
    return " ".join(notes) or None


def _compared(evidence: Sequence[Evidence]) -> Iterator[LossQuality]:
    for each in evidence:
        for metered in each.replicate.metered:
            if isinstance(metered.facts.quality, LossQuality):
                yield metered.facts.quality
