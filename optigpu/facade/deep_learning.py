"""DeepLearningBenchmark: any module of the caller, timed in the caller's own process."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from optigpu.facade.benchmark_result import MEBIBYTE, BenchmarkResult, Shown, frame
from optigpu.facade.in_process import device_of, timed
from optigpu.report.formats import MISSING, Grid, columns, short
from optigpu.statistics.intervals import ratio
from optigpu.vocabulary import OptiGPUError, SpecError
from optigpu.workloads.base import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from pandas import DataFrame

    Inputs = torch.Tensor | Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
    Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

ORDER = (
    "Measured one after the other; `optigpu.ladder` lets variants take turns, which a drifting machine needs."
)


class DeepLearningBenchmark(Shown):
    """Times modules one after the other on one device, and compares them with the first.

    >>> import torch
    >>> from optigpu import DeepLearningBenchmark
    >>> bench = DeepLearningBenchmark(device="cpu")
    >>> model = torch.nn.Linear(64, 10)
    >>> result = bench.benchmark_inference(
    ...     "linear", model, lambda: torch.randn(8, 64), n_warmup=2, n_runs=20, batch_size=8, show=False
    ... )
    >>> result.params_total, result.flops_total, result.vram_peak_mb is None
    (650, 10240, True)
    """

    def __init__(self, device: str = "cuda") -> None:
        """`device` is a kind of device, such as "cuda" or "cpu". Raises SpecError for any other; a GPU that is missing
        shows at the first run."""
        self.device = device_of(device)
        self.results: list[BenchmarkResult] = []
        self.training_results: list[BenchmarkResult] = []

    def benchmark_inference(
        self,
        name: str,
        model: "torch.nn.Module",
        input_fn: "Callable[[], Inputs]",
        n_warmup: int = 10,
        n_runs: int = 130,
        batch_size: int = 1,
        *,
        energy: bool = False,
        show: bool = True,
    ) -> BenchmarkResult:
        """Times `n_runs` forward passes, in evaluation mode and without gradients, after `n_warmup` that are not timed.
        `input_fn` makes the inputs of each run, a tensor, a tuple of positional or a mapping of keyword arguments; that
        is not timed. A 95th percentile takes 130 runs, a 99th 662. Memory is read in one run more, energy (with
        `energy`) in runs of a quarter of a minute. Raises UnsupportedError where the device is missing, OptiGPUError
        for outputs that are NaN or infinite."""
        import torch

        from optigpu.backends.torch.own_module import ModuleRuntime, forward_passes

        if n_runs < 1 or n_warmup < 0 or batch_size < 1:
            raise SpecError("n_runs and batch_size must be at least 1.")
        runtime = ModuleRuntime(model, self.device)
        model.to(runtime.place.name).eval()
        request = forward_passes(runtime, input_fn)
        with torch.no_grad():
            if problem := request.check().problem:
                raise OptiGPUError(problem)
            for _ in range(n_warmup):
                request.run()
            held = runtime.memory_bytes()
            found = timed(runtime, request, Workload(kind="inference"), least=n_runs, energy=energy)
        result = replace(
            _result(model, found.benchmark(name, "items"), held, batch_size),
            flops_total=runtime.flops(runtime.moved(input_fn())),
        )
        return _kept(result, self.results, show)

    def benchmark_training_step(
        self,
        name: str,
        model: "torch.nn.Module",
        optimizer: "torch.optim.Optimizer",
        loss_fn: "Loss",
        input_fn: "Callable[[], tuple[Inputs, torch.Tensor]]",
        n_steps: int = 50,
        *,
        n_warmup: int = 5,
        energy: bool = False,
        show: bool = True,
    ) -> BenchmarkResult:
        """Times `n_steps` steps in training mode, the first `n_warmup` of them not counted: forward, backward, update.
        `input_fn` gives inputs and labels. The model is trained by all steps, and by one more for memory. Raises
        OptiGPUError when the loss becomes NaN or infinite, SpecError for too few steps."""
        from optigpu.backends.torch.own_module import ModuleRuntime, training_steps

        if not n_steps > n_warmup >= 0:
            raise SpecError(f"n_steps must be more than the {n_warmup} steps of n_warmup.")
        runtime = ModuleRuntime(model, self.device)
        model.to(runtime.place.name).train()
        steps = training_steps(runtime, optimizer, loss_fn, input_fn)
        for _ in range(n_warmup):
            steps.run()
        held = runtime.memory_bytes()
        found = timed(runtime, steps, Workload(kind="training"), least=n_steps - n_warmup, energy=energy)
        return _kept(_result(model, found.benchmark(name, "steps"), held, 1), self.training_results, show)

    def compare_results(self) -> None:
        """Prints all results, each beside the first. Raises SpecError where there is none."""
        if not (self.results or self.training_results):
            raise SpecError("There are no results to compare; call benchmark_inference() first.")
        print(self)

    def grids(self) -> Sequence[Grid]:
        tables = (("Inference", self.results), ("Training steps", self.training_results))
        return tuple(_grid(title, results) for title, results in tables if results)

    def to_frame(self) -> "DataFrame":
        """A row for each result. Raises UnsupportedError where pandas is not installed."""
        return frame([each.record() for each in (*self.results, *self.training_results)])


def _result(
    model: "torch.nn.Module", found: BenchmarkResult, held: tuple[int, int] | None, batch_size: int
) -> BenchmarkResult:
    """`held` are the allocated and the reserved bytes of the GPU before the run."""
    allocated, reserved = (each / MEBIBYTE for each in held) if held else (None, None)
    mean_ms = found.latency_ms_mean
    return replace(
        found,
        vram_allocated_mb=allocated,
        vram_reserved_mb=reserved,
        throughput_per_sec=1e3 * batch_size / mean_ms if mean_ms else None,
        params_trainable=sum(each.numel() for each in model.parameters() if each.requires_grad),
    )


def _kept(result: BenchmarkResult, results: list[BenchmarkResult], show: bool) -> BenchmarkResult:
    results.append(result)
    if show:
        result.print_summary()
    return result


def _grid(title: str, results: Sequence[BenchmarkResult]) -> Grid:
    first = results[0]
    rate = f"{first.throughput_of}/s:"
    rows = []
    for each in results:
        rates = each.latency_ms_mean, each.latency_ms_p95, each.throughput_per_sec
        figures = (*rates, each.vram_peak_mb, each.model_size_mb)
        rows.append((each.name, *map(short, figures), _speedup(first, each)))
    return Grid(
        title=title,
        columns=columns(
            "config", "latency (ms):", "p95 (ms):", rate, "VRAM peak (MB):", "size (MB):", "speedup:"
        ),
        rows=tuple(rows),
        notes=(f"Speedup over {first.name}, by the medians, with its 95% interval. {ORDER}",),
    )


def _speedup(first: BenchmarkResult, each: BenchmarkResult) -> str:
    if each is first or not (first.latencies_s and each.latencies_s):
        return MISSING
    found, interval = ratio((first.latencies_s,), (each.latencies_s,))
    return f"{found:.2f}x" + (f" [{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "")
