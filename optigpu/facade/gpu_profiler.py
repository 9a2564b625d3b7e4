"""GPUProfiler: the kernels of a forward pass, their bandwidth, and what bounds them by the roofline."""

import re
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Literal, get_args

from optigpu.conductor.preparation import MachinePeaks
from optigpu.conductor.progress import JobProgress
from optigpu.documents.fields import closest, did_you_mean
from optigpu.documents.peaks import Bound, Peaks
from optigpu.facade.benchmark_result import Shown
from optigpu.hardware import probe
from optigpu.hardware.catalog import Device, Dtype, find, gpu_of
from optigpu.hardware.intensity import Kernel
from optigpu.report.formats import MISSING, Grid, columns, short
from optigpu.vocabulary import DeviceKind, Frozen, SpecError

if TYPE_CHECKING:
    import torch


Precision = Literal["FP32", "FP16", "BF16", "INT8", "INT4"]

DTYPES: dict[Precision, tuple[str, Dtype]] = {
    "FP32": ("float32", "fp32"),
    "FP16": ("float16", "fp16"),
    "BF16": ("bfloat16", "bf16"),
    "INT8": ("int8", "int8"),
    "INT4": ("int8", "int4"),
}
"""The measured matrix product that a precision is held against (torch multiplies no 4-bit numbers), and the catalog's
rate."""

_LOOKUP = re.compile(r"index|gather|embedding", re.IGNORECASE)
"""Kernels that read a few rows of a table, of which the profiler knows the whole size."""


class KernelFigure(Frozen):
    """A kernel's calls and seconds in one pass, on average, and its share of all kernels' seconds. `read_bytes` are
    those of its inputs in one pass and `flops` its operations; None where the profiler does not tell them for each of
    its calls. What it writes is not counted, so that its bandwidth is a lower bound."""

    name: str
    calls: float
    seconds: float
    share: float
    read_bytes: float | None
    flops: float | None
    bound: Bound | None

    @property
    def read_bytes_per_s(self) -> float | None:
        return None if self.read_bytes is None or not self.seconds else self.read_bytes / self.seconds

    @property
    def flop_per_byte(self) -> float | None:
        """Its arithmetic intensity; zero for a kernel of which no operations are known."""
        return (self.flops or 0.0) / self.read_bytes if self.read_bytes else None


class Roofs(Frozen):
    """The peak rates of a device: `measured` on it, or `published` for it."""

    device: str
    basis: Literal["measured", "published"]
    source: str
    bytes_per_s: float
    flop_per_s: float
    dtype: str

    @property
    def ridge(self) -> float:
        """FLOP per byte: below it memory bounds a kernel, above it arithmetic."""
        return self.flop_per_s / self.bytes_per_s

    def least_s(self, figure: KernelFigure) -> float | None:
        """The seconds that the roofs allow a kernel at best; None where its bytes are unknown."""
        if figure.read_bytes is None:
            return None
        return max(figure.read_bytes / self.bytes_per_s, (figure.flops or 0.0) / self.flop_per_s)

    def bound(self, figure: KernelFigure) -> Bound | None:
        if figure.flop_per_byte is None:
            return None
        return Bound.COMPUTE if figure.flop_per_byte > self.ridge else Bound.MEMORY


class KernelRoof(Frozen):
    """A kernel under the roofs: what bounds it where it ran, and the share of that roof that it reached. `card_bound`
    and `card_least_s` are for the GPU that was asked for; unless it ran there, the seconds are a prediction. A share
    above 1 comes from a cache, which is faster than memory."""

    figure: KernelFigure
    bound: Bound | None
    roof_share: float | None
    card_bound: Bound | None
    card_least_s: float | None


def kernel_figures(kernels: Sequence[Kernel], passes: int) -> tuple[KernelFigure, ...]:
    """Kernels of one name and bound together, those that take the most time first."""
    groups: dict[tuple[str, Bound | None], list[Kernel]] = {}
    for kernel in kernels:
        groups.setdefault((kernel.name, kernel.bound), []).append(kernel)
    total = sum(kernel.seconds for kernel in kernels)
    found = [
        KernelFigure(
            name=name,
            calls=len(group) / passes,
            seconds=sum(kernel.seconds for kernel in group) / passes,
            share=sum(kernel.seconds for kernel in group) / total if total else 0.0,
            read_bytes=None if _LOOKUP.search(name) else _sum([each.read_bytes for each in group], passes),
            flops=_sum([kernel.flops for kernel in group], passes),
            bound=bound,
        )
        for (name, bound), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda figure: -figure.seconds))


