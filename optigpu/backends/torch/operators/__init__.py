"""Single operators without a model: matmul, attention and norms."""

from optigpu.backends.torch.operators.runtime import TorchOperatorRuntime

__all__ = ["TorchOperatorRuntime"]
