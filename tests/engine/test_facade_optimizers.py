"""The optimizers of precision, kernels, memory and compilation do to a caller's model what the techniques do."""

from mmap import mmap
from typing import Any

import pytest
import torch
from torch import nn

from optigpu import CompileOptimizer, KernelOptimizer, MemoryOptimizer, QuantizationOptimizer
from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.surgery.bitsandbytes_layers import Nf4Linear
from optigpu.surgery.int4_layers import Int4Linear
from optigpu.surgery.int8_layers import Int8Linear
from optigpu.techniques.decoding.native_decode.generating import NativeGenerate
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind, SpecError, UnsupportedError
from tests.engine.brief_jobs import BRIEF
from tests.engine.tiny_models import ignore

pytestmark = pytest.mark.usefixtures("forked_children")

LLAMA = "preset:tiny-llama-test"
PROMPT = torch.arange(6)[None]


def loaded(precision: str) -> Any:
    return QuantizationOptimizer.load(LLAMA, precision=precision, device="cpu")[0]


@pytest.mark.parametrize(
    ("precision", "layer"), [("int8", Int8Linear), ("int4", Int4Linear), ("nf4", Nf4Linear)]
)
def test_a_quantized_precision_replaces_the_layers_and_generates(precision: str, layer: type) -> None:
    model = loaded(precision)
    assert sum(isinstance(module, layer) for module in model.modules()) >= 14
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).shape == (1, 10)


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_a_dtype_is_that_of_the_weights(precision: str, dtype: torch.dtype) -> None:
    model = loaded(precision)
    assert {weight.dtype for weight in model.parameters()} == {dtype}
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).shape == (1, 10)


def test_it_is_the_model_that_a_job_measures() -> None:
    measured = DecodingModel(LLAMA, resolve([Int8WeightOnly()], "generate"), DeviceKind.CPU, 0, ignore).model
    with torch.no_grad():
        assert torch.equal(loaded("int8")(PROMPT).logits, measured(PROMPT).logits)


def test_native_generates_with_packed_weights() -> None:
    model = loaded("native")
    assert issubclass(type(model), NativeGenerate)
    assert model.generate(PROMPT, max_new_tokens=4, do_sample=False).shape == (1, 10)


def test_a_preset_has_no_tokenizer_and_a_trained_model_has() -> None:
    assert QuantizationOptimizer.load(LLAMA, precision="fp32", device="cpu")[1] is None
    _, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="fp32", device="cpu")
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("Once upon")) == "Once upon"


def test_what_cannot_be_loaded_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SpecError, match=r"There is no precision 'int6'.*The precisions are fp32, .*native\."):
        loaded("int6")
    with pytest.raises(SpecError, match="no device 'tpu'"):
        QuantizationOptimizer.load(LLAMA, precision="fp32", device="tpu")
    with pytest.raises(UnsupportedError, match="gptqmodel"):
        loaded("gptq")
    with pytest.raises(
        UnsupportedError, match="preset:gpt2 has its shapes, random weights, and needs no network"
    ):
        QuantizationOptimizer.load("gpt2", precision="fp32", device="cpu")


def test_the_fields_of_a_kernel_s_job_are_checked() -> None:
    with pytest.raises(SpecError, match=r"workload\.lengths\.0"):
        KernelOptimizer.benchmark_attention(lengths=[0], device="cpu")
    with pytest.raises(SpecError, match=r"workload\.dtype"):
        KernelOptimizer.benchmark_layernorm(dtype="float8", device="cpu")


def test_memory_is_printed_after_its_label(capsys: pytest.CaptureFixture[str]) -> None:
    MemoryOptimizer.print_stats("before")
    assert capsys.readouterr().out.startswith("before: host ")
    with mmap(-1, 2**27) as held:  # what an allocator frees may stay with it
        held[::4096] = bytes([1]) * (len(held) // 4096)
        before = MemoryOptimizer.stats().host_bytes
    assert before - MemoryOptimizer.stats().host_bytes > 2**26


def test_optimized_inference_is_what_the_techniques_run_under() -> None:
    layer = nn.Linear(4, 2)
    with MemoryOptimizer.optimized_inference(device="cpu"):
        assert layer(torch.zeros(1, 4)).is_inference()
    with MemoryOptimizer.optimized_inference(device="cpu", autocast="bfloat16"):
        made = layer(torch.zeros(1, 4))
    assert (made.dtype, made.requires_grad, made.is_inference()) == (torch.bfloat16, False, False)
    assert layer(torch.zeros(1, 4)).requires_grad


def test_an_autocast_that_cannot_be_is_refused() -> None:
    wrong: Any = "float8"
    with (
        pytest.raises(SpecError, match="no autocast to 'float8'; choose one of auto, none"),
        MemoryOptimizer.optimized_inference(device="cpu", autocast=wrong),
    ):
        pass
    with (
        pytest.raises(UnsupportedError, match="float16 needs a GPU"),
        MemoryOptimizer.optimized_inference(device="cpu", autocast="float16"),
    ):
        pass


@pytest.mark.slow
def test_what_is_compiled_runs_as_a_graph_and_generate_runs_it_too() -> None:
    graphs: list[torch.fx.GraphModule] = []
    model = loaded("fp32")
    expected = model.generate(PROMPT, max_new_tokens=2, do_sample=False)

    @torch._dynamo.register_backend(name="noted_by_this_test")
    def noted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    assert CompileOptimizer.compile(model, mode="reduce-overhead") is model
    model.compile(backend="noted_by_this_test")  # as CompileOptimizer does, with what notes each graph
    assert torch.equal(model.generate(PROMPT, max_new_tokens=2, do_sample=False), expected)
    assert graphs


def test_an_unknown_mode_lists_those_that_there_are() -> None:
    with pytest.raises(SpecError, match=r"mode: .*reduce-overhead"):
        CompileOptimizer.compile(nn.Linear(2, 2), mode="fastest")


@pytest.mark.long
@pytest.mark.usefixtures("own_lock")
def test_compiling_is_measured_beside_eager(capsys: pytest.CaptureFixture[str]) -> None:
    report = CompileOptimizer.benchmark("preset:tiny-vit-test", backend="eager", device="cpu", **BRIEF)
    assert [row.label for row in report.rows] == ["baseline", "torch_compile"]
    assert "torch_compile" in capsys.readouterr().out
