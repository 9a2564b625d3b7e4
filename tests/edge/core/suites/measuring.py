"""Windows of inferences, their histogram, and the golden check of what the model answers."""

import hashlib

from esp32_agent.core import measuring
from esp32_agent.core.measuring import Histogram, run_golden
from esp32_agent.core.timing import PERIOD, Stopwatch
from esp32_agent.port.base import PortError
from tests.edge.core.suites.machine import equal, golden_file, port, raises


def test_each_window_holds_its_seconds_of_inference():
    here = port()
    found = measuring.measure(here, 10, 5, 3)
    equal(
        [(each.count, each.total_us, each.energy_uj) for each in found.windows], [(200, 10000000, 7000)] * 5
    )
    equal(found.latency.summary(), {"count": 1000, "min": 50000, "p50": 50000, "p90": 50000, "p99": 50000})
    equal((found.warmup, here.runner.calls), (3, 1003))


def test_times_are_right_where_the_ticks_wrap():
    here = port()
    here.clock.now = PERIOD - 120000
    found = measuring.measure(here, 1, 2, 0)
    equal((found.latency.min_us, found.latency.max_us), (50000, 50000))
    equal([each.total_us for each in found.windows], [1000000, 1000000])


def test_a_window_longer_than_the_ticks_period_is_summed():
    here = port()
    here.runner.lap_us = 60000000
    watch = Stopwatch(here.clock)
    start = here.clock.now
    found = measuring.measure(here, 1800, 1, 1, watch)
    equal((found.windows[0].count, found.windows[0].total_us), (30, 1800000000))
    equal(watch.us(), here.clock.now - start)


def test_frames_and_garbage_are_outside_of_the_times():
    here = port()

    def frame():
        here.clock.now += 30000
        here.camera.frames += 1
        return b"x" * 12

    def collect():
        here.clock.now += 40000
        here.board.collected += 1

    here.camera.frame, here.board.collect = frame, collect
    found = measuring.measure(here, 10, 2, 1)
    equal([each.total_us for each in found.windows], [10000000, 10000000])
    equal((here.camera.frames, here.board.collected), (3, 2 + 2 * (200 // 64)))


def test_without_a_sensor_energy_is_unknown():
    here = port()
    here.power.uw = here.power.energy_uj = None
    found = measuring.measure(here, 0, 1, 0)
    equal((found.idle_uw, found.windows[0].energy_uj, here.clock.slept_ms), (None, None, 0))


def test_a_clock_that_goes_back_is_an_error():
    here = port()
    here.runner.laps = [-5]
    raises(PortError, measuring.measure, here, 1, 1, 0)


def test_the_runners_own_clock_goes_before_the_cores():
    here = port()
    invoke = here.runner.invoke

    def timed():
        invoke()
        return 20000

    here.runner.invoke = timed
    found = measuring.measure(here, 1, 1, 0)
    equal((found.windows[0].count, found.windows[0].total_us), (50, 1000000))
    here.runner.invoke = lambda: -1
    raises(PortError, measuring.measure, here, 1, 1, 0)


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


def test_percentiles_of_many_times_are_within_one_percent_of_their_rank():
    times, state = [], 1
    for _ in range(700):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        times.append(40000 + (state >> 8) % 9000 + (30000 if state % 50 == 0 else 0))
    found = _filled(times)
    for num, den in ((1, 2), (9, 10), (99, 100), (999, 1000), (1, 1000)):
        wanted = _ranked(times, num, den)
        assert abs(found.percentile(num, den) - wanted) * 100 <= wanted


def test_percentiles_need_as_many_inferences_as_the_engine_asks_for():
    for fewest, name in ((11, "p50"), (64, "p90"), (662, "p99")):
        equal(_filled([5000] * (fewest - 1)).summary()[name], None)
        equal(_filled([5000] * fewest).summary()[name], 5000)


RUN = "0197a1b2-0000-7000-8000-000000000010"


def _ready(data):
    here = port()
    here.storage.files["golden.bin"] = bytearray(data)
    return here


def _run(here, run_id=RUN):
    return run_golden(here.runner, here.storage, "golden.bin", run_id)


def test_the_digest_is_of_the_run_and_all_outputs_in_order():
    outputs = bytes([255] * 4 + [254] * 4 + [253] * 4)
    wanted = hashlib.sha256(RUN.encode() + outputs).digest().hex()
    equal(_run(_ready(golden_file(3))), (3, wanted))


def test_the_outputs_are_the_models_and_not_the_files():
    data = bytearray(golden_file(1))
    data[-4:] = b"zzzz"
    equal(_run(_ready(data)), _run(_ready(golden_file(1))))


def test_a_file_that_is_none_is_refused():
    for data in (b"", b"OGLD", b"<!DOCTYPE html><html>", b"\0" * 200):
        raises(PortError, _run, _ready(data))


def test_a_file_cut_short_is_refused_wherever_it_ends():
    whole = golden_file(2)
    for size in range(len(whole) - 4):
        raises(PortError, _run, _ready(whole[:size]))


def test_a_file_of_another_model_is_refused():
    for place in (8, 12):
        data = bytearray(golden_file(2))
        data[place] += 1
        raises(PortError, _run, _ready(data))


def test_an_absurd_count_is_refused():
    for count in (0, 0xFFFFFFFF):
        data = bytearray(golden_file(1))
        data[4:8] = count.to_bytes(4, "little")
        raises(PortError, _run, _ready(data))
