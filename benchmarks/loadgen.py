"""`python -m benchmarks.loadgen`: the scenario Server of `serve` beside MLPerf's own LoadGen, on the same engine.

Both fill the same queue before the same places. LoadGen sends from its own thread and keeps its own books; its schedule
is replayed as a trace, so that both have the same moments, from which both count. One thread, warm before either
begins, runs the engine for both. They take turns, and a figure is the median of its turns. The 99th percentile is the
latency that LoadGen's summary names: of so many sorted ones that at 99% of their number. Each schedule is replayed
twice: how far two replays of one schedule are apart says how exactly the two sides can agree on this machine.

`--engine timed` is an engine whose prefills and steps take a set time, so that what differs are the load generators
alone; `--engine torch` decodes a model. LoadGen is the package mlcommons-loadgen, of the extra peers.
"""

import argparse
import queue
import re
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from rich.progress import track
from rich.table import Table

from benchmarks.document import measured_before, write
from optigpu.backends import BACKENDS
from optigpu.backends.base import Order
from optigpu.backends.serving import ServingRuntime, Slots
from optigpu.hardware import probe
from optigpu.load.batching import Batching, Clock, Sender, Sent
from optigpu.load.queries import Load, Query
from optigpu.load.served import Run, Served
from optigpu.report.formats import console
from optigpu.vocabulary import DeviceKind, OptiGPUError
from optigpu.workloads.serve import Serve

GOAL = 0.02
"""The most that the two may differ by, of either figure."""
PERCENTILE = 0.99
PREFILL_S, STEP_S = 0.010, 0.005
PROMPT_TOKENS, NEW_TOKENS, SLOTS, BLOCK_TOKENS = 32, 16, 8, 16
SWITCH_S = 0.0005
"""How long Python lets the engine's thread run before LoadGen's may send."""
ENGINE_THREADS = 1
"""A core is left to LoadGen's thread."""


@dataclass(frozen=True)
class Figures:
    """Of one turn."""

    p99_s: float
    requests_per_s: float


class TimedSlots:
    """Places of an engine that decodes nothing and takes a set time; it waits as a device would be waited for."""

    block_tokens = 1

    def __init__(self, count: int) -> None:
        self.count, self.length = count, 2**20
        self._clock = Clock()

    def join(self, slot: int, prompt: Sequence[int]) -> int:
        self._work(PREFILL_S)
        return 0

    def step(self, slots: Sequence[int]) -> Sequence[int]:
        self._work(STEP_S)
        return [0] * len(slots)

    def leave(self, slot: int) -> None:
        """Takes no time."""

    def close(self) -> None:
        """There is nothing to give back."""

    def _work(self, seconds: float) -> None:
        self._clock.wait_until(self._clock.now() + seconds)


class Engine:
    """Places, and the one thread that they are used from.

    A thread's first calls are slow: it allocates, and starts threads of its own. Neither of the two is to pay for that.
    """

    def __init__(self, slots: Slots, prompt: Sequence[int]) -> None:
        """Warm when this returns, with every size of the batch."""
        self._slots, self._prompt = slots, prompt
        self._pool = ThreadPoolExecutor(1)
        for count in range(1, slots.count + 1):
            burst = [Query(number, 0.0, len(prompt), NEW_TOKENS) for number in range(count)]
            self.serve_scheduled(burst).result()

    def serve(self, sender: Sender) -> Future[Run]:
        """Serves what the sender sends."""
        return self._pool.submit(lambda: Batching(self._slots).serve(sender, lambda _: self._prompt))

    def serve_scheduled(self, queries: Sequence[Query]) -> Future[Run]:
        """Serves these, whose moments count from when the thread begins."""

        def run() -> Run:
            return Batching(self._slots).serve(Sender(Load(tuple(queries)), Clock()), lambda _: self._prompt)

        return self._pool.submit(run)

    def close(self) -> None:
        """The thread ends."""
        self._pool.shutdown()


