"""How fast the hardware allows a variant to be, and which limit it meets."""

from optigpu.roofline.roofs import Roof, Roofline, Step, roofline_of
from optigpu.roofline.work import VariantWork, Work, training_step_flops, work_of

__all__ = ["Roof", "Roofline", "Step", "VariantWork", "Work", "roofline_of", "training_step_flops", "work_of"]
