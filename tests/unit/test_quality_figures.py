"""Divergence, perplexity, accuracy and losses: exact, with intervals over windows, and compared."""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from optigpu.child.messages import Metered
from optigpu.conductor.processes.rounds import MeterReading
from optigpu.documents.facts import ImageQuality, MeterFacts
from optigpu.documents.result import Measurement, VerdictReason
from optigpu.documents.views import Decision
from optigpu.job.spec import JobSpec
from optigpu.quality.divergence import Agreement, divergence, log_likelihood
from optigpu.quality.figures import (
    accuracy_figures,
    divergence_figures,
    perplexity_figures,
    with_windows,
)
from optigpu.quality.hellaswag import Item
from optigpu.quality.reference import LogitsFile
from optigpu.quality.training import (
    JITTER,
    WINDOWS,
    band_of,
    deviation_of,
    jitter_of,
    quality_of,
    window_means,
)
from optigpu.statistics.compare import compare
from optigpu.statistics.estimates import Array, leave_one_out, part_bounds, parts_of
from optigpu.statistics.intervals import summarise
from optigpu.vocabulary import OptiGPUError, SpecError
from tests.unit.made_replicates import replicate, verdict
from tests.unit.made_results import BASELINE

LOGITS = arrays.arrays(
    np.float32, st.shared(st.integers(2, 40), key="vocabulary"), elements=st.floats(-50, 50, width=32)
)


def by_hand(reference: Any, logits: Any) -> float:
    """D(P||Q) term by term, with exact sums."""

    def log_probabilities(row: Any) -> list[float]:
        total = math.log(math.fsum(math.exp(float(x)) for x in row))
        return [float(x) - total for x in row]

    p, q = log_probabilities(reference), log_probabilities(logits)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


@given(LOGITS, LOGITS)
def test_the_divergence_is_what_its_definition_says(reference: Any, logits: Any) -> None:
    expected = by_hand(reference, logits)
    assert float(divergence(reference, logits)) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@given(LOGITS, st.floats(-30, 30))
def test_a_distribution_does_not_diverge_from_itself_however_its_logits_are_shifted(
    logits: Any, shift: float
) -> None:
    assert 0 <= float(divergence(logits, logits.astype(np.float64) + shift)) < 1e-12


def test_half_precision_logits_of_a_large_vocabulary_are_summed_in_float64() -> None:
    source = np.random.default_rng(0)
    rows = source.normal(0, 3, (2, 50_257))
    reference, logits = rows[0].astype(np.float32), (rows[0] + rows[1] / 50).astype(np.float16)
    assert float(divergence(reference, logits)) == pytest.approx(by_hand(reference, logits), abs=1e-10)


def test_logits_that_would_overflow_an_exponential_are_no_problem() -> None:
    reference, logits = np.array([20_000.0, 0.0]), np.array([0.0, 20_000.0])
    assert float(divergence(reference, logits)) == 20_000
    assert [log_likelihood(reference, target) for target in (0, 1)] == [0.0, -20_000.0]


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_an_error_and_no_figure(wrong: float) -> None:
    good, bad = np.zeros(3), np.array([0.0, wrong, 0.0])
    with pytest.raises(OptiGPUError, match="1 of 3 logits are NaN or infinite"):
        divergence(good, bad)
    with pytest.raises(OptiGPUError, match="NaN or infinite"):
        log_likelihood(bad, 0)


def test_agreement_gathers_mean_99th_percentile_and_top_1() -> None:
    agreement = Agreement()
    reference = np.array([1.0, 0.0, 0.0])
    for shift in range(100):
        agreement.add(reference, np.array([1.0 - shift / 25, 0.0, 0.0]))
    each = [by_hand(reference, [1.0 - shift / 25, 0.0, 0.0]) for shift in range(100)]
    assert agreement.metrics() == {
        "kld_mean": pytest.approx(np.mean(each)),
        "kld_p99": pytest.approx(np.quantile(each, 0.99)),
        "top1_agreement": 0.26,
    }
    assert agreement.standard_error() == pytest.approx(np.std(each, ddof=1) / 10)


