"""The self-test, and the proof that a device works: what is wrong, idle, dead or hanging fails by itself."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from optigpu.conductor.processes.child import TASKS
from optigpu.conductor.tasks import PROOF_S, SelfTester, prove, sentence
from optigpu.documents.result import Accelerator, Environment
from optigpu.documents.selftest import CheckResult, CheckStatus, SelfTest
from optigpu.hardware import probe
from optigpu.paths import data_dir
from optigpu.vocabulary import CancelledError, DeviceKind, ReplicateError, UnsupportedError
from tests.engine.processes import STARTED, optigpu, program

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_children")]

CPU = DeviceKind.CPU
MADE = program("selftest_made")


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data folder of the test's own, but for what TorchInductor keeps, by what it was compiled from."""
    compiled = data_dir() / "inductor"
    compiled.mkdir(parents=True, exist_ok=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "inductor").symlink_to(compiled)
    monkeypatch.setenv("OPTIGPU_DATA_DIR", str(tmp_path / "data"))


def results_of(
    *names: str, command: Sequence[str] = MADE, limit_s: float = 180.0, device: DeviceKind | None = CPU
) -> dict[str, CheckResult]:
    """The results by the names of their checks, in the order in which they ran."""
    tester = SelfTester(lambda: None, lambda _: None, lambda _: None, program=command, limit_s=limit_s)
    (outcome,) = tester.run(tester.checks(names, device))
    return {result.check.label: result for result in outcome.results}


def reasons(found: dict[str, CheckResult]) -> dict[str, tuple[CheckStatus, str]]:
    return {name: (result.status, result.reason or "") for name, result in found.items()}


