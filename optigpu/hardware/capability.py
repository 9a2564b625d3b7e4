"""What a GPU must at least be, said in one sentence where it is less."""

from optigpu.documents.result import Environment


def needs_capability(environment: Environment, least: tuple[int, int], what: str) -> str | None:
    """Why the first GPU has too low a compute capability for `what`, or None.

    A driver that does not tell its capability gets the benefit of the doubt: torch then speaks for itself.
    """
    if not environment.accelerators:
        return f"{what} need an NVIDIA GPU and there is none; leave it out or run it on another machine."
    gpu = environment.accelerators[0]
    if gpu.compute_capability is None or _parts(gpu.compute_capability) >= least:
        return None
    needed = ".".join(map(str, least))
    return (
        f"{what} need compute capability {needed} and {gpu.name} has {gpu.compute_capability}; leave it out or run it "
        "on a newer GPU."
    )


def _parts(capability: str) -> tuple[int, ...]:
    return tuple(int(part) for part in capability.split("."))
