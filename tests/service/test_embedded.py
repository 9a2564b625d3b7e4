"""The service as a user starts it: embedded by one command, beside two workers, in the demo; it leaves no process."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from examples.demo import REAL, SHAPES, Interruption, ladder_spec, suitable_stack, workload_for
from examples.service import ROOT, embedded_service
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.models.held import MODELS_DIR
from optigpu.vocabulary import DeviceKind, OptiGPUError
from tests.breadth import cases
from tests.servers.databases import fresh_database
from tests.service.processes import (
    Processes,
    address,
    eventually,
    processes_left,
    processes_with,
    stop,
    watched_processes,
)
from tests.service.serving import matmul, migrated

pytestmark = pytest.mark.slow

AT_ONCE = {"wait_for_quiet_s": 0}
LONG = {
    "workload": {"kind": "matmul", "sizes": [2048]},
    "device": "cpu",
    "measure": {"replicates": 1, "min_seconds": 300, "max_seconds": 600},
    "limits": AT_ONCE,
}
MEASURED_WITHIN_S = 240.0
JOBS = 3
MARK = "OPTIGPU_DATA_DIR"
TINY = ("--model", "preset:tiny-llama-test", "--stack", "static_kv_cache")
SPEAKING = ("--model", "bundled:tiny", "--stack", "static_kv_cache")
DEMO = ("-m", "examples.demo")
BRIEF = (
    "import sys; from examples import demo; "
    "demo.MEASURE |= {'min_seconds': 0.05, 'max_seconds': 1, 'rel_ci': 1, 'meters': ['latency', 'quality']}; "
    "demo.LIMITS |= {'wait_for_quiet_s': 0}; "
)
"""Less time for each variant, and beside other tests; its figures are not asked for."""
END = "sys.exit(demo.main())"
FAILING = (
    "-c",
    BRIEF + "product = {'kind': 'matmul', 'sizes': [64], 'dtypes': ['tf32']}; "
    "demo.ladder_spec = lambda _, device, *__: {'workload': product, 'device': device, 'limits': demo.LIMITS}; "
    + END,
)
"""A product of a type that no CPU has instead of its job: refused before an engine is loaded."""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Where `python -m api` is started; at the end nothing of its tree may be left."""
    variables = {
        "OPTIGPU_DATABASE_URL": f"sqlite:///{tmp_path / 'optigpu.db'}",
        "OPTIGPU_DATA_DIR": str(tmp_path),
        "OPTIGPU_POLL_S": "0.2",
    }
    with watched_processes(tmp_path, variables) as watched:
        yield watched


def test_a_worker_that_dies_is_started_again_and_ctrl_c_while_it_measures_leaves_nothing(
    processes: Processes,
) -> None:
    process = processes.start("api", "--port", "0")
    address(processes)
    first = eventually(lambda: worker_of(process.pid))
    assert first is not None
    first.kill()
    assert eventually(lambda: worker_of(process.pid) not in (None, first))
    begin_to_measure(processes)
    interrupt(process)


@pytest.mark.long
def test_the_worker_ends_when_the_service_is_killed(processes: Processes) -> None:
    process = processes.start("api", "--port", "0")
    begin_to_measure(processes)
    process.kill()
    process.wait()
    assert eventually(lambda: not processes.alive())


def begin_to_measure(processes: Processes) -> None:
    """Posts a job that would run for minutes, and waits until one of its processes is at work."""
    url = address(processes)
    job = httpx.post(f"{url}/v1/jobs", json=LONG, timeout=30).json()

    def measuring() -> bool:
        variants = httpx.get(f"{url}{job['links']['self']}", timeout=30).json()["variants"]
        return any(variant["status"] == "running" for variant in variants)

    assert eventually(measuring, MEASURED_WITHIN_S)
    assert eventually(lambda: len(processes.alive()) >= 3), "the service, its worker, and what measures"


