"""Checks techniques: the logits and tokens of a model with each, or the losses of its steps, beside those of the plain
model."""

from collections.abc import Iterator, Mapping
from typing import cast

import numpy as np
from numpy.typing import NDArray

from optigpu.backends.runtime import DecodingRuntime, PassRuntime, Runtime
from optigpu.backends.training import TrainingRuntime
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.documents.shapes import ModelFacts
from optigpu.engines.recipes import RECIPES
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference
from optigpu.selftest.outputs import Decoded, Passed
from optigpu.selftest.setting import MODELS, PLAIN_BACKEND, SEED, Setting
from optigpu.techniques import TECHNIQUES
from optigpu.techniques.base import EXACT, Phase, Technique, Trial
from optigpu.vocabulary import ReplicateError, Task, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate
from optigpu.workloads.prefill import Prefill
from optigpu.workloads.train_step import DrawnTexts, TrainStep

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


PROMPT_TOKENS, NEW_TOKENS, BATCH = 12, 16, 2
OF = "the largest logit"
OF_A_LOSS = "the loss of a plain step"
_SAYS_NOTHING = "decode_loop"
"""A fact that follows from a hook's being there, whatever the hook does."""

TrialWorkload = Generate | Prefill | Classify | TrainStep


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
                        alone=kind.process_wide
                        or kind.phase in (Phase.COMPILATION, Phase.CAPTURE)
                        or kind.backends[0] in RECIPES,
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
    expected: Decoded | Passed | Learned
    if isinstance(workload, Generate):
        expected = Decoded(cast(DecodingRuntime, plain), workload)
    elif isinstance(workload, TrainStep):
        expected = Learned(cast(TrainingRuntime, plain), workload)
    else:
        expected = Passed(cast(PassRuntime, plain), workload)
    changed = setting.prepared(workload, model, (technique, *beside), backend=backend)
    if isinstance(expected, Decoded):
        own_loop = type(technique).loop is not Technique.loop
        error = expected.error_of(cast(DecodingRuntime, changed), own_loop=own_loop)
    elif isinstance(expected, Learned):
        error = expected.error_of(cast(TrainingRuntime, changed))
    else:
        error = expected.error_of(cast(PassRuntime, changed))
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
