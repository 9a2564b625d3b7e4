"""llama.cpp through the package llama-cpp-python."""

import ctypes

import llama_cpp
import numpy as np
from llama_cpp._ggml import libggml
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.library import Handle, Library, Quantizing, print_errors

_FILE_TYPE = "LLAMA_FTYPE_"


class LlamaCpp(Library):
    """llama.cpp's C interface."""

    title = "llama.cpp"

    def __init__(self) -> None:
        llama_cpp.llama_log_set(print_errors, ctypes.c_void_p(0))
        super().__init__(llama_cpp, libggml)

    def free_model(self, model: Handle) -> None:
        llama_cpp.llama_model_free(model)

    def clear(self, context: Handle) -> None:
        """Forgets the sequences, and what lies in their memory."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(context), (rows, vocabulary))

    def types(self) -> int:
        return int(llama_cpp.GGML_TYPE_COUNT)

    def file_types(self) -> dict[int, str]:
        names = (name for name in dir(llama_cpp) if name.startswith(_FILE_TYPE))
        return {
            getattr(llama_cpp, name): name.removeprefix(_FILE_TYPE)
            .removeprefix("MOSTLY_")
            .removeprefix("ALL_")
            for name in names
        }

    def flags(self) -> str:
        return str(llama_cpp.llama_print_system_info().decode()).strip(" |")

    def quantize(self, order: Quantizing) -> bool:
        parameters = llama_cpp.llama_model_quantize_default_params()
        parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{order.form.type}")
        parameters.nthread = order.threads
        parameters.pure = order.form.everywhere
        importance = {name: np.ascontiguousarray(found) for name, found in (order.importance or {}).items()}
        entries = (llama_cpp.llama_model_imatrix_data * (len(importance) + 1))()  # the last has no name
        for entry, (name, found) in zip(entries, importance.items(), strict=False):
            entry.name, entry.size = name.encode(), found.size
            entry.data = found.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        if importance:
            parameters.imatrix = entries
        names = str(order.plain).encode(), str(order.output).encode()
        return not llama_cpp.llama_model_quantize(*names, ctypes.byref(parameters))

    def _attend(self, parameters: ctypes.Structure, rows: int, attention: str | None) -> None:
        if attention:
            name = "ENABLED" if attention == "fused" else "DISABLED"
            parameters.flash_attn_type = getattr(llama_cpp, f"LLAMA_FLASH_ATTN_TYPE_{name}")
