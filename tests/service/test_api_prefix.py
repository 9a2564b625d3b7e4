"""The service under a path of a reverse proxy, which removes the path or passes it on."""

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from optigpu.client import Client
from tests.service.pages import Page
from tests.service.processes import watched_processes
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving
from tests.service.test_api_process import address, environment

PREFIX = "/optigpu"


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


@pytest.fixture
def prefixed(tmp_path: Path) -> Iterator[Served]:
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", root_path="optigpu/") as served:
        yield served


@pytest.fixture(params=["removes", "passes on"])
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


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_links_of_pages_lead_back(prefixed: Served, proxied: httpx.Client, path: str) -> None:
    a_measured_job(prefixed, proxied)
    links = [link for link in Page(proxied.get(PREFIX + path).text).links if not link.startswith("#")]
    assert len(links) >= 2
    for link in links:
        assert proxied.get(link).status_code == 200, link


def test_commands_and_the_openapi_document_name_the_path(proxied: httpx.Client) -> None:
    assert proxied.get(f"{PREFIX}/openapi.json").json()["servers"] == [{"url": PREFIX}]
    assert f"URL={str(proxied.base_url).rstrip('/')}{PREFIX}</pre>" in proxied.get(f"{PREFIX}/docs").text


def test_an_unknown_path_is_a_problem_that_leads_to_the_calls(proxied: httpx.Client) -> None:
    answer = proxied.get(f"{PREFIX}/no/such/path")
    assert answer.status_code == 404
    assert f"{PREFIX}/docs lists the calls" in answer.json()["detail"]


def test_answers_are_not_kept_by_caches_under_a_path_either(proxied: httpx.Client) -> None:
    assert proxied.get(f"{PREFIX}/v1/jobs").headers["cache-control"] == "no-store"


def test_the_client_works_under_a_path(prefixed: Served) -> None:
    with Client(f"{prefixed.url}{PREFIX}/") as client:
        job = client.submit(MATMUL)
        assert client.job(job.id).links["self"] == f"{PREFIX}/v1/jobs/{job.id}"


@pytest.mark.slow
def test_the_path_is_an_option_of_the_command(tmp_path: Path) -> None:
    with watched_processes(tmp_path, environment(tmp_path)) as processes:
        process = processes.start("api", "--port", "0", "--root-path", PREFIX)
        page = httpx.get(f"{address(processes)}/", timeout=30).text
        process.terminate()
        assert process.wait(30) == 0
    assert f'href="{PREFIX}/docs"' in page


def test_callers_behind_a_proxy_are_counted_apart(tmp_path: Path) -> None:
    """The proxy of this machine is trusted; FORWARDED_ALLOW_IPS names others."""
    with serving(f"sqlite:///{tmp_path / 'optigpu.db'}", rate_limit="1/minute") as served:
        answers = [
            served.client.get("/v1/jobs", headers={"X-Forwarded-For": caller}).status_code
            for caller in ("192.0.2.1", "192.0.2.2", "192.0.2.1")
        ]
    assert answers == [200, 200, 429]
