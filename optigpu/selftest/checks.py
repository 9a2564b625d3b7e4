"""The list of all checks, and what runs one of them: models, kernels, engines, meters, and techniques. A `selftest.py`
in a folder of optigpu.ops holds functions in its `KERNELS`, by name, which bring their references, operands and bounds
with them. They load torch, so they are imported when the checks are listed, in the measuring process. Of techniques,
the logits and tokens of a model with each, or the losses of its steps, are held beside those of the plain model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from optigpu import ops
from optigpu.backends import BACKENDS
from optigpu.backends.runtime import (
    DecodingRuntime,
    Ids,
    Images,
    Logits,
    PassRuntime,
    ReferenceRuntime,
    Runtime,
)
from optigpu.backends.training import TrainingRuntime
from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.facts import ImageFacts, ModelFacts
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.engines.environments import RECIPES
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import self_test as latency_self_test
from optigpu.models.described import known_facts
from optigpu.models.reference import parse_reference
from optigpu.selftest.setting import MODELS, PLAIN_BACKEND, SEED, TEXT_MODELS, TRAINED_MODEL, Setting
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT, Technique, Trial
from optigpu.vocabulary import DeviceKind, ReplicateError, Task, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.requests import drawn_ids
from optigpu.workloads.train_step import DrawnTexts, TrainStep

Steps = NDArray[np.float32]
"""Logits of several decode steps, [steps, batch, vocabulary]."""


class Decoded:
    """What the unmodified model decodes greedily after drawn prompts, and its logits on the way."""

    def __init__(self, plain: DecodingRuntime, workload: Generate) -> None:
        self._plain, self._new_tokens = plain, workload.new_tokens
        assert workload.prompt_tokens is not None  # its prompts are random
        shape = (workload.batch_size, workload.prompt_tokens)
        self._prompt = drawn_ids(np.random.default_rng(SEED), plain.facts, shape)
        self._tokens = plain.generate(self._prompt, self._new_tokens).tokens
        self._logits = _stacked(plain.score(self._given(self._tokens), self._prefill))

    def error_of(self, changed: DecodingRuntime, *, own_loop: bool) -> float:
        """The largest error of a logit, as a share of the largest logit; NaN if there is one. With `own_loop` the stack
        replaces the decode loop, by one that may give no logits: then the model's own count. Half of what a chosen
        token is behind the best one counts as an error of its logit: a greedy choice from logits that are off by so
        much explains it. Raises ReplicateError for a wrong number of tokens."""
        found = self._generated(changed)
        logits = _stacked(self._scored(changed, own_loop))
        errors = np.abs(logits - self._logits).max() / self._largest, self._behind(found) / 2 / self._largest
        return float(np.max(errors))  # NaN if there is one

    def error_of_tokens(self, changed: DecodingRuntime) -> float:
        """The same of the tokens alone, for an engine that gives no logits. Raises ReplicateError for a wrong number of
        tokens."""
        return self._behind(self._generated(changed)) / 2 / self._largest

    def error_of_whole_passes(self, other: ReferenceRuntime) -> float:
        """The same of logits by passes over the whole sequence, without a cache or a decode step."""
        logits = _stacked(other.whole(self._given(self._tokens), self._prefill))
        return float(np.abs(logits - self._logits).max() / self._largest)

    def _generated(self, changed: DecodingRuntime) -> Ids:
        found = changed.generate(self._prompt, self._new_tokens).tokens
        if found.shape != self._tokens.shape:
            raise ReplicateError(f"It decoded tokens of shape {found.shape} instead of {self._tokens.shape}.")
        return found

    def _scored(self, changed: DecodingRuntime, own_loop: bool) -> Iterable[Logits]:
        given = self._given(self._tokens)
        try:
            return list(changed.score(given, self._prefill))
        except UnsupportedError:
            if not (own_loop and isinstance(changed, ReferenceRuntime)):
                raise
            return changed.whole(given, self._prefill)

    @property
    def _largest(self) -> float:
        return float(np.abs(self._logits).max())

    @property
    def _prefill(self) -> int:
        return int(self._prompt.shape[1]) - 1

    def _given(self, tokens: Ids) -> Ids:
        """What the model has seen before it chooses the last token."""
        return np.concatenate([self._prompt, tokens], axis=1)[:, :-1]

    def _behind(self, tokens: Ids) -> float:
        """By how much, at most, the unmodified model prefers another token to the one that was chosen."""
        if np.array_equal(tokens, self._tokens):
            return 0.0
        if tokens.min() < 0 or tokens.max() >= self._logits.shape[-1]:
            raise ReplicateError("It decoded a token that the model does not have.")
        logits = _stacked(self._plain.score(self._given(tokens), self._prefill))
        chosen = np.take_along_axis(logits, tokens.T[..., None], axis=-1)[..., 0]
        return float((logits.max(axis=-1) - chosen).max())


class Passed:
    """What the unmodified model makes of drawn inputs in one pass."""

    def __init__(self, plain: PassRuntime, workload: Prefill | Classify) -> None:
        self._inputs = _inputs(plain, workload)
        self._logits = plain.forward(self._inputs).logits

    def error_of(self, changed: PassRuntime) -> float:
        """The largest error of a logit, as a share of the largest logit; NaN if there is one."""
        found = changed.forward(self._inputs).logits
        if found.shape != self._logits.shape:
            raise ReplicateError(f"It gave logits of shape {found.shape} instead of {self._logits.shape}.")
        return float(np.abs(found - self._logits).max() / np.abs(self._logits).max())


STEPS = 3


class Learned:
    """The losses of the plain model over STEPS steps with drawn documents, some of them shorter than a row."""

    def __init__(self, plain: TrainingRuntime, workload: TrainStep) -> None:
        texts, shortest = DrawnTexts(cast(ModelFacts, plain.facts), SEED), workload.sequence_tokens // 2
        self._batches = [
            texts.batch(workload.batch_size, workload.sequence_tokens, shortest) for _ in range(STEPS)
        ]
        self._trained = _trained(plain)
        self._norm = plain.gradient_norm(self._batches[0])
        self._losses = self._losses_of(plain)

    def error_of(self, changed: TrainingRuntime) -> float:
        """The largest error of a loss, as a share of it; NaN if there is one. Where the same number of weights is
        trained, the error of the gradient's norm counts too."""
        errors = []
        if _trained(changed) == self._trained:
            errors.append(abs(changed.gradient_norm(self._batches[0]) / self._norm - 1))
        losses = self._losses_of(changed)
        return float(np.max([*errors, *np.abs(losses / self._losses - 1)]))

    def _losses_of(self, runtime: TrainingRuntime) -> NDArray[np.float64]:
        return np.array([runtime.step(batch).loss for batch in self._batches])


