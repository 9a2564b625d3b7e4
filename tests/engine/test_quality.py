"""Quality: right to the last figure, blind to no harm, through what was timed; where it cannot be had, why."""

import bz2
import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.meters.base import QualityOptions
from optigpu.meters.quality import CHECKED, QUALITY_FOLDER, QualityMeter, make_reference
from optigpu.quality.passages import FEWEST
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind
from tests.breadth import spread
from tests.engine.meter_contexts import (
    LENGTH,
    MODEL,
    VOCABULARY,
    Broken,
    Flattened,
    OwnLoop,
    Spoiled,
    Spy,
    assert_nothing,
    context,
    context_of,
    exact_model,
    measured,
)
from tests.engine.tiny_models import ignore, runtime_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("trained_model")]

NOT_OF_A_TEXT = {
    "accuracy", "accuracy_loss_percent", "loss_final", "loss_deviation", "gradient_norm", "alone_agreement",
}  # fmt: skip


def passages_in(folder: Path) -> list[tuple[list[int], int]]:
    """Each passage's tokens and the index of the first that is predicted, read from disk by other means."""
    with np.load(folder / QUALITY_FOLDER / "passages.npz") as found:
        tokens, ends = found["tokens"].tolist(), np.cumsum(found["lengths"]).tolist()
        starts = [0, *ends[:-1]]
        return [
            (tokens[start:end], first)
            for start, end, first in zip(starts, ends, found["firsts"].tolist(), strict=True)
        ]


def loss_of(model: Any, tokens: list[int], first: int) -> tuple[float, int]:
    """Sum and count of transformers' own loss over the tokens from `first` on."""
    ids = torch.tensor([tokens])
    labels = ids.clone()
    labels[:, :first] = -100
    with torch.no_grad():
        mean = float(model(input_ids=ids, labels=labels).loss)
    return mean * (len(tokens) - first), len(tokens) - first


@pytest.mark.parametrize("stack", [(), (NoKvCache(),), (Spy(), StaticKvCache())])
def test_fp32_does_not_diverge_from_itself_whatever_the_cache(
    stack: tuple[Technique, ...], tmp_path: Path
) -> None:
    reading = measured(tmp_path, *stack)
    assert 0 <= reading.values["kld_mean"] <= reading.values["kld_p99"] <= 1e-6
    assert reading.values["top1_agreement"] == 1
    assert reading.facts.model_dump()["quality"]["kld_positions"] == 512


def test_whole_passes_score_where_they_predict_what_the_timed_step_does(tmp_path: Path) -> None:
    by_stack = {
        stack: measured(tmp_path, *stack).facts.model_dump()["quality"]["passes_checked"]
        for stack in [(), (NoKvCache(),), (Flattened(),), (OwnLoop(scores=True),)]
    }
    assert list(by_stack.values()) == [CHECKED, CHECKED, None, None]
    spied = context(tmp_path, Spy())
    before = len(spied.runtime.notes.facts["seen"])
    QualityMeter().read(spied)
    assert len(spied.runtime.notes.facts["seen"]) == before + CHECKED


@pytest.mark.parametrize("text", ["self", "file:mine.txt"])
def test_what_the_time_does_not_reach_is_left_out_and_said(
    text: str, tmp_path: Path, language_dir: Path
) -> None:
    reading = measured(tmp_path, Flattened(), text=text, seconds=1e-6)
    quality = reading.facts.model_dump()["quality"]
    assert (quality["positions"], quality["kld_positions"]) == (FEWEST, FEWEST)
    assert quality["asked_positions"] > FEWEST
    assert reading.values["kld_mean"] > 0.1
    assert ("perplexity" in reading.values) == (text != "self")


