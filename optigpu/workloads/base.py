"""What a workload is: frozen shapes, the metrics that it yields, and one request of it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

from pydantic import Field

from optigpu.documents.facts import Answers, ImageFacts
from optigpu.documents.rounds import AloneAgreement, LoadFacts, LoadRun
from optigpu.vocabulary import Frozen, Task

if TYPE_CHECKING:
    from optigpu.backends.training import TrainingBatch, UpdateRule


@dataclass(frozen=True)
class DecodeShape:
    """Decode steps after a prompt, one token for each sequence of a batch; a step is the mean over a request's."""

    prompt_tokens: int
    new_tokens: int
    batch_size: int
    units: float


@dataclass(frozen=True)
class PrefillShape:
    """The pass over a batch of prompts, up to the first token."""

    prompt_tokens: int
    batch_size: int
    units: float


@dataclass(frozen=True)
class ImageShape:
    """The pass over a batch of images."""

    batch_size: int
    units: float


@dataclass(frozen=True)
class OperatorShape:
    """One call of an operator without a model: the least bytes that it reads and writes, and its operations.

    Operations of attention are apart from those of other matrix products.
    """

    name: str
    dtype: str
    bytes: float
    units: float
    matmul_flops: float = 0.0
    attention_flops: float = 0.0


@dataclass(frozen=True)
class TrainingShape:
    """A step of training; its operations are counted when it runs."""

    units: float


WorkShape = DecodeShape | PrefillShape | ImageShape | OperatorShape | TrainingShape
"""What a workload does in one step: a roofline computes bytes and operations from it and the model's shapes.

`units` is what the workload's primary metric counts of one step: its tokens, its images, its 10^12 operations; 1 where
the metric is the step's own time.
"""


@dataclass(frozen=True)
class Check:
    """The check of an output: the duration of its request, and the problem that was found, if any."""

    request_s: float
    problem: str | None = None
    details: dict[str, object] = field(default_factory=dict)


class Request(Protocol):
    """A prepared request, which can be repeated."""

    def run(self) -> Mapping[str, float]:
        """One timed request: a sample for each of the workload's metrics, in the metric's unit."""

    def look(self) -> Mapping[str, Sequence[float]]:
        """A short request for a rough figure: of those metrics that it shows a sample, or one for each step."""
        return {name: (value,) for name, value in self.run().items()}

    def check(self) -> Check:
        """Checks the output of the last request, or of an untimed one: counts, NaN, agreement."""

    def observe(self) -> None:
        """Records facts that only a run can show in the runtime's notes; slow, and never timed."""

    def described(self) -> Mapping[str, Sequence[float]]:
        """Times within the last request, in seconds, that describe it: of each token, for example; empty without."""
        return {}

    def fresh(self, seed: int) -> "Request":
        """A request of the same shapes with inputs that are drawn from `seed`, which nobody in this process knew."""


@runtime_checkable
class LoadRequest(Request, Protocol):
    """A request that is a whole run of a load: many queries that arrive over time."""

    def facts(self) -> LoadFacts:
        """The scenario, and in how many of the runs since the check the queue grew without an end."""

    def loaded(self) -> LoadRun:
        """The queries of the last request."""

    def first_rate(self) -> float:
        """Where a search for the highest rate begins. Raises UnsupportedError without a rate, or a limit to keep."""

    def at(self, rate: float) -> LoadRun:
        """One run with queries that arrive at that rate, in queries a second."""

    def alone_agreement(self, tokens: int) -> AloneAgreement:
        """One run, of whose requests as many as have about so many tokens are decoded again by themselves. Raises
        UnsupportedError where a request failed, or the engine tells no tokens."""


@runtime_checkable
class AnsweringRequest(Request, Protocol):
    """A request whose answers another process judges."""

    def draw(self, seed: int, calls: int) -> int:
        """Draws the inputs of the next calls, at most so many; returns how many those are."""

    def answer(self, calls: int, file: Path, *, with_inputs: bool) -> Answers:
        """Calls with each of them, once, and writes the bytes of what came of it."""

    def digest(self) -> str:
        """SHA-256 of those bytes."""


