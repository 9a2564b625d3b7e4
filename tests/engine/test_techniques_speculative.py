"""speculative_decoding gives the tokens of greedy decoding in fewer passes, and says how many guesses were right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optigpu.backends.torch.device import CpuClock
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.models.described import facts_of
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.reference import parse_reference
from optigpu.surgery.speculation import PromptLookup, SpeculativeLoop
from optigpu.techniques.base import Notes
from optigpu.techniques.decoding.speculative_decoding import SpeculativeDecoding
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, ReplicateError, SpecError, UnsupportedError
from optigpu.workloads.batch_sweep import BatchSweep
from optigpu.workloads.generate import Generate
from tests.breadth import spread
from tests.engine.decoded import assert_tokens_right
from tests.engine.rounding import in_float64, logits_of, rounding_bound
from tests.engine.tiny_models import (
    FAMILIES,
    VOCABULARY,
    asked,
    assert_needs_hook,
    prompt,
    runtime_of,
    tiny_model,
)

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
NEW_TOKENS = 30


@pytest.mark.slow
@pytest.mark.parametrize(("family", "draft"), spread(FAMILIES, [None, "itself", "another"], by_default=4))
def test_the_tokens_are_those_of_greedy_decoding(family: str, draft: str | None) -> None:
    other = "path:llama" if family == "gpt2" else "path:gpt2"
    reference = {None: None, "itself": f"path:{family}", "another": other}[draft]
    runtime = runtime_of(f"path:{family}", SpeculativeDecoding(draft=reference))
    expected = runtime_of(f"path:{family}").generate(prompt(1), NEW_TOKENS).tokens
    for _ in range(2):
        assert runtime.generate(prompt(1), NEW_TOKENS).tokens.equal(expected)
    assert runtime.notes.facts["speculation_agreement"] == 1.0
    assert_tokens_right(runtime, in_float64(tiny_model(family)), prompt(1), expected)


def test_a_pass_of_the_model_gives_several_tokens() -> None:
    """A draft that is the model itself is always right: each pass gives `lookahead` tokens and one more."""

    def claim() -> None:
        runtime = runtime_of("path:gpt2", SpeculativeDecoding(draft="path:gpt2", lookahead=4))
        runtime.generate(prompt(1), 3)  # which is compared with the plain loop
        lengths = seen_lengths(runtime.model, lambda: runtime.generate(prompt(1), 16))
        assert lengths == [8, 5, 5, 5]
        facts = runtime.notes.facts
        assert facts["acceptance_rate"] == 1.0
        assert facts["tokens_per_pass"] == (2 + 15) / (1 + 3)

    assert_needs_hook(SpeculativeDecoding(), "loop", claim)


def test_tokens_of_one_pass_share_a_mark_and_have_no_times_of_their_own() -> None:
    runtime = runtime_of("path:gpt2", SpeculativeDecoding(draft="path:gpt2", lookahead=4))
    request = Generate(prompt_tokens=8, new_tokens=16).prepare(asked(runtime))
    found = request.run()
    gaps = runtime.generate(prompt(1), 16).gaps_s
    assert [index for index, gap in enumerate(gaps) if gap > 0] == [0, 1, 6, 11]
    assert found["tpot_s"] > 0
    described = request.described()
    assert {name: len(values) for name, values in described.items()} == {"pass_s": 3}
    plain = Generate(prompt_tokens=8, new_tokens=16).prepare(asked(runtime_of("path:gpt2")))
    plain.run()
    assert {name: len(values) for name, values in plain.described().items()} == {"token_s": 15}


@pytest.mark.parametrize(("family", "prefill"), spread(FAMILIES, [0, 5]))
def test_quality_is_that_of_the_passes_that_verify(family: str, prefill: int) -> None:
    """Scored tokens go through passes of `lookahead` + 1, as tokens that were guessed rightly do."""
    runtime = runtime_of(f"path:{family}", SpeculativeDecoding(lookahead=3), InferenceMode())
    tokens = prompt(1, 19)
    lengths = seen_lengths(runtime.model, lambda: list(runtime.score(tokens, prefill)))
    assert lengths == ([prefill] if prefill else []) + ([4] * 3 + [2] if prefill else [4] * 4 + [3])
    scored = torch.stack(list(runtime.score(tokens, prefill)))
    whole = torch.stack(list(runtime.whole(tokens, prefill)))
    assert scored.shape == (19 - prefill, 1, VOCABULARY)
    bound = rounding_bound(in_float64(tiny_model(family)), tokens, "float32")
    assert float((scored - whole).abs().max()) <= 2 * bound
    assert not torch.is_inference_mode_enabled()


def test_the_draft_is_in_memory_and_nothing_of_the_stack_is_applied_to_it() -> None:
    alone = runtime_of("path:gpt2", Int8WeightOnly())
    drafted = runtime_of("path:gpt2", Int8WeightOnly(), SpeculativeDecoding(draft="path:llama"))
    assert weight_bytes(drafted.model) - weight_bytes(alone.model) == weight_bytes(tiny_model("llama"))
    assert drafted.weights == alone.weights
    assert drafted.notes.facts["draft_weights"] == sum(w.numel() for w in tiny_model("llama").parameters())


def test_another_vocabulary_is_refused_and_the_model_left() -> None:
    model = tiny_model("gpt2")
    technique = SpeculativeDecoding(draft="preset:tiny-llama-test")
    with pytest.raises(UnsupportedError, match=r"has \d+ tokens and the model 96. Name another draft"):
        technique.loop(no_loop, model, Notes())
    assert not hasattr(model, "speculative_draft")
    facts = facts_of(parse_reference("preset:gpt2"))
    reason = technique.check(probe(), DeviceKind.CPU, facts)
    assert reason is not None
    assert "the model 50257" in reason
    assert SpeculativeDecoding(draft="preset:gpt2").check(probe(), DeviceKind.CPU, facts) is None


def test_a_batch_is_refused_when_a_job_is_posted_and_by_the_loop() -> None:
    job = {"model": "preset:gpt2", "stack": [{"name": "speculative_decoding"}]}
    assert JobSpec.model_validate(job | {"workload": {"kind": "generate"}}).stack == (SpeculativeDecoding(),)
    with pytest.raises(SpecError, match="one sequence at a time; set batch_size to 1"):
        JobSpec.model_validate(job | {"workload": {"kind": "generate", "batch_size": 2}})
    sweep = BatchSweep(batch_sizes=(1, 2))
    assert SpeculativeDecoding().fits(sweep) == SpeculativeDecoding().fits(Generate(batch_size=2))
    assert SpeculativeDecoding().fits(BatchSweep(batch_sizes=(1,))) is None
    with pytest.raises(UnsupportedError, match="needs a batch size of 1, not 2"):
        runtime_of("path:gpt2", SpeculativeDecoding()).generate(prompt(2), 4)


@pytest.mark.parametrize(
    ("sequence", "limit", "guesses"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, [9, 1]),
        ([7, 2, 3, 9, 1, 2, 3, 8, 4, 2, 3], 1, [8]),  # the last time it was seen
        ([5, 2, 3, 8, 6, 3, 4, 1, 2, 3], 3, [8, 6, 3]),  # two tokens rather than one
        ([4, 4, 4], 5, [4]),
        ([1, 2, 3], 5, []),
        ([1], 5, []),
        ([1, 2, 1], 0, []),
    ],
)
def test_prompt_lookup_guesses_what_followed_before(
    sequence: list[int], limit: int, guesses: list[int]
) -> None:
    assert PromptLookup(3).guess(sequence, limit) == guesses


def test_a_request_leaves_nothing_to_the_next() -> None:
    """Or the second of two equal prompts would be faster than a fresh one."""
    runtime = runtime_of("path:gpt2", SpeculativeDecoding(draft="path:llama", lookahead=2))
    runtime.generate(prompt(1), 4)
    draft = runtime.model.speculative_draft
    asked = seen_lengths(draft, lambda: runtime.generate(prompt(1), 4))
    assert asked[0] == 9


def test_tokens_that_rounding_does_not_explain_are_an_error() -> None:
    """As if verification were at fault: the model that verifies is not the one of the plain loop."""
    plain, wrong = runtime_of("path:gpt2"), tiny_model("gpt2").requires_grad_(False)
    wrong.transformer.ln_f.bias += 0.5
    loop = SpeculativeLoop(plain._decode, wrong, PromptLookup(3), 5, Notes())
    with pytest.raises(ReplicateError, match=r"where greedy decoding chooses \d+; their logits differ"):
        loop(prompt(1), NEW_TOKENS, CpuClock())


def test_a_tie_is_a_tie() -> None:
    """Two tokens with the very same weights in the head: the plain loop may choose either."""
    model = tiny_model("llama").requires_grad_(False)
    first = int(logits_of(model, prompt(1)).argmax())
    twin = (first + 1) % VOCABULARY
    model.lm_head.weight[twin] = model.lm_head.weight[first]
    notes = Notes()
    loop = SpeculativeLoop(choosing(max(first, twin)), model, PromptLookup(3), 5, notes)
    loop(prompt(1), 4, CpuClock())
    assert notes.facts["speculation_agreement"] == 0.0
    assert notes.facts["speculation_tie"] == 0.0


def choosing(token: int) -> Callable[[Any, int, Any], tuple[Any, list[Any]]]:
    """A loop that always gives the same token."""

    def loop(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
        return torch.full((1, new_tokens), token), [clock.mark()] * (new_tokens + 1)

    return loop


def no_loop(prompt: Any, new_tokens: int, clock: Any) -> tuple[Any, list[Any]]:
    raise AssertionError("nothing was to be decoded")


def seen_lengths(model: Any, run: Callable[[], Any]) -> list[int]:
    """How many tokens each pass of the model is given."""
    seen: list[int] = []

    def see(module: Any, arguments: Any, named: dict[str, Any]) -> None:
        seen.append(named["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(see, with_kwargs=True)
    run()
    handle.remove()
    return seen
