"""fp8_training rounds products, here by torch's operator for CPUs; compile_training compiles a step."""

from typing import Any

import pytest
import torch

from optigpu.backends.training import MicroBatch
from optigpu.documents.result import Accelerator
from optigpu.hardware import probe
from optigpu.job.spec import resolve
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.compile_training.compiled_loss import CompiledLoss
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.techniques.training.fp8_training.layers import (
    Fp8Products,
    product,
    quantized,
    train_in_fp8,
    turned,
)
from optigpu.techniques.training.lora import Lora
from optigpu.techniques.training.qlora import Qlora
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.saved_tensors import saved_by
from tests.engine.tiny_models import assert_needs_hook
from tests.engine.training import GPT2, LLAMA, RESNET, VIT, losses_of, texts_for, trained

pytestmark = pytest.mark.usefixtures("one_torch_thread")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNCOMPILED = CompileTraining(backend="aot_eager")


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float64 numbers with one scale for all, written apart from the code that is tested."""
    bits, least, largest = {E4M3: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}[dtype]
    scale = (x.abs().max().float() / largest).double()
    scaled = x.double() / scale
    step = torch.exp2(scaled.abs().clamp(min=2.0**least).log2().floor() - bits)
    return (scaled / step).round() * step * scale


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 3, shape[-1])


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_a_matrix_is_rounded_to_8_bits_with_one_scale(dtype: torch.dtype) -> None:
    x = drawn(6, 32)
    numbers, scale = quantized(x, dtype)
    assert (numbers.dtype, scale.shape) == (dtype, ())
    assert torch.allclose(numbers.double() * scale.double(), rounded(x, dtype), rtol=1e-6, atol=0)
    assert float(numbers.float().abs().max()) == torch.finfo(dtype).max


def test_zeros_have_the_scale_1() -> None:
    numbers, scale = quantized(torch.zeros(2, 16), E4M3)
    assert float(scale) == 1
    assert not numbers.float().any()


@pytest.mark.parametrize("a_dtype", [E4M3, E5M2], ids=str)
def test_a_product_is_the_one_of_the_rounded_numbers(a_dtype: torch.dtype) -> None:
    a, b = drawn(32, 64), drawn(48, 64)
    y = product(quantized(a, a_dtype), quantized(b, E4M3), torch.float32)
    exact = rounded(a, a_dtype) @ rounded(b, E4M3).T
    assert torch.allclose(y.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
    flipped, _ = turned(quantized(a, a_dtype))
    assert flipped.shape == (64, 32)
    assert flipped.is_contiguous()


def layer_of(inputs: int = 32, outputs: int = 48) -> Any:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(inputs, outputs), "head": torch.nn.Linear(3, 3)})
    assert train_in_fp8(model) == 1
    return model["layer"]


@pytest.mark.parametrize("rows", [(16,), (3, 7)])
def test_outputs_and_gradients_are_those_of_rounded_factors(rows: tuple[int, ...]) -> None:
    """Also for a number of rows that no unit takes: what is added to them changes nothing."""
    layer = layer_of()
    x, towards = drawn(*rows, 32).requires_grad_(), drawn(*rows, 48)
    y = layer(x)
    to_x, to_weight, to_bias = torch.autograd.grad(y, [x, layer.weight, layer.bias], towards)
    flat_x, flat_towards = x.detach().flatten(0, -2), towards.flatten(0, -2)
    qx, qw, qg = rounded(flat_x, E4M3), rounded(layer.weight.detach(), E4M3), rounded(flat_towards, E5M2)
    bias = layer.bias.detach().double()
    for found, exact in (
        (y, (qx @ qw.T + bias).view(y.shape)),
        (to_x, (qg @ qw).view(x.shape)),
        (to_weight, qg.T @ qx),
        (to_bias, flat_towards.double().sum(dim=0)),
    ):
        assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


def test_a_weight_that_stays_gets_no_gradient() -> None:
    layer = layer_of()
    layer.weight.requires_grad_(False)
    x = drawn(4, 32).requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None


def test_inputs_are_kept_in_a_byte_each() -> None:
    layer, x = layer_of(), drawn(16, 32).requires_grad_()
    kept = saved_by(lambda: layer(x))
    assert sum(tensor.nbytes for tensor in kept if tensor.shape == (16, 32)) == 16 * 32


@pytest.mark.parametrize("model", [LLAMA, GPT2, VIT])
def test_a_model_learns_nearly_the_same_in_8_bits(model: str) -> None:
    expected = losses_of(trained(model))

    def claim() -> None:
        runtime = trained(model, Fp8Training())
        losses = losses_of(runtime)
        assert losses == pytest.approx(expected, rel=0.01)
        assert losses.tolist() != expected.tolist()
        layers = [module for module in runtime.training.model.modules() if isinstance(module, Fp8Products)]
        assert len(layers) == runtime.notes.facts["fp8_layers"]
        assert runtime.training.model.get_output_embeddings() not in layers

    assert_needs_hook(Fp8Training(), "modules", claim)


def test_layers_beside_factors_compute_in_8_bits_and_the_factors_do_not() -> None:
    runtime = trained(LLAMA, Fp8Training(), Lora(rank=16))
    eight = {
        name for name, module in runtime.training.model.named_modules() if isinstance(module, Fp8Products)
    }
    assert len(eight) == 14
    assert all(name.endswith(".base_layer") for name in eight)


def test_what_has_no_8_bit_products_is_refused() -> None:
    old = probe().model_copy(update={"accelerators": (gpu("8.6"),)})
    assert "need compute capability 8.9" in str(Fp8Training().check(old, DeviceKind.CUDA, None))
    new = probe().model_copy(update={"accelerators": (gpu("8.9"),)})
    assert Fp8Training().check(new, DeviceKind.CUDA, None) is None
    assert "need an NVIDIA GPU" in str(Fp8Training().check(probe(), DeviceKind.CPU, None))
    with pytest.raises(UnsupportedError, match="sizes are multiples of 16"):
        trained(RESNET, Fp8Training())
    with pytest.raises(SpecError, match="stored in integers already"):
        resolve((Fp8Training(), Qlora()), "train_step")


def gpu(capability: str) -> Accelerator:
    return Accelerator(name="a GPU", uuid="GPU-0", memory_bytes=8 * 2**30, compute_capability=capability)


@pytest.mark.slow
@pytest.mark.parametrize("beside", [(), (ChunkedCrossEntropy(tokens=8),)], ids=["alone", "in chunks"])
def test_a_compiled_step_learns_the_same(beside: tuple[Technique, ...]) -> None:
    """Captured and run operator by operator, which takes seconds where writing kernels takes minutes."""
    torch._dynamo.reset()
    expected = losses_of(trained(GPT2, *beside))

    def claim() -> None:
        runtime = trained(GPT2, UNCOMPILED, *beside)
        assert losses_of(runtime) == pytest.approx(expected, rel=1e-5)
        facts = runtime.notes.facts
        assert facts.get("compiled_graphs") == 1
        assert facts["graph_breaks"] == 0
        assert facts["compile_backend_s"] > 0

    assert_needs_hook(UNCOMPILED, "training", claim)


@pytest.mark.slow
def test_operations_are_counted_of_a_step_that_is_compiled() -> None:
    torch._dynamo.reset()
    plain, compiled = trained(GPT2), trained(GPT2, UNCOMPILED)
    compiled.step(texts_for(compiled))
    assert compiled.step_flops(texts_for(compiled)) == plain.step_flops(texts_for(plain))


def breaking(micro: MicroBatch) -> torch.Tensor:
    torch._dynamo.graph_break()
    return micro.inputs["x"].sum()


def micro_batch() -> MicroBatch:
    return MicroBatch({"x": torch.ones(2, requires_grad=True)}, torch.zeros(2, dtype=torch.int64), 2)


def test_a_step_with_a_graph_break_needs_several_graphs() -> None:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="set fullgraph to false"):
        CompiledLoss(UNCOMPILED, breaking, Notes())(micro_batch())
    notes = Notes()
    several = CompileTraining(backend="aot_eager", fullgraph=False)
    assert float(CompiledLoss(several, breaking, notes)(micro_batch()).detach()) == 2
    assert notes.facts["graph_breaks"] == 1


def test_a_step_that_torch_does_not_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedError, match="made no graph"):
        CompiledLoss(UNCOMPILED, lambda micro: micro.inputs["x"].sum(), Notes())(micro_batch())


def test_kernels_for_a_cpu_need_a_compiler() -> None:
    bare = probe().model_copy(update={"compiler": None})
    assert "install g++" in str(CompileTraining().check(bare, DeviceKind.CPU, None))
    assert CompileTraining().check(bare, DeviceKind.CUDA, None) is None
    assert UNCOMPILED.check(bare, DeviceKind.CPU, None) is None
    with pytest.raises(ValueError, match="needs the backend inductor"):
        CompileTraining(backend="aot_eager", mode="max-autotune-no-cudagraphs")
