"""A ladder whose stack nobody named, cut to about two minutes by the estimate of its time."""

from collections.abc import Callable, Iterator

from optigpu.job.estimate import Plan
from optigpu.job.spec import JobSpec

SHORT_S = 120.0
MOST_SECONDS = 15.0
"""How long a process of a shortened ladder is measured at most."""


def shortened(spec: JobSpec, plan_of: Callable[[JobSpec], Plan]) -> JobSpec:
    """The job with one process for each variant and less time for it, and without the techniques whose variants take
    the longest, as far as it takes to fit into SHORT_S. One of them stays."""
    if plan_of(spec).seconds <= SHORT_S:
        return spec
    measure = {"replicates": 1, "max_seconds": max(spec.measure.min_seconds, MOST_SECONDS)}
    spec = spec.model_copy(update={"measure": spec.measure.model_copy(update=measure)})
    while (plan := plan_of(spec)).seconds > SHORT_S and len(spec.stack) + len(spec.beside) > 1:
        fewer = [(each, plan_of(each)) for each in _without_one(spec)]
        spec, _ = max(fewer, key=lambda each: _each_s(plan, each[1]))
    return spec


def _each_s(plan: Plan, fewer: Plan) -> float:
    """How long the variants that one plan has and the other has not take, the mean."""
    return (plan.seconds - fewer.seconds) / max(1, len(plan.guesses) - len(fewer.guesses))


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
    return (
        f"To end in about two minutes, this ladder {without}measures {measure.replicates} process of each variant "
        f"instead of {whole.measure.replicates}, for {measure.max_seconds:g} s at most; --stack all measures all."
    )


def _without_one(spec: JobSpec) -> Iterator[JobSpec]:
    """Without each technique and what requires it, and without each stack that is beside."""
    for each in spec.stack if len(spec.stack) > 1 or spec.beside else ():
        others = tuple(other for other in spec.stack if other != each and each.name not in other.requires)
        yield spec.model_copy(update={"stack": others})
    for beside in spec.beside:
        yield spec.model_copy(update={"beside": tuple(other for other in spec.beside if other != beside)})
