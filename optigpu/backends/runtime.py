"""The interface between a backend and the workloads and meters in the measuring process. All arrays are numpy arrays.

A backend converts to and from its own arrays before and after the timed part, never within it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from optigpu.documents.facts import Footprint, ImageFacts, ImageFootprint, ModelFacts, WeightFacts
from optigpu.hardware.intensity import Kernel
from optigpu.models.described import Facts
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, UnsupportedError

Ids = NDArray[np.int64]
"""Token ids, [batch, length]."""
Logits = NDArray[np.float32]
"""[batch, vocabulary], or [batch, classes] of a classifier."""
Images = NDArray[np.float32]
"""[batch, channels, height, width]."""
Pixels = NDArray[np.uint8]
"""One image, [height, width, 3] in RGB."""


class UnlikeWholeError(UnsupportedError):
    """What is timed gives no logits, and decodes other tokens than passes over the same text predict."""


@dataclass(frozen=True)
class Generation:
    """One generated batch: ids [batch, new_tokens], and the seconds from the request's start to the first token, then
    between successive tokens, [new_tokens]."""

    tokens: Ids
    gaps_s: list[float]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: from the most likely ones that together have a probability of `top_p`, after logits were
    divided by `temperature` (above 0). The same `seed` draws the same tokens.

    Source: Holtzman et al., The Curious Case of Neural Text Degeneration, 2020, arXiv:1904.09751.
    """

    temperature: float
    top_p: float
    seed: int


@dataclass(frozen=True)
class Pass:
    """One forward pass. `chosen` are the most likely tokens or classes, [batch], as the timed pass found them."""

    logits: Logits
    chosen: NDArray[np.int64]
    seconds: float


@dataclass(frozen=True)
class MemoryPeaks:
    """The most accelerator memory in use and set aside during a run, in bytes.

    `reasons` say why one is None, by its metric's name, also host_peak_bytes where another process does the work.
    """

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """The kernels of one request, which decoded `steps` tokens after its first; `recorded_steps` of them were recorded.

    Without any kernel no trace was written.
    """

    kernels: tuple[Kernel, ...]
    steps: int
    recorded_steps: int


class Runtime(Protocol):
    """The methods that every runtime has. `notes` collect facts for the result."""

    device: DeviceKind
    seed: int
    notes: Notes

    def weights(self) -> WeightFacts | None:
        """Which weights were loaded and how many bytes they take with the stack applied; None without a model."""

    def footprint(self) -> Footprint | ImageFootprint | None:
        """The bytes that a step reads of the model, for the roofline; None without a model."""

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """The peaks of accelerator memory while `run` runs once, or the reasons why there are none."""

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """The kernels that `run`, one request, executes: the first token and `steps` decode steps, or all of it.

        Writes Chrome's trace format, gzipped, to `trace`. Raises UnsupportedError if the engine has no profiler.
        """

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """A named range for a profiler that watches from outside (NVTX), or nothing."""


@runtime_checkable
class RemoteRuntime(Runtime, Protocol):
    """A runtime whose work another process does."""

    @property
    def elsewhere(self) -> str | None:
        """Why counters of this machine do not tell of that work; None where it is done on this machine."""


class DecodingRuntime(Runtime, Protocol):
    """The runtime of a workload that generates text."""

    facts: ModelFacts

    @property
    def decoded(self) -> tuple[int, int] | None:
        """The batch and the length in tokens, prompt included, of the longest decoding or scoring; None before one."""

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """Greedy decoding of exactly `new_tokens` tokens, timed. `prompt`: [batch, prompt_tokens]."""

    def logits(self, tokens: Ids) -> Logits:
        """Logits after `tokens` ([batch, length], length >= 2), [batch, vocabulary].

        The last token goes through the very step that is timed, the others through the prefill. Raises
        UnsupportedError if what is timed gives no logits.
        """

    def score(self, tokens: Ids, prefill: int) -> Iterator[Logits]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, [batch, vocabulary].

        The first `prefill` tokens (0 and more) go through the prefill, each other through the very step that is timed.
        What is timed takes the batch and at most the length that were `decoded`. Nothing else may be decoded before
        the iteration has ended. Raises UnsupportedError if what is timed gives no logits.
        """

    def scoring_s(self, tokens: Ids, prefill: int) -> float:
        """Seconds of what `score` does, all positions together; the logits stay where the engine has them."""

    def observe(self, prompt: Ids) -> None:
        """Records in the notes which kernels run for this prompt; never called within a timed request."""


@runtime_checkable
class EncodingRuntime(DecodingRuntime, Protocol):
    """Further methods of a backend that knows the model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text without special tokens. Raises UnsupportedError if the model has no tokenizer."""

    def start_ids(self) -> list[int]:
        """The token that the model's tokenizer puts before every text; empty where it puts none."""


@runtime_checkable
class ReferenceRuntime(EncodingRuntime, Protocol):
    """Further methods of the one backend that makes the quality reference for all backends."""

    @property
    def steps_are_passes(self) -> bool:
        """Whether a timed step is a pass of the model, and no technique's own loop."""

    def whole(self, tokens: Ids, first: int) -> Iterator[Logits]:
        """Like `score`, by passes over the whole sequence, without a cache or a technique's step."""

    def sample(self, rows: int, length: int) -> Ids:
        """Sequences drawn from the model at temperature 1 with the runtime's seed, [rows, length]."""


@runtime_checkable
class TextRuntime(DecodingRuntime, Protocol):
    """Further methods of a backend that reads and writes text, and draws tokens by chance."""

    def prompt_ids(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model expects before it.

        Raises UnsupportedError if the model has no tokenizer, or one whose ids it does not have.
        """

    def text_of(self, tokens: Ids) -> list[str]:
        """The text of each sequence of `tokens` [batch, length]."""

    def draw(self, prompt: Ids, new_tokens: int, sampling: Sampling) -> Generation:
        """As `generate`, with each token drawn by chance, and the drawing timed.

        Raises UnsupportedError if what is timed takes the most likely tokens alone.
        """


class PassRuntime(Runtime, Protocol):
    """The runtime of a workload that runs forward passes and decodes nothing."""

    facts: Facts

    def forward(self, inputs: Ids | Images) -> Pass:
        """One timed pass over ids [batch, length] with an empty cache, or over images."""

    def observe(self, inputs: Ids | Images) -> None:
        """Records in the notes which kernels run for these inputs; never called within a timed request."""

    def compute_exactly(self) -> None:
        """Rounds nothing below float32 from now on, for a process that makes a reference and times nothing."""


class PromptRuntime(PassRuntime, Protocol):
    """A PassRuntime of a model that generates text."""

    facts: ModelFacts


class ImageRuntime(PassRuntime, Protocol):
    """A PassRuntime of a model that classifies images."""

    facts: ImageFacts


@runtime_checkable
class PictureRuntime(ImageRuntime, Protocol):
    """Further methods of a backend that classifies pictures."""

    def class_names(self) -> tuple[str, ...]:
        """The model's classes in the order of its logits; some have several names with commas between."""

    def processed(self, pictures: Sequence[Pixels]) -> Images:
        """Pictures as the model takes them, [pictures, channels, height, width]."""

    def preprocessing(self) -> str:
        """How `processed` does that, for a reader."""
