"""The llama_cpp backend in this process: tokens and logits as transformers has them, types, settings, refusals."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from optigpu.backends.engine import SteppedRuntime
from optigpu.models.gguf_header import read_header
from optigpu.models.held import MODELS_DIR, held_models
from optigpu.models.loading.load import count_weights
from optigpu.models.reference import BUNDLED
from optigpu.paths import cache_dir
from optigpu.techniques.base import GgufType, LlamaCppType
from optigpu.techniques.kernels.llama_flash_attention import LlamaFlashAttention
from optigpu.techniques.memory.llama_kv_cache import LlamaKvCache
from optigpu.techniques.quantization.gguf import Gguf
from optigpu.vocabulary import UnsupportedError
from tests.breadth import cases
from tests.engine import converted_engines
from tests.engine.converted_engines import (
    TINY,
    error,
    own_cache,
    prompts,
    scored,
    transformers_logits,
    transformers_model,
)

pytestmark = [pytest.mark.slow, pytest.mark.llama]

prepared = partial(converted_engines.prepared, "llama_cpp")
ROUNDED = 1e-2
"""The largest difference of a logit over the largest logit, with weights and cache in float16."""


@pytest.fixture(scope="module", autouse=True)
def _folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    models = tmp_path_factory.mktemp("models")
    shutil.copytree(BUNDLED["tiny"], models / "tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(models))
        yield from own_cache(tmp_path_factory.mktemp("llama"))


def typed(kind: GgufType | None) -> tuple[Gguf, ...]:
    return (Gguf(type=kind),) if kind else ()


@pytest.mark.parametrize(("kind", "bound"), [(None, 1e-3), ("F16", ROUNDED)])
def test_scored_logits_are_transformers_logits(tmp_path: Path, kind: GgufType | None, bound: float) -> None:
    tokens = prompts(2, 48)
    found = scored(prepared(tmp_path, *typed(kind)), tokens, 8)
    assert found.dtype == np.float32
    assert error(found, transformers_logits(TINY, tokens)[:, 8:]) <= bound


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


@pytest.mark.parametrize("model", ["bundled:tiny", "preset:tiny-gpt2-test", "preset:tiny-llama-test"])
def test_its_weights_are_those_of_the_model(tmp_path: Path, model: str) -> None:
    whole, small = prepared(tmp_path, model=model), prepared(tmp_path, Gguf(type="Q4_0"), model=model)
    weights, quantized = whole.weights(), small.weights()
    assert weights.parameters == quantized.parameters == count_weights(transformers_model(model))
    assert weights.bytes > 4 * weights.parameters > 2 * quantized.bytes
    assert weights.hash == quantized.hash, "it says which model it is, not in which file"
    assert weights.hash_of == ("files" if model == TINY else "recipe")
    assert whole.footprint().streamed_bytes > 2 * small.footprint().streamed_bytes > 0
    assert whole.footprint().facts == whole.facts


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("preset:opt-125m", "opt models cannot be written as GGUF here, only llama, mistral, mixtral"),
        ("hub:nobody/has-this", "hub's cache does not hold"),
        ("path:mine", "There is no directory path:mine under"),
    ],
)
def test_a_model_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, words: str
) -> None:
    monkeypatch.setenv(MODELS_DIR, str(tmp_path))
    with pytest.raises(UnsupportedError, match=words):
        prepared(tmp_path, model=model)


FAR = {"IQ1_S": 3.0, "IQ1_M": 3.0, "TQ1_0": 3.0, "TQ2_0": 3.0, "Q1_0": 3.0, "Q2_0": 3.0}
"""The largest error of a logit over the largest logit, of types of two bits and fewer; 1 for all others."""
Logits = NDArray[np.float32]


@pytest.fixture(scope="module")
def models() -> Path:
    return Path(os.environ[MODELS_DIR])


def scored_after_prompt(runtime: SteppedRuntime) -> Logits:
    """Logits after a prompt of 16 tokens and each of 32 more, [1, 32, vocabulary]."""
    found: Logits = converted_engines.scored(runtime, prompts(1, 48), 16)
    return found


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Logits:
    """What is scored with float32."""
    return scored_after_prompt(prepared(tmp_path_factory.mktemp("exact")))


def error_of(runtime: SteppedRuntime, exact: Logits) -> float:
    """The largest error of a logit, over the largest logit."""
    return float(error(scored_after_prompt(runtime), exact))


@pytest.mark.parametrize(
    "kind", cases(["Q4_K_M", "IQ2_XS", *sorted({*get_args(LlamaCppType)} - {"Q4_K_M", "IQ2_XS"})])
)
def test_every_type_is_written_and_read(tmp_path: Path, exact: Logits, kind: LlamaCppType) -> None:
    runtime = prepared(tmp_path, Gguf(type=kind))
    facts = runtime.notes.facts
    assert facts["gguf_type"] == kind
    assert not any(name.startswith("type ") for name in facts["gguf_tensor_types"])
    assert 0 < error_of(runtime, exact) < FAR.get(kind, 1.0)


def test_what_matters_makes_few_bits_better(tmp_path: Path, exact: Logits) -> None:
    """Q2_K without, and with the importance that Q2_K_S asks for: the same type of numbers in each matrix, or fewer."""
    runtime = prepared(tmp_path, Gguf(type="IQ3_XXS"))
    assert error_of(runtime, exact) < error_of(prepared(tmp_path, Gguf(type="Q2_K")), exact)


def test_flash_attention_computes_the_same(tmp_path: Path, exact: Logits) -> None:
    fused, plain = (prepared(tmp_path, LlamaFlashAttention(enabled=enabled)) for enabled in (True, False))
    assert (fused.notes.facts["flash_attention"], plain.notes.facts["flash_attention"]) == (True, False)
    assert error_of(plain, exact) == 0
    assert 0 < error_of(fused, exact) < 1e-3


@pytest.mark.parametrize(
    ("kind", "bound", "width"), [("F16", 1e-2, 2.0), ("Q8_0", 0.1, 34 / 32), ("Q4_0", 0.5, 18 / 32)]
)
def test_a_cache_of_fewer_bits_rounds_keys_and_values(
    tmp_path: Path, exact: Logits, kind: str, bound: float, width: float
) -> None:
    technique = LlamaKvCache.model_validate({"keys": kind, "values": kind})
    runtime = prepared(tmp_path, technique)
    assert runtime.notes.facts["kv_cache_bytes_per_token"] == 2 * 4 * 256 * width
    assert 0 < error_of(runtime, exact) < bound


def test_a_file_is_run_as_it_is(tmp_path: Path, models: Path) -> None:
    written = prepared(tmp_path, Gguf(type="Q8_0"))
    file = next(kept().glob("bundled-tiny-*-Q8_0.gguf"))
    shutil.copy(file, models / "mine.gguf")
    given = prepared(tmp_path, model="path:mine.gguf")
    assert given.facts == replace(written.facts, inner_size=None, gated_mlp=None), (
        "the header says no less of the work"
    )
    assert given.notes.facts["gguf_type"] == "Q8_0"
    assert given.weights().hash_of == "files"
    assert given.weights().bytes == written.weights().bytes
    np.testing.assert_array_equal(scored_after_prompt(given), scored_after_prompt(written))
    assert "path:mine.gguf" in held_models()
    with pytest.raises(UnsupportedError, match="has the type that it was written with; leave gguf out"):
        prepared(tmp_path, Gguf(), model="path:mine.gguf")


def kept() -> Path:
    return cache_dir() / "converted" / "gguf"


def test_a_file_of_another_architecture_or_of_none_is_refused(tmp_path: Path, models: Path) -> None:
    prepared(tmp_path)
    # Files of other versions of the writer may lie beside it.
    whole = max(kept().glob("bundled-tiny-*-F32.gguf"), key=lambda path: path.stat().st_mtime_ns)
    content = whole.read_bytes()
    changes = {
        "other": (
            content.replace(b"gpt2", b"none"),
            "llama.cpp cannot load .*unknown model architecture: 'none'",
        ),
        "later": (content[:4] + b"\x04\0\0\0" + content[8:], "version 4, and versions 2 and 3 are known"),
        "none": (b"", "it is empty"),
        "cut": (content[:-100], "llama.cpp cannot load .*(file bounds|corrupted|incomplete)"),
        "text": (b"<html>", "does not begin as GGUF files do"),
        "half": (content[: len(content) // 2], "ends before its last tensor"),
        "short": (content[:100], "ends within its header"),
        "counts": (content[:8] + b"\xff" * 16 + content[24:], "it has a count of"),
        "old": (content[:4] + b"\x01\0\0\0" + content[8:], "version 1"),
    }
    for name, (changed, words) in changes.items():
        (models / f"{name}.gguf").write_bytes(changed)
        with pytest.raises(UnsupportedError, match=words):
            prepared(tmp_path, model=f"path:{name}.gguf")
    (models / "out.gguf").symlink_to(whole)
    with pytest.raises(UnsupportedError, match="leads out of the model directory"):
        prepared(tmp_path, model="path:out.gguf")


def test_the_header_that_is_read_is_what_the_package_gguf_reads(tmp_path: Path) -> None:
    from gguf import GGUFReader

    prepared(tmp_path, Gguf(type="Q4_K_M"))
    path = next(kept().glob("bundled-tiny-*-Q4_K_M.gguf"))
    ours, theirs = read_header(path), GGUFReader(str(path))
    assert ours.architecture == "gpt2"
    assert [(each.name, each.type, each.elements) for each in ours.tensors] == [
        (each.name, int(each.tensor_type), int(each.n_elements)) for each in theirs.tensors
    ]
    for each, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert 0 <= each.bytes - int(other.n_bytes) < 32
