"""Real servers of completions on this machine, started by a test and ended with it."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from optigpu.engines.environments import environment_of, variables_of

STARTS_WITHIN_S = 600.0


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
    with _running([str(program), *arguments], "/health", folder) as url:
        yield f"{url}#{model}"


@contextmanager
def vllm_server(model: Path, folder: Path) -> Iterator[str]:
    """vLLM's own server, in its environment. Gives URL#MODEL."""
    environment = environment_of("vllm")
    assert environment is not None
    server = [str(environment.python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    server += ["--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "256"]
    variables = variables_of("vllm") | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    server += ["--enforce-eager", "--host", "127.0.0.1", "--port"]
    with _running(server, "/health", folder, variables) as url:
        yield f"{url}#tiny"


@contextmanager
def _running(
    command: Sequence[str], page: str, folder: Path, variables: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The server's address, once `page` answers; the port is appended to the command."""
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("w") as printed:
        process = subprocess.Popen(
            [*command, str(port)],
            env=kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(variables or {}),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(process, url + page, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(process: subprocess.Popen[bytes], page: str, log: Path) -> None:
    until = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(page, timeout=5.0, trust_env=False).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{page} did not answer: {log.read_text()[-3000:]}")


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
