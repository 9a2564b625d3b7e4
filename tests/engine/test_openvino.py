"""The openvino backend on decoders: tokens and logits as transformers has them, facts, and what it refuses."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from optigpu.backends import BACKENDS
from optigpu.backends.openvino import INSTALL
from optigpu.backends.openvino.contents import contents_of
from optigpu.hardware import probe
from optigpu.hardware.cpu import has_vnni
from optigpu.models.held import MODELS_DIR
from optigpu.techniques.memory.openvino_kv_cache import OpenVinoKvCache
from optigpu.techniques.quantization.openvino_int4 import OpenVinoInt4
from optigpu.techniques.quantization.openvino_int8 import OpenVinoInt8
from optigpu.vocabulary import DeviceKind, OptiGPUError, UnsupportedError
from tests.engine.caches import cache_with
from tests.engine.causal_families import causal_model
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
    yield from own_cache(tmp_path_factory.mktemp("openvino"))


@pytest.mark.slow
@pytest.mark.openvino
def test_greedy_tokens_are_transformers_tokens(tmp_path: Path) -> None:
    prompt = prompts(2)
    found = prepared("openvino", tmp_path).generate(prompt, NEW)
    assert found.tokens.tolist() == transformers_tokens(TINY, prompt, NEW)
    assert len(found.gaps_s) == NEW
    assert min(found.gaps_s) > 0


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("family", ["gpt2", "llama", "opt", "qwen2"])
def test_scored_logits_are_transformers_logits(models_dir: Path, tmp_path: Path, family: str) -> None:
    """Of a folder's model, step by step after a prompt's pass."""
    tokens = prompts(2, 48, VOCABULARY)
    found = scored(prepared("openvino", tmp_path, model=f"path:{family}"), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, transformers_logits(f"path:{family}", tokens)[:, 8:]) <= EXACT


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_a_mixture_computes_what_transformers_does_and_is_quantized_with_its_experts(
    models_dir: Path, tmp_path: Path, family: str
) -> None:
    made = causal_model(family)
    made.save_pretrained(models_dir / family)
    whole = sum(parameter.numel() for parameter in made.parameters())
    matrices = sum(parameter.numel() for parameter in made.parameters() if parameter.dim() > 1)
    tokens = prompts(2, 20, VOCABULARY)
    plain = prepared("openvino", tmp_path, model=f"path:{family}")
    assert error(scored(plain, tokens, 8), transformers_logits(f"path:{family}", tokens)[:, 8:]) <= EXACT
    assert plain.weights().quantized is None
    weights = prepared("openvino", tmp_path, OpenVinoInt8(), model=f"path:{family}").weights()
    assert weights.quantized == pytest.approx(matrices / whole, abs=1e-9)
    assert weights.bytes < 1.1 * whole


@pytest.mark.openvino
def test_a_prompt_s_pass_leaves_what_steps_leave(tmp_path: Path) -> None:
    runtime, tokens = prepared("openvino", tmp_path), prompts(1, 32)
    by_step = scored(runtime, tokens)
    assert error(scored(runtime, tokens, 24), by_step[:, 24:]) <= EXACT
    assert runtime.scoring_s(tokens, 24) > 0
    assert error(runtime.logits(tokens), by_step[:, -1]) <= EXACT


@pytest.mark.openvino
def test_sequences_of_a_batch_do_not_see_each_other(tmp_path: Path) -> None:
    runtime, both = prepared("openvino", tmp_path), prompts(3)
    together = runtime.generate(both, 12).tokens
    alone = [runtime.generate(row[None], 12).tokens[0].tolist() for row in both]
    assert together.tolist() == alone
    assert len({tuple(row) for row in together.tolist()}) > 1


@pytest.mark.openvino
def test_nothing_is_left_of_the_sequence_before(tmp_path: Path) -> None:
    runtime = prepared("openvino", tmp_path)
    first = runtime.generate(prompts(1), NEW).tokens.tolist()
    assert runtime.decoded == (1, PROMPT + NEW)
    runtime.generate(prompts(1)[:, ::-1].copy(), 8)
    assert runtime.generate(prompts(1), NEW).tokens.tolist() == first


@pytest.mark.openvino
def test_more_tokens_than_fit_are_refused(tmp_path: Path) -> None:
    runtime = prepared("openvino", tmp_path)
    context = runtime.facts.context
    with pytest.raises(OptiGPUError, match=f"context is {context} tokens, and {context + 1} do not fit"):
        runtime.generate(prompts(1, context - 4), 5)
    steps = runtime._loaded.steps(2, 8)
    steps.forward(prompts(2, 6))
    with pytest.raises(OptiGPUError, match="2 sequences of 8 tokens; 2 sequences of 9 tokens do not fit"):
        steps.forward(prompts(2, 3))
    steps.close()


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("part", ["model.bin", "model.xml"])
def test_a_damaged_model_is_removed_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = cache_with(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    model = "preset:tiny-llama-test"
    prepared("openvino", tmp_path, model=model)
    (kept,) = (folder / "converted" / "openvino").glob("preset-tiny-llama-test-*-float32.openvino")
    whole, contents = (kept / part).read_bytes(), contents_of(kept)
    (kept / part).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OptiGPUError, match="was damaged and has been removed; run the job again"):
        prepared("openvino", tmp_path, model=model)
    assert not kept.exists()
    prepared("openvino", tmp_path, model=model)
    assert contents_of(kept) == contents, "the graph's bytes have names that count on in one process"


@pytest.mark.slow
@pytest.mark.openvino
@pytest.mark.parametrize("model", [TINY, "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    from optigpu.models.loading.load import count_weights, load_model
    from optigpu.models.reference import parse_reference

    whole = prepared("openvino", tmp_path, model=model)
    small = prepared("openvino", tmp_path, OpenVinoInt4(), model=model)
    weights, quantized = whole.weights(), small.weights()
    loaded = load_model(parse_reference(model), device="cpu", dtype="float32")
    assert weights.parameters == quantized.parameters == count_weights(loaded)
    assert weights.bytes == pytest.approx(4 * weights.parameters, rel=0.01), "what is equal is stored once"
    assert weights.bytes > 6 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 6 * small.footprint().streamed_bytes > 0
    positions = 4 * whole.facts.hidden_size if model == TINY else 0
    assert whole.footprint().row_bytes == positions
    assert whole.footprint().facts == whole.facts


@pytest.mark.slow
@pytest.mark.openvino
def test_it_says_how_it_runs(tmp_path: Path) -> None:
    plain, small = prepared("openvino", tmp_path), prepared("openvino", tmp_path, OpenVinoInt8())
    exact, facts = plain.notes.facts, small.notes.facts
    assert (exact["dtype"], exact["kv_cache_dtype"], exact["threads"]) == ("float32", "float32", 1)
    assert exact["kv_cache_bytes_per_token"] == 2 * 4 * 256 * 4
    assert exact["openvino_computes_in"] == "float32"
    assert plain.footprint().product_dtypes == ()
    assert facts["openvino_weights"] == "int8_asym"
    assert facts["openvino_constants"]["u8"] > 0
    assert facts["openvino_build"].startswith(facts["versions"]["openvino"])
    assert "FP32" in facts["openvino_capabilities"]
    assert facts["openvino_cpu"]
    (kernel,) = exact["attention_kernels"]
    assert kernel.startswith("ScaledDotProductAttention ")
    assert small.footprint().product_dtypes == (("int8",) if has_vnni() else ())


@pytest.mark.openvino
def test_what_it_does_not_know_has_a_reason(tmp_path: Path) -> None:
    runtime = prepared("openvino", tmp_path)
    peaks = runtime.peak_memory(lambda: None)
    assert all("CPU" in reason for reason in peaks.reasons.values())
    with pytest.raises(UnsupportedError, match="no profiler"):
        runtime.profile(lambda: None, 1, tmp_path / "trace")
    with pytest.raises(UnsupportedError, match="operators"):
        BACKENDS["openvino"].peaks(DeviceKind.CPU, 1)


@pytest.mark.openvino
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("preset:tiny-resnet-test", "classifies images; name a model that generates text"),
        ("path:nowhere", "path:nowhere needs a model directory"),
    ],
)
def test_a_model_that_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    monkeypatch.delenv(MODELS_DIR, raising=False)
    with pytest.raises(UnsupportedError, match=words):
        prepared("openvino", tmp_path, model=model)


@pytest.mark.slow
@pytest.mark.openvino
def test_layers_that_differ_in_their_attention_are_refused(models_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    window = {
        "use_sliding_window": True,
        "sliding_window": 8,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config = AutoConfig.from_pretrained(models_dir / "qwen2", **window)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "mixed")
    with pytest.raises(UnsupportedError, match="layers of different attention"):
        prepared("openvino", tmp_path, model="path:mixed")


@pytest.mark.slow
@pytest.mark.openvino
def test_a_window_of_all_layers_is_kept(models_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = AutoConfig.from_pretrained(models_dir / "llama").to_dict() | {"sliding_window": 8}
    settings.pop("model_type")
    config = AutoConfig.for_model("mistral", **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(models_dir / "window")
    tokens = prompts(2, 32, VOCABULARY)
    found = scored(prepared("openvino", tmp_path, model="path:window"), tokens, 20)
    assert error(found, transformers_logits("path:window", tokens)[:, 20:]) <= EXACT


@pytest.mark.slow
@pytest.mark.openvino
def test_a_cache_of_8_bits_is_smaller_and_rounds(tmp_path: Path) -> None:
    tokens = prompts(1, 40)
    plain, small = prepared("openvino", tmp_path), prepared("openvino", tmp_path, OpenVinoKvCache())
    assert 0 < error(scored(small, tokens), scored(plain, tokens)) < 0.1
    sizes = [runtime.notes.facts["kv_cache_bytes_per_token"] for runtime in (plain, small)]
    assert sizes == [2 * 4 * 256 * 4, 2 * 4 * 4 * (64 + 8)]


@pytest.mark.parametrize(
    ("software", "sentence"),
    [
        ({}, f"openvino and nncf are not installed; install them with: {INSTALL}"),
        ({"openvino": "1"}, f"nncf is not installed; install it with: {INSTALL}"),
        ({"openvino": "1", "nncf": "1"}, None),
    ],
)
def test_without_its_packages_it_names_the_command(software: dict[str, str], sentence: str | None) -> None:
    assert BACKENDS["openvino"].missing(probe().model_copy(update={"software": software})) == sentence
