"""The roofline: how fast the hardware allows a variant to be, and what limits it."""

from optigpu.roofline.roofs import Roofline, roofline_of
from optigpu.roofline.work import VariantWork, Work, training_step_flops, work_of

__all__ = ["Roofline", "VariantWork", "Work", "roofline_of", "training_step_flops", "work_of"]
