from typing import Literal

from optigpu.techniques.base import ON_MODELS, Choice, Expected, ModeOptions, Phase, Technique


class InferenceMode(Technique):
    """Runs forward passes under torch.inference_mode; without it they run under torch.no_grad."""

    phase = Phase.EXECUTION
    tasks = ON_MODELS
    summary = "no gradients, and none of the version counters and view tracking that autograd needs"
    citation = "PyTorch 1.9, 2021, pytorch.org/docs/stable/notes/autograd.html (inference mode)"
    expected = (Expected("aim", "a few percent where operators are tiny, no change where they are large"),)
    choices = (Choice.AUTOGRAD,)
    only_when_asked = True  # What it saves is within the noise of most machines

    name: Literal["inference_mode"] = "inference_mode"

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(autograd="inference")
