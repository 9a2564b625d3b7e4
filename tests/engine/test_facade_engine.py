"""BenchmarkEngine: what it measures of a loaded model, and what it saves beside the claims."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optigpu import BenchmarkEngine, QuantizationOptimizer
from optigpu.facade.engine import beside_card
from optigpu.models.reference import bundled_parameters
from optigpu.vocabulary import OptiGPUError, SpecError
from tests.engine.brief_jobs import BRIEF
from tests.engine.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("forked_children")

FOUNDING = """
from optigpu import BenchmarkEngine, QuantizationOptimizer, MemoryOptimizer
# ── Benchmark matmul vs RTX 5090 ──────────────────────────────
engine = BenchmarkEngine()
engine.run_matmul_suite()
# ── Load GPT-2 in INT4 and benchmark inference ────────────────
model, tok = QuantizationOptimizer.load("gpt2", precision="int4")
engine.run_inference(
    model, tok,
    prompt="The future of AI is",
    label="INT4 Inference"
)
# ── Print rich summary table + save chart + JSON ─────────────
engine.report()
engine.save("results/")
inputs = tok("The future of AI is", return_tensors="pt").input_ids
MemoryOptimizer.print_stats("before")
with MemoryOptimizer.optimized_inference():
    output = model.generate(inputs, max_new_tokens=100)
"""
"""The founding document's code; only the prompt of the last call is ours, which the document leaves open."""


@pytest.fixture(scope="module")
def engine(own_lock: None) -> BenchmarkEngine:
    """With a small product, a trained model and a preset."""
    made = BenchmarkEngine(device="cpu")
    made.run_matmul_suite(sizes=[64], **BRIEF)
    model, tokenizer = QuantizationOptimizer.load("bundled:tiny", precision="int8", device="cpu")
    made.run_inference(model, tokenizer, prompt="Once upon a time", label="tiny", new_tokens=8, seconds=0.1)
    model, _ = QuantizationOptimizer.load("preset:tiny-gpt2-test", precision="fp32", device="cpu")
    made.run_inference(model, None, new_tokens=4, seconds=0.1)
    return made


def test_inference_is_decoded_timed_and_weighed(engine: BenchmarkEngine) -> None:
    tiny, preset = engine.inference
    assert (tiny.name, tiny.throughput_of) == ("tiny", "tokens")
    assert (tiny.throughput_per_sec or 0) > 0
    assert (tiny.first_token_ms or 0) < (tiny.latency_ms_mean or 0)
    assert tiny.params_total == bundled_parameters("tiny")
    assert (tiny.model_size_mb or 0) * 2**20 < 4 * (tiny.params_total or 0)
    assert preset.name == "inference 2"
    assert preset.params_total == 527_872
    assert preset.notes == ("The prompt was random: the model came without a tokenizer.",)


def test_operations_are_those_of_the_architecture(engine: BenchmarkEngine) -> None:
    """Five prompt tokens and three steps, each at least two operations a weight of the blocks."""
    preset = engine.inference[1]
    in_blocks = 2 * 12 * 128**2
    assert (preset.flops_total or 0) >= (5 + 3) * 2 * in_blocks


def test_its_results_say_where_they_are_from(engine: BenchmarkEngine) -> None:
    product, tiny, preset = engine.results
    assert (product.source, tiny.source) == ("worker", "in_process")
    assert [each["name"] for each in tiny.variant.stack] == ["int8_weight_only"]
    assert preset.variant.model == "preset:tiny-gpt2-test"
    assert "caller's own" in tiny.verdict.notes[0]


