from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability
from optigpu.surgery.extras import FUSED_ACTIVATIONS
from optigpu.techniques.base import ON_TEXT, Expected, KernelTechnique, Model, Notes
from optigpu.vocabulary import DeviceKind


class FusedSwiglu(KernelTechnique):
    """Replaces each gated MLP by one with a merged matrix, one kernel after it, and the same last layer."""

    tasks = ON_TEXT
    abilities = (Ability.OWN_KERNELS,)
    summary = "gate and up of a gated MLP as one matrix product, and its activation and product in one kernel"
    citation = "Hsu et al., Liger Kernel, 2024, arXiv:2410.10989; SwiGLU: Shazeer, 2020, arXiv:2002.05202"
    conflicts = FUSED_ACTIVATIONS
    expected = (
        Expected("arithmetic", "three operators fewer for each layer; the weights keep their size"),
        Expected("aim", "a few percent of an eager step"),
    )
    # A step that is bound by the weights' bytes gains little, and torch_compile fuses the activation itself.
    only_when_asked = True

    name: Literal["fused_swiglu"] = "fused_swiglu"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and environment.compiler is None:
            return f"{self.name} needs a C++ compiler on a CPU, and none was found; install g++."
        if model is not None and model.gated_mlp is False:
            return f"{self.name} needs a gated MLP, and {model.family} has none; leave it out of the stack."
        return None

    def modules(self, model: Model, notes: Notes) -> None:
        """Replaces every gated MLP in place, one after the other, so that only one is there twice.

        Raises UnsupportedError when there is no supported one, when a gate is not SiLU, when its two matrices cannot
        become one (see `require_mergeable`), and where there is no kernel but torch's own.
        """
        from optigpu.surgery.fused_modules import fuse_swiglu

        notes.record(**fuse_swiglu(model, self.name))
