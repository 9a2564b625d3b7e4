"""How far each peer and each stack is from the fp32 model, on the same tokens: Kullback-Leibler divergence.

The fp32 model writes the tokens itself, at temperature 1 from a seed. All subjects predict them after the same prompts,
token by token, as when decoding.
"""

import json
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from benchmarks.peers import Asked, Peer, Running, answering, running
from benchmarks.stacks import Stack
from optigpu.quality.divergence import divergence
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError

LENGTH = 256
"""Tokens of a sequence."""
PREFILL = 8
"""Tokens that are a prompt, as in the engine's own quality meter."""
THREADS = 1
"""Speed is not measured here, and a step of so small a model is over before threads have met."""


@dataclass(frozen=True)
class WeightsAlone(Stack):
    """A stack's weights without what its own step rounds beside them: activations, keys and values."""


@dataclass(frozen=True)
class Scoring:
    """A trained model, and the folder of the tokens and its fp32 logits."""

    model: str
    folder: Path

    def predicted(self, subject: Stack | Peer) -> tuple[NDArray[np.float32], Running]:
        """Logits [positions, vocabulary], and the process that gave them. Raises OptiGPUError when it cannot."""
        with self._ready(subject) as process:
            process.rate()
            return _flat(self._logits), process

    def reference(self, sequences: int) -> NDArray[np.float32]:
        """Draws the tokens and returns the fp32 model's logits, [positions, vocabulary]."""
        arguments = [*self._stack_arguments(Stack("fp32")), "--sample", str(sequences), str(LENGTH)]
        with answering("benchmarks.stack_logits", arguments, "the fp32 model", THREADS) as process:
            process.rate()
        return _flat(self._logits)

    @property
    def tokens(self) -> Path:
        """The file of ids [sequences, LENGTH]."""
        return self.folder / "tokens.npy"

    @property
    def _logits(self) -> Path:
        return self.folder / "logits.npy"

    def _ready(self, subject: Stack | Peer) -> AbstractContextManager[Running]:
        if isinstance(subject, Stack):
            arguments = self._stack_arguments(subject)
            arguments += ["--whole"] if isinstance(subject, WeightsAlone) else []
            return answering("benchmarks.stack_logits", arguments, subject.name, THREADS, subject.backend)
        asked = Asked(self.model, "logits", tokens=self.tokens, prefill=PREFILL, logits=self._logits)
        return running(subject, asked, THREADS)

    def _stack_arguments(self, stack: Stack) -> list[str]:
        return [
            *(
                "--model",
                self.model,
                "--backend",
                stack.backend,
                "--stack",
                json.dumps(list(stack.techniques)),
            ),
            *("--tokens", str(self.tokens), "--logits", str(self._logits), "--prefill", str(PREFILL)),
        ]


def measured(model: str, subjects: Sequence[Stack | Peer], against: Stack, sequences: int) -> dict[str, Any]:
    """A line for each subject, and what they were measured on; each is also compared with `against`, paired.

    Raises OptiGPUError when the fp32 model itself cannot be had.
    """
    found: dict[str, NDArray[np.float64]] = {}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        scoring = Scoring(model, Path(folder))
        expected = scoring.reference(sequences)
        for subject in track(subjects, "quality", console=console(stderr=True)):
            try:
                logits, process = scoring.predicted(subject)
                divergences = found[subject.name] = divergence(expected, logits)
            except OptiGPUError as error:
                lines.append({"name": subject.name, "reason": str(error)})
                continue
            same = float((expected.argmax(axis=-1) == logits.argmax(axis=-1)).mean())
            about = {"weight_bytes": process.weight_bytes, "details": process.details}
            lines.append({"name": subject.name, **_figures(divergences), "top1_agreement": same, **about})
    if against.name in found:
        for line in lines:
            if line["name"] in found:
                line["beside"] = _paired(found[line["name"]], found[against.name])
    return {
        "model": model,
        "sequences": sequences,
        "length": LENGTH,
        "prefill": PREFILL,
        "positions": len(expected),
        "beside": against.name,
        "lines": lines,
    }


def _flat(path: Path) -> NDArray[np.float32]:
    logits: NDArray[np.float32] = np.load(path)
    return logits.reshape(-1, logits.shape[-1])


def _figures(divergences: NDArray[np.float64]) -> dict[str, float]:
    """In nats; the standard error is that of the mean, as if positions were independent."""
    return {
        "kld_mean": float(divergences.mean()),
        "kld_standard_error": _standard_error(divergences),
        "kld_p99": float(np.quantile(divergences, 0.99)),
    }


def _paired(divergences: NDArray[np.float64], others: NDArray[np.float64]) -> dict[str, float]:
    """How much larger the mean is than the other's at the same positions."""
    difference = divergences - others
    return {"difference": float(difference.mean()), "standard_error": _standard_error(difference)}


def _standard_error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))
