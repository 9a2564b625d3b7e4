"""The ground floor: identifiers, the one JSON text of a document, and what no database may be given."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from optigpu.vocabulary import (
    METRICS,
    DocumentError,
    Frozen,
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


def test_a_metric_s_name_carries_its_unit() -> None:
    endings = {"_s": {"s", "1/s", "GB/s"}, "_bytes": {"B"}}
    for name, metric in METRICS.items():
        assert metric.meaning
        for ending, units in endings.items():
            assert not name.endswith(ending) or metric.unit in units
