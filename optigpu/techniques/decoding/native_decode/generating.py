"""transformers' `generate` with the native decoder in the place of its greedy loop.

transformers prepares a request as ever: the prompt, the lengths, the end tokens, the mask of padded prompts. Then it
calls `NativeGenerate.decode` by its own argument `custom_generate`. What that cannot do goes to the library's loop.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import Cache, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from optigpu.ops.decode.calls import ProgramDecoder
from optigpu.ops.decode.program import CacheKind
from optigpu.techniques.decoding.native_decode.decoders import new_decoder
from optigpu.techniques.decoding.native_decode.programs import attached

TOKENS_A_CALL = 16
"""With end tokens the decoder stops to look for one after so many, and at most one fewer are decoded in vain."""
_OUTPUTS = (
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
_LOOP_ARGUMENTS = ("assistant_model", "custom_generate", "synced_gpus")
"""Arguments of `generate` that choose another loop; transformers does not hand them to a custom one."""
_INPUTS = frozenset({"attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep"})
"""What transformers prepares besides the prompt."""


class Streamer(Protocol):
    """What `generate` sends its tokens to: the prompt, then each token, then the end."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


class _NotNativeError(Exception):
    """The request asks for something that the native loop cannot do; the text is a part of a sentence."""


@dataclass(frozen=True)
class _Request:
    """Greedy decoding of prompts, int64 [batch, length], whose first tokens may be padding.

    lengths: of the prompts without padding; `limit` is the most new tokens of each, `ends` the end tokens, int64 [n],
    and `pad` what stands after one.
    """

    prompts: torch.Tensor
    lengths: tuple[int, ...]
    limit: int
    ends: torch.Tensor | None
    pad: int


class NativeGenerate:
    """`model.generate` by a native decoder: greedy, with end tokens, left padding and a streamer.

    Every other setting (sampling, beams, penalties, scores) runs by transformers' own loop on the packed weights, which
    is slower than the model was before; a UserWarning says why.
    """

    def __init__(self, model: PreTrainedModel, kv: CacheKind) -> None:
        self._model = model
        self._program = attached(model)
        self._decoder: ProgramDecoder = new_decoder(self._program, kv)

    def __call__(self, *arguments: object, streamer: Streamer | None = None, **options: object) -> object:
        """As transformers' `generate`, with its arguments and what it returns."""
        reason = _other_loop(arguments, options)
        if reason is None:
            try:
                return self._by_library(*arguments, custom_generate=_Loop(self, streamer), **options)
            except _NotNativeError as error:
                reason = str(error)
        warnings.warn(
            f"accelerate: the native decoder does not support {reason}, so transformers' own loop runs on the packed "
            "weights, slowly; leave that out, or generate with the model as it was loaded.",
            stacklevel=2,
        )
        return self._by_library(*arguments, streamer=streamer, **options)

    def decode(self, request: _Request, streamer: Streamer | None) -> torch.Tensor:
        """New tokens int64 [batch, the longest]; where prompts differ in length, those of one length at a time."""
        batch = len(request.lengths)
        found = request.prompts.new_full((batch, request.limit), request.pad)
        longest = 0
        for length in sorted(set(request.lengths)):
            rows = [row for row in range(batch) if request.lengths[row] == length]
            done = 0
            for part in self._parts(request.prompts[rows, -length:], request, streamer):
                found[rows, done : done + part.shape[1]] = part
                done += part.shape[1]
            longest = max(longest, done)
        return found[:, :longest]

    def _parts(
        self, prompts: torch.Tensor, request: _Request, streamer: Streamer | None
    ) -> Iterator[torch.Tensor]:
        """The tokens of a batch, some at a time, until every sequence has ended."""
        at_once = 1 if streamer else TOKENS_A_CALL if request.ends is not None else request.limit
        ended = torch.zeros(prompts.shape[0], 1, dtype=torch.bool, device=prompts.device)
        self._decoder.begin(prompts.shape[0], prompts.shape[1] + request.limit)
        chosen = self._decoder.extend(prompts).argmax(dim=1, keepdim=True)
        left = request.limit
        while True:
            part, ended = _until_end(chosen, ended, request)
            if streamer:
                streamer.put(part[:, 0].cpu())
            yield part
            left -= part.shape[1]
            if not left or bool(ended.all()):
                return
            chosen = self._decoder.decode(chosen[:, -1:], min(at_once, left))

    def request(
        self,
        prompts: torch.Tensor,
        criteria: Sequence[object],
        config: GenerationConfig,
        inputs: Mapping[str, object],
    ) -> _Request:
        """What transformers prepared, as the decoder needs it. Raises _NotNativeError where that is not possible."""
        limit, ends, other = None, None, []
        for criterion in criteria:
            if isinstance(criterion, MaxLengthCriteria):
                limit = criterion.max_length - prompts.shape[1]
            elif isinstance(criterion, EosTokenCriteria):
                ends = criterion.eos_token_id.to(self._model.device)
            else:
                other.append(type(criterion).__name__)
        if other or limit is None:
            raise _NotNativeError(
                f"the stopping criterion {' + '.join(other)}" if other else "an endless text"
            )
        if prompts.shape[1] + limit - 1 > self._program.context:
            raise _NotNativeError(f"a text beyond the model's context of {self._program.context} tokens")
        lengths = _prompt_lengths(prompts, inputs)
        pad = config.pad_token_id
        if pad is None:
            pad = 0 if ends is None else int(ends[0])
        return _Request(prompts.to(self._model.device, torch.int64), lengths, limit, ends, int(pad))

    def _by_library(self, *arguments: object, **options: object) -> object:
        kind: Any = type(self._model)
        found: object = kind.generate(self._model, *arguments, **options)
        return found


