"""The ctranslate2 backend: tokens and logits as transformers has them, facts, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.ctranslate2 import INSTALL
from optigpu.hardware import probe
from optigpu.techniques.quantization.ctranslate2_int8 import Ctranslate2Int8
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from tests.engine.caches import cache_with
from tests.engine.converted_engines import (
    NEW,
    PROMPT,
    TINY,
    error,
    own_cache,
    prepared,
    prompts,
    scored,
    transformers_logits,
    transformers_tokens,
)
from tests.engine.tiny_models import VOCABULARY

EXACT = 1e-4
"""The largest difference of a logit over the largest logit, with everything in float32."""


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    yield from own_cache(tmp_path_factory.mktemp("ctranslate2"))


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path) -> None:
    prompt = prompts(2)
    found = prepared("ctranslate2", tmp_path).generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0


@pytest.mark.slow
@pytest.mark.ctranslate2
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2"])
def test_scored_logits_are_transformers_logits(models_dir: Path, tmp_path: Path, family: str) -> None:
    tokens = prompts(2, 48, VOCABULARY)
    found = scored(prepared("ctranslate2", tmp_path, model=f"path:{family}"), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, transformers_logits(f"path:{family}", tokens)[:, 8:]) <= EXACT


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_a_scaling_that_it_would_compute_wrongly_is_refused(models_dir: Path, tmp_path: Path) -> None:
    """A Llama of the same weights that was scaled as Llama 3.1 was, after one that was not is kept already."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = AutoConfig.from_pretrained(models_dir / "llama")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "scaled")
    prepared("ctranslate2", tmp_path, model="path:scaled")
    AutoConfig.from_pretrained(models_dir / "llama", rope_parameters=scaling).save_pretrained(
        models_dir / "scaled"
    )
    with pytest.raises(UnsupportedError, match="rope_type = 'llama3', only 'default' or 'linear'; ask"):
        prepared("ctranslate2", tmp_path, model="path:scaled")


@pytest.mark.ctranslate2
def test_what_is_scored_is_the_step_that_is_timed(tmp_path: Path) -> None:
    """Its most likely tokens are those that decoding chose."""
    runtime = prepared("ctranslate2", tmp_path)
    prompt = prompts(2)
    tokens = runtime.generate(prompt, NEW).tokens
    whole = np.concatenate([prompt, tokens], axis=1)
    logits = scored(runtime, whole, PROMPT - 1)
    assert logits[:, :-1].argmax(axis=2).tolist() == tokens.tolist()
    assert runtime.scoring_s(whole, PROMPT) > 0
    assert error(runtime.logits(whole), logits[:, -1]) <= EXACT


@pytest.mark.ctranslate2
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    runtime, both = prepared("ctranslate2", tmp_path), prompts(3)
    together = runtime.generate(both, 12).tokens
    assert together.tolist() == [runtime.generate(row[None], 12).tokens[0].tolist() for row in both]
    assert runtime.decoded == (1, PROMPT + 12)


@pytest.mark.ctranslate2
def test_more_tokens_than_the_model_s_context_are_refused(tmp_path: Path) -> None:
    runtime = prepared("ctranslate2", tmp_path)
    context = runtime.facts.context
    with pytest.raises(OptiGPUError, match=f"context is {context} tokens, and {context + 1} do not fit"):
        runtime.generate(prompts(1, context - 4), 5)
    assert runtime.generate(prompts(1, context - 4), 4).tokens.shape == (1, 4)


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_a_damaged_model_is_removed_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    model = "preset:tiny-llama-test"
    prepared("ctranslate2", tmp_path, model=model)
    (kept,) = (folder / "converted" / "ctranslate2").glob("preset-tiny-llama-test-*-float32.ctranslate2")
    file = kept / "model.bin"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptiGPUError, match="was damaged and has been removed; run the job again"):
        prepared("ctranslate2", tmp_path, model=model)
    assert not kept.exists()
    prepared("ctranslate2", tmp_path, model=model)
    assert file.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.ctranslate2
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    from optigpu.models.loading.load import count_weights, load_model
    from optigpu.models.reference import parse_reference

    whole = prepared("ctranslate2", tmp_path, model=model)
    small = prepared("ctranslate2", tmp_path, Ctranslate2Int8(), model=model)
    weights, quantized = whole.weights(), small.weights()
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32")
    assert weights.parameters == quantized.parameters == count_weights(loaded)
    assert weights.bytes == pytest.approx(4 * weights.parameters, rel=0.01), "what is equal is stored once"
    assert weights.bytes > 3 * quantized.bytes
    assert weights.hash == quantized.hash
    assert whole.footprint().streamed_bytes > 3 * small.footprint().streamed_bytes > 0
    assert whole.footprint().row_bytes == (4 * whole.facts.hidden_size if model == TINY else 0)


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_it_says_how_it_runs(tmp_path: Path) -> None:
    plain, small = prepared("ctranslate2", tmp_path), prepared("ctranslate2", tmp_path, Ctranslate2Int8())
    assert plain.notes.facts["ctranslate2_type"] == "float32"
    assert plain.footprint().product_dtypes == ()
    facts = small.notes.facts
    assert (facts["ctranslate2_type"], facts["kv_cache_dtype"]) == ("int8_float32", "float32")
    assert facts["ctranslate2_tensor_types"]["int8"] > 0
    assert "Selected compute type: int8_float32" in facts["ctranslate2_flags"]
    assert small.footprint().product_dtypes == ("int8",)


@pytest.mark.ctranslate2
def test_what_it_does_not_know_has_a_reason(tmp_path: Path) -> None:
    runtime = prepared("ctranslate2", tmp_path)
    assert all("CPU" in reason for reason in runtime.peak_memory(lambda: None).reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, tmp_path / "trace")
    with pytest.raises(UnsupportedError, match="operators"):
        BACKENDS["ctranslate2"].peaks(DeviceKind.CPU, 1)


@pytest.mark.slow
@pytest.mark.ctranslate2
def test_a_family_without_a_converter_is_refused(models_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model("smollm3", vocab_size=96, pad_token_id=0, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "smollm3")
    with pytest.raises(
        UnsupportedError, match=r"not known to compute smollm3 models as transformers does, .* backend torch"
    ):
        prepared("ctranslate2", tmp_path, model="path:smollm3")


@pytest.mark.parametrize(
    ("software", "sentence"),
    [({}, f"ctranslate2 is not installed; install it with: {INSTALL}"), ({"ctranslate2": "1"}, None)],
)
def test_without_its_package_it_names_the_command(software: dict[str, str], sentence: str | None) -> None:
    assert BACKENDS["ctranslate2"].missing(probe().model_copy(update={"software": software})) == sentence
