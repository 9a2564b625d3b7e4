"""CompileOptimizer, KernelOptimizer and MemoryOptimizer: single techniques for modules and programs of the caller."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

from optigpu.documents.facts import ImageFacts
from optigpu.documents.fields import refusing
from optigpu.facade.benchmark_result import MEBIBYTE
from optigpu.facade.in_process import device_of
from optigpu.facade.measuring import AskedWorkload, JobReport, job_spec, printed
from optigpu.hardware import best_device, probe
from optigpu.hardware.cgroup import free_host_bytes
from optigpu.job.bench import SIZES, brief
from optigpu.meters.memory import ResidentPeak
from optigpu.models.described import known_facts
from optigpu.models.reference import parse_reference
from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.memory.autocast import Autocast
from optigpu.techniques.memory.inference_mode import InferenceMode
from optigpu.vocabulary import BenchMode, DeviceKind, SpecError, UnsupportedError
from optigpu.workloads.classify import Classify
from optigpu.workloads.generate import Generate

if TYPE_CHECKING:
    import torch

    Module = TypeVar("Module", bound=torch.nn.Module)


class CompileOptimizer:
    """What the technique `torch_compile` does, for any module."""

    @staticmethod
    def compile(model: "Module", mode: str = "default", *, backend: str = "inductor") -> "Module":
        """Has torch compile the module's forward pass at its first call, in place, and returns the module. A
        transformers model's `generate` runs the compiled pass too, compiled again for a few lengths of the cache; the
        technique, with its fixed cache, compiles once. `mode` is default, reduce-overhead, max-autotune or
        max-autotune-no-cudagraphs, `backend` inductor, aot_eager, eager or cudagraphs. Raises FieldsError, a SpecError,
        for an unknown mode or backend, and UnsupportedError where nothing can be compiled: TorchInductor needs a C++
        compiler on a CPU."""
        with refusing(TorchCompile):
            technique = TorchCompile.model_validate({"mode": mode, "backend": backend})
        weights = next(model.parameters(), None)
        from optigpu.backends.torch.device import kind_of

        device = kind_of(weights.device) if weights is not None else DeviceKind.CPU
        if problem := technique.check(probe(), device, None):
            raise UnsupportedError(problem)
        model.compile(mode=technique.mode if backend == "inductor" else None, backend=backend)
        return model

    @staticmethod
    def benchmark(
        model: str = "preset:gpt2",
        mode: str = "default",
        *,
        backend: str = "inductor",
        workload: AskedWorkload | None = None,
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Measures a model eager and compiled, side by side in processes of their own, and prints the table. `model` is
        a reference: without a `workload` a decoder generates text, an image classifier classifies. `fields` are the
        others of a job, as `optigpu.run` takes them. Raises what that raises."""
        images = isinstance(known_facts(parse_reference(model)), ImageFacts)
        usual = Classify() if images else Generate(prompt_tokens=32, new_tokens=32)
        compiled = {"name": "torch_compile", "mode": mode, "backend": backend}
        asked = {**brief(BenchMode.QUICK), **fields, "plan": "ladder"}
        return printed(job_spec(workload or usual, model, [compiled], asked), progress)


