"""A ladder whose stack nobody named, cut to about two minutes by the estimate of its time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from optigpu.job.estimate import FirstGuess, Plan
from optigpu.job.plan import variants_of
from optigpu.job.spec import JobSpec, PlanName
from optigpu.techniques.base import Technique

SHORT_S = 120.0
MOST_SECONDS = 10.0
"""How long a process of a shortened ladder is measured at most."""
FEW_NEW_TOKENS = 32
"""Of its requests: steps are as long as in a longer one, and warm-up, audit and meters take whole requests."""


def shortened(spec: JobSpec, plan_of: Callable[[JobSpec], Plan], *, may_shorten: bool = True) -> JobSpec:
    """The job with one process for each variant and less time for it, then with short requests if `may_shorten` them,
    then without the techniques that are expected to gain the least, as far as it takes to fit into SHORT_S. One of them
    stays."""
    if plan_of(spec).seconds <= SHORT_S:
        return spec
    measure = {"replicates": 1, "max_seconds": max(spec.measure.min_seconds, MOST_SECONDS)}
    spec = spec.model_copy(update={"measure": spec.measure.model_copy(update=measure)})
    is_long = not spec.workload.is_served and _new_tokens(spec) > FEW_NEW_TOKENS
    if may_shorten and is_long and plan_of(spec).seconds > SHORT_S:
        few = {"new_tokens": FEW_NEW_TOKENS}
        spec = spec.model_copy(update={"workload": spec.workload.model_copy(update=few)})
    while plan_of(spec).seconds > SHORT_S and len(spec.stack) + len(spec.beside) > 1:
        spec = min(_without_one(spec), key=lambda fewer: (fewer.gain, plan_of(fewer.spec).seconds)).spec
    return spec


@dataclass(frozen=True)
class _Fewer:
    """A job with a technique less. `gain` is the predicted speed of what it lacks, relative to the baseline's."""

    spec: JobSpec
    gain: float


def _new_tokens(spec: JobSpec) -> int:
    """Of a request; 0 where it generates none."""
    return int(getattr(spec.workload, "new_tokens", 0))


def left_out(whole: JobSpec, spec: JobSpec) -> str:
    """What a shortened ladder leaves out, in one sentence with the flag for it; empty for nothing."""
    if spec == whole:
        return ""
    gone: list[str] = [each.name for each in whole.stack if each not in spec.stack]
    gone += [
        " + ".join(technique.name for technique in each.stack)
        for each in whole.beside
        if each not in spec.beside
    ]
    without = f"leaves out {', '.join(gone)} and " if gone else ""
    measure = spec.measure
    requests = f", by requests of {_new_tokens(spec)} new tokens" if spec.workload != whole.workload else ""
    return (
        f"To end in about two minutes, this ladder {without}measures {measure.replicates} process of each variant "
        f"instead of {whole.measure.replicates}, for {measure.max_seconds:g} s at most{requests}; --stack all measures "
        "all."
    )


def _without_one(spec: JobSpec) -> Iterator[_Fewer]:
    """Without each technique and what requires it, and without each stack that is beside."""
    plain_s = _request_s(spec, ())
    for each in spec.stack:
        gone = [each, *(other for other in spec.stack if each.name in other.requires)]
        kept = tuple(other for other in spec.stack if other not in gone)
        if not (kept or spec.beside):
            continue
        fastest_s = min(_request_s(spec, _with_required(other, spec.stack)) for other in gone)
        yield _Fewer(spec.model_copy(update={"stack": kept}), plain_s / fastest_s)
    for beside in spec.beside:
        others = tuple(other for other in spec.beside if other != beside)
        yield _Fewer(spec.model_copy(update={"beside": others}), plain_s / _request_s(spec, beside.stack))


def _with_required(technique: Technique, stack: Sequence[Technique]) -> tuple[Technique, ...]:
    return tuple(each for each in stack if each == technique or each.name in technique.requires)


def _request_s(spec: JobSpec, stack: Sequence[Technique]) -> float:
    """Of a request with that stack alone, by a first guess."""
    alone = {"stack": tuple(stack), "beside": (), "plan": PlanName.SINGLE}
    return FirstGuess(variants_of(spec.model_copy(update=alone))[0]).request_s
