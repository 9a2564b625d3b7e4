"""docs/gpu-box.md: what it names is there, and its proxies and its backup do what it says, with the real service.

Of the page's text the tests replace what a machine has for itself: ports, the certificate, where files lie.
And a quarter of an hour on a card, without one: steps that end, fail and hang, what is resumed, and the two plans.
"""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import migrations
from optigpu.client import Client
from optigpu.job.spec import JobSpec
from optigpu.store import keys
from optigpu.store.database import default_url
from optigpu.variables import KNOWN
from optigpu.vocabulary import new_id
from tests.breadth import cases
from tests.deploy.compose import ROOT, read_compose
from tests.deploy.gpu_host import LISTED
from tests.engine.processes import is_alive, optigpu, wait_until
from tests.servers.process import free_port, scratch_folder, serve
from tests.service.receiver import own_certificate
from tests.service.records import a_metric, a_result
from tests.service.serving import MATMUL, Served, serving
from tools.gpu_quarter import __main__ as command
from tools.gpu_quarter import caches
from tools.gpu_quarter.runner import plan
from tools.gpu_services import compose_file, parse

PAGE = (ROOT / "docs" / "gpu-box.md").read_text()
BLOCKS = re.findall(r"^```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

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
SERVICES = {
    *read_compose({"POSTGRES_PASSWORD": "secret", "OPTIGPU_API_KEY": "key"})["services"],
    *(gpu.service for gpu in parse(LISTED["one"])),
}


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
    certificate, key = own_certificate(HOST, folder)
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
    given = ("--config", str(configuration), "--adapter", "caddyfile")
    command = ["env", f"HOME={folder}", program, "run", *given]
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


@pytest.fixture(params=cases(["caddy", "nginx"], 1))
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


def test_every_setting_of_the_page_is_one() -> None:
    assert set(re.findall(r"\bOPTIGPU_[A-Z_]*[A-Z]\b", PAGE)) <= set(KNOWN)


@pytest.mark.parametrize(
    "verb", ["logs --follow", "exec -T", "exec", "run --rm", "run --rm --no-deps", "stop"]
)
def test_every_service_that_a_command_names_is_one(verb: str) -> None:
    named = re.findall(rf"docker compose {verb} ([a-z][\w-]*)", PAGE)
    assert named
    assert set(named) <= SERVICES


def test_the_deployment_of_workers_starts_one_with_settings_that_there_are() -> None:
    (text,) = re.findall(r"^<!-- workers in kubernetes -->\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    deployment = yaml.safe_load(text)
    assert (deployment["apiVersion"], deployment["kind"]) == ("apps/v1", "Deployment")
    template = deployment["spec"]["template"]
    assert deployment["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    (container,) = template["spec"]["containers"]
    assert container["command"] == gpu_worker()
    assert {each["name"] for each in container["env"]} <= set(KNOWN)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
    volumes = {each["name"] for each in template["spec"]["volumes"]}
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def gpu_worker() -> list[str]:
    """What docker-compose.gpus.yml has a worker run, but for the GPU: a pod sees its own alone."""
    gpus = parse(LISTED["one"])
    (service, *_) = yaml.safe_load(compose_file((ROOT / "docker-compose.worker.yml").read_text(), gpus))[
        "services"
    ].values()
    command: list[str] = service["command"]
    return command[: command.index("--gpu")]


OLDER_REVISION = "0005"
"""The revision of the version that is upgraded."""


def commands(heading: str) -> str:
    """The block of commands below a comment of the page."""
    found = re.findall(rf"<!-- {heading} -->\n```\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    assert len(found) == 1
    return str(found[0])


def fill(served: Served) -> None:
    """A job with two results, samples and a key."""
    served.submit(MATMUL)
    results = [
        a_result({"tflops": a_metric("tflops", n + 1.0)}, index=n, stack=("bf16",) * n, workload="matmul")
        for n in range(2)
    ]
    served.finish(served.claim(), *results, samples={"tflops": ((1.0, 2.0), (3.0,))})


def everything(served: Served) -> dict[str, Any]:
    """What readers see: leaderboard, jobs, results with their samples."""
    paths = ["/v1/leaderboard", "/v1/jobs"]
    jobs = served.client.get("/v1/jobs").json()["jobs"]
    results = served.client.get(jobs[0]["links"]["results"]).json()["results"]
    paths += [f"/v1/results/{result['id']}{part}" for result in results for part in ("", "/samples")]
    read = {path: served.client.get(path) for path in paths}
    assert {path: answer.status_code for path, answer in read.items()} == dict.fromkeys(paths, 200)
    return {path: answer.json() for path, answer in read.items()}


@pytest.mark.slow
def test_sqlite_of_an_older_version_is_backed_up_while_it_serves_and_upgraded(tmp_path: Path) -> None:
    url = default_url(tmp_path / "data")
    command = commands("backup of sqlite").replace(
        "~/.local/share/optigpu/optigpu.db", str(tmp_path / "data" / "optigpu.db")
    )
    with serving(url) as served:
        fill(served)
        with served.database.write() as session:
            plain = keys.create(session, "a reader", ["read"])
        served.client.headers["Authorization"] = f"Bearer {plain}"
        before = everything(served)
        migrations.downgrade(url, OLDER_REVISION)
        subprocess.run(["bash", "-eu", "-c", command], cwd=tmp_path, check=True)
    with serving(f"sqlite:///{tmp_path / 'optigpu-backup.db'}") as served:
        assert served.client.get("/v1/jobs").status_code == 401
        served.client.headers["Authorization"] = f"Bearer {plain}"
        assert everything(served) == before


STEPS = r"""
steps = [
  { name = "counts", bound_s = 60, command = '-c "open(\"{out}/runs\", \"a\").write(str(1))"' },
  { name = "needs", bound_s = 60, command = '-c "open(\"{out}/card\")"' },
  { name = "hangs", bound_s = 2, command = '''-c "import subprocess; sleeps = subprocess.Popen(['sleep', '600'])
open('{out}/pid', 'w').write(str(sleeps.pid)); sleeps.wait()"''' },
  { name = "probe", bound_s = 60, command = "-m optigpu probe --format json", prints = "probe.json" },
]
"""


def quarter(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status, and the records by step."""
    (folder / "plan.toml").write_text(STEPS)
    words = [sys.executable, "-m", "tools.gpu_quarter", "--plan", str(folder / "plan.toml"), *arguments]
    status = subprocess.run(words, cwd=ROOT, check=False, capture_output=True).returncode
    steps = json.loads((folder / "out" / "summary.json").read_text())["steps"]
    return status, {step["name"]: step for step in steps}


def test_what_hangs_is_killed_and_a_later_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    status, steps = quarter(tmp_path, "--output", str(out), "--caches", str(tmp_path / "caches"))
    endings = {name: (step["ending"], step["status"]) for name, step in steps.items()}
    assert status == 1
    ended = ("ended", 0)
    assert endings == {"counts": ended, "needs": ("failed", 1), "hangs": ("killed", None), "probe": ended}
    assert steps["needs"]["error"][-1].startswith("FileNotFoundError")
    wait_until(lambda: not is_alive(int((out / "hangs" / "pid").read_text())))
    assert json.loads((out / "probe" / "probe.json").read_text())["cpu_cores"] > 0
    assert "| needs | failed | 1 |" in (out / "summary.md").read_text()
    (out / "needs" / "card").touch()
    status, steps = quarter(tmp_path, "--resume", str(out), "--skip", "hangs")
    assert (status, steps["needs"]["ending"], steps["hangs"]["ending"]) == (0, "ended", "killed")
    assert (out / "counts" / "runs").read_text() == "1"


def test_caches_come_back_within_their_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "PART_BYTES", 2**20)
    for number in range(8):
        file = tmp_path / "work" / "triton" / f"kernel{number}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.urandom(2**20))
        os.utime(file, (number, number))
    caches.pack(tmp_path / "work", ("triton", "none"), tmp_path / "caches")
    parts = list((tmp_path / "caches").iterdir())
    assert 1 < len(parts) <= caches.PARTS
    assert all(part.stat().st_size <= caches.PART_BYTES for part in parts)
    caches.unpack(tmp_path / "caches", tmp_path / "again")
    back = {path.name: path.read_bytes() for path in (tmp_path / "again" / "triton").iterdir()}
    assert "kernel0" not in back
    assert back["kernel7"] == (tmp_path / "work" / "triton" / "kernel7").read_bytes()


def test_the_rehearsal_has_the_steps_of_the_card_and_every_job_is_one() -> None:
    card, rehearsal = (plan(Path(command.__file__).with_name(name)) for name in command.PLANS.values())
    assert [step.name for step in card] == [step.name for step in rehearsal]
    for device, steps in (("cuda", card), ("cpu", rehearsal)):
        jobs = [JobSpec.model_validate({**step.job, "device": device}) for step in steps if step.job]
        assert len(jobs) == 5
