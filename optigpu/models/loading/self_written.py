"""Text that a model generates itself."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from transformers import PreTrainedModel

SAMPLED_AT_ONCE = 16
"""Few enough sequences for the cache of long ones to fit."""


def sampled(
    model: PreTrainedModel, vocabulary: int, rows: int, length: int, seed: int, at_once: int = SAMPLED_AT_ONCE
) -> torch.Tensor:
    """Sequences drawn at temperature 1 after `first_token`, int64 [rows, length]; leaves torch's random state as it
    was."""
    generate: Any = model.generate
    plain = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    drawn = []
    with forked_random(model.device):
        torch.manual_seed(seed)
        first = _first_token(model, vocabulary)
        for done in range(0, rows, at_once):
            start = torch.full((min(at_once, rows - done), 1), first, device=model.device)
            drawn.append(generate(start, max_new_tokens=length - 1, **plain))
    return torch.cat(drawn)


def first_token(model: PreTrainedModel, vocabulary: int, seed: int) -> int:
    """The model's start token; or its end token, or any. Leaves torch's random state as it was."""
    with forked_random(model.device):
        torch.manual_seed(seed)
        return _first_token(model, vocabulary)


def _first_token(model: PreTrainedModel, vocabulary: int) -> int:
    config = model.config.get_text_config(decoder=True)
    for token in (getattr(config, name, None) for name in ("bos_token_id", "eos_token_id")):
        if (
            isinstance(token, int) and 0 <= token < vocabulary
        ):  # it may be missing, a list, or another model's
            return token
    return int(torch.randint(vocabulary, (1,)))


def forked_random(device: torch.device) -> AbstractContextManager[None]:
    """Leaves the random state of the CPU and of `device` as it was."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