class KernelOptimizer:
    """Runs the workloads `normalization` and `attention` in processes of their own, and prints their tables. Both take
    the fields of a job as `optigpu.run` does (device, measure, limits, ...) and raise what it raises."""

    @staticmethod
    def benchmark_layernorm(
        *,
        widths: Sequence[int] = (768,),
        rows: int = 2048,
        dtype: str = "float32",
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Layer norm over `rows` rows of each width, after a residual and without: separate operators, and fused.

        >>> from optigpu import KernelOptimizer
        >>> short = {"replicates": 1, "min_seconds": 0.05, "max_seconds": 0.2, "meters": ["latency"]}
        >>> report = KernelOptimizer.benchmark_layernorm(widths=[64], device="cpu", measure=short)  # doctest: +ELLIPSIS
        normalization ...
        """
        shapes = {"norms": ["layer_norm"], "widths": widths, "rows": rows, "dtype": dtype}
        asked = {**brief(BenchMode.QUICK), **fields}
        return printed(job_spec({"kind": "normalization", **shapes}, None, (), asked), progress)

    @staticmethod
    def benchmark_attention(
        *,
        lengths: Sequence[int] | None = None,
        dtype: str = "float32",
        progress: bool | None = None,
        **fields: object,
    ) -> JobReport:
        """Causal attention over each length: scores, softmax and product one by one, and in one fused operator. Without
        `lengths` it takes those of `optigpu bench`."""
        device = device_of(str(fields.get("device", best_device())))
        usual = SIZES[device, BenchMode.QUICK].lengths
        workload = {"kind": "attention", "lengths": lengths or usual, "dtype": dtype}
        return printed(job_spec(workload, None, (), {**brief(BenchMode.QUICK), **fields}), progress)


AutocastDtype = Literal["auto", "none", "bfloat16", "float16"]


@dataclass(frozen=True)
class MemoryStats:
    """Bytes in use by this process: on the host, and on the GPU by torch's allocator (None where torch uses none)."""

    host_bytes: int
    host_free_bytes: int
    gpu_allocated_bytes: int | None = None
    gpu_reserved_bytes: int | None = None
    gpu_peak_bytes: int | None = None

    def __str__(self) -> str:
        host = f"host {_mb(self.host_bytes)}, {_mb(self.host_free_bytes)} free"
        if self.gpu_allocated_bytes is None or self.gpu_reserved_bytes is None or self.gpu_peak_bytes is None:
            return f"{host}; no GPU memory in use"
        return (
            f"{host}; GPU {_mb(self.gpu_allocated_bytes)} allocated, {_mb(self.gpu_reserved_bytes)} reserved, "
            f"{_mb(self.gpu_peak_bytes)} peak"
        )


class MemoryOptimizer:
    """What the memory techniques do, around the caller's own code.

    >>> import torch
    >>> from optigpu import MemoryOptimizer
    >>> MemoryOptimizer.print_stats("before")  # doctest: +ELLIPSIS
    before: host ... MB, ... MB free; ...
    >>> with MemoryOptimizer.optimized_inference(device="cpu"):
    ...     output = torch.nn.Linear(4, 2)(torch.zeros(1, 4))
    >>> output.requires_grad, output.is_inference()
    (False, True)
    """

    @staticmethod
    def stats() -> MemoryStats:
        """What this process uses now. Loads no torch: without it there is nothing on a GPU."""
        resident = ResidentPeak()
        resident.look()
        gpu: tuple[int, ...] = ()
        if "torch" in sys.modules:
            from torch import cuda

            if cuda.is_available():
                gpu = cuda.memory_allocated(), cuda.memory_reserved(), cuda.max_memory_allocated()
        return MemoryStats(resident.peak_bytes, free_host_bytes(), *gpu)

    @staticmethod
    def print_stats(label: str = "memory") -> None:
        print(f"{label}: {MemoryOptimizer.stats()}")

    @staticmethod
    @contextmanager
    def optimized_inference(*, device: str | None = None, autocast: AutocastDtype = "auto") -> Iterator[None]:
        """Runs what is in the block without gradients, as the techniques `inference_mode` and `autocast` do. "auto" is
        float16 on a GPU and none on a CPU, where converting weights costs more than it saves. With autocast the block
        runs under torch.no_grad: in inference mode torch would convert the weights again for each product. It keeps the
        conversions of weights that require gradients until the block ends. What inference mode makes can never be used
        in training. Raises SpecError for another dtype or device, UnsupportedError for float16 on a CPU."""
        if autocast not in get_args(AutocastDtype):
            raise SpecError(
                f"There is no autocast to {autocast!r}; choose one of {', '.join(get_args(AutocastDtype))}."
            )
        kind = best_device() if device is None else device_of(device)
        technique: Technique = InferenceMode()
        if autocast == "auto" and kind is not DeviceKind.CPU:
            technique = Autocast(dtype="float16")
        elif autocast not in ("auto", "none"):
            technique = Autocast(dtype=autocast)
        if problem := technique.check(probe(), kind, None):
            raise UnsupportedError(problem)
        from optigpu.backends.torch import mode_options
        from optigpu.backends.torch.attention import mode_of

        with mode_of(mode_options((technique,)), kind)():
            yield


def _mb(count: int) -> str:
    return f"{count / MEBIBYTE:,.0f} MB"
