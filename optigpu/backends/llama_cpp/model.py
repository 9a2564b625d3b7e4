"""A model in llama.cpp, by its own C interface."""

import ctypes
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from optigpu.backends.llama_cpp.gguf_file import tensor_types
from optigpu.vocabulary import OptiGPUError, UnsupportedError

SMALLEST_CONTEXT = 256
_ERROR = 4
"""ggml's log level of errors."""


class LlamaCppModel:
    """A context of one sequence, whose memory `begin` empties."""

    def __init__(self, path: Path, length: int, threads: int, exact: bool = False) -> None:
        """`length` tokens are the most that a sequence has.

        An exact one computes attention in float32, where llama.cpp's own choice is flash attention with a float16
        cache. Raises UnsupportedError when llama.cpp cannot load the file.
        """
        print_errors_only()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise UnsupportedError(f"llama.cpp could not load {path.name}.")
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = max(SMALLEST_CONTEXT, length)
        parameters.n_threads = parameters.n_threads_batch = threads
        if exact:
            parameters.type_k = parameters.type_v = llama_cpp.GGML_TYPE_F32
            parameters.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not self._context:
            raise UnsupportedError(f"llama.cpp could not make a context of {length} tokens.")
        self.vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self.weight_bytes = path.stat().st_size
        self.details = _details(path, threads)

    def begin(self) -> None:
        """A new sequence."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def forward(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after the last of `tokens`, float32 [vocabulary]; they are llama.cpp's own, until the next call."""
        # The batch keeps nothing but the address of this array, which must outlive the call.
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        status = llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(array)))
        if status:
            raise OptiGPUError(f"llama.cpp could not decode {len(tokens)} tokens: status {status}.")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self.vocabulary,))


def print_errors_only() -> None:
    """llama.cpp tells its whole story on stderr otherwise."""
    llama_cpp.llama_log_set(_ERRORS_ONLY, ctypes.c_void_p(0))


def _details(path: Path, threads: int) -> dict[str, Any]:
    """How llama.cpp was built, and what it runs with."""
    return {
        "flags": llama_cpp.llama_print_system_info().decode().strip(" |"),
        "threads": threads,
        "version": f"llama-cpp-python {llama_cpp.__version__}",
        "tensor_types": dict(Counter(tensor_types(path).values())),
    }


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _ERRORS_ONLY(level: int, text: bytes, _data: Any) -> None:  # noqa: N802 - a constant that ctypes calls
    if level == _ERROR:
        sys.stderr.write(text.decode(errors="replace"))
