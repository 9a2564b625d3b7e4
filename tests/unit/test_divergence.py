"""Divergence between next-token distributions: exact, in float64, and with one row in memory at a time."""

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

from optigpu.quality.divergence import Agreement, divergence, log_likelihood, log_softmax
from optigpu.quality.reference import LogitsFile
from optigpu.vocabulary import OptiGPUError

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
    assert log_softmax(reference).tolist() == [0.0, -20_000.0]


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
