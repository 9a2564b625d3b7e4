"""llama.cpp through the package llama-cpp-python."""

import ctypes
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.file_types import Asked
from optigpu.backends.llama_cpp.importance import ImportanceList
from optigpu.backends.llama_cpp.library import Batch, Handle, Quantizing, named

_ERROR = 4
"""ggml's log level of errors."""


class LlamaCpp:
    """llama.cpp's C interface, which prints errors alone."""

    title = "llama.cpp"

    def __init__(self) -> None:
        llama_cpp.llama_log_set(_CALLBACK, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()

    def load(self, path: Path) -> Handle | None:
        """With llama.cpp's defaults."""
        defaults = llama_cpp.llama_model_default_params()
        found: Handle | None = llama_cpp.llama_model_load_from_file(str(path).encode(), defaults)
        return found

    def free_model(self, model: Handle) -> None:
        """Frees the weights."""
        llama_cpp.llama_model_free(model)

    def context(self, model: Handle, rows: int, length: int, asked: Asked) -> Handle | None:
        """With a batch as long as all sequences together."""
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = rows * length
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = asked.threads
        if asked.keys:
            parameters.type_k = getattr(llama_cpp, f"GGML_TYPE_{asked.keys}")
        if asked.values:
            parameters.type_v = getattr(llama_cpp, f"GGML_TYPE_{asked.values}")
        if asked.attention:
            name = "ENABLED" if asked.attention == "fused" else "DISABLED"
            parameters.flash_attn_type = getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{name}")
        if asked.together:
            parameters.n_ubatch = asked.together
        found: Handle | None = llama_cpp.llama_init_from_model(model, parameters)
        return found

    def free(self, context: Handle) -> None:
        """Frees the keys and values."""
        llama_cpp.llama_free(context)

    def clear(self, context: Handle) -> None:
        """Forgets the sequences, and what lies in their memory."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def batch(self, arrays: Batch) -> object:
        """A llama_batch."""
        return llama_cpp.llama_batch(**arrays.fields())

    def decode(self, context: Handle, batch: object) -> int:
        """llama_decode."""
        return int(llama_cpp.llama_decode(context, batch))

    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        """llama_get_logits."""
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (rows, vocabulary))

    def type_name(self, number: int) -> str:
        """ggml_type_name."""
        return named(libggml, number, llama_cpp.GGML_TYPE_COUNT)

    def flags(self) -> str:
        """llama_print_system_info."""
        return str(llama_cpp.llama_print_system_info().decode()).strip(" |")

    def quantize(self, order: Quantizing) -> bool:
        """llama_model_quantize."""
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{order.form.type}")
        parameters.nthread = order.threads
        parameters.pure = order.form.everywhere
        importance = ImportanceList(llama_cpp.llama_model_imatrix_data, order.importance or {})
        if order.importance:
            parameters.imatrix = importance.address
        names = str(order.plain).encode(), str(order.output).encode()
        return not llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters))


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_CALLBACK = llama_cpp.llama_log_callback(_print_error)
"""llama.cpp keeps its address, so it must live as long as the process."""
