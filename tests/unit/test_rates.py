"""The next run's time is guessed by what the parts of earlier runs took on this machine."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.job.estimate import AUDIT, SAMPLE, START, plan_time
from optigpu.job.plan import variants_of
from optigpu.job.rates import MOST, NO_RATES, Rates, keep_rates, known_rates
from optigpu.job.spec import JobSpec, Variant


def job(**changes: Any) -> JobSpec:
    document = {"workload": {"kind": "generate"}, "model": "bundled:tiny", "stack": [{"name": "bf16"}]}
    return JobSpec.model_validate(document | changes)


def variant_of(spec: JobSpec) -> Variant:
    (variant,) = variants_of(spec)
    return variant


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "optigpu" / "rates.json"


def test_what_a_run_took_is_the_next_one_s_guess() -> None:
    spec = job()
    variant = variant_of(spec)
    keep_rates(NO_RATES.with_parts({(variant, START): 60.0, (variant, AUDIT): 7.0}))
    guess = plan_time(spec, [variant], known_rates()).guesses[variant.index].seconds
    plain = plan_time(spec, [variant]).guesses[variant.index].seconds
    assert (guess[START], guess[AUDIT]) == (60.0, 7.0)
    assert guess[SAMPLE] == plain[SAMPLE]
    assert list(guess) == list(plain)


def test_a_stack_on_another_model_or_workload_is_guessed_by_the_stack() -> None:
    rates = NO_RATES.with_parts({(variant_of(job()), START): 60.0})
    assert rates.of(variant_of(job(model="bundled:small")), START) == 60.0
    assert rates.of(variant_of(job(workload={"kind": "generate", "new_tokens": 5})), START) == 60.0
    assert rates.of(variant_of(job(stack=[])), START) is None
    other = rates.with_parts({(variant_of(job(model="bundled:small")), START): 20.0})
    assert other.of(variant_of(job()), START) == 60.0, "the variant's own counts first"


def test_the_preparation_counts_once_and_the_newest_run_counts_most() -> None:
    spec = job()
    rates = NO_RATES.with_preparing(spec.model, 10.0, quality=False)
    rates = rates.with_preparing(spec.model, 30.0, quality=False)
    assert rates.preparing(spec.model, quality=False) == 20.0
    quiet = job(measure={"meters": ["latency"], "replicates": 3})
    more = plan_time(quiet, variants_of(quiet), rates).seconds - plan_time(quiet, variants_of(quiet)).seconds
    assert more == pytest.approx(20.0)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": "b"}', b"\xff", b'{"a": -1, "b": null, "c": Infinity}']
)
def test_a_damaged_file_is_none(own_cache: Path, content: bytes) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_bytes(content)
    assert not known_rates().seconds


def test_the_oldest_make_room() -> None:
    many = Rates({str(number): 1.0 for number in range(MOST)})
    found = many.with_preparing("bundled:tiny", 2.0, quality=True).seconds
    assert len(found) == MOST
    assert "0" not in found
