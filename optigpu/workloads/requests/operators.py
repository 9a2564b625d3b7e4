"""Operators by themselves: equal calls, as many to a sample as the clock needs, of arrays that fit the memory."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field

from optigpu.backends.operators import OperatorRuntime, TimedOperator, Wide
from optigpu.vocabulary import Task, UnsupportedError
from optigpu.workloads.base import Check, Request, Workload

Dtype = Literal["float32", "float16", "bfloat16"]
Implementation = Literal["standard", "fused"]

SAMPLE_S = 0.005
"""A sample is a batch of calls of at least this duration, so that reading the clock (under 1 us) is nothing."""
_LONG_CALL_SAMPLES = 20
"""If the first call takes this many times SAMPLE_S, one call is a sample, however much of it was start-up."""
CHECKED_ROWS = 16
"""The number of rows of a result that are compared with a float64 reference."""
FLOAT32_ROUNDOFF = 2.0**-24
"""Unit roundoff of float32, in which all operators sum."""
ROUNDING: dict[str, float] = {"float32": 2.0**-24, "tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of each dtype."""
DTYPE_UNDERFLOW: dict[str, float] = {"float32": 2.0**-150, "float16": 2.0**-25, "bfloat16": 2.0**-134}
"""The largest error of a subnormal number: half of the dtype's smallest number."""
WIDTHS: dict[str, int] = {"float32": 4, "tf32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element."""


class Implemented(Workload):
    """A workload with the implementations "standard" (separate operators) and "fused" (one operator)."""

    task: ClassVar[Task] = Task.OPERATOR
    reference: ClassVar[str | None] = "standard"

    implementations: tuple[Implementation, ...] = Field(
        ("standard", "fused"), min_length=1, max_length=2, description="Which implementations to measure."
    )

    @property
    def implementation(self) -> Implementation:
        (implementation,) = self.implementations
        return implementation

    def identity(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"implementations"})


class Calls(Request):
    """One batch of equal calls."""

    def __init__(self, runtime: OperatorRuntime, operator: TimedOperator) -> None:
        """Calls the operator a few times to find out how many calls make a sample, and records it."""
        self._operator, self._count = operator, 1
        if self._sample_s() <= _LONG_CALL_SAMPLES * SAMPLE_S:
            self._count = max(1, math.ceil(SAMPLE_S / min(self._sample_s() for _ in range(3))))
        runtime.notes.record(calls_per_sample=self._count)

    def _sample_s(self) -> float:
        return self._operator.seconds(self._count)

    def run(self) -> Mapping[str, float]:
        return {"latency_s": self._sample_s() / self._count}

    def check(self) -> Check:
        return Check(self._sample_s())

    def observe(self) -> None:
        """Nothing is recorded beyond what was noted before."""

    def fresh(self, seed: int) -> Self:
        self._operator.redraw(seed)
        return self


class OperatorRequest(Calls, ABC):
    """Calls whose result is checked by itself."""

    noun: ClassVar[str]
    """The operator's name in an error."""
    rate: ClassVar[tuple[str, float]] = ("tflops", 1e12)
    """The metric of how much is done in a second, and how much is one of its unit."""

    def __init__(self, runtime: OperatorRuntime, operator: TimedOperator, amount: float) -> None:
        """`amount` is what a call does: operations, or bytes."""
        self._amount = amount
        super().__init__(runtime, operator)

    @abstractmethod
    def error_over_bound(self) -> float:
        """The largest error of a result over the worst that the dtype's rounding explains; NaN for a result of NaN."""

    def run(self) -> Mapping[str, float]:
        latency_s, (name, unit) = self._sample_s() / self._count, self.rate
        return {"latency_s": latency_s, name: self._amount / latency_s / unit}

    def check(self) -> Check:
        request_s = self._sample_s()
        with np.errstate(divide="ignore", invalid="ignore"):  # a wrong result may hold any number
            worst = self.error_over_bound()
        if not worst <= 1:
            off = f"an element is off by {worst:.3g} times the dtype's worst rounding"
            return Check(request_s, f"The {self.noun} is wrong: {off}.")
        return Check(request_s, details={"error_over_bound": worst})


def checked_places(count: int) -> list[int]:
    """CHECKED_ROWS indices below `count`, evenly spread from the first to the last, without repetitions."""
    return sorted({int(place) for place in np.linspace(0, count - 1, CHECKED_ROWS)})


def largest(*errors: Wide) -> float:
    """The largest number of all arrays; NaN where there is one."""
    return float(np.max([np.max(each) for each in errors]))


def require_memory(runtime: OperatorRuntime, needed: int, what: str) -> None:
    """Raises UnsupportedError when `needed` bytes for `what` are more than the device has free."""
    free = runtime.free_bytes()
    if needed > free:
        raise UnsupportedError(
            f"{what} need {needed / 1e9:.1f} GB and this {runtime.device} has {free / 1e9:.1f} GB free; ask for a "
            "smaller size."
        )