def test_a_reference_is_kept_for_later_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTIGPU_REFERENCES_GB", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder, seed in zip(folders, (0, 0, 1), strict=True):
        folder.mkdir()
        assert make_reference(replace(context(folder), seed=seed)).reasons == {}
    logits = [folder / QUALITY_FOLDER / "logits.f32" for folder in folders]
    assert logits[0].samefile(logits[1])
    assert not logits[0].samefile(logits[2])
    reading = QualityMeter().read(context(folders[1], Bf16()))
    assert reading.facts == QualityMeter().read(context(folders[0], Bf16())).facts
    with logits[0].open("r+b") as file:
        file.truncate(4)
    (again := tmp_path / "fourth").mkdir()
    assert make_reference(context(again)).reasons == {}
    assert QualityMeter().read(context(again, Bf16())).facts == reading.facts, "a damaged one is made anew"


@pytest.mark.parametrize("technique", [Bf16(), Int8WeightOnly()], ids=lambda technique: technique.name)
def test_a_little_rounding_costs_a_little_and_is_seen(technique: Technique, tmp_path: Path) -> None:
    plain = measured(tmp_path)
    rounded = QualityMeter().read(context(tmp_path, technique))
    assert 100 * plain.values["kld_mean"] < rounded.values["kld_mean"] < 1e-3
    assert 0.95 < rounded.values["top1_agreement"] <= 1


def test_a_step_that_flattens_the_distribution_shows_in_the_divergence(tmp_path: Path) -> None:
    reading = measured(tmp_path, Flattened())
    assert reading.values["kld_mean"] > 0.1
    assert reading.values["top1_agreement"] == 1


def test_spoiled_weights_show_in_every_figure(tmp_path: Path, language_dir: Path) -> None:
    reading = measured(tmp_path, Spoiled(noise=1.0), text="file:mine.txt")
    assert reading.values["kld_mean"] > 0.05
    assert reading.values["kld_p99"] > reading.values["kld_mean"]
    assert reading.values["top1_agreement"] < 0.95
    assert reading.values["perplexity_delta"] > 0.1


def test_figures_agree_with_another_computation_from_the_same_logits(tmp_path: Path) -> None:
    reading = measured(tmp_path, Int8WeightOnly(), StaticKvCache())
    reference = torch.from_numpy(np.fromfile(tmp_path / QUALITY_FOLDER / "logits.f32", np.float32)).view(
        512, VOCABULARY
    )
    runtime = runtime_of(MODEL, Int8WeightOnly(), StaticKvCache())
    rows = [
        logits
        for tokens, first in passages_in(tmp_path)
        for logits in runtime.score(torch.tensor([tokens[:-1]]), first - 1)
    ]
    found = torch.cat(rows).double().log_softmax(-1)
    expected = reference.double().log_softmax(-1)
    each = torch.nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(-1)
    assert reading.values["kld_mean"] == pytest.approx(float(each.mean()), rel=1e-3, abs=1e-9)
    assert reading.values["kld_p99"] == pytest.approx(float(each.quantile(0.99)), rel=1e-3, abs=1e-9)
    agree = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    assert reading.values["top1_agreement"] == pytest.approx(float(agree))


def test_the_reference_is_the_plain_model_in_whole_passes(tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    stored = np.fromfile(tmp_path / QUALITY_FOLDER / "logits.f32", np.float32).reshape(512, VOCABULARY)
    model, expected = exact_model(), []
    for tokens, first in passages_in(tmp_path):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1]
        expected.append(logits.numpy())
    assert np.abs(stored - np.concatenate(expected)).max() < 1e-3


