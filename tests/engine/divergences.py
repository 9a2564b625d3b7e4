"""How far one model's predictions are from another's."""

from typing import Any

import torch


def divergence_of(model: Any, plain: Any, tokens: torch.Tensor) -> float:
    """The mean divergence of a model's next tokens from those of the plain one, in nats."""
    with torch.no_grad():
        expected, found = (each(tokens).logits.double().log_softmax(-1) for each in (plain, model))
    return float((expected.exp() * (expected - found)).sum(-1).mean())
