"""The measured peak rates of a machine, and a variant's time against them; `optigpu.roofline` computes it."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Literal, Self

from pydantic import AwareDatetime, Field, PositiveFloat, PositiveInt

from optigpu.vocabulary import DeviceKind, Frozen


class ReadRate(Frozen):
    """The rate at which an array of that size is read (or copied) repeatedly: from a cache if it fits into one."""

    array_bytes: PositiveInt
    bytes_per_s: PositiveFloat


class Peaks(Frozen):
    """Measured peak rates of the machine: the best of repetitions and ways. `reads` have rising sizes, the last far
    larger than any cache. `copies` count what is read and written; `copy_bytes_per_s` is that of the largest.
    `matmul_flops_per_s` holds the rate of products by the dtype of their operands, `ways` how the best rate of each was
    reached, and `reasons` why a dtype has none."""

    kind: Literal["peaks"] = "peaks"
    device: DeviceKind
    threads: int
    measured_at: AwareDatetime
    torch: str
    reads: tuple[ReadRate, ...] = Field(min_length=1)
    copies: tuple[ReadRate, ...] = ()
    copy_bytes_per_s: PositiveFloat
    matmul_flops_per_s: dict[str, PositiveFloat]
    ways: dict[str, str] = Field(default_factory=dict)
    reasons: dict[str, str] = Field(default_factory=dict)

    def with_better(self, later: Self) -> Self:
        """The better of each rate of these peaks and of those that were measured `later` on the same machine."""
        mine, its = self.matmul_flops_per_s, later.matmul_flops_per_s
        kept = {name for name, rate in mine.items() if rate > its.get(name, 0.0)}
        return later.model_copy(
            update={
                "reads": _better(self.reads, later.reads),
                "copies": _better(self.copies, later.copies),
                "copy_bytes_per_s": max(self.copy_bytes_per_s, later.copy_bytes_per_s),
                "matmul_flops_per_s": its | {name: mine[name] for name in kept},
                "ways": later.ways | {name: way for name, way in self.ways.items() if name in kept},
                "reasons": {name: why for name, why in later.reasons.items() if name not in kept},
            }
        )


def _better(some: Sequence[ReadRate], others: Sequence[ReadRate]) -> tuple[ReadRate, ...]:
    best: dict[int, float] = {}
    for rate in (*some, *others):
        best[rate.array_bytes] = max(rate.bytes_per_s, best.get(rate.array_bytes, 0.0))
    return tuple(ReadRate(array_bytes=size, bytes_per_s=best[size]) for size in sorted(best))


class Bound(StrEnum):
    """The limit of a variant by its roofline: memory bandwidth, arithmetic, or the host that launches the work."""

    MEMORY = "memory"
    COMPUTE = "compute"
    LAUNCH = "launch"


class Roof(Frozen):
    """The limits of a step. `array_bytes` is the size of the array whose read rate it is; null for a published one."""

    source: str
    bytes_per_s: float
    flops_per_s: float
    array_bytes: int | None = None


class RooflineStep(Frozen):
    """A step of work under the measured `roof`, which allows it in `attainable_s` at best; the catalog's roof of the
    whole device allows it in `published_s`. `flops_per_byte` is its arithmetic intensity."""

    name: str
    bytes: float
    flops: float
    flops_per_byte: float
    roof: Roof
    attainable_s: float
    published_s: float | None
    measured_s: float | None
    bound: Bound | None


class RooflineFacts(Frozen):
    """How far a variant is from the roofs of its machine. `step` is what the primary metric counts, in `dtype`;
    `prefill` the prompt's pass. `published` is the catalog's roof of the whole device. Where `step` is null, `reason`
    says why."""

    dtype: str | None = None
    step: RooflineStep | None = None
    prefill: RooflineStep | None = None
    published: Roof | None = None
    peaks: Peaks | None = None
    notes: tuple[str, ...] = ()
    reason: str | None = None
