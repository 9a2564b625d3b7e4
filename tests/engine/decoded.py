"""What a model decodes, beside a float64 model of the same weights, and the operators that it runs meanwhile."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from optigpu.backends.torch.applied import DecodingModel
from optigpu.techniques.base import Technique
from tests.engine.rounding import (
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.tiny_models import prompt, runtime_of, tiny_model

NEW_TOKENS = 6


def assert_right(
    runtime: DecodingModel, reference: Any, dtype: str = "float32", prompts: Any | None = None
) -> None:
    """Logits within the rounding of `dtype` around the float64 reference, and its greedy tokens."""
    assert_right_within(
        runtime, reference, lambda sequence: rounding_bound(reference, sequence, dtype), prompts
    )


def assert_right_within(
    runtime: DecodingModel, reference: Any, bound_of: Callable[[Any], float], prompts: Any | None = None
) -> None:
    """Logits within a sequence's bound around the float64 reference, and its greedy tokens."""
    prompts = prompt() if prompts is None else prompts
    tokens = runtime.generate(prompts, NEW_TOKENS).tokens
    assert tokens.shape == (len(prompts), NEW_TOKENS)
    assert_tokens_right(runtime, reference, prompts, tokens, bound_of(sequence_of(tokens, prompts)))


def assert_tokens_right(
    runtime: DecodingModel, reference: Any, prompts: Any, tokens: Any, bound: float | None = None
) -> None:
    """The same for tokens that were decoded before; without a bound, within the rounding of float32."""
    sequence = sequence_of(tokens, prompts)
    if bound is None:
        bound = rounding_bound(reference, sequence, "float32")
    assert float((runtime.logits(sequence) - logits_of(reference, sequence)).abs().max()) <= bound
    assert_greedy_as_far_as_it_can_be_told(reference, prompts, tokens, bound)


def assert_same_logits(runtime: DecodingModel, plain: DecodingModel, family: str) -> None:
    """Of two runs of the same model, each as far from the truth as rounding allows."""
    sequence = prompt(2, 8 + NEW_TOKENS - 1)
    bound = rounding_bound(in_float64(tiny_model(family)), sequence, "float32")
    assert float((runtime.logits(sequence) - plain.logits(sequence)).abs().max()) <= 2 * bound


def sequence_of(tokens: Any, prompts: Any | None = None) -> Any:
    """The prompts and all tokens but the last, whose logits come after them."""
    return torch.cat([prompt() if prompts is None else prompts, tokens[:, :-1]], dim=1)


def operators_run(runtime: DecodingModel) -> Counter[str]:
    """How often each operator runs in one request: a prompt and NEW_TOKENS - 1 single tokens, so NEW_TOKENS passes."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        runtime.generate(prompt(), NEW_TOKENS)
    return Counter({event.key: event.count for event in profiler.key_averages()})


def operators(name: str, *stack: Technique) -> Counter[str]:
    """How often each operator runs in one request of a model with a stack."""
    return operators_run(runtime_of(f"path:{name}", *stack))
