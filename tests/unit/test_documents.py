"""Documents and messages: they cannot contradict themselves, come back from JSON as they were, and fit any database."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from optigpu.child.messages import (
    ANSWER,
    Answer,
    Audited,
    Broken,
    Metered,
    Progress,
    Proven,
    Ready,
    Refused,
    Round,
    Started,
)
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
from optigpu.documents.facts import (
    EXPLAINED,
    NO_MODEL,
    NOT_RECORDED,
    Footprint,
    ImageFacts,
    ImageFootprint,
    MeterFacts,
    ModelFacts,
    RunFacts,
    WeightFacts,
)
from optigpu.documents.peaks import Bound
from optigpu.documents.result import Attribution, Measurement, Outcome, Verdict, VerdictReason
from optigpu.vocabulary import (
    DocumentError,
    Frozen,
    Role,
    VariantStatus,
    canonical_json,
    check_document,
    is_id,
    new_id,
)

TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner),
)


class Point(Frozen):
    x: float


def test_ids_are_sorted_by_time_and_recognised() -> None:
    ids = [new_id() for _ in range(100)]
    assert ids == sorted(ids)
    assert len(set(ids)) == 100
    assert all(is_id(text) for text in ids)


@pytest.mark.parametrize(
    "text", ["", "7", "not-a-uuid", "{0197}", "0" * 32, f" {'0' * 8}-0000-0000-0000-{'0' * 12}"]
)
def test_what_is_no_id_is_recognised_too(text: str) -> None:
    assert not is_id(text)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), "-Infinity"])
def test_data_holds_no_number_that_is_none(number: Any) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Point(x=number)


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ({"a": [1, {"b": float("nan")}]}, r"\$\.a\[1\]\.b"),
        ([float("-inf")], r"\$\[0\]"),
        ({"a": "x\x00"}, r"\$\.a"),
        ({"a\x00": 1}, r"\$ \(a key\)"),
        ("\ud800", r"\$ contains an unpaired"),
    ],
)
def test_what_a_database_cannot_hold_is_named_by_its_place(document: Any, place: str) -> None:
    with pytest.raises(DocumentError, match=place):
        check_document(document)


@pytest.mark.slow
@given(DOCUMENTS)
def test_every_other_document_has_one_text(document: Any) -> None:
    text = canonical_json(document)
    assert canonical_json(json.loads(text)) == text


DECODER = ModelFacts("gpt2", 64, 2, 4, 4, 100, 128, True, 16, 256, False, 64)
IMAGES = ImageFacts("vit", 3, 32, 10, True)


def test_a_note_of_a_field_s_name_fills_it_and_every_other_is_kept_for_people() -> None:
    facts = RunFacts.gathered({"dtype": "float32", "attention_kernels": ["flash"], "int8_layers": 3})
    assert (facts.dtype, facts.attention_kernels) == ("float32", ("flash",))
    assert facts.recorded == {"int8_layers": 3}


def test_what_nobody_noted_has_a_reason() -> None:
    facts = RunFacts.gathered({"dtype": "float32", "reasons": {"threads": "The engine chooses."}})
    assert facts.reasons["threads"] == "The engine chooses."
    assert set(facts.reasons) == set(EXPLAINED) - {"dtype"}
    assert facts.why_null("weights") == NOT_RECORDED
    assert RunFacts.gathered({}, unknown=NO_MODEL).why_null("weights") == NO_MODEL


@pytest.mark.parametrize(
    ("note", "kept"),
    [
        ((1, (2.5, None)), [1, [2.5, None]]),
        ({1: {"a": True}}, {"1": {"a": True}}),
        (float("nan"), "nan"),
        ([float("-inf")], ["-inf"]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (Bound.MEMORY, "memory"),
        (Path("a") / "b", "a/b"),
    ],
)
def test_a_note_for_people_never_costs_the_measurement(note: object, kept: object) -> None:
    facts = RunFacts.gathered({"note": note})
    assert facts.recorded == {"note": kept}
    assert RunFacts.model_validate_json(facts.model_dump_json()) == facts
    assert MeterFacts.model_validate({"recorded": {"note": note}}).recorded == {"note": kept}


@pytest.mark.parametrize("footprint", [Footprint(DECODER, 10, 2), ImageFootprint(IMAGES, 10, 99, 3072)])
def test_facts_survive_as_json(footprint: Footprint | ImageFootprint) -> None:
    facts = RunFacts(
        dtype="bfloat16",
        footprint=footprint,
        weights=WeightFacts(hash="a", hash_of="files"),
        image_shape=(3, 2, 2),
    )
    again = RunFacts.model_validate_json(facts.model_dump_json())
    assert again == facts
    assert type(again.footprint) is type(footprint)


def test_a_measurement_has_samples_or_a_reason() -> None:
    assert Measurement(name="load_s", samples=((1.0,), ())).unit == "s"
    assert Measurement(name="load_s", reason="nothing was loaded").samples == ()
    for empty in ((), ((),), ((), ())):
        with pytest.raises(ValidationError, match="needs samples, or the reason"):
            Measurement(name="load_s", samples=empty)


def test_a_verdict_is_valid_exactly_when_nothing_speaks_against_it() -> None:
    assert Verdict(valid=True).reasons == ()
    for valid, reasons in ((True, (VerdictReason.OUTPUT_INVALID,)), (False, ())):
        with pytest.raises(ValidationError, match="no reasons"):
            Verdict(valid=valid, reasons=reasons)


def test_an_outcome_has_either_a_result_or_a_reason() -> None:
    assert Outcome(index=0, status=VariantStatus.FAILED, reason="it broke").result is None
    with pytest.raises(ValidationError, match="either a result or a reason"):
        Outcome(index=0, status=VariantStatus.SUCCEEDED)


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


FACTS = RunFacts(dtype="float32", recorded={"a": [1, "ü"]})
ANSWERS: list[Answer] = [
    Started(),
    Progress(doing="loading"),
    Ready(
        load_s=1,
        compile_s=None,
        steady=True,
        warmup_requests=3,
        request_s=0.1,
        facts=FACTS,
    ),
    Refused(reason="no\nGPU"),
    Broken(fault="out_of_memory", reason="too big", trace="Traceback\n  line"),
    Round(samples={"tokens_per_s": (1.0, 1e-300)}),
    Audited(samples={"latency_s": (1.0,)}, described={"token_s": (0.1, 0.2)}, problem="NaN"),
    Metered(meter="memory", values={"weight_bytes": 1.0}, reasons={"peak_bytes": "no GPU"}),
    Proven(),
]


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer.kind)
def test_an_answer_is_one_line_and_comes_back_the_same(answer: Answer) -> None:
    line = answer.model_dump_json()
    assert "\n" not in line
    assert ANSWER.validate_json(line) == answer


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        '{"kind": "shout"}',
        '{"kind": "progress"}',
        '{"kind": "progress", "doing": "x", "more": 1}',
        '{"kind": "run_round", "seconds": 1}',
    ],
)
def test_what_is_no_answer_is_refused(line: str) -> None:
    with pytest.raises(ValidationError):
        ANSWER.validate_json(line)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
@pytest.mark.parametrize(
    "message",
    [
        '{"kind": "round", "samples": {"latency_s": [0.1, NUMBER]}}',
        '{"kind": "round", "samples": {}, "request_s": [NUMBER]}',
        '{"kind": "metered", "meter": "energy", "values": {"energy_j": NUMBER}}',
        '{"kind": "ready", "load_s": 1, "compile_s": null, "steady": true, "warmup_requests": 3, "request_s": NUMBER}',
    ],
)
def test_a_number_that_is_none_is_refused_wherever_it_stands(message: str, number: str) -> None:
    with pytest.raises(ValidationError):
        ANSWER.validate_json(message.replace("NUMBER", number))
