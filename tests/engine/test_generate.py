"""generate from random prompts and from a text: what a request yields, what its check finds, what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from optigpu.backends.runtime import Generation, Sampling
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.child.messages import Ready
from optigpu.job.spec import JobSpec
from optigpu.roofline.work import work_of
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import SpecError
from optigpu.workloads.generate import Generate
from optigpu.workloads.requests import LOOK_TOKENS, PER_TOKEN
from tests.engine.measuring import in_process
from tests.engine.meter_contexts import OwnLoop, Spy
from tests.engine.test_replicate import answer, assignment
from tests.engine.tiny_models import asked, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")

SHAPES = Generate(prompt_tokens=8, new_tokens=5, batch_size=2)


@pytest.fixture(scope="module")
def runtime(models_dir: Any) -> TorchDecodingRuntime:
    return asked(runtime_of("path:gpt2"))


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


def test_a_look_is_some_steps_in_the_middle_of_the_text(runtime: TorchDecodingRuntime) -> None:
    asked_for: list[tuple[tuple[int, ...], int]] = []
    decode = runtime.generate

    def noted(prompt: Any, new_tokens: int) -> Generation:
        asked_for.append((prompt.shape, new_tokens))
        return decode(prompt, new_tokens)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "generate", noted)
        long, short = (Generate(prompt_tokens=4, new_tokens=new, batch_size=2) for new in (20, 5))
        steps, whole = (workload.prepare(runtime).look() for workload in (long, short))
    assert asked_for == [((2, 4 + 6), LOOK_TOKENS), ((2, 4), 5)]
    assert {name: len(values) for name, values in steps.items()} == dict.fromkeys(PER_TOKEN, LOOK_TOKENS - 1)
    assert [2 / seconds for seconds in steps["tpot_s"]] == pytest.approx(steps["tokens_per_s"])
    assert {len(values) for values in whole.values()} == {1}


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


TEXT = "def main("
SAMPLED = Sampling(temperature=1.5, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return asked(runtime_of("bundled:tiny"))


def test_a_text_is_continued_as_the_library_continues_it(tiny: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.decoding.model.name_or_path)
    ids = torch.tensor([tokenizer.encode(TEXT)])
    whole = tiny.decoding.model.generate(ids, max_new_tokens=12, do_sample=False)
    check = Generate(prompt=TEXT, new_tokens=12, batch_size=2).prepare(tiny).check()
    assert check.problem is None
    assert check.details["output_text"] == tokenizer.decode(whole[0, ids.shape[1] :])
    assert tiny.notes.facts["prompt_tokens"] == ids.shape[1]


def test_fresh_requests_are_as_long_and_go_on_from_other_tokens(tiny: Any) -> None:
    request = Generate(prompt=TEXT, new_tokens=4).prepare(tiny)
    fresh = request.fresh(7)
    assert fresh._prompt.shape == request._prompt.shape
    assert not np.array_equal(fresh._prompt, request._prompt)
    assert set(fresh.run()) == set(Generate.metrics)


@pytest.mark.parametrize("stack", [(), (StaticKvCache(),), (Spy(),)], ids=str)
def test_the_same_seed_draws_the_same_tokens_in_both_loops(stack: tuple[Technique, ...]) -> None:
    plain, other = asked(runtime_of("path:gpt2")), asked(runtime_of("path:gpt2", *stack))
    given = prompt().numpy()
    drawn = other.draw(given, 10, SAMPLED).tokens
    assert np.array_equal(drawn, plain.draw(given, 10, SAMPLED).tokens)
    assert np.array_equal(drawn, other.draw(given, 10, SAMPLED).tokens)
    assert not np.array_equal(drawn, other.draw(given, 10, Sampling(1.5, 0.9, seed=4)).tokens)
    assert not np.array_equal(drawn, other.generate(given, 10).tokens)


def test_drawn_tokens_follow_the_models_distribution() -> None:
    """At a temperature near 0, and with a top_p that only the first token reaches, the draw is the greedy choice."""
    runtime = asked(runtime_of("path:llama"))
    given = prompt().numpy()
    greedy = runtime.generate(given, 8).tokens
    for sampling in (Sampling(1e-4, 1.0, 0), Sampling(1.0, 1e-6, 0)):
        assert np.array_equal(runtime.draw(given, 8, sampling).tokens, greedy)


@pytest.mark.slow
def test_a_measuring_process_keeps_the_text_and_the_length_of_the_prompt() -> None:
    with in_process() as child:
        shapes = {"kind": "generate", "prompt": TEXT, "new_tokens": 6, "temperature": 0.8, "top_p": 0.9}
        child.tell(assignment(shapes, "bundled:tiny"))
        ready = answer(child)
    assert isinstance(ready, Ready), ready
    assert ready.problem is None
    assert isinstance(ready.facts.recorded["output_text"], str)
    assert ready.facts.recorded["sampling"] == {"temperature": 0.8, "top_p": 0.9, "seed": 0}
    length = ready.facts.prompt_tokens
    assert length is not None
    assert 1 < length < 128
    by_text = work_of(Generate(prompt=TEXT, new_tokens=6), ready.facts)
    by_length = work_of(Generate(prompt_tokens=length, new_tokens=6), ready.facts)
    assert by_text == by_length


def spec(workload: dict[str, Any], **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"workload": {"kind": "generate"} | workload, "model": "bundled:tiny"} | fields
    )


@pytest.mark.parametrize(
    ("workload", "fields", "said"),
    [
        ({"prompt": TEXT}, {"model": "preset:tiny-gpt2-test"}, "random weights and no tokenizer"),
        ({"prompt": TEXT, "prompt_tokens": 9}, {}, "prompt_tokens follows from prompt"),
        ({"top_p": 0.5}, {}, "top_p needs a temperature above 0"),
        (
            {"temperature": 1},
            {"stack": [{"name": "native_decode"}]},
            "native_decode takes the most likely tokens",
        ),
        ({"prompt": TEXT}, {"backend": "llama_cpp"}, "ask for the backend torch"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_posted(
    workload: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        spec(workload, **fields)


def test_new_fields_at_their_defaults_are_no_part_of_the_digest() -> None:
    assert Generate().identity() == {
        "kind": "generate",
        "prompt_tokens": 128,
        "new_tokens": 128,
        "batch_size": 1,
    }
    assert Generate(prompt=TEXT, temperature=0.5).identity() == {
        "kind": "generate",
        "prompt": TEXT,
        "temperature": 0.5,
        "new_tokens": 128,
        "batch_size": 1,
    }
