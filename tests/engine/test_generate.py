"""generate: what a request yields, and what its check finds."""

from typing import Any

import numpy as np
import pytest

from optigpu.backends.runtime import Generation
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.models.facts import facts_of
from optigpu.models.reference import parse_reference
from optigpu.workloads.generate import Generate
from tests.engine.quality_contexts import OwnLoop
from tests.engine.tiny_models import VOCABULARY, asked, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")
SHAPES = Generate(prompt_tokens=8, new_tokens=5, batch_size=2)


@pytest.fixture(scope="module")
def runtime(models_dir: Any) -> TorchDecodingRuntime:
    return asked(runtime_of("path:gpt2"))


def test_a_request_yields_each_metric_that_the_workload_names(runtime: TorchDecodingRuntime) -> None:
    assert tuple(SHAPES.prepare(runtime).run()) == Generate.metrics


def test_the_metrics_follow_from_the_moments_of_the_tokens(
    runtime: TorchDecodingRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = SHAPES.prepare(runtime)
    gaps = [0.5, 0.1, 0.2, 0.1, 0.1]
    monkeypatch.setattr(runtime, "generate", lambda prompt, _: Generation(prompt, gaps))
    assert request.run() == pytest.approx(
        {
            "ttft_s": 0.5,
            "tpot_s": 0.125,
            "tokens_per_s": 4 * 2 / 0.5,
            "latency_s": 1.0,
            "requests_per_s": 2.0,
        }
    )


def test_the_seed_chooses_the_prompts(runtime: TorchDecodingRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def see(prompt: Any, new_tokens: int) -> Generation:
        seen.append(prompt)
        return Generation(prompt, [1.0] * new_tokens)

    monkeypatch.setattr(runtime, "generate", see)
    for seed in (1, 1, 2):
        monkeypatch.setattr(runtime, "seed", seed)
        SHAPES.prepare(runtime).run()
    first, again, other = seen
    assert first.shape == (2, 8)
    assert int(first.max()) < VOCABULARY
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_sound_output_passes(runtime: TorchDecodingRuntime) -> None:
    check = SHAPES.prepare(runtime).check()
    assert check.problem is None
    assert check.request_s > 0


def test_an_infinite_logit_is_a_problem() -> None:
    applied = runtime_of("path:llama")
    applied.model.get_output_embeddings().weight[3, 0] = float("inf")
    problem = SHAPES.prepare(asked(applied)).check().problem
    assert problem is not None
    assert "logits of 4 steps are NaN or infinite" in problem


def test_a_missing_token_is_a_problem(runtime: TorchDecodingRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = runtime.generate

    def one_less(prompt: Any, new_tokens: int) -> Generation:
        generation = decode(prompt, new_tokens)
        return Generation(generation.tokens[:, :-1], generation.gaps_s)

    monkeypatch.setattr(runtime, "generate", one_less)
    assert (
        SHAPES.prepare(runtime).check().problem == "Decoding gave tokens of shape (2, 4) instead of (2, 5)."
    )


def test_where_the_timed_loop_gives_no_logits_the_result_says_that_the_model_s_own_were_checked() -> None:
    without, scoring = (asked(runtime_of("path:gpt2", OwnLoop(scores=scores))) for scores in (False, True))
    check = SHAPES.prepare(without).check()
    assert check.problem is None
    assert str(check.details["logits_not_of_the_timed_loop"]).startswith(
        "own_loop replaces the decode loop by one that gives no logits"
    )
    assert SHAPES.prepare(scoring).check().details == {}
    without.decoding.model.get_output_embeddings().weight[3, 0] = float("nan")
    assert "NaN or infinite" in (SHAPES.prepare(without).check().problem or "")


@pytest.mark.parametrize(("prompt_tokens", "fits"), [(960, True), (961, False)])
def test_prompt_and_continuation_must_fit_the_context(prompt_tokens: int, fits: bool) -> None:
    facts = facts_of(parse_reference("preset:gpt2"))
    assert facts is not None
    problem = Generate(prompt_tokens=prompt_tokens, new_tokens=64).check(facts)
    assert (problem is None) == fits
