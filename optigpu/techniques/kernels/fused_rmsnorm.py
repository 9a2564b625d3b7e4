from typing import Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import FUSED_NORMS
from optigpu.surgery.norm_blocks import norm_reason
from optigpu.techniques.base import ON_TEXT, Expected, Model, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer


class FusedRmsnorm(Technique):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    transformers computes an RMSNorm by seven operators, so far more goes than with a LayerNorm.
    """

    layer = Layer.KERNELS
    phase = Phase.KERNELS
    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = "adding the residual and RMSNorm in one kernel"
    citation = "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989"
    expected = (
        Expected("arithmetic", "seven operators fewer for each norm"),
        Expected(
            "aim",
            "a few percent where launches dominate (small models, batch 1); no change under torch_compile, "
            "which fuses these itself",
        ),
    )
    conflicts = FUSED_NORMS
    only_when_asked = True  # A compiled step, the better rung, fuses norms by itself

    name: Literal["fused_rmsnorm"] = "fused_rmsnorm"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return norm_reason("RMSNorm", environment, device, model)

    def modules(self, model: Model, notes: Notes) -> None:
        """Exchanges the classes of blocks and norms in place.

        Raises UnsupportedError, with the model left as it was, for blocks that are not known or without RMSNorms, and
        where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_blocks import fuse_norms

        notes.record(**fuse_norms(model, "RMSNorm"))
