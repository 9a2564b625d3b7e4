"""Operators by themselves, on tensors of their own: matmul, attention and norms."""

from optigpu.backends.torch.operators.runtime import TorchOperatorRuntime

__all__ = ["TorchOperatorRuntime"]
