"""The comparison with peers: which peers count, and which goals its figures reach. Figures are made up."""

from typing import Any

import pytest

from benchmarks.stacks import Q4_0
from benchmarks.vs_cases import (
    F16,
    FP32,
    IN_GOALS,
    OURS,
    Q4_0_HEAD,
)
from benchmarks.vs_goals import counting, speed_goals


def line(name: str, rates: tuple[float, ...], ours: tuple[float, ...] = (), **more: Any) -> dict[str, Any]:
    """A row of a job; `ours` are the rates of the goals' stack in it."""
    ratio = rates[0] / 100 if rates else None
    measured = {
        "ratio": ratio,
        "ratio_interval": ratio and (ratio, ratio),
        "rate": rates[0] if rates else None,
    }
    about: dict[str, Any] = {
        "weight_bytes": 83_000_000,
        "reason": None if rates else "no compiler",
        "verdict": (),
        "warnings": (),
        "details": {},
        "ours": ours,
        "ours_verdict": (),
        "group": 0,
    }
    return {"name": name, "rates": rates} | measured | about | more


def scored(**divergences: float) -> list[dict[str, Any]]:
    """Lines of a case of quality: ours at 0.01, and others by name."""
    return [{"name": IN_GOALS.name, "kld_mean": 0.01}] + [
        {"name": name, "kld_mean": value} for name, value in divergences.items()
    ]


def test_a_goal_is_a_ratio_of_pairs_of_processes_with_all_in_4_bits_beside_it() -> None:
    ours = (280.0, 140.0, 280.0)
    lines = [
        line(Q4_0.name, (100.0, 50.0, 100.0), ours),
        line(Q4_0_HEAD.name, (112.0, 56.0, 112.0), ours),
    ]
    over_q4_0, over_best = speed_goals("decode-gpt2", lines, scored(**{Q4_0.name: 0.02}))
    assert over_q4_0["reached"]
    assert over_q4_0["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 2.7x llama.cpp Q4_0: 2.80x [2.80, 2.80]; "
        "llama.cpp Q4_0, head too: 2.50x [2.50, 2.50]"
    )
    assert not over_best["reached"], "no peer counts"
    assert over_best["goal"].endswith("the best of the peers that count: not measured")
    short = [line(Q4_0.name, (100.0,), (269.0,)), line(Q4_0_HEAD.name, ())]
    below, _ = speed_goals("decode-gpt2", short, [])
    assert not below["reached"]
    assert below["goal"].endswith("2.69x; llama.cpp Q4_0, head too: not measured")


def test_peers_count_up_to_a_tenth_above_our_divergence() -> None:
    lines = scored(**{"as good": 0.011, "worse": 0.0111, OURS[0].name: 0.005, FP32.name: 0.0})
    assert counting([*lines, {"name": "missing", "reason": "not installed"}]) == frozenset(
        {"as good", FP32.name}
    )
    assert counting([each for each in lines if each["name"] != IN_GOALS.name]) is None


def test_the_best_peer_is_that_beside_which_ours_is_least_faster() -> None:
    divergences = scored(**{"slow": 0.0, "fast": 0.011, "rough": 0.02, F16.name: 0.0})
    lines = [
        line(Q4_0.name, ()),
        line("slow", (100.0,), (300.0,)),
        line("fast", (150.0,), (270.0,)),
        line("rough", (200.0,), (280.0,)),
        line(F16.name, (), left_out=True),
    ]
    _, best = speed_goals("decode-gpt2", lines, divergences)
    assert best["reached"]
    assert best["goal"] == (
        f"decode-gpt2: {IN_GOALS.name} at least 1.6x the best of the peers that count: 1.80x fast, of 2; "
        "1.40x rough, which does not count; left out: llama.cpp F16"
    )
    _, best = speed_goals(
        "decode-gpt2", [*lines, line("faster", (200.0,), (300.0,))], divergences + scored(faster=0.0)[1:]
    )
    assert not best["reached"]
    assert "1.50x faster, of 3" in best["goal"]


@pytest.mark.parametrize("whose", ["verdict", "ours_verdict"])
def test_a_result_that_is_not_valid_reaches_no_goal(whose: str) -> None:
    spoilt: dict[str, Any] = {whose: ("foreign_process",)}
    lines = [line(Q4_0.name, (100.0,), (900.0,), **spoilt), line(Q4_0_HEAD.name, ())]
    lines.append(line("peer", (100.0,), (900.0,), **spoilt))
    name = {"verdict": ("llama.cpp Q4_0", "peer"), "ours_verdict": (IN_GOALS.name, IN_GOALS.name)}[whose]
    for goal, of in zip(speed_goals("prefill-gpt2", lines, scored(peer=0.0)), name, strict=True):
        assert not goal["reached"]
        assert "9.00x" in goal["goal"]
        assert goal["goal"].endswith(f"; not valid ({of}: foreign_process)")
