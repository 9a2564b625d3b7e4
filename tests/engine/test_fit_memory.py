"""The predictor of memory beside what is measured: bytes of weights exactly, peaks of a CPU within a tenth."""

from functools import partial

import pytest

from optigpu.fit.memory import DecoderMemory, Load
from optigpu.job.spec import resolve
from optigpu.models.described import decoder_shape
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.reference import parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.tiny_models import runtime_of

LLAMA, GPT2, QWEN = "preset:tiny-llama-test", "preset:tiny-gpt2-test", "preset:tiny-qwen-test"
QUANTIZED = (
    (),
    ("bf16",),
    ("int8_weight_only",),
    ("bf16", "int8_weight_only"),
    ("int8_dynamic",),
    ("int4_weight_only",),
    ("bf16", "int4_weight_only"),
    ("nf4",),
    ("bf16", "nf4"),
    ("llm_int8",),
    ("bf16", "llm_int8"),
)
NATIVE: tuple[dict[str, str | float], ...] = (
    {},
    {"weights": "w8", "kv": "int8"},
    {"weights": "bf16"},
    {"weights": "w3k"},
    {"head": "bf16", "group": 64},
)
MEASURED: tuple[tuple[str, ...], ...] = (
    (),
    ("bf16",),
    ("static_kv_cache",),
    ("int8_kv_cache",),
    ("sliding_kv_cache",),
    ("eager_attention",),
    ("bf16", "eager_attention"),
    ("no_kv_cache",),
    ("autocast",),
    ("int8_weight_only",),
    ("bf16", "nf4"),
    ("bf16", "llm_int8"),
)
SHORT, LONG, BATCH = Load(1, 16, 8), Load(1, 300, 4), Load(4, 100, 12)


def stack_of(*names: str) -> tuple[Technique, ...]:
    return resolve((TECHNIQUES[name](name=name) for name in names), "generate")


def memory_of(model: str, *names: str) -> DecoderMemory:
    return DecoderMemory(decoder_shape(parse_reference(model)), stack_of(*names), DeviceKind.CPU)


def measured_peak(model: str, load: Load, *stack: Technique) -> int:
    """Of a new model each time: transformers keeps a static cache as long as the longest so far."""
    import torch

    from optigpu.backends.torch.memory import operator_peaks_of

    loaded = runtime_of(model, *stack)
    held = [*loaded.model.parameters(), *loaded.model.buffers()]
    ids = torch.ones(load.batch, load.prompt, dtype=torch.int64)
    taken = operator_peaks_of(partial(loaded.generate, ids, load.new), held)
    assert taken.allocated_bytes is not None
    return taken.allocated_bytes


@pytest.mark.parametrize(
    ("names", "model"), spread([(names,) for names in QUANTIZED], [LLAMA, GPT2, QWEN], by_default=3)
)
def test_bytes_of_weights_are_counted_exactly(model: str, names: tuple[str, ...]) -> None:
    loaded = runtime_of(model, *stack_of(*names)).model
    assert memory_of(model, *names).stored.bytes == weight_bytes(loaded)


