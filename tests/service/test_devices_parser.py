"""The reader of messages: whatever comes, it is a message with integers only, or it is refused with its fields."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.bodies import strict_document
from api.examples import CLAIMS, KEYS, MANIFESTS, MESSAGES, RUNS
from api.problems import ProblemError
from optigpu.documents.devices import (
    MOST_US,
    ClaimRequest,
    DeviceMessage,
    DeviceReport,
    KeyRequest,
    RunRequest,
)
from optigpu.documents.manifest import ModelManifest
from tests.service.device_client import message, report

Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
PLACES = tuple(report())
NUMBERS = [
    ("sequence",),
    ("input_bytes",),
    ("clock_hz",),
    ("warmup",),
    ("arena_bytes",),
    ("heap_free",),
    ("started_us",),
    ("ticks_us",),
    ("windows", 0, "count"),
    ("windows", 0, "total_us"),
    ("windows", 0, "energy_uj"),
    ("latency_us", "count"),
    ("latency_us", "min"),
    ("latency_us", "p50"),
    ("power", "idle_uw"),
    ("golden", "count"),
]
NULLABLE = {("windows", 0, "energy_uj"), ("latency_us", "min"), ("latency_us", "p50"), ("power", "idle_uw")}
POSITIVE = {
    ("sequence",),
    ("input_bytes",),
    ("windows", 0, "count"),
    ("windows", 0, "total_us"),
    ("golden", "count"),
}


def read(document: Any) -> DeviceMessage | None:
    """The message; None if it is refused as a wrong message is."""
    try:
        return strict_document(json.dumps(document).encode(), DeviceMessage)
    except ProblemError as error:
        return None if error.status in (400, 422) and error.errors else pytest.fail(str(error))


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """The document with another value at a place."""
    first, *others = place
    copy = list(document) if isinstance(document, list) else dict(document)
    copy[first] = changed(copy[first], tuple(others), value) if others else value
    return copy


@given(Json)
def test_any_document_is_read_or_refused(document: Any) -> None:
    assert read(document) is None


@given(st.sampled_from(PLACES), Json)
def test_any_value_in_any_place_is_read_or_refused(place: str, value: Any) -> None:
    found = read(message(report() | {place: value}))
    if found is not None:
        kept = found.reports[0].report.model_dump(mode="json")
        assert kept[place] == value


@given(st.sampled_from(NUMBERS), st.none() | st.booleans() | st.integers() | st.floats() | st.text())
def test_a_number_is_an_integer_within_its_bounds(place: tuple[Any, ...], value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    least = 1 if place in POSITIVE else 0
    valid = (is_whole and least <= value <= MOST_US) or (value is None and place in NULLABLE)
    found = read(message(changed(report(), place, value)))
    assert (found is not None) is valid


@given(st.binary())
def test_any_bytes_are_read_or_refused(body: bytes) -> None:
    with pytest.raises(ProblemError) as refused:
        strict_document(body, DeviceMessage)
    assert refused.value.status in (400, 422)


def test_a_report_is_kept_as_it_was_sent() -> None:
    sent = report(3, "01980000-0000-7000-8000-000000000000")
    assert DeviceReport.model_validate(sent).model_dump(mode="json") == sent


@pytest.mark.parametrize(
    ("model", "examples"),
    [
        (ClaimRequest, CLAIMS),
        (RunRequest, RUNS),
        (KeyRequest, KEYS),
        (DeviceMessage, MESSAGES),
        (ModelManifest, MANIFESTS),
    ],
)
def test_every_example_of_the_documentation_is_read(model: Any, examples: Any) -> None:
    for example in examples.values():
        strict_document(json.dumps(example.document).encode(), model)
