"""Caches, inference_mode, autocast and grad_enabled: what is kept of tokens and of passes, and what comes out."""

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch.nn import Linear
from transformers import DynamicCache
from transformers.pytorch_utils import Conv1D

from optigpu.backends.torch import cache_options
from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.kv_caches import new_cache
from optigpu.documents.facts import Footprint, RunFacts
from optigpu.models.loading.footprint import footprint_of
from optigpu.roofline.work import work_of
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import CacheOptions, Notes, Phase, Step, Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.grad_enabled import GradEnabled
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.kv_cache import KvCache
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.vocabulary import Layer
from optigpu.workloads.generate import Generate
from tests.breadth import cases, spread
from tests.engine.decoded import NEW_TOKENS, sequence_of
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
WORKLOAD = Generate(prompt_tokens=8, new_tokens=NEW_TOKENS, batch_size=2)
"""What `seen` runs, to a roofline."""


class OwnStep(Technique):
    """Makes the backend decode in its lean loop, and changes nothing."""

    layer = Layer.COMPILATION
    phase = Phase.COMPILATION
    name: Literal["own_step"] = "own_step"

    def step(self, step: Step, notes: Notes) -> Step:
        return step


LOOPS = [(), (OwnStep(),), (OwnStep(), StaticKvCache())]
FAMILIES_AND_LOOPS = spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=3)


class Call:
    """What the model was given once and what it gave."""

    def __init__(self, tokens: int, cache: Any, logits: Any) -> None:
        self.tokens, self.cache, self.logits = tokens, cache, logits


def seen(runtime: DecodingModel, run: Callable[[], Any] | None = None) -> list[Call]:
    """The model's calls while it generates, or while `run` does what it does."""
    calls = []

    def see(module: Any, arguments: Any, named: dict[str, Any], output: Any) -> None:
        calls.append(Call(named["input_ids"].shape[1], named.get("past_key_values"), output.logits))

    handle = runtime.model.register_forward_hook(see, with_kwargs=True)
    (run or (lambda: runtime.generate(prompt(), NEW_TOKENS)))()
    handle.remove()
    return calls


def tensors_of(cache: Any) -> list[Any]:
    """All that the layers of a cache hold: keys, values, and scales where there are any."""
    return [
        tensor
        for layer in cache.layers
        for tensor in (getattr(layer, "parts", None) or (layer.keys, layer.values))
    ]


def facts_of(runtime: DecodingModel) -> RunFacts:
    """What a result's facts hold that a roofline reads."""
    footprint = footprint_of(runtime.model, runtime.facts)
    return RunFacts.gathered(runtime.notes.facts | {"footprint": footprint})


def assert_compiled_does_the_same(family: str, stack: tuple[Technique, ...], dtype: str) -> None:
    """A compiled step gives the tokens of the plain one, again and again, and logits within the rounding of `dtype`."""
    plain = runtime_of(f"path:{family}", *stack, StaticKvCache())
    compiled = runtime_of(f"path:{family}", *stack, TorchCompile())
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens
    for _ in range(2):
        assert compiled.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
    assert compiled.notes.facts["compiled_graphs"] == 1
    sequence = sequence_of(tokens)
    bound = rounding_bound(in_float64(plain.model), sequence, dtype)
    assert float((compiled.logits(sequence) - plain.logits(sequence)).abs().max()) <= 2 * bound


WINDOW = SlidingKvCache(window=4, sinks=2)


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_kv_cache_computes_one_token_for_each_step(family: str) -> None:
    """It is the library's default, so what it adds by itself is that it is asked for, and what it is compared with."""

    def claim() -> None:
        asked = KvCache().cache(CacheOptions(kind="none", int8=True))
        assert asked == CacheOptions(kind="dynamic", int8=True)
        (reference,) = (TECHNIQUES[name](name=name) for name in KvCache.compared_with)
        kept, again = (seen(runtime_of(f"path:{family}", each)) for each in (KvCache(), reference))
        assert [call.tokens for call in kept] == [8, *[1] * (NEW_TOKENS - 1)]
        assert {type(call.cache).__name__ for call in kept} == {"DynamicCache"}
        assert sum(call.tokens for call in again) == sum(range(8, 8 + NEW_TOKENS))

    assert_needs_hook(KvCache(), "cache", claim)


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_static_kv_cache_has_its_full_length_from_the_start(family: str) -> None:
    def claim() -> None:
        caches = [call.cache for call in seen(runtime_of(f"path:{family}", StaticKvCache()))]
        assert [type(cache).__name__ for cache in caches] == ["StaticCache"] * NEW_TOKENS
        assert {cache.layers[0].max_cache_len for cache in caches} <= {8 + NEW_TOKENS, 8 + NEW_TOKENS - 1}

    assert_needs_hook(StaticKvCache(), "cache", claim)


@pytest.mark.parametrize("family", cases(FAMILIES))
def test_no_kv_cache_runs_the_whole_sequence_for_each_token(family: str) -> None:
    def claim() -> None:
        calls = seen(runtime_of(f"path:{family}", NoKvCache()))
        assert [call.tokens for call in calls] == [8 + index for index in range(NEW_TOKENS)]
        assert {call.cache for call in calls} == {None}

    assert_needs_hook(NoKvCache(), "cache", claim)


@pytest.mark.parametrize(("family", "others"), FAMILIES_AND_LOOPS)
def test_int8_kv_cache_stores_a_byte_for_each_number_and_a_scale(
    family: str, others: tuple[Technique, ...]
) -> None:
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


