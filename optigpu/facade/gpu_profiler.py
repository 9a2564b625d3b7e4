"""GPUProfiler: the kernels of a forward pass, their bandwidth, and what bounds them by the roofline."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, get_args

from optigpu.conductor.peak_cache import MachinePeaks
from optigpu.conductor.progress import JobProgress
from optigpu.documents.names import closest, did_you_mean
from optigpu.documents.peaks import Peaks
from optigpu.documents.roofline import Bound
from optigpu.facade.kernel_figures import (
    KernelFigure,
    KernelRoof,
    Precision,
    Roofs,
    kernel_figures,
    kernel_roofs,
    measured_roofs,
    published_roofs,
)
from optigpu.facade.shown import Shown
from optigpu.hardware import probe
from optigpu.hardware.catalog import find, gpu_of
from optigpu.report.formats import Column, Grid
from optigpu.report.numbers import MISSING, short
from optigpu.vocabulary import DeviceKind, Frozen, SpecError

if TYPE_CHECKING:
    import torch

WARMUP, PASSES = 2, 5
"""Passes before what is measured, and passes that are measured: with the profiler and without it."""
ROWS = 15
"""Kernels in a summary."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


class ForwardProfile(Frozen):
    """One profiled module. `latency_s` is the median of passes without the profiler, `kernels` are the average pass's.

    `ran_on` is the device's name and `threads` torch's; `dtype` is that of the weights. `peak_bytes` is None on a CPU.
    """

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
    """A profile under the roofs of the device where it ran (`here`) and of the GPU that was asked for (`card`).

    The shares are of the kernels' time, by the ridge of `here`; what is neither could not be told. `card_least_s` is
    the time that the card's roofs allow the kernels whose bytes are known, and `predicted` says that it was not
    measured there.
    """

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
        """Profiles `model(input_tensor)`, or `model(**inputs)`, on the device of the model's weights.

        FP16 and BF16 run a model of float32 weights under torch.autocast; otherwise `precision` says what the model was
        made for (FP32, FP16, BF16, INT8, INT4) and which peak it is held against. Raises SpecError for another one.
        """
        import torch

        from optigpu.backends.torch.profile import profiled_passes

        known = _precision(precision)
        found = profiled_passes(model, input_tensor, known, WARMUP, PASSES)
        profile = ForwardProfile(
            precision=known,
            dtype=found.dtype,
            device=found.device,
            ran_on=_name_of(found.device),
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
        peaks = self._measured(chosen)
        here = measured_roofs(peaks, chosen.precision, chosen.ran_on) if peaks else None
        is_card = find(chosen.ran_on) == self.card
        card = here if is_card and here else published_roofs(self.card, chosen.precision)
        kernels = kernel_roofs(chosen.kernels, here, card)
        least = [kernel.card_least_s for kernel in kernels if kernel.card_least_s is not None]
        return RooflineAnalysis(
            profile=chosen,
            here=here,
            card=card,
            kernels=kernels,
            memory_bound_share=_share(kernels, Bound.MEMORY),
            compute_bound_share=_share(kernels, Bound.COMPUTE),
            card_least_s=sum(least) if least else None,
            predicted=not is_card,
        )

    def print_summary(self) -> None:
        """Prints the table of the last profile's kernels with both roofs."""
        print(self)

    def grids(self) -> Sequence[Grid]:
        """The table of the last profile."""
        return (_grid(self.roofline_analysis()),)

    def _measured(self, profile: ForwardProfile) -> Peaks | None:
        key = profile.device, profile.threads
        if key not in self._peaks:
            progress = JobProgress(lambda _: None, lambda: None, (), 1)
            self._peaks[key] = MachinePeaks(probe(), *key, progress).known
        return self._peaks[key]


def _precision(name: str) -> Precision:
    found = next((each for each in PRECISIONS if each == name.upper().partition("-")[0]), None)
    if found is None:
        meant = did_you_mean(closest(name.upper(), PRECISIONS))
        raise SpecError(f"precision: {name!r} is unknown.{meant} The precisions are {', '.join(PRECISIONS)}.")
    return found


def _name_of(device: DeviceKind) -> str:
    environment = probe()
    if device is DeviceKind.CUDA and environment.accelerators:
        return environment.accelerators[0].name
    return environment.cpu_model


def _share(kernels: Sequence[KernelRoof], bound: Bound) -> float:
    return sum(kernel.figure.share for kernel in kernels if kernel.bound is bound)


def _grid(found: RooflineAnalysis) -> Grid:
    headings = (
        "kernel",
        "calls",
        "ms",
        "share",
        "GB/s read",
        "FLOP/byte",
        "bound",
        "of its roof",
        "on the card",
    )
    rows = tuple(_row(kernel) for kernel in found.kernels[:ROWS])
    profile = found.profile
    notes = [
        f"{short(1e3 * profile.latency_s)} ms a pass without the profiler, on {profile.ran_on}.",
        *(_said(roofs) for roofs in (found.here, found.card) if roofs),
        "GB/s: bytes of a kernel's inputs by its time; what it writes is not counted.",
    ]
    if found.card_least_s is not None and found.predicted and found.card:
        least_ms = short(1e3 * found.card_least_s)
        notes.append(f"Prediction: {found.card.device} takes at least {least_ms} ms for these kernels.")
    columns = tuple(
        Column(heading, right=heading not in ("kernel", "bound", "on the card")) for heading in headings
    )
    return Grid(f"{profile.precision} forward pass, {profile.dtype} weights", columns, rows, tuple(notes))


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


def _said(roofs: Roofs) -> str:
    return (
        f"{roofs.device}, {roofs.basis}: {short(roofs.bytes_per_s / 1e9)} GB/s, {short(roofs.flop_per_s / 1e12)} "
        f"TFLOP/s in {roofs.dtype}, ridge {short(roofs.ridge)} FLOP/byte ({roofs.source})."
    )
