"""The demo, with a tiny model: it shows what it promises, ends with 0, and whatever ends it leaves no process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from examples.demo import Interruption, ladder_spec, matmul_spec, suitable_stack
from examples.service import ROOT, embedded_service
from optigpu.hardware import probe
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec
from optigpu.techniques import TECHNIQUES
from optigpu.vocabulary import DeviceKind, OptiGPUError
from tests.breadth import cases
from tests.service.processes import processes_left, processes_with

pytestmark = pytest.mark.slow

MARK = "OPTIGPU_DATA_DIR"
TINY = ("--model", "preset:tiny-llama-test", "--stack", "static_kv_cache")
DEMO = ("-m", "examples.demo")
BRIEF = (
    "import sys; from examples import demo; "
    "demo.MEASURE |= {'min_seconds': 0.05, 'max_seconds': 1, 'rel_ci': 1, 'meters': ['latency']}; "
    "demo.MEASURE_PRODUCT |= demo.MEASURE; "
    "demo.LIMITS |= {'wait_for_quiet_s': 0}; "
)
"""Less time for each variant, and beside other tests; its figures are not asked for."""
END = "sys.exit(demo.main())"
QUICK = ("-c", BRIEF + END)
FAILING = (
    "-c",
    BRIEF + "matmul = demo.matmul_spec; "
    "product = lambda dtype: {'kind': 'matmul', 'sizes': [64], 'dtypes': [dtype]}; "
    "demo.matmul_spec = lambda device: matmul(device) | {'workload': product('float32')}; "
    "demo.ladder_spec = lambda _, device, __: matmul(device) | {'workload': product('tf32')}; " + END,
)
"""Small products instead of its jobs, the second of a type that no CPU has: refused before an engine is loaded."""
Start = Callable[..., subprocess.Popen[str]]


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


def test_it_shows_the_ladder_and_the_leaderboard_and_ends_with_0(start: Start, tmp_path: Path) -> None:
    process = start(*TINY, program=QUICK)
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    for text in (
        "static_kv_cache",
        "speedup: relative to the baseline",
        "matmul 256/512 float32",
        "Leaderboard by tokens/s",
        "native_decode",
        "the fastest: ",
        str(tmp_path / "optigpu.db"),
        str(tmp_path / "demo.svg"),
        "make serve",
    ):
        assert text in output
    assert (tmp_path / "optigpu.db").is_file()
    assert b"<svg" in (tmp_path / "demo.svg").read_bytes()
    assert processes_left(MARK, str(tmp_path)) == []


MOMENTS = ("variants to measure", "The service listens", "This machine")


@pytest.mark.parametrize("moment", cases(MOMENTS, by_default=1))
def test_ctrl_c_leaves_no_process(start: Start, tmp_path: Path, moment: str) -> None:
    process = start(*TINY)
    read_until(process, moment)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130, output
    assert processes_left(MARK, str(tmp_path), within_s=5) == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_is_remembered_where_python_drops_its_exception() -> None:
    """The handler is called, and no signal sent, which would be the tests' own Ctrl-C."""
    interruption = Interruption()
    interruption.check()

    class Forgotten:
        def __del__(self) -> None:
            interruption(signal.SIGINT, None)

    Forgotten()
    with pytest.raises(KeyboardInterrupt):
        interruption.check()


@pytest.mark.long
def test_a_demo_that_is_killed_takes_its_service_along(start: Start, tmp_path: Path) -> None:
    process = start(*TINY)
    read_until(process, "variants to measure")
    assert len(processes_with(MARK, str(tmp_path))) > 2
    process.kill()
    assert processes_left(MARK, str(tmp_path)) == []


@pytest.mark.long
def test_sigterm_ends_it_as_ctrl_c_does(start: Start, tmp_path: Path) -> None:
    process = start(*TINY)
    read_until(process, "The service listens")
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert processes_left(MARK, str(tmp_path), within_s=5) == []


@pytest.mark.long
def test_a_failed_job_ends_it_with_1_and_the_reason(start: Start) -> None:
    process = start(*TINY, program=FAILING)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output
    assert "The job failed: Nothing was measured: " in output


def test_its_jobs_fit_this_machine() -> None:
    stack = suitable_stack(probe(), DeviceKind.CPU)
    ladder = JobSpec.model_validate(ladder_spec("preset:gpt2", DeviceKind.CPU, stack))
    assert [variant.label for variant in variants_of(ladder)] == [
        "baseline",
        "int8_weight_only",
        "int8_weight_only + static_kv_cache + torch_compile",
        "native_decode",
    ]
    assert JobSpec.model_validate(matmul_spec(DeviceKind.CPU)).workload.kind == "matmul"


def test_without_a_compiler_torch_compile_stays_in_its_ladder_to_say_so() -> None:
    without = probe().model_copy(update={"compiler": None})
    stack = suitable_stack(without, DeviceKind.CPU)
    assert {"name": "torch_compile"} in stack
    assert TECHNIQUES["torch_compile"](name="torch_compile").check(without, DeviceKind.CPU, None) is not None


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
