"""serve: requests that arrive over time at an engine with a queue, as servers see them."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from optigpu.backends.runtime import DecodingRuntime
from optigpu.documents.load import QUERY_METRICS, LoadFacts, ScenarioName
from optigpu.documents.shapes import ModelFacts
from optigpu.load.figures import Limits
from optigpu.load.queries import Schedule, read_trace
from optigpu.vocabulary import SpecError
from optigpu.workloads.base import Workload
from optigpu.workloads.requests.decoding import exceeds_context
from optigpu.workloads.requests.serving import Serving, ServingRequest

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
        description="Of trace: a JSON line of arrival_s, prompt_tokens and output_tokens for each request.",
    )
    queries: int | None = Field(16, ge=1, le=20_000, description="How many requests a run has.")
    prompt_tokens: PromptTokens | None = Field(
        64, description="Length of each prompt in tokens, or the least."
    )
    prompt_tokens_most: PromptTokens | None = Field(
        None, description="The longest prompt, where lengths are drawn; null: all have one length."
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
        try:
            if text is not None:
                read_trace(text)
        except SpecError as error:
            raise ValueError(str(error)) from None
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
        for least, most in (("prompt_tokens", "prompt_tokens_most"), ("new_tokens", "new_tokens_most")):
            if getattr(self, most) is not None and getattr(self, most) < getattr(self, least):
                raise ValueError(f"{most} is less than {least}; it must be as many or more")
        return self

    def expand(self) -> tuple[Workload, ...]:
        """One workload for each rate."""
        if self.rates is None:
            return (self,)
        return tuple(self.model_copy(update={"rates": (rate,)}) for rate in self.rates)

    @property
    def label(self) -> str:
        """For example "4/s"; several rates are joined while they are not expanded."""
        return ", ".join(f"{rate:g}/s" for rate in self.rates or ())

    @property
    def generated_tokens(self) -> int | None:
        """Those of a run; None where their number is drawn."""
        if self.trace:
            return sum(query.new_tokens for query in read_trace(self.trace))
        return None if self.new_tokens_most else (self.queries or 0) * (self.new_tokens or 0)

    def check(self, model: ModelFacts) -> str | None:
        """The longest prompt and continuation must fit the model's context."""
        return exceeds_context(model, self.schedule.longest, "the longest prompt and its new tokens")

    def prepare(self, runtime: DecodingRuntime) -> ServingRequest:
        """Makes the queue before the engine, or the connections to the server.

        Raises UnsupportedError where the engine cannot let sequences join and leave.
        """
        facts = LoadFacts(
            scenario=self.scenario,
            rate=self.rates[0] if self.rates else None,
            clients=self.clients,
            queries=self.schedule.count,
        )
        serving = Serving(self.slots, self.block_tokens, Limits(self.ttft_s, self.tpot_s), facts)
        return ServingRequest.prepared(runtime, self.schedule, serving)

    @property
    def schedule(self) -> Schedule:
        """What its runs are made of, of the first rate."""
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
