"""Which families of models are written as GGUF, with the parts that the writer needs of them, and which fields of their
configurations a file or its engines have. Imports no torch.
"""

from dataclasses import dataclass

from optigpu.models.families import FAMILIES, AttentionParts, Decoder, GgufFamily, Mlp, family_of
from optigpu.models.loading.expressed import ROTATION, SIZES, Fields
from optigpu.vocabulary import UnsupportedError

EXPRESSED: Fields = {
    **SIZES,
    **ROTATION,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "attention_bias", "mlp_bias")),
    "rope_parameters.rope_type": ("default", "llama3"),
    # Each architecture of llama.cpp has one function.
    "hidden_act": ("silu", "swish"),
    "activation_function": ("gelu_new", "gelu_fast", "gelu_pytorch_tanh"),
    # The same products in another order.
    "reorder_and_upcast_attn": None,
}
"""What a file says of a model, and what llama.cpp computes without being told."""


@dataclass(frozen=True)
class WrittenFamily:
    """As ModelFamily, of a family whose parts are all known; `names` are llama.cpp's of a block's layers, by ours."""

    gguf: GgufFamily
    decoder: Decoder
    attention: AttentionParts
    mlp: Mlp
    conv1d: bool

    @property
    def names(self) -> dict[str, str]:
        """Paths from a block, and what llama.cpp calls the layers there."""
        joined = len(self.attention.qkv) == 1
        inputs = ("attn_qkv",) if joined else ("attn_q", "attn_k", "attn_v")
        attention = zip((*self.attention.qkv, self.attention.output), (*inputs, "attn_output"), strict=True)
        mlp = {self.mlp.gate: "ffn_gate", self.mlp.up: "ffn_up", self.mlp.down: "ffn_down"}
        return {
            self.decoder.first: "attn_norm",
            **{f"{self.attention.path}.{name}": theirs for name, theirs in attention},
            self.decoder.second: "ffn_norm",
            **{f"{self.mlp.path}.{name}": theirs for name, theirs in mlp.items() if name},
        }


def written_family(name: str) -> WrittenFamily:
    """The family of that model_type. Raises UnsupportedError for one that is not written."""
    family = family_of(name)
    if family.gguf and family.decoder and family.attention and family.mlp:
        return WrittenFamily(family.gguf, family.decoder, family.attention, family.mlp, family.conv1d)
    written = " and ".join(name for name, each in FAMILIES.items() if each.gguf)
    raise UnsupportedError(
        f"{name} models cannot be written as GGUF here, only {written} models; ask for the backend torch."
    )


def family_of_architecture(name: str) -> str:
    """The family that llama.cpp calls so. Raises ValueError for one that no file is written of here."""
    known = {family.gguf.architecture: each for each, family in FAMILIES.items() if family.gguf}
    if name not in known:
        raise ValueError(f"its architecture is {name!r}, and those known here are {', '.join(known)}")
    return known[name]
