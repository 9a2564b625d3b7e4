"""The schemas of a job and of a result change on purpose alone: others have written programs for them."""

import difflib

import pytest

from tests.contract.snapshots import COMMAND, DOCUMENTS, path_of, snapshot

SHOWN_LINES = 40


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_schema_is_the_one_that_was_agreed_on(name: str) -> None:
    agreed, now = path_of(name).read_text(encoding="utf-8"), snapshot(DOCUMENTS[name])
    lines = difflib.unified_diff(agreed.splitlines(), now.splitlines(), "agreed", "now", lineterm="", n=2)
    shown = "\n".join(list(lines)[:SHOWN_LINES])
    assert agreed == now, (
        f"The schema of {name} has changed:\n{shown}\n"
        f"If that is meant, run `{COMMAND}`, and read the difference before you commit it: a new optional "
        "field is fine; a field that changes its name or its meaning raises "
        "SCHEMA_VERSION, and documents/versions.py learns to read both."
    )


def test_a_field_that_is_called_as_a_text_for_people_stays() -> None:
    assert '"title"' not in snapshot(DOCUMENTS["result"])
    assert '"label"' in snapshot(DOCUMENTS["result"])
