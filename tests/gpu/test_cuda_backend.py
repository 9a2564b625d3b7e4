"""The torch backend and the memory techniques on an NVIDIA GPU: what is measured, compiled, recorded and exported."""

import copy
from typing import Any

import pytest
import torch

from optigpu.backends.torch.applied import DecodingModel, PassModel
from optigpu.backends.torch.device import EventClock
from optigpu.conductor.tasks import prove
from optigpu.models.loading.footprint import weight_bytes
from optigpu.surgery.host_memory import CudaLane, decoder_layers, offload
from optigpu.techniques.base import Notes, Technique
from optigpu.techniques.compilation.cuda_graphs import CudaGraphs
from optigpu.techniques.compilation.export_aot import ExportAot
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.decoding.speculative_decoding import SpeculativeDecoding
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.cpu_offload import CpuOffload
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.techniques.sparsity.magnitude_pruning import MagnitudePruning
from optigpu.vocabulary import DeviceKind, Task
from tests.engine.decoded import NEW_TOKENS, assert_tokens_right
from tests.engine.rounding import in_float64, logits_of, rounding_bound
from tests.engine.tiny_models import FAMILIES, VOCABULARY, ignore, prompt, tiny_model
from tests.gpu.cuda_models import calls_of, on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]


@pytest.mark.gpu_first
def test_the_clock_measures_what_the_device_does() -> None:
    clock = EventClock(DeviceKind.CUDA)
    x = torch.randn(4096, 4096, device="cuda")
    marks = [clock.mark()]
    for products in (1, 20):
        for _ in range(products):
            x @ x
        marks.append(clock.mark())
    short, long = clock.seconds(marks)
    assert 0 < short < long


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
def test_greedy_tokens_are_right_with_and_without_cuda_graphs(family: str, mode: Any) -> None:
    runtime = on_cuda(f"path:{family}", *([TorchCompile(mode=mode)] if mode else []))
    prompts = prompt().cuda()
    first = runtime.generate(prompts, NEW_TOKENS)
    again = [runtime.generate(prompts, NEW_TOKENS).tokens for _ in range(3)]
    assert all(tokens.equal(first.tokens) for tokens in again)
    assert all(gap > 0 for gap in first.gaps_s)
    assert_tokens_right(runtime, in_float64(runtime.model), prompts, first.tokens)
    if mode:
        assert runtime.notes.facts["compiled_graphs"] == 1


@pytest.mark.gpu_first
def test_the_gpu_proves_that_it_works() -> None:
    prove(DeviceKind.CUDA, cancelled=lambda: None)


# ---- Compiled, recorded, exported, guessed and pruned.


OTHERS: dict[str, tuple[Technique, ...]] = {
    "alone": (),
    "bf16": (Bf16(),),
    "int8_weight_only": (Int8WeightOnly(),),
    "autocast": (Autocast(),),
    "inference_mode": (InferenceMode(),),
    "int8_kv_cache": (Int8KvCache(),),
}