@pytest.mark.parametrize("stride", [None, 63])
def test_perplexity_is_that_of_an_independent_evaluation(
    stride: int | None, tmp_path: Path, language_dir: Path, trained_model: Path
) -> None:
    options = {"text": "file:mine.txt", "tokens": 400, "stride": stride}
    reading = measured(tmp_path, StaticKvCache(), **options)
    tokenizer = AutoTokenizer.from_pretrained(trained_model, local_files_only=True)
    ids = tokenizer((language_dir / "mine.txt").read_text(), add_special_tokens=False)["input_ids"][:400]
    model, total, count, ended = exact_model(), 0.0, 0, 0
    for begin in range(0, len(ids), stride or LENGTH // 2):
        end = min(begin + LENGTH, len(ids))
        loss, predicted = loss_of(model, ids[begin:end], max(1, end - begin - (end - ended)))
        total, count, ended = total + loss, count + predicted, end
        if end == len(ids):
            break
    assert count == reading.facts.model_dump()["quality"]["positions"] == 399
    assert reading.values["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert reading.facts.model_dump()["quality"]["fp32_perplexity"] == pytest.approx(
        math.exp(total / count), rel=1e-4
    )
    assert abs(reading.values["perplexity_delta"]) < 1e-4


@pytest.fixture
def start_token(trained_model: Path) -> Iterator[int]:
    """The id of a token that the model's tokenizer puts before every text."""
    files = {path: path.read_bytes() for path in trained_model.glob("tokenizer*")}
    tokenizer = AutoTokenizer.from_pretrained(trained_model, local_files_only=True)
    tokenizer.bos_token, known = tokenizer.eos_token, [(tokenizer.eos_token, tokenizer.eos_token_id)]
    template = TemplateProcessing(single=f"{tokenizer.eos_token} $A", special_tokens=known)
    tokenizer.backend_tokenizer.post_processor = template
    tokenizer.save_pretrained(trained_model)
    yield tokenizer.eos_token_id
    for path, content in files.items():
        path.write_bytes(content)


@pytest.mark.usefixtures("language_dir")
def test_each_window_begins_with_what_the_tokenizer_puts_before_a_text(
    tmp_path: Path, start_token: int
) -> None:
    reading = measured(tmp_path, text="file:mine.txt", tokens=200, window=50, stride=20)
    passages = passages_in(tmp_path)
    assert {tokens[0] for tokens, _ in passages} == {start_token}
    assert all(start_token not in tokens[1:] and len(tokens) <= 50 for tokens, _ in passages)
    assert reading.facts.model_dump()["quality"]["positions"] == 199


def test_what_was_measured_on_is_in_the_facts(tmp_path: Path, language_dir: Path) -> None:
    reading = measured(tmp_path, text="file:mine.txt", tokens=200, window=50, stride=20)
    facts = reading.facts.model_dump()["quality"]
    content = (language_dir / "mine.txt").read_bytes()
    assert facts["dataset_sha256"] == hashlib.sha256(content).hexdigest()
    assert (facts["window"], facts["stride"], facts["batch_size"]) == (50, 20, 2)
    assert (facts["text"], facts["dataset"]) == ("file:mine.txt", "mine.txt")
    assert len(facts["tokens_sha256"]) == 64
    assert len(facts["without_part"]["perplexity"]) == 9, "as many as there are windows"
    for name in ("kld_mean", "top1_agreement", "perplexity", "perplexity_delta"):
        low, high = facts["intervals"][name]
        assert low <= reading.values[name] <= high
    low, high = facts["intervals"]["perplexity"]
    assert high > 1.01 * low
    assert set(facts["no_interval"]) == {"kld_p99"}
    assert set(reading.reasons) == NOT_OF_A_TEXT
    assert set(reading.values) | set(reading.reasons) == set(QualityMeter.metrics)


def test_accuracy_is_that_of_an_independent_evaluation(
    tmp_path: Path, language_dir: Path, trained_model: Path
) -> None:
    plain = measured(tmp_path, text="hellaswag", tokens=100)
    share = plain.values["accuracy"]
    assert share == independent_accuracy(language_dir, trained_model, exact_model()) == 10 / 12
    assert plain.values["accuracy_loss_percent"] == 0
    facts = plain.facts.model_dump()["quality"]
    low, high = facts["intervals"]["accuracy"]
    assert 0.4 < low < share < high < 1
    assert "fp32 answers otherwise" in facts["no_interval"]["accuracy_loss_percent"]
    assert facts["accuracy_standard_error"] == pytest.approx(math.sqrt(share * (1 - share) / 11))
    assert (facts["items"], facts["kld_positions"], facts["contexts_cut"]) == (12, 100, 0)
    assert facts["positions"] > 400
    assert plain.values["kld_mean"] <= 1e-6


def test_what_spoils_the_answers_is_an_accuracy_lost(
    tmp_path: Path, language_dir: Path, trained_model: Path
) -> None:
    fp32 = measured(tmp_path, text="hellaswag").values["accuracy"]
    spoiled = runtime_of(MODEL, Spoiled(noise=5.0))
    found = QualityMeter().read(context_of(spoiled, tmp_path, text="hellaswag")).values
    assert found["accuracy"] == independent_accuracy(language_dir, trained_model, spoiled.model.double())
    assert found["accuracy"] < fp32
    assert found["accuracy_loss_percent"] == pytest.approx(100 * (1 - found["accuracy"] / fp32))


def independent_accuracy(language_dir: Path, trained_model: Path, model: Any) -> float:
    """By whole texts, one after the other, as the usual harness does."""
    tokenizer = AutoTokenizer.from_pretrained(trained_model, local_files_only=True)
    content = bz2.decompress((language_dir / "hellaswag" / "hellaswag_val_full.txt.bz2").read_bytes())
    lines = content.decode().split("\n")
    right = []
    for start in range(0, len(lines), 6):
        context, label, *endings = lines[start : start + 6]
        scores = []
        for ending in endings:
            ids = tokenizer.encode(f"{context} {ending}")
            scores.append(-loss_of(model, ids, len(tokenizer.encode(context)))[0] / len(ending))
        right.append(int(np.argmax(scores)) == int(label))
    return float(np.mean(right))


def test_forced_tokens_go_through_the_timed_step_and_its_own_cache(tmp_path: Path) -> None:
    runtime = runtime_of(MODEL, Spy(), StaticKvCache())
    runtime.generate(torch.zeros((2, 24), dtype=torch.int64), 40)
    cache = runtime.notes.facts["seen"][0][2]
    runtime.notes.record(seen=[])
    tokens = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    logits = list(runtime.score(tokens, 5))
    assert runtime.notes.facts["seen"] == [
        (tokens[:, index].tolist(), index, cache) for index in range(5, LENGTH)
    ]
    assert [tuple(row.shape) for row in logits] == [(2, VOCABULARY)] * (LENGTH - 5)


@pytest.mark.parametrize(
    ("stack", "prefill"),
    spread(
        [((),), ((StaticKvCache(),),), ((NoKvCache(),),), ((Spy(),),), ((Spy(), StaticKvCache()),)],
        [0, 1, 9],
        by_default=5,
    ),
)
def test_scores_are_the_logits_after_each_forced_token(stack: tuple[Technique, ...], prefill: int) -> None:
    tokens = torch.randint(VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = exact_model()(input_ids=tokens).logits
    found = list(runtime_of(MODEL, *stack).score(tokens, prefill))
    assert len(found) == 12 - prefill
    assert all(
        float((row - expected[:, prefill + index]).abs().max()) < 1e-3 for index, row in enumerate(found)
    )
    assert not torch.is_inference_mode_enabled()


def test_a_compiled_step_is_scored_by_the_graph_that_was_timed(tmp_path: Path) -> None:
    from torch._dynamo.utils import counters

    make_reference(context(tmp_path))
    compiled = context(tmp_path, TorchCompile(backend="eager"), Int8WeightOnly())
    graphs = counters["stats"]["unique_graphs"]
    reading = QualityMeter().read(compiled)
    plain = QualityMeter().read(context(tmp_path, Int8WeightOnly()))
    assert counters["stats"]["unique_graphs"] == graphs
    assert reading.values["kld_mean"] == pytest.approx(plain.values["kld_mean"], rel=0.05)
    assert compiled.request.run()["tokens_per_s"] > 0


def test_a_loop_of_its_own_is_asked_for_its_logits(tmp_path: Path) -> None:
    reading = measured(tmp_path, OwnLoop(scores=True))
    assert reading.values["kld_mean"] > 1
    assert reading.values["top1_agreement"] < 0.1


def test_a_loop_that_gives_no_logits_has_no_quality(tmp_path: Path) -> None:
    reading = measured(tmp_path, OwnLoop(scores=False))
    assert_nothing(reading, "own_loop replaces the decode loop by one that gives no logits")


@pytest.mark.gpu
def test_a_cuda_graph_s_logits_are_copied_before_the_next_step_writes_over_them(tmp_path: Path) -> None:
    stack = resolve((TorchCompile(mode="reduce-overhead"),), "generate")
    plain = DecodingModel(MODEL, (), DeviceKind.CUDA, 0, ignore)
    assert make_reference(context_of(plain, tmp_path)).reasons == {}
    graphed = DecodingModel(MODEL, stack, DeviceKind.CUDA, 0, ignore)
    reading = QualityMeter().read(context_of(graphed, tmp_path))
    assert reading.values["kld_mean"] <= 1e-6
    assert reading.values["top1_agreement"] > 0.99


def test_random_weights_have_no_quality(tmp_path: Path) -> None:
    name = "preset:tiny-llama-test"
    random = context_of(runtime_of(name), tmp_path, model=name)
    for reading in (make_reference(random), QualityMeter().read(random)):
        assert_nothing(reading, "random weights, which do not behave like trained ones")


def test_why_there_is_no_reference_is_what_every_variant_says(tmp_path: Path, language_dir: Path) -> None:
    reading = make_reference(context(tmp_path, text="file:missing.txt"))
    assert_nothing(reading, r"missing.txt under .* cannot be read")
    (language_dir / "missing.txt").write_text("here it is by now, and too late for this job")
    again = QualityMeter().read(context(tmp_path, text="file:missing.txt"))
    assert again.reasons == reading.reasons


def test_a_dataset_that_changed_while_the_job_ran_is_a_reason(tmp_path: Path, language_dir: Path) -> None:
    make_reference(context(tmp_path, text="file:mine.txt"))
    with (language_dir / "mine.txt").open("a") as text:
        text.write(" More.")
    assert_nothing(QualityMeter().read(context(tmp_path, text="file:mine.txt")), "changed while the job ran")


@pytest.mark.parametrize(
    ("change", "name"), [({"seed": 1}, "seed 0"), ({"quality": QualityOptions(tokens=64)}, "tokens 512")]
)
def test_a_reference_for_another_setting_is_none(change: dict[str, Any], name: str, tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    reading = QualityMeter().read(replace(context(tmp_path), **change))
    assert_nothing(reading, f"was made for {name} but this variant has")


def test_a_reference_that_was_tampered_with_or_cut_is_a_reason(tmp_path: Path) -> None:
    make_reference(context(tmp_path))
    logits = tmp_path / QUALITY_FOLDER / "logits.f32"
    logits.write_bytes(logits.read_bytes()[:-4])
    assert_nothing(QualityMeter().read(context(tmp_path)), "truncated")
    manifest = tmp_path / QUALITY_FOLDER / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"passages_sha256": "0" * 64}))
    assert_nothing(QualityMeter().read(context(tmp_path)), "do not match its manifest")


def test_more_positions_than_the_disk_is_for_count_for_perplexity_alone(
    tmp_path: Path, language_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("optigpu.quality.reference.MOST_LOGIT_BYTES", 100 * VOCABULARY * 4)
    reading = measured(tmp_path, text="file:mine.txt", tokens=300)
    facts = reading.facts.model_dump()["quality"]
    assert (facts["kld_positions"], facts["positions"]) == (100, 299)
    assert (tmp_path / QUALITY_FOLDER / "logits.f32").stat().st_size == 100 * VOCABULARY * 4


def test_logits_that_are_no_numbers_are_a_reason(tmp_path: Path) -> None:
    assert_nothing(measured(tmp_path, Broken()), f"{VOCABULARY} of {VOCABULARY} logits are NaN or infinite")
