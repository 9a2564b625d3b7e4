"""The work that a roofline counts is the work that real models do: torch counts the operations, storages the bytes."""

from typing import Any

import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.documents.shapes import Footprint, ImageFacts, ModelFacts
from optigpu.models.loading.footprint import footprint_of, image_footprint_of
from optigpu.models.loading.load import loaded_facts
from optigpu.ops.decode.cpu.arena import ALIGNMENT
from optigpu.ops.decode.program import WeightKind
from optigpu.roofline.work import decode_step, matmul_flops, prefill, training_step_flops
from optigpu.techniques.base import Technique
from optigpu.techniques.decoding.native_decode import NativeDecode
from optigpu.techniques.decoding.native_decode.programs import attached
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int4_weight_only import Int4WeightOnly
from optigpu.techniques.quantization.int8_dynamic import Int8Dynamic
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.requests.shapes import DecodeShape
from tests.engine.image_models import image_runtime
from tests.engine.tiny_models import FAMILIES, VOCABULARY, runtime_of, tiny_model

BATCH, PROMPT, NEW = 3, 10, 5
SHAPE = DecodeShape(PROMPT, NEW, BATCH, units=BATCH)
WIDTH = 64
"""Of the tiny models' hidden states."""


class Counted:
    """Operations that torch counts while `work` runs: those of linear layers, and those of attention."""

    def __init__(self, model: Any, work: Any) -> None:
        from torch import ops
        from torch.utils.flop_counter import FlopCounterMode

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
    import torch

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
    from transformers import DynamicCache

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


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache_a_step_computes_all_tokens_again(family: str) -> None:
    model = eager(family)

    def decode() -> None:
        for length in range(PROMPT + 1, PROMPT + NEW):
            model(input_ids=tokens(length), use_cache=False, logits_to_keep=1)

    counted = Counted(model, decode)
    work = decode_step(SHAPE, of_model(model), "float32", cached=False)
    assert work.matmul_flops == pytest.approx(counted.linear / (NEW - 1), rel=1e-12)
    squares = sum(length**2 for length in range(PROMPT + 1, PROMPT + NEW))
    triangles = sum(length * (length + 1) / 2 for length in range(PROMPT + 1, PROMPT + NEW))
    assert work.attention_flops == pytest.approx(
        counted.attention / (NEW - 1) * triangles / squares, rel=1e-12
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_has_three_times_the_operations_of_its_forward_pass(family: str) -> None:
    model = eager(family)
    ids = tokens(PROMPT)
    counted = Counted(model, lambda: model(input_ids=ids, labels=ids).loss.backward())
    facts = loaded_facts(model)
    linear = 3 * matmul_flops(facts, BATCH * PROMPT, BATCH * PROMPT)
    assert linear == counted.linear
    attention = training_step_flops(facts, BATCH, PROMPT) - linear
    assert attention == counted.attention * (PROMPT + 1) / (2 * PROMPT)


def test_an_opt_model_with_a_narrow_embedding_is_counted_with_its_projections() -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "opt", vocab_size=VOCABULARY, **FAMILIES["opt"] | {"word_embed_proj_dim": 32}
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    counted = Counted(model, lambda: model(input_ids=tokens(PROMPT), logits_to_keep=1))
    # transformers projects every token out of the blocks before it picks the last one.
    unneeded = 2 * BATCH * (PROMPT - 1) * WIDTH * 32
    assert prefill(SHAPE, of_model(model), "float32", cached=True).matmul_flops == counted.linear - unneeded


@pytest.mark.parametrize("family", ["resnet", "mobilenet", "vit"])
@pytest.mark.parametrize("stack", [(), (Bf16(),)], ids=["fp32", "bf16"])
def test_an_image_has_the_operations_that_torch_counts_and_reads_the_weights_as_they_are(
    family: str, stack: tuple[Technique, ...]
) -> None:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

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


def test_a_family_whose_blocks_are_not_known_is_refused() -> None:
    facts = loaded_facts(tiny_model("gpt2"))
    unknown = ModelFacts(**{**vars(facts), "family": "mixtral", "inner_size": None, "gated_mlp": None})
    with pytest.raises(UnsupportedError, match="mixtral"):
        matmul_flops(unknown, 1, 1)


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

    def test_bfloat16_halves_what_is_streamed(self) -> None:
        wide, narrow = (of_model(self.runtime("gpt2", *stack).model) for stack in ((), (Bf16(),)))
        assert narrow.streamed_bytes * 2 == wide.streamed_bytes
        assert narrow.row_bytes * 2 == wide.row_bytes

    def test_a_tied_embedding_is_only_looked_up_once_its_head_is_an_int8_copy(self) -> None:
        plain, quantized = self.runtime("gpt2"), self.runtime("gpt2", Int8WeightOnly())
        before = footprint_of(plain.model, plain.facts)
        after = footprint_of(quantized.model, quantized.facts)
        assert before.row_bytes == WIDTH * 4
        assert after.row_bytes == 2 * WIDTH * 4
        assert after.streamed_bytes < 0.4 * before.streamed_bytes

    @pytest.mark.parametrize(
        ("technique", "dtypes"),
        [
            (Bf16(), ()),
            (Int8WeightOnly(), ()),
            (Int8Dynamic(), ("int8",)),
            (Int4WeightOnly(), ("int8",)),
            (NativeDecode(weights="w4", calibration="none"), ("int8",)),
            (NativeDecode(weights="w8"), ("int8",)),
            (NativeDecode(weights="bf16"), ()),
            (NativeDecode(weights="bf16", head="w8"), ("int8",)),
        ],
        ids=lambda value: getattr(value, "name", None),
    )
    def test_layers_say_what_they_multiply(self, technique: Technique, dtypes: tuple[str, ...]) -> None:
        runtime = self.runtime("gpt2", technique)
        assert footprint_of(runtime.model, runtime.facts).product_dtypes == dtypes

    @pytest.mark.parametrize("weights", ["w3k", "w4", "w4k", "w8", "bf16"])
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
            matrices += [*block.qkv, block.output, block.up, block.down]
        read = [tensor for norm in norms for tensor in (norm.weight, norm.bias)]
        read += [finer.rows] if finer else []
        for matrix in matrices:
            read += [matrix.numbers, matrix.scale, matrix.unit, matrix.bias]
        needed = sum(tensor.nbytes for tensor in read if tensor is not None)
        assert needed <= found.streamed_bytes <= needed + ALIGNMENT * len(read)
        assert positions is not None
        table = [each for each in (positions.numbers, positions.scale, positions.unit) if each is not None]
        assert found.row_bytes == sum(each.nbytes // len(positions.numbers) for each in table)

    @pytest.mark.parametrize("family", FAMILIES)
    def test_the_cache_grows_by_the_bytes_that_are_counted_for_a_token(self, family: str) -> None:
        runtime = self.runtime(family, StaticKvCache())
        model = footprint_of(runtime.model, runtime.facts)
        from transformers import StaticCache

        cache = StaticCache(config=runtime.model.config, max_cache_len=PROMPT)
        runtime.model(input_ids=tokens(PROMPT), past_key_values=cache, use_cache=True)
        layers: list[Any] = cache.layers
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        cached, uncached = (prefill(SHAPE, model, "float32", each).bytes for each in (True, False))
        assert cached - uncached == held