def _trained(runtime: TrainingRuntime) -> int | None:
    weights = runtime.weights()
    return weights.trainable if weights else None


def _stacked(logits: Iterable[Logits]) -> Steps:
    return np.stack(list(logits))


def _inputs(plain: PassRuntime, workload: Prefill | Classify) -> Ids | Images:
    source = np.random.default_rng(SEED)
    if isinstance(workload, Prefill):
        decoder = cast(ModelFacts, plain.facts)
        return drawn_ids(source, decoder, (workload.batch_size, workload.prompt_tokens))
    facts = cast(ImageFacts, plain.facts)
    shape = (workload.batch_size, facts.channels, facts.image_size, facts.image_size)
    return source.standard_normal(shape, np.float32)


if TYPE_CHECKING:
    from optigpu.ops.kernel_check import KernelCheck


PROMPT_TOKENS, NEW_TOKENS, BATCH = 12, 16, 2
OF = "the largest logit"
OF_A_LOSS = "the loss of a plain step"
_SAYS_NOTHING = "decode_loop"
"""A fact that follows from a hook's being there, whatever the hook does."""

TrialWorkload = Generate | Prefill | Classify | TrainStep


def engine_checks() -> Iterator[SelfCheck]:
    """One for each device of each engine that decodes; a server is no engine of this machine."""
    for name, backend in BACKENDS.items():
        if name in (PLAIN_BACKEND, ENDPOINT) or backend.supports(WORKLOAD, None):
            continue
        for device in backend.devices:
            alone = name in RECIPES
            yield SelfCheck(subject=Subject.ENGINE, name=name, device=device, alone=alone, backend=name)