class _Loop:
    """What transformers calls, by `custom_generate`, with the request that it prepared."""

    def __init__(self, generate: NativeGenerate, streamer: Streamer | None) -> None:
        self._generate = generate
        self._streamer = streamer

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Sequence[object],
        stopping_criteria: Sequence[object],
        generation_config: GenerationConfig,
        **model_kwargs: object,
    ) -> torch.Tensor:
        """Prompts and new tokens, int64 [batch, length]."""
        _require_greedy(generation_config, logits_processor)
        request = self._generate.request(input_ids, stopping_criteria, generation_config, model_kwargs)
        if self._streamer and len(set(request.lengths)) > 1:
            raise _NotNativeError("a streamer for prompts of several lengths")
        if self._streamer:
            self._streamer.put(input_ids.cpu())
        tokens = self._generate.decode(request, self._streamer)
        if self._streamer:
            self._streamer.end()
        return torch.cat([input_ids, tokens.to(input_ids)], dim=1)


def _other_loop(arguments: Sequence[object], options: Mapping[str, object]) -> str | None:
    """The argument that asks for another loop, or None."""
    named = next((name for name in _LOOP_ARGUMENTS if options.get(name)), None)
    if named is None and len(arguments) > 2:
        return "more than two positional arguments of generate"
    return f"the argument {named}" if named else None


def _require_greedy(config: GenerationConfig, processors: Sequence[object]) -> None:
    mode = config.get_generation_mode()
    if mode is not GenerationMode.GREEDY_SEARCH:
        raise _NotNativeError(
            f"{mode.value.replace('_', ' ')} (greedy decoding is do_sample=False, num_beams=1)"
        )
    if processors:
        raise _NotNativeError(f"the logits processor {type(processors[0]).__name__}")
    asked = [name for name in _OUTPUTS if getattr(config, name, None)]
    if asked:
        raise _NotNativeError(asked[0])


def _prompt_lengths(prompts: torch.Tensor, inputs: Mapping[str, object]) -> tuple[int, ...]:
    """The lengths of left-padded prompts. Raises _NotNativeError for any other mask, position, cache or input."""
    other = [name for name, value in inputs.items() if name not in _INPUTS and value is not None]
    if other:
        raise _NotNativeError(f"the input {other[0]}")
    cache = inputs.get("past_key_values")
    if isinstance(cache, Cache) and cache.get_seq_length():
        raise _NotNativeError("a cache that holds tokens already")
    batch, length = prompts.shape
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    lengths, hidden = torch.full((batch, 1), length), torch.zeros(batch, length, dtype=torch.bool)
    if isinstance(mask, torch.Tensor):
        lengths, hidden = mask.sum(dim=1, keepdim=True).cpu(), mask.cpu() == 0
    left_padding = torch.arange(length) < length - lengths
    if not bool(lengths.all()) or not hidden.equal(left_padding.expand_as(hidden)):
        raise _NotNativeError("a mask that hides more than padding on the left")
    expected = torch.arange(length) - (length - lengths)
    if isinstance(positions, torch.Tensor) and not bool(((positions.cpu() == expected) | left_padding).all()):
        raise _NotNativeError("position_ids of its own")
    return tuple(lengths.flatten().tolist())


def _until_end(
    chosen: torch.Tensor, ended: torch.Tensor, request: _Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens up to where the last sequence ends, with padding after each end, and which sequences have ended.

    chosen: int64 [batch, tokens]; ended: bool [batch, 1], those that ended before.
    """
    if request.ends is None:
        return chosen, ended
    hits = torch.isin(chosen, request.ends)
    over = ended | (hits.int().cumsum(dim=1) - hits.int() > 0)  # after an end
    part = chosen.masked_fill(over, request.pad)
    ended_at = ended | (hits.int().cumsum(dim=1) > 0)
    running = int((~ended_at.all(dim=0)).sum())
    return part[:, : running + 1], ended_at[:, -1:]
