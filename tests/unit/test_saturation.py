"""Where a sweep over rates ends: at the first at which the queue grows in a round that nothing disturbed."""

from collections.abc import Callable, Iterable

import pytest

from optigpu.child.messages import Ready
from optigpu.conductor.saturation import Saturation, Watched
from optigpu.documents.facts import RunFacts
from optigpu.documents.load import LoadFacts
from optigpu.documents.rounds import RoundMark
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, Measure, Variant
from optigpu.vocabulary import UnsupportedError
from tests.unit.test_load_verdicts import GROWING, RUN

MEASURE = Measure(min_seconds=1.0)
CLEAN = Watched((RUN,), (), 0.4)
CLEAN_GROWING = Watched((GROWING,), (), 0.4)
DISTURBED_GROWING = Watched((GROWING,), (RoundMark.OTHERS,), 0.4)
LEFT_OUT = "The queue grew without an end at 10 requests a second already; 20 was left out."


def variants(**changes: object) -> tuple[Variant, ...]:
    beside = [{"backend": "torch", "stack": [{"name": "bf16"}]}]
    document = {"workload": {"kind": "serve", "rates": [10, 20]}, "model": "preset:gpt2", "beside": beside}
    return variants_of(JobSpec.model_validate(document | changes))


def ready(saturated_runs: int) -> Ready:
    load = LoadFacts(scenario="Server", rate=10, queries=40, runs=3, saturated_runs=saturated_runs)
    facts = RunFacts(load=load)
    return Ready(load_s=1, compile_s=None, steady=True, warmup_requests=3, request_s=0.1, facts=facts)


def watching(rounds: Iterable[Watched]) -> Callable[[], Watched]:
    """One after the other; asked for more there is an error."""
    left = iter(rounds)
    return lambda: next(left)


def left_out(rounds: Iterable[Watched], saturated_runs: int = 3) -> str | None:
    """Why the second rate is left out, if the sweep ends at the first, which never is."""
    first, second = (each for each in variants() if not each.stack)
    found = Saturation()
    found.judge(first, ready(saturated_runs), MEASURE, watching(rounds))
    found.require_below(first)
    try:
        found.require_below(second)
    except UnsupportedError as error:
        return str(error)
    return None


def test_a_warm_up_whose_queue_does_not_grow_needs_no_round() -> None:
    assert left_out([], saturated_runs=1) is None


def test_a_clean_round_decides() -> None:
    assert left_out([CLEAN_GROWING]) == LEFT_OUT
    assert left_out([CLEAN]) is None


def test_a_disturbed_round_is_measured_again_and_ends_nothing() -> None:
    assert left_out([DISTURBED_GROWING, DISTURBED_GROWING, CLEAN_GROWING]) == LEFT_OUT
    assert left_out([DISTURBED_GROWING, CLEAN]) is None


def test_without_a_clean_round_in_the_time_the_sweep_goes_on() -> None:
    asked = iter([DISTURBED_GROWING] * 100)
    assert left_out(asked) is None
    assert len(list(asked)) == 95, "2 s of rounds of 0.4 s"


def test_another_stack_and_another_server_have_sweeps_of_their_own() -> None:
    found = Saturation()
    plain, _, _, bf16 = sorted(variants(), key=lambda each: (len(each.stack), each.index))
    found.judge(plain, ready(3), MEASURE, watching([CLEAN_GROWING]))
    found.require_below(bf16)

    def at(port: int) -> tuple[Variant, ...]:
        return variants(backend="endpoint", endpoint=f"http://127.0.0.1:{port}#tiny", beside=[])

    found.judge(at(8001)[0], ready(3), MEASURE, watching([CLEAN_GROWING]))
    found.require_below(at(8002)[1])
    with pytest.raises(UnsupportedError):
        found.require_below(at(8001)[1])
