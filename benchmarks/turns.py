"""Subjects side by side: their processes are resident together and take turns, a request each."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.progress import track

from benchmarks.pairs import session_of
from benchmarks.peers import Peer, running
from benchmarks.stacks import Case, Stack, asked_of, details_of, spec_of
from optigpu.child.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.conductor.processes.asking import ask
from optigpu.conductor.session import Session
from optigpu.job.plan import variants_of
from optigpu.report import console
from optigpu.vocabulary import OptiGPUError

ROUND = RunRound(seconds=0, max_requests=1)


@dataclass(frozen=True)
class Figures:
    """What a subject came to. `ratios` are its rate over that of the first subject, turn by turn.

    `details` say how it was built and with what it ran. A subject that could not be measured has a `reason` and nothing
    else.
    """

    name: str
    rates: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    weight_bytes: int | None = None
    reason: str | None = None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """The median over the turns."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def rate(self) -> float | None:
        """The median in tokens/s."""
        return statistics.median(self.rates) if self.rates else None


class Subject(Protocol):
    """A process that runs one request at a time."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all its weights in memory."""

    @property
    def details(self) -> dict[str, Any]:
        """How it was built and with what it runs."""

    def rate(self) -> float:
        """tokens/s of one more request."""


def measure(subjects: Sequence[Stack | Peer], case: Case, turns: int) -> list[Figures]:
    """Every subject's figures, the ratios against the first one, which must be measurable.

    Raises OptiGPUError when the first subject fails.
    """
    with ExitStack() as leave:
        session = leave.enter_context(session_of(spec_of([Stack("")], case), variants=len(subjects)))
        ready: dict[int, Subject] = {}
        reasons: dict[int, str] = {}
        for index, subject in enumerate(track(subjects, "making ready", console=console(stderr=True))):
            try:
                ready[index] = leave.enter_context(_made_ready(subject, case, session))
            except OptiGPUError as error:
                reasons[index] = str(error)
        if 0 not in ready:
            raise OptiGPUError(f"{subjects[0].name} could not be measured: {reasons[0]}")
        rates = _take_turns(ready, turns, reasons)
    return [
        Figures(subject.name, reason=reasons[index])
        if index in reasons
        else Figures(
            subject.name,
            tuple(rates[index]),
            tuple(ours / theirs for ours, theirs in zip(rates[index], rates[0], strict=True)),
            ready[index].weight_bytes,
            details=ready[index].details,
        )
        for index, subject in enumerate(subjects)
    ]


def _take_turns(ready: dict[int, Subject], turns: int, reasons: dict[int, str]) -> dict[int, list[float]]:
    """The first subject rotates, so that none always follows the heat of the same one. A subject that fails is left out
    from then on, with the reason; the first subject's failure is raised.
    """
    rates: dict[int, list[float]] = {index: [] for index in ready}
    order = list(ready)
    for _ in track(range(turns), "taking turns", console=console(stderr=True)):
        for index in list(order):
            try:
                rates[index].append(ready[index].rate())
            except OptiGPUError as error:
                if index == 0:
                    raise
                reasons[index] = str(error)
                order.remove(index)
        order = [*order[1:], order[0]]
    return rates


@contextmanager
def _made_ready(subject: Stack | Peer, case: Case, session: Session) -> Iterator[Subject]:
    if isinstance(subject, Peer):
        with running(subject, asked_of(case), session.threads) as process:
            yield process
        return
    (variant,) = variants_of(spec_of([subject], case))
    with session.child(variant) as child:
        ready = ask(child, session.assignment(variant, 0), Ready, session.progress)
        memory = ask(child, RunMeter(meter="memory"), Metered, session.progress)
        yield _Ours(
            case, session, child, int(memory.values["weight_bytes"]), details_of(ready.facts.model_dump())
        )


@dataclass(frozen=True)
class _Ours:
    case: Case
    session: Session
    child: Any
    weight_bytes: int
    details: dict[str, Any]

    def rate(self) -> float:
        samples = ask(self.child, ROUND, Round, self.session.progress).samples
        if self.case.measure == "prefill":
            return self.case.prompt_tokens / float(samples["ttft_s"][0])
        return float(samples["tokens_per_s"][0])
