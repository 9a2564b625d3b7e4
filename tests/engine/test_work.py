"""Work that torch counts is the work that a roofline counts; operators' arithmetic, checks, refusals and memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import ops
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

from optigpu.backends.torch.applied import DecodingModel
from optigpu.backends.torch.operators import TorchOperatorRuntime
from optigpu.documents.facts import Footprint, ImageFacts
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.memory import MemoryMeter
from optigpu.models.loading.footprint import footprint_of, image_footprint_of
from optigpu.models.loading.load import loaded_facts
from optigpu.ops.decode.cpu.arena import ALIGNMENT
from optigpu.ops.decode.program import WEIGHT_KINDS, WeightKind, block_matrices
from optigpu.roofline.work import decode_step, prefill
from optigpu.techniques.base import Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.quantization.nf4 import Nf4
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.attention import Attention
from optigpu.workloads.base import DecodeShape, Workload
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.normalization import Normalization
from optigpu.workloads.requests import Dtype
from tests.engine.image_models import image_runtime
from tests.engine.tiny_models import FAMILIES, VOCABULARY, runtime_of, tiny_model

BATCH, PROMPT, NEW = 3, 10, 5
SHAPE = DecodeShape(PROMPT, NEW, BATCH, units=BATCH)
WIDTH = 64
"""Of the tiny models' hidden states."""


class Counted:
    """Operations that torch counts while `work` runs: those of linear layers, and those of attention."""

    def __init__(self, model: Any, work: Any) -> None:
        with FlopCounterMode(display=False) as counter:
            work()
        counts = counter.get_flop_counts()
        everything = counts["Global"]
        self.linear = everything.get(ops.aten.mm, 0) + everything.get(ops.aten.addmm, 0)
        # Llama's rotary embedding makes its angles by a batched product, which is not part of attention.
        angles = sum(sum(ops.values()) for name, ops in counts.items() if name.endswith("rotary_emb"))
        self.attention = everything.get(ops.aten.bmm, 0) + everything.get(ops.aten.baddbmm, 0) - angles
        assert sum(everything.values()) == self.linear + self.attention + angles, (
            "torch counted another operator"
        )


def eager(family: str) -> Any:
    """A model whose attention is plain products, which torch's counter sees."""
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    return model


def tokens(length: int) -> Any:
    return torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(0))


