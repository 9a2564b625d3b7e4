"""torch_compile: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.compilation.torch_compile.technique import TorchCompile

__all__ = ["TorchCompile"]
