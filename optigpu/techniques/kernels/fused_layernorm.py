"""fused_layernorm: the addition of the residual and LayerNorm as one operation."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import FUSED_NORMS
from optigpu.surgery.norm_blocks import norm_reason
from optigpu.techniques.base import ON_TEXT, Basis, Expected, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class FusedLayernorm(Technique):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    A LayerNorm is one operator of torch already: what goes is the addition before it, and a read of its result.
    """

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.OWN_KERNELS,)
    summary: ClassVar[str] = "adding the residual and LayerNorm in one kernel"
    citation: ClassVar[str] = "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (Deep-Fusion)"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "one launch fewer for each norm on a GPU",
        ),
        Expected(
            Basis.MEASURED,
            "no gain with fused GELU in a compiled step of GPT-2 on two Zen 4 cores: 9.23x with both, 9.96x "
            "without",
            "results/README.md",
        ),
        Expected(
            Basis.AIM,
            "little; on a CPU no measurable change beside the matrix products, and none under torch_compile, "
            "which fuses these itself",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = FUSED_NORMS

    name: Literal["fused_layernorm"] = "fused_layernorm"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The family's norms must be LayerNorms, and a CPU needs a compiler for the operator."""
        return norm_reason("LayerNorm", environment, device, model)

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """The gain is too small to be tried unasked."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Exchanges the classes of blocks and norms in place.

        Raises UnsupportedError, with the model left as it was, for blocks that are not known or without LayerNorms, and
        where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_blocks import fuse_norms

        notes.record(**fuse_norms(model, "LayerNorm"))
