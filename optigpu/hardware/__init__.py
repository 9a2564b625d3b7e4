"""Facts about this machine, read without torch."""

from optigpu.hardware.probe import best_device, hardware_class, probe

__all__ = ["best_device", "hardware_class", "probe"]
