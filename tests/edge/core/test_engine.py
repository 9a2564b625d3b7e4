"""The core against the engine's own rules and Python's own library."""

import hashlib
import hmac

from hypothesis import given
from hypothesis import strategies as st

from esp32_agent.core.signing import hmac_sha256
from esp32_agent.core.stats import FEWEST, Histogram
from optigpu.statistics.intervals import fewest_for


def test_percentiles_need_as_many_samples_as_in_the_engine() -> None:
    assert [(percent, fewest_for(percent)) for percent, _ in FEWEST] == list(FEWEST)


@given(key=st.binary(max_size=200), message=st.binary(max_size=300))
def test_hmac_is_the_librarys(key: bytes, message: bytes) -> None:
    assert hmac_sha256(key, message) == hmac.new(key, message, hashlib.sha256).digest()


@given(st.lists(st.integers(0, (1 << 26) - 1), min_size=1, max_size=200), st.integers(1, 100))
def test_a_percentile_is_within_one_percent_of_its_rank(times: list[int], percent: int) -> None:
    histogram = Histogram()
    for us in times:
        histogram.add(us)
    wanted = sorted(times)[max(1, -(-len(times) * percent // 100)) - 1]
    assert abs(histogram.percentile(percent, 100) - wanted) * 128 <= wanted
