"""A kernel of a profile under the roofline: its bandwidth, its intensity, what bounds it, and how near it comes."""

import re
from collections.abc import Sequence
from typing import Literal

from optigpu.documents.peaks import Peaks
from optigpu.documents.roofline import Bound
from optigpu.hardware.catalog import Device
from optigpu.hardware.intensity import Kernel
from optigpu.vocabulary import Frozen

Precision = Literal["FP32", "FP16", "BF16", "INT8", "INT4"]

MEASURED_NAMES: dict[Precision, str] = {
    "FP32": "float32",
    "FP16": "float16",
    "BF16": "bfloat16",
    "INT8": "int8",
    "INT4": "int8",
}
"""The measured matrix product that a precision is held against; torch multiplies no 4-bit numbers."""
PUBLISHED_NAMES: dict[Precision, Literal["fp32", "fp16", "bf16", "int8", "int4"]] = {
    "FP32": "fp32",
    "FP16": "fp16",
    "BF16": "bf16",
    "INT8": "int8",
    "INT4": "int4",
}

_LOOKUP = re.compile(r"index|gather|embedding", re.IGNORECASE)
"""Kernels that read a few rows of a table, of which the profiler knows the whole size."""


class KernelFigure(Frozen):
    """A kernel's calls and seconds in one pass, on average, and its share of all kernels' seconds.

    `read_bytes` are those of its inputs in one pass and `flops` its operations; None where the profiler does not tell
    them for each of its calls. What it writes is not counted, so that its bandwidth is a lower bound.
    """

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
    """A kernel under the roofs: what bounds it where it ran, and the share of that roof that it reached.

    `card_bound` and `card_least_s` are for the GPU that was asked for; unless it ran there, the seconds are a
    prediction. A share above 1 comes from a cache, which is faster than memory.
    """

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
    dtype = MEASURED_NAMES[precision]
    rate = peaks.matmul_flops_per_s.get(dtype)
    if rate is None:
        return None
    source = f"measured {peaks.measured_at:%Y-%m-%d} by torch {peaks.torch}, {peaks.threads} threads"
    reads = peaks.reads[-1].bytes_per_s
    return Roofs(
        device=device, basis="measured", source=source, bytes_per_s=reads, flop_per_s=rate, dtype=dtype
    )


def published_roofs(card: Device, precision: Precision) -> Roofs | None:
    """None where the catalog lacks a figure."""
    dtype = PUBLISHED_NAMES[precision]
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
    return tuple(
        KernelRoof(
            figure=figure,
            bound=here.bound(figure) if here else None,
            roof_share=_ratio(here.least_s(figure) if here else None, figure.seconds),
            card_bound=card.bound(figure) if card else None,
            card_least_s=card.least_s(figure) if card else None,
        )
        for figure in figures
    )


def _sum(numbers: Sequence[int | None], passes: int) -> float | None:
    known = [number for number in numbers if number is not None]
    return sum(known) / passes if known and len(known) == len(numbers) else None


def _ratio(least_s: float | None, seconds: float) -> float | None:
    return least_s / seconds if least_s is not None and seconds else None
