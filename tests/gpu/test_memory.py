"""The memory techniques on an NVIDIA GPU: our caches in CUDA graphs, autocast, and weights that cross the bus."""

import copy
from typing import Any

import pytest
import torch

from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.cpu_offload import CpuOffload
from optigpu.techniques.memory.cpu_offload.streaming import CudaLane, decoder_layers, offload
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.techniques.memory.int8_kv_cache import Int8KvCache
from optigpu.techniques.memory.sliding_kv_cache import SlidingKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from tests.engine.decoded import NEW_TOKENS
from tests.engine.tiny_models import FAMILIES, VOCABULARY, prompt
from tests.gpu.cuda_models import on_cuda

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("models_dir")]
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
