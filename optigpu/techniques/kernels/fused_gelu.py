from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import FUSED_ACTIVATIONS
from optigpu.techniques.base import ON_MODELS, Expected, KernelTechnique, Model, Notes
from optigpu.vocabulary import DeviceKind


class FusedGelu(KernelTechnique):
    """Replaces each MLP's activation by one that adds the bias itself, and its linear layer by one without a bias."""

    tasks = ON_MODELS
    abilities = (Ability.OWN_KERNELS,)
    summary = "bias and GELU of an MLP in one kernel: one pass over its widest activation"
    citation = (
        "Aminabadi et al., DeepSpeed Inference, 2022, arXiv:2207.00032 (fusing element-wise operators); "
        "GELU: Hendrycks and Gimpel, 2016, arXiv:1606.08415"
    )
    conflicts = FUSED_ACTIVATIONS
    expected = (
        Expected(
            "arithmetic", "one pass over an MLP's widest activation; the library's GELU is eight operators"
        ),
        Expected(
            "measured here",
            "no gain with fused norms in a compiled step of GPT-2 on two Zen 4 cores: 9.23x with both, 9.96x "
            "without",
            "results/README.md",
        ),
        Expected(
            "aim", "a few percent of an eager step; no change under torch_compile, which fuses them itself"
        ),
    )
    # What it replaces is fused by torch_compile as well, and the activation is a small part of a step.
    only_when_asked = True

    name: Literal["fused_gelu"] = "fused_gelu"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} needs a C++ compiler on a CPU, and none was found; install g++."
        if model is not None and model.gated_mlp:
            return f"{self.name} needs an MLP without a gate; {model.family} has a gated one. Use fused_swiglu instead."
        return None

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces the linear layer and the activation of every MLP in place; the weights stay where they are.

        Raises UnsupportedError when there is no supported MLP, when its activation is not GELU, when the layer before
        that is neither a torch Linear nor a Conv1D, and where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_modules import fuse_gelu

        notes.record(**fuse_gelu(model, self.name))
