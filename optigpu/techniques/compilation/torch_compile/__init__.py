"""torch_compile: the technique and its parts."""

from optigpu.techniques.compilation.torch_compile.technique import TorchCompile

__all__ = ["TorchCompile"]