class Workload(Frozen):
    """One kind of work. Subclasses add `kind: Literal[...]` with a default, and their shapes.

    `primary` is the metric that speedups are about; `metrics` are the per-request metrics. `for_some` are further ones,
    which requests of some models have, each with the reason why the others have none. `of_queries` are those of which
    a LoadRequest has a sample for each of its queries, and `of_loads` those of which it has one that may be zero.
    `whole` names the metric that is the time of a whole request, for which the request takes hardly longer; None: a
    request does more than what its metrics time. `task` is the task for which a model is loaded, if any, and
    `example_model` names one. A job must have all of its `meters`. `reference` is the implementation that others are
    compared with, where the workload has several. `lists` names fields of which a single workload has one item each,
    and `later` those that came after the first version: left at their defaults they are not part of a digest, so that
    earlier results stay comparable.
    """

    summary: ClassVar[str]
    primary: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    for_some: ClassVar[Mapping[str, str]] = MappingProxyType({})
    of_queries: ClassVar[tuple[str, ...]] = ()
    of_loads: ClassVar[tuple[str, ...]] = ()
    whole: ClassVar[str | None] = None
    task: ClassVar[Task] = Task.DECODING
    example_model: ClassVar[str] = "preset:gpt2"
    meters: ClassVar[tuple[str, ...]] = ()
    reference: ClassVar[str | None] = None
    later: ClassVar[tuple[str, ...]] = ()
    lists: ClassVar[tuple[str, ...]] = ()

    kind: str

    def expand(self) -> tuple["Workload", ...]:
        """The single workloads of this one: one for each combination of the items of its `lists`."""
        names = [name for name in self.lists if getattr(self, name)]
        singles = product(*(getattr(self, name) for name in names))
        return tuple(
            self.model_copy(update={name: (item,) for name, item in zip(names, single, strict=True)})
            for single in singles
        )

    @property
    def label(self) -> str:
        """The label in a table that distinguishes an expanded workload from the others; empty if there are no
        others."""
        return ""

    @property
    def implementation(self) -> str | None:
        """The implementation of a single workload, if it has several; results of all of them are comparable."""
        return None

    @property
    def compiled(self) -> str | None:
        """The implementation that is the compiled reference, for a single workload that is compared with that too."""
        return None

    @property
    def compiles(self) -> bool:
        """Whether the first request of its implementation compiles."""
        return False

    def identity(self) -> dict[str, Any]:
        """The fields that must be equal for a comparison, as plain JSON: all but the implementation."""
        defaults = {
            name for name in self.later if getattr(self, name) == type(self).model_fields[name].default
        }
        return self.model_dump(mode="json", exclude=defaults)

    @property
    def is_sampled(self) -> bool:
        """Whether tokens are drawn by chance, and not the most likely ones."""
        return False

    @property
    def is_served(self) -> bool:
        """Whether sequences join and leave while others decode."""
        return bool(self.of_queries)

    @property
    def has_text(self) -> bool:
        """Whether a text is among its inputs, for which the model needs a tokenizer."""
        return False

    @property
    def has_labels(self) -> bool:
        """Whether labelled images are its inputs, by whose classes an accuracy is known."""
        return False

    @property
    def generated_tokens(self) -> int | None:
        """Tokens that a request generates; None where it generates none."""
        return None

    @property
    def classified_images(self) -> int | None:
        """Images that a request classifies; None where it classifies none."""
        return None

    @property
    def image_side(self) -> int | None:
        """Side in pixels of the images that a request classifies; None for the one that the model was trained with."""
        return None

    def trained_tokens(self, model: Any) -> float | None:
        """Tokens that a step of training learns from, without padding, the mean over steps; None where there are none.
        `model` is as in `check`."""
        return None

    def trained_images(self, model: Any) -> int | None:
        """Images that a step of training learns from; None where there are none."""
        return None

    @property
    def work_shape(self) -> WorkShape | None:
        """The shape of one step of a single (expanded) workload; None if a roofline cannot know it."""
        return None

    @property
    def update_rule(self) -> "UpdateRule | None":
        """How a step of training changes the weights; None where nothing is trained."""
        return None

    def shape_after(self, prompt_tokens: int | None) -> WorkShape | None:
        """`work_shape` of a run that has shown how many tokens its text prompt has; None: it has none."""
        return self.work_shape

    def check(self, model: Any) -> str | None:
        """Why these shapes do not fit that model, in one sentence, or None. `model` are ModelFacts, and ImageFacts for
        a workload that classifies images."""
        return None

    def draws(self, model: Any, seed: int) -> "Callable[[], TrainingBatch]":
        """What makes the samples of one step of training after the other, the same for the same seed; `model` is as in
        `check`."""
        raise NotImplementedError

    def prepare(self, runtime: Any) -> Request:
        """Makes inputs and returns the request that will be repeated.

        `runtime` is a DecodingRuntime, PromptRuntime, ImageRuntime or OperatorRuntime, as the task says. Raises
        UnsupportedError when the inputs do not fit this machine.
        """
        raise NotImplementedError


ImageSize = Annotated[
    int | None,
    Field(
        ge=32,
        le=4096,
        description="Side of the images in pixels; by default the one that the model was trained with.",
    ),
]


def wrong_size(model: ImageFacts, image_size: int | None) -> str | None:
    """Why a classifier takes no images of that side, or None; None asks for the side that it was trained with."""
    if not model.fixed_size or image_size in (None, model.image_size):
        return None
    return (
        f"image_size is {image_size} and this {model.family} takes images of {model.image_size} pixels alone; leave "
        "image_size out."
    )
