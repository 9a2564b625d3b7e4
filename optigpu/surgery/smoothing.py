"""Smoothing: outliers of activations move into the weights that multiply them, and outputs stay the same.

Where a norm feeds linear layers, channel j of the norm's output is divided by s_j and column j of the weights is
multiplied by it, s_j = max |x_j|^alpha / max |w_j|^(1 - alpha) (Xiao et al., SmoothQuant, 2022, arXiv:2211.10438).
Each s_j is rounded to a power of two here, so that every product and sum stays what it was to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from optigpu.models.loading.self_written import sampled
from optigpu.surgery.places import linear_places, weight_of
from optigpu.vocabulary import UnsupportedError

OWN_ROWS, OWN_LENGTH = 4, 64
"""Sequences that a model generates for its own calibration, and tokens of each."""
_OWN_SEED = 0
Followers = dict[torch.nn.Module, tuple[torch.Tensor, list[torch.nn.Module]]]
"""For each norm its output, and the linear layers that got this tensor."""
MOST_DOUBLINGS = 10
"""No factor is above 2^10 or below 2^-10: float16 weights stay in range."""
_ROUNDINGS = 64
"""Two passes may differ by this many roundings of the largest logit, because products may be split differently."""


@dataclass(frozen=True)
class _Pair:
    """A norm, the linear layers that its output goes into, and that output's largest magnitudes [width]."""

    norm: torch.nn.Module
    layers: tuple[torch.nn.Module, ...]
    largest: torch.Tensor


def smooth(model: PreTrainedModel, calibration_ids: torch.Tensor, alpha: float = 0.5) -> int:
    """Smooths every pair of a norm and the linear layers directly after it, in place; returns the number of norms.

    calibration_ids: int64 [sequences, length] of the model's ids, on its device; `alpha`, from 0 to 1, says how much of
    the difficulty moves into the weights. Raises ValueError when the ids or alpha do not fit, and UnsupportedError,
    with the model left as it was, when no linear layer follows a norm directly or when the outputs would change.
    """
    _check(model, calibration_ids, alpha)
    with torch.no_grad():
        with _watched(model) as outputs:
            before = _logits(model, calibration_ids)
        pairs = [
            _Pair(norm, tuple(layers), output.abs().flatten(0, -2).amax(dim=0).float())
            for norm, (output, layers) in outputs.items()
            if layers
        ]
        if not pairs:
            raise UnsupportedError(
                "smoothing needs a linear layer directly after a norm, and this model has none; leave smoothing out."
            )
        factors = [_factors(pair, alpha) for pair in pairs]
        for pair, factor in zip(pairs, factors, strict=True):
            _scale(pair, factor)
        difference = float((_logits(model, calibration_ids) - before).abs().max())
        if not difference <= _ROUNDINGS * torch.finfo(before.dtype).eps * float(before.abs().max()):
            for pair, factor in zip(pairs, factors, strict=True):
                _scale(pair, 1 / factor)
            raise UnsupportedError(
                "smoothing would change this model's outputs, since other parts use the outputs of its norms; leave "
                "smoothing out."
            )
    return len(pairs)


def own_text(model: PreTrainedModel) -> torch.Tensor:
    vocabulary = getattr(model.config, "vocab_size", None)
    if vocabulary is None or not hasattr(model, "generate"):
        raise UnsupportedError(
            "smoothing needs a model that generates its calibration text, and this one does not; leave smoothing out."
        )
    length = min(OWN_LENGTH, model.config.max_position_embeddings)
    return sampled(model, vocabulary, OWN_ROWS, length, _OWN_SEED)


def _check(model: PreTrainedModel, ids: object, alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, not {alpha}.")
    shown = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
    if not isinstance(ids, torch.Tensor) or ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise ValueError(f"calibration_ids must be int64 [sequences, length], not {shown}.")
    config = model.config
    if ids.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"calibration_ids have {ids.shape[1]} tokens each; this model's context is "
            f"{config.max_position_embeddings}."
        )
    lowest, highest = int(ids.min()), int(ids.max())
    if lowest < 0 or highest >= config.vocab_size:
        raise ValueError(
            f"Token id {lowest if lowest < 0 else highest} of calibration_ids is out of range: this model's ids are 0 "
            f"to {config.vocab_size - 1}."
        )


def _logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


@contextmanager
def _watched(model: PreTrainedModel) -> Iterator[Followers]:
    outputs: Followers = {}

    def left_norm(norm: torch.nn.Module, _: object, output: torch.Tensor) -> None:
        outputs[norm] = (output, [])

    def entered_linear(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        for output, layers in outputs.values():
            if inputs and inputs[0] is output:
                layers.append(layer)

    def is_norm(module: torch.nn.Module) -> bool:
        """Whether it has a vector of weights; whether it multiplies by them, `smooth` sees by the outputs."""
        weight = getattr(module, "weight", None)
        return weight is not None and getattr(weight, "dim", lambda: 0)() == 1 and not list(module.children())

    handles = [norm.register_forward_hook(left_norm) for norm in model.modules() if is_norm(norm)]
    # A tied head's columns are not its own to scale. An int8 table has no weight, and ties none.
    table = getattr(model.get_input_embeddings(), "weight", None)
    handles += [
        place.layer.register_forward_pre_hook(entered_linear)
        for place in linear_places(model)
        if place.layer.weight is not table
    ]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _factors(pair: _Pair, alpha: float) -> torch.Tensor:
    """Powers of two [width]; 1 for a channel that is zero in the activations or the weights."""
    columns = torch.stack([weight_of(layer).abs().amax(dim=0).float() for layer in pair.layers]).amax(dim=0)
    doublings = alpha * pair.largest.log2() - (1 - alpha) * columns.log2()
    both = (pair.largest > 0) & (columns > 0)
    index = doublings.where(both, 0).round().clamp(-MOST_DOUBLINGS, MOST_DOUBLINGS).long() + MOST_DOUBLINGS
    # From a table, since exp2 need not be exact.
    powers = [2.0**exponent for exponent in range(-MOST_DOUBLINGS, MOST_DOUBLINGS + 1)]
    return torch.tensor(powers, device=index.device)[index]


def _scale(pair: _Pair, factor: torch.Tensor) -> None:
    """Divides the norm's output by `factor` and multiplies the layers' columns by it."""
    for vector in (pair.norm.weight, getattr(pair.norm, "bias", None)):
        if isinstance(vector, torch.Tensor):
            vector.copy_(vector / factor)
    for layer in pair.layers:
        weight = weight_of(layer)
        weight.copy_(weight * factor)