def worker_of(pid: int) -> psutil.Process | None:
    """The service's worker; None while there is none, as before it has become another program than the service."""
    return next(filter(is_worker, psutil.Process(pid).children()), None)


def is_worker(child: psutil.Process) -> bool:
    """A killed process that was not waited for yet has no command line any more."""
    try:
        return bool(child.cmdline()[1:3] == ["-m", "worker"])
    except psutil.NoSuchProcess:  # zombies among them
        return False


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C; it must end well. That nothing is left is checked by the fixture."""
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0


@pytest.fixture
def beside_servers(tmp_path: Path, postgres_server_url: str, redis_url: str) -> Iterator[Processes]:
    with fresh_database(postgres_server_url) as url, migrated(url):
        variables = {
            "OPTIGPU_DATABASE_URL": url,
            "OPTIGPU_REDIS_URL": redis_url,
            "OPTIGPU_DATA_DIR": str(tmp_path),
            "OPTIGPU_RATE_LIMIT": "1000000/minute",
        }
        with watched_processes(tmp_path, variables) as beside_servers:
            yield beside_servers


@pytest.mark.long
def test_jobs_are_run_once_each_by_two_workers(beside_servers: Processes) -> None:
    api = beside_servers.start("api", "--port", "0")
    both = [beside_servers.start("worker", "--device", "cpu") for _ in range(2)]
    url = eventually(lambda: re.search(r"listens on (http://\S+)", beside_servers.printed()))
    assert url
    with httpx.Client(base_url=url[1], timeout=30) as client:
        assert eventually(lambda: len(client.get("/v1/workers").json()["workers"]) == 2)
        body = matmul().model_dump(mode="json")
        posted = {client.post("/v1/jobs", json=body).json()["id"] for _ in range(JOBS)}
        assert eventually(lambda: states(client) == dict.fromkeys(posted, "succeeded"), within_s=200)
        jobs = [client.get(f"/v1/jobs/{job_id}").json() for job_id in posted]
        assert [[attempt["outcome"] for attempt in job["attempts"]] for job in jobs] == [["succeeded"]] * JOBS
        assert len({job["attempts"][0]["worker_id"] for job in jobs}) == 2
        stored = [client.get(f"/v1/jobs/{job_id}/results").json() for job_id in posted]
        assert [len(document["results"]) for document in stored] == [1] * JOBS
    for process in (*both, api):
        stop(process)
    logged = [json.loads(line) for line in beside_servers.printed().splitlines() if line.startswith("{")]
    succeeded = [line["job_id"] for line in logged if line["event"] == "job.succeeded"]
    assert sorted(succeeded) == sorted(posted)
    assert {line["job_id"] for line in logged if line["event"].startswith(("job.", "variant."))} == posted
    requests = [line for line in logged if line["event"] == "request"]
    assert all(line["request_id"] for line in requests)
    assert {line["job_id"] for line in requests if line["method"] == "POST"} == posted


def states(client: httpx.Client) -> dict[str, str]:
    return {job["id"]: job["state"] for job in client.get("/v1/jobs").json()["jobs"]}


BRIEFLY = ("-c", BRIEF + END)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the demo with its data in `tmp_path`; whatever it left is killed at the end."""

    def demo(*arguments: str, program: tuple[str, ...] = DEMO) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, *program, *arguments],
            cwd=ROOT,
            env=os.environ | {MARK: str(tmp_path), "COLUMNS": "300"},  # no line is broken
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # no signal to its group reaches the tests
        )

    yield demo
    for process in processes_with(MARK, str(tmp_path)):
        process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The output up to the line with `text`."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if text in line:
            return "".join(lines)
    pytest.fail(f"The demo never said {text!r}: {''.join(lines)}")


