"""Any decoder of transformers loads and is measured, and each technique runs and passes its check or says why not."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Embedding, Linear
from transformers.pytorch_utils import Conv1D

from optigpu.backends.torch import TorchBackend
from optigpu.backends.torch.runtime import TorchDecodingRuntime
from optigpu.child import replicate
from optigpu.meters.base import MeterContext
from optigpu.meters.quality import QualityMeter, make_reference
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.load import why_no_decoder
from optigpu.roofline.work import matmul_flops
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT, Choice
from optigpu.vocabulary import UnsupportedError
from optigpu.workloads.base import Workload
from tests.engine.causal_families import causal_families, causal_model, save
from tests.engine.measuring import in_process
from tests.engine.test_replicate import assignment
from tests.engine.tiny_models import ignore

TYPES = (
    "llama", "llama4_text", "mistral", "ministral", "ministral3", "mixtral", "qwen2", "qwen2_moe", "qwen3",
    "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma", "gemma2", "gemma3_text", "gemma3", "gemma3n_text",
    "gemma4_text", "phi", "phi3", "phimoe", "smollm3", "olmo", "olmo2", "olmo3", "olmoe", "granite",
    "granitemoe", "granitemoehybrid", "deepseek_v2", "deepseek_v3", "glm", "glm4", "glm4_moe", "gpt_oss",
    "falcon", "falcon_mamba", "mamba", "mamba2", "jamba", "rwkv", "bloom", "gptj", "gpt_neox",
    "gpt_bigcode", "gpt_neo", "starcoder2", "stablelm", "cohere", "cohere2", "nemotron", "minicpm3",
    "ernie4_5", "ernie4_5_moe", "hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4", "lfm2", "bitnet", "xglm",
    "codegen", "mpt", "persimmon", "opt", "gpt2", "seed_oss", "diffllama", "minimax", "cpmant",
    "openai-gpt", "recurrent_gemma", "dbrx", "zamba2", "whisper",
)  # fmt: skip
CHEAP = ("int8_weight_only", "int4_weight_only", "int8_hybrid", "static_kv_cache", "fused_attention")
OTHERS = (
    "int8_dynamic",
    "nf4",
    "llm_int8",
    "torch_compile",
    "no_kv_cache",
    "int8_kv_cache",
    "eager_attention",
)
QUICK = [(family, number, (CHEAP[number % len(CHEAP)],)) for number, family in enumerate(TYPES)]
EVERY = [(family, number, (*CHEAP, *OTHERS)) for number, family in enumerate(causal_families())]
WORKLOAD = {"kind": "generate", "prompt_tokens": 5, "new_tokens": 3}
TOKENS = 24
"""Of the text that quality is measured on."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_torch_thread: None) -> Iterator[Path]:
    """Of models, and of a job."""
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with in_process():  # sets the threads back
        yield tmp_path


@dataclass(frozen=True)
class Measured:
    """A variant whose request has passed its check."""

    runtime: TorchDecodingRuntime
    context: MeterContext


def measured(folder: Path, family: str, *stack: str | dict[str, Any]) -> Measured:
    """As a replicate prepares it, without a warm-up. Raises UnsupportedError as it does."""
    work = assignment(WORKLOAD, f"path:{family}", *stack).model_copy(update={"folder": str(folder)})
    if reason := replicate.refusal(work):
        raise UnsupportedError(reason)
    workload: Workload = work.variant.workload
    quality = work.measure.quality.model_copy(update={"tokens": TOKENS})
    runtime = TorchBackend().prepare(replicate.order_of(work), ignore)
    assert isinstance(runtime, TorchDecodingRuntime)
    request = workload.prepare(runtime)
    assert request.check().problem is None
    context = MeterContext(runtime, request, workload, work.variant.model, folder, work.seed, quality)
    return Measured(runtime, context)


def require_sentence(text: str) -> None:
    assert re.fullmatch(r"[^\n]{10,400}\.", text), text
    assert not re.search(r"\w(Error|Exception)\b|Traceback|failed", text), text


