"""`python -m benchmarks.peers.llama_cpp_loop`: llama.cpp on the same architecture, by its own C interface."""

import ctypes
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.arguments import parse, serve
from benchmarks.peers.gguf_file import write_gpt2

TYPES = {
    "F16": llama_cpp.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main() -> None:
    """Writes, quantizes and loads the model, and decodes as often as it is asked to."""
    options = parse(__doc__, tuple(TYPES))
    llama_cpp.llama_log_set(_SILENT, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    with tempfile.TemporaryDirectory() as folder:
        path = _file(options, Path(folder))
        model = llama_cpp.llama_model_load_from_file(
            str(path).encode(), llama_cpp.llama_model_default_params()
        )
        weight_bytes = path.stat().st_size
    vocabulary = json.loads(options.config).get("vocab_size", 50257)
    prompt = np.random.default_rng(options.seed).integers(vocabulary, size=options.prompt_tokens)
    loop = _Loop(model, options.prompt_tokens + options.new_tokens, options.threads, vocabulary)
    serve(lambda: loop.rate(prompt.tolist(), options.new_tokens), weight_bytes, options.warm_up)


def _file(options: Any, folder: Path) -> Path:
    """The GGUF file with the weights of the kind that was asked for; random weights, drawn from the seed."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if options.model_type != "gpt2":
        raise SystemExit(f"There is no GGUF writer for {options.model_type} here; ask for a gpt2 preset.")
    torch.manual_seed(options.seed)
    config = AutoConfig.for_model(options.model_type, **json.loads(options.config))
    plain = folder / "f16.gguf"
    write_gpt2(AutoModelForCausalLM.from_config(config), plain)
    if options.weights == "F16":
        return plain
    target = folder / "quantized.gguf"
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = TYPES[options.weights]
    parameters.nthread = options.threads
    failed = llama_cpp.llama_model_quantize(
        str(plain).encode(), str(target).encode(), ctypes.byref(parameters)
    )
    if failed:
        raise SystemExit(f"llama.cpp could not quantize to {options.weights}.")
    return target


class _Loop:
    """A context whose memory is emptied before each request."""

    def __init__(self, model: Any, length: int, threads: int, vocabulary: int) -> None:
        parameters = llama_cpp.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = max(256, length)
        parameters.n_threads = parameters.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, parameters)
        self._vocabulary = vocabulary

    def rate(self, prompt: list[int], new_tokens: int) -> float:
        """tokens/s after the first token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        token = self._next(prompt)
        started = time.perf_counter()
        for _ in range(new_tokens - 1):
            token = self._next([token])
        return (new_tokens - 1) / (time.perf_counter() - started)

    def _next(self, tokens: list[int]) -> int:
        batch = llama_cpp.llama_batch_get_one((llama_cpp.llama_token * len(tokens))(*tokens), len(tokens))
        if llama_cpp.llama_decode(self._context, batch):
            raise SystemExit("llama.cpp could not decode.")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocabulary,)).argmax())


@llama_cpp.llama_log_callback
def _SILENT(_level: int, _text: bytes, _data: Any) -> None:  # noqa: N802 - a constant that ctypes calls
    """llama.cpp tells its whole story on stderr."""


if __name__ == "__main__":
    main()
