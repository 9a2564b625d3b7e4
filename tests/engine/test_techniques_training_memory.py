"""activation_offload moves what a forward pass saves and brings it back; optimizer_8bit keeps states of 8 bits."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu.backends.torch.training.runtime import TorchTrainingRuntime
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.activation_offload.saving import DiskStore, OffloadedSaving, Restore
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.gradient_checkpointing import GradientCheckpointing
from optigpu.techniques.training.mixed_precision import MixedPrecision
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.train_step import TrainStep
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import (
    LLAMA,
    RESNET,
    VIT,
    batch_for,
    losses_of,
    peak_bytes,
    texts_for,
    trained,
    weights_of,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")
TO_DISK = ActivationOffload(target="disk", smallest_bytes=256)


def peak(runtime: TorchTrainingRuntime) -> int:
    return peak_bytes(runtime, texts_for(runtime, documents=8, length=64, shortest=64))


@pytest.mark.parametrize("model", [LLAMA, VIT, RESNET])
def test_a_step_learns_bit_by_bit_the_same_from_activations_that_were_on_a_disk(model: str) -> None:
    plain, moved = trained(model), trained(model, TO_DISK)
    assert losses_of(moved).tolist() == losses_of(plain).tolist()
    assert all(map(torch.equal, weights_of(plain), weights_of(moved)))
    assert moved.notes.facts["offloaded_bytes"] > 0


def test_a_step_takes_less_memory_by_most_of_what_was_moved() -> None:
    plain = peak(trained(LLAMA))

    def claim() -> None:
        runtime = trained(LLAMA, TO_DISK)
        spared = plain - peak(runtime)
        assert spared > 0.5 * runtime.notes.facts.get("offloaded_bytes", float("inf"))

    assert_needs_hook(TO_DISK, "training", claim)


@pytest.mark.parametrize("beside", [MixedPrecision(), GradientCheckpointing()], ids=lambda each: each.name)
def test_it_goes_with_autocast_and_with_checkpoints(beside: Technique) -> None:
    both = trained(LLAMA, TO_DISK, beside)
    assert losses_of(both).tolist() == losses_of(trained(LLAMA, beside)).tolist()
    assert both.notes.facts["offloaded_tensors"] > 0


class Remembering:
    """A store that remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[torch.Tensor] = []

    def put(self, tensor: torch.Tensor) -> Restore:
        self.given.append(tensor.detach().clone())
        kept = self.given[-1]
        return lambda: kept


def saved_by(run: Callable[[torch.nn.Linear, torch.Tensor], Any], smallest: int = 1) -> list[torch.Tensor]:
    """What a forward pass of a layer gives to the store."""
    layer, x = torch.nn.Linear(16, 16), torch.randn(4, 16, requires_grad=True)
    store = Remembering()
    with OffloadedSaving(layer, lambda: store, smallest, Notes())():
        run(layer, x)
    return store.given


def test_weights_and_small_tensors_stay() -> None:
    given = saved_by(lambda layer, x: layer(x.exp()).sum())
    assert [tensor.shape for tensor in given] == [(4, 16)]
    assert saved_by(lambda layer, x: layer(x.exp()).sum(), smallest=4 * 64 + 1) == []


def test_a_tensor_that_several_operations_save_is_moved_once_and_a_changed_one_again() -> None:
    assert len(saved_by(lambda _, x: x.exp() * x + x * x.sin())) == 3  # x, its exp, its sin

    def changed_between(_: torch.nn.Linear, x: torch.Tensor) -> None:
        y = x * 1
        y.sin()
        y.add_(1)
        y.cos()

    assert [torch.equal(*saved_by(changed_between))] == [False]


def test_an_expanded_view_stays_where_it_takes_less_memory() -> None:
    assert saved_by(lambda _, x: x[:1].clone().expand(64, 16).sin()) == []


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_a_file_without_a_name_brings_back_the_same_values(temporary: Path) -> None:
    store = DiskStore()
    kept = [
        (torch.randn(7, 5) * 9).to(dtype).T
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    ]
    restored = [store.put(tensor) for tensor in kept]
    assert list(temporary.iterdir()) == []
    for tensor, restore in reversed(list(zip(kept, restored, strict=True))):
        assert restore().dtype is tensor.dtype
        assert torch.equal(restore(), tensor)


