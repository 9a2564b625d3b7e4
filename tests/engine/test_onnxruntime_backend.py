"""The onnxruntime backend in this process: tokens and logits as transformers has them, facts, and what it refuses."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.onnxruntime import INSTALL
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware import probe
from optigpu.models.held import MODELS_DIR
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.vocabulary import DeviceKind, OptiGPUError, OutOfMemoryError, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.prefill import Prefill
from tests.engine import converted_engines
from tests.engine.converted_engines import (
    NEW,
    PROMPT,
    TINY,
    error,
    ordered,
    own_cache,
    prompts,
    scored,
    transformers_logits,
    transformers_model,
    transformers_tokens,
)
from tests.engine.tiny_models import VOCABULARY, tiny_model

pytestmark = pytest.mark.onnxruntime

BACKEND = BACKENDS["onnxruntime"]
prepared = partial(converted_engines.prepared, "onnxruntime")
SAME = 1e-5
"""The largest difference of a logit over the largest logit, in float32."""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, "disabled", "basic", "extended"])
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path, level: str | None) -> None:
    stack = [OnnxGraph.model_validate({"level": level})] if level else []
    prompt = prompts(2)
    found = prepared(tmp_path, *stack).generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0


def test_scored_logits_are_transformers_logits(tmp_path: Path) -> None:
    tokens = prompts(2, 48)
    expected = transformers_logits(TINY, tokens)
    found = scored(prepared(tmp_path), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, expected[:, 8:]) <= SAME


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2", "mistral"])
def test_each_family_has_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """mistral with a window that is shorter than the text, and a head size of its own."""
    model = tiny_mistral() if family == "mistral" else tiny_model(family)
    model.save_pretrained(tmp_path / "models" / family)
    monkeypatch.setenv(MODELS_DIR, str(tmp_path / "models"))
    tokens = prompts(2, 30, VOCABULARY)
    expected = transformers_logits(f"path:{family}", tokens)
    for prefill in (0, 12):
        found = scored(prepared(tmp_path, model=f"path:{family}"), tokens, prefill)
        assert error(found, expected[:, prefill:]) <= SAME


def tiny_mistral() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "mistral", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("technique", "bound"),
    [
        (OnnxInt8(), 0.05),
        (OnnxInt8(group_size=128), 0.05),
        (OnnxInt4(), 0.3),
        (OnnxInt4(group_size=128, products="float"), 0.3),
    ],
    ids=str,
)
def test_quantized_logits_are_near_and_a_prompt_s_pass_leaves_what_steps_leave(
    tmp_path: Path, technique: Technique, bound: float
) -> None:
    runtime = prepared(tmp_path, technique)
    tokens = prompts(1, 32)
    by_step = scored(runtime, tokens)
    assert 0 < error(by_step, transformers_logits(TINY, tokens)) <= bound
    after_prompt = scored(runtime, tokens, 24)
    assert error(by_step[:, 24:], after_prompt) <= 0.05
    assert runtime.scoring_s(tokens, 24) > 0
    np.testing.assert_array_equal(runtime.logits(tokens), next(runtime.score(tokens, 31)))


def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    both = prompts(3)
    together = runtime.generate(both, 12).tokens
    alone = [runtime.generate(row[None], 12).tokens[0] for row in both]
    assert together.tolist() == [row.tolist() for row in alone]
    assert len({tuple(row) for row in together.tolist()}) > 1


def test_what_is_decoded_is_remembered_and_nothing_is_left_of_the_sequence_before(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    assert not runtime.decoded
    first = runtime.generate(prompts(1), NEW)
    assert runtime.decoded == (1, PROMPT + NEW)
    runtime.generate(prompts(1)[:, ::-1].copy(), 8)
    assert runtime.decoded == (1, PROMPT + NEW)
    assert runtime.generate(prompts(1), NEW).tokens.tolist() == first.tokens.tolist()


def test_a_prompt_is_passed_whole(tmp_path: Path) -> None:
    workload = Prefill(prompt_tokens=16, batch_size=2)
    runtime = prepared(tmp_path, workload=workload)
    tokens = prompts(2, 16)
    done = runtime.forward(tokens)
    assert error(done.logits, transformers_logits(TINY, tokens)[:, -1]) <= SAME
    assert done.chosen.tolist() == done.logits.argmax(axis=1).tolist()
    request = workload.prepare(runtime)
    assert request.check().problem is None
    assert request.run()["prefill_tokens_per_s"] > 0


def test_more_tokens_than_the_model_s_context_are_refused(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    context = runtime.facts.context
    with pytest.raises(OptiGPUError, match=f"context is {context} tokens, and {context + 1} do not fit"):
        runtime.generate(prompts(1, context - 4), 5)
    assert runtime.generate(prompts(1, context - 4), 4).tokens.shape == (1, 4)


def test_buffers_refuse_what_does_not_fit(tmp_path: Path) -> None:
    from optigpu.backends.onnxruntime.prepare import DecodingSteps, opened_decoder

    contents, session = opened_decoder(ordered(tmp_path), lambda _: None)
    facts = contents.footprint.facts
    assert isinstance(facts, ModelFacts)
    steps = DecodingSteps(session, facts, 2, 8)
    steps.forward(prompts(2, 6))
    with pytest.raises(OptiGPUError, match="2 sequences of 8 tokens; 2 sequences of 9 tokens do not fit"):
        steps.forward(prompts(2, 3))
    with pytest.raises(OptiGPUError, match="1 sequences of 7 tokens do not fit"):
        steps.forward(prompts(1, 1))
    with pytest.raises(OptiGPUError, match="ONNX Runtime could not decode 1 tokens"):
        steps.forward(np.array([[-3000], [0]]))
    steps.close()


@pytest.mark.parametrize("model", [TINY, "preset:tiny-gpt2-test", "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    from optigpu.models.loading.load import count_weights

    whole, small = prepared(tmp_path, model=model), prepared(tmp_path, OnnxInt4(), model=model)
    weights, quantized = whole.weights(), small.weights()
    assert weights.parameters == quantized.parameters == count_weights(transformers_model(model))
    assert weights.bytes >= 4 * weights.parameters > 2 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 5 * small.footprint().streamed_bytes > 0
    assert whole.footprint().facts == whole.facts
    assert (whole.footprint().product_dtypes, small.footprint().product_dtypes) == ((), ("int8",))


def test_it_says_how_it_runs(tmp_path: Path) -> None:
    facts = prepared(tmp_path, OnnxInt4(), OnnxGraph(level="basic"), threads=2).notes.facts
    assert (facts["threads"], facts["dtype"], facts["kv_cache_dtype"]) == (2, "float32", "float32")
    assert facts["onnx_graph_level"] == "basic"
    assert set(facts["onnx_tensor_types"]) == {"float32", "uint8", "int64"}
    assert facts["versions"].keys() == {"onnxruntime", "onnx"}
    assert "Build Info" in facts["onnxruntime_build"]
    assert prepared(tmp_path).notes.facts["onnx_graph_level"] == "all"


def test_what_it_does_not_know_has_a_reason(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    peaks = runtime.peak_memory(lambda: None)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (None, None)
    assert all("CPU" in reason for reason in peaks.reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, tmp_path / "trace")
    with pytest.raises(UnsupportedError, match="operators"):
        BACKEND.peaks(DeviceKind.CPU, 1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "preset:gpt-j-6b",
            "gptj models cannot be written as ONNX graphs here, only gpt2, opt, llama, mistral, qwen2",
        ),
        ("hub:openai-community/gpt2", "hub's cache does not hold"),
        ("path:missing", "missing"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused(tmp_path: Path, model: str, words: str) -> None:
    with pytest.raises((UnsupportedError, OptiGPUError), match=words):
        prepared(tmp_path, model=model)


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        (Matmul(), "does not run the workload matmul; it runs generate, prefill, quality, classify"),
        (Classify(images="pets"), "leave images out"),
        (Generate(prompt="The old man"), "leave prompt, temperature and top_p out"),
    ],
)
def test_a_workload_that_it_does_not_run_is_refused(workload: Any, words: str) -> None:
    assert words in str(BACKEND.supports(workload, None))


def test_it_knows_when_memory_ran_out() -> None:
    assert BACKEND.is_out_of_memory(MemoryError())
    assert BACKEND.is_out_of_memory(OutOfMemoryError("no"))
    assert BACKEND.is_out_of_memory(RuntimeError("Failed to allocate memory for requested buffer"))
    assert not BACKEND.is_out_of_memory(RuntimeError("indices element out of data bounds"))


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ({}, f"onnxruntime and onnx are not installed; install them with: {INSTALL}"),
        ({"onnx": "1"}, f"onnxruntime is not installed; install it with: {INSTALL}"),
        ({"onnx": "1", "onnxruntime": "1"}, None),
    ],
)
def test_without_its_packages_it_names_the_command(software: dict[str, str], sentence: str | None) -> None:
    assert BACKEND.missing(probe().model_copy(update={"software": software})) == sentence
