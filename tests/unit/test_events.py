"""Events are data: each kind survives JSON, and raw samples stay out of it."""

import pytest
from pydantic import TypeAdapter

from optigpu.documents.events import (
    Estimated,
    Event,
    Finished,
    Planned,
    PlannedVariant,
    Progressed,
    VariantFinished,
    VariantStarted,
    Waiting,
    as_document,
)
from optigpu.documents.result import Attribution, Outcome
from optigpu.vocabulary import Role, VariantStatus

EVENTS: list[Event] = [
    Planned(variants=(PlannedVariant(index=0, role=Role.BASELINE, label="baseline"),)),
    Waiting(doing="cc1plus uses 1.1 of 2 cores; waiting up to 60 s", up_to_s=60),
    Estimated(seconds=60.5, limit_s=1800, replicates=3, sentence="about a minute"),
    VariantStarted(index=0),
    Progressed(index=0, replicate=1, doing="measuring", fraction=0.5, remaining_s=3.5),
    VariantFinished(outcome=Outcome(index=0, status=VariantStatus.FAILED, reason="it broke")),
    Finished(attribution=Attribution(metric="tokens_per_s", rows=())),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.kind)
def test_an_event_comes_back_from_its_document(event: Event) -> None:
    assert TypeAdapter[Event](Event).validate_python(as_document(event)) == event


def test_raw_samples_are_not_in_the_document() -> None:
    outcome = Outcome(index=0, status=VariantStatus.FAILED, reason="it broke", samples={"tpot_s": ((1.0,),)})
    assert "samples" not in as_document(VariantFinished(outcome=outcome))["outcome"]