def run_engine(check: SelfCheck, setting: Setting) -> Comparison:
    """The largest error of a logit; of an engine that gives none, by how much its tokens are behind torch's. Raises
    UnsupportedError where the engine runs none of the small models."""
    reason = f"{check.name} runs no small model."
    for model in TEXT_MODELS:
        try:
            engine = cast(DecodingRuntime, setting.prepared(WORKLOAD, model, backend=check.name))
        except UnsupportedError as refused:
            reason = str(refused)
            continue
        on_cpu = setting.prepared(WORKLOAD, model, device=DeviceKind.CPU)
        expected = Decoded(cast(DecodingRuntime, on_cpu), WORKLOAD)
        try:
            error = expected.error_of(engine, own_loop=False)
        except UnsupportedError:
            error = expected.error_of_tokens(engine)
        return Comparison(error, EXACT, OF, how=model)
    raise UnsupportedError(reason)


WORKLOAD = Generate(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, batch_size=BATCH)


def run_model(_check: SelfCheck, setting: Setting) -> Comparison:
    """The largest error of a logit. Raises ReplicateError if torch cannot use a device that the machine has: then no
    other check can run on it."""
    try:
        there = cast(DecodingRuntime, setting.prepared(WORKLOAD, TRAINED_MODEL))
    except UnsupportedError as refused:
        raise ReplicateError(str(refused)) from refused
    on_cpu = cast(ReferenceRuntime, setting.prepared(WORKLOAD, TRAINED_MODEL, device=DeviceKind.CPU))
    error = Decoded(there, WORKLOAD).error_of_whole_passes(on_cpu)
    return Comparison(error, EXACT, OF, how=TRAINED_MODEL)


def technique_checks() -> Iterator[SelfCheck]:
    for name, kind in TECHNIQUES.items():
        for trial in kind.trials:
            for device in kind.devices:
                if device in trial.devices:
                    yield SelfCheck(
                        subject=Subject.TECHNIQUE,
                        name=name,
                        case=case_of(trial),
                        device=device,
                        alone=kind.process_wide or kind.phase.compiles or kind.backends[0] in RECIPES,
                        backend=kind.backends[0],
                    )


def case_of(trial: Trial) -> str:
    """For example "weights=w8, beside bf16"; empty for the defaults alone."""
    parameters = [f"{name}={value}" for name, value in trial.parameters.items()]
    return ", ".join(parameters + [f"beside {name}" for name in trial.beside])


def run_technique(check: SelfCheck, setting: Setting) -> Comparison:
    """The largest error of a logit, or of the loss of a step. Raises UnsupportedError where the technique says that it
    cannot run, and ReplicateError where it changes nothing."""
    kind = TECHNIQUES[check.name]
    trial = next(trial for trial in kind.trials if case_of(trial) == check.case)
    technique = kind.model_validate({"name": check.name, **trial.parameters})
    backend = technique.backends[0]
    beside, workload = _named(trial.beside), workload_for(technique)
    compared_with = _named(technique.compared_with or technique.requires)
    model = _model_for((technique, *compared_with, *beside), workload, setting)
    plain = setting.prepared(workload, model, (*compared_with, *beside))
    error_of: Callable[[Any], float]
    if isinstance(workload, Generate):
        own_loop = type(technique).loop is not Technique.loop
        error_of = partial(Decoded(cast(DecodingRuntime, plain), workload).error_of, own_loop=own_loop)
    elif isinstance(workload, TrainStep):
        error_of = Learned(cast(TrainingRuntime, plain), workload).error_of
    else:
        error_of = Passed(cast(PassRuntime, plain), workload).error_of
    changed = setting.prepared(workload, model, (technique, *beside), backend=backend)
    error = error_of(cast(Any, changed))
    bound = technique.error_bound if trial.error_bound is None else trial.error_bound
    if backend == PLAIN_BACKEND and _facts(plain) == _facts(changed):
        raise ReplicateError("It changed nothing: a run with it records the same facts as one without it.")
    if bound > EXACT and error == 0:
        raise ReplicateError(
            "It rounds, and yet every logit or loss is exactly the unmodified model's: it had no effect."
        )
    return Comparison(error, bound, OF_A_LOSS if isinstance(workload, TrainStep) else OF, how=model)