def measured_roofs(peaks: Peaks, precision: Precision, device: str) -> Roofs | None:
    """None where products of that precision could not be measured."""
    dtype, _ = DTYPES[precision]
    rate = peaks.matmul_flops_per_s.get(dtype)
    if rate is None:
        return None
    return Roofs(
        device=device,
        basis="measured",
        source=f"measured {peaks.measured_at:%Y-%m-%d} by torch {peaks.torch}, {peaks.threads} threads",
        bytes_per_s=peaks.reads[-1].bytes_per_s,
        flop_per_s=rate,
        dtype=dtype,
    )


def published_roofs(card: Device, precision: Precision) -> Roofs | None:
    """None where the catalog lacks a figure."""
    _, dtype = DTYPES[precision]
    rate, bandwidth = card.peak_flop_per_s.get(dtype), card.memory_bandwidth_bytes_per_s
    if rate is None or bandwidth is None:
        return None
    return Roofs(
        device=card.name,
        basis="published",
        source=card.source,
        bytes_per_s=bandwidth,
        flop_per_s=rate,
        dtype=dtype,
    )


def kernel_roofs(
    figures: Sequence[KernelFigure], here: Roofs | None, card: Roofs | None
) -> tuple[KernelRoof, ...]:
    """Each kernel under the roofs of where it ran and of the card; None where these are unknown."""
    found = []
    for figure in figures:
        least_s = here.least_s(figure) if here else None
        found.append(
            KernelRoof(
                figure=figure,
                bound=here.bound(figure) if here else None,
                roof_share=least_s / figure.seconds if least_s is not None and figure.seconds else None,
                card_bound=card.bound(figure) if card else None,
                card_least_s=card.least_s(figure) if card else None,
            )
        )
    return tuple(found)


def _sum(numbers: Sequence[int | None], passes: int) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / passes if known and len(known) == len(numbers) else None


