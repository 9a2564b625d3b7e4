"""A whole run against one device: open the port, ask who is there, measure, and write down what was found. Performance:
timed runs of at least 10 s and 10 inferences, five of them, and their median. Accuracy: one inference for each sample,
then top-1, or the area under the ROC curve for anomalies."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from optigpu.edge.tiny.link import (
    DEFAULT_BAUD,
    INFER_SILENCE_S,
    SILENCE_S,
    AnswerError,
    Device,
    Inference,
    Link,
    ResetError,
    SerialPort,
    SilenceError,
)
from optigpu.edge.tiny.profiles import Profile, Quality, Sample, profile_of
from optigpu.vocabulary import Frozen, SpecError


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


MARGIN = 1.05
"""More inferences than the last run says are needed, since a device's speed varies."""
MOST_INFERENCES = 1_000_000
CLOCK_SHARE, CLOCK_S = 0.02, 0.25
"""How far the device's and the host's time of a run may differ: by that share, and by a serial line's delays."""


@dataclass(frozen=True)
class Rules:
    """How long a run is, and how many there are. The defaults are MLPerf Tiny's."""

    seconds: float = 10.0
    inferences: int = 10
    runs: int = 5


def timed_runs(
    device: Device,
    data: bytes,
    warmup: int,
    rules: Rules,
    on_run: Callable[[Inference], None],
) -> list[Inference]:
    """Times the device on one input; a run that was too short is done again with more inferences. Raises TinyError;
    AnswerError for a device so fast or so unsteady that no run is long enough."""
    device.load(data)
    last = device.infer(1, 0)  # how long one takes at all
    last = device.infer(rules.inferences, warmup, (rules.inferences + warmup) / last.per_second)
    runs: list[Inference] = []
    for _ in range(3 * rules.runs):
        count = max(rules.inferences, math.ceil(rules.seconds * last.per_second * MARGIN))
        count = min(count, MOST_INFERENCES)
        last = device.infer(count, warmup, (count + warmup) / last.per_second)
        if last.elapsed_us >= rules.seconds * 1e6:
            runs.append(last)
            on_run(last)
        if len(runs) == rules.runs:
            return runs
    raise AnswerError(
        f"The device's speed varies too much: {len(runs)} of {3 * rules.runs} runs took {rules.seconds:g} s or more."
    )


@dataclass(frozen=True)
class Session:
    """A device that has said who it is."""

    device: Device
    link: Link
    profile: Profile
    view: TinyDeviceView


@contextmanager
def open_session(
    port: str, baud: int = DEFAULT_BAUD, silence_s: float = SILENCE_S, profile: str | None = None
) -> Iterator[Session]:
    """Opens the port and asks the device who it is; without a `profile` it is the one that the device names. Raises
    SpecError for a profile or a baud rate that there is not, TinyError for a device that cannot be driven."""
    given = profile_of(profile) if profile else None
    with SerialPort(port, baud) as opened:
        link = Link(opened)
        device = Device(link, silence_s, silence_s * INFER_SILENCE_S / SILENCE_S)
        identity = device.identify()
        chosen = given or profile_of(identity.model)
        view = TinyDeviceView(
            name=identity.name,
            firmware=identity.firmware,
            model=identity.model,
            port=port,
            profile=chosen.name,
        )
        yield Session(device, link, chosen, view)


def measure_performance(
    session: Session,
    sample: Sample | None,
    rules: Rules | None = None,
    on_run: Callable[[Inference], None] = lambda _: None,
) -> TinyPerformance:
    """Times the device on one sample, or on zeros. Raises TinyError."""
    rules = rules or Rules()
    data = sample.segments[0] if sample else bytes(session.profile.input_bytes)
    runs = timed_runs(session.device, data, session.profile.warmup, rules, on_run)
    rate = median(run.per_second for run in runs)
    timed = tuple(
        TimedRun(
            inferences=run.count,
            elapsed_s=run.elapsed_us / 1e6,
            host_s=run.host_s,
            per_second=run.per_second,
        )
        for run in runs
    )
    return TinyPerformance(
        device=session.view,
        min_seconds=rules.seconds,
        min_inferences=rules.inferences,
        runs=timed,
        inferences_per_s=rate,
        latency_us=1e6 / rate,
        clock_agrees=all(
            abs(run.elapsed_s - run.host_s) <= CLOCK_SHARE * run.host_s + CLOCK_S for run in timed
        ),
        noise_lines=session.link.noise,
    )


def measure_accuracy(
    session: Session,
    samples: Sequence[Sample],
    labels: Sequence[int],
    on_sample: Callable[[int], None] = lambda _: None,
) -> TinyAccuracy:
    """Asks the device about each sample. Raises TinyError, and SpecError for labels that do not fit."""
    results = []
    for number, sample in enumerate(samples, 1):
        # of several segments the mean
        segments = np.array([_answer(session.device, data) for data in sample.segments])
        results.append(tuple(map(float, segments.mean(axis=0))))
        on_sample(number)
    value = quality_of(session.profile, labels, results)
    return TinyAccuracy(
        device=session.view,
        samples=len(samples),
        metric=session.profile.quality,
        value=value,
        target=session.profile.target,
        reached=value >= session.profile.target,
        noise_lines=session.link.noise,
    )


def _answer(device: Device, data: bytes) -> tuple[float, ...]:
    """One result. What is lost with a garbled line or a restart of the board is asked for once more."""
    try:
        device.load(data)
        return device.infer(1, 0).results
    except (AnswerError, ResetError, SilenceError):
        device.identify()
    device.load(data)
    return device.infer(1, 0).results


def quality_of(profile: Profile, labels: Sequence[int], results: Sequence[tuple[float, ...]]) -> float:
    """Top-1 or the area under the ROC curve, 0 to 1. Raises SpecError for labels that do not fit the results."""
    if profile.quality is Quality.AUC:
        if {len(result) for result in results} != {1}:
            raise SpecError(
                f"{profile.name} answers one number for an input; this device gives {len(results[0])}."
            )
        return area(labels, [result[0] for result in results])
    widths = {len(result) for result in results}
    if len(widths) != 1:
        raise AnswerError("The device's results have different numbers of classes.")
    (classes,) = widths
    if not 0 <= min(labels) <= max(labels) < classes:
        raise SpecError(f"The labels are {min(labels)} to {max(labels)}; the device knows {classes} classes.")
    chosen = np.argmax(np.array(results), axis=1)
    return float(np.mean(chosen == np.array(labels)))


def area(labels: Sequence[int], scores: Sequence[float]) -> float:
    """The area under the ROC curve: how often an anomaly (label 1) has the higher score; a tie counts one half. Raises
    SpecError unless there are both."""
    if set(labels) != {0, 1}:
        raise SpecError(
            "The area under the ROC curve needs labels 0 (normal) and 1 (anomaly), and both of them."
        )
    values = np.array(scores)
    positive = np.array(labels) == 1
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # the mean rank of equal values, from 1
    above = int(positive.sum())
    below = len(values) - above
    return float((ranks[positive].sum() - above * (above + 1) / 2) / (above * below))
