"""llama.cpp's messages: errors go to stderr, the others nowhere."""

import ctypes
import sys

import llama_cpp

_ERROR = 4
"""ggml's log level of errors."""


def print_errors_only() -> None:
    """Without it llama.cpp describes each file and context on stderr."""
    llama_cpp.llama_log_set(_CALLBACK, ctypes.c_void_p(0))


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_CALLBACK = llama_cpp.llama_log_callback(_print_error)
"""llama.cpp keeps its address, so it must live as long as the process."""
