"""Models on an NVIDIA GPU."""

from optigpu.backends.torch.applied import DecodingModel
from optigpu.job.spec import resolve
from optigpu.techniques.base import Technique
from optigpu.vocabulary import DeviceKind
from tests.engine.tiny_models import ignore


def on_cuda(model: str, *stack: Technique) -> DecodingModel:
    """The model with the stack applied."""
    return DecodingModel(model, resolve(stack, "generate"), DeviceKind.CUDA, seed=0, progress=ignore)
