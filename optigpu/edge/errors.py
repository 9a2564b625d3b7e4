"""What goes wrong while a model is converted."""

from optigpu.vocabulary import OptiGPUError


class ConversionError(OptiGPUError):
    """The conversion failed: a process of it ended, took too long, or gave what cannot be right."""
