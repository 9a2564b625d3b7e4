"""The loss of a language model from its hidden states, in chunks of tokens."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.nn.functional import cross_entropy, linear
from transformers import PreTrainedModel

from optigpu.backends.training import NO_TARGET, MicroBatch
from optigpu.vocabulary import UnsupportedError

_PROBED_TOKENS = 4
_ROUNDINGS = 16
"""How many times its dtype's precision a logit may be off, as a share of the largest one."""


class ChunkedLoss:
    """The sum of the losses of all targets: the body once, then the head and the loss for one chunk after the other."""

    def __init__(self, model: PreTrainedModel, tokens: int) -> None:
        """Raises UnsupportedError as the technique says."""
        self._body, self._head = _body_and_head(model)
        self._tokens = tokens

    def __call__(self, micro: MicroBatch) -> torch.Tensor:
        hidden = self._body(**micro.inputs, use_cache=False).last_hidden_state.flatten(0, 1)
        kind, head = hidden.device.type, self._head
        weight: torch.Tensor = head.weight
        bias: torch.Tensor | None = head.bias
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return _summed_loss(hidden, weight, bias, micro.labels.flatten(), self._tokens)


class _SummedLoss(torch.autograd.Function):
    """The sum of cross_entropy(hidden @ weight.T + bias, labels) over targets, in float32.

    hidden: [tokens, width]; weight: [vocabulary, width]; bias: [vocabulary] or None; labels: int64 [tokens]. Only these
    are kept for the backward pass, which computes each chunk's logits again and adds the chunk's part to one gradient
    of the weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        chunk: int,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.chunk = chunk
        loss = hidden.new_zeros((), dtype=torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            for part in _chunks(len(labels), chunk):
                logits = linear(hidden[part], weight, bias).float()
                loss += cross_entropy(logits, labels[part], ignore_index=NO_TARGET, reduction="sum")
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        to_hidden = torch.empty_like(hidden)
        to_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        to_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        for part in _chunks(len(labels), ctx.chunk):
            # Autograd records here, though nothing asks for it: by that counters know a recomputation.
            with torch.enable_grad():
                logits = linear(hidden[part], weight.detach(), bias).detach()
            to_logits = _gradient_to_logits(logits.float(), labels[part], gradient).to(hidden.dtype)
            torch.mm(to_logits, weight, out=to_hidden[part])
            if to_weight is not None:
                torch.addmm(to_weight, to_logits.T, hidden[part], out=to_weight)
            if to_bias is not None:
                to_bias += to_logits.sum(dim=0)
        return to_hidden, to_weight, to_bias, None, None


_summed_loss = cast(Callable[..., torch.Tensor], _SummedLoss.apply)


def _chunks(tokens: int, chunk: int) -> Iterator[slice]:
    return (slice(begin, begin + chunk) for begin in range(0, tokens, chunk))


def _gradient_to_logits(logits: torch.Tensor, labels: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """softmax(logits) less 1 at the label, times the loss's gradient; 0 where nothing is predicted."""
    is_target = (labels != NO_TARGET)[:, None]
    probabilities = logits.softmax(dim=-1)
    probabilities.scatter_add_(1, labels.clamp(min=0)[:, None], -is_target.to(logits.dtype))
    return probabilities.mul_(is_target * gradient)


def _body_and_head(model: PreTrainedModel) -> tuple[torch.nn.Module, torch.nn.Linear]:
    """The model without its head, and the head; a few tokens show that the two make the model's logits."""
    body, head = model.base_model, model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or body is model:
        raise UnsupportedError(
            "chunked_cross_entropy needs a language model with a head; leave it out of the stack."
        )
    ids = torch.arange(_PROBED_TOKENS, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        parts = head(body(input_ids=ids, use_cache=False).last_hidden_state)
    allowed = _ROUNDINGS * torch.finfo(whole.dtype).eps * float(whole.abs().max())
    if whole.shape != parts.shape or float((whole - parts).abs().max()) > allowed:
        raise UnsupportedError(
            "chunked_cross_entropy: this model changes its head's product before it gives its logits; leave it out of "
            "the stack."
        )
    return body, head
