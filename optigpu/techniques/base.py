"""What a technique is: frozen parameters, facts about itself, and the hooks that it needs, of five.

A technique's file holds one class. The hooks run in the measuring process alone, so they may import torch; the facts
(`layer`, `phase`, `requires`, `conflicts`, ...) and `check` are read everywhere, so the module may not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, ClassVar

from optigpu.models.facts import ModelFacts
from optigpu.result import Environment
from optigpu.vocabulary import DeviceKind, Frozen, Layer


class Phase(IntEnum):
    """The order in which the engine applies techniques, whatever order they were written in.

    Modules are replaced before they are quantized, and what is compiled is compiled last.
    """

    PRECISION = 10
    KERNELS = 20
    QUANTIZATION = 30
    CACHE = 40
    COMPILATION = 50


@dataclass(frozen=True)
class LoadOptions:
    """How weights come in. `dtype` is a torch dtype's name; `attention` is transformers' attn_implementation.

    `attention` None leaves the library's default.
    """

    dtype: str = "float32"
    attention: str | None = None

    def but(self, **changes: Any) -> "LoadOptions":
        """A copy with changes."""
        return replace(self, **changes)


@dataclass(frozen=True)
class CacheOptions:
    """Which key-value cache decoding uses. `kind` is "dynamic" (the library's default), "static" or "none"."""

    kind: str = "dynamic"


@dataclass
class Notes:
    """What techniques and the backend record while they work; becomes `Result.details`."""

    facts: dict[str, Any] = field(default_factory=dict)

    def record(self, **facts: Any) -> None:
        """Adds facts; a later one of the same name replaces the earlier."""
        self.facts.update(facts)


Step = Callable[[Any, Any, Any], tuple[Any, Any]]
"""One decode step: `next_tokens, logits = step(tokens, position, cache)`.

tokens: int64 [batch, 1], the last token of each sequence; position: int64 [1, 1], its index in the sequence; cache: a
transformers Cache, updated in place; next_tokens: int64 [batch, 1], the most likely ones; logits: [batch, vocabulary].
"""

Loop = Callable[[Any, int, Any], tuple[Any, list[Any]]]
"""A whole greedy decoding: `tokens, marks = loop(prompt, new_tokens, clock)`.

prompt: int64 [batch, prompt_tokens]; clock: a Clock; tokens: int64 [batch, new_tokens]; marks: the clock's marks before
the prompt and after each token, new_tokens + 1 of them.
"""


class Technique(Frozen):
    """One optimization. Subclasses add `name: Literal[...]` with a default, and their parameters.

    `compared_with` names techniques that make up the reference which "alone" is measured against, where the plain
    baseline would already contain this technique. `cautionary` marks a rung that is expected to lose.
    """

    layer: ClassVar[Layer]
    phase: ClassVar[Phase]
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    citation: ClassVar[str]
    expected: ClassVar[str]
    workloads: ClassVar[tuple[str, ...]] = ("generate",)
    devices: ClassVar[tuple[DeviceKind, ...]] = (DeviceKind.CPU, DeviceKind.CUDA)
    requires: ClassVar[tuple[str, ...]] = ()
    conflicts: ClassVar[tuple[str, ...]] = ()
    compared_with: ClassVar[tuple[str, ...]] = ()
    cautionary: ClassVar[bool] = False

    name: str

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Why this cannot run there, in one sentence, or None. Asked before anything is changed."""
        return None

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """Whether a stack that was not asked for by name should try this on that device."""
        return not self.cautionary and self.check(environment, device, None) is None

    def load(self, options: LoadOptions) -> LoadOptions:
        """Changes how weights come in."""
        return options

    def modules(self, model: Any, notes: Notes) -> None:
        """Replaces parts of the loaded model in place and records what it replaced.

        Raises UnsupportedError, with the model left as it was, when there is nothing it can replace.
        """

    def cache(self, options: CacheOptions) -> CacheOptions:
        """Chooses the key-value cache."""
        return options

    def step(self, step: Step, notes: Notes) -> Step:
        """Wraps the decode step. Overriding this makes the backend decode in its own greedy loop."""
        return step

    def loop(self, loop: Loop, notes: Notes) -> Loop:
        """Replaces the decode loop. Overriding this makes `loop` the backend's own greedy one.

        A loop that has `score(tokens, prefill)`, as DecodingRuntime.score, keeps its quality measurable.
        """
        return loop
