"""Energy from a wall meter: a real file that grows, a real HTTP server, and meters that lie or stop."""

import json
import re
import time
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from optigpu.conductor.processes.confinement import child_variables, recorded_variables
from optigpu.hardware import wall_meter
from optigpu.hardware.sensors import SensorError, Ticker
from optigpu.hardware.wall_meter import MOST_W, STALE_S, WALL_METER, WallFile, WallReading
from optigpu.meters.base import Reading
from optigpu.meters.energy import EnergyMeter
from optigpu.workloads.generate import Generate
from tests.engine.meter_contexts import doing, tickers
from tests.unit.scripted_service import Answer, Call, scripted_service

IDLE_W, REQUEST_J = 20.0, 3.0
TOKENS = Generate(new_tokens=5, batch_size=2)

Line = Callable[[float, float], str]
"""What a meter says at a time when it has counted so many joules."""


def as_json(at_s: float, joules: float) -> str:
    return json.dumps({"time": at_s, "joules": joules, "volts": 230})


def as_columns(at_s: float, joules: float) -> str:
    return f"{datetime.fromtimestamp(at_s, UTC).isoformat()}, {joules}"


class Plug:
    """A machine at a plug that draws 20 W, and for each request 3 J more; `say` is called every 10 ms."""

    def __init__(self, say: Callable[[str], object], line: Line = as_json, step_j: float = 0.001) -> None:
        self._say, self._line, self._step_j = say, line, step_j
        self._began_s = time.time()
        self.spent_j = 0.0
        self.error_s, self.error_j = 0.0, 0.0
        self.stopped = False

    def show(self) -> None:
        if self.stopped:
            return
        now_s = time.time()
        joules = IDLE_W * (now_s - self._began_s) + self.spent_j
        whole = round(joules / self._step_j) * self._step_j
        self._say(self._line(now_s + self.error_s, max(0.0, 1000 + whole + self.error_j)))

    def request(self) -> None:
        time.sleep(0.02)
        self.spent_j += REQUEST_J


