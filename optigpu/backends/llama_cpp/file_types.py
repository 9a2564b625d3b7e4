"""The kinds of weights that a GGUF file is written with here."""

from enum import StrEnum

from optigpu.techniques.base import LoadOptions, Technique


class FileType(StrEnum):
    """llama.cpp's names. A file of 4 or 8 bits keeps vectors in F32, and some matrices in more bits than it says."""

    F32 = "F32"
    F16 = "F16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_K_M = "Q4_K_M"


def file_type_of(stack: tuple[Technique, ...]) -> FileType:
    """What a stack asks for; F32 without a technique that names a type."""
    options = LoadOptions()
    for technique in stack:
        options = technique.load(options)
    return FileType(options.gguf or "F32")


def product_dtypes_of(kind: FileType) -> tuple[str, ...]:
    """What llama.cpp multiplies besides floats: weights of 8 bits and fewer meet activations that it rounds to int8."""
    return () if kind in (FileType.F32, FileType.F16) else ("int8",)
