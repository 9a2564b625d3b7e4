"""`python -m api` as a process: what it loads and weighs, when it refuses to start, and a path of a reverse proxy."""

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import httpx
import psutil
import pytest

import migrations
from api import __main__
from api.__main__ import main
from optigpu.store import keys
from optigpu.store.database import Database
from tests.breadth import cases
from tests.service.pages import Page
from tests.service.processes import LISTENS, address, environment, stop, watched_processes
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving

MOST_BYTES = 200 * 10**6
EVERYTHING = (
    "/readyz", "/", "/docs", "/openapi.json", "/metrics", "/v1/leaderboard?format=csv", "/v1/schema/techniques",
)  # fmt: skip
HEAVY = ("torch", "transformers", "tensorflow", "triton", "resvg_py", "opentelemetry.sdk")
Refuse = Callable[..., tuple[int, str]]
PREFIX = "/optigpu"


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

    monkeypatch.setattr(__main__, "configure", lambda *_, **__: None)  # the tests' own logging stays as it is
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
def test_others_may_reach_it_with_a_key(tmp_path: Path) -> None:
    variables = environment(tmp_path)
    migrations.upgrade(variables["OPTIGPU_DATABASE_URL"])
    with closing(Database(variables["OPTIGPU_DATABASE_URL"])) as database, database.write() as session:
        keys.create(session, "somebody", ["read"])
    with watched_processes(tmp_path, variables) as processes:
        process = processes.start("api", "--host", "0.0.0.0", "--port", "0")
        url = address(processes).replace("0.0.0.0", "127.0.0.1")
        assert httpx.get(f"{url}/v1/jobs", timeout=30).status_code == 401
        stop(process)


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


def test_a_data_folder_that_cannot_be_made_is_said(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    url = f"sqlite:///{tmp_path / 'file' / 'optigpu.db'}"
    status, words = refuse("--port", "0", OPTIGPU_DATABASE_URL=url)
    assert status == 1
    assert words.startswith(
        f"The folder of the database, {tmp_path / 'file'}, cannot be made (File exists); name"
    )


class Removing(httpx.BaseTransport):
    """A proxy that removes the path before it passes a request on, and answers 404 to other paths."""

    def __init__(self) -> None:
        self._direct = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """The service's answer."""
        if not request.url.path.startswith(f"{PREFIX}/"):
            return httpx.Response(404, text="This path is another service's.")
        path = request.url.raw_path.removeprefix(PREFIX.encode())
        request.url = request.url.copy_with(raw_path=path)
        return self._direct.handle_request(request)

    def close(self) -> None:
        """Closes the connections to the service."""
        self._direct.close()


@pytest.fixture
def prefixed(tmp_path: Path) -> Iterator[Served]:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", root_path="optigpu/") as served:
        yield served


@pytest.fixture(params=cases(["removes", "passes on"], 1))
def proxied(request: pytest.FixtureRequest, prefixed: Served) -> Iterator[httpx.Client]:
    """A client that sees the service under the path alone."""
    transport = Removing() if request.param == "removes" else httpx.HTTPTransport()
    with httpx.Client(base_url=prefixed.url, transport=transport, timeout=30) as client:
        yield client


def a_measured_job(served: Served, client: httpx.Client) -> httpx.Response:
    answer = client.post(f"{PREFIX}/v1/jobs", json=MATMUL)
    results = [
        a_result({"tflops": a_metric("tflops", n + 1.0)}, index=n, stack=("bf16",) * n, workload="matmul")
        for n in range(2)
    ]
    served.finish(served.claim(), *results)
    return answer


@pytest.mark.slow
def test_every_link_of_a_job_leads_back(prefixed: Served, proxied: httpx.Client) -> None:
    answer = a_measured_job(prefixed, proxied)
    job = answer.json()
    assert answer.headers["location"] == job["links"]["self"] == f"{PREFIX}/v1/jobs/{job['id']}"
    for name, link in job["links"].items():
        method = "POST" if name in ("cancel", "retry") else "GET"
        # Only a parked job is put back.
        assert proxied.request(method, link).status_code == (409 if name == "retry" else 200), link
    (listed,) = proxied.get(f"{PREFIX}/v1/jobs").json()["jobs"]
    assert listed["links"] == job["links"]


@pytest.mark.slow
def test_links_of_results_and_boards_lead_back(prefixed: Served, proxied: httpx.Client) -> None:
    job = a_measured_job(prefixed, proxied).json()
    first = proxied.get(job["links"]["results"]).json()["results"][0]["id"]
    related = proxied.get(f"{PREFIX}/v1/results/{first}").headers["link"]
    page = proxied.get(f"{PREFIX}/v1/leaderboard?limit=1")
    (board,) = page.json()["boards"]
    links = [*re.findall(r"<([^>]+)>", f"{related} {page.headers['link']}"), *board["links"].values()]
    assert len(links) == 5
    for link in links:
        assert link.startswith(f"{PREFIX}/v1/")
        assert proxied.get(link).status_code == 200, link


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/", "/docs"])
def test_links_of_pages_lead_back(prefixed: Served, proxied: httpx.Client, path: str) -> None:
    a_measured_job(prefixed, proxied)
    links = [link for link in Page(proxied.get(PREFIX + path).text).links if not link.startswith("#")]
    assert len(links) >= 2
    for link in links:
        assert proxied.get(link).status_code == 200, link


@pytest.mark.slow
def test_commands_and_the_openapi_document_name_the_path(proxied: httpx.Client) -> None:
    assert proxied.get(f"{PREFIX}/openapi.json").json()["servers"] == [{"url": PREFIX}]
    assert f"URL={str(proxied.base_url).rstrip('/')}{PREFIX}</pre>" in proxied.get(f"{PREFIX}/docs").text


@pytest.mark.slow
def test_callers_behind_a_proxy_are_counted_apart(tmp_path: Path) -> None:
    """The proxy of this machine is trusted; FORWARDED_ALLOW_IPS names others."""
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="1/day") as served:
        answers = [
            served.client.get("/v1/jobs", headers={"X-Forwarded-For": caller}).status_code
            for caller in ("192.0.2.1", "192.0.2.2", "192.0.2.1")
        ]
    assert answers == [200, 200, 429]
