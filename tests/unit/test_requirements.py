"""A job for a device that is not there is refused before anything starts. The GPUs are made up."""

from typing import Any

import pytest

from optigpu.conductor.requirements import require_device
from optigpu.documents.result import Accelerator, Environment
from optigpu.hardware import probe
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import UnsupportedError

T4 = Accelerator(name="Tesla T4", memory_bytes=15 * 10**9, uuid="GPU-a")


def machine(*gpus: Accelerator, driver: str | None = "580.00", **software: str) -> Environment:
    return probe().model_copy(update={"accelerators": gpus, "driver": driver, "software": software})


def asked(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"workload": {"kind": "matmul"}, "device": "cuda"} | fields)


def refusal(environment: Environment, **fields: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        require_device(asked(**fields), environment)
    return str(caught.value)


def test_a_machine_without_a_driver() -> None:
    assert refusal(machine(driver=None)) == (
        "device: this machine has no NVIDIA GPU that works (no NVIDIA driver answers); set device to cpu, or submit "
        "the job to a service with such a worker."
    )


def test_a_driver_whose_gpus_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "(CUDA_VISIBLE_DEVICES hides each)" in refusal(machine())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert "(its driver lists none)" in refusal(machine())


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (
            {"gpu": "H100"},
            "target.gpu: this machine's GPU is Tesla T4, not H100; leave it out, or submit the job.",
        ),
        (
            {"min_vram_bytes": 16 * 10**9},
            "target.min_vram_bytes: this machine's GPU has 15000000000 bytes, fewer than",
        ),
    ],
)
def test_another_gpu_than_the_job_asks_for(target: dict[str, Any], words: str) -> None:
    assert refusal(machine(T4), target=target).startswith(words)


def test_a_torch_for_cpus_beside_a_gpu() -> None:
    cpu_only = machine(T4, torch="2.13.0+cpu")
    assert refusal(cpu_only).startswith(
        "device: torch 2.13.0+cpu here was not built for CUDA; install one that was, or set device to cpu"
    )


def test_what_fits_is_let_through() -> None:
    fitting = {"gpu": "t4", "min_vram_bytes": 15 * 10**9}
    require_device(asked(target=fitting), machine(T4, torch="2.13.0", torch_cuda="13.0"))