WARMUP, PASSES = 2, 5
"""Passes before what is measured, and passes that are measured: with the profiler and without it."""
ROWS = 15
"""Kernels in a summary."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class ForwardProfile(Frozen):
    """One profiled module: the median of passes without the profiler, and the kernels of the average pass. `dtype` is
    that of the weights; `peak_bytes` is None on a CPU."""

    precision: Precision
    dtype: str
    device: DeviceKind
    ran_on: str
    threads: int
    latency_s: float
    kernels: tuple[KernelFigure, ...]
    weight_bytes: int
    peak_bytes: int | None


class RooflineAnalysis(Frozen):
    """A profile under the roofs of the device where it ran (`here`) and of the GPU that was asked for (`card`). The
    shares are of the kernels' time, by the ridge of `here`; what is neither could not be told. `card_least_s` is the
    time that the card's roofs allow the kernels whose bytes are known, and `predicted` says that it was not measured
    there."""

    profile: ForwardProfile
    here: Roofs | None
    card: Roofs | None
    kernels: tuple[KernelRoof, ...]
    memory_bound_share: float
    compute_bound_share: float
    card_least_s: float | None
    predicted: bool


class GPUProfiler(Shown):
    """Profiles forward passes where the model is, and holds them against the roofs of a GPU.

    `gpu_model` is a GPU of the catalog, in any spelling. Where this machine has that GPU its roofs are measured;
    elsewhere they are the published ones, marked as such, and times on it are predictions. The roofs of the device that
    the model runs on are measured in ten seconds by a process of its own and kept for a day; `peaks` takes known ones.

    Raises SpecError for an unknown GPU, with those that the catalog has.

    >>> import torch
    >>> from optigpu import GPUProfiler
    >>> profiler = GPUProfiler(gpu_model="A100")
    >>> model, input_tensor = torch.nn.Linear(64, 8), torch.ones(2, 64)
    >>> result = profiler.profile_model_forward(model, input_tensor, "FP32")
    >>> result.kernels[0].name
    'aten::addmm'
    """

    def __init__(self, gpu_model: str = "A100", peaks: Peaks | None = None) -> None:
        self.card = gpu_of(gpu_model)
        self.profiles: list[ForwardProfile] = []
        self._peaks: dict[tuple[DeviceKind, int], Peaks | None] = {}
        if peaks is not None:
            self._peaks[peaks.device, peaks.threads] = peaks

    def profile_model_forward(
        self,
        model: "torch.nn.Module",
        input_tensor: "torch.Tensor | Mapping[str, torch.Tensor]",
        precision: str = "FP32",
    ) -> ForwardProfile:
        """Profiles `model(input_tensor)`, or `model(**inputs)`, on the device of the model's weights. FP16 and BF16 run
        a model of float32 weights under torch.autocast; otherwise `precision` says what the model was made for (FP32,
        FP16, BF16, INT8, INT4) and which peak it is held against. Raises SpecError for another one."""
        import torch

        from optigpu.backends.torch.own_module import profiled_passes

        known = next((each for each in PRECISIONS if each == precision.upper().partition("-")[0]), None)
        if known is None:
            meant = did_you_mean(closest(precision.upper(), PRECISIONS))
            raise SpecError(
                f"precision: {precision!r} is unknown.{meant} The precisions are {', '.join(PRECISIONS)}."
            )
        found = profiled_passes(model, input_tensor, known, WARMUP, PASSES)
        environment = probe()
        gpus = environment.accelerators
        profile = ForwardProfile(
            precision=known,
            dtype=found.dtype,
            device=found.device,
            ran_on=gpus[0].name if gpus and found.device is DeviceKind.CUDA else environment.cpu_model,
            threads=torch.get_num_threads(),
            latency_s=median(found.latencies_s),
            kernels=kernel_figures(found.kernels, PASSES),
            weight_bytes=found.weight_bytes,
            peak_bytes=found.peak_bytes,
        )
        self.profiles.append(profile)
        return profile

    def roofline_analysis(self, profile: ForwardProfile | None = None) -> RooflineAnalysis:
        """The last profile, or the given one, under the roofs. Raises SpecError before there is one."""
        if profile is None and not self.profiles:
            raise SpecError("Nothing is profiled yet; call profile_model_forward first.")
        chosen = profile or self.profiles[-1]
        key = chosen.device, chosen.threads
        if key not in self._peaks:
            progress = JobProgress(lambda _: None, lambda: None, (), 1)
            self._peaks[key] = MachinePeaks(probe(), *key, progress).known
        peaks = self._peaks[key]
        here = measured_roofs(peaks, chosen.precision, chosen.ran_on) if peaks else None
        is_card = find(chosen.ran_on) == self.card
        card = here if is_card and here else published_roofs(self.card, chosen.precision)
        kernels = kernel_roofs(chosen.kernels, here, card)
        least = [kernel.card_least_s for kernel in kernels if kernel.card_least_s is not None]
        shares = {
            bound: sum(kernel.figure.share for kernel in kernels if kernel.bound is bound) for bound in Bound
        }
        return RooflineAnalysis(
            profile=chosen,
            here=here,
            card=card,
            kernels=kernels,
            memory_bound_share=shares[Bound.MEMORY],
            compute_bound_share=shares[Bound.COMPUTE],
            card_least_s=sum(least) if least else None,
            predicted=not is_card,
        )

    def print_summary(self) -> None:
        print(self)

    def grids(self) -> Sequence[Grid]:
        return (_grid(self.roofline_analysis()),)


def _grid(found: RooflineAnalysis) -> Grid:
    figures = ("calls:", "ms:", "share:", "GB/s read:", "FLOP/byte:")
    headings = columns("kernel", *figures, "bound", "of its roof:", "on the card")
    rows = tuple(_row(kernel) for kernel in found.kernels[:ROWS])
    profile = found.profile
    notes = [f"{short(1e3 * profile.latency_s)} ms a pass without the profiler, on {profile.ran_on}."]
    notes += [
        f"{roofs.device}, {roofs.basis}: {short(roofs.bytes_per_s / 1e9)} GB/s, {short(roofs.flop_per_s / 1e12)} "
        f"TFLOP/s in {roofs.dtype}, ridge {short(roofs.ridge)} FLOP/byte ({roofs.source})."
        for roofs in (found.here, found.card)
        if roofs
    ]
    notes.append("GB/s: bytes of a kernel's inputs by its time; what it writes is not counted.")
    if found.card_least_s is not None and found.predicted and found.card:
        least_ms = short(1e3 * found.card_least_s)
        notes.append(f"Prediction: {found.card.device} takes at least {least_ms} ms for these kernels.")
    return Grid(f"{profile.precision} forward pass, {profile.dtype} weights", headings, rows, tuple(notes))


def _row(kernel: KernelRoof) -> tuple[str, ...]:
    figure = kernel.figure
    bandwidth = figure.read_bytes_per_s
    return (
        figure.name,
        short(figure.calls),
        short(1e3 * figure.seconds),
        f"{figure.share:.1%}",
        short(None if bandwidth is None else bandwidth / 1e9),
        short(figure.flop_per_byte),
        kernel.bound.value if kernel.bound else MISSING,
        MISSING if kernel.roof_share is None else f"{kernel.roof_share:.0%}",
        kernel.card_bound.value if kernel.card_bound else MISSING,
    )
