"""What this machine is: probed without torch."""

from optigpu.hardware.probe import hardware_class, machine, probe

__all__ = ["hardware_class", "machine", "probe"]
