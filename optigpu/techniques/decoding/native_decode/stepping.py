"""Requests by a native decoder: many greedy tokens of a call, or the logits of one step after the other."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, QuantizedCache, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from optigpu.ops.decode.calls import ProgramDecoder
from optigpu.ops.decode.cpu.decoder import CpuDecoder, Part
from optigpu.ops.decode.program import Program
from optigpu.vocabulary import UnsupportedError

_INPUTS = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "assistant_tokenizer",
}
"""What transformers hands to its loop besides the prompt and the native decoder knows, or knows it need not."""


class NotNativeError(Exception):
    """The request asks for something that the native decoder cannot do; the text is a part of a sentence."""


@dataclass(frozen=True)
class Request:
    """Decoding of prompts, int64 [batch, length] as the caller gave them, whose first tokens may be padding.

    lengths: of the prompts without padding; `limit` is the most new tokens of each, `ends` the end tokens, int64 [n],
    and `pad` what stands after one. A plain one is greedy, and nothing looks at its logits or its tokens meanwhile.
    What is asked for as `is_dict` may keep the logits, and the scores that processors made of them.
    """

    input_ids: torch.Tensor
    lengths: tuple[int, ...]
    limit: int
    ends: torch.Tensor | None
    pad: int
    is_plain: bool
    is_sampled: bool
    is_dict: bool
    keeps_scores: bool
    keeps_logits: bool

    def prompts(self, device: torch.device) -> torch.Tensor:
        return self.input_ids.to(device, torch.int64)


def prepared_request(
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    inputs: Mapping[str, object],
    program: Program,
) -> Request:
    """What transformers prepared. Raises NotNativeError where the decoder cannot serve it."""
    most = criteria.max_length
    if most is None:
        raise NotNativeError("an endless text")
    limit = max(1, most - input_ids.shape[1])  # transformers' loop ends after a token as well
    if input_ids.shape[1] + limit - 1 > program.context:
        raise NotNativeError(f"a text beyond the model's context of {program.context} tokens")
    returned = bool(config.return_dict_in_generate)
    inner = [
        name for name in ("output_attentions", "output_hidden_states") if returned and getattr(config, name)
    ]
    if inner:
        raise NotNativeError(inner[0])
    if config.is_assistant:
        raise NotNativeError("the work of an assistant")
    cache = inputs.get("past_key_values")
    if getattr(cache, "_is_user_defined", False) or (isinstance(cache, Cache) and cache.get_seq_length()):
        raise NotNativeError("a cache of the caller's own (past_key_values)")
    if isinstance(cache, QuantizedCache):
        raise NotNativeError("a quantized cache (cache_implementation)")
    kinds = [type(each) for each in criteria]
    are_few = set(kinds) <= {MaxLengthCriteria, EosTokenCriteria} and len(set(kinds)) == len(kinds)
    ends = next((each.eos_token_id for each in criteria if hasattr(each, "eos_token_id")), None)
    pad = config.pad_token_id
    return Request(
        input_ids=input_ids,
        lengths=_prompt_lengths(input_ids, inputs),
        limit=limit,
        ends=ends,
        pad=int(ends[0] if pad is None and ends is not None else pad or 0),
        is_plain=not (processors or config.do_sample or returned) and are_few,
        is_sampled=bool(config.do_sample),
        is_dict=returned,
        keeps_scores=returned and bool(config.output_scores),
        keeps_logits=returned and bool(config.output_logits),
    )


def _prompt_lengths(prompts: torch.Tensor, inputs: Mapping[str, object]) -> tuple[int, ...]:
    """The lengths of left-padded prompts. Raises NotNativeError for any other mask, position or input."""
    other = [name for name, value in inputs.items() if name not in _INPUTS and value is not None]
    if other:
        raise NotNativeError(f"the input {other[0]}")
    batch, length = prompts.shape
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    lengths, hidden = torch.full((batch, 1), length), torch.zeros(batch, length, dtype=torch.bool)
    if isinstance(mask, torch.Tensor):
        lengths, hidden = mask.long().sum(dim=1, keepdim=True).cpu(), mask.cpu() == 0
    left_padding = torch.arange(length) < length - lengths
    if not bool(lengths.all()) or not hidden.equal(left_padding.expand_as(hidden)):
        raise NotNativeError("a mask that hides more than padding on the left")
    expected = torch.arange(length) - (length - lengths)
    if isinstance(positions, torch.Tensor) and not bool(((positions.cpu() == expected) | left_padding).all()):
        raise NotNativeError("position_ids of its own")
    return tuple(lengths.flatten().tolist())


Steps = Callable[[torch.Tensor | None], torch.Tensor]
"""Gives all next tokens' logits, float32 [batch, vocabulary]: after the prompts at first, then after chosen tokens."""
TOKENS_A_CALL = 16
"""With end tokens the decoder stops to look for one after so many, and at most one fewer are decoded in vain."""


def stepping(decoder: ProgramDecoder, request: Request, device: torch.device) -> Steps:
    """The steps of a request, in an empty cache. Raises NotNativeError where the decoder cannot take them."""
    if len(set(request.lengths)) == 1:
        _begin(decoder, len(request.lengths), request.lengths[0] + request.limit)
        prompts = request.prompts(device)[:, -request.lengths[0] :]
        return lambda chosen: decoder.extend(prompts if chosen is None else chosen.to(device).unsqueeze(1))
    if not isinstance(decoder, CpuDecoder):
        raise NotNativeError("prompts of several lengths with more than greedy decoding")
    _begin(decoder, len(request.lengths), max(request.lengths) + request.limit)
    positions = [0] * len(request.lengths)

    def advance(chosen: torch.Tensor | None) -> torch.Tensor:
        """Each sequence at a position of its own, as if it were alone."""
        rows = request.input_ids if chosen is None else chosen[:, None]
        counts = request.lengths if chosen is None else [1] * len(positions)
        tokens = [row[-count:] for row, count in zip(rows.tolist(), counts, strict=True)]
        decoder.advance([Part(row, positions[row], some, 1) for row, some in enumerate(tokens)])
        positions[:] = [position + count for position, count in zip(positions, counts, strict=True)]
        return decoder.logits

    return advance


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
    found = steps(None)
    while True:
        raw = found.to(ids.device, copy=True)
        score = processors(ids, raw)
        scores += (score,) if request.keeps_scores else ()
        logits += (raw,) if request.keeps_logits else ()
        if request.is_sampled:
            chosen = torch.multinomial(score.softmax(dim=-1), num_samples=1).squeeze(1)
        else:
            chosen = score.argmax(dim=-1)
        if request.ends is not None:
            chosen = chosen.where(running, request.pad)
        ids = torch.cat([ids, chosen[:, None]], dim=1)
        if streamer is not None:
            streamer.put(chosen.cpu())
        running = running & ~criteria(ids, scores if request.keeps_scores else None)
        if not bool(running.any()):
            break
        found = steps(chosen)
    if streamer is not None:
        streamer.end()
    return Done(ids, scores, logits)


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
