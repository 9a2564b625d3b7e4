"""What the check of a request finds in its tokens and inputs, on a model that is one table of successors."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optigpu.backends.runtime import Generation, Ids, Logits, Pass
from optigpu.workloads.quality import ScoringRequest
from optigpu.workloads.requests.decoding import CHECKED_S, DecodingRequest, PassRequest, checked_places

VOCABULARY, PROMPT, NEW_TOKENS = 50, 8, 40
TABLE = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32)
CHANGED = "The request changed its own inputs, so that what was timed is not what was asked for."


class Table:
    """Decodes by its table; a request takes `request_s`."""

    seed = 0
    facts = SimpleNamespace(vocabulary=VOCABULARY)

    def __init__(self, request_s: float = 0.1) -> None:
        self._gaps_s = [request_s / NEW_TOKENS] * NEW_TOKENS

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        tokens = [prompt[:, -1]]
        for _ in range(new_tokens):
            tokens.append(TABLE[tokens[-1]].argmax(axis=-1))
        return Generation(np.stack(tokens[1:], axis=1), self._gaps_s)

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        for place in range(prefill, tokens.shape[1]):
            yield TABLE[tokens[:, place]]

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        return 0.1

    def forward(self, inputs: Ids) -> Pass:
        logits = TABLE[inputs[:, -1]]
        return Pass(logits, logits.argmax(axis=-1), 0.1)


class Between(Table):
    """Decodes the first and the last tokens alone, and makes up those between."""

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        honest = super().generate(prompt, new_tokens)
        tokens = honest.tokens.copy()
        tokens[:, 4:-4] = 7
        return Generation(tokens, honest.gaps_s)


def decoding(runtime: Any) -> DecodingRequest:
    return DecodingRequest(runtime, (2, PROMPT), NEW_TOKENS)


def passing(runtime: Any) -> PassRequest:
    draw = lambda source: source.integers(VOCABULARY, size=(2, PROMPT))  # noqa: E731
    return PassRequest(runtime, draw, (2, VOCABULARY), lambda seconds: {"latency_s": seconds})


def scoring(runtime: Any) -> ScoringRequest:
    return ScoringRequest(runtime, 0, (2, 20))


@pytest.mark.parametrize("request_s", [0.1, 100.0])
def test_tokens_that_the_logits_choose_pass_and_made_up_ones_do_not(request_s: float) -> None:
    assert decoding(Table(request_s)).check().problem is None
    problem = decoding(Between(request_s)).check().problem
    assert "are not what the engine predicts after the same tokens" in (problem or "")


def test_of_a_long_request_places_are_checked_that_nobody_knows_before() -> None:
    assert checked_places(PROMPT, 100, CHECKED_S, seed=0) == (PROMPT, 100)
    begins = {checked_places(PROMPT, 100, 10 * CHECKED_S, seed) for seed in range(50)}
    assert len(begins) > 20
    assert all(PROMPT <= begin < end <= 100 for begin, end in begins)


@pytest.mark.parametrize("make", [decoding, passing, scoring], ids=lambda make: make.__name__)
def test_timed_inputs_that_were_changed_are_found_by_the_check_of_fresh_ones(make: Any) -> None:
    request = make(Table())
    fresh = request.fresh(3)
    assert fresh.check().problem is None
    inputs = next(
        getattr(request, name) for name in ("_prompt", "_inputs", "_tokens") if hasattr(request, name)
    )
    inputs[0, 0] += 1
    assert fresh.check().problem == CHANGED
