"""ik_llama.cpp through the package ik-llama-cpp-python, and what that leaves out through ctypes."""

import ctypes
import re
import sys
from pathlib import Path

import numpy as np
from ik_llama_cpp import _ctypes_api as api
from numpy.typing import NDArray

from optigpu.backends.ik_llama_cpp.structures import (
    FILE_TYPES,
    ROWS_OF,
    TENSOR_TYPES,
    QuantizeParameters,
    of_tensors,
)
from optigpu.backends.llama_cpp.file_types import Asked
from optigpu.backends.llama_cpp.gguf_header import read_header
from optigpu.backends.llama_cpp.library import Batch, Handle, Quantizing, named
from optigpu.vocabulary import UnsupportedError

SEVERAL = (
    "ik_llama.cpp's flash attention ends on an assertion where several sequences are decoded together; ask for a batch "
    "of 1, or leave out llama_flash_attention and values of 8 and 4 bits."
)
_ERROR = 4
"""ggml's log level of errors."""
_INTERLEAVED = re.compile(r"_R\d+$")
_LIBRARY = api._lib
_GGML = ctypes.CDLL(str(Path(_LIBRARY._name).with_name("libggml.so")))
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


class IkLlamaCpp:
    """ik_llama.cpp's C interface, which prints errors alone."""

    title = "ik_llama.cpp"

    def __init__(self) -> None:
        _LIBRARY.llama_log_set(_CALLBACK, ctypes.c_void_p(0))
        api.llama_backend_init()

    def load(self, path: Path) -> Handle | None:
        """With the fork's defaults."""
        defaults = api.llama_model_default_params()
        found: Handle | None = api.llama_model_load_from_file(str(path).encode(), defaults)
        return found

    def free_model(self, model: Handle) -> None:
        """Frees the weights."""
        api.llama_free_model(model)

    def context(self, model: Handle, rows: int, length: int, asked: Asked) -> Handle | None:
        """With a batch as long as all sequences together, and flash attention for a single sequence alone.

        Raises UnsupportedError where it is asked for with several: the library would end the process.
        """
        if rows > 1 and asked.attention == "fused":
            raise UnsupportedError(SEVERAL)
        parameters = api.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = rows * length
        parameters.n_seq_max = rows
        parameters.n_threads = parameters.n_threads_batch = asked.threads
        if asked.keys:
            parameters.type_k = _type(asked.keys)
        if asked.values:
            parameters.type_v = _type(asked.values)
        if asked.attention or rows > 1:
            parameters.flash_attn = asked.attention == "fused"
        if asked.together:
            parameters.n_ubatch = asked.together
        found: Handle | None = api.llama_init_from_model(model, parameters)
        return found

    def free(self, context: Handle) -> None:
        """Frees the keys and values."""
        api.llama_free(context)

    def clear(self, context: Handle) -> None:
        """Forgets the sequences."""
        api.llama_kv_cache_clear(context)

    def batch(self, arrays: Batch) -> object:
        """A llama_batch."""
        return api.llama_batch(**arrays.fields())

    def decode(self, context: Handle, batch: object) -> int:
        """llama_decode."""
        return int(api.llama_decode(context, batch))

    def logits(self, context: Handle, rows: int, vocabulary: int) -> NDArray[np.float32]:
        """llama_get_logits."""
        get = _LIBRARY.llama_get_logits
        get.restype, get.argtypes = ctypes.POINTER(ctypes.c_float), [ctypes.c_void_p]
        return np.ctypeslib.as_array(get(context), (rows, vocabulary))

    def type_name(self, number: int) -> str:
        """ggml_type_name."""
        return named(_GGML, number, _types())

    def flags(self) -> str:
        """llama_print_system_info."""
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
            _require_whole_blocks(order.plain, kind)
        parameters.ftype = FILE_TYPES[kind]
        parameters.nthread = order.threads
        if order.form.everywhere:
            parameters.pure = True
            # Rows of an embedding are looked up one by one, so they cannot be interleaved.
            parameters.token_embedding_type = _type(ROWS_OF.get(kind, _INTERLEAVED.sub("", of_tensors(kind))))
            parameters.output_tensor_type = _type(of_tensors(kind))
        run = _LIBRARY.llama_model_quantize
        run.restype = ctypes.c_uint32
        run.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p]
        return not run(str(order.plain).encode(), str(order.output).encode(), ctypes.byref(parameters))


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


def _require_whole_blocks(plain: Path, kind: str) -> None:
    _GGML.ggml_blck_size.restype, _GGML.ggml_blck_size.argtypes = ctypes.c_int64, [ctypes.c_int]
    block = _GGML.ggml_blck_size(_type(of_tensors(kind)))
    for tensor in read_header(plain).tensors:
        if tensor.name.endswith(".weight") and len(tensor.shape) == 2 and tensor.shape[0] % block:
            raise UnsupportedError(
                f"{kind} keeps rows in blocks of {block} numbers, and {tensor.name} has rows of {tensor.shape[0]}; "
                "leave pure out, or ask for a type with smaller blocks, such as Q4_0."
            )


def _type(name: str) -> int:
    """The number of a tensor's type by its name."""
    count = _types()
    return next(number for number in range(count) if named(_GGML, number, count).upper() == name)


def _types() -> int:
    """GGML_TYPE_COUNT, which stands where no type is named."""
    return int(_defaults().output_tensor_type)


def _print_error(level: int, text: bytes, _data: object) -> None:
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_CALLBACK = _LOG(_print_error)
"""The library keeps its address, so it must live as long as the process."""
