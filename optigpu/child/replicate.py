"""python -m optigpu.child.replicate: the process that measures one variant, once.

It reads a `Begin`, an `Assignment` and then commands from stdin, and answers as `optigpu.child.connection` and
`optigpu.child.messages` say.
"""

import gc
import math
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, assert_never

from pydantic import ValidationError

from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.runtime import Runtime
from optigpu.child import confined
from optigpu.child.connection import Tell, broken, connect, nice, raise_priority
from optigpu.child.harness import Harness
from optigpu.child.messages import (
    COMMAND,
    WARMING_UP,
    Answer,
    AnyCommand,
    Assignment,
    Audited,
    Begin,
    CallsDigest,
    CallsDone,
    CallsDrawn,
    DigestCalls,
    DrawCalls,
    Loaded,
    Metered,
    Progress,
    Ready,
    Refused,
    Round,
    RunAudit,
    RunCalls,
    RunLook,
    RunMeter,
    RunReference,
    RunRound,
    RunWarmUp,
    Started,
)
from optigpu.documents.facts import NO_MODEL, NOT_RECORDED, MeterFacts, ModelFacts, RunFacts
from optigpu.hardware.cpu import cpu_cores
from optigpu.hardware.device_kinds import no_device
from optigpu.job.spec import Variant
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, Reading
from optigpu.meters.latency import gathered, run_round, warm_up
from optigpu.meters.quality import make_reference
from optigpu.models.described import Facts, known_facts
from optigpu.models.reference import parse_reference
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from optigpu.workloads.base import AnsweringRequest, LoadRequest, Request, Workload


@dataclass(frozen=True)
class Subject:
    """A prepared request with its runtime, and what measures it as it was before the stack was applied."""

    runtime: Runtime
    request: Request
    assignment: Assignment
    harness: Harness
    # Seconds of loading the model and applying the stack.
    load_s: float = 0.0


def main() -> NoReturn:
    """Sets the process up, then answers for ever: the thread that reads stdin ends it."""
    lines, tell = connect()
    line = lines.get()
    with suppress(ValidationError):
        begin = Begin.model_validate_json(line)
        # A library that is missing is refused with the assignment, which says how to install it.
        with suppress(ImportError):
            BACKENDS[begin.backend].start(model=begin.model)
        gc.freeze()  # what was imported stays: no later collection looks through it
        tell(Started())
        line = lines.get()
    subject = _begin(line, tell)
    while True:
        line = lines.get()
        if subject:
            tell(_obey(line, subject, tell))


def _begin(line: str, tell: Tell) -> Subject | None:
    """From the assignment to Loaded or Ready; None after Refused or Broken, when only the end of stdin can follow."""
    try:
        assignment = Assignment.model_validate_json(line)
        reason = refusal(assignment)
        if reason:
            raise UnsupportedError(reason)
        subject = load(assignment, tell)
        tell(Loaded(weights=subject.runtime.weights()) if assignment.waits else warmed_up(subject, tell))
    except UnsupportedError as error:
        tell(Refused(reason=str(error)))
        return None
    except Exception as error:
        tell(broken(error))
        return None
    return subject


def _obey(line: str, subject: Subject, tell: Tell) -> Answer:
    command: AnyCommand | None = None
    try:
        command = COMMAND.validate_json(line)
        return _answer(command, subject, tell)
    except Exception as error:
        is_refused = isinstance(error, UnsupportedError) and isinstance(command, RunLook | RunWarmUp)
        return Refused(reason=str(error)) if is_refused else broken(error)