@pytest.mark.parametrize("others", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_recorded_step_gives_the_tokens_of_the_step(family: str, others: tuple[Technique, ...]) -> None:
    """The same kernels in the same order, so the very same tokens; also after autocast has left."""
    expected = on_cuda(f"path:{family}", StaticKvCache(), *others).generate(prompt().cuda(), NEW_TOKENS)
    runtime = on_cuda(f"path:{family}", CudaGraphs(), *others)
    for _ in range(3):
        assert runtime.generate(prompt().cuda(), NEW_TOKENS).tokens.equal(expected.tokens)
    assert runtime.notes.facts["cuda_graphs"] == 1


@pytest.mark.gpu_first
def test_each_step_is_one_launch() -> None:
    runtime = on_cuda("path:gpt2", CudaGraphs())
    runtime.generate(prompt().cuda(), NEW_TOKENS)
    calls = calls_of(lambda: runtime.generate(prompt().cuda(), NEW_TOKENS))
    assert calls["cudaGraphLaunch"] == NEW_TOKENS - 1


@pytest.mark.parametrize("made", [TorchCompile(), ExportAot()], ids=["torch_compile", "export_aot"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_was_compiled_is_recorded(family: str, made: Technique) -> None:
    runtime, compiled = on_cuda(f"path:{family}", CudaGraphs(), made), on_cuda(f"path:{family}", made)
    expected = compiled.generate(prompt().cuda(), NEW_TOKENS).tokens
    for _ in range(3):
        assert runtime.generate(prompt().cuda(), NEW_TOKENS).tokens.equal(expected)
    assert_right(runtime, family)


@pytest.mark.parametrize("technique", [CudaGraphs(), TorchCompile()], ids=lambda technique: technique.name)
@pytest.mark.parametrize(
    ("task", "model"), [(Task.PREFILL, "path:llama"), (Task.IMAGES, "preset:tiny-vit-test")]
)
def test_a_forward_pass_is_recorded_and_compiled(task: Task, model: str, technique: Technique) -> None:
    inputs = prompt() if task is Task.PREFILL else torch.randn(2, 3, 32, 32)
    runtime, plain = (
        PassModel(task, model, stack, DeviceKind.CUDA, seed=0, progress=ignore)
        for stack in ((technique,), ())
    )
    expected = plain.forward(inputs.cuda()).logits
    for _ in range(3):
        found = runtime.forward(inputs.cuda()).logits
        assert float((found - expected).abs().max()) <= 1e-3 * float(expected.abs().max())


@pytest.mark.parametrize("draft", [None, "path:gpt2", "path:llama"])
def test_guesses_change_no_token(draft: str | None) -> None:
    """Which the loop itself compares, with ties; and times are those of passes."""
    runtime = on_cuda("path:gpt2", SpeculativeDecoding(draft=draft))
    generation = runtime.generate(prompt(1).cuda(), 30)
    agreement = runtime.notes.facts["speculation_agreement"]
    expected = on_cuda("path:gpt2").generate(prompt(1).cuda(), 30).tokens
    same = round(30 * agreement)
    assert generation.tokens[:, :same].equal(expected[:, :same])
    assert len(generation.gaps_s) == 30
    assert generation.gaps_s[0] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_two_of_four_run_on_sparse_tensor_cores(family: str) -> None:
    """Half of the weights and two bits of position each: 9/16 of the bytes, and the same products."""
    technique = MagnitudePruning(structure="2:4")
    sparse = on_cuda(f"path:{family}", Bf16(), technique)
    dense = tiny_model(family).requires_grad_(False).bfloat16()
    technique.modules(dense, Notes())
    assert sparse.notes.facts["sparse_layers"] > 0
    assert weight_bytes(sparse.model) < weight_bytes(dense)
    reference = in_float64(dense).cuda()
    tokens = prompt().cuda()
    bound = rounding_bound(reference, tokens, "bfloat16")
    assert float((sparse.logits(tokens) - logits_of(reference, tokens)).abs().max()) <= bound


def assert_right(runtime: DecodingModel, family: str) -> None:
    reference = in_float64(tiny_model(family)).cuda()
    tokens = prompt(2, 8 + NEW_TOKENS - 1).cuda()
    bound = rounding_bound(reference, tokens, "float32")
    assert float((runtime.logits(tokens) - logits_of(reference, tokens)).abs().max()) <= bound


WINDOW = SlidingKvCache(window=4, sinks=2)
OWN = [(Int8KvCache(),), (WINDOW,), (Int8KvCache(), WINDOW)]
SLACK = 2**25
"""Bytes that libraries allocate on the device beside weights: workspaces of products."""


def names(stack: tuple[Technique, ...]) -> str:
    return " + ".join(technique.name for technique in stack)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("stack", OWN, ids=names)
def test_our_caches_decode_the_same_growing_fixed_and_in_a_cuda_graph(
    family: str, stack: tuple[Technique, ...]
) -> None:
    ids = prompt().cuda()
    tokens = on_cuda(f"path:{family}", *stack).generate(ids, NEW_TOKENS).tokens
    fixed = on_cuda(f"path:{family}", *stack, StaticKvCache())
    assert fixed.generate(ids, NEW_TOKENS).tokens.equal(tokens)
    compiled = on_cuda(f"path:{family}", *stack, TorchCompile(mode="reduce-overhead"))
    for _ in range(4):
        assert compiled.generate(ids, NEW_TOKENS).tokens.equal(tokens)
    assert compiled.notes.facts["compiled_graphs"] == 1


@pytest.mark.parametrize("others", [(), (Bf16(),), (InferenceMode(), Int8KvCache())], ids=names)
def test_an_offloaded_model_decodes_the_same_from_a_part_of_the_memory(others: tuple[Technique, ...]) -> None:
    ids = prompt().cuda()
    plain = on_cuda("bundled:tiny", *others)
    offloaded = on_cuda("bundled:tiny", CpuOffload(), *others)
    tokens = plain.generate(ids, NEW_TOKENS).tokens
    for _ in range(3):
        assert offloaded.generate(ids, NEW_TOKENS).tokens.equal(tokens)
    assert offloaded.logits(ids).equal(plain.logits(ids))
    weights = list(decoder_layers(offloaded.model).parameters())
    assert all(weight.device.type == "cpu" and weight.is_pinned() for weight in weights)
    assert offloaded.model.get_input_embeddings().weight.is_cuda


@pytest.mark.gpu_first
def test_no_copy_overtakes_what_computes_with_its_slot() -> None:
    """Layers whose copy takes longer than their arithmetic, and then the other way round."""
    model = wide_model()
    on_device = copy.deepcopy(model).cuda()
    before = torch.cuda.memory_allocated()
    facts = offload(model, torch.device("cuda"), CudaLane())
    rest = model.get_input_embeddings().weight.nbytes + model.lm_head.weight.nbytes
    assert torch.cuda.memory_allocated() - before <= facts["staging_bytes"] + rest + SLACK
    assert facts["staging_bytes"] == facts["offloaded_bytes"] // 3
    with torch.inference_mode():
        for length in (1, 512, 1, 512, 8):
            ids = prompt(4, length).cuda()
            expected = on_device(input_ids=ids, use_cache=False).logits
            for _ in range(3):
                assert model(input_ids=ids, use_cache=False).logits.equal(expected)


def wide_model() -> Any:
    """Six layers of 64 MB each, all different, on the host."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shapes = {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 6,
        "num_attention_heads": 16,
    }
    config = AutoConfig.for_model("llama", vocab_size=VOCABULARY, tie_word_embeddings=False, **shapes)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
