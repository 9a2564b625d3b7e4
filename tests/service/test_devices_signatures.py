"""Only what a device signed is read: byte for byte, in time and in sequence; and what comes again counts once."""

import json
import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import func, select

import migrations
from benchmarks.signing_device import MODEL
from optigpu.store.database import Database
from optigpu.store.tables import Device, DeviceReportRow, DeviceRun
from tests.breadth import cases
from tests.servers.process import free_port
from tests.service.device_client import JSON, Claim, EdgeDevice, enrolled, invited, message, now_us, report
from tests.service.processes import Processes, address, environment, eventually, stop, watched_processes
from tests.service.serving import Served, serving

LIMIT = 65_536
YEAR_2000_US = 946_684_800_000_000
UUID = "01980000-0000-7000-8000-000000000000"
KILLED_AFTER_S = 0.02


@pytest.fixture
def device(service: Served) -> EdgeDevice:
    """A device that has just enrolled."""
    return enrolled(service.client, service.database)


def count_reports(service: Served) -> int:
    with service.database.read() as session:
        return len(session.scalars(select(DeviceReportRow.id)).all())


def assert_refused(answer: httpx.Response) -> None:
    assert answer.status_code == 401, answer.text
    assert answer.headers["www-authenticate"] == "OptiGPU1"
    problem = answer.json()
    assert problem["detail"].startswith("The signature does not match")
    assert "server_time_us" not in problem


def signed(device: EdgeDevice) -> tuple[bytes, str]:
    """A message with one report, and its header."""
    device.sequence += 1
    body = json.dumps(message(report())).encode()
    return body, device.header(device.path("measurements"), body)


@pytest.mark.slow
@pytest.mark.parametrize("part", cases(["sig", "seq", "key", "time", "boot", "fw"]))
def test_every_bit_of_every_field_is_signed(service: Served, device: EdgeDevice, part: str) -> None:
    """Of the header's text, each bit of each character of the field's value."""
    body, header = signed(device)
    found = re.search(rf"{part}=([^,]+)", header)
    assert found is not None
    encoded = header.encode()
    for at in range(*found.span(1)):
        for bit in range(7):  # the eighth would be no ASCII
            flipped = bytearray(encoded)
            flipped[at] ^= 1 << bit
            if flipped[at] < 0x20 or flipped[at] == 0x7F or flipped.endswith(b" "):
                continue  # no client sends control characters in a header, or a space at its end
            assert_refused(device.send("measurements", body, flipped.decode()))
    assert count_reports(service) == 0
    assert device.send("measurements", body, header).status_code == 200


@pytest.mark.long
def test_every_bit_of_the_body_is_signed(any_service: Served) -> None:
    device = enrolled(any_service.client, any_service.database)
    body, header = signed(device)
    for at in range(len(body)):
        flipped = bytearray(body)
        flipped[at] ^= 1 << (at % 8)
        assert_refused(device.send("measurements", bytes(flipped), header))


def test_a_body_that_was_changed_is_refused(any_service: Served) -> None:
    device = enrolled(any_service.client, any_service.database)
    body, header = signed(device)
    for changed in (body[:-1], body + b" ", b" " + body, b"", body.replace(b"128", b"129", 1)):
        assert_refused(device.send("measurements", changed, header))


def test_the_signature_is_for_one_path_and_one_device(service: Served, device: EdgeDevice) -> None:
    body, header = signed(device)
    other = enrolled(service.client, service.database)
    for path in (device.path("runs"), device.path("key"), other.path("measurements")):
        answer = service.client.post(path, content=body, headers=JSON | {"Authorization": header})
        assert_refused(answer)
    signed_for_other = device.header(other.path("measurements"), body)
    assert_refused(
        service.client.post(
            other.path("measurements"), content=body, headers=JSON | {"Authorization": signed_for_other}
        )
    )


@pytest.mark.parametrize(
    "header",
    [
        None,
        "Bearer og_0000",
        "OptiGPU1 key=",
        "OptiGPU2 {}",
        "optigpu1 {}",
        "OptiGPU1 {},x=1",
    ],
)
def test_what_is_no_signature_is_refused(service: Served, device: EdgeDevice, header: str | None) -> None:
    body, right = signed(device)
    headers = {} if header is None else {"Authorization": header.format(right.removeprefix("OptiGPU1 "))}
    assert_refused(service.client.post(device.path("measurements"), content=body, headers=JSON | headers))


@pytest.mark.parametrize(
    "changes",
    [
        {"seq": "01"},
        {"seq": "1e3"},
        {"seq": "9" * 16},
        {"time": "1.5"},
        {"time": "\u0661"},
        {"boot": "00C0FFEE00C0FFEE"},
        {"fw": "0" * 63},
    ],
)
def test_a_field_in_another_form_is_refused_although_it_is_signed(
    any_service: Served, changes: dict[str, str]
) -> None:
    device = enrolled(any_service.client, any_service.database)
    body = json.dumps(message()).encode()
    header = device.header(device.path("measurements"), body, **{"seq": 1} | changes)
    answer = any_service.client.post(
        device.path("measurements"),
        content=body,
        headers=[(b"Content-Type", b"application/json"), (b"Authorization", header.encode())],
    )
    assert_refused(answer)


