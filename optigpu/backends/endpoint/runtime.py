"""A server as what workloads and meters ask of.

The worker's settings say which servers may be asked, and with which keys: a job comes from somebody else, and names any
address.

Of a server's own /metrics the few numbers are read that say how loaded it is.
"""

import asyncio
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import httpx
import numpy as np

from optigpu.backends.base import Order
from optigpu.backends.endpoint.client import TIME_LIMIT_S, Completions, Server, ServerAbout, about, page_of
from optigpu.backends.endpoint.logprobs import (
    CHAT,
    WAYS,
    Ask,
    Vocabulary,
    Way,
    telling_of,
)
from optigpu.backends.endpoint.prompts import Dialect, Speller, spoken, tokenizer_of
from optigpu.backends.engine import DecodingEngine
from optigpu.backends.runtime import Generation, Ids, MemoryPeaks, Profile
from optigpu.backends.serving import Streamed
from optigpu.documents.endpoints import Endpoint, parse_endpoint
from optigpu.documents.facts import ModelFacts, WeightFacts
from optigpu.http_clients import direct_http_client, trusted_for
from optigpu.models.described import decoder_facts
from optigpu.quality.told import Telling
from optigpu.techniques.base import Notes
from optigpu.vocabulary import OptiGPUError, UnsupportedError

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{.*\})?[ \t]+(\S+)", re.MULTILINE)
_NAMES: Mapping[str, tuple[str, ...]] = {
    "running": (
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "llamacpp:requests_processing",
        "tgi_batch_current_size",
    ),
    "waiting": (
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "llamacpp:requests_deferred",
        "tgi_queue_size",
    ),
    "cache_usage": (
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
        "llamacpp:kv_cache_usage_ratio",
    ),
    "preemptions": ("vllm:num_preemptions_total", "sglang:num_retracted_reqs"),
}
"""The names that servers have for each number: how many requests run and wait, the share of the key-value cache in use,
and how often a request lost its place in that cache since the server began."""


def metrics_in(text: str) -> dict[str, float | None] | None:
    """A server's own counts in a page in Prometheus's text form, summed over its models, null where it does not say;
    None where it has none that are known here."""
    sums: dict[str, float] = {}
    for name, number in _SAMPLE.findall(text):
        with suppress(ValueError):
            value = float(number)
            if abs(value) < float("inf"):
                sums[name] = sums.get(name, 0.0) + value
    known = {
        field: next((sums[name] for name in names if name in sums), None) for field, names in _NAMES.items()
    }
    return None if set(known.values()) == {None} else known


UNTOLD = -1
"""In the place of a token whose id the server does not tell."""
PROBED_TOKENS = 8
"""Of the prompt that finds out what a server takes."""
HOSTS, KEYS = "OPTIGPU_ENDPOINT_HOSTS", "OPTIGPU_ENDPOINT_KEYS"
"""The environment variables: HOST or HOST:PORT, and HOST:PORT=KEY, separated by commas."""


def prepared(order: Order, progress: Callable[[str], None]) -> "EndpointRuntime":
    """Finds out how the server is to be asked.

    Raises UnsupportedError for one that the worker's settings do not allow, that does not answer, or that does not
    serve the model.
    """
    endpoint = parse_endpoint(str(order.endpoint))
    require_allowed(endpoint)
    facts = decoder_facts(order.reference)
    tokenizer = tokenizer_of(order.reference)
    progress("asking the server")
    runner = asyncio.Runner()
    prompt = np.random.default_rng(order.seed).integers(facts.vocabulary, size=PROBED_TOKENS).tolist()
    spelling = Speller(tokenizer) if tokenizer else None

    async def ask() -> tuple[ServerAbout, Server, Dialect]:
        said, server = await _server(endpoint, order.answer_s)
        return said, *await spoken(server, prompt, spelling)

    said, server, dialect = runner.run(ask())
    words = Vocabulary(tokenizer, facts.vocabulary)
    runtime = EndpointRuntime(order, endpoint, server, facts, runner, words)
    runtime.notes.record(
        decode_loop="server",
        versions={said.software or "server": said.version} if said.version else {},
        server=said.model_dump(mode="json") | {"asked_in": "chat; " * server.chat + dialect.label},
        prompts="each prompt's first token is another one in each request, so that no server answers from a cache of "
        "prompts",
    )
    return runtime


