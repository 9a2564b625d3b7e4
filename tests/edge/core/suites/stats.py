"""The histogram: what is exact, how far a percentile is off, and when there is none."""

from esp32_agent.core.stats import Histogram
from tests.edge.core.suites.check import equal


def _filled(times):
    found = Histogram()
    for us in times:
        found.add(us)
    return found


def _ranked(times, num, den):
    return sorted(times)[max(1, (len(times) * num + den - 1) // den) - 1]


def test_minimum_maximum_count_and_total_are_exact():
    times = [987654321 % (place * 7919 + 13) + 1 for place in range(500)]
    found = _filled(times)
    equal(
        (found.count, found.min_us, found.max_us, found.total_us), (500, min(times), max(times), sum(times))
    )


def test_times_below_128_us_are_exact():
    times = list(range(128))
    found = _filled(times)
    for percent in (1, 10, 50, 90, 99):
        equal(found.percentile(percent, 100), _ranked(times, percent, 100))


def test_a_percentile_is_within_one_percent():
    for shift in range(7, 26):
        for step in range(0, 64, 5):
            us = (1 << shift) + ((step << shift) >> 6) + (step * 37) % (1 << (shift - 6))
            found = _filled([1, us, us, us, 1 << 27])
            off = abs(found.percentile(50, 100) - us)
            assert off * 100 <= us, (us, found.percentile(50, 100))


def test_percentiles_of_many_times_are_within_one_percent_of_their_rank():
    times, state = [], 1
    for _ in range(700):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        times.append(40000 + (state >> 8) % 9000 + (30000 if state % 50 == 0 else 0))
    found = _filled(times)
    for num, den in ((1, 2), (9, 10), (99, 100), (999, 1000), (1, 1000)):
        wanted = _ranked(times, num, den)
        assert abs(found.percentile(num, den) - wanted) * 100 <= wanted


def test_a_percentile_never_leaves_the_range_of_what_was_added():
    found = _filled([1000003] * 20)
    equal((found.percentile(1, 100), found.percentile(99, 100)), (1000003, 1000003))


def test_times_beyond_the_buckets_keep_their_maximum():
    found = _filled([100000000] * 5 + [536870911] * 15)
    equal((found.min_us, found.max_us, found.percentile(90, 100)), (100000000, 536870911, 536870911))
    equal(found.total_us, 500000000 + 15 * 536870911)


def test_percentiles_need_as_many_inferences_as_the_engine_asks_for():
    for fewest, name in ((11, "p50"), (64, "p90"), (662, "p99")):
        equal(_filled([5000] * (fewest - 1)).summary()[name], None)
        equal(_filled([5000] * fewest).summary()[name], 5000)


def test_nothing_added_is_nothing_found():
    equal(Histogram().summary(), {"count": 0, "min": None, "p50": None, "p90": None, "p99": None})


def test_a_time_of_zero_counts():
    equal(_filled([0] * 11).summary(), {"count": 11, "min": 0, "p50": 0, "p90": None, "p99": None})
