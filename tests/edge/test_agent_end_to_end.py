"""The whole agent compiles for a board and runs against a running API, on MicroPython and with a real model."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from esp32_agent.port.simulator import simulated_output
from optigpu.client import Client
from optigpu.documents.devices import DeviceReportView
from tests.edge.interpreters import agent_files, compile_file
from tests.edge.tools import edge_python, micropython, mpy_cross
from tests.servers.process import free_port
from tests.service.processes import Processes, eventually, watched_processes
from tools.agent_lint import board_files

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL = b"\0\0\0\0TFL3" + bytes(500)
GOLDEN = (b"one input", b"2nd input")
OUTPUT_BYTES = 10
HOST_RUNNERS = ("tflm-host", "litert-host")
RUNS = 30
ENDS_WITHIN_S = 90.0
"""The agent's whole life here is some 10 s; a busy machine takes longer."""


@dataclass
class Service:
    """`python -m api` as a process that a test ends and starts again at the same address."""

    processes: Processes
    port: int
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self.process = self.processes.start("api", "--port", str(self.port))
        self.wait()

    def wait(self) -> None:
        assert eventually(self._is_ready), self.processes.printed()

    def kill(self) -> None:
        """No farewell: connections break where they are."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def end(self) -> None:
        self.process.terminate()
        assert self.process.wait(30) == 0

    def get(self, path: str) -> dict[str, Any]:
        answer = httpx.get(self.url + path, timeout=30)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        return document

    def reports(self) -> list[DeviceReportView]:
        """All reports of all devices with what became of them; none before one has enrolled."""
        with Client(self.url) as client:
            ids = [device["id"] for device in self.get("/v1/devices")["devices"]]
            return [report for each in ids for report in client.device_reports(each)]

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    """A service with a database of its own, without a worker."""
    folder = tmp_path / "service"
    folder.mkdir()
    variables = {
        "OPTIGPU_DATABASE_URL": f"sqlite:///{folder / 'optigpu.db'}",
        "OPTIGPU_DATA_DIR": str(folder),
        "OPTIGPU_EMBEDDED_WORKER": "false",
        "OPTIGPU_RATE_LIMIT": "1000000/minute",
        "OPTIGPU_DEVICE_RATE_LIMIT": "1000000/minute",
    }
    with watched_processes(folder, variables) as processes:
        port = free_port()
        started = Service(processes, port, processes.start("api", "--port", str(port)))
        started.wait()
        yield started
        started.end()


def invited(service: Service, *options: str) -> str:
    """A code of the operator's own command."""
    number = len(service.processes._started)
    assert service.processes.start("api", "devices", "invite", *options).wait(60) == 0
    printed = service.processes.output(number).read_text()
    code = re.search(r"\b[0-9A-Z]{4}(-[0-9A-Z]{4}){3}\b", printed)
    assert code, printed
    return code[0]


