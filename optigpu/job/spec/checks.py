"""Whether the fields of a request fit together."""

from typing import TYPE_CHECKING

from optigpu.documents.shapes import ImageFacts
from optigpu.job.spec.conditions import JobTarget
from optigpu.job.spec.names import PlanName
from optigpu.job.spec.stack import check_stacks
from optigpu.job.spec.variant import expand_workload
from optigpu.models.facts import known_facts
from optigpu.models.reference import parse_reference, preset_of
from optigpu.vocabulary import DeviceKind, SpecError, Task
from optigpu.workloads import WORKLOADS, kinds_with
from optigpu.workloads.base import Workload

if TYPE_CHECKING:
    from optigpu.job.spec.job_spec import JobSpec

LIMITED_BACKEND = "torch"
"""The engine whose memory the plan batch_scaling can limit, and that goes on after it ran out."""


def check(spec: "JobSpec") -> None:
    """Raises SpecError for the first field that does not fit the others."""
    _check_target(spec)
    _check_model(spec)
    _check_meters(spec)
    check_stacks(spec)
    _check_plan(spec)
    _check_gates(spec)


def _check_target(spec: "JobSpec") -> None:
    if spec.device is DeviceKind.CPU and spec.target != JobTarget():
        raise SpecError(
            "target: a job for the cpu cannot ask for a GPU; leave target out, or set device to cuda."
        )


def _check_model(spec: "JobSpec") -> None:
    workload: Workload = spec.workload
    if spec.models and spec.model is not None:
        raise SpecError("models: name either model or models; leave one of them out.")
    if not workload.task.needs_model and spec.asked_models != (None,):
        raise SpecError(f"model: {workload.kind} runs no model; leave the field out.")
    if not workload.task.needs_model:
        return
    for model in spec.asked_models:
        if model is None:
            raise SpecError(f"model: {workload.kind} needs a model, for example {workload.example_model}.")
        _check_one_model(workload, model)


def _check_one_model(workload: Workload, model: str) -> None:
    facts = known_facts(parse_reference(model))
    if facts is None:
        return
    for_images = isinstance(facts, ImageFacts)
    if workload.task is not Task.TRAINING and for_images != (workload.task is Task.IMAGES):
        does = "classifies images" if for_images else "generates text"
        raise SpecError(
            f"model: {model} {does}, and {workload.kind} needs another model, for example "
            f"{workload.example_model}."
        )
    problem = workload.check(facts)
    if problem:
        raise SpecError(f"workload: {problem}")
    if workload.has_text and preset_of(parse_reference(model)):
        raise SpecError(
            f"workload.prompt: {model} has random weights and no tokenizer; name a trained model, for example "
            "bundled:tiny, or leave prompt out."
        )


def _check_meters(spec: "JobSpec") -> None:
    """Refuses a workload without the meters that it needs, and quality of random weights."""
    needed = (*spec.workload.meters, *(("quality",) if spec.workload.has_labels else ()))
    missing = [meter for meter in needed if meter not in spec.measure.meters]
    if missing:
        raise SpecError(f"measure.meters: {spec.workload.kind} needs the meter {missing[0]!r}; add it.")
    untrained = _untrained(spec)
    if "quality" in needed and untrained:
        example = "hub:microsoft/resnet-50" if spec.workload.has_labels else spec.workload.example_model
        raise SpecError(
            f"model: {untrained} has random weights, whose quality means nothing; name a trained model, for example "
            f"{example}."
        )


def _untrained(spec: "JobSpec") -> str | None:
    """The first of the job's models that has random weights, if any."""
    named = (model for model in spec.asked_models if model is not None)
    return next((model for model in named if preset_of(parse_reference(model))), None)


def _check_gates(spec: "JobSpec") -> None:
    """Refuses quality limits for a job whose quality cannot be known."""
    if spec.limits.max_kld is None and spec.limits.min_top1 is None:
        return
    if spec.plan is PlanName.BATCH_SCALING:
        raise SpecError("limits: batch_scaling measures no quality; leave max_kld and min_top1 out.")
    if spec.workload.task is Task.TRAINING:
        raise SpecError(
            f"limits: max_kld and min_top1 are of predictions, and {spec.workload.kind} is compared with fp32 by its "
            "losses; leave them out."
        )
    if not spec.workload.task.needs_model or _untrained(spec):
        raise SpecError(
            "limits: max_kld and min_top1 need a trained model, for example bundled:tiny; random weights have no "
            "quality."
        )
    if "quality" not in spec.measure.meters:
        raise SpecError("limits: max_kld and min_top1 need the meter 'quality'; add it to measure.meters.")


def _check_plan(spec: "JobSpec") -> None:
    """Refuses a stack for a plan that has its own, a workload that they do not run, and a search of nothing."""
    if spec.limits.max_bytes is not None and spec.plan not in (PlanName.SEARCH, PlanName.BATCH_SCALING):
        raise SpecError(
            "limits.max_bytes: only the plans search and batch_scaling have such a bound; leave it out, or search."
        )
    if spec.plan is PlanName.SEARCH and len(expand_workload(spec.workload)) > 1:
        raise SpecError("workload: a search compares stacks of one workload; ask for one size of each shape.")
    if spec.plan is PlanName.BATCH_SCALING:
        _check_batch_scaling(spec)
    if spec.plan is PlanName.MEMORY_LADDER:
        _check_memory_ladder(spec)


def _check_memory_ladder(spec: "JobSpec") -> None:
    if spec.stack:
        raise SpecError(
            "stack: the plan memory-ladder has its own stacks; leave stack out, or measure it with beside."
        )
    if spec.workload.task is not Task.DECODING:
        raise SpecError(
            f"plan: memory-ladder measures models that generate text, not {spec.workload.kind}; it runs "
            f"{', '.join(kinds_with([Task.DECODING]))}."
        )


def _check_batch_scaling(spec: "JobSpec") -> None:
    """The plan needs a limit, a workload with a batch that it may choose, and an engine that can run out of memory."""
    if spec.limits.max_bytes is None:
        raise SpecError("limits.max_bytes: batch_scaling needs the memory that it may take, for example 2e9.")
    batch = type(spec.workload).model_fields.get("batch_size")
    if batch is None:
        kinds = (name for name, kind in WORKLOADS.items() if "batch_size" in kind.model_fields)
        raise SpecError(
            f"workload: {spec.workload.kind} has no batch to scale; the valid ones are {', '.join(kinds)}."
        )
    if spec.workload.model_dump()["batch_size"] != batch.default:
        raise SpecError("workload.batch_size: batch_scaling looks for it; leave it out.")
    if any(backend != LIMITED_BACKEND for backend in (spec.backend, *(each.backend for each in spec.beside))):
        raise SpecError(
            f"backend: batch_scaling limits the memory of {LIMITED_BACKEND} alone; name that one."
        )
