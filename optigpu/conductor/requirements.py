"""Whether this machine has the device that a job asks for, known before any process starts. Every machine has a CPU."""

from collections.abc import Iterator

from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import KINDS, devices_of, no_device
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import UnsupportedError

OTHERWISE = ", or submit the job to a service with such a worker"


def require_device(spec: JobSpec, environment: Environment) -> None:
    """Raises UnsupportedError if a job for a GPU cannot run on this machine, and says why."""
    problem = next(_problems(spec, environment), None)
    if problem:
        raise UnsupportedError(problem)


def _problems(spec: JobSpec, environment: Environment) -> Iterator[str]:
    """What stands against a job for a GPU, the most fundamental first. It would run on the first of its kind."""
    gpus = environment.gpus(spec.device)
    if not gpus:
        why = no_device(spec.device, environment)
        yield f"device: {why[0].lower()}{why[1:]}; set device to {devices_of(environment)}{OTHERWISE}."
        return
    gpu, target, built = gpus[0], spec.target, KINDS[spec.device].built
    if (target.gpu or "").lower() not in gpu.name.lower():
        yield f"target.gpu: this machine's GPU is {gpu.name}, not {target.gpu}; leave it out, or submit the job."
    if gpu.memory_bytes < target.min_vram_bytes:
        yield (
            f"target.min_vram_bytes: this machine's GPU has {gpu.memory_bytes} bytes, fewer than "
            f"{target.min_vram_bytes}; ask for less, or submit the job."
        )
    torch = environment.software.get("torch")
    if torch and built and built not in environment.software and "torch" in _backends(spec):
        yield (
            f"device: torch {torch} here was not built for {spec.device.upper()}; install one that was, or set device "
            f"to cpu{OTHERWISE}."
        )


def _backends(spec: JobSpec) -> set[str]:
    return {spec.backend, *(each.backend for each in spec.beside)}
