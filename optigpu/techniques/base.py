"""What a technique is: frozen parameters, facts about itself, and the hooks that it needs, of ten.

A technique's file holds one class. Its facts (`layer`, `phase`, `requires`, `conflicts`, ...) and `check` are read by
every process, so the file imports no torch at its top. The hooks run in the measuring process alone: what they need of
torch is in `surgery`, and is imported within the hook.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import KINDS, Ability, devices_with
from optigpu.models.described import StoredWeights
from optigpu.surgery.extras import Package, missing
from optigpu.vocabulary import Changeable, DeviceKind, Frozen, Layer, Task

if TYPE_CHECKING:
    import torch
    from transformers import Cache, PreTrainedModel

    from optigpu.backends.training import TrainingParts

Model: TypeAlias = "PreTrainedModel"
Parts: TypeAlias = "TrainingParts"

DECODING = (Task.DECODING,)
"""Workloads that decode: through the cache, the step and the loop of a stack."""
ON_TEXT = (Task.DECODING, Task.PREFILL)
"""Workloads of a model that generates text; a prefill goes through the hook `forward`."""
ON_MODELS = (*ON_TEXT, Task.IMAGES)
"""Workloads of any model; those that decode nothing go through the hook `forward`."""
TRAINING = (Task.TRAINING,)
"""The workload that trains: through the hooks `load`, `modules`, `finish` and `training`."""
EVERYWHERE = (*ON_MODELS, *TRAINING)
"""Workloads of any model, and the one that trains."""


class Phase(IntEnum):
    """The order in which the engine applies techniques, whatever order they were written in.

    Weights are pruned before matrices are merged, matrices are merged before they are quantized, and what is compiled
    or captured is final: only a decode loop goes around it.
    """

    PRECISION = 10
    PRUNING = 15
    KERNELS = 20
    QUANTIZATION = 30
    ADAPTERS = 32
    PLACEMENT = 35
    CACHE = 40
    EXECUTION = 45
    TRAINING = 47
    COMPILATION = 50
    CAPTURE = 60
    DECODING = 70

    @property
    def compiles(self) -> bool:
        """Whether a first request compiles or captures."""
        return self in (Phase.COMPILATION, Phase.CAPTURE)


class Choice(StrEnum):
    """Groups of which a stack may contain at most one technique; the value is the reason."""

    PRECISION = "matrix products run in one precision"
    WEIGHTS = "weights are quantized once"
    AUTOGRAD = "forward passes run under one autograd mode"
    STEP = "a model is compiled or exported once"
    CAPTURE = "what runs is recorded as a CUDA graph once"
    OPTIMIZER = "weights are updated by one optimizer"
    OPERATORS = "operators run one by one, each looked at, or compiled together"
    WHOLE_GRADIENT = "the whole gradient is needed before the first weight changes"
    ADAPTERS = "a model is adapted once"


Basis = Literal["literature", "arithmetic", "measured here", "aim"]
"""What an expectation rests on: a publication, counting bytes and operations, our measurements, or none of them."""


class Expected(NamedTuple):
    """What is expected of a technique, and what that rests on.

    `source` is the page of docs/ with the measurement, or the publication where it is not the technique's own.
    """

    basis: Basis
    text: str
    source: str | None = None


EXACT = 1e-3
"""The `error_bound` of a technique that computes the same in another way: what another order of sums may change."""


@dataclass(frozen=True)
class Trial:
    """One way in which `optigpu selftest` runs a technique: with these parameters, and with others beside it.

    `beside` names techniques that are also in what its logits are compared with. `devices` are those on which the trial
    shows something new. `error_bound` replaces the technique's own; None keeps it.
    """

    parameters: Mapping[str, object] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    devices: tuple[DeviceKind, ...] = tuple(DeviceKind)
    error_bound: float | None = None


LlamaCppType = Literal[
    "Q4_0", "Q4_K_M", "Q8_0", "F16", "BF16", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q2_K_S", "Q3_K_S", "Q3_K_M", "Q3_K_L",
    "Q4_K_S", "Q5_K_S", "Q5_K_M", "Q6_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "IQ3_XXS", "IQ3_XS",
    "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "Q1_0", "Q2_0",
]  # fmt: skip
"""llama.cpp's names of the number formats in which files of models without experts are written."""
IkLlamaCppType = Literal[
    "IQ2_K", "IQ3_K", "IQ4_K", "IQ5_K", "IQ6_K", "IQ4_KS", "IQ4_KSS", "IQ5_KS", "IQ4_KT", "Q4_0_R8", "Q5_0_R4",
    "Q8_0_R8", "Q4_K_R4", "Q5_K_R4", "Q6_K_R4", "Q8_K_R8", "IQ4_NL_R4", "IQ4_XS_R8", "IQ4_K_R4", "IQ5_K_R4",
    "IQ4_KS_R4", "IQ5_KS_R4",
]  # fmt: skip
"""Those that ik_llama.cpp alone has; rows are interleaved in those that end with R and a number."""
GgufType = Literal[LlamaCppType, IkLlamaCppType]
"""Of both; F32 is the format without a technique."""


