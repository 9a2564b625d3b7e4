"""fused_rmsnorm: the addition of the residual and RMSNorm as one operation."""

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


class FusedRmsnorm(Technique):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    transformers computes an RMSNorm by seven operators, so far more goes than with a LayerNorm.
    """

    layer: ClassVar[Layer] = Layer.KERNELS
    phase: ClassVar[Phase] = Phase.KERNELS
    tasks: ClassVar[tuple[Task, ...]] = ON_TEXT
    abilities: ClassVar[tuple[Ability, ...]] = (Ability.OWN_KERNELS,)
    summary: ClassVar[str] = "adding the residual and RMSNorm in one kernel"
    citation: ClassVar[str] = "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989"
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.ARITHMETIC,
            "seven operators fewer for each norm",
        ),
        Expected(
            Basis.AIM,
            "a few percent where launches dominate (small models, batch 1); no change under torch_compile, "
            "which fuses these itself",
        ),
    )
    conflicts: ClassVar[Mapping[str, str]] = FUSED_NORMS

    name: Literal["fused_rmsnorm"] = "fused_rmsnorm"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        """The family's norms must be RMSNorms, and a CPU needs a compiler for the operator."""
        return norm_reason("RMSNorm", environment, device, model)

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """A compiled step, the better rung, fuses norms by itself."""
        return False

    def modules(self, model: "PreTrainedModel", notes: Notes) -> None:
        """Exchanges the classes of blocks and norms in place.

        Raises UnsupportedError, with the model left as it was, for blocks that are not known or without RMSNorms, and
        where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_blocks import fuse_norms

        notes.record(**fuse_norms(model, "RMSNorm"))
