"""GGUF files of any architecture: in llama.cpp, in torch, and those that neither can read."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optigpu.backends.llama_cpp import gguf_families, gguf_tensors
from optigpu.backends.llama_cpp.gguf_families import WRITTEN_FAMILIES, WrittenFamily
from optigpu.backends.llama_cpp.gguf_tensors import write
from optigpu.child.messages import Metered, Ready, RunMeter
from optigpu.conductor.preparation import make_references
from optigpu.job.plan import variants_of
from optigpu.models.described import description_of
from optigpu.models.held import MODELS_DIR
from optigpu.models.loading.footprint import counted
from optigpu.models.loading.load import load_model, load_tokenizer
from optigpu.models.reference import BUNDLED, parse_reference
from optigpu.vocabulary import UnsupportedError
from tests.engine import converted_engines
from tests.engine.converted_engines import own_cache, prompts, scored
from tests.engine.gguf_models import SIZES, made
from tests.engine.measuring import in_process
from tests.engine.sessions import QUICK, quick_job, session_with
from tests.engine.test_replicate import answer, ask

pytestmark = pytest.mark.llama
prepared = partial(converted_engines.prepared, "llama_cpp")


@pytest.fixture(scope="module", autouse=True)
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MODELS_DIR, str(folder))
        for _ in own_cache(tmp_path_factory.mktemp("llama")):
            yield folder


def loaded(name: str) -> Any:
    return load_model(parse_reference(f"path:{name}"), device="cpu", dtype="float32")


def test_an_architecture_that_is_not_written_here_runs_and_has_its_facts(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is written with one more entry of the table, which is gone when it is run."""
    torch.manual_seed(0)
    special = dict.fromkeys(("bos_token_id", "eos_token_id"))
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("arcee", **(SIZES | special))).eval()
    entry = WrittenFamily("arcee", rotates_neighbours=True, activations=("relu2",), wide_heads=True)
    with monkeypatch.context() as patch:
        patch.setattr(gguf_families, "WRITTEN_FAMILIES", {**WRITTEN_FAMILIES, "arcee": entry})
        write(model, models / "arcee.gguf", "float32")
    runtime = prepared(tmp_path, model="path:arcee.gguf")
    facts, recorded = runtime.facts, runtime.notes.facts
    assert (facts.family, facts.layers, facts.heads, facts.kv_heads, facts.context) == ("arcee", 2, 4, 2, 256)
    assert (facts.vocabulary, facts.tied_head, facts.work) == (300, False, counted(facts, model.config).work)
    assert (recorded["gguf_architecture"], recorded["gguf_file_type"], recorded["gguf_bits_per_weight"]) == (
        "arcee",
        "F32",
        32,
    )
    assert recorded["kv_cache_bytes_per_token"] == 2 * 2 * 2 * 32 * 4
    assert runtime.weights().parameters == model.num_parameters()
    tokens = prompts(1, 32) % 300
    with torch.no_grad():
        expected = model(input_ids=torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(scored(runtime, tokens) - expected).max() < 1e-3 * np.abs(expected).max()


QUALITY = {"meters": ["latency", "quality"], "quality": {"tokens": 16}}


@pytest.mark.slow
def test_the_quality_of_a_file_is_taken_against_the_numbers_that_torch_reads_of_it(
    tmp_path: Path, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that transformers does not read says so in the place of a figure."""
    found = {}
    for name in ("llama", "olmo2"):
        write(made(name), models / f"{name}.gguf", "float32")
        spec = quick_job(model=f"path:{name}.gguf", backend="llama_cpp", measure=QUICK | QUALITY)
        session, _ = session_with(spec, tmp_path / name, "well_behaved")
        monkeypatch.setattr(session, "child", lambda _, **_more: in_process())
        (variant,) = variants_of(spec)
        make_references(session, [variant])
        with in_process() as child:
            child.tell(session.assignment(variant, 0))
            assert isinstance(answer(child), Ready)
            found[name] = ask(child, RunMeter(meter="quality"))
    metered, refused = found.values()
    assert isinstance(metered, Metered)
    assert isinstance(refused, Metered)
    assert 0 < metered.values["kld_mean"] < 1e-6
    assert metered.values["top1_agreement"] == 1
    assert not refused.values
    assert "architecture olmo2 is not supported yet; ask for the backend llama_cpp" in str(refused.reasons)


def test_of_experts_a_step_reads_those_that_are_chosen(tmp_path: Path, models: Path) -> None:
    model = made("qwen3_moe")
    write(model, models / "experts.gguf", "float32")
    runtime = prepared(tmp_path, model="path:experts.gguf")
    experts = sum(each.nbytes for name, each in model.named_parameters() if "experts" in name)
    read, whole = runtime.footprint().streamed_bytes, runtime.weights().parameters * 4
    table = model.get_input_embeddings().weight.nbytes
    assert abs(read - (whole - experts / 2 - table)) < 1000
    assert runtime.facts.work == counted(runtime.facts, model.config).work


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, Llama 3's scaling",
        "qwen3",
        "qwen3_moe",
        "gemma3_text, linear scaling",
        "gpt2",
        "starcoder2",
    ],
)
def test_torch_has_the_weights_that_a_file_was_written_of(name: str, models: Path) -> None:
    model = made(name)
    write(model, models / "torch.gguf", "float32")
    found, tokens = loaded("torch.gguf"), torch.arange(5, 105)[None]
    with torch.no_grad():
        torch.testing.assert_close(found(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert description_of(parse_reference("path:torch.gguf")).parameters == model.num_parameters()
    found.save_pretrained(models / "saved")
    assert AutoModelForCausalLM.from_pretrained(models / "saved").config.model_type == model.config.model_type


@pytest.mark.slow
def test_a_tokenizer_is_written_so_that_llama_cpp_and_transformers_read_the_same_of_it(models: Path) -> None:
    from llama_cpp import Llama

    own = AutoTokenizer.from_pretrained(BUNDLED["tiny"])
    write(
        load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32"),
        models / "tiny.gguf",
        "float16",
        own,
    )
    text = "It was 1851; the whale's way - naïve,  two  spaces\n\nand a line. 🙂"
    expected = own(text).input_ids
    theirs = Llama(str(models / "tiny.gguf"), vocab_only=True, verbose=False)
    assert theirs.tokenize(text.encode(), add_bos=False) == expected
    assert load_tokenizer(parse_reference("path:tiny.gguf"))(text).input_ids == expected


def test_what_torch_cannot_read_is_one_sentence(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(made("llama"), models / "whole.gguf", "float32")
    whole = (models / "whole.gguf").read_bytes()
    changes = {
        "cut": (
            whole[:-100],
            "its tensor .* has [0-9]+ bytes, and needs [0-9]+; copy or download the file again",
        ),
        "later": (
            whole[:4] + b"\x04\0\0\0" + whole[8:],
            "it is of version 4, and versions 2 and 3 are known",
        ),
        "none": (b"", "it is empty"),
        "text": (b"<html>", "it does not begin as GGUF files do"),
        "other": (
            whole.replace(b"llama", b"lambs"),
            "architecture lambs is not supported yet; ask for the backend llama_cpp",
        ),
    }
    for name, (content, words) in changes.items():
        (models / f"{name}.gguf").write_bytes(content)
        with pytest.raises(UnsupportedError, match=words):
            loaded(f"{name}.gguf")
    outside = models.parent / "outside.gguf"
    outside.write_bytes(whole)
    os.symlink(outside, models / "link.gguf")
    with pytest.raises(UnsupportedError, match="leads out of the model directory"):
        loaded("link.gguf")
    monkeypatch.setattr(gguf_tensors, "rope_factors", lambda _: [1.0] * 15 + [7.5])
    write(made("llama"), models / "odd.gguf", "float32")
    with pytest.raises(
        UnsupportedError, match=r"does not read how odd.gguf scales its rotary embedding \(rope_freqs"
    ):
        loaded("odd.gguf")