def test_the_files_of_a_step_are_closed_after_it(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    new_file = tempfile.TemporaryFile

    def remembered() -> Any:
        files.append(new_file())
        return files[-1]

    runtime = trained(LLAMA, TO_DISK)
    monkeypatch.setattr(tempfile, "TemporaryFile", remembered)
    runtime.step(batch_for(runtime))
    assert [file.closed for file in files] == [True]


def test_a_cpu_s_activations_go_to_a_disk_alone() -> None:
    reason = ActivationOffload().check(probe(), DeviceKind.CPU, None)
    assert "set target to disk" in str(reason)
    assert TO_DISK.check(probe(), DeviceKind.CPU, None) is None
    assert ActivationOffload().check(probe(), DeviceKind.CUDA, None) is None


def test_what_is_compiled_is_not_offloaded() -> None:
    with pytest.raises(SpecError, match="hands over all that it saves at its end"):
        resolve((TO_DISK, CompileTraining()), "train_step")


def state_bytes(runtime: TorchTrainingRuntime) -> int:
    """Of what the optimizer keeps for large tensors; the tables of the 256 numbers are shared by all."""
    states = [
        state
        for optimizer in runtime.training.trainer.optimizers
        for weight, state in optimizer.state.items()
        if weight.numel() >= 4096
    ]
    return sum(
        value.nbytes
        for state in states
        for name, value in state.items()
        if isinstance(value, torch.Tensor) and value.numel() > 1 and not name.startswith("qmap")
    )


def test_states_of_8_bits_take_a_quarter_of_the_bytes_and_learn_the_same() -> None:
    plain = trained(LLAMA)
    expected = losses_of(plain)

    def claim() -> None:
        runtime = trained(LLAMA, Optimizer8bit())
        assert losses_of(runtime) == pytest.approx(expected, rel=1e-3)
        # a byte for each moment, and a float32 scale for each block of 256
        assert state_bytes(runtime) == pytest.approx(state_bytes(plain) * (1 + 4 / 256) / 4)
        assert peak(runtime) < peak(plain) - state_bytes(plain) / 2

    assert_needs_hook(Optimizer8bit(), "training", claim)


def test_an_optimizer_of_8_bits_for_each_weight_runs_within_the_backward_pass() -> None:
    alone, within = (trained(LLAMA, Optimizer8bit(), *beside) for beside in ((), (OptimizerInBackward(),)))
    assert losses_of(within) == pytest.approx(losses_of(alone), rel=1e-5)


def test_the_workload_s_learning_rate_is_taken() -> None:
    runtime = trained(LLAMA, Optimizer8bit(), learning_rate=0.125)
    (optimizer,) = runtime.training.trainer.optimizers
    assert [group["lr"] for group in optimizer.param_groups] == [0.125]


def test_training_begins_again_with_new_states() -> None:
    runtime = trained(LLAMA, Optimizer8bit())
    first = losses_of(runtime)
    runtime.restart()
    assert losses_of(runtime).tolist() == first.tolist()


def test_what_8_bit_states_are_not_for_is_refused() -> None:
    assert "set optimizer to adamw" in str(Optimizer8bit().fits(TrainStep(optimizer="sgd")))
    assert Optimizer8bit().fits(TrainStep()) is None
    assert "set paged to false" in str(Optimizer8bit(paged=True).check(probe(), DeviceKind.CPU, None))
    with pytest.raises(UnsupportedError, match="this model trains no larger one"):
        trained(RESNET, Optimizer8bit())
    with pytest.raises(SpecError, match="weights are updated by one optimizer"):
        resolve((Optimizer8bit(), FusedOptimizer()), "train_step")


def test_without_the_library_the_reason_names_what_installs_it() -> None:
    bare = probe().model_copy(update={"software": {}})
    assert "pip install -e '.[quant]'" in str(Optimizer8bit().check(bare, DeviceKind.CPU, None))
