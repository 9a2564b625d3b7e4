"""The caches change what is kept of earlier tokens, and what comes out as far as they say."""

from typing import Any

import pytest
from pydantic import ValidationError

from optigpu.backends.torch.kv_caches import new_cache
from optigpu.backends.torch.stack import cache_options
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.roofline import work_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import CacheOptions, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.kv_cache import KvCache
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import DeviceKind, SpecError
from tests.breadth import spread
from tests.engine.decoded import NEW_TOKENS, sequence_of
from tests.engine.model_calls import (
    LOOPS,
    WORKLOAD,
    assert_compiled_does_the_same,
    facts_of,
    seen,
    tensors_of,
)
from tests.engine.rounding import (
    DRAWS,
    SAFETY,
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
WINDOW = SlidingKvCache(window=4, sinks=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_kv_cache_computes_one_token_for_each_step(family: str) -> None:
    """It is the library's default, so what it adds by itself is that it is asked for, and what it is compared with."""

    def claim() -> None:
        assert KvCache().cache(CacheOptions(kind="none", int8=True)) == CacheOptions(
            kind="dynamic", int8=True
        )
        (reference,) = (TECHNIQUES[name](name=name) for name in KvCache.compared_with)
        kept, again = (seen(runtime_of(f"path:{family}", each)) for each in (KvCache(), reference))
        assert [call.tokens for call in kept] == [8, *[1] * (NEW_TOKENS - 1)]
        assert {type(call.cache).__name__ for call in kept} == {"DynamicCache"}
        assert sum(call.tokens for call in again) == sum(range(8, 8 + NEW_TOKENS))

    assert_needs_hook(KvCache(), "cache", claim)


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
def test_int8_kv_cache_stores_a_byte_for_each_number_and_a_scale(
    family: str, others: tuple[Technique, ...]
) -> None:
    import torch

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Int8KvCache(), *others)
        cache = seen(runtime)[-1].cache
        tensors = tensors_of(cache)
        assert {tensor.dtype for tensor in tensors[:2]} == {torch.int8}
        facts, shapes = runtime.notes.facts, runtime.facts
        numbers = 2 * shapes.layers * shapes.kv_heads * shapes.head_size
        scales = 2 * shapes.layers * shapes.kv_heads
        assert facts["kv_cache_bytes_per_token"] == numbers + 4 * scales
        room = cache.layers[0].keys.shape[-2]
        assert sum(tensor.nbytes for tensor in tensors) == 2 * room * (numbers + 4 * scales)

    assert_needs_hook(Int8KvCache(), "cache", claim)


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
def test_int8_kv_cache_is_off_by_what_its_rounding_explains(
    family: str, others: tuple[Technique, ...]
) -> None:
    runtime = runtime_of(f"path:{family}", Int8KvCache(), *others)
    reference = in_float64(runtime.model)
    tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
    sequence = sequence_of(tokens)
    bound = rounding_bound(reference, sequence, "float32") + cache_bound(reference, sequence)
    off = (runtime.logits(sequence) - logits_of(reference, sequence)).abs().max()
    assert rounding_bound(reference, sequence, "float32") < float(off) <= bound
    assert_greedy_as_far_as_it_can_be_told(reference, prompt(), tokens, bound)


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
def test_sliding_kv_cache_keeps_no_more_than_its_window(family: str, others: tuple[Technique, ...]) -> None:
    def claim() -> None:
        runtime = runtime_of(f"path:{family}", WINDOW, *others)
        cache = seen(runtime)[-1].cache
        assert {layer.keys.shape[-2] for layer in cache.layers} == {2 + 4}
        shapes, facts = runtime.facts, runtime.notes.facts
        token_bytes = 4 * 2 * shapes.layers * shapes.kv_heads * shapes.head_size
        assert sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(cache)) == 2 * 6 * token_bytes
        assert (facts["kv_cache_tokens"], facts["kv_cache_sinks"]) == (6, 2)

    assert_needs_hook(WINDOW, "cache", claim)


