"""What engines of converted models share: greedy tokens, sequences, kept models, refusals; Core ML without a Mac."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from optigpu.backends import BACKENDS, llama_cpp, onnxruntime, openvino
from optigpu.backends.converted import weights_of
from optigpu.backends.coreml import INPUT, OUTPUT, PACKAGE, package_of
from optigpu.backends.coreml.convert import WholePass, traced
from optigpu.backends.engine import SteppedRuntime
from optigpu.models.described import decoder_facts
from optigpu.models.loading.expressed import window_of
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from tests.engine.caches import cache_with
from tests.engine.converted_engines import (
    NEW,
    PROMPT,
    TINY,
    error,
    ordered,
    own_cache,
    prepared,
    prompts,
    scored,
    transformers_logits,
    transformers_model,
    transformers_tokens,
)
from tests.engine.machines import here
from tests.engine.tiny_models import FAMILIES, VOCABULARY

NEEDED = {
    "llama_cpp": (("llama-cpp-python", "gguf"), llama_cpp.LlamaCppBackend.install),
    "onnxruntime": (("onnxruntime", "onnx"), onnxruntime.OnnxRuntimeBackend.install),
    "openvino": (("openvino", "nncf"), openvino.OpenVinoBackend.install),
}
MARKS = {
    "llama_cpp": pytest.mark.llama,
    "onnxruntime": pytest.mark.onnxruntime,
    "openvino": pytest.mark.openvino,
}
ENGINES = [pytest.param(name, marks=mark) for name, mark in MARKS.items()]


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("engines"))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_greedy_tokens_are_transformers_tokens_and_nothing_is_left_of_the_sequence_before(
    tmp_path: Path, engine: str
) -> None:
    runtime, prompt = prepared(engine, tmp_path), prompts(2)
    found = runtime.generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0
    assert runtime.decoded == (2, PROMPT + NEW)
    runtime.generate(prompt[:, ::-1].copy(), 8)
    assert runtime.generate(prompt, NEW).tokens.tolist() == found.tokens.tolist()


@pytest.mark.parametrize("engine", ENGINES)
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path, engine: str) -> None:
    runtime, both = prepared(engine, tmp_path), prompts(3)
    together = runtime.generate(both, 12).tokens
    alone = [runtime.generate(row[None], 12).tokens[0].tolist() for row in both]
    assert together.tolist() == alone
    assert len({tuple(row) for row in together.tolist()}) > 1


@pytest.mark.parametrize("engine", ENGINES)
def test_more_tokens_than_the_model_s_context_are_refused(tmp_path: Path, engine: str) -> None:
    runtime = prepared(engine, tmp_path)
    context = runtime.facts.context
    with pytest.raises(OptiGPUError, match=f"context is {context} tokens, and {context + 1} do not fit"):
        runtime.generate(prompts(1, context - 4), 5)
    assert runtime.generate(prompts(1, context - 4), 4).tokens.shape == (1, 4)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_damaged_model_is_removed_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    model = "preset:tiny-llama-test"
    prepared(engine, tmp_path, model=model)
    files = [path for path in (folder / "converted").rglob("*") if path.is_file()]
    weights = max(files, key=lambda path: path.stat().st_size)
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptiGPUError, match="was damaged and has been removed; run the job again"):
        prepared(engine, tmp_path, model=model)
    assert not weights.exists()
    prepared(engine, tmp_path, model=model)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("engine", ENGINES)
def test_what_it_does_not_know_has_a_reason(tmp_path: Path, engine: str) -> None:
    runtime = prepared(engine, tmp_path)
    peaks = runtime.peak_memory(lambda: None)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (None, None)
    assert all("CPU" in reason for reason in peaks.reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, tmp_path / "trace")
    with pytest.raises(UnsupportedError, match="operators"):
        BACKENDS[engine].peaks(DeviceKind.CPU, 1)


@pytest.mark.parametrize("engine", NEEDED)
def test_without_its_packages_it_names_the_command(engine: str) -> None:
    (first, second), command = NEEDED[engine]

    def missing(*there: str) -> str | None:
        return BACKENDS[engine].missing(here().model_copy(update={"software": dict.fromkeys(there, "1")}))

    assert missing() == f"{first} and {second} are not installed; install them with: {command}"
    assert missing(second) == f"{first} is not installed; install it with: {command}"
    assert missing(first, second) is None


EXACT = 1e-5
"""The largest difference of a logit over the largest logit."""
ROWS, LENGTH, NEW_TOKENS = 2, 32, 12


class Predictor:
    """Predicts as Core ML does of the package: with the very pass that its converter reads."""

    def __init__(self, model: str, rows: int, length: int) -> None:
        loaded = transformers_model(model)
        self._pass = traced(WholePass(loaded, length, window_of(loaded, "coreml")), rows, length)

    def predict(self, inputs: Mapping[str, NDArray[np.int32]]) -> Mapping[str, object]:
        with torch.no_grad():
            return {OUTPUT: self._pass(torch.from_numpy(inputs[INPUT]).long()).numpy()}


def windowed(models_dir: Path) -> str:
    """A Mistral whose attention reaches back 8 tokens."""
    settings = AutoConfig.from_pretrained(models_dir / "llama").to_dict() | {"sliding_window": 8}
    settings.pop("model_type")
    config = AutoConfig.for_model("mistral", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "window")
    return "path:window"


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAMILIES, "mistral"])
def test_the_pass_that_is_converted_has_the_logits_of_transformers(models_dir: Path, family: str) -> None:
    model = windowed(models_dir) if family == "mistral" else f"path:{family}"
    tokens = prompts(ROWS, LENGTH, VOCABULARY)
    found = Predictor(model, ROWS, LENGTH).predict({INPUT: tokens.astype(np.int32)})[OUTPUT]
    assert error(found, transformers_logits(model, tokens)) <= EXACT


def test_layers_of_different_attention_are_refused(models_dir: Path) -> None:
    window = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = AutoConfig.from_pretrained(models_dir / "qwen2", **window)
    with pytest.raises(
        UnsupportedError, match=r"coreml does not express layers of different attention .layer_types = "
    ):
        window_of(AutoModelForCausalLM.from_config(config), "coreml")


@pytest.mark.slow
@pytest.mark.coreml
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_a_package_takes_ids_and_gives_the_logits_of_each_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    """Core ML's own converter, which runs here; what it wrote is read and not run."""
    import coremltools

    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with(tmp_path).parent))
    order = ordered(tmp_path, model=model)
    said: list[str] = []
    folder = package_of(order, ROWS, LENGTH, said.append)
    assert package_of(order, ROWS, LENGTH, said.append) == folder
    assert said == ["converting the model"]
    described = coremltools.utils.load_spec(str(folder / PACKAGE)).description
    shapes = {
        each.name: list(each.type.multiArrayType.shape) for each in (*described.input, *described.output)
    }
    facts = decoder_facts(parse_reference(str(order.model)))
    assert shapes == {INPUT: [ROWS, LENGTH], OUTPUT: [ROWS, LENGTH, facts.vocabulary]}
    (weights,) = folder.rglob("weight.bin")
    assert weights.stat().st_size >= 4 * facts.vocabulary * facts.hidden_size


@pytest.mark.slow
@pytest.mark.coreml
def test_greedy_tokens_and_scores_are_transformers_s(tmp_path: Path) -> None:
    from optigpu.backends.coreml.runtime import PackageSteps

    order = ordered(tmp_path)

    def steps(rows: int, length: int) -> Any:
        return PackageSteps(Predictor(TINY, rows, length), rows, length)

    facts, weights = decoder_facts(order.reference), weights_of(order)
    runtime = SteppedRuntime(
        order, Notes(), engine="Core ML", facts=facts, steps=steps, weights=weights, footprint=None
    )
    prompt = prompts(ROWS, LENGTH - NEW_TOKENS)
    found = runtime.generate(prompt, NEW_TOKENS)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW_TOKENS)
    assert runtime.generate(prompt, NEW_TOKENS).tokens.tolist() == found.tokens.tolist(), (
        "nothing is left of the first"
    )
    tokens = prompts(ROWS, LENGTH)
    assert error(scored(runtime, tokens, 8), transformers_logits(TINY, tokens)[:, 8:]) <= EXACT