@pytest.fixture(autouse=True)
def close_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plug's clock is this machine's own, so that windows need not wait for a whole second."""
    monkeypatch.setattr(wall_meter, "SLACK_S", 0.05)


def appending(path: Path) -> Callable[[str], object]:
    def say(line: str) -> None:
        with path.open("a") as file:
            file.write(line + "\n")

    return say


def metered(
    folder: Path,
    plug: Plug,
    work: Callable[[], object] | None = None,
    longest_s: float = 3,
    idle_s: float = 0.2,
) -> Reading:
    context, _ = doing(folder, work or plug.request, TOKENS)
    meter = EnergyMeter(rest_s=0, idle_s=idle_s, window_s=0.6, longest_s=longest_s, root=folder)
    plug.show()
    with Ticker(plug.show, 0.01):
        return meter.read(context)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WALL_METER, str(tmp_path / "plug.log"))
    return tmp_path / "plug.log"


def reason_of(reading: Reading) -> str:
    (reason,) = set(reading.reasons.values())
    assert set(reading.reasons) == set(EnergyMeter.metrics)
    assert reading.values == {}
    assert reading.facts.energy is None
    assert tickers() == 0
    return reason


@pytest.mark.slow
@pytest.mark.parametrize("line", [as_json, as_columns])
def test_a_file_that_grows_gives_joules_above_idle(tmp_path: Path, file: Path, line: Line) -> None:
    reading = metered(tmp_path, Plug(appending(file), line))
    facts = reading.facts.energy
    assert facts is not None
    assert reading.values["energy_j"] == pytest.approx(REQUEST_J, rel=0.2)
    assert reading.values["j_per_token"] == pytest.approx(reading.values["energy_j"] / 10)
    assert facts.idle_w == pytest.approx(IDLE_W, rel=0.2)
    assert reading.values["power_w"] > 2 * IDLE_W
    assert facts.source == f"wall meter {file}"
    assert "the whole machine" in facts.scope
    assert facts.update_period_s == pytest.approx(0.1, rel=0.5), "it is looked at so often"


@pytest.mark.slow
def test_an_address_gives_joules_and_its_secrets_stay_out_of_the_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(wall_meter.WallAddress, "period_s", 0.05)

    def answer(call: Call) -> Answer:
        known = call.headers["authorization"] == f"Basic {b64encode(b'user:word').decode()}"
        return Answer(body=said[-1]) if known and call.path == "/meter?key=secret" else Answer(401)

    with scripted_service(answer) as (address, _):
        monkeypatch.setenv(WALL_METER, f"{address.replace('//', '//user:word@')}/meter?key=secret")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        # Long enough for a machine whose other work keeps the looks apart.
        reading = metered(tmp_path, Plug(said.append), longest_s=10, idle_s=1.0)
    assert reading.reasons == {
        "j_per_image": "generate classifies no images",
        "j_per_1000_tokens": "generate learns no tokens",
    }
    facts = reading.facts.energy
    assert facts is not None
    assert reading.values["energy_j"] == pytest.approx(REQUEST_J, rel=0.2)
    assert facts.source.startswith("wall meter http://127.0.0.1:")
    assert facts.source.endswith("/meter")


@pytest.mark.slow
def test_a_coarse_counter_lengthens_the_windows(tmp_path: Path, file: Path) -> None:
    """Steps of 3.9 J, which 20 W take 0.2 s for: ten of them are 2 s of rest instead of 0.2 s."""
    reading = metered(tmp_path, Plug(appending(file), step_j=3.9), longest_s=10)
    facts = reading.facts.energy
    assert facts is not None
    assert facts.idle_s > 1.5
    assert facts.idle_w == pytest.approx(IDLE_W, rel=0.1)
    assert reading.values["energy_j"] == pytest.approx(REQUEST_J, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "said"),
    [
        ({"error_j": -900.0}, r"The joules of the wall meter .* fell from 1\d+\.\d to \d+\.\d"),
        ({"error_j": 9 * MOST_W}, r"rose by 90\d+ J in \d+\.\d+ s, which is more than 100 kW"),
        ({"error_s": -1.0}, r"The time of the wall meter .* went back from 20.* to 20"),
        ({"error_s": 300.0}, r"is 300 s ahead of this machine's"),
        # A busy machine looks so seldom that a stop cannot be told from a meter that counts in large steps.
        ({"stopped": True}, r"gave no new reading for \d+\.?\d* s: it has stopped|counted up \d+ times in"),
    ],
)
def test_a_meter_that_lies_or_stops_is_a_reason_and_no_guess(
    tmp_path: Path, file: Path, error: dict[str, float], said: str
) -> None:
    plug = Plug(appending(file))

    def lie() -> None:
        plug.request()
        vars(plug).update(error)

    reading = metered(tmp_path, plug, lie)
    assert re.search(said, reason_of(reading)), reading.reasons


def test_a_meter_that_stopped_long_ago_is_a_reason_at_once(tmp_path: Path, file: Path) -> None:
    file.write_text(as_json(time.time() - STALE_S - 5, 7.0) + "\n")
    context, request = doing(tmp_path, lambda: None, TOKENS)
    reason = reason_of(EnergyMeter(rest_s=3600).read(context))
    assert "is 35 s old: it has stopped, or its clock is behind" in reason
    assert request.runs == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "There is no file of the wall meter"),
        ("", "has no reading yet"),
        ("12:00,3\n", "gave '12:00,3', which is not a reading such as"),
        ("2026-01-01T00:00:00,3\n", "which is not a reading"),
        ('{"time": 1.76e9, "joules": NaN}\n', "which is not a reading"),
        ("1.76e9,-3\n", "which is not a reading"),
    ],
)
def test_a_file_without_a_reading_is_a_reason(file: Path, text: str | None, said: str) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(SensorError, match=said):
        WallFile(file).newest()


def test_the_last_complete_line_counts(file: Path) -> None:
    file.write_text("time,joules\n" + "1760000000,1\n" * 1000 + "1760000009.5,8.25\n\n1760000010,9")
    reading = WallFile(file).newest()
    assert reading == WallReading(time=datetime.fromtimestamp(1760000009.5, UTC), joules=8.25)


def test_measuring_processes_know_the_meter_and_results_do_not_record_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(WALL_METER, "http://user:word@meter.local/")
    assert child_variables(1)[WALL_METER] == "http://user:word@meter.local/"
    assert WALL_METER not in recorded_variables()
