"""Completions of a model that this process runs, with their log-probabilities in the words of two kinds of server."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optigpu.quality.divergence import log_probabilities
from tests.servers.completions import JSON, Asked, Behave, Reply, whole

Logits = Callable[[Sequence[int]], np.ndarray]
"""The logits after each token of a prompt, [length, vocabulary]."""
Write = Callable[[int], str]
"""The text of a token."""


def tops(logits: np.ndarray, most: int) -> dict[int, float]:
    """The most likely tokens with their log-probabilities, as float32 has them."""
    logs = log_probabilities(logits)
    return {int(token): float(np.float32(logs[token])) for token in np.argsort(-logs)[:most]}


def telling(name: str, logits: Logits, write: Write, most: int) -> Behave:
    """A server that streams, and tells log-probabilities of a prompt, of at most so many tokens at each position: by
    vLLM's `prompt_logprobs` or by OpenAI's `echo`."""

    async def behave(asked: Asked, reply: Reply) -> None:
        count = asked.body.get("logprobs" if asked.body.get("echo") else "prompt_logprobs")
        prompt = asked.body["prompt"]
        if asked.body.get("stream"):
            await whole(asked, reply)
        elif not isinstance(count, int) or name not in asked.body or not isinstance(prompt, list):
            await reply.page(200, JSON, '{"choices": [{"text": "a", "logprobs": null}]}')
        elif count > most:
            await reply.page(400, JSON, json.dumps({"error": {"message": f"at most {most}"}}))
        else:
            choice = (_by_id if name == "prompt_logprobs" else _by_text)(prompt, logits(prompt), write, count)
            await reply.page(200, JSON, json.dumps({"choices": [choice]}))

    return behave


def _by_id(prompt: Sequence[int], logits: np.ndarray, write: Write, count: int) -> dict[str, Any]:
    found: list[Any] = [None]
    for token, row in zip(prompt[1:], logits, strict=False):
        logs = tops(row, count) | {token: float(log_probabilities(row)[token])}
        found.append({str(i): {"logprob": log, "decoded_token": write(i)} for i, log in logs.items()})
    return {"prompt_logprobs": found}


def _by_text(prompt: Sequence[int], logits: np.ndarray, write: Write, count: int) -> dict[str, Any]:
    own = [float(log_probabilities(row)[token]) for token, row in zip(prompt[1:], logits, strict=False)]
    texts = [{write(token): log for token, log in tops(row, count).items()} for row in logits[:-1]]
    told = {"tokens": [write(token) for token in prompt], "token_logprobs": [None, *own]}
    return {"logprobs": told | {"top_logprobs": [None, *texts]}}
