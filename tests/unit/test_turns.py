"""Ratios from turns: what they are exactly, and when there is none."""

from collections.abc import Sequence

import numpy as np
import pytest

from optigpu.conductor.outcome import with_turns
from optigpu.conductor.verdicts.cost import Evidence
from optigpu.conductor.verdicts.disturbance import Selection, Yardstick
from optigpu.documents.result import Measurement, MetricSummary, Result, Verdict
from optigpu.documents.rounds import RoundRecord
from optigpu.statistics.compare import StoredResult
from optigpu.statistics.intervals import summarise
from optigpu.statistics.within import Timed, ratio_of_turns
from optigpu.vocabulary import DeviceKind, Role
from tests.unit.made_replicates import QUIET, Array, replicate
from tests.unit.made_results import result

Rounds = Sequence[Sequence[Sequence[float]]]
"""The samples of each turn of each round."""


def timed(rounds: Rounds, *, uncounted: Sequence[int] = ()) -> Timed:
    """A process with these turns, of whose rounds some are not counted."""
    records = [
        RoundRecord(
            requests=sum(map(len, turns)),
            seconds=0.4,
            turns=tuple(map(len, turns)),
            counted=number not in uncounted,
        )
        for number, turns in enumerate(rounds)
    ]
    return Timed(records, [sample for turns in rounds for turn in turns for sample in turn])


def ratio(ours: Rounds, theirs: Rounds, **changes: Sequence[int]) -> float | None:
    return ratio_of_turns(timed(ours, **changes), timed(theirs))


def test_the_ratio_is_that_of_the_medians_of_turns_that_followed_each_other() -> None:
    """The machine is 1, 2, 8 and 4 times as slow; the medians of everything are 3 and 9 times a figure."""
    theirs = [[[1.0, 1.0, 9.0], [2.0, 2.0]], [[8.0], [3.0, 5.0]]]
    ours = [[[3.0], [6.0, 6.0, 1.0]], [[24.0, 24.0], [12.0]]]
    assert ratio(ours, theirs) == pytest.approx(3)
    assert ratio(theirs, ours) == pytest.approx(1 / 3)


def test_a_pair_in_whose_midst_the_machine_changed_does_not_count_for_more_than_one() -> None:
    """Logarithms of 0, 0, 0 and 1 to base 4: of the ten means of two six are 0."""
    assert ratio([[[5.0], [5.0], [5.0], [20.0]]], [[[5.0]] * 4]) == pytest.approx(1)
    assert ratio([[[1.0], [4.0]]], [[[1.0]] * 2]) == pytest.approx(2)
    # 0, 0.5, 1.5; 1, 2; 3 are the means of two.
    assert ratio([[[1.0], [2.0], [8.0]]], [[[1.0]] * 3]) == pytest.approx(2**1.25)


def test_the_side_with_more_turns_is_grouped_and_its_requests_count_together() -> None:
    """Five turns in two groups: the first two, and the other three."""
    ours = [[[2.0], [2.0], [20.0, 20.0], [20.0], [20.0]]]
    assert ratio(ours, [[[1.0], [10.0]]]) == pytest.approx(2)
    assert ratio([[[1.0], [10.0]]], ours) == pytest.approx(0.5)
    # Seven in three: turns 0 and 1, turns 2 to 4, turns 5 and 6.
    seven = [[[1.0], [3.0], [5.0], [5.0], [5.0], [7.0], [9.0]]]
    assert ratio(seven, [[[1.0], [2.5], [4.0]]]) == pytest.approx(2)
    # A group's figure is the median of its requests, and not that of its turns' medians.
    assert ratio([[[9.0], [9.0], [4.0] * 5]], [[[2.0]]]) == pytest.approx(2)


def test_rounds_that_either_side_does_not_count_are_left_out() -> None:
    theirs = [[[1.0], [2.0]], [[1.0], [1.0]], [[4.0], [8.0]]]
    ours = [[[3.0], [6.0]], [[900.0], [900.0]], [[12.0], [24.0]]]
    assert ratio(ours, theirs, uncounted=(1,)) == pytest.approx(3)
    assert ratio_of_turns(timed(theirs), timed(ours, uncounted=(1,))) == pytest.approx(1 / 3)
    assert ratio(ours, theirs) != pytest.approx(3)
    both = timed(ours, uncounted=(0,)), timed(theirs, uncounted=(1,))
    assert ratio_of_turns(*both) == pytest.approx(3), "the last round alone is counted on both sides"


