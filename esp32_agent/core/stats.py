"""Statistics of many integer times in little memory."""

from array import array

FEWEST = ((50, 11), (90, 64), (99, 662))
"""Percentiles, and the least number of inferences with which each is reported: the engine's own rule."""

_STEPS = 64  # buckets for each doubling
_BUCKETS = 20 * _STEPS + _STEPS  # up to 2**26 us, 67 s; what is longer falls into the last one


class Histogram:
    """Counts of microseconds in buckets whose width is at most 1/64 of their value.

    Minimum, maximum, count and total are exact. A percentile is the middle of its bucket, at most 0.8% from the time
    that has that rank. Each doubling in which a time fell takes 256 bytes, and all of them 5.4 KB.
    """

    def __init__(self) -> None:
        self._doublings: list[array[int] | None] = [None] * (_BUCKETS // _STEPS)
        self.count = 0
        self.total_us = 0
        self.min_us = 0
        self.max_us = 0

    def add(self, us: int) -> None:
        if self.count == 0 or us < self.min_us:
            self.min_us = us
        if us > self.max_us:
            self.max_us = us
        self.count += 1
        self.total_us += us
        bucket = _bucket(us)
        counts = self._doublings[bucket // _STEPS]
        if counts is None:
            counts = self._doublings[bucket // _STEPS] = array("I", bytearray(4 * _STEPS))
        counts[bucket % _STEPS] += 1

    def percentile(self, num: int, den: int) -> int:
        """The time of rank ceil(count * num / den), where at least one was added: percentile(9, 10) is p90."""
        rank = max(1, (self.count * num + den - 1) // den)
        seen = 0
        for place, counts in enumerate(self._doublings):
            for step, count in enumerate(counts or ()):
                seen += count
                if seen >= rank:
                    return self._value(place * _STEPS + step)
        return self.max_us

    def _value(self, bucket: int) -> int:
        if bucket == _BUCKETS - 1:
            return self.max_us
        return max(self.min_us, min(self.max_us, _middle(bucket)))

    def summary(self) -> "dict[str, int | None]":
        """count, min, p50, p90 and p99; None for a percentile that so few times do not bound."""
        found: dict[str, int | None] = {"count": self.count, "min": self.min_us if self.count else None}
        for percent, fewest in FEWEST:
            found[f"p{percent}"] = self.percentile(percent, 100) if self.count >= fewest else None
        return found


def _bucket(us: int) -> int:
    """Times below 128 have a bucket each, and from there on every doubling has 64."""
    shift = 0
    while us >= 2 * _STEPS:
        us >>= 1
        shift += 1
    return min(shift * _STEPS + us, _BUCKETS - 1)


def _middle(bucket: int) -> int:
    shift = max(0, bucket // _STEPS - 1)
    return ((bucket - shift * _STEPS) << shift) + ((1 << shift) >> 1)