async def _server(endpoint: Endpoint, answer_s: float) -> tuple[ServerAbout, Server]:
    async with _pages(endpoint) as http:
        said = await about(http, endpoint.api, endpoint.origin)
    model, key = _served_model(endpoint, said), key_of(endpoint)
    return said, Server(endpoint.url, model, key, time_limit_s=answer_s, chat=endpoint.is_chat)


def _served_model(endpoint: Endpoint, said: ServerAbout) -> str:
    if endpoint.model:
        return endpoint.model
    if len(said.models) == 1:
        return said.models[0]
    known = ", ".join(said.models[:10])
    raise UnsupportedError(
        f"{endpoint.url} lists {known or 'no model'}; name the one that it serves: {endpoint.url}#MODEL."
    )


def _pages(endpoint: Endpoint) -> httpx.AsyncClient:
    key = key_of(endpoint)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return direct_http_client(trusted_for(endpoint.url), headers=headers, timeout=TIME_LIMIT_S)


class EndpointRuntime(DecodingEngine):
    """A DecodingRuntime of a server: the sequences of a batch are as many requests at once."""

    no_logits = "A server gives no logits; its quality is known by the log-probabilities that it returns."

    def __init__(
        self,
        order: Order,
        endpoint: Endpoint,
        server: Server,
        facts: ModelFacts,
        runner: asyncio.Runner,
        words: Vocabulary,
    ) -> None:
        """`runner` is where the server is asked from now on."""
        self.device, self.seed, self.facts = order.device, order.seed, facts
        self.notes = Notes()
        self._endpoint, self._model = endpoint, str(order.model)
        self._runner, self._server = runner, server
        self._completions = self.streams()
        self._requests = 0
        self._words, self._answer_s = words, order.answer_s
        self._tellings: dict[tuple[int | None, str | None, bool], Telling] = {}
        self._others: list[Completions] = []

    @property
    def elsewhere(self) -> str | None:
        """A server on loopback works on this machine."""
        if self._endpoint.is_loopback:
            return None
        return (
            f"The server works on another machine ({self._endpoint.host}), whose counters are not read here."
        )

    def generate(self, prompt: Ids, new_tokens: int) -> Generation:
        """As many streams at once as the batch has sequences.

        Raises OptiGPUError for a stream that is not whole, and for a prompt that the server counts otherwise.
        """
        unseen = prompt.copy()  # as it is in the first request, then with another first token each time
        unseen[:, 0] = (prompt[:, 0] + self._requests) % self.facts.vocabulary
        self._requests += 1

        async def ask() -> list[Streamed]:
            return await asyncio.gather(
                *(self._completions.stream(row, new_tokens) for row in unseen.tolist())
            )

        batch = self._runner.run(ask())
        self._require_whole(batch, prompt.shape[1])
        self._remember(prompt.shape[0], prompt.shape[1] + new_tokens)
        untimed = next((each.untimed for each in batch if each.untimed), None)
        if untimed:
            self.notes.record(token_times=untimed)
        tokens = [each.ids or (UNTOLD,) * new_tokens for each in batch]
        return Generation(np.array(tokens, np.int64), gaps_of(batch))

    def telling(self, most: int | None, reference: str | None = None, *, by_chat: bool = False) -> Telling:
        """Asks the first time only."""
        found = self._tellings.get((most, reference, by_chat))
        if found is None:
            prompt = np.random.default_rng(self.seed).integers(self.facts.vocabulary, size=PROBED_TOKENS)
            ways = (CHAT,) if by_chat else WAYS
            found = telling_of(self._asking(reference), self._words, prompt.tolist(), most, ways)
            self._tellings[most, reference, by_chat] = found
        return found

    def _asking(self, reference: str | None) -> Ask:
        endpoint, completions = self._endpoint, self._completions
        if reference is not None:
            endpoint = parse_endpoint(reference)
            require_allowed(endpoint)
            completions = Completions(self._runner.run(_server(endpoint, self._answer_s))[1])
            self._others.append(completions)

        def ask(way: Way, body: Mapping[str, object]) -> bytes:
            return self._runner.run(completions.answer(way.address(endpoint), body))

        return ask

    def encode(self, text: str) -> list[int]:
        """By the model's tokenizer on this machine. Raises UnsupportedError without one."""
        ids: list[int] = self._words.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def start_ids(self) -> list[int]:
        """What the tokenizer adds before a text."""
        ids: list[int] = self._words.tokenizer.encode("a").ids
        return ids[: ids.index(self.encode("a")[0])]

    def streams(self) -> Completions:
        """New connections for a load, closed with the context that they are."""
        return Completions(self._server)

    def weights(self) -> WeightFacts:
        """Unknown: only the server has them."""
        reason = "The server holds the weights, and does not say which they are."
        return WeightFacts(reasons=dict.fromkeys(("hash", "revision"), reason))

    def peak_memory(self, run: Callable[[], object]) -> MemoryPeaks:
        """Neither the accelerator's nor the host's: this process only asks."""
        reason = "A server has memory of its own, which its interface does not tell."
        return self._no_peaks(reason, "host_peak_bytes")

    def profile(self, run: Callable[[], object], steps: int, trace: Path) -> Profile:
        """A server names no kernels."""
        raise UnsupportedError("A server does not tell which kernels it runs; leave the meter profile out.")

    def observe(self, inputs: object) -> None:
        """What the server counts of itself at its /metrics."""

        async def page() -> str | None:
            async with _pages(self._endpoint) as http:
                return await page_of(http, f"{self._endpoint.origin}/metrics")

        self.notes.record(server_metrics=metrics_in(self._runner.run(page()) or ""))

    def close(self) -> None:
        """Closes the connections."""
        for each in (self._completions, *self._others):
            self._runner.run(each.close())
        self._runner.close()

    def _require_whole(self, batch: Sequence[Streamed], prompt_tokens: int) -> None:
        for each in batch:
            if each.error is not None:
                raise OptiGPUError(each.error)
            if each.prompt_tokens not in (None, prompt_tokens):
                raise OptiGPUError(
                    f"The server counted {each.prompt_tokens} tokens of a prompt of {prompt_tokens}: its tokenizer is "
                    f"not that of {self._model}; name the model that it serves."
                )