@dataclass(frozen=True)
class LoadOptions(Changeable):
    """How weights are loaded. `dtype` is a torch dtype's name; `attention` is transformers' attn_implementation.

    `attention` None leaves the library's default. `placement` "host" leaves the weights in the host's memory, for a
    technique that brings them to the device in parts. `packed` names the method whose layers of 4-bit numbers a
    technique computes with: they stay as the checkpoint has them, and are widened to `dtype` without it. `instead` is
    the reference of a smaller model that is loaded in the place of the job's.
    """

    dtype: str = "float32"
    attention: str | None = None
    placement: Literal["device", "host"] = "device"
    packed: Literal["gptq", "awq"] | None = None
    instead: str | None = None


@dataclass(frozen=True)
class EngineOptions(Changeable):
    """The settings of an engine other than torch, in words that all of them share.

    `weights` is the engine's own name of the numbers that matrices are stored in, and `group` how many of a row share a
    scale, 0 where the engine decides. `products` says in which numbers matrices are multiplied. `everywhere` gives the
    embedding and the head that format too. `cache` is the numbers of keys and values, `cache_values` those of values
    where they have others. `attention` "fused" computes it in one operator. `graph` is how far the engine may rewrite
    the graph, under its own name. `together` is how many tokens of a prompt go through the model at once.
    `calibrated_on` is how many inputs the scales of activations come from; None: they are taken as they come. None of
    any other is the engine's default.
    """

    weights: str = "float32"
    group: int = 0
    products: Literal["float", "int8"] | None = None
    everywhere: bool | None = None
    cache: str | None = None
    attention: Literal["plain", "fused"] | None = None
    graph: str | None = None
    cache_values: str | None = None
    together: int | None = None
    calibrated_on: int | None = None


AttentionKernel = Literal["auto", "flash", "memory_efficient", "math", "flash_3"]
"""What torch's scaled_dot_product_attention can run, or "auto"; flash_3 is FlashAttention-3 in the place of its own."""


@dataclass(frozen=True)
class ModeOptions(Changeable):
    """The contexts of forward passes. `autocast` is the dtype's name that torch.autocast computes in, None without.

    `attention_kernel` is the only one that scaled_dot_product_attention may run; "auto" leaves the choice to torch.
    """

    autograd: Literal["no_grad", "inference", "grad"] = "no_grad"
    autocast: str | None = None
    attention_kernel: AttentionKernel = "auto"


@dataclass(frozen=True)
class CacheOptions(Changeable):
    """The key-value cache of decoding.

    `kind` is "dynamic" (the library's default), "static" or "none"; `int8` stores keys and values as int8; `window`
    keeps the last so many tokens alone, after the first `sinks` ones. None keeps all. `mixed` says that keys and values
    may come in two dtypes, as they do under autocast.
    """

    kind: Literal["dynamic", "static", "none"] = "dynamic"
    int8: bool = False
    window: int | None = None
    sinks: int = 0
    mixed: bool = False