@pytest.mark.parametrize(
    ("family", "others"),
    spread(FAMILIES, [(loop,) for loop in (*LOOPS, (EagerAttention(),))], by_default=4),
)
def test_a_window_that_holds_everything_changes_nothing(family: str, others: tuple[Technique, ...]) -> None:
    plain = runtime_of(f"path:{family}", *others)
    wide = runtime_of(f"path:{family}", SlidingKvCache(window=12, sinks=2), *others)
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens
    assert wide.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
    assert wide.logits(sequence_of(tokens)).equal(plain.logits(sequence_of(tokens)))


@pytest.mark.long
def test_a_compiled_step_keeps_the_same() -> None:
    assert_compiled_does_the_same("llama", (InferenceMode(), Int8KvCache(), WINDOW), "float32")


@pytest.mark.parametrize(
    "stack",
    [(Int8KvCache(),), (WINDOW,), (Int8KvCache(), WINDOW)],
    ids=lambda stack: " + ".join(technique.name for technique in stack),
)
def test_the_roofline_counts_the_bytes_that_the_cache_holds(stack: tuple[Technique, ...]) -> None:
    runtime, uncached = runtime_of("path:llama", *stack), runtime_of("path:llama", NoKvCache())
    cache = new_cache(runtime.model, cache_options(stack), 8)
    runtime.model(input_ids=prompt(), past_key_values=cache, use_cache=True)
    held = sum(tensor.untyped_storage().nbytes() for tensor in tensors_of(cache))
    work, without = work_of(WORKLOAD, facts_of(runtime)), work_of(WORKLOAD, facts_of(uncached))
    assert work.prefill is not None
    assert without.prefill is not None
    assert work.prefill.bytes - without.prefill.bytes == held
    shapes, tokens = runtime.facts, 6 if WINDOW in stack else 8 + NEW_TOKENS / 2
    assert work.step.attention_flops == 2 * 4 * tokens * shapes.layers * shapes.heads * shapes.head_size


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (KvCache(), NoKvCache(), "one uses a key-value cache and the other disables it"),
        (KvCache(), StaticKvCache(), "grows"),
        (KvCache(), TorchCompile(), "never changes"),
        (Int8KvCache(), NoKvCache(), "one uses a key-value cache and the other disables it"),
        (WINDOW, NoKvCache(), "one uses a key-value cache and the other disables it"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_cannot_be_together_says_why(one: Technique, other: Technique, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        resolve((one, other), "generate")


@pytest.mark.parametrize("wrong", [{"window": 0}, {"window": -1}, {"window": 2**21}, {"sinks": -1}])
def test_a_window_without_tokens_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValidationError):
        SlidingKvCache(**wrong)


@pytest.mark.parametrize("technique", [KvCache(), Int8KvCache(), WINDOW])
def test_none_is_tried_that_was_not_asked_for(technique: Technique) -> None:
    environment = probe()
    assert not any(technique.suits(environment, device) for device in DeviceKind)


def cache_bound(reference: Any, tokens: Any) -> float:
    """SAFETY times the largest change of a logit when every key and value is off by up to half of its int8 scale."""
    import torch

    exact = logits_of(reference, tokens)
    torch.manual_seed(0)
    worst = 0.0
    for _ in range(DRAWS):
        with torch.no_grad():
            logits = reference(
                input_ids=tokens, past_key_values=disturbed_cache(reference), use_cache=True
            ).logits
        worst = max(worst, float((logits[:, -1] - exact).abs().max()))
    return SAFETY * worst


def disturbed_cache(reference: Any) -> Any:
    import torch
    from transformers import DynamicCache

    def disturbed(states: Any) -> Any:
        scale = states.abs().amax(dim=-1, keepdim=True) / 127
        return states + scale * (torch.rand_like(states) - 0.5)

    cache: Any = DynamicCache(config=reference.config)
    for layer in cache.layers:
        update = layer.update
        layer.update = lambda keys, values, *_, update=update: update(disturbed(keys), disturbed(values))
    return cache