def of_model(model: Any) -> Footprint:
    return footprint_of(model, loaded_facts(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_has_the_operations_that_torch_counts(family: str) -> None:
    model = eager(family)
    counted = Counted(model, lambda: model(input_ids=tokens(PROMPT), logits_to_keep=1))
    work = prefill(SHAPE, of_model(model), "float32", cached=True)
    assert work.matmul_flops == counted.linear
    # A plain product computes the whole square of scores; the triangle with its diagonal is what is needed of it.
    assert work.attention_flops == counted.attention * (PROMPT + 1) / (2 * PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_has_the_operations_that_torch_counts_on_average(family: str) -> None:
    model = eager(family)
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens(PROMPT), past_key_values=cache, use_cache=True)

    def decode() -> None:
        for _ in range(NEW - 1):
            model(input_ids=tokens(1), past_key_values=cache, use_cache=True, logits_to_keep=1)

    counted = Counted(model, decode)
    work = decode_step(SHAPE, of_model(model), "float32", cached=True)
    assert work.matmul_flops == counted.linear / (NEW - 1)
    assert work.attention_flops == counted.attention / (NEW - 1)


@pytest.mark.parametrize("family", ["resnet", "mobilenet", "vit"])
@pytest.mark.parametrize("stack", [(), (Bf16(),)], ids=["fp32", "bf16"])
def test_an_image_has_the_operations_that_torch_counts_and_reads_the_weights_as_they_are(
    family: str, stack: tuple[Technique, ...]
) -> None:
    runtime = image_runtime(f"preset:tiny-{family}-test", *stack)
    assert isinstance(runtime.facts, ImageFacts)
    found = image_footprint_of(runtime.model, runtime.facts, (3, 64, 64) if family != "vit" else (3, 32, 32))
    side = 32 if family == "vit" else 64
    eager = runtime.model
    if family == "vit":
        eager.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        eager(pixel_values=torch.zeros(5, 3, side, side, dtype=eager.dtype))
    assert 5 * found.flops == counter.get_total_flops()
    assert found.pixels == 3 * side**2
    held = [*runtime.model.parameters(), *runtime.model.buffers()]
    assert found.streamed_bytes == sum(tensor.nbytes for tensor in held)


@pytest.mark.usefixtures("models_dir")
class TestBytes:
    """What a step reads of a model's weights."""

    @staticmethod
    def runtime(family: str, *stack: Technique) -> DecodingModel:
        return runtime_of(f"path:{family}", *stack)

    @staticmethod
    def weights(model: Any) -> int:
        return sum(parameter.nbytes for parameter in model.parameters())

    @pytest.mark.parametrize(
        ("family", "tables"),
        [("gpt2", 64), ("opt", 64 + 2), ("qwen2", 0), ("llama", VOCABULARY)],
    )
    def test_tables_that_are_only_looked_up_are_not_streamed(self, family: str, tables: int) -> None:
        """Rows: positions of GPT-2 and OPT, the embedding of Llama, whose head is its own; tied heads are read."""
        model = self.runtime(family).model
        found = of_model(model)
        buffers = sum(buffer.nbytes for buffer in model.buffers())
        assert found.streamed_bytes == self.weights(model) + buffers - tables * WIDTH * 4
        assert found.row_bytes == (WIDTH * 4 if tables else 0)

    @pytest.mark.parametrize("weights", WEIGHT_KINDS)
    def test_a_decoders_step_reads_its_packed_weights_and_a_row_of_each_table(
        self, weights: WeightKind
    ) -> None:
        """Numbers, scales and units of all matrices, norms and biases; of positions what a row lies in.

        Rows of a packed table lie in blocks of 16, in which each has 4 bytes of every 64. The embedding is the head.
        """
        runtime = self.runtime("gpt2", NativeDecode(weights=weights, calibration="none"))
        found, program = footprint_of(runtime.model, runtime.facts), attached(runtime.model)
        blocks = program.blocks
        norms = [program.final, *(norm for block in blocks for norm in (block.first, block.second))]
        finer, positions = program.head.finer, program.positions
        matrices = [program.head, *([finer.matrix] if finer else [])]
        for block in blocks:
            matrices += block_matrices(block)
        read = [tensor for norm in norms if norm for tensor in (norm.weight, norm.bias)]
        read += [finer.rows] if finer else []
        for matrix in matrices:
            read += [matrix.numbers, matrix.scale, matrix.unit, matrix.bias]
        needed = sum(tensor.nbytes for tensor in read if tensor is not None)
        assert needed <= found.streamed_bytes <= needed + ALIGNMENT * len(read)
        assert positions is not None
        table = [each for each in (positions.numbers, positions.scale, positions.unit) if each is not None]
        assert found.row_bytes == sum(each.nbytes // len(positions.numbers) for each in table)

    @pytest.mark.parametrize(
        "technique", [Int8WeightOnly(), Nf4(), NativeDecode(weights="w4", calibration="none")]
    )
    def test_quantized_layers_have_the_operations_of_plain_ones(self, technique: Technique) -> None:
        plain, changed = (self.runtime("llama", *stack) for stack in ((), (technique,)))
        work = footprint_of(changed.model, changed.facts).facts.work
        assert work == footprint_of(plain.model, plain.facts).facts.work
        assert work

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_cache_grows_by_the_bytes_that_are_counted_for_a_token(self, family: str) -> None:
        runtime = self.runtime(family, StaticKvCache())
        model = footprint_of(runtime.model, runtime.facts)
        cache = StaticCache(config=runtime.model.config, max_cache_len=PROMPT)
        runtime.model(input_ids=tokens(PROMPT), past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        cached, uncached = (prefill(SHAPE, model, "float32", each).bytes for each in (True, False))
        assert cached - uncached == held


DTYPES: tuple[Dtype, ...] = ("float32", "float16", "bfloat16")
SHAPES = {"heads": 4, "kv_heads": 2, "head_size": 32}


@pytest.fixture
def runtime() -> TorchOperatorRuntime:
    return TorchOperatorRuntime(DeviceKind.CPU, seed=0)


def attention(implementation: Any, length: int, **shapes: Any) -> Attention:
    return Attention(lengths=(length,), implementations=(implementation,), **SHAPES | shapes)


def norm(
    implementation: Any, name: Any = "layer_norm", *, residual: bool = True, **shapes: Any
) -> Normalization:
    given = {"rows": 33, "widths": (40,)} | shapes
    return Normalization(implementations=(implementation,), norms=(name,), residuals=(residual,), **given)


def problem_of(workload: Workload, runtime: TorchOperatorRuntime) -> str:
    return workload.prepare(runtime).check().problem or ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_attention_is_right_whatever_its_shape(
    runtime: TorchOperatorRuntime, implementation: str, causal: bool, dtype: Dtype
) -> None:
    for length, shapes in ((1, {}), (7, {"batch_size": 2}), (130, {"kv_heads": None, "head_size": 64})):
        workload = attention(implementation, length, causal=causal, dtype=dtype, **shapes)
        assert problem_of(workload, runtime) == ""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_a_norm_is_right_whatever_its_shape(
    runtime: TorchOperatorRuntime, implementation: str, name: str, dtype: Dtype
) -> None:
    for residual in (True, False):
        for width in (8, 77, 1024):
            workload = norm(implementation, name, residual=residual, widths=(width,), dtype=dtype)
            assert problem_of(workload, runtime) == ""


def test_each_request_yields_the_metrics_of_its_workload(runtime: TorchOperatorRuntime) -> None:
    request = attention("standard", 64, batch_size=2).prepare(runtime)
    sample = request.run()
    operations = 4 * 2 * 4 * 32 * 64 * 65 / 2
    assert sample["tflops"] == pytest.approx(operations / sample["latency_s"] / 1e12)
    assert set(sample) == set(Attention.metrics)
    sample = norm("standard").prepare(runtime).run()
    moved = 4 * (4 * 33 * 40 + 2 * 40)
    assert sample["gb_per_s"] == pytest.approx(moved / sample["latency_s"] / 1e9)
    assert set(sample) == set(Normalization.metrics)


@pytest.mark.parametrize("implementation", ["standard", "fused"])
def test_rounding_to_another_dtype_is_found(
    runtime: TorchOperatorRuntime, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention in bfloat16 is not right as one in float32, nor is a norm."""
    for workload in (attention(implementation, 64), norm(implementation)):
        request: Any = workload.prepare(runtime)
        whole = request.operator.call

        def rounded(whole: Any = whole) -> Any:
            found = whole()
            return (
                (found[0].bfloat16().float(), found[1])
                if isinstance(found, tuple)
                else found.bfloat16().float()
            )

        monkeypatch.setattr(request.operator, "call", rounded)
        assert "is wrong: an element is off by" in (request.check().problem or "")


class TestMemory:
    """What one call takes on a CPU, as torch's allocator is asked for it."""

    @staticmethod
    def peak(workload: Workload, folder: Path) -> float:
        runtime = TorchOperatorRuntime(DeviceKind.CPU, seed=0)
        context = MeterContext(
            runtime, workload.prepare(runtime), workload, None, folder, 0, QualityOptions()
        )
        return MemoryMeter().read(context).values["peak_bytes"]

    def test_standard_attention_holds_two_matrices_of_scores_and_fused_none(self, tmp_path: Path) -> None:
        length = 512
        standard, fused = (
            self.peak(attention(name, length, kv_heads=4), tmp_path) for name in ("standard", "fused")
        )
        rows, scores, hidden = 4 * 32 * length * 4, 4 * length**2 * 4, length**2
        assert standard == pytest.approx(4 * rows + hidden + 2 * scores, rel=0.01)
        assert 4 * rows <= fused < 4 * rows + scores / 4

    @pytest.mark.parametrize("residual", [True, False])
    def test_a_fused_norm_holds_its_inputs_and_its_results(self, residual: bool, tmp_path: Path) -> None:
        workload = norm("fused", residual=residual, rows=256, widths=(512,))
        assert self.peak(workload, tmp_path) == pytest.approx(workload.bytes, rel=0.01)


def one(size: int, dtype: Dtype = "float32") -> Matmul:
    return Matmul(sizes=(size,), dtypes=(dtype,))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [1, 3, 200])
def test_a_product_is_right_in_every_dtype_of_a_cpu(
    runtime: TorchOperatorRuntime, size: int, dtype: Dtype
) -> None:
    assert one(size, dtype).prepare(runtime).check().problem is None
