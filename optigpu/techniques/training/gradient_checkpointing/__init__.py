"""gradient_checkpointing: activations of blocks are computed again in the backward pass, all or the cheap ones."""

from optigpu.techniques.training.gradient_checkpointing.technique import GradientCheckpointing

__all__ = ["GradientCheckpointing"]
