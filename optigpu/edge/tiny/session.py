"""A whole run against one device: open the port, ask who is there, measure, and write down what was found."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from optigpu.edge.tiny import accuracy, performance
from optigpu.edge.tiny.datasets import Sample
from optigpu.edge.tiny.device import INFER_SILENCE_S, Device, Inference
from optigpu.edge.tiny.documents import TimedRun, TinyAccuracy, TinyDeviceView, TinyPerformance
from optigpu.edge.tiny.link import SILENCE_S, Link
from optigpu.edge.tiny.performance import Rules
from optigpu.edge.tiny.profiles import Profile, profile_of
from optigpu.edge.tiny.serial_port import DEFAULT_BAUD, SerialPort


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
    """Opens the port and asks the device who it is; without a `profile` it is the one that the device names.

    Raises SpecError for a profile or a baud rate that there is not, TinyError for a device that cannot be driven.
    """
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
    runs = performance.timed_runs(session.device, data, session.profile.warmup, rules, on_run)
    rate = performance.median_per_second(runs)
    return TinyPerformance(
        device=session.view,
        min_seconds=rules.seconds,
        min_inferences=rules.inferences,
        runs=tuple(map(_timed, runs)),
        inferences_per_s=rate,
        latency_us=1e6 / rate,
        clock_agrees=performance.clock_agrees(runs),
        noise_lines=session.link.noise,
    )


def measure_accuracy(
    session: Session,
    samples: Sequence[Sample],
    labels: Sequence[int],
    on_sample: Callable[[int], None] = lambda _: None,
) -> TinyAccuracy:
    """Asks the device about each sample. Raises TinyError, and SpecError for labels that do not fit."""
    results = accuracy.answers(session.device, samples, on_sample)
    value = accuracy.quality_of(session.profile, labels, results)
    return TinyAccuracy(
        device=session.view,
        samples=len(samples),
        metric=session.profile.quality,
        value=value,
        target=session.profile.target,
        reached=value >= session.profile.target,
        noise_lines=session.link.noise,
    )


def _timed(run: Inference) -> TimedRun:
    return TimedRun(
        inferences=run.count,
        elapsed_s=run.elapsed_us / 1e6,
        host_s=run.host_s,
        per_second=run.per_second,
    )
