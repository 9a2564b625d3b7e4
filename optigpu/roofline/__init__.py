"""How fast the hardware allows a variant to be, and what limits it: memory, compute or launches."""

from optigpu.roofline.roofs import Roofline, roofline_of
from optigpu.roofline.work import VariantWork, Work, work_of

__all__ = ["Roofline", "VariantWork", "Work", "roofline_of", "work_of"]
