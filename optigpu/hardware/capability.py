"""The compute capability that a technique needs of the GPU."""

from optigpu.documents.result import Environment
from optigpu.vocabulary import DeviceKind


def needs_capability(environment: Environment, least: tuple[int, int], what: str) -> str | None:
    """Why the first GPU is too old for `what`, or None.

    A driver that does not tell its capability is taken to be new enough; torch reports an error if it is not.
    """
    gpus = environment.gpus(DeviceKind.CUDA)
    if not gpus:
        return f"{what} need an NVIDIA GPU, and this machine has none; leave the technique out or use another machine."
    gpu = gpus[0]
    if gpu.compute_capability is None or _parts(gpu.compute_capability) >= least:
        return None
    needed = ".".join(map(str, least))
    return (
        f"{what} need compute capability {needed} and {gpu.name} has {gpu.compute_capability}; leave the technique "
        "out or use a newer GPU."
    )


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
