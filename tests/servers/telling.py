"""Completions of a model that this process runs, with their log-probabilities in the words of each kind of server."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from optigpu.quality.divergence import log_probabilities
from tests.servers.completions import JSON, Asked, Behave, Reply, page, whole

Logits = Callable[[Sequence[int]], np.ndarray]
"""The logits after each token of a prompt, [length, vocabulary]."""
Write = Callable[[int], str]
"""The text of a token."""


def tops(logits: np.ndarray, most: int) -> dict[int, float]:
    """The most likely tokens with their log-probabilities, as float32 has them."""
    logs = log_probabilities(logits)
    return {int(token): float(np.float32(logs[token])) for token in np.argsort(-logs)[:most]}


class Telling:
    """Each method is a behaviour of /v1/completions or /completion; it takes at most `most` tokens at a position."""

    def __init__(self, logits: Logits, write: Write, most: int) -> None:
        self._logits, self._write, self._most = logits, write, most

    async def prompt_logprobs(self, asked: Asked, reply: Reply) -> None:
        """vLLM's: all positions of a prompt, by id; the token that is there comes with them."""
        most = await self._taken(asked.body.get("prompt_logprobs"), asked, reply)
        if not most:
            return
        prompt, logits = self._read(asked)
        found: list[Any] = [None]
        for token, row in zip(prompt[1:], logits, strict=False):
            logs = tops(row, most) | {token: float(log_probabilities(row)[token])}
            found.append(
                {str(i): {"logprob": log, "decoded_token": self._write(i)} for i, log in logs.items()}
            )
        await self._answer(reply, {"choices": [{"text": "a", "prompt_logprobs": found}]})

    async def echo(self, asked: Asked, reply: Reply) -> None:
        """OpenAI's older completions, by text."""
        most = await self._taken(asked.body.get("logprobs") if asked.body.get("echo") else 0, asked, reply)
        if not most:
            return
        prompt, logits = self._read(asked)
        own = [float(log_probabilities(row)[token]) for token, row in zip(prompt[1:], logits, strict=False)]
        told = {
            "tokens": [self._write(token) for token in prompt],
            "token_logprobs": [None, *own],
            "top_logprobs": [None, *(self._texts(row, most) for row in logits[:-1])],
        }
        await self._answer(reply, {"choices": [{"text": "a", "logprobs": told}]})

    async def n_probs(self, asked: Asked, reply: Reply) -> None:
        """llama-server's own: the token that follows, by id."""
        _, logits = self._read(asked)
        asked_for = asked.body["n_probs"]
        assert isinstance(asked_for, int)
        found = [
            {"id": token, "token": self._write(token), "logprob": log}
            for token, log in tops(logits[-1], asked_for).items()
        ]
        await self._answer(reply, {"completion_probabilities": [{**found[0], "top_logprobs": found}]})

    async def logprobs(self, asked: Asked, reply: Reply) -> None:
        """Completions without an echo: the token that follows, by text."""
        most = await self._taken(0 if asked.body.get("echo") else asked.body.get("logprobs"), asked, reply)
        if not most:
            return
        texts = self._texts(self._read(asked)[1][-1], most)
        first = next(iter(texts))
        told = {"tokens": [first], "token_logprobs": [texts[first]], "top_logprobs": [texts]}
        await self._answer(reply, {"choices": [{"text": first, "logprobs": told}]})

    def pages(self, name: str) -> Mapping[str, Behave]:
        """A server that streams, and tells in that way alone."""
        behave: Behave = getattr(self, name)

        async def completions(asked: Asked, reply: Reply) -> None:
            await (whole if asked.body.get("stream") else behave)(asked, reply)

        async def none(asked: Asked, reply: Reply) -> None:
            if asked.body.get("stream"):
                await whole(asked, reply)
            else:
                await self._answer(reply, {"choices": [{"text": "a", "logprobs": None}]})

        return (
            {"/v1/completions": none, "/completion": behave}
            if name == "n_probs"
            else {"/v1/completions": completions}
        )

    def _read(self, asked: Asked) -> tuple[list[int], np.ndarray]:
        prompt = asked.body["prompt"]
        assert isinstance(prompt, list)
        return prompt, self._logits(prompt)

    def _texts(self, row: np.ndarray, most: int) -> dict[str, float]:
        return {self._write(token): log for token, log in tops(row, most).items()}

    async def _taken(self, most: object, asked: Asked, reply: Reply) -> int:
        """The number that is asked for; 0 where it was refused."""
        if isinstance(most, int) and 0 < most <= self._most:
            return most
        await page(400, JSON, json.dumps({"error": {"message": f"at most {self._most}, not {most}"}}))(
            asked, reply
        )
        return False

    async def _answer(self, reply: Reply, document: object) -> None:
        await reply.page(200, JSON, json.dumps(document))
