"""A table that is head and embedding at once: what its errors cost, and which of its rows are rounded twice.

An error e in a token's row changes the token's logit wherever it may follow, and the residual wherever it stands. For
small errors the divergence of the model's next tokens is half the sum over tokens of their probability times e M e. M
is the sum of two second moments: of what the head is given, and of the gradients of the log-likelihood by embedded
tokens (the Fisher information, as in sensitivity.py). On bundled:tiny rounding with M instead of the first alone takes
away half of what sharing the table costs, and the finer rows take away the rest.
"""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from optigpu.ops.decode.cpu.arena import Arena
from optigpu.surgery.places import weight_of
from optigpu.techniques.decoding.native_decode.calibration import Moments, in_product_type
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, compensation_of
from optigpu.techniques.decoding.native_decode.prediction import finer_rows
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH
from optigpu.techniques.decoding.native_decode.sensitivity import embedded_tokens

ROWS, ROWS_AT_ONCE = 16, 4
"""Sequences of the text that are looked at, and of a pass."""


@dataclass(frozen=True)
class _Costs:
    """Means over the positions of a text. frequency: of each token's probability, float32 [vocabulary]; spread: of
    1 - the sum of squared probabilities, by which errors of logits count; gradients: of g gT, float32 [width, width].
    """

    frequency: torch.Tensor
    spread: float
    gradients: torch.Tensor


class TiedTable:
    """The head of a model with 4 bits, whose rows are looked up too, while the model is packed.

    `text`, int64 [rows, length], is what the model wrote itself; without one the first rows count as those of the
    most frequent tokens, as vocabularies of byte pairs list them.
    """

    def __init__(self, model: PreTrainedModel, text: torch.Tensor | None) -> None:
        """Looks at the model before anything is packed."""
        self._model = model
        self._costs = None if text is None else _costs(model, text[:ROWS])
        self._moment: torch.Tensor | None = None

    def weigh(self, moments: Moments, positions: int) -> None:
        """Adds to the moments of the head's inputs, sums over so many positions, what errors cost in lookups."""
        if self._costs is None or HEAD_PATH not in moments:
            return
        self._moment = moments[HEAD_PATH] * (self._costs.spread / positions) + self._costs.gradients
        moments[HEAD_PATH] = self._moment

    def refine(self, arena: Arena | None) -> None:
        """Gives the packed head its finer rows; what they are of is still the embedding's."""
        head = self._model.get_submodule(HEAD_PATH)
        assert isinstance(head, DecodeLinear)
        left = head.unpacked().neg_().add_(weight_of(self._model.get_input_embeddings()))
        rows = self._costliest(left)
        known = compensation_of(self._moment)
        head.refine(rows, left[rows], arena, known)

    def _costliest(self, left: torch.Tensor) -> torch.Tensor:
        """Rows in ascending order. left: what rounding has left, float32 [vocabulary, width]."""
        count = finer_rows(left.shape[0])
        if self._costs is None or self._moment is None:
            return torch.arange(count, device=left.device)
        costs = self._costs.frequency * torch.cat(
            [(part @ self._moment).mul_(part).sum(dim=1) for part in left.split(2**12)]
        )
        return costs.topk(count).indices.sort().values


def _costs(model: PreTrainedModel, text: torch.Tensor) -> _Costs:
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for rows in text.split(ROWS_AT_ONCE):
        with torch.enable_grad(), in_product_type(model), embedded_tokens(model) as embedded:
            logits = model(input_ids=rows, use_cache=False).logits.float()
            told, next_ones = logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(told, next_ones, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, embedded)
        gradient = gradient.flatten(0, -2).float()
        probability = logits.detach().flatten(0, 1).softmax(dim=1)
        spread = 1 - probability.square().sum(dim=1)
        found.append((probability.sum(dim=0), spread.sum(), gradient.T @ gradient))
    frequency, spread, gradients = (sum(parts) / text.numel() for parts in zip(*found, strict=True))
    return _Costs(frequency, float(spread), gradients)
