"""profile: the kernels in which one request spends its time, from torch's profiler, in a separate pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from optigpu.documents.facts import MeterFacts
from optigpu.documents.peaks import Bound
from optigpu.documents.selftest import Comparison
from optigpu.hardware.intensity import BOUND_RULE, RIDGE_FLOP_PER_BYTE, Kernel, share, table
from optigpu.meters.base import Meter, MeterContext, Reading, require_read
from optigpu.vocabulary import ReplicateError, UnsupportedError, new_id

TRACE_LIMIT_BYTES = 20 * 2**20
KNOWN_FROM = 0.8
"""If the bound is known for less than this share of the kernel time, the shares are not reported."""


@dataclass(frozen=True)
class ProfileMeter(Meter):
    """Records the first token and `steps` decode steps, and counts each of those for all of the request's steps. A
    request without tokens is recorded whole. Times of small operators hold the profiler's own cost. A graph that was
    compiled for a CPU counts as one kernel, apart from the operators that it calls."""

    once: ClassVar[bool] = True
    metrics: ClassVar[tuple[str, ...]] = ("memory_bound_share", "compute_bound_share", "launches_per_step")

    steps: int = 8
    trace_limit_bytes: int = TRACE_LIMIT_BYTES

    def read(self, context: MeterContext) -> Reading:
        """The table in the facts, Chrome's trace as trace.json.gz, the shares of kernel time as metrics."""
        runtime = context.runtime
        path = context.folder / "artifacts" / f"trace-{new_id()}.json.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            seen = runtime.profile(context.request.run, self.steps, path)
        except UnsupportedError as error:
            return self.none(str(error))
        if not seen.kernels:
            why = f"The profiler saw no kernel on the {runtime.device}; check whether something else profiles it."
            return self.none(why)
        trace, trace_note = self._kept(path)
        values, reasons = _shares(seen.kernels)
        if seen.recorded_steps:
            launches = sum(kernel.in_steps for kernel in seen.kernels)
            values["launches_per_step"] = launches / seen.recorded_steps
        else:
            reasons["launches_per_step"] = "this workload decodes no steps"
        profile = {
            "table": table(seen.kernels),
            "rule": BOUND_RULE,
            "ridge_flop_per_byte": RIDGE_FLOP_PER_BYTE[runtime.device],
            "unknown_share": share(seen.kernels, None),
            "steps_recorded": seen.recorded_steps,
            "steps": seen.steps,
            "trace": trace_note,
        }
        return Reading(values, reasons, MeterFacts(recorded={"profile": profile}), trace)

    def self_test(self, context: MeterContext) -> Comparison:
        """It counts the decode steps of a request. Raises ReplicateError if it sees no kernel in them."""
        require_read(self.read(context), "launches_per_step")
        seen = context.runtime.profile(context.request.run, self.steps, context.folder / "self-test.json.gz")
        (gaps_s,) = context.request.described().values()
        launches = sum(kernel.in_steps for kernel in seen.kernels)
        if launches == 0:
            raise ReplicateError("The profiler saw no kernel in a decode step.")
        how = f"{launches / seen.recorded_steps:.0f} kernels a step"
        return Comparison(abs(seen.steps - len(gaps_s)) / len(gaps_s), 0.0, "the decode steps", how)

    def _kept(self, path: Path) -> tuple[dict[str, Path], str]:
        """The trace, if it is not too large to be kept, and what became of it."""
        size = path.stat().st_size
        if size > self.trace_limit_bytes:
            path.unlink()
            return {}, f"not kept: {size} bytes, and {self.trace_limit_bytes} is the limit"
        return {"trace.json.gz": path}, f"trace.json.gz, {size} bytes"


def _shares(kernels: Sequence[Kernel]) -> tuple[dict[str, float], dict[str, str]]:
    names = {"memory_bound_share": Bound.MEMORY, "compute_bound_share": Bound.COMPUTE}
    unknown = share(kernels, None)
    if 1 - unknown < KNOWN_FROM:
        why = (
            f"It is unknown what bounds {unknown:.0%} of the kernel time (compiled or fused kernels); profile the "
            "variant without compilation."
        )
        return {}, dict.fromkeys(names, why)
    return {name: share(kernels, bound) for name, bound in names.items()}, {}