@pytest.mark.parametrize("name", ["gpt-j-6b", "opt-125m", "mistral-7b-v0.1", "llama-3.1-405b"])
def test_bytes_of_published_models_are_those_of_their_weights(name: str) -> None:
    from optigpu.models.loading.load import load_model

    reference = parse_reference(f"preset:{name}")
    model = load_model(reference, device="meta", dtype="bfloat16")
    held = {id(tensor): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    assert decoder_shape(reference).stored(2, half=True).bytes == sum(held.values())


@pytest.mark.parametrize("model", [LLAMA, GPT2])
def test_a_hybrid_ends_at_its_target_or_below_by_less_than_a_layer(model: str) -> None:
    predicted = memory_of(model, "int8_hybrid").stored.bytes
    measured = weight_bytes(runtime_of(model, *stack_of("int8_hybrid")).model)
    assert 0 <= predicted - measured < 0.01 * measured


@pytest.mark.slow
@pytest.mark.parametrize(("names", "model"), spread([(names,) for names in MEASURED], [LLAMA, GPT2]), ids=str)
def test_peaks_are_within_a_tenth_of_measured_ones(model: str, names: tuple[str, ...]) -> None:
    memory = memory_of(model, *names)
    for load in (BATCH, LONG, SHORT):
        assert memory.need(load).peak == pytest.approx(
            measured_peak(model, load, *stack_of(*names)), rel=0.1
        ), load


def native(**parameters: str | float) -> Technique:
    return TECHNIQUES["native_decode"].model_validate(
        {"name": "native_decode", "calibration": "none"} | parameters
    )


@pytest.mark.parametrize(
    ("parameters", "dtype", "model"),
    spread(NATIVE, [((),), (("bf16",),)], [LLAMA, GPT2, QWEN], by_default=5),
    ids=str,
)
def test_bytes_of_packed_weights_are_counted_exactly(
    model: str, dtype: tuple[str, ...], parameters: dict[str, str | float]
) -> None:
    stack = (*stack_of(*dtype), native(**parameters))
    predicted = DecoderMemory(decoder_shape(parse_reference(model)), stack, DeviceKind.CPU)
    assert predicted.stored.bytes == weight_bytes(runtime_of(model, *stack).model)


@pytest.mark.parametrize("weights", ["w4", "w3k"])
def test_extra_bytes_are_predicted_but_for_less_than_a_layer(weights: str) -> None:
    technique = native(weights=weights, extra_bytes=0.1)
    shape = decoder_shape(parse_reference(LLAMA))
    predicted = DecoderMemory(shape, (technique,), DeviceKind.CPU).stored.bytes
    plain = DecoderMemory(shape, (native(weights=weights),), DeviceKind.CPU).stored
    measured = weight_bytes(runtime_of(LLAMA, technique).model)
    assert plain.bytes < measured
    assert 0 <= predicted - measured < max(matrix.bytes for matrix in plain.linear)


@pytest.mark.parametrize(("parameters", "model"), spread(NATIVE, [LLAMA, GPT2]), ids=str)
def test_peaks_of_an_operator_with_a_cache_of_its_own_are_within_a_tenth(
    model: str, parameters: dict[str, str | float]
) -> None:
    memory = DecoderMemory(decoder_shape(parse_reference(model)), (native(**parameters),), DeviceKind.CPU)
    for load in (BATCH, LONG, SHORT):
        assert memory.need(load).peak == pytest.approx(
            measured_peak(model, load, native(**parameters)), rel=0.1
        ), load


def test_what_no_operator_runs_is_not_predicted() -> None:
    with pytest.raises(UnsupportedError, match="native_decode supports the families"):
        memory_of("preset:gpt-j-6b", "native_decode")


def test_a_draft_is_loaded_beside_the_model() -> None:
    draft = TECHNIQUES["speculative_decoding"].model_validate({"name": "speculative_decoding", "draft": QWEN})
    shape = decoder_shape(parse_reference(LLAMA))
    both = DecoderMemory(shape, (draft,), DeviceKind.CPU).stored.bytes
    assert both == memory_of(LLAMA).stored.bytes + memory_of(QWEN).stored.bytes


def test_offloaded_layers_take_two_places_on_the_device() -> None:
    shape = decoder_shape(parse_reference("preset:llama-3.1-8b"))
    whole, slots = (
        DecoderMemory(shape, stack_of("bf16", *more), DeviceKind.CUDA).stored.bytes
        for more in ((), ("cpu_offload",))
    )
    blocks = sum(matrix.whole for matrix in shape.stored(2).linear)
    assert whole - slots == blocks - blocks * 2 // shape.facts.layers


def test_a_window_bounds_the_cache_of_a_model_that_has_one() -> None:
    name = "preset:mistral-7b-v0.1"
    memory = DecoderMemory(decoder_shape(parse_reference(name)), stack_of("bf16"), DeviceKind.CUDA)
    assert memory.need(Load(1, 16_000, 2)).cache == memory.need(Load(1, 8_000, 2)).cache
    assert memory.need(Load(1, 2_000, 2)).cache < memory.need(Load(1, 4_000, 2)).cache
