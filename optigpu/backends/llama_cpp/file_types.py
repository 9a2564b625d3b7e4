"""The kinds of weights that a GGUF file is written with here."""

from enum import StrEnum


class FileType(StrEnum):
    """llama.cpp's names. A file of 4 or 8 bits keeps vectors in F32, and some matrices in more bits than it says."""

    F32 = "F32"
    F16 = "F16"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_K_M = "Q4_K_M"
