"""The memory of training, predicted by running the step on shapes alone, beside what a step allocates."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from optigpu.backends.torch.training.predicted import predicted_need
from optigpu.backends.training import TrainingBatch, UpdateRule
from optigpu.conductor.training_memory import fit_training
from optigpu.documents.shapes import ImageFacts
from optigpu.fit.training import TrainingAsked
from optigpu.hardware.catalog import gpu_of
from optigpu.job.spec import resolve
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import Technique
from optigpu.vocabulary import ReplicateError, SpecError, UnsupportedError
from optigpu.workloads.train_step import DrawnImages, DrawnTexts
from tests.engine.processes import program
from tests.engine.training import GPT2, LLAMA, MOBILENET, RESNET, VIT, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread", "forked_children")
RULE = UpdateRule("adamw", 1e-4)


def samples(facts: Any, documents: int = 8, length: int = 64) -> TrainingBatch:
    if isinstance(facts, ImageFacts):
        return DrawnImages(facts, facts.image_size, 0).batch(documents)
    return DrawnTexts(facts, 0).batch(documents, length, length)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "names"),
    [
        (LLAMA, ()),
        (GPT2, ()),
        (LLAMA, ("mixed_precision",)),
        (LLAMA, ("gradient_checkpointing",)),
        (GPT2, ("gradient_checkpointing", "mixed_precision")),
        (LLAMA, ("gradient_accumulation",)),
        (LLAMA, ("optimizer_in_backward",)),
        (LLAMA, ("fused_optimizer",)),
        (VIT, ()),
        (VIT, ("gradient_checkpointing",)),
        (RESNET, ()),
        (RESNET, ("gradient_accumulation",)),
        (RESNET, ("optimizer_in_backward",)),
        (MOBILENET, ()),
        (MOBILENET, ("mixed_precision",)),
        (LLAMA, ("lora",)),
        (LLAMA, ("qlora",)),
        (GPT2, ("qlora", "gradient_checkpointing")),
        (GPT2, ("int8_finetune",)),
        (LLAMA, ("int8_finetune", "mixed_precision")),
    ],
)
def test_a_step_s_peak_is_within_a_twentieth_of_the_measured_one(model: str, names: tuple[str, ...]) -> None:
    check_named(model, *names)


@pytest.mark.long
@pytest.mark.parametrize("model", [VIT, RESNET])
def test_so_it_is_with_convolutions_in_bfloat16(model: str) -> None:
    """Without AMX: there oneDNN copies what it multiplies into memory of its own. It reads the variable once."""
    program = f"from {__name__} import check_named; check_named({model!r}, 'mixed_precision')"
    variables = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", program], env=os.environ | variables, check=True)


@pytest.mark.slow
def test_a_base_of_four_bits_of_our_own_is_predicted_as_well() -> None:
    check_peak(LLAMA, (TECHNIQUES["qlora"].model_validate({"name": "qlora", "base": "int4"}),))


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


def test_a_step_that_depends_on_numbers_is_not_predicted() -> None:
    scaled = TECHNIQUES["mixed_precision"].model_validate({"name": "mixed_precision", "dtype": "float16"})
    with pytest.raises(UnsupportedError, match="training with mixed_precision cannot be told from shapes"):
        predicted_need(RULE, LLAMA, (scaled,), (samples,))


@pytest.mark.slow
def test_the_largest_batch_follows_from_the_bytes_of_a_sample(tmp_path: Path) -> None:
    card = gpu_of("rtx4060")
    said: list[str] = []
    found = fit_training(
        TrainingAsked(LLAMA, card, batch=4, sequence_tokens=32, reserve_bytes=0),
        [stack_of(), stack_of("gradient_checkpointing")],
        said.append,
        lambda: None,
        lock_dir=tmp_path,
    )
    plain, checkpointed = found.stacks
    assert plain.fits
    assert (checkpointed.largest_batch or 0) > (plain.largest_batch or 0) > 1000
    assert plain.state_bytes == pytest.approx(2 * (plain.weight_bytes or 0), rel=0.01)
    assert json.loads(found.model_dump_json())["basis"] == "predicted"
    assert said == ["predicting a step of training with each stack"]
    assert [path.name for path in tmp_path.iterdir()] == ["cpu.lock"], "no job is measured meanwhile"


def test_a_predicting_process_gets_the_variables_of_a_measuring_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPTIGPU_API_KEY", "secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    with pytest.raises(ReplicateError, match=r"secret: None, threads: \d$"):
        fit_training(
            TrainingAsked(LLAMA, gpu_of("rtx4060"), batch=1, sequence_tokens=32, reserve_bytes=0),
            [stack_of()],
            lambda _: None,
            lambda: None,
            program=program("telling"),
            lock_dir=tmp_path,
        )


def test_a_reserve_that_leaves_nothing_is_refused_before_anything_starts() -> None:
    with pytest.raises(SpecError, match="leave nothing of"):
        TrainingAsked(LLAMA, gpu_of("rtx4060"), batch=1, sequence_tokens=32, reserve_bytes=10**12)


def stack_of(*names: str) -> tuple[Technique, ...]:
    return tuple(TECHNIQUES[name](name=name) for name in names)
