"""The service dies while a device waits for an answer; the device sends the same again, and nothing is there twice."""

import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import func, select

import migrations
from optigpu.store.database import Database
from optigpu.store.tables import Device, DeviceReportRow
from tests.service.device_client import JSON, Claim, EdgeDevice, invited, message, report
from tests.service.processes import Processes, stop, watched_processes
from tests.service.test_api_process import address, environment

KILLED_AFTER_S = 0.02


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def count(database: Database, table: type[Device] | type[DeviceReportRow]) -> int:
    with database.read() as session:
        return session.scalars(select(func.count()).select_from(table)).one()


def started(processes: Processes, port: int) -> "subprocess.Popen[bytes]":
    """The service, once it answers."""
    process = processes.start("api", "--port", str(port))
    wait_for(address(processes))
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


def wait_for(url: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/healthz").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.05)
    pytest.fail("The service does not answer.")


@pytest.mark.slow
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
