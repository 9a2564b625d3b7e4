"""Which processes are OptiGPU's own service: its API and its workers, which a user is not asked to stop."""

from collections.abc import Sequence
from pathlib import PurePath

SERVICE = "OptiGPU's own service"
"""The name under which their CPU time is shown."""

_MODULES = ("api", "worker")


def is_service(command: Sequence[str]) -> bool:
    """Whether a command line starts the API, a worker or the `optigpu` command, as the documentation does."""
    if not command:
        return False
    if any(PurePath(word).name == "optigpu" for word in command[:2]):
        return True
    python = PurePath(command[0]).name.startswith("python")
    celery = any(PurePath(word).name == "celery" for word in command[:3])
    return (python and _module(command) in _MODULES) or (celery and "worker.app" in " ".join(command))


def _module(command: Sequence[str]) -> str | None:
    """The first part of the module that Python runs: `optigpu` for `python -m optigpu.child.proof`."""
    if "-m" not in command[:-1]:
        return None
    return command[command.index("-m") + 1].split(".")[0]