def _answer(command: AnyCommand, subject: Subject, tell: Tell) -> Answer:
    match command:
        case RunLook():
            return Round(samples={name: tuple(values) for name, values in subject.request.look().items()})
        case RunWarmUp():
            return warmed_up(subject, tell)
        case RunRound():
            with subject.runtime.annotate("round"):
                timed = run_round(
                    subject.request, command.seconds, command.min_requests, command.max_requests
                )
            return Round(samples=timed.samples, request_s=timed.request_s, loads=timed.loads)
        case RunAudit():
            return _audited(command, subject)
        case RunReference():
            return metered("quality", subject, make_reference)
        case DrawCalls():
            return CallsDrawn(calls=_answering(subject).draw(command.seed, command.calls))
        case RunCalls():
            file = Path(command.file)
            return CallsDone(
                answers=_answering(subject).answer(command.calls, file, with_inputs=command.with_inputs)
            )
        case DigestCalls():
            return CallsDigest(sha256=_answering(subject).digest())
        case RunMeter():
            if command.meter not in METERS:
                known = ", ".join(METERS)
                raise OptiGPUError(f"There is no meter {command.meter!r}; the meters are {known}.")
            return metered(command.meter, subject, METERS[command.meter].read, command.seconds)
        case _:
            assert_never(command)


def _answering(subject: Subject) -> AnsweringRequest:
    if not isinstance(subject.request, AnsweringRequest):
        raise OptiGPUError(f"{subject.assignment.variant.workload.kind} checks its own answers.")
    return subject.request


def refusal(assignment: Assignment) -> str | None:
    """Why the assignment cannot run here, as far as this is known before the engine is loaded, or None."""
    variant, environment = assignment.variant, assignment.environment
    if not environment.has(variant.device):
        return f"{no_device(variant.device, environment)}; ask for another device or another worker."
    backend = BACKENDS[variant.backend]
    if variant.device not in backend.devices:
        return f"{variant.backend} runs on {', '.join(backend.devices)}, not on {variant.device}."
    missing = backend.missing(environment)
    if missing:
        return missing
    workload: Workload = variant.workload
    facts = known_facts(parse_reference(variant.model)) if variant.model else None
    reasons = [workload.check(facts)] if facts else []
    decoder = facts if isinstance(facts, ModelFacts) else None
    reasons += [technique.check(environment, variant.device, decoder) for technique in variant.stack]
    return next((reason for reason in reasons if reason), None)


def load(assignment: Assignment, tell: Tell) -> Subject:
    """Loads the model and applies the stack. Raises UnsupportedError when this machine or this model cannot do it."""
    variant = assignment.variant
    backend, order = BACKENDS[variant.backend], order_of(assignment)
    started = time.perf_counter()
    backend.use_threads(order.threads)
    # The harness knows the modules that are there: the engine is imported first, if `Begin` has not done it.
    backend.start(model=variant.model is not None)
    harness = Harness()
    runtime = backend.prepare(order, lambda doing: tell(Progress(doing=doing)))
    request = _request(variant, runtime)
    return Subject(runtime, request, assignment, harness, time.perf_counter() - started)


def warmed_up(subject: Subject, tell: Tell) -> Ready:
    """Checks the output and warms up until requests agree, if requests are to be timed. Raises UnsupportedError when
    this machine cannot do it."""
    assignment, runtime, request = subject.assignment, subject.runtime, subject.request
    variant = assignment.variant

    def progress(doing: str) -> None:
        tell(Progress(doing=doing))

    def show(samples: Mapping[str, float]) -> None:
        tell(Progress(doing=WARMING_UP, samples=dict(samples)))

    if not assignment.timed:
        # A request shows what its shapes are, where they are not known before.
        requests = int(variant.workload.work_shape is None)
        request_s = request.check().request_s if requests else 0.0
        return Ready(
            load_s=subject.load_s,
            compile_s=None,
            steady=False,
            warmup_requests=requests,
            request_s=request_s,
        )
    progress("hashing the weights")
    origin = {"weights": runtime.weights(), "footprint": runtime.footprint()}
    progress("compiling" if variant.compiles else WARMING_UP)
    began = time.perf_counter()
    samples = request.run()
    since = time.perf_counter()
    if not variant.compiles:
        show(samples)
    check = request.check()
    request.observe()
    progress(WARMING_UP)
    process = {
        "nice": raise_priority() if assignment.measure.raise_priority else nice(),
        "reach": confined.reach(),
    }
    warm = warm_up(request, (since - began,), since, show)
    load = {"load": request.facts()} if isinstance(request, LoadRequest) else {}
    ready = Ready(
        load_s=subject.load_s,
        compile_s=warm.beyond_steady_s if variant.compiles else None,
        steady=warm.steady,
        warmup_requests=len(warm.durations_s),
        request_s=warm.request_s,
        facts=RunFacts.gathered(
            runtime.notes.facts | check.details | origin | process | load,
            NOT_RECORDED if variant.model else NO_MODEL,
        ),
        problem=check.problem,
    )
    # The model stays as it is: each round's collection would look through all of it.
    gc.collect()
    gc.freeze()
    return ready