def test_two_signatures_are_none(service: Served, device: EdgeDevice) -> None:
    body, header = signed(device)
    headers = [("Content-Type", "application/json"), *[("Authorization", header)] * 2]
    assert_refused(service.client.post(device.path("measurements"), content=body, headers=headers))


def test_an_unknown_key_and_a_wrong_one_have_one_answer(service: Served, device: EdgeDevice) -> None:
    body, _ = signed(device)
    for key_id in (f"{device.id}.2", f"{device.id}.999999", f"{UUID}.1"):
        assert_refused(
            device.send("measurements", body, device.header(device.path("measurements"), body, key=key_id))
        )
    device.key = bytes(32)
    assert_refused(device.send("measurements", body, device.header(device.path("measurements"), body)))


def test_nothing_is_parsed_before_the_signature_is_right(service: Served, device: EdgeDevice) -> None:
    for body in (b"{", b"[" * 50_000, b"\xff", b""):
        assert_refused(device.send("measurements", body, "OptiGPU1 nothing"))
        assert device.post("measurements", body).status_code == 400


@pytest.mark.parametrize("time_us", [0, YEAR_2000_US])
def test_a_clock_that_was_never_set_is_accepted_and_flagged(
    service: Served, device: EdgeDevice, time_us: int
) -> None:
    answer = device.post("measurements", message(report(started_us=time_us)), time=time_us)
    assert answer.status_code == 200, answer.text
    assert answer.json()["reports"][0]["flags"] == ["clock_unsynchronised"]
    assert abs(answer.json()["server_time_us"] - now_us()) < 60_000_000
    assert service.client.get(f"/v1/devices/{device.id}").json()["clock_synchronised"] is False


@pytest.mark.parametrize("offset_s", [-301, 301])
def test_a_clock_that_is_wrong_is_told_the_time(service: Served, device: EdgeDevice, offset_s: int) -> None:
    answer = device.post("measurements", message(report()), time=now_us() + offset_s * 1_000_000)
    assert answer.status_code == 401
    assert count_reports(service) == 0
    server_time_us = answer.json()["server_time_us"]
    assert abs(server_time_us - now_us()) < 60_000_000
    assert device.post("measurements", message(report()), time=server_time_us).status_code == 200


@pytest.mark.parametrize("offset_s", [-290, 290])
def test_a_clock_that_is_a_little_wrong_will_do(any_service: Served, offset_s: int) -> None:
    device = enrolled(any_service.client, any_service.database)
    answer = device.post("measurements", message(), time=now_us() + offset_s * 1_000_000)
    assert answer.status_code == 200


def test_a_report_of_the_future_is_flagged(any_service: Served) -> None:
    device = enrolled(any_service.client, any_service.database)
    (answer,) = device.reports(report(started_us=now_us() + 3_600_000_000))
    assert "clock_unsynchronised" in answer["flags"]


def test_the_same_bytes_again_get_the_first_answer(service: Served, device: EdgeDevice) -> None:
    body, header = signed(device)
    first, again = (device.send("measurements", body, header).json() for _ in range(2))
    (answer,) = first["reports"]
    assert again["reports"] == [answer | {"duplicate": True}]
    assert answer["duplicate"] is False
    assert count_reports(service) == 1


def test_a_copy_changes_nothing_of_the_devices_record(service: Served, device: EdgeDevice) -> None:
    body = json.dumps(message(queue_depth=7)).encode()
    device.sequence += 1
    header = device.header(device.path("measurements"), body)
    device.send("measurements", body, header)
    device.post("measurements", message(queue_depth=3))
    before = service.client.get(f"/v1/devices/{device.id}").json()
    assert before["queue_depth"] == 3
    assert device.send("measurements", body, header).status_code == 200
    assert service.client.get(f"/v1/devices/{device.id}").json() == before


def test_a_request_of_an_earlier_boot_does_not_undo_a_later_one(service: Served, device: EdgeDevice) -> None:
    old = message(reset_reason="power_on")
    device.post("measurements", old)
    device.boot, device.sequence = "b" * 16, 0
    device.post("measurements", message(reset_reason="watchdog"))
    device.boot, device.sequence = "00c0ffee00c0ffee", 5
    device.post("measurements", old)
    view = service.client.get(f"/v1/devices/{device.id}").json()
    assert (view["boot_id"], view["reset_reason"]) == ("b" * 16, "watchdog")


def test_sequences_may_be_out_of_order_but_not_far_behind(service: Served, device: EdgeDevice) -> None:
    for sequence, status in ((2000, 200), (1999, 200), (976, 200), (975, 409), (1, 409), (2001, 200)):
        device.sequence = sequence - 1
        answer = device.post("measurements", message(report(sequence)))
        assert answer.status_code == status, sequence
    assert count_reports(service) == 4
    device.boot, device.sequence = "b" * 16, 0
    assert device.post("measurements", message()).status_code == 200


