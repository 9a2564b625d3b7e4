"""What a memory target decides: a budget is kept, and spent in order."""

import random

from optigpu.surgery.bit_allocation import Candidate, Level, Stage, decide, least_bytes, total_bytes


def candidate(path: str, stage: Stage, *sizes: int, sensitivity: float = 0.0) -> Candidate:
    """Levels of 4, 8 and 16 bits with these bytes."""
    levels = tuple(Level(f"kind {bits}", bits, size) for bits, size in zip((4, 8, 16), sizes, strict=False))
    return Candidate(path, levels, stage, sensitivity)


def bits_of(candidates: list[Candidate], budget: int) -> list[int]:
    return [decision.level.bits for decision in decide(candidates, budget)]


def test_what_is_left_goes_to_the_head_then_the_first_block_then_the_most_sensitive() -> None:
    candidates = [
        candidate("head", Stage.HEAD, 40, 80),
        candidate("h.0.a", Stage.FIRST_BLOCK, 10, 20, 40),
        candidate("h.1.a", Stage.REST, 10, 20, 40, sensitivity=1),
        candidate("h.2.a", Stage.REST, 10, 20, 40, sensitivity=2),
    ]
    assert least_bytes(candidates) == 70
    assert bits_of(candidates, 60) == [4, 4, 4, 4]  # the caller refuses a target that it cannot reach
    assert bits_of(candidates, 79) == [4, 4, 4, 4]
    assert bits_of(candidates, 80) == [4, 8, 4, 4]  # too little for the head, enough for what comes after it
    assert bits_of(candidates, 109) == [4, 16, 4, 4]
    assert bits_of(candidates, 110) == [8, 4, 4, 4]
    assert bits_of(candidates, 140) == [8, 16, 4, 4]
    assert bits_of(candidates, 150) == [8, 16, 4, 8]  # the more sensitive one
    assert bits_of(candidates, 160) == [8, 16, 8, 8]
    assert bits_of(candidates, 180) == [8, 16, 8, 16]
    assert bits_of(candidates, 10**6) == [8, 16, 16, 16]


def test_a_budget_is_kept_and_what_is_left_is_too_little_for_any_layer() -> None:
    drawn = random.Random(0)
    for _ in range(200):
        candidates = []
        for number in range(drawn.randint(1, 9)):
            size = drawn.randint(1, 50)
            stage = drawn.choice(list(Stage))
            candidates.append(candidate(f"h.{number}.a", stage, size, 2 * size, 4 * size))
        budget = drawn.randint(least_bytes(candidates), 4 * least_bytes(candidates))
        decisions = decide(candidates, budget)
        left = budget - total_bytes(decisions)
        assert left >= 0
        missing = [
            level.stored_bytes - decision.level.stored_bytes
            for one, decision in zip(candidates, decisions, strict=True)
            for level in one.levels
            if level.bits > decision.level.bits
        ]
        assert all(more > left for more in missing)
