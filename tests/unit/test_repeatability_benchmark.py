"""benchmarks.repeatability: pairs are counted, kept and added to."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.document import measured_before
from benchmarks.repeatability import Pair, figures_of, pairs_of, text_of
from optigpu.documents.views import Decision
from optigpu.vocabulary import OptiGPUError

SPEC = {"model": "preset:tiny-llama-test"}


def pair(kind: str, decision: Decision, ratio: float = 1.0, reasons: tuple[str, ...] = ()) -> Pair:
    return Pair(
        kind=kind,
        at="2026-11-23T00:00:00+00:00",
        hardware="a machine" if kind == "same" else "another machine",
        commit=None,
        decision=decision,
        ratio=ratio,
        ci=(ratio * 0.99, ratio * 1.01),
        paired=True,
        cv_between=(0.02, None),
        reasons=reasons,
        warnings=("disturbed",),
    )


PAIRS = [
    pair("same", Decision.EQUIVALENT),
    pair("longer", Decision.WORSE, 1.05),
    pair("same", Decision.BETTER, 0.9, ("drift",)),
    pair("longer", Decision.UNDECIDED, 1.02),
]


def test_each_kind_is_counted_by_itself() -> None:
    same, longer = figures_of(PAIRS, "same"), figures_of(PAIRS, "longer")
    assert (same["pairs"], same["different"], same["decisions"]["equivalent"]) == (2, 1, 1)
    assert (longer["different"], longer["decisions"]["undecided"]) == (1, 1)
    assert same["invalid"] == {"drift": 1}
    assert longer["warnings"] == {"disturbed": 2}
    assert (same["hardware"], longer["hardware"]) == ({"a machine": 2}, {"another machine": 2})
    assert same["cv_between_median"] == 0.02
    assert "equivalent 1 (goal: at least 60%)" in text_of("same", same)


def test_without_pairs_nothing_is_claimed() -> None:
    assert figures_of([], "same")["ratio_mean"] is None
    assert "variation between processes, median: unknown" in text_of("same", figures_of([], "same"))


def test_pairs_of_an_earlier_hour_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"spec": SPEC, "measured": [asdict(each) for each in PAIRS]}))
    assert figures_of(pairs_of(measured_before(path, SPEC, "measured")), "same") == figures_of(PAIRS, "same")


def test_pairs_of_another_job_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps({"spec": SPEC | {"model": "preset:gpt2"}, "measured": []}))
    with pytest.raises(OptiGPUError, match="has nothing of the same job"):
        measured_before(path, SPEC, "measured")
    with pytest.raises(OptiGPUError, match="--output"):
        measured_before(None, SPEC, "measured")
