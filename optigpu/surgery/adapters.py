"""Low-rank factors beside linear layers, put there by peft, and quantized layers that pass gradients on.

The weights of a `FrozenLinear` stay, and gradients pass through to its inputs.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LayerWithFactors
from torch.nn import Module
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from optigpu.surgery.extras import AdapterParameters, Targets
from optigpu.surgery.places import ExpertPlace, LinearLayer, Place, exchange, places_but_the_head, weight_of
from optigpu.vocabulary import UnsupportedError

FACTOR_SEED = 0
"""Factors are drawn alike in every process, so that replicates train the same model."""
_ATTENTION = "Attention"
"""Part of the names of transformers' classes of attentions."""


def chosen_places(model: Module, places: Sequence[Place], targets: Targets, technique: str) -> list[Place]:
    """Those of `places` that get factors; experts get none. Raises UnsupportedError if there is no other."""
    shared = [place for place in places if not isinstance(place, ExpertPlace)]
    if targets == "all-linear" and shared:
        return shared
    attentions = tuple(
        f"{path}." for path, module in model.named_modules() if _ATTENTION in type(module).__name__
    )
    chosen = [place for place in shared if targets == "attention" and place.path.startswith(attentions)]
    if not chosen:
        raise UnsupportedError(
            f"{technique} found no linear layer within an attention of this model; set targets to all-linear."
        )
    return chosen


def add_factors(model: Module, places: Sequence[Place], parameters: AdapterParameters) -> dict[str, int]:
    """Adds factors to the layers, which alone require gradients from then on; returns what is to be recorded."""
    # A pattern matches whole paths, where a list of names would match their ends as well.
    paths = "|".join(re.escape(place.path) for place in places)
    config = LoraConfig(
        r=parameters.rank,
        lora_alpha=parameters.alpha,
        target_modules=paths,
        fan_in_fan_out=any(isinstance(place.layer, Conv1D) for place in places),
    )
    config._register_custom_module({FrozenLinear: LayerWithFactors})
    with torch.random.fork_rng(devices=[]):  # peft draws on the host
        torch.default_generator.manual_seed(FACTOR_SEED)
        inject_adapter_in_model(config, model)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    return {"adapted_layers": len(places), "factor_rank": parameters.rank, "factor_weights": trained}


def frozen_with_factors(
    model: PreTrainedModel,
    technique: str,
    quantized: "Callable[[LinearLayer], WideningLayer]",
    parameters: AdapterParameters,
    group: int = 1,
) -> dict[str, int]:
    """Replaces all linear layers but the head by quantized ones, and adds factors; returns what is to be recorded.

    Raises UnsupportedError as `places_but_the_head` and `chosen_places` do, with the model left as it was.
    """
    places = places_but_the_head(model, technique, group)
    chosen = chosen_places(model, places, parameters.targets, technique)
    exchange(places, lambda layer: FrozenLinear(quantized(layer), layer))
    return {"frozen_layers": len(places), **add_factors(model, chosen, parameters)}


class WideningLayer(Protocol):
    """A quantized linear layer that can say which weights it multiplies with."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., inner]; returns [..., outputs]."""

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights [outputs, inner]."""

    def buffers(self) -> Iterator[torch.Tensor]:
        """What it stores."""


class FrozenLinear(torch.nn.Module):
    """y = layer(x), with the gradient of y to x.

    The backward pass widens the weights again, one layer after the other; nothing of x is kept. `infeatures`,
    `outfeatures` and `qweight` are the names by which peft knows a quantized layer. Under autocast x is converted.
    """

    def __init__(self, layer: WideningLayer, replaced: LinearLayer) -> None:
        super().__init__()
        # torch's counters of operations know nothing of operators that nobody has told them.
        for library, names in _PRODUCTS.items():
            operators = getattr(torch.ops, library)
            for operator in (getattr(operators, name) for name in names if hasattr(operators, name)):
                if operator not in flop_registry:
                    register_flop_formula(operator)(_product_flops)
        self.layer = layer
        self.outfeatures, self.infeatures = weight_of(replaced).shape

    @property
    def qweight(self) -> torch.Tensor:
        return next(self.layer.buffers())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _passed_on(x.to(dtype), self.layer)


class _PassedOn(torch.autograd.Function):
    """Any linear layer with fixed weights W: the gradient to x is the gradient to y times W."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: WideningLayer) -> torch.Tensor:
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient @ ctx.layer.widened(gradient.dtype), None


_passed_on = cast(Callable[[torch.Tensor, WideningLayer], torch.Tensor], _PassedOn.apply)

_PRODUCTS = {"optigpu": ("int8_linear", "triton_int8_linear", "int4_linear"), "bitsandbytes": ("gemm_4bit",)}
"""The operators of quantized layers. Their first argument is x, and they return y."""


def _product_flops(x_shape: Sequence[int], *_: object, out_shape: Sequence[int], **_options: object) -> int:
    return 2 * math.prod(x_shape) * out_shape[-1]