def test_the_report_has_products_inference_and_claims(
    engine: BenchmarkEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    engine.report()
    shown = capsys.readouterr().out
    for expected in (
        "matmul 64 float32",
        "tiny",
        "RTX 5090",
        "40 TFLOPS",
        "not measured",
        "published figures",
    ):
        assert expected in shown
    assert list(engine.to_frame()["name"]) == ["tiny", "inference 2"]


def test_a_claim_stands_beside_the_same_work_alone(engine: BenchmarkEngine) -> None:
    """Products of 64 and these models are no work that is claimed of the card; a GPT-2 is."""
    documents = [result.model_dump(mode="json") for result in engine.results]
    assert not any(each.measured for each in beside_card(documents))
    documents[1]["variant"]["model"] = "preset:gpt2"
    (found,) = (each for each in beside_card(documents) if each.measured)
    assert found.claim.id == "5090-gpt2"
    tokens_per_s = documents[1]["metrics"]["tokens_per_s"]["value"]
    assert found.document()["measured"][0]["of_claim"] == pytest.approx(tokens_per_s / 120)  # type: ignore[index]


def test_it_saves_charts_with_their_data_tables_and_everything_as_json(
    engine: BenchmarkEngine, tmp_path: Path
) -> None:
    written = engine.save(tmp_path / "results")
    assert {path.name for path in written} >= {"results.json", "comparison.md", "matmul.png", "inference.svg"}
    assert all(path.stat().st_size for path in written)
    saved = json.loads((tmp_path / "results" / "results.json").read_text("utf-8"))
    assert len(saved["results"]) == 3
    assert [each["name"] for each in saved["inference"]] == ["tiny", "inference 2"]
    assert saved["baselines"][0]["claim"]["status"] == "claimed"
    assert engine.plot("ladder").svg.startswith("<svg")


def test_a_folder_that_cannot_be_written_is_named(engine: BenchmarkEngine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptiGPUError, match=r"file/results cannot be written .*; make it writable"):
        engine.save(tmp_path / "file" / "results")


def test_an_engine_without_results_says_what_to_call() -> None:
    empty = BenchmarkEngine(device="cpu")
    for call in (empty.report, empty.save):
        with pytest.raises(SpecError, match=r"Nothing has been measured; call run_matmul_suite\(\)"):
            call()
    with pytest.raises(SpecError, match="no device 'tpu'"):
        BenchmarkEngine(device="tpu")


def test_wrong_requests_are_one_sentence(engine: BenchmarkEngine) -> None:
    model: Any = tiny_model("gpt2")
    tokenizer = QuantizationOptimizer.load("bundled:tiny", "fp32", device="cpu")[1]
    with pytest.raises(SpecError, match="The prompt is empty"):
        engine.run_inference(model, None, prompt=" ")
    with pytest.raises(SpecError, match="exceeds the model's context of 64"):
        engine.run_inference(model, None, new_tokens=100)
    with pytest.raises(SpecError, match="does not fit the model, whose token ids are 0 to 95"):
        engine.run_inference(model, tokenizer)
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(float("nan"))
    with pytest.raises(OptiGPUError, match="logits of 3 steps are NaN or infinite"):
        engine.run_inference(model, None, new_tokens=4)
    assert len(engine.inference) == 2


def test_a_model_keeps_its_own_decoding_settings(engine: BenchmarkEngine) -> None:
    """An end token would end requests early; it is set aside for the time that it is measured."""
    model: Any = tiny_model("llama").train()
    settings = model.generation_config
    settings.eos_token_id = list(range(96))
    result = BenchmarkEngine(device="cpu").run_inference(model, None, new_tokens=6, seconds=0.05)
    assert (result.throughput_per_sec or 0) > 0
    assert model.generation_config is settings
    assert model.training


@pytest.mark.slow
@pytest.mark.usefixtures("own_lock")
def test_the_founding_code_runs_as_it_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the bundled model in the place of the hub's, which needs a network, and measured more briefly."""
    monkeypatch.setattr("optigpu.facade.engine.brief", lambda _: BRIEF)
    monkeypatch.chdir(tmp_path)
    typed: dict[str, Any] = {}
    exec(FOUNDING.replace('"gpt2"', '"bundled:tiny"'), typed)
    assert typed["output"].shape[1] - typed["inputs"].shape[1] == 100
    assert "INT4 Inference" in capsys.readouterr().out
    assert (tmp_path / "results" / "results.json").is_file()
    assert (tmp_path / "results" / "inference.png").is_file()
