"""Quality: right to the last figure, and blind to no harm."""

import bz2
import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optigpu.backends.torch.applied import DecodingModel
from optigpu.meters.quality import QUALITY_FOLDER, QualityMeter, make_reference
from optigpu.quality.text import DATASETS_DIR
from optigpu.techniques.base import Technique
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly
from optigpu.vocabulary import DeviceKind
from optigpu.workloads.generate import Generate
from tests.engine.quality_contexts import (
    LENGTH,
    MODEL,
    VOCABULARY,
    Flattened,
    Spoiled,
    Spy,
    context,
    context_of,
    exact_model,
    measured,
)
from tests.engine.tiny_models import ignore, runtime_of

NOT_OF_A_TEXT = {
    "accuracy", "accuracy_loss_percent", "loss_final", "loss_deviation", "gradient_norm", "alone_agreement",
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("trained_model")]


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
    import torch

    ids = torch.tensor([tokens])
    labels = ids.clone()
    labels[:, :first] = -100
    with torch.no_grad():
        mean = float(model(input_ids=ids, labels=labels).loss)
    return mean * (len(tokens) - first), len(tokens) - first


@pytest.mark.parametrize(
    "stack", [(), (StaticKvCache(),), (NoKvCache(),), (Spy(),), (Spy(), StaticKvCache())]
)
def test_fp32_does_not_diverge_from_itself_whatever_the_cache(
    stack: tuple[Technique, ...], tmp_path: Path
) -> None:
    reading = measured(tmp_path, *stack)
    assert 0 <= reading.values["kld_mean"] <= reading.values["kld_p99"] <= 1e-6
    assert reading.values["top1_agreement"] == 1
    assert reading.facts.model_dump()["quality"]["kld_positions"] == 512


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


def test_the_more_noise_the_worse(tmp_path: Path) -> None:
    found = [measured(tmp_path, Spoiled(noise=noise)).values for noise in (0.1, 0.3, 1.0)]
    assert [one["kld_mean"] for one in found] == sorted(one["kld_mean"] for one in found)


def test_figures_agree_with_another_computation_from_the_same_logits(tmp_path: Path) -> None:
    import torch

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
    import torch

    make_reference(context(tmp_path))
    stored = np.fromfile(tmp_path / QUALITY_FOLDER / "logits.f32", np.float32).reshape(512, VOCABULARY)
    model, expected = exact_model(), []
    for tokens, first in passages_in(tmp_path):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([tokens])).logits[0, first - 1 : -1]
        expected.append(logits.numpy())
    assert np.abs(stored - np.concatenate(expected)).max() < 1e-3


@pytest.mark.parametrize("stride", [None, 16, 63])
def test_perplexity_is_that_of_an_independent_evaluation(
    stride: int | None, tmp_path: Path, language_dir: Path, trained_model: Path
) -> None:
    from transformers import AutoTokenizer

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


def test_the_delta_is_the_difference_from_fp32(tmp_path: Path, language_dir: Path) -> None:
    reading = measured(tmp_path, Int8WeightOnly(), text="file:mine.txt")
    fp32 = reading.facts.model_dump()["quality"]["fp32_perplexity"]
    assert reading.values["perplexity"] - fp32 == pytest.approx(reading.values["perplexity_delta"])
    assert reading.values["perplexity_delta"] != 0
    assert 1 < fp32 < 5


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


def test_wikitext_gives_a_perplexity(
    tmp_path: Path, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATASETS_DIR, str(datasets_dir))
    reading = measured(tmp_path, text="wikitext-2", tokens=128)
    assert set(reading.values) == set(QualityMeter.metrics) - NOT_OF_A_TEXT
    assert reading.facts.model_dump()["quality"]["dataset"] == "wikitext-2/test.txt"


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
    from transformers import AutoTokenizer

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


def test_the_real_hellaswag_runs(tmp_path: Path, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATASETS_DIR, str(datasets_dir))
    longer = Generate(prompt_tokens=50, new_tokens=46)
    there = context_of(runtime_of(MODEL), tmp_path, longer, text="hellaswag", items=5)
    assert make_reference(there).reasons == {}
    reading = QualityMeter().read(there)
    assert reading.facts.model_dump()["quality"]["items"] == 5
    assert reading.facts.model_dump()["quality"]["contexts_cut"] > 0
    assert reading.values["accuracy"] in [count / 5 for count in range(6)]


def test_the_model_s_own_text_follows_its_distribution() -> None:
    import torch

    runtime = runtime_of(MODEL)
    drawn = runtime.sample(2000, 2)
    assert drawn.shape == (2000, 2)
    assert drawn[:, 0].eq(0).all()
    with torch.no_grad():
        expected = runtime.model(input_ids=drawn[:1, :1]).logits[0, -1].double().softmax(-1)
    counts = torch.bincount(drawn[:, 1], minlength=VOCABULARY).double()
    likely = expected > 5 / 2000
    spread = (2000 * expected * (1 - expected)).sqrt()
    assert likely.sum() > 10
    assert float(((counts - 2000 * expected)[likely] / spread[likely]).abs().max()) < 5
    assert float((counts[~likely].sum() / 2000 - expected[~likely].sum()).abs()) < 0.05


def test_the_model_s_own_text_follows_the_seed(tmp_path: Path) -> None:
    texts = []
    for seed in (0, 0, 1):
        runtime = DecodingModel(MODEL, (), DeviceKind.CPU, seed, ignore)
        texts.append(runtime.sample(3, 32))
    assert texts[0].equal(texts[1])
    assert not texts[0].equal(texts[2])


@pytest.mark.parametrize("tokens", [16, 55, 56, 100])
def test_exactly_as_many_tokens_of_its_own_are_predicted_as_were_asked_for(
    tokens: int, tmp_path: Path
) -> None:
    assert measured(tmp_path, tokens=tokens).facts.model_dump()["quality"]["positions"] == tokens
