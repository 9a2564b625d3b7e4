"""The loss of a language model from its hidden states, in chunks of tokens."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
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
        outputs = self._body(**micro.inputs, use_cache=False)
        hidden = outputs.last_hidden_state.flatten(0, 1)  # [rows * length, width]
        chunks = zip(hidden.split(self._tokens), micro.labels.flatten().split(self._tokens), strict=True)
        losses = [self._recomputed(*chunk) for chunk in chunks]
        return torch.stack(losses).sum()

    def _recomputed(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The chunk's loss, of which only `hidden` is kept for the backward pass. Nothing in it is random."""
        loss: torch.Tensor = checkpoint(
            self._loss_of, hidden, labels, use_reentrant=False, preserve_rng_state=False
        )
        return loss

    def _loss_of(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self._head(hidden).float()  # [tokens, vocabulary]
        return cross_entropy(logits, labels, ignore_index=NO_TARGET, reduction="sum")


def _body_and_head(model: PreTrainedModel) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The model without its head, and the head; a few tokens show that the two make the model's logits."""
    body, head = model.base_model, model.get_output_embeddings()
    if head is None or body is model:
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
