"""The next run's time is guessed by what the parts of earlier runs took on this machine."""

from pathlib import Path
from typing import Any

import pytest

from optigpu.job.estimate import (
    AUDIT,
    MAKE,
    MOST,
    NO_RATES,
    SAMPLE,
    START,
    Need,
    Rates,
    Took,
    guess_of,
    keep_rates,
    known_rates,
    plan_time,
)
from optigpu.job.plan import variants_of
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
    keep_rates(NO_RATES.with_run({(variant, START): Took(60.0, 6.0), (variant, AUDIT): Took(7.0, 1.0)}))
    guess = plan_time(spec, [variant], known_rates()).guesses[variant.index].seconds
    plain = plan_time(spec, [variant]).guesses[variant.index].seconds
    assert (guess[START], guess[AUDIT]) == (60.0, 7.0)
    assert guess[SAMPLE] == plain[SAMPLE]
    assert list(guess) == list(plain)


def test_a_stack_on_another_model_is_guessed_by_its_size_and_how_wrong_the_guess_was() -> None:
    tiny, large = variant_of(job()), variant_of(job(model="preset:llama-3.2-1b"))
    guessed = {each: guess_of(job(), each).seconds[START] for each in (tiny, large)}
    rates = NO_RATES.with_run({(tiny, START): Took(3 * guessed[tiny], guessed[tiny])})
    assert guess_of(job(), large, rates).seconds[START] == pytest.approx(3 * guessed[large])
    assert guessed[large] > 10 * guessed[tiny]
    assert guess_of(job(), variant_of(job(stack=[])), rates).measured is False
    own = rates.with_run({(large, START): Took(20.0, guessed[large])})
    assert guess_of(job(), large, own).seconds[START] == 20.0, "the variant's own counts first"


def test_a_later_run_that_finds_what_is_kept_tells_nothing_of_other_models() -> None:
    tiny, large = variant_of(job()), variant_of(job(model="preset:llama-3.2-1b"))
    rates = NO_RATES.with_run({(tiny, START): Took(12.0, 6.0)}).with_run({(tiny, START): Took(2.0, 6.0)})
    assert rates.expected(tiny, START, 6.0) == 2.0, "what was packed once is read from then on"
    assert rates.expected(large, START, 10.0) == 20.0
    beside = rates.with_run({(tiny, START): Took(50.0, 6.0)}, slowed=1.25)
    assert beside.expected(tiny, START, 6.0) == 2.0, "nor does one beside other work"
    packed = NO_RATES.with_run({(tiny, MAKE): Took(30.0, 10.0, again=0.1)})
    assert packed.expected(tiny, MAKE, 10.0) == pytest.approx(3.0), "the same variant finds what was packed"
    assert packed.expected(large, MAKE, 10.0) == 30.0
    first = NO_RATES.with_run({(tiny, START): Took(15.0, 6.0)}, slowed=1.25)
    assert [first.expected(tiny, START, 6.0), first.expected(large, START, 10.0)] == [12.0, 20.0]


def test_sampling_keeps_the_limits_of_the_job() -> None:
    variant = variant_of(job())
    rates = NO_RATES.with_run({(variant, SAMPLE): Took(90.0, 24.0)})
    assert guess_of(job(measure={"max_seconds": 12}), variant, rates).seconds[SAMPLE] == 12


def test_the_preparation_counts_once_and_what_is_kept_has_a_rate_of_its_own() -> None:
    spec = job(measure={"meters": ["latency"], "replicates": 3})
    made, kept = Need("reference", "bundled:tiny", 5.0), Need("kept reference", "bundled:tiny", 3.0)
    other = Need("reference", "bundled:small", 10.0)
    rates = NO_RATES.with_run({}, {made: 10.0}).with_run({}, {made: 30.0})
    assert [rates.preparing(need) for need in (made, kept, other)] == [20.0, 3.0, 20.0]
    variants = variants_of(spec)
    more = plan_time(spec, variants, rates, [made, kept]).seconds - plan_time(spec, variants, rates).seconds
    assert more == pytest.approx(23.0)


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"a": "b"}', b"\xff", b'{"a": -1, "b": null, "c": Infinity}']
)
def test_a_damaged_file_is_none(own_cache: Path, content: bytes) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_bytes(content)
    assert not known_rates().seconds


def test_the_oldest_make_room() -> None:
    many = Rates({str(number): 1.0 for number in range(MOST)})
    found = many.with_run({}, {Need("peaks", "", 0.0): 2.0}).seconds
    assert len(found) == MOST
    assert "0" not in found