def test_logits_come_back_from_disk_as_they_were_in_any_order(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    order = [3, 0, 4, 1, 2]
    with LogitsFile(tmp_path / "logits", 7, new=True) as logits:
        for position in order:
            logits.write(position, rows[position])
    with LogitsFile(tmp_path / "logits", 7) as logits:
        assert all((logits.read(position) == rows[position]).all() for position in order)
        with pytest.raises(OptiGPUError, match="truncated"):
            logits.read(5)


def test_logits_of_another_width_are_refused(tmp_path: Path) -> None:
    with (
        LogitsFile(tmp_path / "logits", 7, new=True) as logits,
        pytest.raises(OptiGPUError, match="gives 8 logits, but its configuration says 7"),
    ):
        logits.write(0, np.zeros(8, np.float32))


_JUDGE_MANY = """
import resource, sys
from pathlib import Path
import numpy as np
from optigpu.quality.passages import Passage, Prediction
from optigpu.quality.reference import Setting, describe, open_reference, write_reference

folder, vocabulary, positions = Path(sys.argv[1]), 50_257, 800
setting = Setting(model="m", seed=0, text="self", tokens=positions, items=2, window=positions + 1, stride=None,
                  vocabulary=vocabulary, dataset_sha256=None)
passages = [Passage(np.zeros(positions + 1, np.int64), 1)]
row = np.random.default_rng(0).normal(size=vocabulary).astype(np.float32)

def predictions():
    for position in range(positions):
        yield Prediction(position, 0, np.roll(row, position))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
write_reference(folder, describe(setting, passages, positions), passages, predictions())
agreement, _ = open_reference(folder, setting).judge(predictions())
assert agreement.metrics()["kld_mean"] == 0 and len(agreement) == positions
print(peak() - before, (folder / "logits.f32").stat().st_size)
"""


@pytest.mark.long
def test_gpt2_s_vocabulary_at_many_positions_stays_on_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _JUDGE_MANY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    growth, on_disk = map(int, done.stdout.split())
    assert on_disk == 800 * 50_257 * 4
    assert growth < 30_000_000


PLACES = np.repeat(np.arange(10), 6)


def agreement_of(shifts: np.ndarray, order: np.ndarray) -> Agreement:
    """Positions whose logits are shifted by so much, added in the given order."""
    agreement = Agreement()
    for position in order.tolist():
        agreement.add(np.array([1.0, 0.0]), np.array([1.0 - shifts[position], 0.0]), position)
    return agreement


def test_positions_belong_to_their_windows_in_whatever_order_they_were_computed() -> None:
    rng = np.random.default_rng(0)
    shifts = rng.normal(0, 0.1 + 0.5 * (PLACES % 2))
    found = divergence_figures(agreement_of(shifts, rng.permutation(60)), PLACES)
    straight = divergence_figures(agreement_of(shifts, np.arange(60)), PLACES)
    assert found.intervals["kld_mean"] == pytest.approx(straight.intervals["kld_mean"])
    assert len(found.without["kld_mean"]) == 10
    for name, (low, high) in found.intervals.items():
        assert low < found.values[name] < high
    assert "kld_p99" in found.no_interval
    assert found.about["kld_standard_error"] is not None


def test_where_all_positions_agree_the_share_need_not_be_1() -> None:
    found = divergence_figures(agreement_of(np.zeros(60), np.arange(60)), PLACES)
    low, high = found.intervals["top1_agreement"]
    assert (found.values["top1_agreement"], high) == (1.0, 1.0)
    assert 0.9 < low < 0.95
    assert found.intervals["kld_mean"] == (0.0, 0.0)


def test_few_windows_have_no_interval_and_say_so() -> None:
    few = divergence_figures(agreement_of(np.ones(60), np.arange(60)), PLACES // 3)
    assert few.intervals == {}
    assert few.no_interval["kld_mean"] == (
        "An interval needs 5 windows, images or items; there are 4. Ask for more quality.tokens."
    )


def test_the_perplexity_s_interval_is_that_of_its_logarithm_over_windows() -> None:
    rng = np.random.default_rng(2)
    expected = -3 + rng.normal(0, 0.5, 10)[PLACES]
    found = perplexity_figures(expected - 0.1, expected, PLACES)
    nats = -(expected - 0.1).reshape(10, 6).mean(axis=1)
    half = 2.262157 * nats.std(ddof=1) / np.sqrt(10)
    assert found.intervals["perplexity"] == pytest.approx(
        tuple(np.exp(nats.mean() + each) for each in (-half, half))
    )
    low, high = found.intervals["perplexity_delta"]
    assert 0 < low < found.values["perplexity_delta"] < high
    ours, theirs = found.intervals["perplexity"], found.about["fp32_perplexity"]
    assert high - low < 0.5 * (ours[1] - ours[0]), "windows that are hard for both leave the delta alone"
    assert theirs == pytest.approx(np.exp(-expected.mean()))


def test_accuracy_and_its_loss_are_over_items() -> None:
    items = [Item("a", ("x", "y", "z", "w"), 0)] * 40
    expected = np.tile([0.0, -1.0, -1.0, -1.0], (40, 1))
    found = expected.copy()
    found[:10, 0] = -2.0
    figures = accuracy_figures(items, found.ravel(), expected.ravel())
    assert (figures.values["accuracy"], figures.values["accuracy_loss_percent"]) == (0.75, 25.0)
    low, high = figures.intervals["accuracy"]
    assert 0.5 < low < 0.75 < high < 0.9
    assert figures.intervals["accuracy_loss_percent"][0] > 0
    assert figures.about["fp32_accuracy"] == 1.0
    same = accuracy_figures(items, expected.ravel(), expected.ravel())
    assert same.values["accuracy_loss_percent"] == 0
    assert "fp32 answers otherwise" in same.no_interval["accuracy_loss_percent"]
    none = accuracy_figures(items, expected.ravel(), found.ravel() * 0 - np.tile([2.0, 1, 1, 1], 40))
    assert "answers no item correctly" in none.reasons["accuracy_loss_percent"]


def test_a_summary_has_the_interval_over_windows_or_the_reason() -> None:
    metrics = {
        name: summarise(Measurement(name=name, samples=((0.5,),)))
        for name in ("kld_mean", "kld_p99", "latency_s")
    }
    quality = ImageQuality(
        images=64, of="noise", intervals={"kld_mean": (0.4, 0.6)}, no_interval={"kld_p99": "too few"}
    )
    found = with_windows(metrics, quality)
    assert (found["kld_mean"].ci, found["kld_p99"].reason) == ((0.4, 0.6), "too few")
    assert found["latency_s"] == metrics["latency_s"]
    assert with_windows(metrics, None) == metrics


def with_quality(
    divergences: Array, right: Array, expected: float = 20.0, text: str | None = "a"
) -> dict[str, Any]:
    """A stored result with quality figures over windows, made from the figures of [windows]."""
    windows = np.arange(len(divergences))
    statistics = {
        "kld_mean": lambda kept: float(divergences[kept].mean()),
        "top1_agreement": lambda kept: float(right[kept].mean()),
        "perplexity_delta": lambda kept: float(np.exp(3 + divergences[kept].mean()) - expected),
    }
    everything = np.ones(len(windows), dtype=bool)
    metrics, without = {}, {}
    for name, statistic in statistics.items():
        value = statistic(everything)
        without[name] = leave_one_out(statistic, parts_of(windows))
        summary = summarise(Measurement(name=name, samples=((value,),))).model_dump(mode="json")
        metrics[name] = summary | {"ci": part_bounds(value, without[name])}
    quality = {"tokens_sha256": text, "without_part": without, "window": 8}
    return BASELINE.model_dump(mode="json") | {"metrics": metrics, "facts": {"quality": quality}}


def test_quality_is_compared_window_by_window() -> None:
    """Windows differ far more than the two results do in any of them."""
    rng = np.random.default_rng(0)
    hard = rng.lognormal(-4, 1, 12)
    ours = with_quality(hard, 0.9 + 0.05 * rng.random(12))
    theirs = with_quality(hard * rng.normal(1.2, 0.02, 12), 0.9 + 0.05 * rng.random(12))
    found = compare(ours, theirs).metrics
    assert found["kld_mean"].ratio == pytest.approx(1.2, abs=0.02)
    assert (found["kld_mean"].decision, found["kld_mean"].paired) == (Decision.WORSE, True)
    assert found["top1_agreement"].decision is Decision.EQUIVALENT
    delta = found["perplexity_delta"]
    assert delta.ratio is None
    assert delta.difference is not None
    assert delta.difference > 0
    assert (delta.decision, delta.reason) == (Decision.WORSE, None)
    apart = compare(ours, theirs | {"facts": {"quality": {"tokens_sha256": "a"}}}).metrics["kld_mean"]
    assert (apart.decision, apart.paired) == (Decision.UNDECIDED, False)


def test_the_same_predictions_are_equal_or_equivalent() -> None:
    same = with_quality(np.linspace(0.01, 0.02, 9), np.full(9, 0.9))
    found = compare(same, same).metrics
    decisions = [found[name].decision for name in ("kld_mean", "top1_agreement", "perplexity_delta")]
    assert decisions == [Decision.EQUIVALENT, Decision.EQUIVALENT, Decision.EQUAL]


STEPS, SEEDS, NOISE = 24, 5, 0.02
FALLING = np.linspace(6.0, 4.0, STEPS)


def noise(seed: int, sd: float = NOISE, size: Any = STEPS) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = np.random.default_rng(seed).normal(0, sd, size)
    return drawn


CURVES = FALLING + noise(0, size=(SEEDS, STEPS))
BAND = band_of(CURVES)


def test_the_band_is_where_another_seed_lies_in_95_of_100_cases() -> None:
    """Draws of six seeds: the sixth one's window means about the mean of the five that make the band."""
    inside = []
    for draw in range(400):
        curves = FALLING + noise(draw + 1000, size=(SEEDS + 1, STEPS))
        apart = np.abs(window_means(curves[-1]) - window_means(curves[:-1]).mean(axis=0))
        inside.extend((apart < band_of(curves[:-1]).course).tolist())
    assert 0.95 <= np.mean(inside) <= 0.999, "pooling the windows makes it a little wider"


def test_rounding_stays_inside_and_another_course_does_not() -> None:
    rounded = deviation_of(CURVES[0] + noise(9, 1e-4), CURVES[0], BAND)
    assert max(rounded.course, rounded.jitter) < 0.1
    slower = deviation_of(6.0 - 0.7 * (6.0 - CURVES[0]), CURVES[0], BAND)
    assert slower.course > 1


def test_a_step_that_leaves_samples_out_jumps() -> None:
    """Half of the samples have twice the variance, of which the whole batch shares half."""
    halved = deviation_of(CURVES[0] + noise(10, NOISE), CURVES[0], BAND)
    assert halved.jitter > 1.5
    assert halved.jitter == pytest.approx(jitter_of(noise(10, NOISE)) / (JITTER * BAND.jitter))


def test_where_nothing_is_learned_no_course_can_be_seen() -> None:
    with pytest.raises(OptiGPUError, match=r"more quality\.steps, a higher learning_rate"):
        band_of(6.0 + noise(0, size=(SEEDS, STEPS)))


def test_the_fewest_steps_that_a_job_may_ask_for_fill_the_windows() -> None:
    with pytest.raises(SpecError, match=r"measure\.quality\.steps"):
        training_job(measure={"quality": {"steps": 2 * WINDOWS - 1}})
    assert training_job(measure={"quality": {"steps": 2 * WINDOWS}}).measure.quality.seeds == SEEDS


def training_job(**changes: Any) -> JobSpec:
    document = {"workload": {"kind": "train_step"}, "model": "preset:tiny-gpt2-test"}
    return JobSpec.model_validate(document | changes)


def test_limits_of_predictions_are_refused_for_training() -> None:
    with pytest.raises(SpecError, match="compared with fp32 by its losses"):
        training_job(model="bundled:tiny", limits={"max_kld": 0.1})


def judged(found: NDArray[np.float64]) -> Any:
    quality = quality_of(found, CURVES)
    metered = Metered(meter="quality", facts=MeterFacts(quality=quality))
    return verdict(replicate(readings=(MeterReading(metered),)))


def test_a_variant_outside_of_the_band_is_not_ranked() -> None:
    assert judged(CURVES[0]).valid
    slower = judged(6.0 - 0.5 * (6.0 - CURVES[0]))
    assert slower.reasons == (VerdictReason.LOSS_DIVERGED,)
    assert "times as far from fp32's on the same samples" in slower.notes[0]
    jumping = judged(CURVES[0] + noise(10, NOISE))
    assert jumping.reasons == (VerdictReason.LOSS_DIVERGED,)
    assert "as they do where samples are left out" in jumping.notes[0]


def test_a_loss_that_is_not_finite_is_a_wrong_output() -> None:
    broken = np.where(np.arange(STEPS) < 6, CURVES[0], np.nan)
    found = judged(broken)
    assert found.reasons == (VerdictReason.OUTPUT_INVALID,)
    assert "The loss of step 7 of training is not finite" in found.notes[0]
    assert len(quality_of(broken, CURVES).losses) == 6