def order_of(assignment: Assignment) -> Order:
    variant = assignment.variant
    return Order(
        model=variant.model,
        stack=variant.stack,
        workload=variant.workload,
        device=variant.device,
        seed=assignment.seed,
        threads=assignment.threads or cpu_cores(),
        folder=Path(assignment.folder),
        environment=assignment.environment,
        endpoint=variant.endpoint,
        answer_s=assignment.answer_s,
    )


def _request(variant: Variant, runtime: Runtime) -> Request:
    """Prepares the workload, after a model whose shapes were not known before was asked whether they fit."""
    facts: Facts | None = getattr(runtime, "facts", None)
    workload: Workload = variant.workload
    problem = workload.check(facts) if facts else None
    if problem:
        raise UnsupportedError(problem)
    return workload.prepare(runtime)


def _audited(command: RunAudit, subject: Subject) -> Audited:
    """Runs requests with fresh inputs, for which no cached output is valid, and checks the output again."""
    fresh: list[Mapping[str, float]] = []
    repeated: list[Mapping[str, float]] = []
    described: dict[str, list[float]] = {}
    request = subject.request
    for number in range(command.requests):
        if command.repeat:
            repeated.append(subject.request.run())
        request = subject.request.fresh(command.seed + number)
        fresh.append(request.run())
        for name, values in request.described().items():
            described.setdefault(name, []).extend(values)
    return Audited(
        samples=gathered(fresh),
        repeated=gathered(repeated),
        described={name: tuple(values) for name, values in described.items()},
        problem=request.check().problem,
        replaced=subject.harness.replaced(),
    )


def metered(
    meter: str, subject: Subject, read: Callable[[MeterContext], Reading], seconds: float | None = None
) -> Metered:
    """Reads a meter. An error becomes the reason of its metrics and does not affect the other meters."""
    assignment = subject.assignment
    quality = assignment.measure.quality
    context = MeterContext(
        runtime=subject.runtime,
        request=subject.request,
        workload=assignment.variant.workload,
        model=assignment.variant.model,
        folder=Path(assignment.folder),
        seed=assignment.seed,
        quality=quality.model_copy(update={"seconds": seconds}) if seconds else quality,
    )
    try:
        reading = read(context)
        # A metric that is NaN or infinite has a reason instead of a value.
        finite = {name: value for name, value in reading.values.items() if math.isfinite(value)}
        wrong = {
            name: f"The {meter} meter read {value}, which is not a finite number."
            for name, value in reading.values.items()
            if name not in finite
        }
        return Metered(
            meter=meter,
            values=finite,
            reasons=reading.reasons | wrong,
            facts=reading.facts,
            artifacts={name: str(path) for name, path in reading.artifacts.items()},
            replaced=subject.harness.replaced(),
        )
    except Exception as error:
        why = f"The {meter} meter failed: {broken(error).reason}"
        traceback.print_exception(error)
        reasons = dict.fromkeys(METERS[meter].metrics, why)
        return Metered(meter=meter, reasons=reasons, facts=MeterFacts(recorded={f"{meter}_failed": why}))


if __name__ == "__main__":
    main()
