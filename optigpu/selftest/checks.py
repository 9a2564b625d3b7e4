"""The list of all checks, and what runs one of them."""

from collections.abc import Callable, Mapping

from optigpu.documents.selftest import Comparison, SelfCheck, Subject
from optigpu.selftest.engines import engine_checks, run_engine
from optigpu.selftest.kernels import kernel_checks, run_kernel
from optigpu.selftest.meters import meter_checks, run_meter
from optigpu.selftest.models import model_checks, run_model
from optigpu.selftest.setting import Setting
from optigpu.selftest.techniques import run_technique, technique_checks

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
    return (*model_checks(), *kernel_checks(), *engine_checks(), *technique_checks(), *meter_checks())


def run_check(check: SelfCheck, setting: Setting) -> Comparison:
    """Runs one check. Raises UnsupportedError where it cannot run; any other error means that it failed."""
    return _RUNS[check.subject](check, setting)
