"""`python -m api` as a process: what it loads, what it weighs, when it refuses to start."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

import migrations
from api import logs
from api.__main__ import listen, main
from api.settings import ServiceSettings
from optigpu.store import keys
from optigpu.store.database import Database
from tests.service.processes import Processes, eventually, watched_processes

MOST_BYTES = 200 * 10**6
LISTENS = "OptiGPU listens on "
EVERYTHING = (
    "/readyz", "/", "/docs", "/openapi.json", "/metrics", "/v1/leaderboard?format=csv", "/v1/schema/techniques",
)  # fmt: skip
HEAVY = ("torch", "transformers", "tensorflow", "triton", "matplotlib", "opentelemetry.sdk")


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Variables for a service of its own, without a worker."""
    return {
        "OPTIGPU_DATABASE_URL": f"sqlite:///{folder / 'optigpu.db'}",
        "OPTIGPU_DATA_DIR": str(folder),
        "OPTIGPU_EMBEDDED_WORKER": "false",
        **more,
    }


def address(processes: Processes) -> str:
    """Where the service listens, read from what it printed."""

    def printed() -> str:
        lines = processes.printed().splitlines()
        return next((line.removeprefix(LISTENS) for line in lines if line.startswith(LISTENS)), "")

    found = eventually(printed)
    assert found, processes.printed()
    return found


Refuse = Callable[..., tuple[int, str]]


