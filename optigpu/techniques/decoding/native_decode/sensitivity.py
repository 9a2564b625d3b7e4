"""Predicts the cost of rounding a decoder's weights before any is rounded: of each layer, and of rows of a tied table.

The divergence of the model's next tokens from what they were is, for small errors, half the sum of each weight's
squared error times its Fisher information (Kullback and Leibler, 1951; used for bits by Dong et al., HAWQ, 2019,
arXiv:1905.03696, with the Hessian in its place). The information is the mean square of a weight's gradient of the
log-likelihood of text that the model wrote itself, so that no data are needed. The diagonal alone is looked at: errors
of rounding are as good as independent. On bundled:tiny the sum over all layers was 0.019 where 0.017 was measured.

Of a table that is head and embedding at once, an error e in a token's row changes the token's logit wherever it may
follow, and the residual wherever it stands. For small errors the divergence is half the sum over tokens of their
probability times e M e. M is the sum of two second moments: of what the head is given, and of the gradients of the
log-likelihood by embedded tokens. On bundled:tiny rounding with M instead of the first alone takes away half of what
sharing the table costs, and the finer rows take away the rest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.self_written import sampled
from optigpu.ops.decode.cpu.arena import Arena
from optigpu.ops.decode.cpu.packing import squared_errors
from optigpu.ops.decode.program import FEW_BITS, WeightKind
from optigpu.ops.four_bits.few_bits import product_type
from optigpu.surgery.places import Place, weight_of
from optigpu.techniques.decoding.native_decode.calibration import Moments, Reading, in_product_type
from optigpu.techniques.decoding.native_decode.layers import DecodeLinear, compensation_of
from optigpu.techniques.decoding.native_decode.prediction import finer_rows
from optigpu.techniques.decoding.native_decode.programs import HEAD_PATH, has_tied_head

Information = dict[str, torch.Tensor]

ROWS, LENGTH = 4, 32
"""Sequences and tokens of the text. Eight times as many gave bundled:tiny the same order of layers."""
SEED = 0
LARGE, ROW_STEP = 2**18, 5
"""The weights of a layer of which every fifth row alone is rounded to predict its cost."""
TIED_ROWS = 4
"""Sequences of the text whose gradients are taken for a tied table. 8 took a second longer for
SmolLM2-135M, which as w4 then diverged by 3% less; bundled:tiny and bundled:small by as much (decision 71)."""
TOLD = 2**12
"""Positions whose next tokens' probabilities are added up for it, or somewhat more."""
LOGITS_AT_ONCE, POSITIONS_AT_ONCE = 128, 32
"""Positions whose logits are computed, few enough for memory that is used again, and of which they become
probabilities."""


