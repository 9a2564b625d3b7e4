"""Ticks, their wrap-around, and the time of day."""

import time

from esp32_agent.core.timing import PERIOD, Stopwatch, WallClock, add, diff
from tests.edge.core.suites.machine import EPOCH_US, Clock, equal


def test_differences_are_right_across_the_wrap():
    equal(diff(5, PERIOD - 5), 10)
    equal(diff(PERIOD - 5, 5), -10)
    equal(diff(1000, 1000), 0)
    equal(diff(PERIOD // 2 - 1, 0), PERIOD // 2 - 1)
    equal(diff(PERIOD // 2, 0), -(PERIOD // 2))


def test_add_wraps_both_ways():
    equal(add(PERIOD - 1, 1), 0)
    equal(add(0, -1), 0x3FFFFFFF)
    for start in (0, 1, PERIOD - 1):
        for delta in (-7, 0, 7, PERIOD // 2 - 1):
            equal(diff(add(start, delta), start), delta)


def test_they_are_the_interpreters_own():
    if not hasattr(time, "ticks_diff"):  # CPython has no ticks
        return
    period = time.ticks_add(0, -1) + 1
    for start in (0, 1, period - 1, period // 2, period // 2 - 1, 12345):
        for delta in (-9, 0, 9, period // 2 - 1, 1 - period // 2):
            later = time.ticks_add(start, delta)
            equal(add(start, delta, period), later)
            equal(diff(later, start, period), time.ticks_diff(later, start))


def test_a_stopwatch_goes_on_through_many_wraps():
    clock = Clock()
    watch = Stopwatch(clock)
    for _ in range(50):
        clock.now += PERIOD // 2 - 1
        watch.us()
    equal(watch.us(), 50 * (PERIOD // 2 - 1))


def test_a_stopwatch_stands_still_while_its_clock_steps_back():
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 500
    equal(watch.us(), 500)
    clock.now -= 200
    equal(watch.us(), 500)
    clock.now += 100
    equal(watch.us(), 600)


def test_the_wall_clock_is_the_ports_own_while_that_is_set():
    clock = Clock()
    wall = WallClock(clock, Stopwatch(clock))
    equal(wall.unix_us(), EPOCH_US + clock.now)
    wall.refresh(EPOCH_US + 7)  # the port knows better
    equal(wall.unix_us(), EPOCH_US + clock.now)


def test_the_servers_time_goes_on_with_the_ticks():
    clock = Clock(is_set=False)
    wall = WallClock(clock, Stopwatch(clock))
    equal(wall.unix_us(), 0)
    wall.refresh(EPOCH_US)
    for _ in range(5):
        clock.now += PERIOD // 3
        wall.unix_us()
    equal(wall.unix_us(), EPOCH_US + 5 * (PERIOD // 3))
