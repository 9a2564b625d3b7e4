"""Requests by a native decoder: many greedy tokens of a call, or the logits of one step after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers.generation.streamers import BaseStreamer

from optigpu.ops.decode.calls import ProgramDecoder
from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part
from optigpu.techniques.decoding.native_decode.request import NotNativeError, Request
from optigpu.vocabulary import UnsupportedError

TOKENS_A_CALL = 16
"""With end tokens the decoder stops to look for one after so many, and at most one fewer are decoded in vain."""


class Steps(Protocol):
    """Steps of all sequences at once; each gives their next tokens' logits, float32 [batch, vocabulary]."""

    def first(self) -> torch.Tensor:
        """After the prompts."""

    def next(self, chosen: torch.Tensor) -> torch.Tensor:
        """After one more token of each, int64 [batch]."""


def stepping(decoder: ProgramDecoder, request: Request, device: torch.device) -> Steps:
    """The steps of a request, in an empty cache. Raises NotNativeError where the decoder cannot take them."""
    if len(set(request.lengths)) == 1:
        _begin(decoder, len(request.lengths), request.lengths[0] + request.limit)
        return _OneLength(decoder, request.prompts(device)[:, -request.lengths[0] :])
    if not isinstance(decoder, CpuDecoder):
        raise NotNativeError("prompts of several lengths with more than greedy decoding")
    _begin(decoder, len(request.lengths), max(request.lengths) + request.limit)
    return _SeveralLengths(decoder, request)


class _OneLength:
    """prompts: int64 [batch, length] without padding."""

    def __init__(self, decoder: ProgramDecoder, prompts: torch.Tensor) -> None:
        self._decoder = decoder
        self._prompts = prompts

    def first(self) -> torch.Tensor:
        return self._decoder.extend(self._prompts)

    def next(self, chosen: torch.Tensor) -> torch.Tensor:
        return self._decoder.extend(chosen.to(self._prompts.device).unsqueeze(1))


class _SeveralLengths:
    """Each sequence at a position of its own, as if it were alone."""

    def __init__(self, decoder: CpuDecoder, request: Request) -> None:
        self._decoder = decoder
        self._request = request
        self._positions = [0] * len(request.lengths)

    def first(self) -> torch.Tensor:
        rows = self._request.input_ids.tolist()
        return self._advance([row[-length:] for row, length in zip(rows, self._request.lengths, strict=True)])

    def next(self, chosen: torch.Tensor) -> torch.Tensor:
        return self._advance([[token] for token in chosen.tolist()])

    def _advance(self, tokens: Sequence[list[int]]) -> torch.Tensor:
        self._decoder.advance([Part(row, self._positions[row], some, 1) for row, some in enumerate(tokens)])
        self._positions = [
            position + len(some) for position, some in zip(self._positions, tokens, strict=True)
        ]
        return self._decoder.logits


@dataclass(frozen=True)
class Done:
    """Prompts and new tokens, int64 [batch, length]; float32 [batch, vocabulary] of each step where they are kept."""

    sequences: torch.Tensor
    scores: tuple[torch.Tensor, ...]
    logits: tuple[torch.Tensor, ...]


def stepwise(
    steps: Steps,
    request: Request,
    processors: Callable[..., torch.Tensor],
    criteria: Callable[..., torch.Tensor],
    streamer: BaseStreamer | None,
) -> Done:
    """A token of each sequence at a time, chosen as transformers' loop chooses it, until all have ended."""
    ids = request.input_ids
    running = torch.ones(ids.shape[0], dtype=torch.bool, device=ids.device)
    scores: tuple[torch.Tensor, ...] = ()
    logits: tuple[torch.Tensor, ...] = ()
    found = steps.first()
    while True:
        raw = found.to(ids.device, copy=True)
        score = processors(ids, raw)
        scores += (score,) if request.keeps_scores else ()
        logits += (raw,) if request.keeps_logits else ()
        chosen = _choose(score, request.is_sampled)
        if request.ends is not None:
            chosen = chosen.where(running, request.pad)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        if streamer is not None:
            streamer.put(chosen.cpu())
        running = running & ~criteria(ids, scores if request.keeps_scores else None)
        if not bool(running.any()):
            break
        found = steps.next(chosen)
    if streamer is not None:
        streamer.end()
    return Done(ids, scores, logits)


def _choose(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """int64 [batch] of float32 [batch, vocabulary]."""
    if is_sampled:
        return torch.multinomial(scores.softmax(dim=-1), num_samples=1).squeeze(1)
    return scores.argmax(dim=-1)


def greedy(decoder: ProgramDecoder, request: Request, device: torch.device) -> Done:
    """A plain request, many tokens of a call; where prompts differ in length, those of one length at a time.

    Raises NotNativeError where memory does not suffice.
    """
    prompts, batch = request.prompts(device), len(request.lengths)
    found = prompts.new_full((batch, request.limit), request.pad)
    longest = 0
    for length in sorted(set(request.lengths)):
        rows = [row for row in range(batch) if request.lengths[row] == length]
        done = 0
        for part in _parts(decoder, prompts[rows, -length:], request):
            found[rows, done : done + part.shape[1]] = part
            done += part.shape[1]
        longest = max(longest, done)
    tokens = found[:, :longest].to(request.input_ids.device)
    return Done(torch.cat([request.input_ids, tokens], dim=1), (), ())


def _parts(decoder: ProgramDecoder, prompts: torch.Tensor, request: Request) -> Iterator[torch.Tensor]:
    """The tokens of a batch, some at a time, until every sequence has ended."""
    at_once = request.limit if request.ends is None else TOKENS_A_CALL
    ended = torch.zeros(prompts.shape[0], 1, dtype=torch.bool, device=prompts.device)
    _begin(decoder, prompts.shape[0], prompts.shape[1] + request.limit)
    chosen = decoder.extend(prompts).argmax(dim=1, keepdim=True)
    left = request.limit
    while True:
        part, ended = _until_end(chosen, ended, request)
        yield part
        left -= part.shape[1]
        if not left or bool(ended.all()):
            return
        chosen = decoder.decode(chosen[:, -1:], min(at_once, left))


def _until_end(
    chosen: torch.Tensor, ended: torch.Tensor, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens up to where the last sequence ends, with padding after each end, and which sequences have ended.

    chosen: int64 [batch, tokens]; ended: bool [batch, 1], those that ended before.
    """
    if request.ends is None:
        return chosen, ended
    hits = torch.isin(chosen, request.ends.to(chosen.device))
    over = ended | (hits.int().cumsum(dim=1) - hits.int() > 0)  # after an end
    part = chosen.masked_fill(over, request.pad)
    ended_at = ended | (hits.int().cumsum(dim=1) > 0)
    running = int((~ended_at.all(dim=0)).sum())
    return part[:, : running + 1], ended_at[:, -1:]


def _begin(decoder: ProgramDecoder, sequences: int, capacity: int) -> None:
    try:
        decoder.begin(sequences, capacity)
    except UnsupportedError as error:
        raise NotNativeError(
            f"a cache of {capacity} tokens of {sequences} sequences, for want of memory"
        ) from error
