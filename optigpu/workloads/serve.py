"""serve: requests that arrive over time at an engine with a queue, as servers see them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice, pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, field_validator, model_validator

from optigpu.backends.runtime import DecodingRuntime, EncodingRuntime, Ids
from optigpu.backends.serving import ServingRuntime, StreamingRuntime
from optigpu.documents.facts import ModelFacts
from optigpu.documents.rounds import QUERY_METRICS, AloneAgreement, LoadFacts, LoadRun, ScenarioName
from optigpu.load.batching import Batching
from optigpu.load.figures import Limits, figures_of
from optigpu.load.queries import BLOCK_TOKENS, OPEN, Load, Query, Schedule, read_trace
from optigpu.load.served import Run, Served, Server, Streaming
from optigpu.vocabulary import OptiGPUError, UnsupportedError, as_value_error
from optigpu.workloads.base import Check, LoadRequest, Workload
from optigpu.workloads.requests import count_near, exceeds_context, is_agreement

CHECKED_QUERIES = 2
"""So many answers are predicted again, token by token, by the engine's own step."""
TOKENS_UNTOLD = (
    "The server does not tell which tokens it decoded, so they cannot be compared with those of a request alone; "
    "measure one that knows return_token_ids, or an engine of this machine."
)


class ServingRequest(LoadRequest):
    """A LoadRequest. Each run draws its own moments, lengths and prompts from one source."""

    def __init__(
        self,
        runtime: DecodingRuntime,
        server: Callable[[], Server],
        schedule: Schedule,
        limits: Limits,
        facts: LoadFacts,
        shared_tokens: int = 0,
    ) -> None:
        """`server` makes that of a run: between two of them the engine may have decoded something else. All prompts of
        a run begin with the same `shared_tokens`."""
        self._shared = shared_tokens
        self._runtime, self._server, self._schedule = runtime, server, schedule
        self._limits, self._facts = limits, facts
        self._source = np.random.default_rng(runtime.seed)
        self._last: LoadRun | None = None
        self._grew: list[bool | None] = []

    def run(self) -> Mapping[str, float]:
        figures = self._figures(self._schedule, self._served(self._schedule)[0])
        self._require_answers()
        return figures

    def facts(self) -> LoadFacts:
        known = [grew for grew in self._grew if grew is not None]
        counts = {"runs": len(self._grew), "saturated_runs": sum(known) if known else None}
        return self._facts.model_copy(update=counts)

    def loaded(self) -> LoadRun:
        assert self._last is not None
        return self._last

    def first_rate(self) -> float:
        if self._schedule.scenario != "Server":
            raise UnsupportedError("A rate is searched for in the scenario Server alone; ask for that.")
        if self._limits == Limits():
            raise UnsupportedError(
                "The search for the highest rate needs a limit to keep; name ttft_s or tpot_s."
            )
        return self._schedule.rate

    def at(self, rate: float) -> LoadRun:
        scheduled = replace(self._schedule, scenario="Server", rate=rate)
        self._figures(scheduled, self._served(scheduled)[0])
        return self.loaded()

    def alone_agreement(self, tokens: int) -> AloneAgreement:
        """Requests spread over the run. An engine in this process decodes them as `generate` does."""
        run, prompts = self._served(self._schedule)
        # As many as have about so many tokens, evenly over the run.
        whole = sum(each.query.new_tokens for each in run.served)
        count = max(1, min(len(run.served), tokens * len(run.served) // whole))
        places = np.linspace(0, len(run.served) - 1, count).round().astype(int)
        chosen = [run.served[place] for place in places.tolist()]
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
        """One run: each query must have its tokens, and those of some must be what the engine itself predicts. Raises
        OptiGPUError where no request was answered."""
        run, prompts = self._served(self._schedule)
        self._figures(self._schedule, run)
        self._require_answers()
        problem = self._problem(run, prompts)
        self._grew.clear()
        return Check(run.seconds, problem, {"scenario": self._facts.scenario})

    def observe(self) -> None:
        load = self._schedule.draw(self._source)
        self._runtime.observe(np.array([self._prompts(load)[0]]))

    def described(self) -> Mapping[str, Sequence[float]]:
        return {"wait_s": self.loaded().ttft_s}

    def fresh(self, seed: int) -> Self:
        self._source = np.random.default_rng(seed)
        return self

    def _served(self, schedule: Schedule) -> tuple[Run, Sequence[Sequence[int]]]:
        load = schedule.draw(self._source)
        prompts = self._prompts(load)
        return self._server().run(load, prompts), prompts

    def _prompts(self, load: Load) -> list[list[int]]:
        """Random tokens, after those that a run's prompts have in common."""
        lengths = (query.prompt_tokens for query in load.queries)
        own = [self._tokens(self._source, length) for length in lengths]
        common = self._tokens(self._source, self._shared) if self._shared else []
        is_told = any(query.blocks or query.prompt for query in load.queries)
        run = int(self._source.integers(2**31)) if is_told else 0
        found = []
        for query, prompt in zip(load.queries, own, strict=True):
            blocks = [self._tokens(np.random.default_rng((run, each)), BLOCK_TOKENS) for each in query.blocks]
            # The first token of a conversation is another one in each run: no cache of prompts answers it.
            told = [run % self._runtime.facts.vocabulary, *query.prompt[1:]] if query.prompt else []
            begin = [*common, *chain(*blocks), *told][: len(prompt)]
            found.append([*begin, *prompt[len(begin) :]])
        return found

    def _tokens(self, source: np.random.Generator, length: int) -> list[int]:
        tokens: list[int] = source.integers(self._runtime.facts.vocabulary, size=length).tolist()
        return tokens

    def _alone(self, query: Query, prompt: Sequence[int]) -> tuple[int, ...]:
        if isinstance(self._runtime, StreamingRuntime):
            load = Load((replace(query, number=0, arrival_s=0.0, after=None),))
            return self._server().run(load, [[*prompt]]).served[0].tokens
        found: list[int] = self._runtime.generate(np.array([prompt]), query.new_tokens).tokens[0].tolist()
        return tuple(found)

    def _figures(self, schedule: Schedule, run: Run) -> Mapping[str, float]:
        is_open = schedule.scenario in OPEN
        self._last = figures_of(run, self._limits, is_open=is_open)
        self._grew.append(self._last.saturated)
        answered = self._last.output_tokens
        return {"tokens_per_s": sum(answered) / run.seconds, "requests_per_s": len(answered) / run.seconds}

    def _require_answers(self) -> None:
        """Without one there is nothing to time, and the next run would fail as this one did."""
        if not self.loaded().sent_s:
            raise OptiGPUError(self._failures())

    def _failures(self) -> str:
        last = self.loaded()
        return f"{last.failed} of {last.queries} requests failed: {last.error}"

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


Rate = Annotated[float, Field(ge=0.001, le=100_000)]
PromptTokens = Annotated[int, Field(ge=1, le=131072)]
NewTokens = Annotated[int, Field(ge=2, le=131072)]
Limit = Annotated[float, Field(gt=0, le=86_400)]
LONGEST_TRACE = 500_000
"""Characters, some 8,000 lines: the trace is part of the job, and so of its digest."""
NOT_OF_A_TRACE = ("queries", "prompt_tokens", "prompt_tokens_most", "new_tokens", "new_tokens_most")


class Serve(Workload):
    """Greedy decoding of requests that arrive by a scenario: Server, Offline and SingleStream as MLPerf names them.

    One timed request is a run of `queries` of them, which begins and ends with an empty server. Each run draws other
    moments and prompts. Latencies count from the moment at which a query was to be sent.
    Source: Reddi et al., MLPerf Inference Benchmark, 2019, arXiv:1911.02549.
    """

    summary: ClassVar[str] = "requests that arrive over time: latencies, goodput and the queue under load"
    primary: ClassVar[str] = "tokens_per_s"
    metrics: ClassVar[tuple[str, ...]] = ("tokens_per_s", "requests_per_s")
    of_queries: ClassVar[tuple[str, ...]] = QUERY_METRICS
    of_loads: ClassVar[tuple[str, ...]] = ("goodput_per_s", "queue_length")
    lists: ClassVar[tuple[str, ...]] = ("rates",)

    kind: Literal["serve"] = "serve"
    scenario: ScenarioName = Field(
        "Server",
        description="Server: requests arrive by chance at a rate. Offline: all at once. SingleStream: one after the "
        "other. closed: clients that each send one after the other. trace: as a trace says.",
    )
    rates: tuple[Rate, ...] | None = Field(
        (4.0,),
        min_length=1,
        max_length=16,
        description="Of Server: requests a second; one variant for each rate.",
    )
    clients: int | None = Field(None, ge=1, le=1024, description="Of closed: how many clients there are.")
    trace: str | None = Field(
        None,
        min_length=1,
        max_length=LONGEST_TRACE,
        description="Of trace: a JSON line of arrival_s, prompt_tokens and output_tokens for each request, or those of "
        "Mooncake's or GuideLLM's files; or ShareGPT's conversations.",
    )
    queries: int | None = Field(16, ge=1, le=20_000, description="How many requests a run has.")
    prompt_tokens: PromptTokens | None = Field(
        64, description="Length of each prompt in tokens, or the least."
    )
    prompt_tokens_most: PromptTokens | None = Field(
        None, description="The longest prompt, where lengths are drawn; null: all have one length."
    )
    shared_tokens: PromptTokens | None = Field(
        None,
        description="So many tokens at its beginning each prompt of a run has in common with all others.",
    )
    new_tokens: NewTokens | None = Field(32, description="How many tokens to decode for each, or the least.")
    new_tokens_most: NewTokens | None = Field(
        None, description="The most tokens to decode, where their number is drawn; null: all have one."
    )
    slots: int = Field(
        8, ge=1, le=1024, description="How many sequences an engine in the process decodes at once."
    )
    block_tokens: int = Field(16, ge=1, le=4096, description="Tokens in a block of its key-value cache.")
    ttft_s: Limit | None = Field(None, description="Limit of the time to first token, for the goodput.")
    tpot_s: Limit | None = Field(
        None, description="Limit of the time per token after the first, for the goodput."
    )

    @model_validator(mode="before")
    @classmethod
    def _of_the_scenario(cls, given: object) -> object:
        """Fields of other scenarios are null by themselves."""
        if not isinstance(given, Mapping):
            return given
        scenario, rates = given.get("scenario", "Server"), given.get("rates")
        found = {} if scenario == "Server" else {"rates": None}
        found |= dict.fromkeys(NOT_OF_A_TRACE) if scenario == "trace" else {}
        found |= given
        # JSON's array has become a list by now, which a strict reader takes for no tuple.
        return found | {"rates": tuple(rates)} if isinstance(rates, list) else found

    @field_validator("trace")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            as_value_error(read_trace, text)
        return text

    @field_validator("rates")
    @classmethod
    def _growing(cls, rates: tuple[float, ...] | None) -> tuple[float, ...] | None:
        if rates and any(later <= earlier for earlier, later in pairwise(rates)):
            raise ValueError("name each rate once, the lowest first: a sweep stops where the queue grows")
        return rates

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        for scenario, name in (("Server", "rates"), ("closed", "clients"), ("trace", "trace")):
            if self.scenario == scenario and getattr(self, name) is None:
                raise ValueError(f"the scenario {scenario} needs {name}; name it")
            if self.scenario != scenario and getattr(self, name) is not None:
                raise ValueError(f"{name} is of the scenario {scenario}; leave it out, or ask for that one")
        for name in NOT_OF_A_TRACE:
            if self.scenario == "trace" and getattr(self, name) is not None:
                raise ValueError(f"a trace says {name} itself; leave it out")
            if self.scenario != "trace" and getattr(self, name) is None and not name.endswith("_most"):
                raise ValueError(f"the scenario {self.scenario} needs {name}; name it")
        if self.shared_tokens and self.shared_tokens > (self.prompt_tokens or 0):
            raise ValueError(
                "shared_tokens is more than prompt_tokens; a trace's hash_ids say what is shared"
            )
        for least, most in (("prompt_tokens", "prompt_tokens_most"), ("new_tokens", "new_tokens_most")):
            if getattr(self, most) is not None and getattr(self, most) < getattr(self, least):
                raise ValueError(f"{most} is less than {least}; it must be as many or more")
        return self

    def identity(self) -> dict[str, Any]:
        found = super().identity()
        return {name: value for name, value in found.items() if name != "shared_tokens" or value is not None}

    @property
    def label(self) -> str:
        return ", ".join(f"{rate:g}/s" for rate in self.rates or ())

    @property
    def generated_tokens(self) -> int | None:
        if self.trace:
            queries = read_trace(self.trace)
            return None if any(each.texts for each in queries) else sum(each.new_tokens for each in queries)
        return None if self.new_tokens_most else (self.queries or 0) * (self.new_tokens or 0)

    def check(self, model: ModelFacts) -> str | None:
        return exceeds_context(model, self.schedule.longest, "the longest prompt and its new tokens")

    def prepare(self, runtime: DecodingRuntime) -> ServingRequest:
        """Makes the queue before the engine, or the connections to the server. Raises UnsupportedError where the
        engine cannot let sequences join and leave."""
        schedule = self._encoded(runtime)
        limits = Limits(self.ttft_s, self.tpot_s)
        facts = LoadFacts(
            scenario=self.scenario,
            rate=self.rates[0] if self.rates else None,
            clients=self.clients,
            queries=schedule.count,
        )
        if isinstance(runtime, StreamingRuntime):
            streaming = partial(Streaming, runtime.streams)
            return ServingRequest(runtime, streaming, schedule, limits, facts, self.shared_tokens or 0)
        if not isinstance(runtime, ServingRuntime):
            raise UnsupportedError(
                "This engine decodes whole batches and lets no sequence join or leave; measure generate or "
                "batch_sweep, or ask for the backend torch or endpoint."
            )
        slots = partial(runtime.slots, self.slots, schedule.longest, self.block_tokens)
        slots()
        facts = facts.model_copy(update={"slots": self.slots, "block_tokens": self.block_tokens})
        return ServingRequest(
            runtime, lambda: Batching(slots()), schedule, limits, facts, self.shared_tokens or 0
        )

    def _encoded(self, runtime: DecodingRuntime) -> Schedule:
        """With the lengths of texts. Raises UnsupportedError where there is no tokenizer, or one is too long."""
        schedule = self.schedule
        if not any(query.texts for query in schedule.trace):
            return schedule
        if not isinstance(runtime, EncodingRuntime):
            raise UnsupportedError(
                "The trace holds texts, and this engine has no tokenizer; give lengths in tokens."
            )
        encode = cache(runtime.encode)
        schedule = replace(schedule, trace=tuple(each.encoded(encode) for each in schedule.trace))
        if problem := exceeds_context(runtime.facts, schedule.longest, "the longest conversation"):
            raise UnsupportedError(problem)
        return schedule

    @property
    def schedule(self) -> Schedule:
        if self.trace:
            trace = read_trace(self.trace)
            return Schedule("trace", len(trace), (1, 1), (2, 2), trace=trace)
        assert self.queries is not None
        assert self.prompt_tokens is not None
        assert self.new_tokens is not None
        return Schedule(
            scenario=self.scenario,
            count=self.queries,
            prompt_tokens=(self.prompt_tokens, self.prompt_tokens_most or self.prompt_tokens),
            new_tokens=(self.new_tokens, self.new_tokens_most or self.new_tokens),
            rate=self.rates[0] if self.rates else 1.0,
            clients=self.clients or 1,
        )
