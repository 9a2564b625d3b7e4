"""lora, qlora and int8_finetune train factors alone, beside weights that stay, with the right gradients."""

from collections.abc import Callable

import pytest
import torch

from optigpu.backends.torch.training.runtime import TorchTrainingRuntime
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery.adapters import FrozenLinear, WideningLayer, add_factors
from optigpu.surgery.bitsandbytes_layers import Nf4Linear
from optigpu.surgery.extras import AdapterParameters
from optigpu.surgery.int4_layers import Int4Linear
from optigpu.surgery.int8_layers import Int8Linear
from optigpu.surgery.places import Place, linear_places, weight_of
from optigpu.techniques.base import Technique
from optigpu.techniques.training.int8_finetune import Int8Finetune
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.qlora import Qlora
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import LLAMA, batch_for, losses_of, trained, weights_of

pytestmark = pytest.mark.usefixtures("one_torch_thread")


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
    assert peak(plain) - peak(adapted) > 2 * 4 * spared


def peak(runtime: TorchTrainingRuntime) -> int:
    """Bytes of the first step."""
    found = runtime.peak_memory(lambda: runtime.step(batch_for(runtime))).allocated_bytes
    assert found is not None
    return found


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