def test_there_is_none_without_a_shared_round_of_turns_and_where_a_sample_is_not_positive() -> None:
    alone = Timed([RoundRecord(requests=2, seconds=0.4)], [1.0, 1.0])
    two = timed([[[1.0], [1.0]]])
    assert ratio_of_turns(alone, alone) is None
    assert ratio_of_turns(two, alone) is None
    assert ratio_of_turns(alone, two) is None
    assert ratio_of_turns(Timed([], []), two) is None
    assert ratio_of_turns(timed([[[1.0], [1.0]]], uncounted=(0,)), two) is None
    assert ratio([[[1.0], [0.0, 1.0, 1.0]]], [[[1.0], [1.0]]]) is None
    assert ratio([[[1.0], [1.0]]], [[[1.0], [-1.0, 1.0, 1.0]]]) is None
    assert ratio([[[0.0]], [[3.0]]], [[[1.0]], [[1.0]]], uncounted=(0,)) == pytest.approx(3)


def evidence(scale: float, counts: Sequence[int], *, turns: bool = True) -> list[Evidence]:
    """Processes whose machine is as fast in each of the turns as in that of others; their requests take `scale`."""
    speeds: Array = np.array([1.0, 2.0, 8.0, 4.0])
    return [
        Evidence(
            number,
            replicate(
                samples={"latency_s": tuple((scale * number * np.repeat(speeds, count)).tolist())},
                rounds=(4 * count,),
                host_samples=(QUIET,),
            ),
            Selection(
                (RoundRecord(requests=4 * count, seconds=1.0, turns=(count,) * 4 if turns else ()),),
                (QUIET,),
                Yardstick(DeviceKind.CPU, None),
            ),
        )
        for number, count in enumerate(counts, 1)
    ]


def summaries(found: Sequence[Evidence]) -> dict[str, MetricSummary]:
    latencies = tuple(each.replicate.samples["latency_s"] for each in found)
    return {
        "latency_s": summarise(Measurement(name="latency_s", samples=latencies)),
        "load_s": summarise(Measurement(name="load_s", samples=((1.0,), (2.0,)))),
    }


def test_a_summary_says_how_many_times_each_other_it_is() -> None:
    ours = evidence(0.3, (1, 2))
    others = {0: evidence(0.1, (3, 1)), 7: evidence(0.6, (1, 1, 1)), 9: []}
    found = with_turns(summaries(ours), ours, others)
    assert set(found["latency_s"].beside) == {0, 7}, "9 has no replicate"
    assert found["latency_s"].beside[0] == pytest.approx((3, 3))
    assert found["latency_s"].beside[7] == pytest.approx((0.5, 0.5)), "two pairs, and one process too many"
    assert found["latency_s"].gains[7] == pytest.approx((2, 2)), "a time is better where it is shorter"
    assert found["load_s"].beside == {}
    backwards = with_turns(summaries(others[0]), others[0], {1: ours})["latency_s"]
    assert backwards.beside[1] == pytest.approx((1 / 3, 1 / 3))


def test_a_summary_says_nothing_unless_every_pair_of_processes_has_a_ratio() -> None:
    ours, theirs = evidence(0.3, (1, 2)), evidence(0.1, (1, 2))
    half = [theirs[0], evidence(0.1, (1, 2), turns=False)[1]]
    assert with_turns(summaries(ours), ours, {0: half})["latency_s"].beside == {}
    assert with_turns(summaries(ours), ours, {0: theirs})["latency_s"].beside != {}


def test_what_turns_say_is_kept_in_json_and_missing_in_what_was_stored_before() -> None:
    rate = summarise(Measurement(name="tokens_per_s", samples=((1.0, 2.0),)))
    metrics = {"tokens_per_s": rate.model_copy(update={"beside": {0: (1.5, 1.25), 12: (2.0, 3.0)}})}
    made = result(1, Role.SINGLE, "v", metrics, Verdict(valid=True))
    read = Result.model_validate_json(made.model_dump_json())
    assert read == made
    document = made.model_dump(mode="json")
    assert document["metrics"]["tokens_per_s"]["beside"] == {"0": [1.5, 1.25], "12": [2.0, 3.0]}
    assert Result.model_validate(document) == made
    stored = StoredResult.model_validate(document).metrics["tokens_per_s"]
    assert stored.beside == {0: (1.5, 1.25), 12: (2.0, 3.0)}
    del document["metrics"]["tokens_per_s"]["beside"]
    assert Result.model_validate(document).metrics["tokens_per_s"].beside == {}
    assert StoredResult.model_validate(document).metrics["tokens_per_s"].beside == {}
