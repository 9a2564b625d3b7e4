"""A device proves that it works: the real process on this machine's CPU, and what is said of devices that fail."""

import pytest

from optigpu.child.messages import Broken
from optigpu.conductor.proof import PROOF_S, prove, sentence
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.vocabulary import CancelledError, DeviceKind, UnsupportedError
from tests.engine.processes import program

CPU, CUDA = DeviceKind.CPU, DeviceKind.CUDA
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


def test_a_process_that_proves_is_believed() -> None:
    prove(CUDA, cancelled=lambda: None, program=program("unproven", "proves"))


def test_a_process_that_dies_says_its_last_words() -> None:
    said = refusal("dies")
    assert "ended with status 3" in said
    assert said.endswith("ImportError: libcudart.so.13; install torch again.")


def test_a_process_that_is_silent_has_failed() -> None:
    assert "there was no answer within 0.5 s" in refusal("hangs", within_s=0.5)


def test_an_answer_to_another_question_is_no_proof() -> None:
    assert "answered 'round', which was not asked for" in refusal("digresses")


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
            "RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version",
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
            "RuntimeError: CUDA error: CUBLAS_STATUS_ARCH_MISMATCH when calling `cublasSgemm( handle, opa, opb, m)`",
            NO_KERNELS,
        ),
        (
            "RuntimeError: No CUDA GPUs are available",
            "torch finds no GPU, although the driver lists NVIDIA H200;",
        ),
        (
            "RuntimeError: CUDA error: all CUDA-capable devices are busy or unavailable",
            "Another process has NVIDIA H200 for itself;",
        ),
        (
            "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
            "The fabric manager of NVIDIA H200 does not run;",
        ),
        (
            "AcceleratorError: CUDA error: unspecified launch failure",
            "torch 2.13.0 cannot multiply small matrices on NVIDIA H200: AcceleratorError: CUDA error: unspecified "
            "launch failure; check the GPU with nvidia-smi,",
        ),
        (
            "the product of two matrices of small whole numbers is wrong",
            "torch 2.13.0 cannot multiply small matrices on NVIDIA H200: the product of two matrices",
        ),
    ],
)
def test_an_error_of_torch_becomes_a_sentence_with_what_helps(error: str, said: str) -> None:
    assert sentence(Broken(fault="error", reason=error), CUDA, BOX).startswith(said)


def test_a_gpu_without_memory_says_who_may_have_it() -> None:
    error = "There was not enough memory: CUDA out of memory. Tried to allocate 20.00 MiB."
    assert sentence(Broken(fault="out_of_memory", reason=error), CUDA, BOX) == (
        "NVIDIA H200 has too little free memory to multiply small matrices; end the processes that hold it (nvidia-smi "
        "shows them) and start the worker again."
    )


def test_what_a_driver_does_not_tell_is_said_to_be_unknown() -> None:
    untold = BOX.model_copy(update={"driver": None, "cuda": None})
    error = Broken(fault="error", reason="The NVIDIA driver on your system is too old")
    assert sentence(error, CUDA, untold).startswith(
        "The NVIDIA driver unknown is too old for torch 2.13.0: it runs"
    )


def test_the_facts_are_those_of_this_machine() -> None:
    assert f"torch {probe().software['torch']} cannot" in refusal("breaks", "ValueError: no")
