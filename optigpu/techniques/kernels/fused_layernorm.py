from typing import Literal

from optigpu.documents.result import Environment
from optigpu.documents.shapes import ModelFacts
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import FUSED_NORMS
from optigpu.surgery.norm_blocks import norm_reason
from optigpu.techniques.base import ON_TEXT, Expected, Model, Notes, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer


class FusedLayernorm(Technique):
    """Rewrites the decoder's blocks so that each sum that is normed is made by the norm's own kernel.

    A LayerNorm is one operator of torch already: what goes is the addition before it, and a read of its result.
    """

    layer = Layer.KERNELS
    phase = Phase.KERNELS
    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = "adding the residual and LayerNorm in one kernel"
    citation = "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (Deep-Fusion)"
    expected = (
        Expected("arithmetic", "one launch fewer for each norm on a GPU"),
        Expected(
            "measured here",
            "no gain with fused GELU in a compiled step of GPT-2 on two Zen 4 cores: 9.23x with both, 9.96x "
            "without",
            "results/README.md",
        ),
        Expected(
            "aim",
            "little; on a CPU no measurable change beside the matrix products, and none under torch_compile, "
            "which fuses these itself",
        ),
    )
    conflicts = FUSED_NORMS
    only_when_asked = True  # The gain is too small to be tried unasked

    name: Literal["fused_layernorm"] = "fused_layernorm"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        return norm_reason("LayerNorm", environment, device, model)

    def modules(self, model: Model, notes: Notes) -> None:
        """Exchanges the classes of blocks and norms in place.

        Raises UnsupportedError, with the model left as it was, for blocks that are not known or without LayerNorms, and
        where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_blocks import fuse_norms

        notes.record(**fuse_norms(model, "LayerNorm"))