def require_counted(runtime: TorchDecodingRuntime) -> None:
    """Parameters, bytes and operations are those of a plain loop over modules."""
    weights, footprint, model = runtime.weights(), runtime.footprint(), runtime.decoding.model
    numbers: dict[int, int] = {}
    held: dict[int, int] = {}
    streamed: dict[int, int] = {}
    rows: dict[int, int] = {}
    text = model.get_decoder() if model.config.get_text_config(decoder=True) is not model.config else model
    parts = {*text.modules(), model.get_output_embeddings(), model.get_input_embeddings()}
    for module in model.modules():
        own = [*module._parameters.values(), *module._buffers.values()]
        for tensor in (each for each in own if each is not None):
            held[tensor.data_ptr()] = tensor.nbytes
            if isinstance(tensor, torch.nn.Parameter):
                numbers[tensor.data_ptr()] = tensor.numel()
            if module in parts and isinstance(module, Embedding):
                rows[tensor.data_ptr()] = tensor[0].nbytes if tensor.dim() else 0
            elif module in parts:
                streamed[tensor.data_ptr()] = tensor.nbytes
    assert weights.parameters == sum(numbers.values())
    assert weights.bytes == sum(held.values())
    assert footprint.streamed_bytes == sum(streamed.values())
    assert footprint.row_bytes == sum(size for place, size in rows.items() if place not in streamed)
    try:
        flops = matmul_flops(footprint.facts, 1, 1)
    except UnsupportedError as error:
        require_sentence(str(error))
        return
    layers = {module for module in model.modules() if isinstance(module, (Linear, Conv1D))}
    assert flops == 2 * sum(layer.weight.numel() for layer in layers)


def require_quality(context: MeterContext, most: float) -> None:
    """A divergence of at most `most`, or one sentence for each figure that is missing."""
    found = QualityMeter().read(context)
    for reason in found.reasons.values():
        require_sentence(reason)
    if "kld_mean" in found.values:
        assert 0 <= found.values["kld_mean"] <= most
        if most <= EXACT:
            assert found.values["top1_agreement"] == 1


def measured_or_told(folder: Path, family: str, *stack: str) -> Measured | None:
    """None where one sentence says why it is not measured."""
    try:
        return measured(folder, family, *stack)
    except UnsupportedError as error:
        require_sentence(str(error))
        return None


def require_measured(folder: Path, family: str, number: int, names: tuple[str, ...]) -> None:
    """The plain model, and with each of the techniques that can be applied."""
    model = causal_model(family, number)
    save(model, folder / family, number)
    plain = measured_or_told(folder, family)
    if plain is None:
        assert why_no_decoder(model.config)
        return
    require_counted(plain.runtime)
    plain.context.request.observe()
    assert not make_reference(plain.context).reasons
    require_quality(plain.context, 1e-8)
    for name in names:
        technique = TECHNIQUES[name](name=name)
        changed = measured_or_told(folder, family, name)
        if changed is None:
            continue
        require_quality(changed.context, 1e-6 if technique.keeps_predictions() else 4.0)
        if Choice.WEIGHTS in technique.chosen():
            assert 0 < (changed.runtime.weights().quantized or 0) <= 1


@pytest.mark.parametrize(("family", "number", "names"), QUICK, ids=[case[0] for case in QUICK])
def test_a_decoder_is_measured(folder: Path, family: str, number: int, names: tuple[str, ...]) -> None:
    require_measured(folder, family, number, names)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "gemma3_text"])
def test_a_compiled_step_goes_on_beyond_a_window(folder: Path, family: str) -> None:
    model = causal_model(family)
    model.config.sliding_window = 4
    save(model, folder / family)
    assert not make_reference(measured(folder, family).context).reasons
    compiled = measured(folder, family, {"name": "torch_compile", "backend": "eager"})
    require_quality(compiled.context, 1e-6)


@pytest.mark.long
@pytest.mark.parametrize(("family", "number", "names"), EVERY, ids=[case[0] for case in EVERY])
def test_every_decoder_is_measured_with_every_technique(
    folder: Path, family: str, number: int, names: tuple[str, ...]
) -> None:
    require_measured(folder, family, number, names)