def workload_for(technique: Technique) -> TrialWorkload:
    """Decoding if the technique matters to it, else a pass or a step; decoding of one sequence if it takes no more."""
    if Task.DECODING in technique.tasks:
        several = Generate(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS, batch_size=BATCH)
        return several.model_copy(update={"batch_size": 1}) if technique.fits(several) else several
    if Task.PREFILL in technique.tasks:
        return Prefill(prompt_tokens=PROMPT_TOKENS + NEW_TOKENS, batch_size=BATCH)
    if Task.TRAINING in technique.tasks:
        return TrainStep(
            batch_size=2 * BATCH, sequence_tokens=PROMPT_TOKENS + NEW_TOKENS, shortest_tokens=PROMPT_TOKENS
        )
    return Classify(batch_size=BATCH)


def _named(names: tuple[str, ...]) -> tuple[Technique, ...]:
    return tuple(TECHNIQUES[name](name=name) for name in names)


def _model_for(stack: tuple[Technique, ...], workload: TrialWorkload, setting: Setting) -> str:
    """The first small model that nothing in the stack refuses. Raises UnsupportedError with the last reason."""
    reason: str | None = None
    for model in MODELS[workload.task]:
        facts = known_facts(parse_reference(model))
        decoder = facts if isinstance(facts, ModelFacts) else None
        checks = (each.check(setting.environment, setting.device, decoder) for each in stack)
        reason = next((found for found in checks if found), None)
        if reason is None:
            return model
    raise UnsupportedError(reason or f"There is no small model for {workload.kind}.")


def _facts(runtime: Runtime) -> Mapping[str, object]:
    return {name: value for name, value in runtime.notes.facts.items() if name != _SAYS_NOTHING}


QUALITY_TOKENS = 48

SELF_TESTS: Mapping[str, Callable[[MeterContext], Comparison]] = {
    "latency": latency_self_test,
    **{name: meter.self_test for name, meter in METERS.items()},
}
"""The check of each meter."""


def run_meter(check: SelfCheck, setting: Setting) -> Comparison:
    runtime = setting.prepared(WORKLOAD, TRAINED_MODEL)
    request = WORKLOAD.prepare(cast(DecodingRuntime, runtime))
    request.run()
    context = MeterContext(
        runtime=runtime,
        request=request,
        workload=WORKLOAD,
        model=TRAINED_MODEL,
        folder=setting.folder,
        seed=SEED,
        quality=QualityOptions(tokens=QUALITY_TOKENS),
    )
    return SELF_TESTS[check.name](context)


FILE = "selftest.py"


@cache
def kernels() -> Mapping[str, "KernelCheck"]:
    root = Path(ops.__path__[0])
    paths = sorted(path.relative_to(root).with_suffix("") for path in root.rglob(FILE))
    modules = (import_module(".".join((ops.__name__, *path.parts))) for path in paths)
    return {name: check for module in modules for name, check in module.KERNELS.items()}


def run_kernel(check: SelfCheck, setting: Setting) -> Comparison:
    """What the kernel's own check finds. Raises UnsupportedError where the kernel, or torch itself, cannot run."""
    setting.prepared(Matmul(), None)
    return kernels()[check.name].run(setting.device)


Run = Callable[[SelfCheck, Setting], Comparison]

_RUNS: Mapping[Subject, Run] = {
    Subject.MODEL: run_model,
    Subject.KERNEL: run_kernel,
    Subject.ENGINE: run_engine,
    Subject.TECHNIQUE: run_technique,
    Subject.METER: run_meter,
}


def all_checks() -> tuple[SelfCheck, ...]:
    """Every check of every device, in the order in which they run: what others build on comes first."""
    first = [(Subject.MODEL, "unmodified model", device) for device in DeviceKind]
    first += [(Subject.KERNEL, name, device) for name, each in kernels().items() for device in each.devices]
    last = [(Subject.METER, name, device) for name in SELF_TESTS for device in DeviceKind]
    return (
        *(SelfCheck(subject=subject, name=name, device=device) for subject, name, device in first),
        *engine_checks(),
        *technique_checks(),
        *(SelfCheck(subject=subject, name=name, device=device) for subject, name, device in last),
    )


def run_check(check: SelfCheck, setting: Setting) -> Comparison:
    """Runs one check. Raises UnsupportedError where it cannot run; any other error means that it failed."""
    return _RUNS[check.subject](check, setting)
