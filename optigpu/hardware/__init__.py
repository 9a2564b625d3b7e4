"""Facts about this machine, read without torch."""

from optigpu.hardware.probe import hardware_class, probe

__all__ = ["hardware_class", "probe"]