@dataclass
class Notes:
    """Notes of techniques, the workload and the backend, by name.

    A name that RunFacts has as a field becomes that field of the result's facts; every other is kept for people, in
    `recorded`. Who changes a model for seconds tells `doing` how far it is.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    doing: Callable[[str], None] = field(default=lambda _: None, repr=False, compare=False)

    def record(self, **facts: object) -> None:
        """Adds facts; a later one of the same name replaces the earlier."""
        self.facts.update(facts)


Step = Callable[["torch.Tensor", "torch.Tensor", "Cache"], tuple["torch.Tensor", "torch.Tensor"]]
"""One decode step: `next_tokens, logits = step(tokens, position, cache)`.

tokens: int64 [batch, 1], the last token of each sequence; position: int64 [1, 1], its index in the sequence; cache: a
transformers Cache, updated in place; next_tokens: int64 [batch, 1], the most likely ones; logits: [batch, vocabulary].
"""

Forward = Callable[["torch.Tensor"], "torch.Tensor"]
"""One whole forward pass: `outputs = forward(inputs)`, for workloads that decode nothing.

inputs: ids int64 [batch, length] or images [batch, channels, height, width]; outputs: the logits.
"""

Loop = Callable[["torch.Tensor", int, Any], tuple["torch.Tensor", list[Any]]]
"""A whole greedy decoding: `tokens, marks = loop(prompt, new_tokens, clock)`.

