"""A module that the caller has made, as a runtime and as a request, for the same rounds and meters as any other."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import Module
from torch.utils.flop_counter import FlopCounterMode

from optigpu.backends.torch.device import TorchDevice
from optigpu.backends.torch.device_runtime import TorchRuntime
from optigpu.backends.torch.memory import held_bytes
from optigpu.documents.facts import WeightFacts
from optigpu.models.loading.footprint import product_dtypes, weight_bytes
from optigpu.models.loading.load import count_weights
from optigpu.vocabulary import DeviceKind, OptiGPUError, SpecError
from optigpu.workloads.base import Check

_LOADED = "The caller made the model."


class ModuleRuntime(TorchRuntime):
    """The weights of any module, and the memory and the profile of its device."""

    def __init__(self, module: Module, device: DeviceKind) -> None:
        self.place = TorchDevice(device, seed=0)
        super().__init__(self.place)
        self.module = module

    def weights(self) -> WeightFacts:
        """Their bytes and their number."""
        return WeightFacts(
            bytes=weight_bytes(self.module),
            parameters=count_weights(self.module),
            reasons=dict.fromkeys(("hash", "revision"), _LOADED),
        )

    def moved(self, value: object) -> object:
        """The tensors of `value`, a tensor or a mapping or a sequence of them, on the device; all else as it is."""
        if isinstance(value, torch.Tensor):
            return value.to(self.place.name)
        if isinstance(value, Mapping):
            return {name: self.moved(each) for name, each in value.items()}
        if isinstance(value, list | tuple):
            return tuple(self.moved(each) for each in value)
        return value

    def call(self, inputs: object) -> object:
        """The module's output for inputs that are on the device."""
        if isinstance(inputs, Mapping):
            return self.module(**inputs)
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def memory_bytes(self) -> tuple[int, int] | None:
        """What the GPU's allocator has given out and reserved now; None on a CPU."""
        return held_bytes(self.device)

    def flops(self, inputs: object) -> int | None:
        """Operations of matrix products and convolutions of one call, as torch counts them.

        None where layers compute with operators that torch does not know: its count would be too low.
        """
        if product_dtypes(self.module):
            return None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.call(inputs)
        return counter.get_total_flops() or None


class TimedCalls:
    """A request that calls `work` with what `prepare` makes. Only `work` is timed; `check_output` may look at its
    result afterwards. A Request of optigpu.workloads."""

    def __init__(
        self,
        runtime: ModuleRuntime,
        prepare: Callable[[], object],
        work: Callable[[object], object],
        check_output: Callable[[object], None] | None = None,
    ) -> None:
        self._runtime, self._prepare, self._work = runtime, prepare, work
        self._check_output = check_output

    def run(self) -> Mapping[str, float]:
        """The seconds of one call by the device's clock."""
        inputs, clock = self._prepare(), self._runtime.place.clock
        marks = [clock.mark()]
        output = self._work(inputs)
        marks.append(clock.mark())
        (seconds,) = clock.seconds(marks)
        if self._check_output:
            self._check_output(output)
        return {"latency_s": seconds}

    def check(self) -> Check:
        """One call, and whether its output holds NaN or infinity."""
        output = self._work(self._prepare())
        wrong = _not_finite(output)
        problem = (
            f"The model's output has {wrong} values that are NaN or infinite; check its weights."
            if wrong
            else None
        )
        return Check(self.run()["latency_s"], problem)

    def observe(self) -> None:
        """Nothing is noted of a caller's module."""

    def described(self) -> Mapping[str, Sequence[float]]:
        """A call has no parts."""
        return {}

    def fresh(self, seed: int) -> "TimedCalls":
        """`prepare` makes inputs anew for each call."""
        return self


def forward_passes(runtime: ModuleRuntime, input_fn: Callable[[], object]) -> TimedCalls:
    """Passes over what `input_fn` makes, which is moved to the device before the clock runs."""
    return TimedCalls(runtime, lambda: runtime.moved(input_fn()), runtime.call)


def training_steps(
    runtime: ModuleRuntime,
    optimizer: torch.optim.Optimizer,
    loss_fn: Callable[..., torch.Tensor],
    input_fn: Callable[[], object],
) -> TimedCalls:
    """Steps over the inputs and labels that `input_fn` makes: zero the gradients, forward, backward, update.

    A step raises OptiGPUError when its loss is NaN or infinite.
    """
    count = itertools.count(1)

    def step(batch: object) -> torch.Tensor:
        if not (isinstance(batch, tuple) and len(batch) == 2):
            raise SpecError("input_fn must return two things, inputs and labels.")
        inputs, labels = batch
        optimizer.zero_grad()
        loss = loss_fn(runtime.call(inputs), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def require_finite(loss: object) -> None:
        number = next(count)
        if _not_finite(loss):
            raise OptiGPUError(
                f"The loss of step {number} is NaN or infinite; lower the learning rate, or check inputs and labels."
            )

    return TimedCalls(runtime, lambda: runtime.moved(input_fn()), step, require_finite)


def _not_finite(value: object) -> int:
    """How many numbers of the floating-point tensors in `value` are NaN or infinite."""
    if isinstance(value, torch.Tensor):
        return int((~torch.isfinite(value)).sum()) if value.is_floating_point() else 0
    if isinstance(value, Mapping):
        return sum(map(_not_finite, value.values()))
    return sum(map(_not_finite, value)) if isinstance(value, list | tuple) else 0
