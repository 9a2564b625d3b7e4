"""ONNX Runtime: decoders and classifiers as torch has them, its techniques, kept models, and jobs beside torch."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends import BACKENDS
from optigpu.documents.facts import TextQuality
from optigpu.documents.result import Result
from optigpu.measure import Report
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.load import count_weights
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.onnx_graph import OnnxGraph
from optigpu.techniques.quantization.onnx_int4 import OnnxInt4
from optigpu.techniques.quantization.onnx_int8 import OnnxInt8
from optigpu.techniques.quantization.onnx_static_int8 import OnnxStaticInt8
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.prefill import Prefill
from tests.engine import converted_engines
from tests.engine.caches import cache_with
from tests.engine.converted_engines import (
    NEW,
    TINY,
    error,
    loaded_by_measuring,
    ordered,
    own_cache,
    prompts,
    scored,
    transformers_classes,
    transformers_logits,
    transformers_model,
    transformers_tokens,
)
from tests.engine.sessions import assert_measured, by_label, measured, quick_job, value
from tests.engine.tiny_models import VOCABULARY, tiny_model

pytestmark = [pytest.mark.onnxruntime, pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

prepared = partial(converted_engines.prepared, "onnxruntime")
SAME = 1e-5
"""The largest difference of a logit over the largest logit, in float32."""


@pytest.mark.parametrize("level", ["disabled", "extended"])
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path, level: str) -> None:
    prompt = prompts(2)
    found = prepared(tmp_path, OnnxGraph.model_validate({"level": level})).generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0


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
    config = AutoConfig.for_model(
        "mistral", vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=64, sliding_window=8,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


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


@pytest.mark.parametrize("model", [TINY, "preset:tiny-gpt2-test", "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    whole, small = prepared(tmp_path, model=model), prepared(tmp_path, OnnxInt4(), model=model)
    weights, quantized = whole.weights(), small.weights()
    assert weights.parameters == quantized.parameters == count_weights(transformers_model(model))
    assert weights.bytes >= 4 * weights.parameters > 2 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 5 * small.footprint().streamed_bytes > 0
    assert whole.footprint().facts == whole.facts
    assert (whole.footprint().product_dtypes, small.footprint().product_dtypes) == ((), ("int8",))


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


NEAR = 1e-3
TINY_CLASSIFIERS = ("tiny-resnet-test", "tiny-mobilenet-test", "tiny-vit-test")


def images(batch: int, side: int = 32) -> Any:
    return np.random.default_rng(3).standard_normal((batch, 3, side, side)).astype(np.float32)


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_the_logits_are_torch_s_for_every_batch_and_level(tmp_path: Path, name: str) -> None:
    for batch, stack in ((1, ()), (3, ()), (2, (OnnxGraph(level="disabled"),))):
        given = images(batch)
        runtime = prepared(tmp_path, *stack, model=f"preset:{name}", workload=Classify(batch_size=batch))
        done = runtime.forward(given)
        expected = transformers_classes(f"preset:{name}", given)
        assert error(done.logits, expected) <= NEAR
        assert done.chosen.tolist() == expected.argmax(axis=1).tolist()
        assert done.seconds > 0


@pytest.mark.parametrize("name", TINY_CLASSIFIERS)
def test_static_int8_is_smaller_and_near(tmp_path: Path, name: str) -> None:
    given = images(8)
    model, workload = f"preset:{name}", Classify(batch_size=8)
    runtime = prepared(tmp_path, OnnxStaticInt8(), model=model, workload=workload)
    assert 0 < error(runtime.forward(given).logits, transformers_classes(model, given)) <= 0.5
    plain = prepared(tmp_path, model=model, workload=workload)
    assert runtime.weights().bytes < 0.6 * plain.weights().bytes
    assert runtime.footprint().product_dtypes == ("int8",)
    assert runtime.weights().hash == plain.weights().hash


BACKEND = BACKENDS["onnxruntime"]
SMALL = "preset:tiny-llama-test"


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where models are kept."""
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    return folder / "converted" / "onnxruntime"


@pytest.mark.usefixtures("converter_at_hand")
def test_a_model_is_written_once_for_each_format(tmp_path: Path, kept: Path) -> None:
    said: list[str] = []
    for stack in ((), (), (OnnxInt4(),), (OnnxInt8(),), (OnnxInt4(),)):
        BACKEND.prepare(ordered(tmp_path, *stack, model=SMALL), said.append)
    assert said.count("converting the model") == 3
    assert len(list(kept.glob("preset-tiny-llama-test-*.onnx"))) == 3


LABELS = ["baseline", "onnxruntime: baseline", "onnxruntime: onnx_int8", "onnxruntime: onnx_int4"]


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("onnx"))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """torch's baseline with ONNX Runtime's, and with 8 and 4 bits, beside it."""
    beside: list[dict[str, Any]] = [{"backend": "onnxruntime"}]
    beside += [{"backend": "onnxruntime", "stack": [{"name": name}]} for name in ("onnx_int8", "onnx_int4")]
    return measured(quick_job(beside=beside), tmp_path_factory.mktemp("locks"))


@pytest.fixture(scope="module")
def results(report: Report) -> dict[str, Result]:
    return by_label(report)


@pytest.mark.long
def test_engines_are_measured_side_by_side_and_compare(report: Report, results: dict[str, Result]) -> None:
    assert list(results) == LABELS
    assert {result.variant.backend for result in results.values()} == {"torch", "onnxruntime"}
    assert len({result.variant.workload_digest for result in results.values()}) == 1
    assert len({result.variant.variant_digest for result in results.values()}) == len(LABELS)
    assert [row.label for row in report.attribution.rows] == LABELS


def test_its_results_are_whole(results: dict[str, Result]) -> None:
    hashes = {result.facts.weights.hash for result in results.values() if result.facts.weights}
    assert len(hashes) == 1
    for result in results.values():
        assert_measured(result)
    four = results[LABELS[3]].facts
    assert four.versions["onnxruntime"]
    assert four.recorded["onnx_tensor_types"]
    assert "ONNX Runtime" in four.why_null("attention_kernels")
    assert four.footprint is not None
    assert four.kv_cache == "past_present_share_buffer"


def test_fewer_bits_are_fewer_bytes_and_further_from_fp32(results: dict[str, Result]) -> None:
    own = [results[label] for label in LABELS[1:]]
    sizes = [value(result, "weight_bytes") for result in own]
    assert sizes == sorted(sizes, reverse=True)
    losses = [value(result, "kld_mean") for result in own]
    assert losses == sorted(losses)
    assert losses[0] < 1e-7
    assert losses[1] < 1e-3 < losses[2] < 0.2
    assert value(own[0], "top1_agreement") == 1
    texts = [result.facts.quality for result in results.values()]
    assert len({text.tokens_sha256 for text in texts if isinstance(text, TextQuality)}) == 1


def test_its_measuring_process_loads_no_torch(report: Report, tmp_path: Path) -> None:
    """The model is kept already; writing one is another process's affair."""
    assert loaded_by_measuring("onnxruntime", tmp_path, "torch", "transformers", "onnx") == "[]"