class FromLoadGen(Sender):
    """A Sender behind LoadGen: its callback puts queries here, and the end of each goes back to it.

    It gives no moments of its own, since LoadGen keeps them.
    """

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._held: list[Sent] = []
        self._ids: list[int] = []

    def issue(self, samples: Sequence["object"]) -> None:
        """LoadGen's thread sends these."""
        for sample in samples:
            self._waiting.put(sample.id)  # type: ignore[attr-defined]

    def finish(self) -> None:
        """LoadGen sends no more."""
        self._waiting.put(None)

    def arrived(self, now_s: float) -> Sequence[Sent]:
        """What LoadGen has sent since the last call."""
        found, self._held = self._held, []
        while not self._waiting.empty():
            taken = self._take()
            if taken is None:
                self._waiting.put(None)
                break
            found.append(taken)
        return found

    def wait(self) -> bool:
        """Until LoadGen sends, or says that it has ended."""
        taken = self._take()
        if taken is None:
            return False
        self._held.append(taken)
        return True

    def ended(self, served: Served) -> None:
        """LoadGen takes the time now."""
        import mlperf_loadgen

        number = self._ids[served.query.number]
        mlperf_loadgen.QuerySamplesComplete([mlperf_loadgen.QuerySampleResponse(number, 0, 0)])

    def _take(self) -> Sent | None:
        number = self._waiting.get()
        if number is None:
            return None
        self._ids.append(number)
        return Sent(Query(len(self._ids) - 1, 0.0, PROMPT_TOKENS, NEW_TOKENS), 0.0)


def by_loadgen(engine: Engine, rate: float, count: int, seed: int) -> tuple[Figures, list[Query]]:
    """One run of LoadGen's scenario Server: what its summary says, and its schedule."""
    import mlperf_loadgen as loadgen

    sender = FromLoadGen()
    settings = loadgen.TestSettings()
    settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
    settings.server_target_qps, settings.server_target_latency_ns = rate, 10**12
    settings.min_query_count = settings.max_query_count = count
    settings.min_duration_ms, settings.schedule_rng_seed = 0, seed
    sut = loadgen.ConstructSUT(sender.issue, lambda: None)
    library = loadgen.ConstructQSL(count, count, lambda _: None, lambda _: None)
    with tempfile.TemporaryDirectory() as folder:
        logs, place = loadgen.LogSettings(), loadgen.LogOutputSettings()
        place.outdir, place.copy_summary_to_stdout = folder, False
        logs.log_output, logs.enable_trace = place, True
        serving = engine.serve(sender)
        try:
            loadgen.StartTestWithLogSettings(sut, library, settings, logs)
        finally:
            sender.finish()
        serving.result()
        summary = (Path(folder) / "mlperf_log_summary.txt").read_text()
        trace = (Path(folder) / "mlperf_log_trace.json").read_text()
    loadgen.DestroyQSL(library)
    loadgen.DestroySUT(sut)
    figures = Figures(
        _figure(summary, r"99\.00 percentile latency \(ns\)\s*:\s*(\S+)") / 1e9,
        _figure(summary, r"Completed samples per second\s*:\s*(\S+)"),
    )
    return figures, _schedule(trace, count)


def by_serve(engine: Engine, queries: Sequence[Query]) -> Figures:
    """The same queries at the same moments by `serve`'s own sender."""
    run = engine.serve_scheduled(queries).result()
    latencies = sorted(served.latency_s for served in run.served)
    last_s = max(served.ended_s for served in run.served)
    return Figures(latencies[int(PERCENTILE * len(latencies))], (len(latencies) - 1) / last_s)


def _schedule(trace: str, count: int) -> list[Query]:
    """When LoadGen was to send each query, in seconds from the first, by its trace, whose times are microseconds.

    When its callback ran is later: it waits for Python's lock meanwhile, and LoadGen counts that wait.
    """
    found = re.findall(r'"name":\s*"Sample".*?"ph":\s*"b".*?"ts":\s*([\d.]+)', trace)
    moments_s = sorted(float(each) / 1e6 for each in found)
    if len(moments_s) != count:
        raise OptiGPUError(
            f"LoadGen's trace has {len(moments_s)} samples instead of {count}; another version writes another one."
        )
    return [
        Query(number, moment_s - moments_s[0], PROMPT_TOKENS, NEW_TOKENS)
        for number, moment_s in enumerate(moments_s)
    ]


def _figure(summary: str, pattern: str) -> float:
    found = re.search(pattern, summary)
    if found is None:
        raise OptiGPUError(
            f"LoadGen's summary has no line like {pattern!r}; another version writes another one."
        )
    return float(found[1])


