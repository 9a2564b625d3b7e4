"""Which families of decoders are written as ONNX graphs, with the parts that the writer needs. Imports no torch."""

from dataclasses import dataclass

from optigpu.models.families import FAMILIES, AttentionParts, Decoder, Mlp, family_of
from optigpu.vocabulary import UnsupportedError


@dataclass(frozen=True)
class Parts:
    """As ModelFamily, of a family whose parts are all known; `activation` is a name in the configuration."""

    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp
    conv1d: bool
    activation: str


def parts_of(name: str) -> Parts:
    """The parts of a model_type. Raises UnsupportedError for one whose blocks are not all known."""
    family = family_of(name)
    if family.decoder and family.attention and family.mlp:
        return Parts(family.decoder, family.attention, family.mlp, family.conv1d, family.keys.activation)
    written = ", ".join(
        name for name, each in FAMILIES.items() if each.decoder and each.attention and each.mlp
    )
    raise UnsupportedError(
        f"{name} models cannot be written as ONNX graphs here, only {written}; ask for the backend torch."
    )