prompt: int64 [batch, prompt_tokens]; clock: the Clock of optigpu.backends.torch.device; tokens: int64 [batch,
new_tokens]; marks: the clock's marks before the prompt and after each token, new_tokens + 1 of them.
"""


class Technique(Frozen):
    """One optimization. Subclasses add `name: Literal[...]` with a default, and their parameters.

    `requires` names techniques that are added, if they apply to the workload, and `extras` the optional packages that
    it needs with all parameters. `conflicts` gives the reason for each technique that cannot be in the same stack
    (declared on either side, it holds for both), and `choices` are the groups that it belongs to. `backends` names the
    engines that can apply it, and `tasks` what a workload must do for it to matter. `abilities` are what it needs of a
    device, and `devices` the kinds that have them, which follow from the table of optigpu.hardware.device_kinds.
    `later` names parameters that came after the first version: left at their defaults they are not part of a digest, so
    that earlier results stay comparable. `compared_with` names techniques that make up the reference which "alone" is
    measured against, where the plain baseline would already contain this technique. `cautionary` marks a rung that is
    expected to lose, and `only_when_asked` one that a stack should not try unless it was asked for by name.

    `optigpu selftest` runs each of `trials` and compares the logits with the unmodified model's: an error may be
    `error_bound` of the largest logit at most. One above EXACT says that the technique rounds: then an error of zero
    means that it was not applied. `approximates` says that it predicts otherwise by design although it rounds nothing:
    it forgets tokens, or is another model. `process_wide` says that it changes settings which outlast its model, and
    `serves` that its own cache, step or loop also decodes sequences that join and leave.
    """

    layer: ClassVar[Layer]
    phase: ClassVar[Phase]
    version: ClassVar[int] = 1
    summary: ClassVar[str]
    citation: ClassVar[str]
    expected: ClassVar[tuple[Expected, ...]]
    tasks: ClassVar[tuple[Task, ...]] = DECODING
    abilities: ClassVar[tuple[Ability, ...]] = ()
    devices: ClassVar[tuple[DeviceKind, ...]]
    backends: ClassVar[tuple[str, ...]] = ("torch",)
    requires: ClassVar[tuple[str, ...]] = ()
    extras: ClassVar[tuple[Package, ...]] = ()
    conflicts: ClassVar[Mapping[str, str]] = MappingProxyType({})
    choices: ClassVar[tuple[Choice, ...]] = ()
    compared_with: ClassVar[tuple[str, ...]] = ()
    later: ClassVar[tuple[str, ...]] = ()
    cautionary: ClassVar[bool] = False
    only_when_asked: ClassVar[bool] = False
    error_bound: ClassVar[float] = EXACT
    approximates: ClassVar[bool] = False
    trials: ClassVar[tuple[Trial, ...]] = (Trial(),)
    process_wide: ClassVar[bool] = False
    serves: ClassVar[bool] = False

    name: str

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Its devices follow from what it needs of one, and its layer from its folder."""
        super().__pydantic_init_subclass__(**kwargs)
        cls.devices = devices_with(cls.abilities)
        folder = cls.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        if folder in set(Layer):
            cls.layer = Layer(folder)

    @classmethod
    def elsewhere(cls) -> dict[DeviceKind, str]:
        """Why it does not run on each other kind of device."""
        reasons = {kind: facts.lacking(cls.abilities) for kind, facts in KINDS.items()}
        return {kind: reason for kind, reason in reasons.items() if reason}

    def not_on(self, device: DeviceKind) -> str:
        """The sentence that refuses it on a kind of device that is not among its `devices`."""
        reason = self.elsewhere().get(device)
        because = f": {reason}" if reason else ""
        return f"{self.name} runs on {', '.join(self.devices)}, not on {device}{because}."

    @property
    def rounds(self) -> bool:
        """Whether it computes with fewer bits than float32 has, by its own account."""
        return self.error_bound > EXACT

    @classmethod
    def keeps_predictions(cls) -> bool:
        """Whether it predicts what the model predicts, by its own account: only sums may come in another order."""
        return cls.error_bound <= EXACT and not cls.approximates

    @property
    def label(self) -> str:
        """What the labels of variants call it, whatever its other parameters are."""
        return self.name

    def identity(self) -> dict[str, Any]:
        """Its name and parameters as plain JSON; part of a variant's digest."""
        defaults = {
            name for name in self.later if getattr(self, name) == type(self).model_fields[name].default
        }
        return self.model_dump(mode="json", exclude=defaults) | {"version": self.version}

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """Why this cannot run there, in one sentence, or None. Asked before anything is changed."""
        return missing(self.packages(model), environment)

    def packages(self, model: ModelFacts | None) -> tuple[Package, ...]:
        """The optional packages that it needs for such a model; None: its facts are known when it is loaded."""
        return self.extras

    def fits(self, workload: Any) -> str | None:
        """Why this cannot run for a workload of those shapes, in one sentence, or None. Asked when a job is posted.

        A loop of a technique's own is greedy, and a load has a cache and a step of its own.
        """
        own = [hook for hook in ("cache", "step", "loop") if self.overrides(hook)]
        if workload.is_served and own and not self.serves:
            return (
                f"{self.name} has a {' and a '.join(own)} of its own for whole batches, and under load sequences join "
                "and leave; leave it out, or measure generate."
            )
        if workload.is_sampled and self.overrides("loop"):
            return (
                f"{self.name} takes the most likely tokens; leave it out, or leave temperature and top_p out."
            )
        return None

    def overrides(self, hook: str) -> bool:
        """Whether it has a hook of its own by that name."""
        return getattr(type(self), hook) is not getattr(Technique, hook)

    def chosen(self) -> tuple[Choice, ...]:
        """The `choices` with these parameters."""
        return self.choices

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """Whether a stack that was not asked for by name should try this on that device."""
        is_wanted = not (self.cautionary or self.only_when_asked)
        return is_wanted and self.check(environment, device, None) is None

    def as_alternative(
        self, environment: Environment, device: DeviceKind, model: ModelFacts | None, is_trained: bool
    ) -> Self | None:
        """This technique as it should be tried beside a stack that was not asked for by name; None: not at all.

        For a technique that replaces what the others change, so that it cannot be in that stack.
        """
        return None

    def load(self, options: LoadOptions) -> LoadOptions:
        """Changes how weights are loaded."""
        return options

    def engine(self, options: EngineOptions) -> EngineOptions:
        """Changes the settings of an engine other than torch."""
        return options

    def execution(self, options: ModeOptions) -> ModeOptions:
        """Changes the contexts of forward passes."""
        return options

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces parts of the loaded model in place and records what it replaced.

        Raises UnsupportedError, with the model left as it was, when there is nothing it can replace.
        """

    def stored(self, weights: StoredWeights, device: DeviceKind) -> StoredWeights:
        """What `modules` and `finish` make of the bytes of a decoder's weights, told from their shapes alone.

        Raises UnsupportedError when that depends on more than shapes.
        """
        return weights

    def applying_s(self, parameters: int, device: DeviceKind) -> float:
        """How long `modules` takes of a model with so many numbers, about, where that is known to be seconds."""
        return 0.0

    def finish(self, model: Model, notes: Notes) -> None:
        """Changes the layout of the model in place, after all techniques' `modules`."""

    def cache(self, options: CacheOptions) -> CacheOptions:
        """Chooses the key-value cache."""
        return options

    def step(self, step: Step, notes: Notes) -> Step:
        """Wraps the decode step. Overriding this makes the backend decode in its own greedy loop."""
        return step

    def forward(self, forward: Forward, notes: Notes) -> Forward:
        """Wraps the forward pass of a workload that decodes nothing."""
        return forward

    def training(self, parts: Parts, model: Model, notes: Notes) -> Parts:
        """Changes what a step of training is made of; `model` has all techniques' `modules` applied."""
        return parts

    def loop(self, loop: Loop, model: Model, notes: Notes) -> Loop:
        """Replaces the decode loop; overriding this makes `loop` the backend's own greedy one.

        `model` has the whole stack applied. A loop that has `score(tokens, prefill)`, as DecodingRuntime.score, keeps
        its logits checked and its quality measurable.
        """
        return loop


