"""inference_mode, autocast and grad_enabled change how forward passes run, in every loop, and what is kept for them."""

from collections import Counter
from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.documents.shapes import Footprint
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.roofline import work_of
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.grad_enabled import GradEnabled
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
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
from tests.engine.pairs import pairwise
from tests.engine.rounding import (
    assert_greedy_as_far_as_it_can_be_told,
    in_float64,
    logits_of,
    rounding_bound,
)
from tests.engine.tiny_models import FAMILIES, assert_needs_hook, prompt, runtime_of

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
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


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
def test_autocast_computes_products_in_bfloat16_with_weights_in_float32(
    family: str, others: tuple[Technique, ...]
) -> None:
    import torch

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


@pytest.mark.parametrize(("family", "others"), spread(FAMILIES, [(loop,) for loop in LOOPS], by_default=4))
def test_autocast_converts_each_weight_once_in_a_request(family: str, others: tuple[Technique, ...]) -> None:
    def claim() -> None:
        converted = conversions(runtime_of(f"path:{family}", Autocast(), *others))
        assert set(converted.values()) == {1}

    assert_needs_hook(Autocast(), "modules", claim)


def test_in_inference_mode_torch_keeps_no_conversion() -> None:
    runtime = runtime_of("path:gpt2", Autocast(), InferenceMode())
    assert set(conversions(runtime).values()) == {NEW_TOKENS}
    facts = facts_of(runtime)
    assert isinstance(facts.footprint, Footprint)
    assert work_of(WORKLOAD, facts).step.bytes > facts.footprint.streamed_bytes


def test_a_static_cache_under_autocast_holds_keys_and_values_of_two_types() -> None:
    """Rotation leaves Llama's keys in float32; the library's static layer would refuse the values."""
    import torch

    def claim() -> None:
        try:
            cache = seen(runtime_of("path:llama", Autocast(), StaticKvCache()))[-1].cache
        except RuntimeError as error:
            raise AssertionError from error
        assert (cache.layers[0].keys.dtype, cache.layers[0].values.dtype) == (torch.float32, torch.bfloat16)

    assert_needs_hook(Autocast(), "cache", claim)


def test_autocast_in_float16_is_for_gpus() -> None:
    environment = probe()
    assert Autocast().check(environment, DeviceKind.CPU, None) is None
    assert Autocast(dtype="float16").check(environment, DeviceKind.CUDA, None) is None
    assert "bfloat16" in str(Autocast(dtype="float16").check(environment, DeviceKind.CPU, None))


@pytest.mark.parametrize(
    ("hook", "family", "others"), pairwise(["execution", "modules"], [*FAMILIES], LOOPS[:2])
)
def test_grad_enabled_keeps_more_with_every_token(
    hook: str, family: str, others: tuple[Technique, ...]
) -> None:
    tokens = runtime_of(f"path:{family}").generate(prompt(), NEW_TOKENS).tokens

    def claim() -> None:
        runtime = runtime_of(f"path:{family}", GradEnabled(), *others)
        last = seen(runtime)[-1]
        assert last.logits.grad_fn is not None
        assert all(tensor.grad_fn is not None for tensor in tensors_of(last.cache))
        kept = [kept_bytes(runtime, new_tokens) for new_tokens in (2, 4, 6)]
        assert 0 < kept[1] - kept[0] < kept[2] - kept[1]
        assert runtime.generate(prompt(), NEW_TOKENS).tokens.equal(tokens)
        weights = len(list(runtime.model.parameters()))
        assert runtime.notes.facts["weights_with_gradient"] == weights

    assert_needs_hook(GradEnabled(), hook, claim)


@pytest.mark.slow
def test_what_a_request_kept_for_gradients_is_gone_after_it() -> None:
    import gc
    import weakref

    runtime = runtime_of("path:gpt2", GradEnabled())
    calls = seen(runtime)
    kept = weakref.ref(calls[0].logits)
    del calls
    gc.collect()
    assert kept() is None


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


@pytest.mark.parametrize(
    ("one", "other", "reason"),
    [
        (InferenceMode(), GradEnabled(), "one autograd mode"),
        (Autocast(), Bf16(), "one precision"),
        (Autocast(), Int8WeightOnly(), "which autocast does not change"),
        (GradEnabled(), StaticKvCache(), "earlier request"),
        (GradEnabled(), TorchCompile(), "in place"),
        (GradEnabled(), Int8WeightOnly(), "no gradient"),
        (GradEnabled(), Int8Dynamic(), "no gradient"),
        (Autocast(), Int8Dynamic(), "which autocast does not change"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_what_cannot_be_together_says_why(one: Technique, other: Technique, reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        resolve((one, other), "generate")


@pytest.mark.parametrize("technique", [InferenceMode(), Autocast(), GradEnabled()])
def test_none_is_tried_that_was_not_asked_for(technique: Technique) -> None:
    environment = probe()
    assert not any(technique.suits(environment, device) for device in DeviceKind)


def products(runtime: DecodingModel) -> tuple[set[Any], Any]:
    """The dtypes that come out of the linear layers during a request, and its tokens."""
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    dtypes = set()

    def see(module: Any, inputs: Any, output: Any) -> None:
        dtypes.add(output.dtype)

    layers = [module for module in runtime.model.modules() if isinstance(module, (Linear, Conv1D))]
    handles = [layer.register_forward_hook(see) for layer in layers]
    tokens = runtime.generate(prompt(), NEW_TOKENS).tokens
    for handle in handles:
        handle.remove()
    return dtypes, tokens


def conversions(runtime: DecodingModel) -> Counter[int]:
    """How often a request converts each weight that it converts at all."""
    from torch import ops
    from torch.utils._python_dispatch import TorchDispatchMode

    weights = {weight.data_ptr() for weight in runtime.model.parameters()}
    found: Counter[int] = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Inference mode does not take the first of them apart into the second.
            if func in (ops.aten.to.dtype, ops.aten._to_copy.default) and args[0].data_ptr() in weights:
                found[args[0].data_ptr()] += 1
            return func(*args, **(kwargs or {}))

    with Count():
        runtime.generate(prompt(), NEW_TOKENS)
    return found


def kept_bytes(runtime: DecodingModel, new_tokens: int) -> int:
    """Bytes of what autograd saves during a request; what it saves twice counts once."""
    from torch.autograd.graph import saved_tensors_hooks

    storages: dict[int, Any] = {}

    def save(tensor: Any) -> Any:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(save, lambda tensor: tensor):
        runtime.generate(prompt(), new_tokens)
    return sum(storage.nbytes() for storage in storages.values())
