"""Ways to run a model that no backend of the engine runs, each a separate process.

A peer prepares itself and prints a line of JSON: the bytes of its weights and how it was built, or the reason why it
cannot. Then it prints for each line that it reads the tokens/s of one more request. Nothing of OptiGPU is in the loop;
the weights are those that the engine would load.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optigpu.conductor.processes.variables import child_variables
from optigpu.engines.environments import program_of, variables_of
from optigpu.vocabulary import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """transformers on weights that a library has prepared, as `weights` says; `packages` are needed beside torch."""

    name: str
    weights: str
    packages: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The sentence that says what is not installed, or None."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f'{", ".join(absent)} not installed: pip install -e ".[peers]"' if absent else None


@dataclass(frozen=True)
class Asked:
    """What a peer is to do. `model` is a reference; `measure` is one of arguments.MEASURES.

    For logits `tokens` is the file of ids, of which `prefill` go at once, and `logits` the file to be written.
    """

    model: str
    measure: str = "decode"
    prompt_tokens: int = 32
    new_tokens: int = 64
    tokens: Path | None = None
    prefill: int = 1
    logits: Path | None = None

    def arguments(self) -> list[str]:
        """As a peer's command line has them."""
        values = {
            "--model": self.model,
            "--measure": self.measure,
            "--prompt-tokens": self.prompt_tokens,
            "--new-tokens": self.new_tokens,
            "--tokens": self.tokens,
            "--prefill": self.prefill,
            "--logits": self.logits,
        }
        return [word for name, value in values.items() if value is not None for word in (name, str(value))]


FP32 = Peer("Hugging Face eager, fp32", "float32")

PEERS = (
    FP32,
    Peer("Hugging Face eager, bf16", "bfloat16"),
    Peer("PyTorch dynamic INT8", "dynamic_int8"),
    Peer("bitsandbytes NF4", "nf4", ("bitsandbytes",)),
    Peer("torchao int8 weight-only", "torchao_int8", ("torchao",)),
    Peer("torchao int4 weight-only, bf16", "torchao_int4", ("torchao",)),
)
"""The peers of the tables, in their order."""

PUBLISHED = {"gpt2": (0.27, 0.85), "gpt2-medium": (0.26, 0.93), "gpt2-large": (0.26, 0.99)}
"""gpu-poor's published share of the bytes and speed against fp32; not measured here (the table of its README)."""


class Running:
    """A peer's process that is ready."""

    def __init__(self, process: "subprocess.Popen[str]", name: str) -> None:
        """Waits until it is ready. Raises UnsupportedError with its reason when it cannot."""
        self._process = process
        self._name = name
        told = self._told("")
        self.weight_bytes = int(told["weight_bytes"])
        self.details: dict[str, Any] = told["details"]

    def rate(self) -> float:
        """tokens/s of one more request. Raises UnsupportedError when the process fails."""
        return float(self._told("\n"))

    def _told(self, said: str) -> Any:
        """The next line of JSON."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with suppress(BrokenPipeError):  # a process that has ended is detected below
            stdin.write(said)
            stdin.flush()
        line = stdout.readline()
        if not line:
            raise UnsupportedError(f"{self._name} failed; what it printed is above.")
        told = json.loads(line)
        if isinstance(told, dict) and "reason" in told:
            raise UnsupportedError(told["reason"])
        return told


@contextmanager
def running(peer: Peer, asked: Asked, threads: int) -> Iterator[Running]:
    """A peer that is ready to do what it is asked, with so many threads.

    Raises UnsupportedError when a package is missing or the peer cannot or fails.
    """
    reason = peer.missing()
    if reason:
        raise UnsupportedError(reason)
    arguments = ["--weights", peer.weights, *asked.arguments()]
    with answering("benchmarks.peers.transformers_loop", arguments, peer.name, threads) as process:
        yield process


@contextmanager
def answering(
    module: str, arguments: Sequence[str], name: str, threads: int, backend: str = "torch"
) -> Iterator[Running]:
    """A process that answers as peers do, ready, in the environment of the backend's engine if it has one.

    Raises UnsupportedError when it cannot or fails.
    """
    command = program_of(backend, [sys.executable, "-m", module, "--threads", str(threads), *arguments])
    pipe, variables = subprocess.PIPE, child_variables(threads) | variables_of(backend)
    with subprocess.Popen(command, cwd=ROOT, env=variables, text=True, stdin=pipe, stdout=pipe) as process:
        try:
            yield Running(process, name)
        finally:
            process.kill()
