"""What backends answer alike when an engine cannot do something. Imports no engine."""

from collections.abc import Sequence

from optigpu.documents.result import Environment
from optigpu.vocabulary import OutOfMemoryError, UnsupportedError
from optigpu.workloads.base import Workload

_OF_AN_ALLOCATION = ("bad_alloc", "failed to allocate memory")
"""In lower case: C++'s words and ONNX Runtime's."""


def packages_missing(packages: Sequence[str], environment: Environment, install: str) -> str | None:
    """Which of the packages are not installed, with the command that installs them, or None."""
    absent = [package for package in packages if package not in environment.software]
    if not absent:
        return None
    are, them = ("is", "it") if len(absent) == 1 else ("are", "them")
    return f"{' and '.join(absent)} {are} not installed; install {them} with: {install}"


def workload_refused(engine: str, workload: Workload, kinds: Sequence[str]) -> str | None:
    """Why an engine cannot run a workload, or None.

    It runs these kinds, on random tokens with greedy decoding and on random images.
    """
    if workload.kind not in kinds:
        return f"{engine} does not run the workload {workload.kind}; it runs {', '.join(kinds)}."
    if workload.has_labels:
        return f"{engine} reads no images; leave images out, or ask for the backend torch."
    if workload.is_sampled or workload.has_text:
        return (
            f"{engine} decodes random prompts greedily; leave prompt, temperature and top_p out, or ask for the "
            "backend torch."
        )
    return None


def no_operators(engine: str) -> UnsupportedError:
    """The error of an engine that is asked for the machine's peaks."""
    return UnsupportedError(
        f"{engine} has no operators to measure the machine's peaks with; ask the backend torch for them."
    )


def allocation_failed(error: Exception) -> bool:
    """Whether an error of an engine on a CPU means that memory ran out."""
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        return True
    said = str(error).lower()
    return any(words in said for words in _OF_AN_ALLOCATION)
