"""ik_llama.cpp through the package ik-llama-cpp-python, and what that leaves out through ctypes.

python -m optigpu.backends.ik_llama_cpp.native quantizes one GGUF file, as llama_cpp.convert does with llama.cpp.
"""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from numpy.typing import NDArray

from optigpu.backends.converted import converter_parser
from optigpu.backends.ik_llama_cpp.engine import (
    FILE_TYPES,
    ROWS_OF,
    TENSOR_TYPES,
    QuantizeParameters,
    of_tensors,
)
from optigpu.backends.llama_cpp.convert import add_quantizing, quantize
from optigpu.backends.llama_cpp.library import Handle, Library, Quantizing, print_errors
from optigpu.models.gguf_header import read_header
from optigpu.vocabulary import UnsupportedError

_INTERLEAVED = re.compile(r"_R\d+$")
_LIBRARY = api._lib
_GGML = ctypes.CDLL(str(Path(_LIBRARY._name).with_name("libggml.so")))


class IkLlamaCpp(Library):
    """ik_llama.cpp's C interface."""

    title = "ik_llama.cpp"

    def __init__(self) -> None:
        _LIBRARY.llama_log_set(print_errors, ctypes.c_void_p(0))
        super().__init__(api, _GGML)

    def free_model(self, model: Handle) -> None:
        api.llama_free_model(model)

    def clear(self, context: Handle) -> None:
        """Forgets the sequences."""
        api.llama_kv_cache_clear(context)

    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        get = _LIBRARY.llama_get_logits
        get.restype, get.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
        return np.ctypeslib.as_array(get(context), (rows, vocabulary))

    def types(self) -> int:
        """GGML_TYPE_COUNT, which stands where no type is named."""
        return int(_defaults().output_tensor_type)

    def file_types(self) -> dict[int, str]:
        return {number: name for name, number in FILE_TYPES.items()}

    def flags(self) -> str:
        told = _LIBRARY.llama_print_system_info
        told.restype, told.argtypes = ctypes.c_char_p, []
        text: bytes = told()
        return text.decode().strip(" |")

    def quantize(self, order: Quantizing) -> bool:
        """llama_model_quantize. With `everywhere` every matrix is named the type, as llama-quantize is told it.

        Raises UnsupportedError for a library whose structure of parameters is another, and for rows that are no whole
        blocks of the type, on which the library would end the process.
        """
        parameters = _defaults()
        kind = order.form.type
        if order.form.everywhere:
            _GGML.ggml_blck_size.restype, _GGML.ggml_blck_size.argtypes = ctypes.c_int64, [ctypes.c_int]
            block = _GGML.ggml_blck_size(self.type_number(of_tensors(kind)))
            for tensor in read_header(order.plain).tensors:
                if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.shape[0] % block:
                    raise UnsupportedError(
                        f"{kind} keeps rows in blocks of {block} numbers, and {tensor.name} has rows of "
                        f"{tensor.shape[0]}; leave pure out, or ask for a type with smaller blocks, such as Q4_0."
                    )
        parameters.ftype = FILE_TYPES[kind]
        parameters.nthread = order.threads
        if order.form.everywhere:
            parameters.pure = True
            # Rows of an embedding are looked up one by one, so they cannot be interleaved.
            parameters.token_embedding_type = self.type_number(
                ROWS_OF.get(kind, _INTERLEAVED.sub("", of_tensors(kind)))
            )
            parameters.output_tensor_type = self.type_number(of_tensors(kind))
        run = _LIBRARY.llama_model_quantize
        run.restype = ctypes.c_uint32
        run.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        return not run(str(order.plain).encode(), str(order.output).encode(), ctypes.byref(parameters))

    def _attend(self, parameters: ctypes.Structure, rows: int, attention: str | None) -> None:
        """Flash attention for a single sequence alone: with several the library would end the process."""
        if rows > 1 and attention == "fused":
            raise UnsupportedError(
                "ik_llama.cpp's flash attention ends on an assertion where several sequences are decoded together; ask "
                "for a batch of 1, or leave out llama_flash_attention and values of 8 and 4 bits."
            )
        if attention or rows > 1:
            parameters.flash_attn = attention == "fused"


def _defaults() -> QuantizeParameters:
    """llama_model_quantize_default_params, checked: it names no type for any matrix and has no pointers."""
    make = _LIBRARY.llama_model_quantize_default_params
    make.restype, make.argtypes = QuantizeParameters, []
    parameters: QuantizeParameters = make()
    none = {getattr(parameters, name) for name in TENSOR_TYPES}
    if len(none) != 1 or parameters.imatrix or parameters.kv_overrides:
        raise UnsupportedError(
            "This ik_llama.cpp takes other parameters for quantizing than the version that OptiGPU installs; install "
            "that with: optigpu engines install ik_llama_cpp"
        )
    return parameters


def main() -> int:
    """Quantizes a file of F16; the exit status is as llama_cpp.convert's."""
    parser = converter_parser("optigpu.backends.ik_llama_cpp.native", __doc__, "file", needs_model=False)
    add_quantizing(parser)
    return quantize(parser.parse_args(), IkLlamaCpp())


if __name__ == "__main__":
    sys.exit(main())
