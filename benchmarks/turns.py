"""Subjects side by side: their processes stand ready together and take turns, a request each."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.progress import track

from benchmarks.pairs import bench_of
from benchmarks.peers import Peer, running
from optigpu.conductor.asking import ask
from optigpu.conductor.company import Bench
from optigpu.messages import Metered, Ready, Round, RunMeter, RunRound
from optigpu.plan import variants_of
from optigpu.report import console
from optigpu.spec import JobSpec
from optigpu.vocabulary import OptiGPUError

ROUND = RunRound(seconds=0, max_requests=1)


@dataclass(frozen=True)
class Stack:
    """One of our own subjects: a name for the table, a preset, and the techniques as a job names them."""

    name: str
    preset: str
    techniques: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True)
class Figures:
    """What a subject came to. `ratios` are its rate over that of the first subject, turn by turn.

    A subject that could not be measured has a `reason` and nothing else.
    """

    name: str
    rates: tuple[float, ...] = ()
    ratios: tuple[float, ...] = ()
    weight_bytes: int | None = None
    reason: str | None = None

    @property
    def ratio(self) -> float | None:
        """The median over the turns."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def rate(self) -> float | None:
        """The median in tokens/s."""
        return statistics.median(self.rates) if self.rates else None


class Subject(Protocol):
    """What can be asked for one more request."""

    weight_bytes: int

    def rate(self) -> float:
        """tokens/s of one more request."""


def measure(
    subjects: Sequence[Stack | Peer], preset: str, shape: tuple[int, int], turns: int, device: str = "cpu"
) -> list[Figures]:
    """Every subject's figures, the ratios against the first one, which must be measurable.

    `shape` is (prompt tokens, new tokens). Raises OptiGPUError when the first subject fails.
    """
    with ExitStack() as leave:
        bench = leave.enter_context(bench_of(_spec(Stack("", preset), shape, device), variants=len(subjects)))
        ready: dict[int, Subject] = {}
        reasons: dict[int, str] = {}
        for index, subject in enumerate(track(subjects, "making ready", console=console(stderr=True))):
            try:
                ready[index] = leave.enter_context(_made_ready(subject, preset, shape, bench, device))
            except OptiGPUError as error:
                reasons[index] = str(error)
        if 0 not in ready:
            raise OptiGPUError(f"{subjects[0].name} could not be measured: {reasons[0]}")
        rates = _take_turns(ready, turns)
    return [
        Figures(subject.name, reason=reasons[index])
        if index in reasons
        else Figures(
            subject.name,
            tuple(rates[index]),
            tuple(ours / theirs for ours, theirs in zip(rates[index], rates[0], strict=True)),
            ready[index].weight_bytes,
        )
        for index, subject in enumerate(subjects)
    ]


def _take_turns(ready: dict[int, Subject], turns: int) -> dict[int, list[float]]:
    """Who goes first rotates, so that nobody always follows the same neighbour's heat."""
    rates: dict[int, list[float]] = {index: [] for index in ready}
    order = list(ready)
    for _ in track(range(turns), "taking turns", console=console(stderr=True)):
        for index in order:
            rates[index].append(ready[index].rate())
        order = [*order[1:], order[0]]
    return rates


@contextmanager
def _made_ready(
    subject: Stack | Peer, preset: str, shape: tuple[int, int], bench: Bench, device: str
) -> Iterator[Subject]:
    if isinstance(subject, Peer):
        with running(subject, preset, shape, bench.threads) as process:
            yield process
        return
    spec = _spec(subject, shape, device)
    (variant,) = variants_of(spec)
    with bench.child() as child:
        ask(child, bench.assignment(variant, 0), Ready, bench.watch)
        memory = ask(child, RunMeter(meter="memory"), Metered, bench.watch)
        yield _Ours(bench, child, int(memory.values["weight_bytes"]))


@dataclass(frozen=True)
class _Ours:
    bench: Bench
    child: Any
    weight_bytes: int

    def rate(self) -> float:
        return float(ask(self.child, ROUND, Round, self.bench.watch).samples["tokens_per_s"][0])


def _spec(subject: Stack, shape: tuple[int, int], device: str) -> JobSpec:
    prompt_tokens, new_tokens = shape
    return JobSpec.model_validate(
        {
            "workload": {"kind": "generate", "prompt_tokens": prompt_tokens, "new_tokens": new_tokens},
            "model": f"preset:{subject.preset}",
            "stack": list(subject.techniques),
            "measure": {"replicates": 1},
            "device": device,
        }
    )
