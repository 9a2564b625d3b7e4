"""What a step of training keeps in memory: activations on a disk, states of 8 bits, few logits, factors alone."""

import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from optigpu.backends.torch.runtime import TorchTrainingRuntime
from optigpu.backends.torch.training_step import loss_of
from optigpu.backends.training import NO_TARGET, MicroBatch
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.models.families import FAMILIES
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.adapters import FrozenLinear, WideningLayer, add_factors
from optigpu.surgery.bitsandbytes_layers import Nf4Linear
from optigpu.surgery.extras import AdapterParameters
from optigpu.surgery.integer_layers import Int4Linear, Int8Linear
from optigpu.surgery.places import Place, linear_places, weight_of
from optigpu.surgery.training_steps import ChunkedLoss
from optigpu.techniques.base import Technique
from optigpu.techniques.training.activation_offload import ActivationOffload
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.fused_optimizer import FusedOptimizer
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.optimizer_8bit import Optimizer8bit
from optigpu.techniques.training.optimizer_in_backward import OptimizerInBackward
from optigpu.techniques.training.qlora import Qlora
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.train_step import TrainStep
from tests.breadth import spread
from tests.engine.decoder_models import configured
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import (
    LLAMA,
    RESNET,
    VIT,
    batch_for,
    bytes_of_step,
    losses_of,
    peak_of_texts,
    texts_for,
    trained,
    weights_of,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_torch_thread")]
TO_DISK = ActivationOffload(target="disk", smallest_bytes=256)


@pytest.mark.parametrize("model", [LLAMA, VIT, RESNET])
def test_a_step_learns_bit_by_bit_the_same_from_activations_that_were_on_a_disk(model: str) -> None:
    plain, moved = trained(model), trained(model, TO_DISK)
    assert losses_of(moved).tolist() == losses_of(plain).tolist()
    assert all(map(torch.equal, weights_of(plain), weights_of(moved)))
    assert moved.notes.facts["offloaded_bytes"] > 0


def test_a_step_takes_less_memory_by_most_of_what_was_moved() -> None:
    plain = peak_of_texts(trained(LLAMA), 64)

    def claim() -> None:
        runtime = trained(LLAMA, TO_DISK)
        spared = plain - peak_of_texts(runtime, 64)
        assert spared > 0.5 * runtime.notes.facts.get("offloaded_bytes", float("inf"))

    assert_needs_hook(TO_DISK, "training", claim)


def test_the_files_of_a_step_are_closed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert peak_of_texts(runtime, 64) < peak_of_texts(plain, 64) - state_bytes(plain) / 2

    assert_needs_hook(Optimizer8bit(), "training", claim)


def test_an_optimizer_of_8_bits_for_each_weight_runs_within_the_backward_pass() -> None:
    alone, within = (trained(LLAMA, Optimizer8bit(), *beside) for beside in ((), (OptimizerInBackward(),)))
    assert losses_of(within) == pytest.approx(losses_of(alone), rel=1e-5)


def test_what_8_bit_states_are_not_for_is_refused() -> None:
    assert "set optimizer to adamw" in str(Optimizer8bit().fits(TrainStep(optimizer="sgd")))
    assert Optimizer8bit().fits(TrainStep()) is None
    assert "set paged to false" in str(Optimizer8bit(paged=True).check(probe(), DeviceKind.CPU, None))
    with pytest.raises(UnsupportedError, match="this model trains no larger one"):
        trained(RESNET, Optimizer8bit())
    with pytest.raises(SpecError, match="weights are updated by one optimizer"):
        resolve((Optimizer8bit(), FusedOptimizer()), "train_step")


# ---- chunked_cross_entropy.


LANGUAGE_FAMILIES = [name for name, family in FAMILIES.items() if family.decoder]
CHUNK = 8
VOCABULARY = 512
"""Of the tiny Llama."""


def rows() -> MicroBatch:
    """Two rows of 13 tokens, which chunks do not divide, with places where nothing is predicted."""
    ids = torch.randint(96, (2, 13), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, dims=1)
    labels[:, -1], labels[1, 5:] = NO_TARGET, NO_TARGET
    return MicroBatch({"input_ids": ids}, labels, int((labels != NO_TARGET).sum()))


def gradients(model: Any) -> list[torch.Tensor]:
    found = [weight.grad for weight in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize(("family", "tied"), spread(LANGUAGE_FAMILIES, [True, False], by_default=4))
def test_loss_and_gradients_are_those_of_the_plain_loss(family: str, tied: bool) -> None:
    model = configured(family, tie_word_embeddings=tied).requires_grad_(True)
    plain = loss_of(model)(rows())
    plain.backward()
    expected = gradients(model)
    chunked = ChunkedLoss(model, CHUNK)(rows())
    chunked.backward()
    assert chunked.item() == pytest.approx(plain.item(), rel=1e-6)
    largest = max(float(gradient.abs().max()) for gradient in expected)
    for found, wanted in zip(gradients(model), expected, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-6 * largest)


class Logits(TorchDispatchMode):
    """Of how many tokens operators made logits at once."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.tokens = vocabulary, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dim() and made.shape[-1] == self.vocabulary:
            self.tokens.add(made.numel() // self.vocabulary)
        return made


def test_no_operator_makes_logits_of_more_tokens_than_a_chunk_has() -> None:
    def claim() -> None:
        runtime = trained(LLAMA, ChunkedCrossEntropy(tokens=CHUNK))
        with Logits(VOCABULARY) as made:
            norm = runtime.gradient_norm(texts_for(runtime))
        assert CHUNK in made.tokens
        assert 4 * 16 not in made.tokens
        assert norm == pytest.approx(trained(LLAMA).gradient_norm(texts_for(runtime)), rel=1e-5)

    assert_needs_hook(ChunkedCrossEntropy(), "training", claim)


def test_a_step_takes_less_memory_by_most_of_its_logits() -> None:
    """Logits in float32, and as much for their softmax and their gradient."""
    plain, chunked = (
        peak_of_texts(trained(LLAMA, *stack), 128) for stack in ((), (ChunkedCrossEntropy(tokens=64),))
    )
    assert plain - chunked > 0.8 * 4 * 8 * 128 * VOCABULARY


def test_one_product_with_the_head_more_is_counted_as_recomputation() -> None:
    plain, chunked = (
        runtime.step_flops(texts_for(runtime))
        for runtime in (trained(LLAMA), trained(LLAMA, ChunkedCrossEntropy(tokens=CHUNK)))
    )
    head = 2 * 4 * 16 * 128 * 512
    assert chunked.model == plain.model
    assert chunked.hardware - plain.hardware == head


@pytest.mark.parametrize(
    ("family", "more"), [("granite", {"logits_scaling": 4.0}), ("gemma2", {"head_dim": 16})]
)
def test_a_model_that_changes_its_head_s_product_is_refused(family: str, more: dict[str, float]) -> None:
    model = configured(family, **more)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(5)
    with pytest.raises(UnsupportedError, match="changes its head's product"):
        ChunkedLoss(model, CHUNK)


def saved_by(run: Callable[[], object]) -> list[torch.Tensor]:
    """The tensors that a forward pass saves; one that several operations save is there several times."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept):
        run()
    return saved


ADAPTERS: list[Lora | Qlora | Int8Finetune] = [Lora(), Qlora(), Qlora(base="int4"), Int8Finetune()]
ROUNDING = {"lora": 0.0, "nf4": 0.01, "int4": 0.01, "int8_finetune": 1e-3}
"""How far the first loss may be off the plain model's, as a share of it."""
WEIGHT_BYTES = {"lora": 1.2, "nf4": 0.5, "int4": 0.5, "int8_finetune": 0.6}
"""The most that the stored weights with the factors may be, as a share of the plain model's."""


def label(technique: Technique) -> str:
    return technique.base if isinstance(technique, Qlora) else technique.name


def factor_weights(model: str, rank: int, *, attention: bool = False) -> int:
    """rank * (inputs + outputs) over the layers that get factors: all but the head."""
    plain = trained(model).training.model
    places = [place for place in linear_places(plain) if place.layer is not plain.get_output_embeddings()]
    chosen = [place for place in places if not attention or "attn" in place.path]
    return sum(rank * sum(weight_of(place.layer).shape) for place in chosen)


@pytest.mark.parametrize("technique", ADAPTERS, ids=label)
def test_factors_alone_are_trained_beside_weights_that_stay(technique: Lora | Qlora | Int8Finetune) -> None:
    plain = trained(LLAMA)
    (first,) = losses_of(plain, steps=1)

    def claim() -> None:
        runtime = trained(LLAMA, technique)
        assert runtime.weights().trainable == factor_weights(LLAMA, technique.rank)
        assert {name.split(".")[-3] for name, weight in names(runtime) if weight.requires_grad} == {
            "lora_A",
            "lora_B",
        }
        model = runtime.training.model
        frozen = {
            name: weight.detach().clone() for name, weight in names(runtime) if not weight.requires_grad
        }
        before = weights_of(runtime)
        losses = losses_of(runtime, steps=4)
        assert losses[0] == pytest.approx(first, rel=ROUNDING[label(technique)] + 1e-6)
        assert losses[3] < losses[0]
        assert all(torch.equal(dict(model.named_parameters())[name], was) for name, was in frozen.items())
        assert not any(map(torch.equal, before, weights_of(runtime)))
        assert weight_bytes(model) < WEIGHT_BYTES[label(technique)] * weight_bytes(plain.training.model)

    assert_needs_hook(technique, "modules", claim)


def names(runtime: TorchTrainingRuntime) -> list[tuple[str, torch.nn.Parameter]]:
    return list(runtime.training.model.named_parameters())


def test_gradients_optimizer_states_and_activations_of_frozen_weights_are_not_there() -> None:
    plain, adapted = trained(LLAMA), trained(LLAMA, Lora())
    spared = plain.training.trainable - adapted.training.trainable
    first, second = (bytes_of_step(each, batch_for(each)) for each in (plain, adapted))
    assert first - second > 2 * 4 * spared


def int8_layer(layer: torch.nn.Linear) -> WideningLayer:
    return Int8Linear.of(layer)


def int4_layer(layer: torch.nn.Linear) -> WideningLayer:
    return Int4Linear.of(layer, Int4Scheme(), readable=True)


def nf4_layer(layer: torch.nn.Linear) -> WideningLayer:
    return Nf4Linear(layer.weight, layer.bias, double=True, packed=False)


Make = Callable[[torch.nn.Linear], WideningLayer]
LAYERS = pytest.mark.parametrize("make", [int8_layer, int4_layer, nf4_layer])


def frozen(make: Make, inputs: int = 96, outputs: int = 40) -> FrozenLinear:
    """Neither size is a multiple of the tiles in which the operators store weights."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs)
    return FrozenLinear(make(layer), layer)


@LAYERS
def test_the_widened_weights_are_those_that_the_operator_multiplies_with(make: Make) -> None:
    layer = frozen(make)
    x = torch.eye(96)
    with torch.no_grad():
        products = layer(x) - layer(torch.zeros_like(x))
    assert torch.allclose(products.T, layer.layer.widened(torch.float32), atol=1e-5)


@LAYERS
def test_gradients_to_input_and_factors_are_finite_differences(make: Make) -> None:
    """In float32, where a layer is linear in each of them: then a wide difference has no error but rounding."""
    model = torch.nn.ModuleDict({"layer": frozen(make), "head": torch.nn.Linear(1, 1)})
    add_factors(model, [Place("layer", model, "layer")], AdapterParameters(rank=4))
    adapted = model["layer"]
    factors = [weight for weight in adapted.parameters() if weight.requires_grad]
    torch.nn.init.normal_(factors[1])  # B begins at zero, where the gradient to A vanishes
    x, direction = torch.randn(3, 96, requires_grad=True), torch.randn(3, 40)
    gradients = torch.autograd.grad((adapted(x) * direction).sum(), [x, *factors])
    assert len(gradients) == 3
    for tensor, gradient in zip([x, *factors], gradients, strict=True):
        towards = torch.randn_like(tensor)
        with torch.no_grad():
            tensor += towards
            above = (adapted(x) * direction).sum()
            tensor -= 2 * towards
            below = (adapted(x) * direction).sum()
            tensor += towards
        assert float((gradient * towards).sum()) == pytest.approx(
            float((above - below) / 2), rel=1e-3, abs=1e-3
        )


def test_a_frozen_layer_keeps_nothing_for_the_backward_pass() -> None:
    layer, x = frozen(int8_layer), torch.randn(3, 96, requires_grad=True)
    assert saved_by(lambda: layer(x)) == []
