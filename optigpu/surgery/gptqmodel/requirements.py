"""Checks whether GPTQModel can quantize a model, before it is started."""

import copy
import importlib.util

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from optigpu.models.families import family_of
from optigpu.surgery.extras import Package, how_to_install
from optigpu.surgery.gptqmodel.recipe import Recipe, conv1d_reason
from optigpu.surgery.places import checked_places, weight_of
from optigpu.vocabulary import UnsupportedError

LIBRARY: Package = "gptqmodel"
AWQ_OUTPUTS = 64
"""The number of outputs that the library processes together when it searches for clipping limits."""


def require_quantizable(model: PreTrainedModel, recipe: Recipe) -> None:
    """Raises UnsupportedError when the library is missing, or cannot quantize the model by the recipe."""
    if recipe.method == "awq":
        _require_known_to_awq(model)
    if importlib.util.find_spec(LIBRARY) is None:
        raise UnsupportedError(how_to_install(LIBRARY))
    head = model.get_output_embeddings()
    for place in checked_places(model, recipe.method, recipe.group_size):
        outputs = weight_of(place.layer).shape[0]
        if recipe.method == "awq" and place.layer is not head and outputs % AWQ_OUTPUTS:
            raise UnsupportedError(
                f"GPTQModel's AWQ needs layers whose outputs are a multiple of {AWQ_OUTPUTS}; {place.path} has "
                f"{outputs}. Use gptq instead."
            )
    _require_own_parameters(model, recipe.method)


def _require_known_to_awq(model: PreTrainedModel) -> None:
    """The library scales the layers of each family by a recipe of its own."""
    family = family_of(model.config.model_type)
    reason = conv1d_reason(family.name)
    if reason:
        raise UnsupportedError(reason)
    known = family.gptqmodel_activation
    activation = getattr(model.config, family.keys.activation, known)
    if known is not None and activation != known:
        raise UnsupportedError(
            f"GPTQModel's AWQ supports {family.title} models with the activation {known}; this one has {activation}. "
            "Use gptq instead."
        )


def _require_own_parameters(model: PreTrainedModel, technique: str) -> None:
    """GPTQModel knows each family's own layers, so none of them may have been merged or moved before."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config))
    names = [{name for name, _ in each.named_parameters()} for each in (plain, model)]
    if names[0] != names[1]:
        raise UnsupportedError(
            f"{technique} quantizes a model with the parameters of its family, and {min(names[0] ^ names[1])} was "
            "removed or added before; leave out the technique that did so."
        )
