"""inference_mode: forward passes whose tensors autograd does not keep track of at all."""

from typing import ClassVar, Literal

from optigpu.documents.result import Environment
from optigpu.techniques.base import ON_MODELS, Basis, Choice, Expected, ModeOptions, Phase, Technique
from optigpu.vocabulary import DeviceKind, Layer, Task


class InferenceMode(Technique):
    """Runs forward passes under torch.inference_mode; without it they run under torch.no_grad."""

    layer: ClassVar[Layer] = Layer.MEMORY
    phase: ClassVar[Phase] = Phase.EXECUTION
    tasks: ClassVar[tuple[Task, ...]] = ON_MODELS
    summary: ClassVar[str] = (
        "no gradients, and none of the version counters and view tracking that autograd needs"
    )
    citation: ClassVar[str] = (
        "PyTorch 1.9, 2021, pytorch.org/docs/stable/notes/autograd.html (inference mode)"
    )
    expected: ClassVar[tuple[Expected, ...]] = (
        Expected(
            Basis.AIM,
            "a few percent where operators are tiny, no change where they are large",
        ),
    )
    choices: ClassVar[tuple[Choice, ...]] = (Choice.AUTOGRAD,)

    name: Literal["inference_mode"] = "inference_mode"

    def suits(self, environment: Environment, device: DeviceKind) -> bool:
        """What it saves is within the noise of most machines."""
        return False

    def execution(self, options: ModeOptions) -> ModeOptions:
        """torch.inference_mode around every forward pass."""
        return options.but(autograd="inference")
