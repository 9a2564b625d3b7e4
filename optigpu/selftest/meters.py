"""Checks meters: each reads a small trained model and compares what it read with what it must be."""

from collections.abc import Callable, Iterator, Mapping
from typing import cast

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.meters import METERS
from optigpu.meters.base import MeterContext, QualityOptions
from optigpu.meters.latency import self_test as latency_self_test
from optigpu.selftest.models import WORKLOAD
from optigpu.selftest.setting import SEED, TRAINED_MODEL, Setting
from optigpu.vocabulary import DeviceKind

QUALITY_TOKENS = 48

SELF_TESTS: Mapping[str, Callable[[MeterContext], Comparison]] = {
    "latency": latency_self_test,
    **{name: meter.self_test for name, meter in METERS.items()},
}
"""The check of each meter."""


def meter_checks() -> Iterator[SelfCheck]:
    """Each meter on each device."""
    for name in SELF_TESTS:
        for device in DeviceKind:
            yield SelfCheck(subject=Subject.METER, name=name, device=device)


def run_meter(check: SelfCheck, setting: Setting) -> Comparison:
    """What the meter finds. Raises UnsupportedError where there is nothing to read."""
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
