"""fp8 and fp8_training round products, here by torch's operator for CPUs; tf32; a compiled step of training."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from optigpu.backends.training import MicroBatch
from optigpu.hardware import probe
from optigpu.surgery.compiling import CompiledLoss, CompileOptions
from optigpu.surgery.fp8_layers import E4M3_LARGEST, Fp8Linear, Fp8Products, quantize_fp8, train_in_fp8
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp8 import Fp8
from optigpu.techniques.quantization.tf32 import Tf32
from optigpu.techniques.training.chunked_cross_entropy import ChunkedCrossEntropy
from optigpu.techniques.training.compile_training import CompileTraining
from optigpu.techniques.training.fp8_training import Fp8Training
from optigpu.vocabulary import DeviceKind, UnsupportedError
from tests.breadth import spread
from tests.engine.test_techniques_quantization import e4m3
from tests.engine.test_techniques_training_memory import saved_by
from tests.engine.tiny_models import assert_needs_hook, runtime_of
from tests.engine.training import GPT2, LLAMA, RESNET, VIT, losses_of, trained

pytestmark = pytest.mark.usefixtures("models_dir", "one_torch_thread")
SHAPES = [(1, 64, 48), (1, 1, 1), (3, 17, 5), (5, 96, 33), (20, 130, 16), (33, 31, 100)]
"""Rows, inner, outputs: multiples of what the operator takes on CUDA, and remainders."""


def test_rows_are_rounded_to_the_nearest_8_bit_float() -> None:
    x = torch.randn(6, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 100)
    x[2] = 0
    q, scale = quantize_fp8(x)
    assert (q.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scale[2] == 1
    quotient = (x / scale[:, None]).double()
    assert torch.equal(q.double(), e4m3(quotient))
    largest = q.double().abs().amax(dim=1).tolist()
    assert largest == [E4M3_LARGEST] * 2 + [0] + [E4M3_LARGEST] * 3


@pytest.mark.parametrize(
    ("dtype", "rows", "inner", "outputs"),
    spread([torch.float32, torch.bfloat16, torch.float16], SHAPES, by_default=6),
    ids=str,
)
def test_a_layer_agrees_with_float64(rows: int, inner: int, outputs: int, dtype: torch.dtype) -> None:
    """Within the rounding of a float32 sum over `inner`, and of the type of the result."""
    generator = torch.Generator().manual_seed(inner)
    weight, bias = (
        torch.randn(outputs, inner, generator=generator),
        torch.randn(outputs, generator=generator),
    )
    x = torch.randn(rows, inner, generator=generator).to(dtype)
    layer = Fp8Linear(weight, bias)
    y = layer(x)
    (q, q_scale), (w, w_scale) = quantize_fp8(x), quantize_fp8(weight)
    scales = q_scale.double()[:, None] * w_scale.double()
    exact = (q.double() @ w.double().T) * scales + bias.double()
    size = (q.double().abs() @ w.double().abs().T) * scales + bias.double().abs()
    allowed = size * (inner + 4) * 2**-24 + exact.abs() * torch.finfo(dtype).eps / 2
    assert (y.dtype, y.shape) == (dtype, exact.shape)
    assert torch.all((y.double() - exact).abs() <= allowed)
    assert layer(x.view(1, rows, inner)).equal(y.view(1, rows, outputs))
    assert layer(x[:0]).shape == (0, outputs)


def test_nan_and_infinity_are_not_hidden() -> None:
    layer = Fp8Linear(torch.randn(4, 20), None)
    x = torch.randn(3, 20)
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    y = layer(x)
    assert y[0].isnan().all()
    assert not y[1].isfinite().any()
    assert y[2].isfinite().all()


@pytest.mark.slow
def test_fp8_goes_together_with_bf16_and_in_one_graph() -> None:
    model = runtime_of("path:gpt2", Bf16(), Fp8()).model
    layer = model.transformer.h[0].mlp.c_fc
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert layer(x).dtype is torch.bfloat16
        torch.testing.assert_close(compiled(x), layer(x))


@pytest.fixture
def restored() -> Iterator[None]:
    cudnn = torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = cudnn


@pytest.mark.usefixtures("restored")
def test_tf32_sets_what_products_run_in_and_leaves_the_weights() -> None:
    plain = dict(runtime_of("path:gpt2").model.named_parameters())

    def claim() -> None:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = False
        runtime = runtime_of("path:gpt2", Tf32())
        assert (
            torch.get_float32_matmul_precision()
            == runtime.notes.facts.get("float32_matmul_precision")
            == "high"
        )
        assert torch.backends.cudnn.allow_tf32
        # Both ways to ask: TorchInductor and libraries use either, and mixed settings make one of them raise.
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert all(parameter.equal(plain[name]) for name, parameter in runtime.model.named_parameters())

    assert_needs_hook(Tf32(), "modules", claim)


# ---- Steps of training: fp8_training and compile_training.


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
UNCOMPILED = CompileTraining(backend="aot_eager")
TRACED = CompileOptions("aot_eager", "default", fullgraph=True)


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


@pytest.mark.slow
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


def test_what_has_no_8_bit_products_is_refused() -> None:
    assert "need an NVIDIA GPU" in str(Fp8Training().check(probe(), DeviceKind.CPU, None))
    with pytest.raises(UnsupportedError, match="sizes are multiples of 16"):
        trained(RESNET, Fp8Training())


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


def breaking(micro: MicroBatch) -> torch.Tensor:
    torch._dynamo.graph_break()
    return micro.inputs["x"].sum()


def micro_batch() -> MicroBatch:
    return MicroBatch({"x": torch.ones(2, requires_grad=True)}, torch.zeros(2, dtype=torch.int64), 2)


def test_a_step_with_a_graph_break_needs_several_graphs() -> None:
    torch._dynamo.reset()
    with pytest.raises(UnsupportedError, match="set fullgraph to false"):
        CompiledLoss(TRACED, breaking, Notes())(micro_batch())
    notes = Notes()
    several = CompileOptions("aot_eager", "default", fullgraph=False)
    assert float(CompiledLoss(several, breaking, notes)(micro_batch()).detach()) == 2
    assert notes.facts["graph_breaks"] == 1


def test_a_step_that_torch_does_not_compile_is_refused() -> None:
    with torch.compiler.set_stance("force_eager"), pytest.raises(UnsupportedError, match="made no graph"):
        CompiledLoss(TRACED, lambda micro: micro.inputs["x"].sum(), Notes())(micro_batch())
