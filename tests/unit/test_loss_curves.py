"""Curves of losses against fp32's and the noise between seeds, and the verdict on what trains something else."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from optigpu.child.messages import Metered
from optigpu.conductor.processes.metering import MeterReading
from optigpu.documents.facts import MeterFacts
from optigpu.documents.result import VerdictReason
from optigpu.job.spec import JobSpec
from optigpu.quality.loss_curves import (
    EQUIVALENT,
    JITTER,
    WINDOWS,
    band_of,
    deviation_of,
    jitter_of,
    window_means,
)
from optigpu.quality.training import quality_of
from optigpu.vocabulary import OptiGPUError, SpecError
from tests.unit.made_replicates import replicate, verdict

STEPS, SEEDS, NOISE = 24, 5, 0.02
FALLING = np.linspace(6.0, 4.0, STEPS)


def noise(seed: int, sd: float = NOISE, size: Any = STEPS) -> NDArray[np.float64]:
    drawn: NDArray[np.float64] = np.random.default_rng(seed).normal(0, sd, size)
    return drawn


CURVES = FALLING + noise(0, size=(SEEDS, STEPS))
BAND = band_of(CURVES)


def test_jitter_is_the_noise_of_steps_whatever_the_course() -> None:
    wild = noise(1, size=20_000)
    assert jitter_of(wild) == pytest.approx(NOISE, rel=0.02)
    assert jitter_of(wild + np.linspace(0, 50, wild.size)) == pytest.approx(NOISE, rel=0.02)


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


def test_a_small_difference_counts_as_none_where_seeds_are_quiet() -> None:
    quiet = band_of(FALLING + noise(0, 1e-6, (SEEDS, STEPS)))
    assert quiet.allowed == pytest.approx(EQUIVALENT * quiet.fall)
    assert quiet.course < 1e-4
    shifted = deviation_of(FALLING + 0.5 * quiet.allowed, FALLING, quiet)
    assert shifted.course == pytest.approx(0.5)
    assert shifted.jitter == pytest.approx(0, abs=1e-3)


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
