"""A stand-in for TensorRT-LLM's LLM class: it takes what that takes, and decodes with transformers on the CPU.

Names and rules are those of the class's documentation: without a tokenizer a request must name its end, and a stream
gives all tokens so far each time. The arguments of the last LLM are in ARGUMENTS.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__version__ = "1.2.0"
ARGUMENTS: dict[str, object] = {}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Those that are known here; another one is an error."""

    end_id: int | None = None
    max_tokens: int = 32
    temperature: float | None = None
    top_k: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True


@dataclass(frozen=True)
class CompletionOutput:
    """All tokens so far."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class RequestOutput:
    """One output of a greedy request."""

    outputs: Sequence[CompletionOutput]


class LLM:
    """An engine for a folder of safetensors."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_batch_size: int,
        max_seq_len: int,
        max_num_tokens: int,
        skip_tokenizer_init: bool,
        kv_cache_config: Mapping[str, object],
    ) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        given = {name: value for name, value in locals().items() if name not in ("self", "torch")}
        ARGUMENTS.clear()
        ARGUMENTS.update(given)
        if AutoConfig.from_pretrained(model).model_type == "opt":
            raise ValueError("Unknown architecture for AutoModelForCausalLM: OPTForCausalLM")
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self._longest, self._has_tokenizer = max_seq_len, not skip_tokenizer_init

    def generate_async(
        self, inputs: Sequence[int], sampling_params: SamplingParams, *, streaming: bool
    ) -> AsyncIterator[RequestOutput]:
        """Refused at once where a request is not allowed."""
        if sampling_params.end_id is None and not self._has_tokenizer:
            raise ValueError("tokenizer is required to reset end_id if it is None")
        if len(inputs) + sampling_params.max_tokens > self._longest:
            raise ValueError(f"more than {self._longest} tokens")
        assert streaming
        return self._streamed(list(inputs), sampling_params)

    async def _streamed(self, prompt: list[int], parameters: SamplingParams) -> AsyncIterator[RequestOutput]:
        import torch

        tokens: list[int] = []
        while len(tokens) < parameters.max_tokens:
            await asyncio.sleep(0)
            with torch.no_grad():
                logits = self._model(torch.tensor([[*prompt, *tokens]])).logits
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == parameters.end_id and not parameters.ignore_eos:
                return
            yield RequestOutput([CompletionOutput(tuple(tokens))])
