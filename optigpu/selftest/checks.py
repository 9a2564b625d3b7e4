"""The list of all checks, and what runs one of them: models, kernels, engines, meters, and techniques. A `selftest.py`
in a folder of optigpu.ops holds functions in its `KERNELS`, by name, which bring their references, operands and bounds
with them. They load torch, so they are imported when the checks are listed, in the measuring process."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, cast

from optigpu import ops
from optigpu.backends import BACKENDS
from optigpu.backends.runtime import DecodingRuntime, ReferenceRuntime
from optigpu.documents.endpoints import ENDPOINT
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.engines.recipes import RECIPES
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import self_test as latency_self_test
from optigpu.selftest.outputs import Decoded
from optigpu.selftest.setting import PLAIN_BACKEND, SEED, TEXT_MODELS, TRAINED_MODEL, Setting
from optigpu.selftest.techniques import BATCH, NEW_TOKENS, OF, PROMPT_TOKENS, run_technique, technique_checks
from optigpu.techniques.base import EXACT
from optigpu.vocabulary import DeviceKind, ReplicateError, UnsupportedError
from optigpu.workloads.generate import Generate
from optigpu.workloads.matmul import Matmul

if TYPE_CHECKING:
    from optigpu.ops.kernel_check import KernelCheck


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
