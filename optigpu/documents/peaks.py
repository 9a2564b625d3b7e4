"""The measured peak rates of a machine."""

from typing import Literal

from pydantic import AwareDatetime, Field, PositiveFloat, PositiveInt

from optigpu.vocabulary import DeviceKind, Frozen


class ReadRate(Frozen):
    """The rate at which an array of that size is read repeatedly: from a cache if it fits into one."""

    array_bytes: PositiveInt
    bytes_per_s: PositiveFloat


class Peaks(Frozen):
    """Measured peak rates of the machine: medians of repetitions.

    `reads` have rising sizes, the last far larger than any cache. `copy_bytes_per_s` counts what is read and what is
    written. `matmul_flops_per_s` holds the rate of square matrix products by the dtype of their operands (of integers:
    operations), and `reasons` why a dtype has none.
    """

    kind: Literal["peaks"] = "peaks"
    device: DeviceKind
    threads: int
    measured_at: AwareDatetime
    torch: str
    reads: tuple[ReadRate, ...] = Field(min_length=1)
    copy_bytes_per_s: PositiveFloat
    matmul_flops_per_s: dict[str, PositiveFloat]
    reasons: dict[str, str] = Field(default_factory=dict)
