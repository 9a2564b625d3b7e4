"""What the facade measures with torch: a module that the caller has made, its kernels, and products in 4 bits."""

import itertools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.nn import Module
from torch.utils.flop_counter import FlopCounterMode

from optigpu.backends.torch.device import TorchDevice, calls_s, held_bytes, kind_of, peaks_of
from optigpu.backends.torch.profile import Recording, TorchRuntime
from optigpu.documents.facts import WeightFacts
from optigpu.hardware.intensity import Kernel
from optigpu.models.loading.footprint import product_dtypes, weight_bytes
from optigpu.models.loading.load import count_weights
from optigpu.ops.four_bits.quantize import quantize_groups
from optigpu.ops.four_bits.scheme import Int4Scheme
from optigpu.ops.linear.int4_linear import int4_linear, int4_linear_backend, int4_rows, pack_int4
from optigpu.vocabulary import DeviceKind, OptiGPUError, SpecError
from optigpu.workloads.base import Check, Request

_LOADED = "The caller made the model."


class ModuleRuntime(TorchRuntime):
    """The weights of any module, and the memory and the profile of its device."""

    def __init__(self, module: Module, device: DeviceKind) -> None:
        self.place = TorchDevice(device, seed=0)
        super().__init__(self.place)
        self.module = module

    def weights(self) -> WeightFacts:
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
        if isinstance(inputs, Mapping):
            return self.module(**inputs)
        return self.module(*inputs) if isinstance(inputs, tuple) else self.module(inputs)

    def memory_bytes(self) -> tuple[int, int] | None:
        return held_bytes(self.device)

    def flops(self, inputs: object) -> int | None:
        """The operations of one call as torch counts them; None where it does not know a layer's operators."""
        if product_dtypes(self.module):
            return None
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            self.call(inputs)
        return counter.get_total_flops() or None


class TimedCalls(Request):
    """A Request that times `work` with what `prepare` makes; `check_output` looks at its result afterwards."""

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
        inputs, clock = self._prepare(), self._runtime.place.clock
        marks = [clock.mark()]
        output = self._work(inputs)
        marks.append(clock.mark())
        (seconds,) = clock.seconds(marks)
        if self._check_output:
            self._check_output(output)
        return {"latency_s": seconds}

    def check(self) -> Check:
        wrong = _not_finite(self._work(self._prepare()))
        problem = f"The model's output has {wrong} values that are NaN or infinite; check its weights."
        return Check(self.run()["latency_s"], problem if wrong else None)

    def observe(self) -> None:
        """Nothing is noted of a caller's module."""

    def fresh(self, seed: int) -> "TimedCalls":
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
    """Zero the gradients, forward, backward, update. A step raises OptiGPUError when its loss is NaN or infinite."""
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


Inputs = torch.Tensor | Mapping[str, torch.Tensor]
"""What a module is called with: one tensor, or keyword arguments as a tokenizer returns them."""
CASTS: dict[str, torch.dtype] = {"FP16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class PassesProfile:
    """Of passes without the profiler and as many with it; `peak_bytes`: the most on the GPU, None on a CPU."""

    device: DeviceKind
    dtype: str
    latencies_s: tuple[float, ...]
    kernels: tuple[Kernel, ...]
    weight_bytes: int
    peak_bytes: int | None


def profiled_passes(
    model: torch.nn.Module, inputs: Inputs, precision: str, warmup: int, passes: int
) -> PassesProfile:
    """Profiles a module where its weights are, without gradients and in evaluation mode, which it leaves as it was.

    With FP16 and BF16 a module of float32 weights runs under torch.autocast; every other runs as it is.
    """
    weights = [*model.parameters(), *model.buffers()]
    where = next(iter(weights)).device if weights else torch.device("cpu")
    place = TorchDevice(kind_of(where), seed=0)
    floating = [tensor for tensor in weights if tensor.is_floating_point()]
    dtype = floating[0].dtype if floating else torch.float32
    run = _pass(model, inputs, where, CASTS.get(precision) if dtype is torch.float32 else None)
    was_training = model.training
    latencies: list[float] = []
    recording = Recording(place.clock, place.device, steps=0)
    try:
        with torch.no_grad():
            model.eval()
            calls_s(run, warmup, place.clock)
            peaks = peaks_of(
                lambda: latencies.extend(calls_s(run, 1, place.clock) for _ in range(passes)), place.device
            )
            recording.start()
            for _ in range(passes):
                run()
            recording.stop()
    finally:
        model.train(was_training)
    return PassesProfile(
        device=place.device,
        dtype=str(dtype).removeprefix("torch."),
        latencies_s=tuple(latencies),
        kernels=tuple(recording.kernels()),
        weight_bytes=sum({tensor.data_ptr(): tensor.nbytes for tensor in weights}.values()),
        peak_bytes=peaks.allocated_bytes,
    )


def _pass(
    model: torch.nn.Module, inputs: Inputs, where: torch.device, cast: torch.dtype | None
) -> Callable[[], object]:
    inputs = (
        {name: tensor.to(where) for name, tensor in inputs.items()}
        if isinstance(inputs, Mapping)
        else inputs.to(where)
    )

    def run() -> object:
        with nullcontext() if cast is None else torch.autocast(where.type, dtype=cast):
            return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    return run


TURNS, CALLS = 7, 20
"""Works take turns; each figure is the median turn's, of so many calls."""


def int4_product_seconds(
    device: DeviceKind, rows: int, inputs: int, outputs: int, group_size: int
) -> tuple[float, float]:
    """Seconds of x [rows, inputs] times 4-bit weights [outputs, inputs] in bfloat16: fused, and widened before."""
    place = TorchDevice(device, seed=0)
    generator = torch.Generator().manual_seed(place.seed)
    drawn = [torch.randn(shape, generator=generator) for shape in ((rows, inputs), (outputs, inputs))]
    x, weight = (tensor.to(place.name, torch.bfloat16) for tensor in drawn)
    numbers = quantize_groups(weight, Int4Scheme(group_size, solver="min_max"))
    fused = pack_int4(numbers, int4_linear_backend(x.device, x.dtype))
    readable, every = pack_int4(numbers, "torch-dequantize"), torch.arange(outputs, device=x.device)
    works = (
        lambda: int4_linear(x, fused),
        lambda: torch.nn.functional.linear(x, int4_rows(readable, every).to(x.dtype)),
    )
    turns = [[calls_s(work, CALLS, place.clock) / CALLS for work in works] for _ in range(TURNS + 1)]
    first_left_out = torch.tensor(turns[1:], dtype=torch.float64)
    fused_s, widened_s = first_left_out.median(dim=0).values.tolist()
    return fused_s, widened_s
