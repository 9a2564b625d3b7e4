"""Whether this machine has the device that a job asks for, known before any process starts. Every machine has a CPU."""

import os
from collections.abc import Iterator

from optigpu.documents.result import Environment
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import UnsupportedError

OTHERWISE = "set device to cpu, or submit the job to a service with such a worker"


def require_device(spec: JobSpec, environment: Environment) -> None:
    """Raises UnsupportedError if a job for CUDA cannot run on this machine, and says why."""
    problem = next(_problems(spec, environment), None)
    if problem:
        raise UnsupportedError(problem)


def _problems(spec: JobSpec, environment: Environment) -> Iterator[str]:
    """What stands against a job for CUDA, the most fundamental first. It would run on the first of the GPUs."""
    if not environment.accelerators:
        yield f"device: this machine has no NVIDIA GPU that works ({_why_none(environment)}); {OTHERWISE}."
        return
    gpu, target = environment.accelerators[0], spec.target
    if (target.gpu or "").lower() not in gpu.name.lower():
        yield f"target.gpu: this machine's GPU is {gpu.name}, not {target.gpu}; leave it out, or submit the job."
    if gpu.memory_bytes < target.min_vram_bytes:
        yield (
            f"target.min_vram_bytes: this machine's GPU has {gpu.memory_bytes} bytes, fewer than "
            f"{target.min_vram_bytes}; ask for less, or submit the job."
        )
    torch = environment.software.get("torch")
    if torch and "torch_cuda" not in environment.software and "torch" in _backends(spec):
        yield f"device: torch {torch} here is a build for CPUs; install one for CUDA, or {OTHERWISE}."


def _why_none(environment: Environment) -> str:
    if environment.driver is None:
        return "no NVIDIA driver answers"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    return "CUDA_VISIBLE_DEVICES hides each" if hidden else "its driver lists none"


def _backends(spec: JobSpec) -> set[str]:
    return {spec.backend, *(each.backend for each in spec.beside)}
