"""generate from a text, with tokens drawn by chance: what is decoded, what a result keeps, and what is refused."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from optigpu.backends.llama_cpp import LlamaCppBackend
from optigpu.backends.runtime import DecodingRuntime, Sampling
from optigpu.child.messages import Ready
from optigpu.hardware.probe import probe
from optigpu.job.plan import variants_of, with_default_stack
from optigpu.job.spec import JobSpec
from optigpu.report.leaderboard import workload_text
from optigpu.roofline.work import work_of
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import SpecError, UnsupportedError
from optigpu.workloads.generate import Generate
from tests.engine.in_process import in_process
from tests.engine.quality_contexts import OwnLoop, Spy
from tests.engine.test_replicate import answer, assignment
from tests.engine.tiny_models import asked, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir")
TEXT = "def main("
SAMPLED = Sampling(temperature=1.5, top_p=0.9, seed=3)


@pytest.fixture(scope="module")
def tiny() -> Any:
    return asked(runtime_of("bundled:tiny"))


def test_a_text_is_continued_as_the_library_continues_it(tiny: Any) -> None:
    import torch
    from transformers import AutoTokenizer

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


def test_drawing_goes_through_the_step_of_the_stack() -> None:
    technique = Spy()

    def steps_are_seen() -> None:
        runtime = asked(runtime_of("path:gpt2", technique, StaticKvCache()))
        runtime.draw(prompt().numpy(), 5, SAMPLED)
        assert len(runtime.notes.facts.get("seen", [])) == 4

    assert_needs_hook(technique, "step", steps_are_seen)


def test_drawn_tokens_follow_the_models_distribution() -> None:
    """At a temperature near 0, and with a top_p that only the first token reaches, the draw is the greedy choice."""
    runtime = asked(runtime_of("path:llama"))
    given = prompt().numpy()
    greedy = runtime.generate(given, 8).tokens
    for sampling in (Sampling(1e-4, 1.0, 0), Sampling(1.0, 1e-6, 0)):
        assert np.array_equal(runtime.draw(given, 8, sampling).tokens, greedy)


def test_torchs_random_state_stays_as_it_was() -> None:
    import torch

    runtime = asked(runtime_of("path:gpt2"))
    before = torch.random.get_rng_state()
    runtime.draw(prompt().numpy(), 3, SAMPLED)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_loop_of_a_techniques_own_draws_nothing() -> None:
    runtime = asked(runtime_of("path:gpt2", OwnLoop(scores=True)))
    with pytest.raises(UnsupportedError, match="own_loop replaces the decode loop by a greedy one"):
        runtime.draw(prompt().numpy(), 3, SAMPLED)


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


def test_an_engine_without_a_tokenizer_is_refused_in_the_measuring_process() -> None:
    greedy = cast(DecodingRuntime, SimpleNamespace(notes=Notes(), seed=0))
    for workload in (Generate(prompt=TEXT), Generate(temperature=1)):
        with pytest.raises(UnsupportedError, match="reads no text and draws no tokens"):
            workload.prepare(greedy)


def test_a_text_that_is_longer_than_the_context_is_refused(tiny: Any) -> None:
    with pytest.raises(UnsupportedError, match="exceeds the model's context of 512 tokens"):
        Generate(prompt="word " * 600, new_tokens=4).prepare(tiny)


def spec(workload: dict[str, Any], **fields: Any) -> JobSpec:
    return JobSpec.model_validate(
        {"workload": {"kind": "generate"} | workload, "model": "bundled:tiny"} | fields
    )


@pytest.mark.parametrize(
    ("workload", "fields", "said"),
    [
        ({"prompt": TEXT}, {"model": "preset:tiny-gpt2-test"}, "random weights and no tokenizer"),
        ({"prompt": TEXT, "prompt_tokens": 9}, {}, "prompt_tokens follows from prompt"),
        ({"prompt_tokens": None}, {}, "name one of the two"),
        ({"top_p": 0.5}, {}, "top_p needs a temperature above 0"),
        (
            {"temperature": 1},
            {"stack": [{"name": "native_decode"}]},
            "native_decode takes the most likely tokens",
        ),
        (
            {"temperature": 1},
            {"stack": [{"name": "speculative_decoding"}]},
            "speculative_decoding takes the most likely tokens",
        ),
        ({"temperature": 1}, {"backend": "llama_cpp"}, "ask for the backend torch"),
        ({"prompt": TEXT}, {"backend": "llama_cpp"}, "ask for the backend torch"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_posted(
    workload: dict[str, Any], fields: dict[str, Any], said: str
) -> None:
    with pytest.raises(SpecError, match=said):
        spec(workload, **fields)


def test_a_ladder_without_a_stack_leaves_out_what_cannot_draw() -> None:
    greedy, drawn = (
        with_default_stack(spec(shapes, plan="ladder"), probe()) for shapes in ({}, {"temperature": 1})
    )
    assert "native_decode" in {each.name for beside in greedy.beside for each in beside.stack}
    assert "native_decode" not in {each.name for beside in drawn.beside for each in beside.stack}
    assert drawn.stack == greedy.stack


def test_llama_cpp_still_runs_random_prompts_greedily() -> None:
    assert LlamaCppBackend().supports(Generate(), None) is None


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


def test_a_spec_with_a_text_survives_its_own_json() -> None:
    asked_for = spec({"prompt": TEXT, "temperature": 0.7}, plan="ladder", stack=[{"name": "bf16"}])
    assert JobSpec.model_validate_json(asked_for.model_dump_json()) == asked_for
    assert [variant.label for variant in variants_of(asked_for)] == ["baseline", "bf16"]


def test_a_title_shows_the_beginning_of_the_text_and_how_tokens_are_drawn() -> None:
    long = Generate(prompt="a b " * 50, new_tokens=4, temperature=0.8, top_p=0.9).model_dump(mode="json")
    text = workload_text(long, "bundled:tiny")
    assert text.startswith('generate bundled:tiny "a b a b ')
    assert text.endswith('..."+4 x1 at temperature 0.8, top_p 0.9')
    assert len(text) < 120
    assert workload_text(Generate().model_dump(mode="json"), "m") == "generate m 128+128 x1"
