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
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.surgery.places import weight_of
from optigpu.techniques.decoding.native_decode.calibration import Moments, in_product_type
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, compensation_of
from optigpu.techniques.decoding.native_decode.prediction import finer_rows
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH
from optigpu.techniques.decoding.native_decode.sensitivity import embedded_tokens

ROWS, ROWS_AT_ONCE = 16, 4
"""Sequences of the text that are looked at, and of a pass."""
POSITIONS_AT_ONCE = 32
"""Whose logits become probabilities, and these gradients."""


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
        products = product_type(left.device)
        moment = self._moment.to(products)
        costs = self._costs.frequency * torch.cat(
            [(part.to(products) @ moment).float().mul_(part).sum(dim=1) for part in left.split(2**12)]
        )
        return costs.topk(count).indices.sort().values


def _costs(model: PreTrainedModel, text: torch.Tensor) -> _Costs:
    width, vocabulary = weight_of(model.get_input_embeddings()).shape[::-1]
    found = _Costs(
        torch.zeros(vocabulary, device=text.device), 0.0, torch.zeros(width, width, device=text.device)
    )
    for rows in text.split(ROWS_AT_ONCE):
        with torch.enable_grad(), in_product_type(model), embedded_tokens(model) as embedded:
            hidden = model.base_model(input_ids=rows, use_cache=False).last_hidden_state
        spread, pull = _told(model, rows, hidden.detach(), found.frequency)
        (gradient,) = torch.autograd.grad(hidden, embedded, pull.to(hidden.dtype))
        gradient = gradient.flatten(0, -2).float()
        found = _Costs(found.frequency, found.spread + spread, found.gradients.addmm_(gradient.T, gradient))
    count = text.numel()
    return _Costs(found.frequency / count, found.spread / count, found.gradients / count)


def _told(
    model: PreTrainedModel, rows: torch.Tensor, hidden: torch.Tensor, frequency: torch.Tensor
) -> tuple[float, torch.Tensor]:
    """The sum of positions' spread, and the gradients of the text's log-likelihood by what the head is given.

    Adds each position's probabilities to `frequency`. By few positions at a time, what is told of them stays in a
    core's caches, and the gradients of logits lie where the logits were.
    """
    head: torch.nn.Module = model.get_output_embeddings()
    with torch.no_grad(), in_product_type(model):
        logits = head(hidden).flatten(0, -2)
    # The last position of a row has no next token.
    next_ones = torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-1).flatten()
    spread = 0.0
    for some, after in zip(logits.split(POSITIONS_AT_ONCE), next_ones.split(POSITIONS_AT_ONCE), strict=True):
        probability = some.float().softmax(dim=1)
        frequency += probability.sum(dim=0)
        spread += float((1 - torch.linalg.vector_norm(probability, dim=1).square()).sum())
        known = (after >= 0).nonzero().squeeze(1)
        probability[known, after[known]] -= 1
        some.copy_(probability.mul_((after >= 0).unsqueeze(1)))
    weight = weight_of(head).to(logits.dtype)
    return spread, (logits @ weight).unflatten(0, rows.shape)