@pytest.fixture
def refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Runs the command in this process: the exit status and the words of a service that does not start."""

    def command(*arguments: str, **variables: str) -> tuple[int, str]:
        for name, value in (environment(tmp_path) | variables).items():
            monkeypatch.setenv(name, value)
        status = main(arguments)
        printed = capsys.readouterr()
        assert printed.out == ""
        return status, printed.err

    monkeypatch.setattr(logs, "configure", lambda *_, **__: None)  # the tests' own logging stays as it is
    return command


@pytest.mark.slow
def test_the_service_loads_nothing_heavy() -> None:
    code = f"import sys, json, api.app, api.__main__; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == []


@pytest.mark.slow
def test_it_serves_within_its_memory_and_stops_at_ctrl_c(tmp_path: Path) -> None:
    with watched_processes(tmp_path, environment(tmp_path)) as processes:
        process = processes.start("api", "--port", "0")
        url = address(processes)
        for path in EVERYTHING:
            assert httpx.get(url + path, timeout=30).status_code == 200
        assert psutil.Process(process.pid).memory_info().rss < MOST_BYTES
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


@pytest.mark.slow
def test_it_stops_while_somebody_follows_a_job(tmp_path: Path) -> None:
    with watched_processes(tmp_path, environment(tmp_path)) as processes:
        process = processes.start("api", "--port", "0")
        url = address(processes)
        job = httpx.post(f"{url}/v1/jobs", json={"workload": {"kind": "matmul"}}, timeout=30).json()
        with httpx.stream("GET", f"{url}{job['links']['events']}", timeout=30) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: state"
            process.terminate()
            assert process.wait(30) == 0
            list(lines)


@pytest.mark.slow
def test_the_log_of_a_service_is_json_with_the_request_and_sigterm_stops_it(
    tmp_path: Path, redis_url: str
) -> None:
    variables = environment(tmp_path, OPTIGPU_REDIS_URL=redis_url)
    migrations.upgrade(variables["OPTIGPU_DATABASE_URL"])
    with watched_processes(tmp_path, variables) as processes:
        process = processes.start("api", "--port", "0")
        url = address(processes)
        answer = httpx.get(f"{url}/v1/jobs?a%0Ab", timeout=30)
        job = httpx.post(f"{url}/v1/jobs", json={"workload": {"kind": "matmul"}}, timeout=30).json()
        for path in ("", "/results"):
            assert httpx.get(f"{url}/v1/jobs/{job['id']}{path}", timeout=30).status_code == 200
        process.terminate()
        assert process.wait(30) == 0
        lines = [line for line in processes.printed().splitlines() if not line.startswith(LISTENS)]
        entries = [json.loads(line) for line in lines]
        assert answer.status_code == 422  # there is no such parameter
        served = next(entry for entry in entries if entry["event"] == "request")
        assert served["request_id"] == answer.headers["x-request-id"]
        assert (served["path"], served["status"], served["level"]) == ("/v1/jobs", 422, "info")
        assert "job_id" not in served
        of_requests = [entry for entry in entries if entry["logger"] == "api.requests"]
        assert all(entry["request_id"] for entry in of_requests)
        assert [entry["job_id"] for entry in of_requests[1:]] == [job["id"]] * 3


def test_others_may_not_reach_it_without_a_key(refuse: Refuse) -> None:
    status, words = refuse("--host", "0.0.0.0", "--port", "0")
    assert status == 2
    assert "OPTIGPU_API_KEY" in words


@pytest.mark.slow
def test_the_process_itself_refuses_in_a_sentence(tmp_path: Path) -> None:
    with watched_processes(tmp_path, environment(tmp_path)) as processes:
        process = processes.start("api", "--host", "0.0.0.0", "--port", "0")
        assert process.wait(60) == 2
        assert "OPTIGPU_API_KEY" in processes.printed()
        assert "Traceback" not in processes.printed()


@pytest.mark.slow
@pytest.mark.parametrize("source", ["environment", "database"])
def test_others_may_reach_it_with_a_key(tmp_path: Path, source: str) -> None:
    key = {"OPTIGPU_API_KEY": "a-first-key-that-is-long-enough"} if source == "environment" else {}
    variables = environment(tmp_path)
    if source == "database":
        migrations.upgrade(variables["OPTIGPU_DATABASE_URL"])
        database = Database(variables["OPTIGPU_DATABASE_URL"])
        with database.write() as session:
            keys.create(session, "somebody", ["read"])
        database.close()
    with watched_processes(tmp_path, variables | key) as processes:
        process = processes.start("api", "--host", "0.0.0.0", "--port", "0")
        url = address(processes).replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/jobs", timeout=30).status_code == 401
        process.terminate()
        process.wait(30)


def test_a_port_that_is_taken_is_said(refuse: Refuse) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        status, words = refuse("--port", str(taken.getsockname()[1]))
    assert status == 2
    assert "--port" in words


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OPTIGPU_API_KEY", "short"),
        ("OPTIGPU_RATE_LIMIT", "fast"),
        ("OPTIGPU_PORT", "70000"),
        ("OPTIGPU_LOG_LEVEL", "LOUD"),
        ("OPTIGPU_ROOT_PATH", "/opti gpu"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(refuse: Refuse, variable: str, value: str) -> None:
    status, words = refuse("--host", "127.0.0.1", **{variable: value})
    assert status == 2
    assert variable in words
    assert variable != "OPTIGPU_API_KEY" or value not in words


def test_a_database_url_that_cannot_be_used_is_said(refuse: Refuse) -> None:
    status, words = refuse("--port", "0", OPTIGPU_DATABASE_URL="mysql://somewhere/else")
    assert status == 1
    assert "postgresql" in words


def test_a_data_folder_that_cannot_be_made_is_said(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = f"sqlite:///{tmp_path / 'file' / 'optigpu.db'}"
    status, words = refuse("--port", "0", OPTIGPU_DATABASE_URL=url)
    assert status == 1
    assert words.startswith(
        f"The folder of the database, {tmp_path / 'file'}, cannot be made (File exists); name"
    )


def test_a_server_that_is_down_is_said(refuse: Refuse) -> None:
    away = "postgresql://nobody.0.0.1:1/none"
    status, words = refuse("--port", "0", OPTIGPU_DATABASE_URL=away)
    assert status == 1
    assert words.endswith("Check that it runs, and its address in OPTIGPU_DATABASE_URL.\n")


def test_an_answer_does_not_wait_for_the_acknowledgement_of_its_headers(tmp_path: Path) -> None:
    settings = ServiceSettings(database_url=f"sqlite:///{tmp_path / 'optigpu.db'}", port=0)
    with listen(settings) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
