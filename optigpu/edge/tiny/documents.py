"""What `optigpu tiny` finds out, as documents."""

from typing import Literal

from optigpu.edge.tiny.profiles import Quality
from optigpu.vocabulary import Frozen


class TinyDeviceView(Frozen):
    """The device: its name and firmware, the profile it was built for, and the port."""

    name: str
    firmware: str
    model: str
    port: str
    profile: str


class TimedRun(Frozen):
    """A timed run: the device's time, and the host's between the same two lines."""

    inferences: int
    elapsed_s: float
    host_s: float
    per_second: float


class TinyPerformance(Frozen):
    """Median inferences per second of the runs, each of at least `min_seconds` and `min_inferences`.

    `clock_agrees`: the device's times and the host's differ by no more than the serial line explains.
    """

    mode: Literal["performance"] = "performance"
    device: TinyDeviceView
    min_seconds: float
    min_inferences: int
    runs: tuple[TimedRun, ...]
    inferences_per_s: float
    latency_us: float
    clock_agrees: bool
    noise_lines: int


class TinyAccuracy(Frozen):
    """How well the device answers. `value` is top-1 or the area under the ROC curve, by `metric`."""

    mode: Literal["accuracy"] = "accuracy"
    device: TinyDeviceView
    samples: int
    metric: Quality
    value: float
    target: float
    reached: bool
    noise_lines: int