@pytest.mark.parametrize(("family", "others"), FAMILIES_AND_LOOPS)
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


@pytest.mark.parametrize(("family", "others"), FAMILIES_AND_LOOPS)
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
    [*FAMILIES_AND_LOOPS, ("llama", (EagerAttention(),))],
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


def cache_bound(reference: Any, tokens: Any) -> float:
    """SAFETY times the largest change of a logit when every key and value is off by up to half of its int8 scale."""
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
    def disturbed(states: Any) -> Any:
        scale = states.abs().amax(dim=-1, keepdim=True) / 127
        return states + scale * (torch.rand_like(states) - 0.5)

    cache: Any = DynamicCache(config=reference.config)
    for layer in cache.layers:
        update = layer.update
        layer.update = lambda keys, values, *_, update=update: update(disturbed(keys), disturbed(values))
    return cache


# ---- How passes run, and what is kept for them.


@pytest.mark.parametrize(("family", "others"), FAMILIES_AND_LOOPS)
def test_inference_mode_leaves_nothing_for_autograd_and_every_bit_as_it_was(
    family: str, others: tuple[Technique, ...]
) -> None:
    plain = runtime_of(f"path:{family}", *others)
    tokens = plain.generate(prompt(), NEW_TOKENS).tokens

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", InferenceMode(), *others)
        for calls in (seen(runtime), seen(runtime, lambda: runtime.logits(prompt()))):
            assert all(call.logits.is_inference() for call in calls)
            assert all(tensor.is_inference() for tensor in tensors_of(calls[-1].cache))
        assert runtime.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
        assert runtime.logits(sequence_of(tokens)).equal(plain.logits(sequence_of(tokens)))
        assert runtime.notes.facts["autograd"] == "inference"

    assert_needs_hook(InferenceMode(), "execution", claim)


@pytest.mark.parametrize(("family", "others"), FAMILIES_AND_LOOPS)
def test_autocast_computes_products_in_bfloat16_with_weights_in_float32(
    family: str, others: tuple[Technique, ...]
) -> None:
    def claim() -> None:
        runtime = runtime_of(f"path:{family}", Autocast(), *others)
        dtypes, tokens = products(runtime)
        assert dtypes == {torch.bfloat16}
        assert {parameter.dtype for parameter in runtime.model.parameters()} == {torch.float32}
        reference = in_float64(runtime.model)
        sequence = sequence_of(tokens)
        bound = rounding_bound(reference, sequence, "bfloat16")
        assert float((runtime.logits(sequence) - logits_of(reference, sequence)).abs().max()) <= bound
        assert_greedy_as_far_as_it_can_be_told(reference, prompt(), tokens, bound)

    assert_needs_hook(Autocast(), "execution", claim)


def test_a_static_cache_under_autocast_holds_keys_and_values_of_two_types() -> None:
    """Rotation leaves Llama's keys in float32; the library's static layer would refuse the values."""

    def claim() -> None:
        try:
            cache = seen(runtime_of("path:llama", Autocast(), StaticKvCache()))[-1].cache
        except RuntimeError as error:
            raise AssertionError from error
        assert (cache.layers[0].keys.dtype, cache.layers[0].values.dtype) == (torch.float32, torch.bfloat16)

    assert_needs_hook(Autocast(), "cache", claim)


@pytest.mark.parametrize(
    ("hook", "family", "others"),
    spread(["execution", "modules"], FAMILIES, [(loop,) for loop in LOOPS[:2]], by_default=3),
)
def test_grad_enabled_keeps_what_gradients_need(
    hook: str, family: str, others: tuple[Technique, ...]
) -> None:
    tokens = runtime_of(f"path:{family}").generate(prompt(), NEW_TOKENS).tokens

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", GradEnabled(), *others)
        last = seen(runtime)[-1]
        assert last.logits.grad_fn is not None
        assert all(tensor.grad_fn is not None for tensor in tensors_of(last.cache))
        assert runtime.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
        weights = len(list(runtime.model.parameters()))
        assert runtime.notes.facts["weights_with_gradient"] == weights

    assert_needs_hook(GradEnabled(), hook, claim)


def test_the_roofline_holds_autocast_against_the_rate_and_the_bytes_of_its_type() -> None:
    """The prompt's pass reads the weights as they are, the steps as they were converted."""
    plain, narrow = (facts_of(runtime_of("path:gpt2", *stack)) for stack in ((), (Autocast(),)))
    before, after = work_of(WORKLOAD, plain), work_of(WORKLOAD, narrow)
    assert (before.dtypes, after.dtypes) == (("float32",), ("bfloat16",))
    assert isinstance(narrow.footprint, Footprint)
    rows = narrow.footprint.row_bytes
    assert after.step.bytes - 2 * rows == (before.step.bytes - 2 * rows) / 2
    assert before.prefill is not None
    assert after.prefill is not None
    assert after.prefill.bytes > narrow.footprint.streamed_bytes


@pytest.mark.long
def test_a_compiled_step_computes_under_autocast() -> None:
    assert_compiled_does_the_same("llama", (Autocast(),), "bfloat16")


def products(runtime: DecodingModel) -> tuple[set[Any], Any]:
    """The dtypes that come out of the linear layers during a request, and its tokens."""
    dtypes = set()

    def see(module: Any, inputs: Any, output: Any) -> None:
        dtypes.add(output.dtype)

    layers = [module for module in runtime.model.modules() if isinstance(module, (Linear, Conv1D))]
    handles = [layer.register_forward_hook(see) for layer in layers]
    tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
    for handle in handles:
        handle.remove()
    return dtypes, tokens
