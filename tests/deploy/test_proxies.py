"""The proxies of docs/gpu-box.md, as the page has them, in front of the real service.

Of the page's text the tests replace what a machine has for itself: ports, the certificate, where files lie.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from optigpu.client import Client
from optigpu.vocabulary import new_id
from tests.deploy.compose import ROOT
from tests.deploy.test_gpu_box_page import BLOCKS
from tests.engine.command import optigpu
from tests.servers.process import free_port, scratch_folder, serve
from tests.service.serving import MATMUL

HOST = "bench.example.org"
SERVICE = "127.0.0.1:8000"
"""Where the page's proxies find the service."""
NGINX = """
daemon off;
{user}
pid {folder}/pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {site}
}}
"""
CADDY = """
{{
    admin off
    local_certs
    skip_install_trust
    storage file_system {folder}
    https_port {port}
    http_port {other}
}}
{site}
"""
OLDER = ROOT / "tests" / "unit" / "report_version_1.json"
LONG_BYTES = 1_200_000
"""More than nginx takes by itself."""


def block(beginning: str) -> str:
    """The page's block that begins so."""
    (found,) = (each for each in BLOCKS if each.startswith(beginning))
    return str(found)


def settings() -> list[str]:
    """What the page has a service behind a proxy set."""
    return [*block("OPTIGPU_ROOT_PATH=").split(), f"OPTIGPU_ALLOWED_HOSTS={HOST}"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Host and port of the API, without a worker."""
    port = free_port()
    own = [f"PYTHONPATH={ROOT}", f"OPTIGPU_DATA_DIR={tmp_path_factory.mktemp('data')}"]
    command = ["env", *own, *settings(), "OPTIGPU_EMBEDDED_WORKER=false", sys.executable, "-m", "api"]
    server = serve(
        [*command, "--port", str(port)], scratch_folder(None), None, f"http://127.0.0.1:{port}/healthz", is_up
    )
    yield f"127.0.0.1:{port}"
    server.stop()


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.TransportError:
        return False


@contextmanager
def nginx_before(service: str, program: str) -> Iterator[tuple[int, Path]]:
    port, folder = free_port(), scratch_folder(None)
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        [
            *(
                "openssl",
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "1",
                "-subj",
                f"/CN={HOST}",
            ),
            *("-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    letsencrypt = f"/etc/letsencrypt/live/{HOST}"
    site = replaced(
        block("server {"),
        {
            "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
            f"{letsencrypt}/fullchain.pem": str(certificate),
            f"{letsencrypt}/privkey.pem": str(key),
            SERVICE: service,
        },
    )
    configuration = folder / "nginx.conf"
    user = "user root;" if folder.owner() == "root" else ""
    configuration.write_text(NGINX.format(user=user, folder=folder, site=site))
    server = serve([program, "-c", str(configuration)], folder, None, str(port), listens)
    yield port, certificate
    server.stop()


@contextmanager
def caddy_before(service: str, program: str) -> Iterator[tuple[int, Path]]:
    port, folder = free_port(), scratch_folder(None)
    site = replaced(block(HOST), {SERVICE: service})
    configuration = folder / "Caddyfile"
    configuration.write_text(CADDY.format(folder=folder, port=port, other=free_port(), site=site))
    command = [
        "env",
        f"HOME={folder}",
        program,
        "run",
        "--config",
        str(configuration),
        "--adapter",
        "caddyfile",
    ]
    server = serve(command, folder, None, str(port), listens)
    yield port, folder / "pki" / "authorities" / "local" / "root.crt"
    server.stop()


BEFORE = {"nginx": nginx_before, "caddy": caddy_before}


def replaced(text: str, others: dict[str, str]) -> str:
    for before, after in others.items():
        assert before in text
        text = text.replace(before, after)
    return text


def listens(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


@pytest.fixture(params=list(BEFORE))
def url(request: pytest.FixtureRequest, service: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address behind the proxy, whose name this process finds on this machine and whose certificate it trusts."""
    of_the_system = socket.getaddrinfo

    def resolved(host: Any, *arguments: Any, **options: Any) -> Any:
        return of_the_system("127.0.0.1" if host in (HOST, HOST.encode()) else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with BEFORE[request.param](service, request.getfixturevalue(request.param)) as (port, certificate):
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        yield f"https://{HOST}:{port}/optigpu"


def long_run(folder: Path) -> Path:
    """A run with raw samples of more than LONG_BYTES."""
    report = json.loads(OLDER.read_text())
    (result,) = report["results"]
    result["id"] = new_id()
    values = [[result["metrics"]["tokens_per_s"]["value"]] * (LONG_BYTES // 16)]
    outcomes = [{"index": 0, "status": "succeeded", "samples": {"tokens_per_s": values}}]
    path = folder / "run.json"
    path.write_text(json.dumps(report | {"outcomes": outcomes}))
    assert path.stat().st_size > LONG_BYTES
    return path


def test_a_proxy_of_the_page_passes_on_pages_events_and_long_runs(url: str, tmp_path: Path) -> None:
    host = url.removesuffix("/optigpu")
    with httpx.Client(base_url=host, follow_redirects=True) as browser:
        page = browser.get("/optigpu")
        assert (page.status_code, page.url) == (200, httpx.URL(f"{url}/"))
        assert 'href="/optigpu/' in page.text
        assert 'href="/jobs' not in page.text
    job_file = tmp_path / "job.json"
    job_file.write_text(json.dumps(MATMUL))
    submitted = optigpu({}, "submit", str(job_file), "--url", url)
    assert submitted.returncode == 0, submitted.stderr
    with Client(url) as client:
        job = client.jobs().jobs[0]
        assert job.links["self"] == f"/optigpu/v1/jobs/{job.id}"
        states = (event.data["state"] for event in client.events(job.id) if event.kind == "state")
        assert next(states) == "queued", "an event arrives while the job goes on"
        client.cancel(job.id)
        assert list(states) == ["cancelled"]
        entered = optigpu({}, "import", str(long_run(tmp_path)), "--url", url)
        assert entered.returncode == 0, entered.stderr
        assert client.job(entered.stdout.strip()).state == "succeeded"
