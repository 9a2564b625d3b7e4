"""QuantizedLinear: a Linear with 4-bit weights, whose gradients are those of finite differences."""

from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from transformers.pytorch_utils import Conv1D

from optigpu import QuantizedLinear
from optigpu.facade import quantized_linear
from optigpu.facade.quantized_linear import replace_linears
from optigpu.models.loading.footprint import weight_bytes
from optigpu.ops.four_bits.quantize import dequantize_groups, quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.surgery import int4_layers
from optigpu.vocabulary import SpecError, UnsupportedError
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_torch_thread")
GROUPS = [None, 32, 64]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def quantized(inputs: int, outputs: int, group: int | None, bias: bool = True) -> Any:
    layer = QuantizedLinear(inputs, outputs, bias, group)
    layer.quantize_weights(drawn(outputs, inputs), drawn(outputs, seed=1) if bias else None)
    return layer


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [128, 70, 9])
def test_weights_are_what_quantizing_by_groups_or_channels_leaves(inputs: int, group: int | None) -> None:
    layer, weights = quantized(inputs, 40, group), drawn(40, inputs)
    size = group or -(-inputs // 32) * 32
    padded = torch.nn.functional.pad(weights, (0, -inputs % size))
    expected = dequantize_groups(quantize_groups(padded, Int4Scheme(size)))
    assert layer.weight.equal(expected[:, :inputs])
    step = weights.abs().amax(dim=1, keepdim=True) / 8
    assert ((layer.weight - weights).abs() / step).mean() < 0.3  # evenly spread roundings: a quarter


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_it_computes_with_its_weights(dtype: torch.dtype, group: int | None) -> None:
    layer = quantized(96, 33, group)
    x = drawn(2, 5, 96, seed=2).to(dtype)
    exact = x.double() @ layer.weight.double().T + layer.bias.double()
    found = layer(x)
    assert found.dtype is dtype
    assert found.shape == (2, 5, 33)
    torch.testing.assert_close(
        found.double(), exact, rtol=0, atol=60 * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-12
    )


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [64, 20])
def test_gradients_are_those_of_finite_differences(inputs: int, group: int | None) -> None:
    layer = quantized(inputs, 7, group)
    x = drawn(3, inputs, seed=2).double().requires_grad_()
    bias = layer.bias.detach().double().requires_grad_()
    assert gradcheck(
        lambda x, bias: int4_layers.int4_product(_padded(x, layer), layer._packed(), bias), (x, bias)
    )
    layer.bias.data = layer.bias.data.double()
    assert gradcheck(layer, (x,))


def _padded(x: torch.Tensor, layer: Any) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, layer._padded - x.shape[-1]))


def test_gradients_reach_the_factors_of_lora() -> None:
    layer = quantized(32, 6, None)
    layer.bias.data = layer.bias.data.double()
    first, second = quantized(32, 32, 32, bias=False), layer

    def adapted(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        """Two layers, so that the first's factors get their gradient through the second's weights."""
        hidden = torch.tanh(first(x) + x @ a @ b)
        return second(hidden)

    factors = [drawn(32, 2, seed=3), drawn(2, 32, seed=4)]
    assert gradcheck(adapted, [tensor.double().requires_grad_() for tensor in (drawn(2, 32), *factors)])


def test_float32_gradients_are_a_product_with_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int4_layers, "ROWS_AT_ONCE", 5)
    layer = quantized(64, 12, 32)
    x, given = drawn(4, 64, seed=5).requires_grad_(), drawn(4, 12, seed=6)
    layer.bias.requires_grad_()
    layer(x).backward(given)
    torch.testing.assert_close(x.grad, given @ layer.weight)
    torch.testing.assert_close(layer.bias.grad, given.sum(dim=0))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


