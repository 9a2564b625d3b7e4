"""What conductor and measuring process say survives the pipe, and nothing else is taken for a message."""

import pytest
from pydantic import ValidationError

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
from optigpu.documents.facts import RunFacts

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
        '{"kind": "round", "samples": {"tokens_per_s": [NaN]}}',
        '{"kind": "round", "samples": {"tokens_per_s": [Infinity]}}',
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
