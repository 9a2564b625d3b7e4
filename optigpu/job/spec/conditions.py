"""The conditions of a job: how it is measured, on which worker, and within which limits. They are part of no digest."""

from datetime import UTC, datetime
from typing import Annotated, Self

from pydantic import AfterValidator, AwareDatetime, Field, model_validator

from optigpu.job.spec.stack import MeterName
from optigpu.meters.base import QualityOptions
from optigpu.vocabulary import Frozen

Seconds = Annotated[float, Field(gt=0, le=86400)]


def _in_utc(moment: datetime) -> datetime:
    try:
        return moment.astimezone(UTC)
    except OverflowError:
        raise ValueError(
            "this time is before the first year or after the last one that can be kept"
        ) from None


Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""A time with its zone, kept in UTC."""


class Measure(Frozen):
    """How to measure. It is part of no digest: it changes the precision of a figure, not the measured thing.

    `rel_ci` is the width of the median's 95% interval, relative to it, at which sampling may stop.
    """

    replicates: int = Field(3, ge=1, le=50, description="How many processes measure each variant.")
    min_seconds: Seconds = Field(5.0, description="How long a process is measured at least.")
    max_seconds: Seconds = Field(120.0, description="How long a process is measured at most.")
    rel_ci: float = Field(
        0.01,
        gt=0,
        le=1,
        description="Relative width of the median's 95% interval at which sampling may stop.",
    )
    meters: tuple[MeterName, ...] = Field(
        ("latency", "memory", "energy", "quality"), description="What is measured."
    )
    raise_priority: bool = Field(
        True,
        description="Whether measuring processes get the highest priority, where the system allows it.",
    )
    quality: QualityOptions = QualityOptions()

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_seconds > self.max_seconds:
            raise ValueError("min_seconds must not exceed max_seconds")
        if "latency" not in self.meters:
            raise ValueError("meters must contain 'latency': the other meters describe what it times")
        return self


class JobTarget(Frozen):
    """Which workers may take a job for CUDA."""

    gpu: str | None = Field(
        None, max_length=100, description="Part of the name of the GPU to measure on; null takes any."
    )
    min_vram_bytes: int = Field(0, ge=0, le=2**50, description="The least memory that the GPU must have.")


class Limits(Frozen):
    """The limits of a job. A variant that loses more quality than they allow is measured and not ranked."""

    timeout_s: Seconds = Field(
        1800.0, description="How long the job may measure; what is finished by then is kept."
    )
    deadline: Moment | None = Field(
        None,
        description="When the job must have ended, as 2026-01-31T18:00:00Z: one that has not begun by then fails, and "
        "one that runs has time until then.",
    )
    wait_for_quiet_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long a job waits at most, before its first process, for other processes to rest.",
    )
    max_variants: int = Field(32, ge=1, le=256, description="How many variants the plan may have.")
    max_kld: float | None = Field(
        None, ge=0, description="The most that a ranked variant may diverge from fp32 (kld_mean), in nats."
    )
    max_bytes: float | None = Field(
        None,
        gt=0,
        description="The most bytes of a stack that a search looks for: of the GPU's peak, on a CPU of the weights. Of "
        "batch_scaling: what weights, states and activations may take, enforced while requests run.",
    )
    max_batch: int = Field(256, ge=1, le=4096, description="The largest batch that batch_scaling tries.")
    min_top1: float | None = Field(
        None,
        ge=0,
        le=1,
        description="The least top-1 agreement of a ranked variant with fp32 (top1_agreement).",
    )
