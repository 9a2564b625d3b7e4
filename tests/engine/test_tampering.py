"""Measuring processes that tamper with their answers are found out, also on a machine that is busy."""

from pathlib import Path

import pytest

from optigpu.backends import BACKENDS
from optigpu.documents.result import VerdictReason
from tests.engine.children.tampered import tamper
from tests.engine.in_process import in_process
from tests.engine.measuring import measured, standing, standing_ready, verdict
from tests.engine.processes import program


@pytest.mark.slow
def test_an_answer_from_memory_is_a_cached_result(tmp_path: Path) -> None:
    with standing_ready(tmp_path, program("tampered", "Remembers")) as process:
        judged = verdict(measured(process))
    assert VerdictReason.CACHED_RESULT in judged.reasons
    assert VerdictReason.OUTPUT_INVALID not in judged.reasons, "what it gives is right"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tampering", "words"),
    [
        ("NotANumber", "NaN or infinite"),
        ("LosesOne", "instead of (1, 32)"),
        ("SpoiledLater", "NaN or infinite"),
    ],
)
def test_an_output_that_is_none_is_invalid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tampering: str, words: str
) -> None:
    """Nothing of it is a matter of time, and so it needs no process of its own."""
    monkeypatch.setattr(BACKENDS["torch"], "prepare", tamper(tampering))
    with in_process() as child:
        replicate = measured(standing(child, tmp_path), rounds=1)
    judged = verdict(replicate)
    assert VerdictReason.OUTPUT_INVALID in judged.reasons
    assert words in " ".join(judged.notes)
    assert (replicate.ready.problem is None) == (tampering == "SpoiledLater"), "when it can be seen"