class PrecisionTechnique(Technique):
    """Chooses the numbers that a model computes in."""

    phase: ClassVar[Phase] = Phase.PRECISION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    choices: ClassVar[tuple[Choice, ...]] = (Choice.PRECISION,)


class WeightsTechnique(Technique):
    """Stores weights in fewer bits."""

    phase: ClassVar[Phase] = Phase.QUANTIZATION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    choices: ClassVar[tuple[Choice, ...]] = (Choice.WEIGHTS,)


class KernelTechnique(Technique):
    """Computes a part of a model by another kernel."""

    phase: ClassVar[Phase] = Phase.KERNELS


class CacheTechnique(Technique):
    """Says what is kept of earlier tokens."""

    phase: ClassVar[Phase] = Phase.CACHE


class TrainingTechnique(Technique):
    """Changes a step of training."""

    phase: ClassVar[Phase] = Phase.TRAINING
    tasks: ClassVar[tuple[Task, ...]] = TRAINING


class OnCpuEngine:
    """Mixed into a technique of an engine that computes on the CPU."""

    abilities: ClassVar[tuple[Ability, ...]] = (Ability.CPU_ENGINE,)


def engine_options(stack: Sequence[Technique]) -> EngineOptions:
    """What a stack asks of an engine other than torch; float32 without a technique that says otherwise."""
    options = EngineOptions()
    for technique in stack:
        options = technique.engine(options)
    return options


def conflict_between(one: type[Technique] | Technique, other: type[Technique] | Technique) -> str | None:
    """Why two techniques cannot be in one stack, in half a sentence, or None."""
    for mine, theirs in ((one, other), (other, one)):
        reason = mine.conflicts.get(type_of(theirs).model_fields["name"].default)
        if reason:
            return reason
    return next((choice.value for choice in _choices(one) if choice in _choices(other)), None)


def _choices(technique: type[Technique] | Technique) -> tuple[Choice, ...]:
    return technique.choices if isinstance(technique, type) else technique.chosen()


def type_of(technique: type[Technique] | Technique) -> type[Technique]:
    """The class of a technique, which is given as a class or an instance."""
    return technique if isinstance(technique, type) else type(technique)