def test_gradients_of_the_frozen_weights_are_refused() -> None:
    layer = quantized(32, 4, None)
    loss = layer(drawn(2, 32).requires_grad_()).sum()
    for ask in (
        layer.requires_grad_,
        layer.weight.requires_grad_,
        lambda: layer.weight.grad,
        lambda: torch.autograd.grad(loss, layer.weight),
    ):
        with pytest.raises(UnsupportedError, match=r"frozen and have no gradient; .*LoRA"):
            ask()
    assert not layer.requires_grad_(False).bias.requires_grad
    assert type(layer.weight * 2) is torch.Tensor


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("inputs", [128, 70])
def test_a_state_dict_goes_round_in_every_layout(
    inputs: int, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, other = quantized(inputs, 40, group), QuantizedLinear(inputs, 40, group_size=group)
    kept = layer.state_dict()
    assert set(kept) == {"bias", "numbers", "scale"}
    assert kept["scale"].shape == (40, 1 if group is None else -(-inputs // group))
    other.load_state_dict(kept)
    x = drawn(3, inputs, seed=2)
    assert other(x).equal(layer(x))
    monkeypatch.setattr(quantized_linear, "int4_linear_backend", lambda *_: "torch-int4pack")
    plain = QuantizedLinear(inputs, 40, group_size=group)
    plain.load_state_dict(kept)
    assert plain.numbers is not None
    assert plain.numbers.dim() == 2
    torch.testing.assert_close(plain(x), layer(x), rtol=1e-5, atol=1e-5)
    assert all(plain.state_dict()[name].equal(kept[name]) for name in kept)


def test_a_state_dict_of_another_shape_is_refused() -> None:
    kept = torch.nn.Sequential(quantized(64, 8, 32)).state_dict()
    with pytest.raises(RuntimeError, match=r"needs \[8, 32\] and \[8, 1\]"):
        torch.nn.Sequential(QuantizedLinear(64, 8)).load_state_dict(kept)
    with pytest.raises(RuntimeError, match=r'Missing key.* "numbers", "scale"'):
        QuantizedLinear(64, 8).load_state_dict({"bias": torch.zeros(8)})


@pytest.mark.parametrize(
    "layer", [torch.nn.Linear(64, 48), Conv1D(48, 64), torch.nn.Linear(64, 48, bias=False)]
)
def test_it_is_made_of_a_linear_layer(layer: Any) -> None:
    made = QuantizedLinear.from_linear(layer.eval(), group_size=32)
    x = drawn(3, 64)
    assert (made.in_features, made.out_features, made.training) == (64, 48, False)
    assert (made(x) - layer(x)).abs().max() < 0.2 * layer(x).abs().max()
    assert (made.bias is None) == (layer.bias is None)


def test_a_model_keeps_its_tied_head_and_gives_the_rest_four_bits() -> None:
    plain, model = tiny_model("gpt2"), tiny_model("gpt2")
    assert replace_linears(model, group_size=32) is model
    kinds = {name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(kinds) == 8
    assert model.lm_head.weight is model.transformer.wte.weight
    assert weight_bytes(model) < 0.45 * weight_bytes(plain)
    ids = torch.arange(12)[None]
    assert (model(ids).logits - plain(ids).logits).abs().mean() < 0.3 * plain(ids).logits.abs().mean()


def test_what_does_not_fit_says_what_does() -> None:
    layer = QuantizedLinear(64, 8, bias=False)
    with pytest.raises(UnsupportedError, match="no weights yet; call quantize_weights"):
        layer(drawn(1, 64))
    for weights, said in (
        (drawn(64, 8), r"floating point \[8, 64\], not float32 \[64, 8\]"),
        (drawn(8, 64).long(), "not int64"),
        (drawn(8, 64) / 0, "NaN or infinity"),
    ):
        with pytest.raises(SpecError, match=said):
            layer.quantize_weights(weights)
    with pytest.raises(SpecError, match="has no bias"):
        layer.quantize_weights(drawn(8, 64), drawn(8))
    layer.quantize_weights(drawn(8, 64))
    with pytest.raises(SpecError, match="takes 64 inputs; x has 63"):
        layer(drawn(1, 63))
    with pytest.raises(SpecError, match="choose 32, 64, 128, or None"):
        QuantizedLinear(64, 8, group_size=16)
    with pytest.raises(SpecError, match="at least one input"):
        QuantizedLinear(0, 8)
    with pytest.raises(SpecError, match="choose 32, 64, 128"):
        replace_linears(torch.nn.Sequential(torch.nn.Linear(4, 4)), group_size=3)
    with pytest.raises(UnsupportedError, match="found no Linear"):
        replace_linears(torch.nn.ReLU())
