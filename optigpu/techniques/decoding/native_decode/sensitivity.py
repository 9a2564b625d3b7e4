"""Predicts the cost of rounding each layer's weights of a decoder, before any is rounded.

The divergence of the model's next tokens from what they were is, for small errors, half the sum of each weight's
squared error times its Fisher information (Kullback and Leibler, 1951; used for bits by Dong et al., HAWQ, 2019,
arXiv:1905.03696, with the Hessian in its place). The information is the mean square of a weight's gradient of the
log-likelihood of text that the model wrote itself, so that no data are needed. The diagonal alone is looked at: errors
of rounding are as good as independent. On bundled:tiny the sum over all layers was 0.019 where 0.017 was measured.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.self_written import sampled
from optigpu.ops.decode.cpu.packing import squared_errors
from optigpu.ops.decode.program import WeightKind
from optigpu.surgery.places import Place, weight_of
from optigpu.techniques.decoding.native_decode.prediction import RAISED, finer_rows
from optigpu.techniques.decoding.native_decode.requirements import HEAD_PATH, has_tied_head

Information = dict[str, torch.Tensor]

ROWS, LENGTH = 4, 32
"""Sequences and tokens of the text. Eight times as many gave bundled:tiny the same order of layers."""
SEED = 0


def divergences(
    model: PreTrainedModel, places: Sequence[Place], kind: WeightKind, group: int
) -> dict[str, float]:
    """By how much less the model's next tokens diverge with the kind raised, for each layer's path.

    In nats for each token. `group` inputs of an output share a scale. The finer rows of a tied head are taken to be the
    first ones, as they are without calibration. With the costliest ones left out instead, a calibrated head kept its 4
    bits where 8 would have left out more: bundled:tiny with a fifth more bytes diverged by 0.0049 and not by 0.0032.
    """
    information = fisher_information(model, places, group)
    found = {}
    for place in places:
        weight = weight_of(place.layer)
        less = squared_errors(weight, kind, group) - squared_errors(weight, RAISED[kind], group)
        lost = 0.5 * (information[place.path] * less).sum(dim=1)
        if place.path == HEAD_PATH and has_tied_head(model):
            lost = lost[finer_rows(len(lost)) :]  # the others are rounded twice
        found[place.path] = float(lost.sum())
    return found


def fisher_information(model: PreTrainedModel, places: Sequence[Place], group: int) -> Information:
    """The Fisher information of linear layers, float32 [outputs, groups]: the mean over each group's weights, for one
    token.

    That of a tied head is of its products and of its lookups, as if these were not of the same weights.
    """
    length = min(LENGTH, model.config.max_position_embeddings)
    tokens = sampled(model, model.config.vocab_size, ROWS, length, SEED)
    with torch.enable_grad(), embedded_tokens(model) as embedded, _watched(places, group) as found:
        logits = model(input_ids=tokens[:, :-1], use_cache=False).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
        )
        (gradients,) = torch.autograd.grad(loss, embedded)  # and none is kept of a weight
    if HEAD_PATH in found and has_tied_head(model):
        for row, gradient in zip(tokens[:, :-1], _sequences(gradients), strict=True):
            _add_lookups(found[HEAD_PATH], row, gradient, group)
    predicted = tokens[:, 1:].numel()
    return {path: total / predicted for path, total in found.items()}


@contextmanager
def embedded_tokens(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """What the embedding gives in a pass, of which gradients can be asked for; empty before one."""
    embedded: list[torch.Tensor] = []

    def begin(*called: Any) -> torch.Tensor:
        embedded.append(called[-1].detach().requires_grad_())
        return embedded[-1]

    handle = model.get_input_embeddings().register_forward_hook(begin)
    try:
        yield embedded
    finally:
        handle.remove()


@contextmanager
def _watched(places: Sequence[Place], group: int) -> Iterator[Information]:
    """Filled while a pass over a batch runs forward and backward.

    The gradient of one layer at a time is in memory, and a head that is tied has one apart from the embedding's.
    """
    found: Information = {}

    def watch(path: str) -> Callable[..., None]:
        def forward(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            x = _sequences(inputs[0].detach())

            def backward(gradient: torch.Tensor) -> None:
                found[path] = _squared(_sequences(gradient), x, group)

            output.register_hook(backward)

        return forward

    handles = [place.layer.register_forward_hook(watch(place.path)) for place in places]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _add_lookups(found: torch.Tensor, tokens: torch.Tensor, gradients: torch.Tensor, group: int) -> None:
    """The squares of a table's gradients by the rows that a sequence looks up, averaged over its groups."""
    rows, places = tokens.unique(return_inverse=True)
    sums = gradients.new_zeros(len(rows), gradients.shape[1]).index_add_(0, places, gradients)
    found[rows] += sums.square().unflatten(1, (-1, group)).mean(dim=2)


def _sequences(activations: torch.Tensor) -> torch.Tensor:
    """float32 [ROWS, tokens, width]; OPT's come without the first dimension."""
    return activations.reshape(ROWS, -1, activations.shape[-1]).float()


def _squared(gradients: torch.Tensor, x: torch.Tensor, group: int) -> torch.Tensor:
    """The squares of a weight's gradients, summed over the sequences and averaged over its groups."""
    found = torch.zeros(gradients.shape[-1], x.shape[-1] // group, device=x.device)
    for gradient, row in zip(gradients, x, strict=True):
        found += (gradient.T @ row).square().unflatten(1, (-1, group)).mean(dim=2)
    return found
