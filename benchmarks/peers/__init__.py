"""Other ways to decode, each a process of its own that answers with tokens/s: what the stack is compared with.

A peer prepares itself, prints "ready" and the bytes of its weights, and then for each line that it reads the tokens/s
of one more request, after the first token, by greedy decoding. Nothing of OptiGPU is in the loop.
"""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from optigpu.conductor.variables import child_variables
from optigpu.models.presets import PRESETS
from optigpu.vocabulary import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Peer:
    """`loop` is the module that decodes, `weights` what it is told of them, `packages` what it needs beside torch."""

    name: str
    loop: str
    weights: str
    packages: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """The sentence that says what is not installed, or None."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f'{", ".join(absent)} not installed: pip install -e ".[quant,peers]"' if absent else None


PEERS = (
    Peer("Hugging Face eager, fp32", "transformers_loop", "float32"),
    Peer("Hugging Face eager, bf16", "transformers_loop", "bfloat16"),
    Peer("PyTorch dynamic INT8", "transformers_loop", "dynamic_int8"),
    Peer("bitsandbytes NF4", "transformers_loop", "nf4", ("bitsandbytes",)),
    Peer("torchao int8 weight-only", "transformers_loop", "torchao_int8", ("torchao",)),
    *(
        Peer(f"llama.cpp {weights}", "llama_cpp_loop", weights, ("llama_cpp", "gguf"))
        for weights in ("F16", "Q8_0", "Q4_0", "Q4_K_M")
    ),
)
"""The peers of the tables, in their order; the first is what the others are divided by."""


class Running:
    """A peer's process that stands ready."""

    def __init__(self, process: "subprocess.Popen[str]", name: str) -> None:
        self._process = process
        self._name = name
        word, _, number = self._line("").partition(" ")
        if word != "ready":
            raise UnsupportedError(f"{name} failed; what it printed is above.")
        self.weight_bytes = int(number)

    def rate(self) -> float:
        """tokens/s of one more request."""
        return float(self._line("\n"))

    def _line(self, said: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(said)
        stdin.flush()
        return stdout.readline().strip()


@contextmanager
def running(peer: Peer, preset: str, shape: tuple[int, int], threads: int) -> Iterator[Running]:
    """A peer that is ready to decode `shape` (prompt tokens, new tokens) with so many threads.

    Raises UnsupportedError when a package is missing or the peer fails.
    """
    reason = peer.missing()
    if reason:
        raise UnsupportedError(reason)
    known = PRESETS[preset]
    prompt_tokens, new_tokens = shape
    command = [
        *(sys.executable, "-m", f"benchmarks.peers.{peer.loop}"),
        *("--model-type", known.model_type, "--config", json.dumps(known.config)),
        *("--weights", peer.weights, "--threads", str(threads)),
        *("--prompt-tokens", str(prompt_tokens), "--new-tokens", str(new_tokens)),
    ]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=child_variables(threads), text=True, **pipes) as process:
        try:
            yield Running(process, peer.name)
        finally:
            process.kill()