def test_a_technique_that_is_wrong_or_idle_fails_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five end their process, or are ended with it; the one that must be alone leaves it to the next."""
    monkeypatch.setenv(STARTED, str(tmp_path / "started"))
    found = reasons(
        results_of(
            *("made_idle", "made_wrong", "made_lone", "made_rounding", "made_nan", "made_raising"),
            *("made_refusing", "made_hungry", "made_dying", "made_right"),
        )
    )
    failed = {name: why for name, (status, why) in found.items() if status is CheckStatus.FAILED}
    assert list(failed) == [
        *("made_idle", "made_wrong", "made_rounding", "made_nan", "made_raising", "made_hungry", "made_dying")
    ]
    assert "changed nothing" in failed["made_idle"]
    assert "of the largest logit, and the bound is 0.001" in failed["made_wrong"]
    assert "had no effect" in failed["made_rounding"]
    assert "NaN or infinite" in failed["made_nan"]
    assert failed["made_raising"] == "RuntimeError: a layer is missing"
    assert "out of memory" in failed["made_hungry"]
    assert "killed by signal 11" in failed["made_dying"]
    assert found["made_refusing"] == (CheckStatus.NOT_POSSIBLE, "It needs another machine.")
    assert found["made_lone"] == found["made_right"] == (CheckStatus.OK, "")
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 1 + 1 + (5 + 1), "to list the checks, for the one alone, and for the others"


def test_a_check_that_hangs_is_killed_and_named() -> None:
    (result,) = results_of("made_hanging", limit_s=3).values()
    assert result.status is CheckStatus.FAILED
    assert result.reason == "It hung: it had not ended after 3 s, and was killed."


def test_a_device_that_is_not_there_is_never_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (result,) = results_of("fp16", command=TASKS, device=DeviceKind.CUDA).values()
    assert result.status is CheckStatus.NOT_POSSIBLE
    assert str(result.reason).startswith("This machine has no NVIDIA GPU that works (")


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_everything_passes_on_this_machine() -> None:
    """The whole command: nothing fails, and what a device that is not there would run is not possible."""
    done = optigpu({}, "selftest", "--format", "json")
    outcomes = [SelfTest.model_validate(each) for each in json.loads(done.stdout)]
    failed = [(result.check.label, result.reason) for outcome in outcomes for result in outcome.failed]
    assert failed == []
    assert done.returncode == 0, done.stderr
    assert "Kept as" in done.stderr
    by_device = {outcome.device: outcome.results for outcome in outcomes}
    assert set(by_device) == set(DeviceKind)
    ok = {result.check.name for result in by_device[CPU] if result.status is CheckStatus.OK}
    assert {"unmodified model", "int8_linear", "decode_step_w4", "bf16", "torch_compile", "latency"} <= ok
    missing = [device for device in by_device if not probe().has(device)]
    assert {result.status for device in missing for result in by_device[device]} <= {CheckStatus.NOT_POSSIBLE}


CUDA = DeviceKind.CUDA
BOX = Environment(
    hardware_class="1x NVIDIA H200 140 GiB",
    host_id="h",
    cpu_model="c",
    cpu_cores=8,
    memory_bytes=2**36,
    accelerators=(
        Accelerator(name="NVIDIA H200", memory_bytes=2**37, uuid="GPU-a", compute_capability="9.0"),
    ),
    driver="470.82",
    cuda="11.4",
    os="Linux",
    software={"torch": "2.13.0", "torch_cuda": "13.0"},
)


def refusal(*arguments: str, device: DeviceKind = CPU, within_s: float = PROOF_S) -> str:
    """What is said of a device whose process behaves like that."""
    with pytest.raises(UnsupportedError) as caught:
        prove(device, cancelled=lambda: None, program=program("unproven", *arguments), within_s=within_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.slow
def test_the_cpu_of_this_machine_works() -> None:
    prove(CPU, cancelled=lambda: None)


@pytest.mark.slow
def test_a_torch_that_cannot_use_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CPUs has no CUDA; a build for CUDA finds no GPU when none is shown to it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UnsupportedError, match=r"was built without CUDA and cannot use|torch finds no GPU"):
        prove(CUDA, cancelled=lambda: None)


def test_a_process_that_dies_says_its_last_words() -> None:
    said = refusal("dies")
    assert "ended with status 3" in said
    assert said.endswith("ImportError: libcudart.so.13; install torch again.")


def test_a_worker_that_is_to_stop_does_not_wait_for_the_proof() -> None:
    with pytest.raises(CancelledError, match="enough"):
        prove(CPU, cancelled=lambda: "enough", program=program("unproven", "hangs"))


def test_what_the_process_says_reaches_the_sentence() -> None:
    said = refusal("breaks", "RuntimeError: Found no NVIDIA driver on your system. Please check.")
    assert said.startswith("torch finds no GPU, although the driver lists")
    assert said.endswith("and that this user may open the files /dev/nvidia*.")
    assert "too little free memory to load torch" in refusal("has_no_memory", "DefaultCPUAllocator")


TOO_OLD = (
    "The NVIDIA driver 470.82 is too old for torch 2.13.0: it runs CUDA up to 11.4, and this torch was built for CUDA "
    "13.0; update the driver, or install a torch for CUDA 11.4 or older."
)
NO_KERNELS = (
    "torch 2.13.0 has no kernels for NVIDIA H200 (compute capability 9.0); install a torch that was built"
)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            "RuntimeError: The NVIDIA driver on your system is too old (found version 11040). Please update your GPU "
            "driver by downloading and installing a new version from the URL: "
            "http://www.nvidia.com/Download/index.aspx Alternatively, go to: https://pytorch.org to install a PyTorch "
            "version that has been compiled with your version of the CUDA driver.",
            TOO_OLD,
        ),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
            "NumCudaDevices() that might have already set an error? Error 804: forward compatibility was attempted on "
            "non supported HW",
            TOO_OLD,
        ),
        (
            "AssertionError: Torch not compiled with CUDA enabled",
            "torch 2.13.0 was built without CUDA and cannot use NVIDIA H200; install a CUDA build of torch, or start "
            "the worker with --device cpu.",
        ),
        (
            "AcceleratorError: CUDA error: no kernel image is available for execution on the device",
            NO_KERNELS,
        ),
        (
            "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
            "Another process has NVIDIA H200 for itself;",
        ),
        (
            "AcceleratorError: CUDA error: unspecified launch failure",
            "torch 2.13.0 cannot multiply small matrices on NVIDIA H200: AcceleratorError: CUDA error: unspecified "
            "launch failure; check the GPU with nvidia-smi,",
        ),
    ],
)
def test_an_error_of_torch_becomes_a_sentence_with_what_helps(error: str, said: str) -> None:
    assert sentence(ReplicateError(error), CUDA, BOX).startswith(said)
