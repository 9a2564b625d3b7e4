"""Low-rank factors beside linear layers, put there by peft."""

import re
from collections.abc import Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear as LayerWithFactors
from torch.nn import Module
from transformers.pytorch_utils import Conv1D

from optigpu.surgery.extras import AdapterParameters, Targets
from optigpu.surgery.frozen_layers import FrozenLinear
from optigpu.surgery.places import ExpertPlace, Place
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
    attentions = {path for path, module in model.named_modules() if _ATTENTION in type(module).__name__}
    chosen = [place for place in shared if targets == "attention" and _parents(place.path) & attentions]
    if not chosen:
        raise UnsupportedError(
            f"{technique} found no linear layer within an attention of this model; set targets to all-linear."
        )
    return chosen


def add_factors(model: Module, places: Sequence[Place], parameters: AdapterParameters) -> dict[str, int]:
    """Adds factors to the layers at `places` in place; from then on they alone require gradients.

    Returns what is to be recorded.
    """
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


def _parents(path: str) -> set[str]:
    """The paths of all modules around a module: "h.0.attn.c_attn" lies in "h.0.attn", "h.0" and "h"."""
    names = path.split(".")
    return {".".join(names[:length]) for length in range(1, len(names))}