def test_a_run_is_begun_once_for_one_request(service: Served, device: EdgeDevice) -> None:
    device.sequence += 1
    body = json.dumps({"schema": 1, "model_sha256": MODEL}).encode()
    header = device.header(device.path("runs"), body)
    answers = [device.send("runs", body, header) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 201]
    assert answers[0].json() == answers[1].json()
    other = json.dumps({"schema": 1, "model_sha256": "0" * 64}).encode()
    assert device.send("runs", other, device.header(device.path("runs"), other)).status_code == 409
    with service.database.read() as session:
        assert len(session.scalars(select(DeviceRun.id)).all()) == 1


def at_once(service: Served, count: int, send: Callable[[httpx.Client], Any]) -> list[Any]:
    """What so many clients of their own get at the same moment."""
    gate = threading.Barrier(count)

    def call(_: int) -> Any:
        with httpx.Client(base_url=service.url, timeout=30) as own:
            gate.wait()
            return send(own)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(call, range(count)))


@pytest.mark.slow
def test_copies_at_the_same_moment_are_stored_once(service: Served, device: EdgeDevice) -> None:
    body, header = signed(device)
    answers = at_once(
        service,
        8,
        lambda own: EdgeDevice(own, device.id, device.key).send("measurements", body, header).json(),
    )
    found = [answer["reports"][0] for answer in answers]
    assert sorted(each["duplicate"] for each in found) == [False, *[True] * 7]
    assert len({each["report_id"] for each in found}) == 1
    assert count_reports(service) == 1


def test_claims_at_the_same_moment_make_one_device(service: Served) -> None:
    code = invited(service.database)
    statuses = at_once(
        service, 4, lambda own: own.post("/v1/devices/claim", json=Claim(code).body).status_code
    )
    assert sorted(statuses) == [201, 403, 403, 403]


def test_a_body_has_a_limit(service: Served, device: EdgeDevice) -> None:
    exact = json.dumps(message(report())).encode().ljust(LIMIT)
    assert device.post("measurements", exact).status_code == 200
    assert device.post("measurements", exact + b" ").status_code == 413


@pytest.mark.slow
def test_behind_a_proxy_the_path_is_signed_with_its_prefix_or_without(tmp_path: Any) -> None:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", root_path="/optigpu") as served:
        device = enrolled(served.client, served.database)
        body = json.dumps(message()).encode()
        short = device.path("measurements")
        for sequence, (sent, signed_path) in enumerate(
            [(short, short), (f"/optigpu{short}", short), (f"/optigpu{short}", f"/optigpu{short}")], start=1
        ):
            header = device.header(signed_path, body, seq=sequence)
            answer = served.client.post(sent, content=body, headers=JSON | {"Authorization": header})
            assert answer.status_code == 200, (sent, signed_path)


def count(database: Database, table: type[Device] | type[DeviceReportRow]) -> int:
    with database.read() as session:
        return session.scalars(select(func.count()).select_from(table)).one()


def started(processes: Processes, port: int) -> "subprocess.Popen[bytes]":
    """The service, once it answers."""
    process = processes.start("api", "--port", str(port))
    assert eventually(lambda: answers(address(processes)))
    return process


def kill_while_it_answers(
    process: "subprocess.Popen[bytes]", processes: Processes, request: httpx.Request
) -> None:
    """Sends the request, reads no answer, and kills the service a moment later."""
    url = urlsplit(address(processes))
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((url.hostname or "", url.port or 0)) as connection:
        start = f"{request.method} {request.url.path} HTTP/1.1\r\n{head}\r\n"
        connection.sendall(start.encode() + request.content)
        time.sleep(KILLED_AFTER_S)
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/healthz").is_success
    except httpx.TransportError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("database_url", ["sqlite", "postgresql"], indirect=True)
def test_a_claim_and_a_report_outlive_the_end_of_the_service(tmp_path: Path, database_url: str) -> None:
    migrations.upgrade(database_url)
    port = free_port()
    variables = environment(tmp_path, OPTIGPU_DATABASE_URL=database_url)
    with (
        closing(Database(database_url)) as database,
        watched_processes(tmp_path, variables) as processes,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        claim = Claim(invited(database))
        claiming = http.build_request("POST", "/v1/devices/claim", json=claim.body)
        kill_while_it_answers(started(processes, port), processes, claiming)

        process = started(processes, port)
        answer = http.send(claiming)
        assert answer.status_code in (200, 201)
        assert count(database, Device) == 1
        device = EdgeDevice(http, answer.json()["device_id"], claim.key)
        device.sequence = 1
        body = httpx.Request("POST", "http://x", json=message(report(1), report(2))).content
        headers = JSON | {"Authorization": device.header(device.path("measurements"), body)}
        sending = http.build_request("POST", device.path("measurements"), content=body, headers=headers)
        kill_while_it_answers(process, processes, sending)

        process = started(processes, port)
        answers = http.send(sending).json()["reports"]
        assert len({each["duplicate"] for each in answers}) == 1, "both were stored, or none"
        assert count(database, DeviceReportRow) == 2
        stop(process)
