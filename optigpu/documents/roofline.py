"""A variant's time against what its machine could do, as it is stored; `optigpu.roofline` computes it."""

from enum import StrEnum

from optigpu.documents.peaks import Peaks
from optigpu.vocabulary import Frozen


class Bound(StrEnum):
    """The limit of a variant by its roofline: memory bandwidth, arithmetic, or the host that launches the work."""

    MEMORY = "memory"
    COMPUTE = "compute"
    LAUNCH = "launch"


class Roof(Frozen):
    """The limits of a step, in bytes and operations per second.

    `array_bytes` is the size of the array whose read rate the bandwidth is; null for a published one.
    """

    source: str
    bytes_per_s: float
    flops_per_s: float
    array_bytes: int | None = None


class RooflineStep(Frozen):
    """A step of work under the measured `roof`, which allows it in `attainable_s` at best.

    `flops_per_byte` is its arithmetic intensity. `published_s` is what the catalog's roof of the whole device allows;
    null where the catalog lacks a figure.
    """

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
    """How far a variant is from the roofs of its machine.

    `step` is what the primary metric counts, computed in `dtype`; `prefill` is the prompt's pass where there is one.
    `published` is the catalog's roof of the whole device. Where `step` is null, `reason` says why.
    """

    dtype: str | None = None
    step: RooflineStep | None = None
    prefill: RooflineStep | None = None
    published: Roof | None = None
    peaks: Peaks | None = None
    notes: tuple[str, ...] = ()
    reason: str | None = None