@contextmanager
def places(engine: str, model: str) -> Iterator[tuple[Slots, list[int]]]:
    """The places of the engine, and a prompt."""
    if engine == "timed":
        yield TimedSlots(SLOTS), [0] * PROMPT_TOKENS
        return
    BACKENDS["torch"].use_threads(ENGINE_THREADS)
    workload = Serve(prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        order = Order(model, (), workload, DeviceKind.CPU, 0, ENGINE_THREADS, Path(folder), probe())
        runtime = BACKENDS["torch"].prepare(order, lambda _: None)
        assert isinstance(runtime, ServingRuntime)
        slots = runtime.slots(SLOTS, PROMPT_TOKENS + NEW_TOKENS, BLOCK_TOKENS)
        drawn = np.random.default_rng(0).integers(runtime.facts.vocabulary, size=PROMPT_TOKENS)
        yield slots, drawn.tolist()
        slots.close()


@dataclass(frozen=True)
class Turn:
    """One schedule: LoadGen's figures, and those of two replays."""

    loadgen: Figures
    serve: Figures
    again: Figures

    @classmethod
    def read(cls, kept: dict[str, dict[str, float]]) -> "Turn":
        """As `asdict` wrote it."""
        return cls(**{side: Figures(**figures) for side, figures in kept.items()})


def compared(asked: argparse.Namespace, first: int) -> list[Turn]:
    """So many turns, whose schedules follow from their numbers, the first of which is `first`."""
    turns = []
    with places(asked.engine, asked.model) as (slots, prompt), closing(Engine(slots, prompt)) as started:
        # A bar that is drawn by a thread would take the engine's time.
        for number in track(range(first, first + asked.turns), "turns", auto_refresh=False):
            figures, queries = by_loadgen(started, asked.rate, asked.queries, seed=number + 1)
            turns.append(Turn(figures, by_serve(started, queries), by_serve(started, queries)))
    return turns


def apart(turns: Sequence[Turn], name: str, side: str, reference: str) -> float:
    """The median over the turns of how much more the one side has of a figure than the other."""
    ratios = (getattr(getattr(turn, side), name) / getattr(getattr(turn, reference), name) for turn in turns)
    return float(statistics.median(ratios)) - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 0 where both figures are within the goal, 1 where one is not, and 2 if nothing was measured."""
    asked = _asked(arguments)
    try:
        return _run(asked)
    except OptiGPUError as error:
        console(stderr=True).print(str(error), markup=False)
        return 2


def _run(asked: argparse.Namespace) -> int:
    if find_spec("mlperf_loadgen") is None:
        raise OptiGPUError("LoadGen is not installed; install it with: pip install mlcommons-loadgen.")
    sys.setswitchinterval(SWITCH_S)
    settings = {name: getattr(asked, name) for name in ("engine", "model", "rate", "queries")}
    kept = measured_before(asked.output, settings, "turns") if asked.resume else []
    turns = [*map(Turn.read, kept), *compared(asked, len(kept))]
    names = ("p99_s", "requests_per_s")
    found = {name: apart(turns, name, "serve", "loadgen") for name in names}
    replays = {name: apart(turns, name, "again", "serve") for name in names}
    table = Table("", "LoadGen", "serve", "serve / LoadGen - 1", "replay / replay - 1")
    for name in names:
        their, our = (
            statistics.median(getattr(getattr(turn, side), name) for turn in turns)
            for side in ("loadgen", "serve")
        )
        sides = (f"{100 * each[name]:+.2f}%" for each in (found, replays))
        table.add_row(name, f"{their:.4g}", f"{our:.4g}", *sides)
    console().print(table)
    if asked.output:
        figures = {"spec": settings, "goal": GOAL, "apart": found, "replays_apart": replays}
        write(asked.output, "loadgen", figures | {"turns": [asdict(turn) for turn in turns]})
    return int(max(map(abs, found.values())) > GOAL)


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The scenario Server beside MLPerf's LoadGen.")
    parser.add_argument("--engine", choices=("timed", "torch"), default="timed")
    parser.add_argument("--model", default="bundled:tiny", help="with --engine torch: a reference")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--queries", type=int, default=400, help="of each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, help="a file for the figures")
    parser.add_argument("--resume", action="store_true", help="add turns to those that the file holds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
