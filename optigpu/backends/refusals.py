"""What backends answer alike when an engine cannot do something. Imports no engine."""

from optigpu.vocabulary import OutOfMemoryError

_OF_AN_ALLOCATION = ("bad_alloc", "failed to allocate memory", "memoryallocationfailed")
"""In lower case: C++'s words, ONNX Runtime's and ExecuTorch's."""


def allocation_failed(error: Exception) -> bool:
    """Whether an error of an engine on a CPU means that memory ran out."""
    if isinstance(error, (MemoryError, OutOfMemoryError)):
        return True
    said = str(error).lower()
    return any(words in said for words in _OF_AN_ALLOCATION)
