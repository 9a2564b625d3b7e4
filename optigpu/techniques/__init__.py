"""The techniques, one file each, in four layers.

To add one: write its file, name its class in `TECHNIQUES` and in the union. The request schema, the command line's
choices and the documentation's table follow from the union.
"""

from typing import Annotated, get_args

from pydantic import Field

from optigpu.techniques.base import Technique
from optigpu.techniques.compilation.torch_compile import TorchCompile
from optigpu.techniques.kernels.eager_attention import EagerAttention
from optigpu.techniques.kernels.fused_attention import FusedAttention
from optigpu.techniques.memory.no_kv_cache import NoKvCache
from optigpu.techniques.memory.static_kv_cache import StaticKvCache
from optigpu.techniques.quantization.bf16 import Bf16
from optigpu.techniques.quantization.fp16 import Fp16
from optigpu.techniques.quantization.int8_weight_only import Int8WeightOnly

AnyTechnique = Annotated[
    # fmt: off
    Fp16 | Bf16 | Int8WeightOnly | EagerAttention | FusedAttention | NoKvCache | StaticKvCache | TorchCompile,
    # fmt: on
    Field(discriminator="name"),
]
"""The union that a request's `stack` is made of; the one list of all techniques."""

TECHNIQUES: dict[str, type[Technique]] = {
    member.model_fields["name"].default: member for member in get_args(get_args(AnyTechnique)[0])
}
"""Every technique's class by its name."""