def gaps_of(batch: Sequence[Streamed]) -> list[float]:
    """Seconds from the request's start to the first token of all sequences, then between successive ones.

    A token counts when the last sequence has it. Where chunks held several tokens, each gap is that of a chunk of the
    sequence that ended last, and tokens that came with another one have a gap of 0. Raises OptiGPUError where all
    tokens came at once.
    """
    started_s = min(each.sent_s for each in batch)
    timed = [each.token_times_s for each in batch if each.token_times_s is not None]
    if len(timed) == len(batch):
        marks_s = [max(times_s) for times_s in zip(*timed, strict=True)]
    else:
        first_s = max(each.chunk_times_s[0] for each in batch)
        slowest = max(batch, key=lambda each: each.chunk_times_s[-1])
        marks_s = [first_s, *(time_s for time_s in slowest.chunk_times_s if time_s > first_s)]
    if len(marks_s) < 2:
        raise OptiGPUError(
            "The server sent all tokens at once, so prefill and decode cannot be told apart; turn on its streaming."
        )
    gaps_s = [after - before for before, after in pairwise([started_s, *marks_s])]
    return gaps_s + [0.0] * (batch[0].tokens - len(gaps_s))


def require_allowed(endpoint: Endpoint) -> None:
    """Raises UnsupportedError for a server that the worker's settings do not allow; without any, all but loopback."""
    named = os.environ.get(HOSTS)
    if named is None:
        if endpoint.is_loopback:
            return
        raise UnsupportedError(
            f"This worker connects only to servers on its own machine, not to {endpoint.place}; set {HOSTS} to "
            f"{endpoint.place} for the worker."
        )
    if not {endpoint.host, endpoint.place} & set(_items(named)):
        raise UnsupportedError(
            f"This worker may not connect to {endpoint.place}: {HOSTS} allows {named.strip() or 'no server'}; "
            "add it there."
        )


def key_of(endpoint: Endpoint) -> str | None:
    """The key that this worker has for the server. Raises UnsupportedError for one that no header can hold."""
    for item in _items(os.environ.get(KEYS, "")):
        place, _, key = item.partition("=")
        if place.strip() == endpoint.place:
            if key and key.isascii() and key.isprintable():
                return key
            raise UnsupportedError(
                f"The key of {endpoint.place} in {KEYS} must be printable ASCII; write {endpoint.place}=KEY."
            )
    return None


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]
