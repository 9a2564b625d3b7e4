"""Measuring processes that tamper with their answers are found out, also on a machine that is busy."""

from pathlib import Path

import pytest

from optigpu.conductor.processes.rounds import Replicate
from optigpu.documents.result import VerdictReason
from tests.engine.measuring import ROUNDS, measured, standing_ready, verdict
from tests.engine.processes import program


def replicate_of(tampering: str, folder: Path, rounds: int) -> Replicate:
    """One replicate of a process that tampers in that way."""
    with standing_ready(folder, program("tampered", tampering)) as standing:
        return measured(standing, rounds=rounds)


@pytest.mark.slow
def test_an_answer_from_memory_is_a_cached_result(tmp_path: Path) -> None:
    judged = verdict(replicate_of("Remembers", tmp_path, ROUNDS))
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
def test_an_output_that_is_none_is_invalid(tmp_path: Path, tampering: str, words: str) -> None:
    replicate = replicate_of(tampering, tmp_path, rounds=1)
    judged = verdict(replicate)
    assert VerdictReason.OUTPUT_INVALID in judged.reasons
    assert words in " ".join(judged.notes)
    assert (replicate.ready.problem is None) == (tampering == "SpoiledLater"), "when it can be seen"
