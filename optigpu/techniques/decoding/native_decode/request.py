"""What transformers prepared for its own loop, as a native decoder needs it, or why the decoder cannot serve it."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from transformers import Cache, GenerationConfig, LogitsProcessorList, QuantizedCache, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from optigpu.ops.decode.program import Program

_INPUTS = frozenset(
    {
        "attention_mask",
        "position_ids",
        "past_key_values",
        "use_cache",
        "logits_to_keep",
        "tokenizer",
        "assistant_tokenizer",
    }
)
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
    _check_cache(inputs.get("past_key_values"))
    ends = next((each.eos_token_id for each in criteria if hasattr(each, "eos_token_id")), None)
    pad = config.pad_token_id
    return Request(
        input_ids=input_ids,
        lengths=_prompt_lengths(input_ids, inputs),
        limit=limit,
        ends=ends,
        pad=int(ends[0] if pad is None and ends is not None else pad or 0),
        is_plain=not (processors or config.do_sample or returned) and _are_only_lengths_and_ends(criteria),
        is_sampled=bool(config.do_sample),
        is_dict=returned,
        keeps_scores=returned and bool(config.output_scores),
        keeps_logits=returned and bool(config.output_logits),
    )


def _are_only_lengths_and_ends(criteria: StoppingCriteriaList) -> bool:
    kinds = [type(each) for each in criteria]
    return set(kinds) <= {MaxLengthCriteria, EosTokenCriteria} and len(set(kinds)) == len(kinds)


def _check_cache(cache: object) -> None:
    if getattr(cache, "_is_user_defined", False) or (isinstance(cache, Cache) and cache.get_seq_length()):
        raise NotNativeError("a cache of the caller's own (past_key_values)")
    if isinstance(cache, QuantizedCache):
        raise NotNativeError("a quantized cache (cache_implementation)")


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