def simulated_device(folder: Path, url: str, **changes: Any) -> Path:
    """The folder of an agent with a made-up model: the configuration's path."""
    folder.mkdir()
    (folder / "model.tflite").write_bytes(MODEL)
    digest = sha256(MODEL)
    numbers = (len(GOLDEN), len(GOLDEN[0]), OUTPUT_BYTES)
    vectors = b"".join(data + simulated_output(digest, data, OUTPUT_BYTES) for data in GOLDEN)
    header = b"OGLD" + b"".join(number.to_bytes(4, "little") for number in numbers)
    (folder / "golden.bin").write_bytes(header + vectors)
    runner = {
        "kind": "simulator",
        "latency_ms": 20,
        "input_bytes": len(GOLDEN[0]),
        "output_bytes": OUTPUT_BYTES,
    }
    document = {
        "url": url, "board": "esp32s3-n16r8", "model": "model.tflite", "golden": "golden.bin",
        "runner": runner, "windows": 2, "window_s": 0, "warmup": 1, "period_s": 0, "timeout_s": 5,
        "retry_first_ms": 50, "retry_most_ms": 400,
    }  # fmt: skip
    path = folder / "config.json"
    path.write_text(json.dumps(document | changes))
    return path


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The agent as it is copied to a board: compiled, without line numbers."""
    folder = tmp_path_factory.mktemp("board")
    for path in board_files(ROOT / "esp32_agent"):
        compiled = (folder / path.relative_to(ROOT)).with_suffix(".mpy")
        compiled.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(mpy_cross()), "-O3", "-o", str(compiled), str(path)], check=True)
    return folder


def agent(interpreter: list[str], code: Path, config: Path, runs: int) -> subprocess.Popen[str]:
    """The agent as a process; what it says goes to a file beside its configuration."""
    with (config.parent / "agent.log").open("a") as log:
        return subprocess.Popen(
            [*interpreter, "-m", "esp32_agent", "--config", str(config), "--runs", str(runs)],
            env=os.environ | {"MICROPYPATH": str(code), "PYTHONPATH": str(code)},
            cwd=config.parent,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )


def on_micropython() -> list[str]:
    """MicroPython with the heap of a board."""
    return [str(micropython()), "-X", "heapsize=128K"]


def finish(process: subprocess.Popen[str], config: Path) -> None:
    """Waits for an agent that ends by itself."""
    try:
        status = process.wait(ENDS_WITHIN_S)
    finally:
        process.kill()
    assert status == 0, (config.parent / "agent.log").read_text()


def identities(reports: list[DeviceReportView]) -> list[tuple[str, int]]:
    """Boot and sequence of each report, the oldest first."""
    documents = [report.document for report in reversed(reports)]
    return [(document["boot_id"], document["sequence"]) for document in documents]


@pytest.mark.long
def test_an_agent_on_micropython_lives_through_a_restart_of_the_api(
    service: Service, tmp_path: Path, bytecode: Path
) -> None:
    config = simulated_device(tmp_path / "device", service.url, invite=invited(service, "--simulator"))
    process = agent(on_micropython(), bytecode, config, RUNS)
    assert eventually(lambda: len(service.reports()) >= 5), (config.parent / "agent.log").read_text()
    service.kill()
    service.start()
    finish(process, config)

    reports = service.reports()
    found = identities(reports)
    assert [sequence for _, sequence in found] == list(range(1, RUNS + 1))
    assert len({boot for boot, _ in found}) == 1
    assert {report.source for report in reports} == {"simulator"}
    assert not any(report.ranked for report in reports)
    assert any(report.document["run_id"] for report in reports)
    device = service.get("/v1/devices")["devices"][0]
    assert (device["board"], device["dropped"]) == ("esp32s3-n16r8", 0)
    assert 0 < device["heap_free"] < 128 * 1024


@pytest.mark.long
def test_an_agent_that_is_cut_off_goes_on_where_it_was(
    service: Service, tmp_path: Path, bytecode: Path
) -> None:
    """Its key, its queue and its invitation outlive it; without the service, reports wait for the next boot."""
    config = simulated_device(tmp_path / "device", service.url, invite=invited(service, "--simulator"))
    first = agent(on_micropython(), bytecode, config, 1000)
    assert eventually(lambda: len(service.reports()) >= 3), (config.parent / "agent.log").read_text()
    service.kill()
    log = config.parent / "agent.log"
    assert eventually(lambda: log.read_text().count("measuring without a run") >= 3), log.read_text()
    first.kill()
    first.wait()
    service.start()
    finish(agent(on_micropython(), bytecode, config, 3), config)

    found = identities(service.reports())
    boots = list(dict.fromkeys(boot for boot, _ in found))
    assert len(boots) == 2
    for boot in boots:
        sequences = [sequence for own, sequence in found if own == boot]
        assert sequences == list(range(1, len(sequences) + 1))
    # Three arrived before the service was gone, and of the three measured after that the last may be cut off.
    assert sum(boot == boots[0] for boot, _ in found) >= 5
    assert len(service.get("/v1/devices")["devices"]) == 1


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the founding script writes, with a small network in place of its own, which takes minutes."""
    folder = tmp_path_factory.mktemp("converted")
    script = ROOT / "hardware" / "esp32" / "convert_model.py"
    small = ("--alpha", "0.35", "--input", "32", "--classes", "4", "--samples", "8")
    done = subprocess.run(
        [sys.executable, script, *small, "--python", edge_python()],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    return folder


@pytest.mark.long
def test_host_agents_with_a_real_model_pass_the_golden_check(
    service: Service, tmp_path: Path, converted: Path
) -> None:
    """One device after the other, each with a runner of its own."""
    manifest = json.loads((converted / "manifest.json").read_text())
    assert httpx.post(f"{service.url}/v1/edge/models", json=manifest, timeout=30).status_code in (200, 201)
    for kind in HOST_RUNNERS:
        config = simulated_device(
            tmp_path / kind, service.url, invite=invited(service), board="host-x86", windows=2, warmup=1,
            model=str(converted / "mobilenet_int8.tflite"), golden=str(converted / "golden.bin"),
            runner={"kind": kind},
        )  # fmt: skip
        finish(agent([str(edge_python())], ROOT, config, 2), config)
    reports = service.reports()
    runners = [report.document["runner"]["name"] for report in reports]
    assert sorted(runners) == sorted(2 * HOST_RUNNERS)
    for report in reports:
        assert report.state == "accepted", report
        assert "host" in report.reasons
        assert "golden_failed" not in report.reasons
        assert report.document["golden"]["count"] == manifest["golden"]["count"]
        assert not report.ranked


@pytest.mark.parametrize("path", agent_files(), ids=str)
def test_it_compiles_for_the_esp32_s3(path: Path, tmp_path: Path) -> None:
    done = compile_file(path, tmp_path, "-march=xtensawin", "-O2")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / path.with_suffix(".mpy")).stat().st_size > 0
