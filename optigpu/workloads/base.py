"""What a workload is: frozen shapes, the metrics that it yields, and one request of it.

The facts are read everywhere; `prepare` runs in the measuring process alone and may import torch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Protocol, runtime_checkable

from optigpu.models.facts import Facts, ModelFacts
from optigpu.techniques.base import Notes
from optigpu.vocabulary import DeviceKind, Frozen
from optigpu.workloads.requests.shapes import WorkShape


class Task(StrEnum):
    """What a model is loaded for: to decode text, to pass over a prompt once, or to classify images."""

    DECODING = "decoding"
    PREFILL = "prefill"
    IMAGES = "images"


class Clock(Protocol):
    """Marks moments on the device's own time line; reads them after the work is done."""

    def mark(self) -> Any:
        """A moment, cheap to take: nanoseconds on a CPU, a recorded event on CUDA."""

    def seconds(self, marks: list[Any]) -> list[float]:
        """Seconds between successive marks; waits for the device. Shape: len(marks) - 1."""


@dataclass(frozen=True)
class Generation:
    """One generated batch. `tokens` is [batch, new_tokens] of ids; `gaps_s` are the seconds from the request's start
    to the first token, then between successive tokens: shape [new_tokens].
    """

    tokens: Any
    gaps_s: list[float]


@dataclass(frozen=True)
class Pass:
    """One forward pass. `logits` are [batch, vocabulary or classes], `chosen` the most likely of each row, [batch]."""

    logits: Any
    chosen: Any
    seconds: float


class Runtime(Protocol):
    """What a backend offers to every workload inside the measuring process.

    `model` is None for a workload that needs none; `weights` counts the model's weights before the stack.
    """

    device: DeviceKind
    seed: int
    clock: Clock
    notes: Notes
    model: Any
    weights: int

    def attention_kernels(self, run: Callable[[], Any]) -> list[str]:
        """Which attention kernels `run` executes; never called within a timed request."""


class DecodingRuntime(Runtime, Protocol):
    """What it offers to a workload that generates text.

    `decoded` is the batch and the length in tokens, prompt included, of the longest decoding or scoring so far; None
    before one.
    """

    facts: ModelFacts
    decoded: tuple[int, int] | None

    def generate(self, prompt: Any, new_tokens: int) -> Generation:
        """Greedy decoding of exactly `new_tokens` tokens. `prompt`: [batch, prompt_tokens] of ids."""

    def logits(self, tokens: Any) -> Any:
        """Logits after `tokens` ([batch, length], length >= 2), float32 [batch, vocabulary].

        The last token goes through the very step that is timed, the others through the prefill.
        """

    def score(self, tokens: Any, prefill: int) -> Iterator[Any]:
        """Logits after each of `tokens` ([batch, length]) from index `prefill` on, float32 [batch, vocabulary].

        The first `prefill` tokens (0 and more) go through the prefill, each other through the very step that is timed.
        What is timed takes the batch and at most the length that were `decoded`. Nothing else may be decoded before
        the iteration has ended. Raises UnsupportedError when what is timed gives no logits.
        """

    def whole(self, tokens: Any, first: int) -> Iterator[Any]:
        """What `score` gives, by passes over the whole sequence: no cache, and no step of a technique."""

    def sample(self, rows: int, length: int) -> Any:
        """Sequences drawn from the model at temperature 1 with the runtime's seed, int64 [rows, length]."""

    def observe(self, prompt: Any) -> None:
        """Records which kernels run for this prompt; never called within a timed request."""


class PassRuntime(Runtime, Protocol):
    """What it offers to a workload that runs whole forward passes and decodes nothing.

    `dtype` is the name of the one that the weights came in.
    """

    facts: Facts
    dtype: str

    def forward(self, inputs: Any) -> Pass:
        """One pass over ids [batch, length] with an empty cache, or over images [batch, channels, height, width]."""

    def observe(self, inputs: Any) -> None:
        """Records which kernels run for these inputs; never called within a timed request."""


@dataclass(frozen=True)
class Check:
    """What looking at an output found: how long its request took, and what is wrong with it, if anything is."""

    request_s: float
    problem: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


class Request(Protocol):
    """A prepared request that can be repeated."""

    def run(self) -> Mapping[str, float]:
        """One timed request: a sample for each of the workload's metrics, in the metric's unit."""

    def check(self) -> Check:
        """One untimed request whose output is looked at: counts, NaN, agreement."""

    def observe(self) -> None:
        """Records in the runtime's notes what only a run can show; slow, and never timed."""

    def described(self) -> Mapping[str, Sequence[float]]:
        """Times within the last request, in seconds, that describe it: of each token, for example."""

    def fresh(self) -> "Request":
        """A request of the same shapes whose inputs no request had before."""


@runtime_checkable
class OperatorRequest(Request, Protocol):
    """A request of one operator alone, so that what it allocates can be told from all else that a process holds."""

    @property
    def held(self) -> Sequence[Any]:
        """The tensors that are there before and after a call."""

    def call(self) -> Any:
        """One call; what it returns."""


class Workload(Frozen):
    """One kind of work. Subclasses add `kind: Literal[...]` with a default, and their shapes.

    `primary` is the metric that speedups are about; `metrics` are the per-request metrics. A workload that needs a
    model says for what `task`, and names one as an example. Without one of its `meters` it would be nothing.
    """

    summary: ClassVar[str]
    primary: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    needs_model: ClassVar[bool] = True
    task: ClassVar[Task] = Task.DECODING
    example_model: ClassVar[str] = "preset:gpt2"
    meters: ClassVar[tuple[str, ...]] = ()

    kind: str

    def expand(self) -> tuple["Workload", ...]:
        """The single measurable workloads that this stands for; a workload with lists of shapes has many."""
        return (self,)

    @property
    def label(self) -> str:
        """What tells one expanded workload from its siblings, for a table; empty where there are none."""
        return ""

    @property
    def generated_tokens(self) -> int | None:
        """Tokens that a request generates; None where it generates none."""
        return None

    @property
    def classified_images(self) -> int | None:
        """Images that a request classifies; None where it classifies none."""
        return None

    @property
    def work_shape(self) -> WorkShape | None:
        """What one step of a single (expanded) workload does; None where a roofline cannot know."""
        return None

    def check(self, model: Any) -> str | None:
        """Why these shapes do not fit that model, in one sentence, or None.

        `model` are ModelFacts, and ImageFacts for a workload that classifies images.
        """
        return None

    def prepare(self, runtime: Any) -> Request:
        """Makes inputs and returns the request that will be repeated.

        `runtime` is a Runtime, and with a model a DecodingRuntime or a PassRuntime, as the task says. Raises
        UnsupportedError when the inputs do not fit this machine.
        """
        raise NotImplementedError
