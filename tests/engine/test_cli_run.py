"""`optigpu run` and `replay`: stdout, exit status, what a signal leaves, and a result that is measured again."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine.processes import optigpu, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]


OPTIGPU = (sys.executable, "-m", "optigpu")
QUICK = (
    *("--replicates", "1", "--min-seconds", "0.05", "--max-seconds", "0.2"),
    *("--device", "cpu", "--wait-for-quiet", "0"),
)

MEASURED = (0, 3)
"""The exit status of a command that measured: on a busy machine nothing of it may be fit to be ranked."""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {"OPTIGPU_DATA_DIR": str(tmp_path)}


@contextmanager
def at_a_terminal(
    environment: dict[str, str], *arguments: str, ignored: signal.Signals | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], list[bytes]]]:
    """The command in the background, and what it shows, which grows; killed at the end. `ignored` is a signal that it
    ignores from its start, as a shell in the background has it."""
    ours, its = os.openpty()
    shown: list[bytes] = []
    process = subprocess.Popen(
        [*OPTIGPU, *arguments],
        env=environment | {"TERM": "xterm"},
        stdout=its,
        stderr=its,
        preexec_fn=(lambda: signal.signal(ignored, signal.SIG_IGN)) if ignored else None,
    )
    os.close(its)
    reader = threading.Thread(target=read, args=(ours, shown))
    reader.start()
    try:
        yield process, shown
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(ours)


def read(terminal: int, shown: list[bytes]) -> None:
    """Until no process has the terminal any more."""
    with suppress(OSError):
        while chunk := os.read(terminal, 4096):
            shown.append(chunk)


def test_a_run_in_which_nothing_succeeded_ends_with_status_1_and_the_reason(
    environment: dict[str, str],
) -> None:
    ran = optigpu(environment, "run", "--workload", "matmul", "--sizes", "16", "--dtypes", "tf32", *QUICK)
    assert ran.returncode == 1
    assert "unsupported" in ran.stdout
    assert "tensor cores" in ran.stdout


def test_a_run_in_which_nothing_can_be_ranked_ends_with_status_3_and_the_reason(
    environment: dict[str, str],
) -> None:
    """Without most of its weights the model predicts other tokens, which the limit does not allow."""
    model = ("--model", "bundled:tiny", "--prompt-tokens", "8", "--new-tokens", "4")
    stack = ("--stack", "magnitude_pruning:sparsity=0.95", "--min-top1", "0.99")
    meters = ("--meters", "latency,quality", "--quality-tokens", "32")
    ran = optigpu(environment, "run", *model, *stack, *meters, *QUICK)
    assert ran.returncode == 3, ran.stderr
    (said,) = [
        line
        for line in ran.stderr.splitlines()
        if line.startswith("Nothing that was measured can be ranked:")
    ]
    assert "quality_below_gate (1 of 1)" in said


def test_cuda_where_there_is_none_is_said_before_anything_starts(
    environment: dict[str, str], tmp_path: Path
) -> None:
    ran = subprocess.run(
        [*OPTIGPU, "run", "--workload", "matmul", "--device", "cuda"],
        env=environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Error: device: this machine has no NVIDIA GPU that works (")
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "locks").exists()


@pytest.mark.parametrize(
    ("sent", "ignored", "status", "words"),
    [(signal.SIGINT, None, 130, b"Ctrl-C"), (signal.SIGTERM, signal.SIGINT, 143, b"SIGTERM")],
)
def test_a_signal_ends_it_with_its_status_and_leaves_no_process(
    sent: signal.Signals,
    ignored: signal.Signals | None,
    status: int,
    words: bytes,
    environment: dict[str, str],
) -> None:
    """The signal comes while a process measures; a terminal would send it to the command's group alone."""
    endless = ("--workload", "matmul", "--sizes", "256", "--min-seconds", "300", "--max-seconds", "300")
    with at_a_terminal(environment, "run", *endless, *QUICK[-4:], ignored=ignored) as (process, shown):
        wait_until(lambda: b"measuring" in b"".join(shown))
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(sent)
        ended = process.wait(30)
    assert children
    assert ended == status
    assert [child for child in children if child.is_running()] == []
    assert b"The job was cancelled by " + words in b"".join(shown)
    _, _, table = b"".join(shown).decode().rpartition("┏")
    assert "about " in table, "what its first requests showed"


def test_ctrl_c_keeps_the_replicates_that_are_whole(environment: dict[str, str]) -> None:
    quick = ("--workload", "matmul", "--sizes", "16", *QUICK[2:], "--replicates", "50", "--format", "csv")
    with at_a_terminal(environment, "run", *quick) as (process, shown):
        seen: set[int] = set()

        def second_process() -> bool:
            for child in psutil.Process(process.pid).children():
                with suppress(psutil.NoSuchProcess):
                    seen.update([child.pid] if "optigpu.child.replicate" in child.cmdline() else ())
            return len(seen) > 1

        wait_until(second_process)
        process.send_signal(signal.SIGINT)
        status = process.wait(30)
    assert status == 130
    printed = b"".join(shown)
    assert b"with fewer: 1, with no result: 0." in printed
    assert b"Kept as " in printed
    assert b"incomplete" in printed


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    """The command that measured matrix products of two sizes."""
    variables = os.environ | {"OPTIGPU_DATA_DIR": str(tmp_path_factory.mktemp("measured"))}
    return optigpu(
        variables,
        "run",
        "--workload",
        "matmul",
        "--sizes",
        "16,32",
        *QUICK,
        "--seed",
        "5",
        "--format",
        "json",
    )


@pytest.fixture
def measured(ran: subprocess.CompletedProcess[str], tmp_path: Path) -> Path:
    """A file with the two results."""
    assert ran.returncode in MEASURED, ran.stderr
    path = tmp_path / "report.json"
    path.write_text(ran.stdout)
    return path


def test_json_is_all_there_is_on_stdout(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode in MEASURED, ran.stderr
    document = json.loads(ran.stdout)
    assert set(document) == {"spec", "results", "attribution"}
    assert [result["variant"]["label"] for result in document["results"]] == ["float32 16", "float32 32"]
    assert all(result["metrics"]["tflops"]["value"] > 0 for result in document["results"])
    assert "2 variants to measure: float32 16, float32 32" in ran.stderr


def replayed(environment: dict[str, str], *arguments: str) -> dict[str, Any]:
    """What it prints as JSON."""
    ran = optigpu(environment, "replay", *arguments, "--format", "json")
    assert ran.returncode == 0, ran.stderr
    document: dict[str, Any] = json.loads(ran.stdout)
    return document


def test_a_replay_on_other_software_says_what_differs(environment: dict[str, str], measured: Path) -> None:
    report = json.loads(measured.read_text())
    for result in report["results"]:
        result["environment"]["software"]["torch"] = "1.0"
        result["environment"]["hardware_class"] = "another machine"
    measured.write_text(json.dumps(report))
    document = replayed(environment, f"{measured}#float32 16", "--replicates", "2", "--max-seconds", "0.3")
    assert (
        document["spec"]["measure"]["replicates"]
        == document["results"][0]["metrics"]["tflops"]["replicates"]
        == 2
    )
    comparison = document["comparison"]
    differences = {each["field"]: each["baseline"] for each in comparison["differences"]}
    assert differences["environment.software.torch"] == "1.0"
    assert "another machine" in comparison["notes"][0]
