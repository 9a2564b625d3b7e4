"""compile_training: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.training.compile_training.technique import CompileTraining

__all__ = ["CompileTraining"]
