"""The llama_cpp backend in this process: tokens and logits as transformers has them, facts, and what it refuses."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.llama_cpp import INSTALL
from optigpu.backends.llama_cpp.file_types import ExactCaches, Form, asked_of
from optigpu.models.held import MODELS_DIR
from optigpu.techniques.base import GgufType
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from tests.engine import converted_engines
from tests.engine.caches import cache_with
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
from tests.engine.here import here

BACKEND = BACKENDS["llama_cpp"]
prepared = partial(converted_engines.prepared, "llama_cpp")
ROUNDED = 1e-2
"""The largest difference of a logit over the largest logit, with weights and cache in float16."""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("llama"))


def typed(kind: GgufType | None) -> tuple[Gguf, ...]:
    return (Gguf(type=kind),) if kind else ()


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.parametrize("kind", [None, "F16"])
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path, kind: GgufType | None) -> None:
    prompt = prompts(2)
    found = prepared(tmp_path, *typed(kind)).generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0


@pytest.mark.llama
@pytest.mark.parametrize(("kind", "bound"), [(None, 1e-3), ("F16", ROUNDED)])
def test_scored_logits_are_transformers_logits(tmp_path: Path, kind: GgufType | None, bound: float) -> None:
    tokens = prompts(2, 48)
    found = scored(prepared(tmp_path, *typed(kind)), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, transformers_logits(TINY, tokens)[:, 8:]) <= bound


@pytest.mark.slow
@pytest.mark.llama
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K_M", "Q8_0"])
def test_quantized_logits_are_numbers_and_a_prompt_s_pass_leaves_what_steps_leave(
    tmp_path: Path, kind: GgufType
) -> None:
    runtime = prepared(tmp_path, *typed(kind))
    tokens = prompts(1, 32)
    by_step = scored(runtime, tokens)
    assert by_step.shape == (1, 32, runtime.facts.vocabulary)
    assert np.isfinite(by_step).all()
    assert error(scored(runtime, tokens, 24), by_step[:, 24:]) <= 0.05
    assert runtime.scoring_s(tokens, 24) > 0
    np.testing.assert_array_equal(runtime.logits(tokens), next(runtime.score(tokens, 31)))


@pytest.mark.llama
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    both = prompts(3)
    together = runtime.generate(both, 12).tokens
    alone = [runtime.generate(row[None], 12).tokens[0] for row in both]
    assert together.tolist() == [row.tolist() for row in alone]
    assert len({tuple(row) for row in together.tolist()}) > 1


@pytest.mark.llama
def test_what_is_decoded_is_remembered_and_nothing_is_left_of_the_sequence_before(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    assert not runtime.decoded
    first = runtime.generate(prompts(1), NEW)
    assert runtime.decoded == (1, PROMPT + NEW)
    runtime.generate(prompts(1)[:, ::-1].copy(), 8)
    assert runtime.decoded == (1, PROMPT + NEW)
    assert runtime.generate(prompts(1), NEW).tokens.tolist() == first.tokens.tolist()


@pytest.mark.llama
def test_more_tokens_than_the_model_s_context_are_refused(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    context = runtime.facts.context
    with pytest.raises(OptiGPUError, match=f"context is {context} tokens, and {context + 1} do not fit"):
        runtime.generate(prompts(1, context - 4), 5)
    assert runtime.generate(prompts(1, context - 4), 4).tokens.shape == (1, 4)


@pytest.mark.llama
def test_a_context_refuses_what_does_not_fit(tmp_path: Path) -> None:
    from optigpu.backends.llama_cpp.engine import LLAMA_CPP, gguf_of
    from optigpu.backends.llama_cpp.runtime import Context, GgufModel

    file = gguf_of(ordered(tmp_path), LLAMA_CPP, Form("F32"), lambda _: None)
    model = GgufModel(LLAMA_CPP.open(), file, 2048)
    context = Context(model, 2, 8, asked_of((), "F32", 1, ExactCaches()))
    context.forward(prompts(2, 6))
    with pytest.raises(OptiGPUError, match="2 sequences of 8 tokens; 2 sequences of 9 tokens do not fit"):
        context.forward(prompts(2, 3))
    with pytest.raises(OptiGPUError, match="1 sequences of 7 tokens do not fit"):
        context.forward(prompts(1, 1))
    with pytest.raises(OptiGPUError, match="could not decode 1 tokens"):
        context.forward(np.array([[-1], [0]]))
    context.close()


@pytest.mark.slow
@pytest.mark.llama
def test_a_damaged_file_is_removed_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    prepared(tmp_path, Gguf(type="Q8_0"), model="preset:tiny-llama-test")
    (path,) = (folder / "converted" / "gguf").glob("preset-tiny-llama-test-*-Q8_0.gguf")
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptiGPUError, match="was damaged and has been removed; run the job again"):
        prepared(tmp_path, Gguf(type="Q8_0"), model="preset:tiny-llama-test")
    prepared(tmp_path, Gguf(type="Q8_0"), model="preset:tiny-llama-test")
    assert path.read_bytes() == whole


@pytest.mark.llama
@pytest.mark.parametrize("model", ["bundled:tiny", "preset:tiny-gpt2-test", "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    from optigpu.models.loading.load import count_weights

    whole, small = prepared(tmp_path, model=model), prepared(tmp_path, Gguf(type="Q4_0"), model=model)
    weights, quantized = whole.weights(), small.weights()
    assert weights.parameters == quantized.parameters == count_weights(transformers_model(model))
    assert weights.bytes > 4 * weights.parameters > 2 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 2 * small.footprint().streamed_bytes > 0
    assert whole.footprint().facts == whole.facts


@pytest.mark.llama
def test_it_says_how_it_runs(tmp_path: Path) -> None:
    facts = prepared(tmp_path, Gguf(type="Q4_0"), threads=2).notes.facts
    assert (facts["threads"], facts["dtype"], facts["kv_cache_dtype"]) == (2, "float32", "float16")
    assert facts["gguf_type"] == "Q4_0"
    assert set(facts["gguf_tensor_types"]) >= {"F32", "Q4_0"}
    assert "CPU" in facts["llama_cpp_flags"]
    assert prepared(tmp_path).notes.facts["kv_cache_dtype"] == "float32"


@pytest.mark.llama
def test_what_it_does_not_know_has_a_reason(tmp_path: Path) -> None:
    runtime = prepared(tmp_path)
    peaks = runtime.peak_memory(lambda: None)
    assert (peaks.allocated_bytes, peaks.reserved_bytes) == (None, None)
    assert all("CPU" in reason for reason in peaks.reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, tmp_path / "trace")
    with pytest.raises(UnsupportedError, match="operators"):
        BACKEND.peaks(DeviceKind.CPU, 1)


@pytest.mark.llama
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("preset:opt-125m", "opt models cannot be written as GGUF here, only gpt2 and llama models"),
        ("preset:tiny-qwen-test", "qwen2 models cannot be written"),
        ("hub:nobody/has-this", "hub's cache does not hold"),
        ("path:mine", "path:mine needs a model directory"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    monkeypatch.delenv(MODELS_DIR, raising=False)
    with pytest.raises(UnsupportedError, match=words):
        prepared(tmp_path, model=model)


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ({}, f"llama-cpp-python and gguf are not installed; install them with: {INSTALL}"),
        ({"gguf": "1"}, f"llama-cpp-python is not installed; install it with: {INSTALL}"),
        ({"gguf": "1", "llama-cpp-python": "1"}, None),
    ],
)
def test_without_its_packages_it_names_the_command(software: dict[str, str], sentence: str | None) -> None:
    assert BACKEND.missing(here().model_copy(update={"software": software})) == sentence