def divergences(
    model: PreTrainedModel,
    places: Sequence[Place],
    kinds: Sequence[WeightKind],
    group: int,
    tokens: torch.Tensor | None = None,
) -> dict[str, list[float]]:
    """By how much the model's next tokens diverge with each of the kinds, for each layer's path.

    In nats for each token. `group` inputs of an output share a scale. `tokens` are text that the model wrote, int64
    [rows, length]; without any it writes some. The finer rows of a tied head are taken to be the first ones, as they
    are without calibration. With the costliest ones left out instead, a calibrated head kept its 4 bits where 8 would
    have left out more: bundled:tiny with a fifth more bytes diverged by 0.0049 and not by 0.0032.
    """
    information = fisher_information(model, places, group, tokens)
    found: dict[str, list[float]] = {}
    for place in places:
        weight, found[place.path] = weight_of(place.layer), []
        step = _row_step(weight)
        own, some = information[place.path], weight[::step]
        for kind in kinds:
            lost = 0.5 * (own * squared_errors(some, kind, group)).sum(dim=1)
            if place.path == HEAD_PATH and has_tied_head(model) and kind in FEW_BITS:
                lost = lost[finer_rows(len(weight)) // step :]  # the others are rounded twice
            found[place.path].append(float(lost.sum()) * len(weight) / len(some))
    return found


def fisher_information(
    model: PreTrainedModel, places: Sequence[Place], group: int, tokens: torch.Tensor | None = None
) -> Information:
    """The Fisher information of linear layers: the mean over each group's weights, for one token.

    float32 [outputs, groups]; of a large layer, of every fifth output alone. A tied head has the information of its
    products and of its lookups, as if these were not of the same weights.
    """
    if tokens is None:
        length = min(LENGTH, model.config.max_position_embeddings)
        tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED)
    with torch.enable_grad(), embedded_tokens(model) as embedded, _watched(places, group) as found:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        (gradients,) = torch.autograd.grad(loss, embedded)  # and none is kept of a weight
        gradients = gradients * own_scale(model)
    if HEAD_PATH in found and has_tied_head(model):
        step = _row_step(weight_of(model.get_output_embeddings()))
        for row, gradient in zip(tokens[:, :-1], _sequences(gradients), strict=True):
            # Of the rows that a sequence looks up.
            looked_up, places_of = row.unique(return_inverse=True)
            sums = gradient.new_zeros(len(looked_up), gradient.shape[1]).index_add_(0, places_of, gradient)
            is_wanted = looked_up % step == 0
            information = sums[is_wanted].square().unflatten(1, (-1, group)).mean(dim=2)
            found[HEAD_PATH][looked_up[is_wanted] // step] += information
    predicted = tokens[:, 1:].numel()
    return {path: total / predicted for path, total in found.items()}


def _row_step(weight: torch.Tensor) -> int:
    return ROW_STEP if weight.numel() >= LARGE else 1


def own_scale(model: PreTrainedModel) -> float:
    """What the embedding itself multiplies its rows by."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))


@contextmanager
def embedded_tokens(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """What the embedding gives in a pass, of which gradients can be asked for; empty before one."""
    embedded: list[torch.Tensor] = []

    def begin(*called: Any) -> torch.Tensor:
        embedded.append(called[-1].detach().requires_grad_())
        return embedded[-1]

    with model.get_input_embeddings().register_forward_hook(begin):
        yield embedded


@contextmanager
def _watched(places: Sequence[Place], group: int) -> Iterator[Information]:
    """The squares of weights' gradients, summed over the sequences and averaged over the groups.

    Filled while a pass over a batch runs forward and backward.

    The gradient of one layer at a time is in memory, and a head that is tied has one apart from the embedding's.
    """
    found: Information = {}

    def watch(path: str, step: int) -> Callable[..., None]:
        def forward(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = _sequences(inputs[0].detach())

            def backward(gradient: torch.Tensor) -> None:
                some = gradient[..., ::step]
                found[path] = torch.zeros(some.shape[-1], x.shape[-1] // group, device=x.device)
                for each, row in zip(_sequences(some), x, strict=True):
                    found[path] += (each.T @ row).square().unflatten(1, (-1, group)).mean(dim=2)

            output.register_hook(backward)

        return forward

    with ExitStack() as hooks:
        for place in places:
            step = _row_step(weight_of(place.layer))
            hooks.enter_context(place.layer.register_forward_hook(watch(place.path, step)))
        yield found


def _sequences(activations: torch.Tensor) -> torch.Tensor:
    """float32 [ROWS, tokens, width]; OPT's come without the first dimension."""
    return activations.reshape(ROWS, -1, activations.shape[-1]).float()


class TiedTable(Reading):
    """The head of a model with 3 to 6 bits, whose rows are looked up too, while the model is packed.

    Without a text the first rows count as those of the most frequent tokens, as vocabularies of byte pairs list them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        width = weight_of(model.get_output_embeddings()).shape[1]
        self._weight: torch.Tensor | None = None
        self._gradients = torch.zeros(width, width, device=model.device)
        self._frequency = torch.zeros(model.config.vocab_size, device=model.device)
        self._spread, self._seen, self._learned = 0.0, 0, 0
        self._moment: torch.Tensor | None = None

    def run(self, rows: torch.Tensor) -> None:
        """As a text is read; the first rows of it tell the gradients."""
        learned = min(len(rows), max(0, TIED_ROWS - self._learned // rows.shape[1]))
        if learned:
            self._learn(rows[:learned])
        if learned < len(rows):
            super().run(rows[learned:])

    def _learn(self, rows: torch.Tensor) -> None:
        """Adds up g gT over the positions of rows, of gradients by embedded tokens."""
        with torch.enable_grad(), in_product_type(self._model), embedded_tokens(self._model) as embedded:
            hidden = self._model.base_model(input_ids=rows, use_cache=False).last_hidden_state
        pull = self._pull(rows, hidden.detach()).to(hidden.dtype)
        (gradient,) = torch.autograd.grad(hidden, embedded, pull)
        gradient = gradient.flatten(0, -2).float() * own_scale(self._model)
        self._gradients.addmm_(gradient.T, gradient)
        self._learned += rows.numel()

    def see(self, hidden: torch.Tensor) -> torch.Tensor:
        """Adds up the probabilities of tokens by what the head is given, [rows, tokens, width], which it gives back.

        Those of some thousand tokens are enough; where gradients are asked for, `run` adds them up.
        """
        if self._seen < TOLD and not hidden.requires_grad:
            for logits in self._logits(hidden):
                for some in logits.split(POSITIONS_AT_ONCE):
                    self._told(some)
        return hidden

    def _logits(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        """[positions, vocabulary], of some positions at a time."""
        head = self._model.get_output_embeddings()
        if self._weight is None:
            self._weight = weight_of(head).detach().to(product_type(hidden.device))
        bias = None if head.bias is None else head.bias.detach().to(self._weight.dtype)
        for some in hidden.flatten(0, -2).to(self._weight.dtype).split(LOGITS_AT_ONCE):
            yield torch.nn.functional.linear(some, self._weight, bias)

    def _told(self, logits: torch.Tensor) -> torch.Tensor:
        """The probabilities of some positions. Adds them up, and their spread: 1 - the sum of their squares, by which
        errors of logits count."""
        probability = logits.float().softmax(dim=1)
        self._frequency += probability.sum(dim=0)
        self._spread += float((1 - torch.linalg.vector_norm(probability, dim=1).square()).sum())
        self._seen += len(logits)
        return probability

    def _pull(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """The gradients of the text's log-likelihood by what the head is given; logits become theirs in place."""
        # The last position of a row has no next token.
        next_ones = iter(
            torch.nn.functional.pad(rows[:, 1:], (0, 1), value=-1).flatten().split(POSITIONS_AT_ONCE)
        )
        pulls = []
        for logits in self._logits(hidden):
            for some, after in zip(logits.split(POSITIONS_AT_ONCE), next_ones, strict=False):
                probability = self._told(some)
                known = (after >= 0).nonzero().squeeze(1)
                probability[known, after[known]] -= 1
                some.copy_(probability.mul_((after >= 0).unsqueeze(1)))
            pulls.append(logits @ cast(torch.Tensor, self._weight))
        found: torch.Tensor = torch.cat(pulls).unflatten(0, rows.shape)
        return found

    def weigh(self, moments: Moments, positions: int) -> None:
        """Adds to the moments of the head's inputs, sums over so many positions, what errors cost in lookups."""
        if HEAD_PATH not in moments:
            return
        self._weight = None
        told = moments[HEAD_PATH] * (self._spread / self._seen / positions)
        self._moment = moments[HEAD_PATH] = told.add_(self._gradients, alpha=1 / self._learned)

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
        if self._moment is None:
            return torch.arange(count, device=left.device)
        products = product_type(left.device)
        moment = self._moment.to(products)
        costs = self._frequency * torch.cat(
            [(part.to(products) @ moment).float().mul_(part).sum(dim=1) for part in left.split(2**12)]
        )
        return costs.topk(count).indices.sort().values
