"""A ladder whose stack nobody named, cut to about two minutes by the estimate of its time."""

from collections.abc import Callable, Iterator

from optigpu.job.spec import JobSpec

SHORT_S = 120.0
MOST_SECONDS = 15.0
"""How long a process of a shortened ladder is measured at most."""


def shortened(spec: JobSpec, seconds_of: Callable[[JobSpec], float]) -> JobSpec:
    """The job with one process for each variant and less time for it, and without the techniques that take the most
    time, as far as it takes to fit into SHORT_S; of those whose end makes it fit, without the shortest. One stays."""
    if seconds_of(spec) <= SHORT_S:
        return spec
    measure = {"replicates": 1, "max_seconds": max(spec.measure.min_seconds, MOST_SECONDS)}
    spec = spec.model_copy(update={"measure": spec.measure.model_copy(update=measure)})
    while seconds_of(spec) > SHORT_S and len(spec.stack) + len(spec.beside) > 1:
        fewer = list(_without_one(spec))
        fitting = [each for each in fewer if seconds_of(each) <= SHORT_S]
        spec = max(fitting, key=seconds_of) if fitting else min(fewer, key=seconds_of)
    return spec


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