def test_it_shows_a_headline_a_table_and_what_is_next_and_ends_with_0(start: Start, tmp_path: Path) -> None:
    process = start(*SPEAKING, program=BRIEFLY)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    for text in (
        "static_kv_cache",
        "top-1 (%)",
        "The capital of France is ...",
        "native_decode: ...",
        str(tmp_path / "optigpu.db"),
        str(tmp_path / "demo.svg"),
        "make serve",
    ):
        assert text in output
    # Beside other tests the fastest may be another one, or no ratio may be valid.
    (headline,) = re.findall(r"^.* the baseline[ .].*$", output, re.M)
    assert len(output[output.index(headline) :].splitlines()) <= 40
    assert (tmp_path / "optigpu.db").is_file()
    assert b"<svg" in (tmp_path / "demo.svg").read_bytes()
    assert processes_left(MARK, str(tmp_path)) == []


MOMENTS = ("variants to measure", "The service listens", "This machine")


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        *cases([(moment, signal.SIGINT) for moment in MOMENTS], by_default=1),
        pytest.param("The service listens", signal.SIGTERM, marks=pytest.mark.long),
    ],
)
def test_a_signal_to_end_leaves_no_process(
    start: Start, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    process = start(*TINY)
    read_until(process, moment)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert processes_left(MARK, str(tmp_path), within_s=5) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_signal_to_end_is_remembered_where_python_drops_its_exception(
    number: int, ends: type[BaseException]
) -> None:
    """The handler is called, and no signal sent, which would be the tests' own Ctrl-C."""
    interruption = Interruption()
    interruption.check()

    class Forgotten:
        def __del__(self) -> None:
            interruption(number, None)

    Forgotten()
    with pytest.raises(ends):
        interruption.check()


@pytest.mark.long
def test_a_demo_that_is_killed_takes_its_service_along(start: Start, tmp_path: Path) -> None:
    process = start(*TINY)
    read_until(process, "variants to measure")
    assert len(processes_with(MARK, str(tmp_path))) > 2
    process.kill()
    assert processes_left(MARK, str(tmp_path)) == []


@pytest.mark.long
def test_a_failed_job_ends_it_with_1_and_the_reason(start: Start) -> None:
    process = start(*TINY, program=FAILING)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "The job failed: Nothing was measured: " in output


@pytest.mark.parametrize("model", [SHAPES, pytest.param(f"path:{REAL.name}", marks=pytest.mark.real_model)])
def test_its_jobs_fit_this_machine(model: str, monkeypatch: pytest.MonkeyPatch, smollm2: Path) -> None:
    monkeypatch.setenv(MODELS_DIR, str(smollm2))
    asked = workload_for(model)
    stack = suitable_stack(probe(), DeviceKind.CPU, asked)
    ladder = JobSpec.model_validate(ladder_spec(model, DeviceKind.CPU, stack, asked))
    assert [variant.label for variant in variants_of(ladder)][-1] == "native_decode"
    assert ladder.workload.has_text == (model != SHAPES)


def test_without_the_real_model_it_says_why_and_takes_random_weights(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MODELS_DIR, raising=False)
    (tmp_path / "models").write_text("no folder")
    process = start()
    said = read_until(process, f"Until then: {SHAPES}, with random weights.")
    assert f"{REAL.name} cannot be written into {tmp_path / 'models'}" in said
    process.terminate()
    process.communicate(timeout=60)


def test_a_service_that_does_not_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "optigpu.db").write_text("this is no database")
    monkeypatch.setenv(MARK, str(tmp_path))
    with pytest.raises(OptiGPUError, match=r"ended with status \d+"), embedded_service(tmp_path / "demo.log"):
        pass


def test_settings_of_a_real_service_do_not_reach_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path))
    monkeypatch.setenv("OPTIGPU_DATABASE_URL", "postgresql+psycopg://nobody@127.0.0.1:1/nothing")
    monkeypatch.setenv("OPTIGPU_REDIS_URL", "redis://127.0.0.1:1")
    with embedded_service(tmp_path / "demo.log") as url:
        assert url.startswith("http://127.0.0.1:")
    assert (tmp_path / "optigpu.db").is_file()
