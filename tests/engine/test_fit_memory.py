"""The predictor of memory beside what is measured: weights exactly, peaks of inference and of training steps."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.training_memory import predicted_need
from optigpu.backends.training import TrainingBatch, UpdateRule
from optigpu.conductor.tasks import fit_training
from optigpu.documents.facts import ImageFacts
from optigpu.fit.memory import DecoderMemory, Load, TrainingAsked
from optigpu.hardware.catalog import gpu_of
from optigpu.job.spec import resolve
from optigpu.models.described import decoder_shape
from optigpu.models.loading.footprint import weight_bytes
from optigpu.models.loading.load import load_model
from optigpu.models.reference import parse_reference
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind, ReplicateError, UnsupportedError
from optigpu.workloads.train_step import DrawnImages, DrawnTexts
from tests.breadth import cases, spread
from tests.engine.processes import program
from tests.engine.tiny_models import runtime_of
from tests.engine.training import GPT2, LLAMA, MOBILENET, RESNET, VIT, trained

QWEN = "preset:tiny-qwen-test"
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
    {"weights": "w6"},
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
    from optigpu.backends.torch.device import operator_peaks_of

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
    reference = parse_reference(f"preset:{name}")
    model = load_model(reference, device="meta", dtype="bfloat16")
    held = {id(tensor): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    assert decoder_shape(reference).stored(2, half=True).bytes == sum(held.values())


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
        {"name": "native_decode", "weights": "w4", "calibration": "none"} | parameters
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


@pytest.mark.parametrize("weights", ["w4", "w3k", "w5"])
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


def test_a_draft_is_loaded_beside_the_model() -> None:
    draft = TECHNIQUES["speculative_decoding"].model_validate({"name": "speculative_decoding", "draft": QWEN})
    shape = decoder_shape(parse_reference(LLAMA))
    both = DecoderMemory(shape, (draft,), DeviceKind.CPU).stored.bytes
    assert both == memory_of(LLAMA).stored.bytes + memory_of(QWEN).stored.bytes


def test_a_window_bounds_the_cache_of_a_model_that_has_one() -> None:
    name = "preset:mistral-7b-v0.1"
    memory = DecoderMemory(decoder_shape(parse_reference(name)), stack_of("bf16"), DeviceKind.CUDA)
    assert memory.need(Load(1, 16_000, 2)).cache == memory.need(Load(1, 8_000, 2)).cache
    assert memory.need(Load(1, 2_000, 2)).cache < memory.need(Load(1, 4_000, 2)).cache


RULE = UpdateRule("adamw", 1e-4)


def samples(facts: Any, documents: int = 8, length: int = 64) -> TrainingBatch:
    if isinstance(facts, ImageFacts):
        return DrawnImages(facts, facts.image_size, 0).batch(documents)
    return DrawnTexts(facts, 0).batch(documents, length, length)


@pytest.mark.usefixtures("one_torch_thread", "forked_children")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    cases(
        [
            (LLAMA, ()),
            (LLAMA, ("mixed_precision",)),
            (LLAMA, ("gradient_checkpointing",)),
            (GPT2, ("gradient_checkpointing", "mixed_precision")),
            (LLAMA, ("optimizer_in_backward",)),
            (VIT, ()),
            (RESNET, ()),
            (RESNET, ("gradient_accumulation",)),
            (MOBILENET, ()),
            (LLAMA, ("lora",)),
            (GPT2, ("qlora", "gradient_checkpointing")),
            (GPT2, ("int8_finetune",)),
        ],
        by_default=6,
    ),
)
def test_a_step_s_peak_is_within_a_twentieth_of_the_measured_one(model: str, names: tuple[str, ...]) -> None:
    check_named(model, *names)


@pytest.mark.usefixtures("one_torch_thread", "forked_children")
@pytest.mark.long
@pytest.mark.parametrize("model", [VIT, RESNET])
def test_so_it_is_with_convolutions_in_bfloat16(model: str) -> None:
    """Without AMX: there oneDNN copies what it multiplies into memory of its own. It reads the variable once."""
    program = f"from {__name__} import check_named; check_named({model!r}, 'mixed_precision')"
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=os.environ | variables, check=True)


def check_named(model: str, *names: str) -> None:
    check_peak(model, resolve((TECHNIQUES[name](name=name) for name in names), "train_step"))


def check_peak(model: str, stack: tuple[Technique, ...]) -> None:
    (need,) = predicted_need(RULE, model, stack, (samples,))
    runtime = trained(model, *stack, batch_size=8)
    batch = samples(runtime.facts)
    runtime.step(batch)
    measured = runtime.peak_memory(lambda: runtime.step(batch)).allocated_bytes
    assert measured is not None
    assert need.peak_bytes == pytest.approx(measured, rel=0.05)
    assert need.weight_bytes == runtime.weights().bytes


@pytest.mark.usefixtures("one_torch_thread", "forked_children")
def test_a_step_that_depends_on_numbers_is_not_predicted() -> None:
    scaled = TECHNIQUES["mixed_precision"].model_validate({"name": "mixed_precision", "dtype": "float16"})
    with pytest.raises(UnsupportedError, match="training with mixed_precision cannot be told from shapes"):
        predicted_need(RULE, LLAMA, (scaled,), (samples,))


@pytest.mark.usefixtures("one_torch_thread", "forked_children")
@pytest.mark.slow
def test_the_largest_batch_follows_from_the_bytes_of_a_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_LOCK_DIR", str(tmp_path))
    card = gpu_of("rtx4060")
    said: list[str] = []
    found = fit_training(
        TrainingAsked(LLAMA, card, batch=4, sequence_tokens=32, reserve_bytes=0),
        [training_stack_of(), training_stack_of("gradient_checkpointing")],
        said.append,
        lambda: None,
    )
    plain, checkpointed = found.stacks
    assert plain.fits
    assert (checkpointed.largest_batch or 0) > (plain.largest_batch or 0) > 1000
    assert plain.state_bytes == pytest.approx(2 * (plain.weight_bytes or 0), rel=0.01)
    assert json.loads(found.model_dump_json())["basis"] == "predicted"
    assert said == ["predicting a step of training with each stack"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.lock"], "no job is measured meanwhile"


@pytest.mark.slow
@pytest.mark.usefixtures("one_torch_thread", "forked_children", "own_lock")
def test_a_predicting_process_gets_the_variables_of_a_measuring_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    with pytest.raises(ReplicateError, match=r"secret: None, threads: \d$"):
        fit_training(
            TrainingAsked(LLAMA, gpu_of("rtx4060"), batch=1, sequence_tokens=32, reserve_bytes=0),
            [training_stack_of()],
            lambda _: None,
            lambda: None,
            program=program("telling"),
        )


def training_stack_of(*names: str) -> tuple[Technique, ...]:
    return tuple(TECHNIQUES[name](name=name) for name in names)
