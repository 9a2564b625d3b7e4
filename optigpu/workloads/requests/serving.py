"""A run of a load as a timed request, and the check of what was decoded under it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Self

import numpy as np

from optigpu.backends.runtime import DecodingRuntime, Ids
from optigpu.backends.serving import ServingRuntime, StreamingRuntime
from optigpu.documents.load import AloneAgreement, LoadFacts, LoadRun
from optigpu.load.batching import Batching
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import OPEN, Load, Query, Schedule
from optigpu.load.served import Run, Served, Server
from optigpu.load.streaming import Streaming
from optigpu.vocabulary import OptiGPUError, UnsupportedError
from optigpu.workloads.base import Check
from optigpu.workloads.requests.agreement import count_near, is_agreement

CHECKED_QUERIES = 2
"""So many answers are predicted again, token by token, by the engine's own step."""
TOKENS_UNTOLD = (
    "The server does not tell which tokens it decoded, so they cannot be compared with those of a request alone; "
    "measure one that knows return_token_ids, or an engine of this machine."
)


@dataclass(frozen=True)
class Serving:
    """How a load is served: the places and blocks of an engine in the process, the limits, and what is stored of it."""

    slots: int
    block_tokens: int
    limits: Limits
    facts: LoadFacts


class ServingRequest:
    """A LoadRequest. Each run draws its own moments, lengths and prompts from one source."""

    def __init__(
        self, runtime: DecodingRuntime, server: Callable[[], Server], schedule: Schedule, serving: Serving
    ) -> None:
        """`server` makes that of a run: between two of them the engine may have decoded something else."""
        self._runtime, self._server, self._schedule, self._serving = runtime, server, schedule, serving
        self._source = np.random.default_rng(runtime.seed)
        self._last: LoadRun | None = None
        self._grew: list[bool | None] = []

    @classmethod
    def prepared(cls, runtime: DecodingRuntime, schedule: Schedule, serving: Serving) -> Self:
        """With the queue before the engine's places, or connections to its server. Raises UnsupportedError."""
        if isinstance(runtime, StreamingRuntime):
            return cls(runtime, partial(Streaming, runtime.streams), schedule, serving)
        if not isinstance(runtime, ServingRuntime):
            raise UnsupportedError(
                "This engine decodes whole batches and lets no sequence join or leave; measure generate or "
                "batch_sweep, or ask for the backend torch or endpoint."
            )
        slots = partial(runtime.slots, serving.slots, schedule.longest, serving.block_tokens)
        slots()
        known = {"slots": serving.slots, "block_tokens": serving.block_tokens}
        facts = serving.facts.model_copy(update=known)
        return cls(runtime, lambda: Batching(slots()), schedule, replace(serving, facts=facts))

    def run(self) -> Mapping[str, float]:
        """One timed run. Raises OptiGPUError where no request was answered."""
        figures = self._figures(self._schedule, self._served(self._schedule)[0])
        self._require_answers()
        return figures

    def facts(self) -> LoadFacts:
        """With the runs since the check, and in how many of them the queue grew without an end."""
        known = [grew for grew in self._grew if grew is not None]
        counts = {"runs": len(self._grew), "saturated_runs": sum(known) if known else None}
        return self._serving.facts.model_copy(update=counts)

    def loaded(self) -> LoadRun:
        """The queries of the last run."""
        assert self._last is not None
        return self._last

    def first_rate(self) -> float:
        """The workload's own. Raises UnsupportedError without a rate, or a limit to keep."""
        if self._schedule.scenario != "Server":
            raise UnsupportedError("A rate is searched for in the scenario Server alone; ask for that.")
        if self._serving.limits == Limits():
            raise UnsupportedError(
                "The search for the highest rate needs a limit to keep; name ttft_s or tpot_s."
            )
        return self._schedule.rate

    def at(self, rate: float) -> LoadRun:
        """One run of the scenario Server at that rate."""
        scheduled = replace(self._schedule, scenario="Server", rate=rate)
        self._figures(scheduled, self._served(scheduled)[0])
        return self.loaded()

    def alone_agreement(self, tokens: int) -> AloneAgreement:
        """Requests spread over the run. An engine in this process decodes them as `generate` does."""
        run, prompts = self._served(self._schedule)
        chosen = _spread(run.served, tokens)
        failed = next((each.error for each in chosen if each.error), None)
        if failed:
            raise UnsupportedError(f"A request under load failed: {failed}")
        if not all(each.tokens for each in chosen):
            raise UnsupportedError(TOKENS_UNTOLD)
        pairs = [(each.tokens, self._alone(each.query, prompts[each.query.number])) for each in chosen]
        return AloneAgreement(
            requests=len(pairs),
            same_requests=sum(found == alone for found, alone in pairs),
            tokens=sum(len(found) for found, _ in pairs),
            same_tokens=sum(a == b for pair in pairs for a, b in zip(*pair, strict=False)),
            most_at_once=max(seen.count for seen in run.seen),
        )

    def check(self) -> Check:
        """One run: each query must have its tokens, and those of some must be what the engine itself predicts.

        Raises OptiGPUError where no request was answered.
        """
        run, prompts = self._served(self._schedule)
        self._figures(self._schedule, run)
        self._require_answers()
        problem = self._problem(run, prompts)
        self._grew.clear()
        return Check(run.seconds, problem, {"scenario": self._serving.facts.scenario})

    def observe(self) -> None:
        """Records which kernels run for a prompt by itself."""
        load = self._schedule.draw(self._source)
        self._runtime.observe(np.array([_prompts(load, self._runtime, self._source)[0]]))

    def described(self) -> Mapping[str, Sequence[float]]:
        """How long each query waited for its first token, from the moment at which it was to be sent."""
        return {"wait_s": self.loaded().ttft_s}

    def fresh(self, seed: int) -> Self:
        """The same, whose next runs draw from `seed`."""
        self._source = np.random.default_rng(seed)
        return self

    def _served(self, schedule: Schedule) -> tuple[Run, Sequence[Sequence[int]]]:
        load = schedule.draw(self._source)
        prompts = _prompts(load, self._runtime, self._source)
        return self._server().run(load, prompts), prompts

    def _alone(self, query: Query, prompt: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a request that nothing is beside."""
        if isinstance(self._runtime, StreamingRuntime):
            load = Load((replace(query, number=0, arrival_s=0.0),))
            return self._server().run(load, [prompt]).served[0].tokens
        found: list[int] = self._runtime.generate(np.array([prompt]), query.new_tokens).tokens[0].tolist()
        return tuple(found)

    def _figures(self, schedule: Schedule, run: Run) -> Mapping[str, float]:
        is_open = schedule.scenario in OPEN
        self._last = figures_of(run, self._serving.limits, is_open=is_open)
        self._grew.append(self._last.saturated)
        tokens = sum(served.count for served in run.served)
        return {"tokens_per_s": tokens / run.seconds, "requests_per_s": len(run.served) / run.seconds}

    def _require_answers(self) -> None:
        """Without one there is nothing to time, and the next run would fail as this one did."""
        if self.loaded().failed == len(self.loaded().sent_s):
            raise OptiGPUError(self._failures())

    def _failures(self) -> str:
        last = self.loaded()
        return f"{last.failed} of {len(last.sent_s)} requests failed: {last.error}"

    def _problem(self, run: Run, prompts: Sequence[Sequence[int]]) -> str | None:
        if self.loaded().failed:
            return self._failures()
        answered = [served for served in run.served if served.tokens]
        pairs = [self._agreement(prompts[each.query.number], each) for each in answered[:CHECKED_QUERIES]]
        agreed, checked = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        if not is_agreement(agreed, checked):
            return (
                f"Of {checked} tokens that were decoded under load, {checked - agreed} are not what the engine "
                "predicts after the same tokens alone."
            )
        return None

    def _agreement(self, prompt: Sequence[int], served: Served) -> tuple[int, int]:
        """How many of a query's tokens are the most likely ones, and how many there are; no tokens without logits."""
        tokens: Ids = np.array([[*prompt, *served.tokens]])
        try:
            logits = self._runtime.score(tokens, len(prompt) - 1)
            agreed, _ = count_near(islice(logits, len(served.tokens)), np.array([served.tokens]))
        except UnsupportedError:
            return 0, 0
        return agreed, len(served.tokens)


def _prompts(load: Load, runtime: DecodingRuntime, source: np.random.Generator) -> list[list[int]]:
    """Random tokens for each query, by its number."""
    lengths = (query.prompt_tokens for query in load.queries)
    return [source.integers(runtime.facts.vocabulary, size=length).tolist() for length in lengths]


def _spread(served: Sequence[Served], tokens: int) -> list[Served]:
    """As many queries as have about so many tokens, evenly over the run."""
    whole = sum(each.query.new_tokens for each in served)
    count = max(1, min(len(served), tokens * len(served) // whole))
    return [served[place] for place in np.linspace(0, len(served) - 1, count).round().astype(int).tolist()]
