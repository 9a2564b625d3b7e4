"""The parts of a decoder that is to be divided."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from optigpu.models.families import AttentionParts, Decoder, Mlp, family_of
from optigpu.surgery.places import require_unquantized
from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class Divisible:
    """A loaded model whose parts are all known. `core` is the decoder without the head."""

    core: PreTrainedModel
    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp

    @property
    def blocks(self) -> list[torch.nn.Module]:
        """The decoder's layers, first to last."""
        return list(getattr(self.core, self.decoder.blocks))


def divisible(model: PreTrainedModel, technique: str) -> Divisible:
    """Raises UnsupportedError for a family that is not divided here, and for quantized weights."""
    require_unquantized(model, technique)
    family = family_of(model.config.model_type)
    # A forward pass that needs a mask knows more of the tokens than what stands for them (`inputs_embeds`).
    if not (family.decoder and family.attention and family.mlp) or family.needs_mask:
        raise UnsupportedError(
            f"{technique} does not divide {family.title} models; leave it out of the stack."
        )
    core = model.get_submodule(family.decoder.path)
    assert isinstance(core, PreTrainedModel)
    return Divisible(core, family.decoder, family.attention, family.mlp)
