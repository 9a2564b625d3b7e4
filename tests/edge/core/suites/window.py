"""Windows of inferences: how many, how long, and what stays outside of their times."""

from esp32_agent.core import window
from esp32_agent.core.ticks import PERIOD, Stopwatch
from esp32_agent.port.base import PortError, RunnerError
from tests.edge.core.suites.check import equal, raises
from tests.edge.core.suites.machine import port


def test_each_window_holds_its_seconds_of_inference():
    here = port()
    found = window.measure(here, 10, 5, 3)
    equal(
        [(each.count, each.total_us, each.energy_uj) for each in found.windows], [(200, 10000000, 7000)] * 5
    )
    equal(found.latency.summary(), {"count": 1000, "min": 50000, "p50": 50000, "p90": 50000, "p99": 50000})
    equal((found.warmup, here.runner.calls), (3, 1003))


def test_a_window_ends_with_the_inference_that_fills_it():
    here = port()
    here.runner.lap_us = 3000001
    found = window.measure(here, 10, 1, 0)
    equal((found.windows[0].count, found.windows[0].total_us), (4, 12000004))


def test_times_are_right_where_the_ticks_wrap():
    here = port()
    here.clock.now = PERIOD - 120000
    found = window.measure(here, 1, 2, 0)
    equal((found.latency.min_us, found.latency.max_us), (50000, 50000))
    equal([each.total_us for each in found.windows], [1000000, 1000000])


def test_a_window_longer_than_the_ticks_period_is_summed():
    here = port()
    here.runner.lap_us = 60000000
    watch = Stopwatch(here.clock)
    start = here.clock.now
    found = window.measure(here, 1800, 1, 1, watch)
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
    found = window.measure(here, 10, 2, 1)
    equal([each.total_us for each in found.windows], [10000000, 10000000])
    equal((here.camera.frames, here.board.collected), (3, 2 + 2 * (200 // 64)))


def test_the_sensor_is_asked_after_each_inference():
    here = port()
    window.measure(here, 10, 1, 5)
    equal(here.power.polls, 200)


def test_idle_power_is_the_mean_of_a_second():
    here = port()
    found = window.measure(here, 0, 1, 0)
    equal((found.idle_uw, here.clock.slept_ms), (500000, 1000))


def test_without_a_sensor_energy_is_unknown():
    here = port()
    here.power.uw = here.power.energy_uj = None
    found = window.measure(here, 0, 1, 0)
    equal((found.idle_uw, found.windows[0].energy_uj, here.clock.slept_ms), (None, None, 0))


def test_a_clock_that_goes_back_is_an_error():
    here = port()
    here.runner.laps = [-5]
    raises(PortError, window.measure, here, 1, 1, 0)


def test_a_clock_that_stands_still_ends_the_window():
    here = port()
    here.runner.lap_us = 0
    most, window._MOST = window._MOST, 70
    try:
        found = window.measure(here, 1, 1, 0)
    finally:
        window._MOST = most
    equal((found.windows[0].count, found.windows[0].total_us), (70, 0))


def test_a_runner_that_fails_says_why():
    here = port()
    here.runner.fault = "The arena is too small."
    equal(raises(RunnerError, window.measure, here, 1, 1, 0), "The arena is too small.")


def test_the_runners_own_clock_goes_before_the_cores():
    here = port()
    invoke = here.runner.invoke

    def timed():
        invoke()
        return 20000

    here.runner.invoke = timed
    found = window.measure(here, 1, 1, 0)
    equal((found.windows[0].count, found.windows[0].total_us), (50, 1000000))
    here.runner.invoke = lambda: -1
    raises(PortError, window.measure, here, 1, 1, 0)
