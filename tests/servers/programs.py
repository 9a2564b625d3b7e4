"""Real servers of completions on this machine, started by a test and ended with it."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from optigpu.engines.environments import environment_of, variables_of
from tests.engine.llama_server import started, with_tokenizer
from tests.servers.process import running

ONE_THREAD = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@contextmanager
def transformers_serve(model: Path, folder: Path) -> Iterator[str]:
    """`transformers serve`; its model is called by its folder. Gives URL#MODEL."""
    program = Path(sys.executable).with_name("transformers")
    arguments = (
        "serve",
        str(model),
        "--device",
        "cpu",
        "--dtype",
        "float32",
        "--host",
        "127.0.0.1",
        "--port",
    )
    with running([str(program), *arguments], "/health", folder, ONE_THREAD) as url:
        yield f"{url}#{model}"


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[str]:
    """vLLM's own server, in its environment. Gives URL#MODEL."""
    environment = environment_of("vllm")
    assert environment is not None
    server = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    variables = (
        ONE_THREAD
        | variables_of("vllm")
        | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    )
    server += ["--enforce-eager", "--host", "127.0.0.1", "--port"]
    with running(server, "/health", folder, variables) as url:
        yield f"{url}#tiny"


@contextmanager
def llama_server(model: Path, folder: Path) -> Iterator[str]:
    """llama.cpp's server, with the model in float32 and its tokenizer's words. Gives URL#MODEL."""
    from optigpu.backends.llama_cpp.gguf_tensors import write  # imports gguf and torch
    from optigpu.models.loading.load import load_model
    from optigpu.models.reference import parse_reference

    plain, whole = folder / "plain.gguf", folder / "whole.gguf"
    write(load_model(parse_reference("bundled:tiny"), device="cpu", dtype="float32"), plain, "float32")
    with_tokenizer(plain, whole, model / "tokenizer.json")
    with started(whole, folder, slots=4, length=256, threads=1) as endpoint:
        yield endpoint
