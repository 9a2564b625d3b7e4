"""What can go wrong between the runner and a device on a serial line.

TinyError
├── PortError     the port cannot be opened, or has gone
├── SilenceError  the device says nothing for too long
├── ResetError    the device started again in the middle of an answer
└── AnswerError   the device answers something else than the protocol asks for
"""

from optigpu.vocabulary import OptiGPUError


class TinyError(OptiGPUError):
    """The device cannot be driven; the text is one sentence for a person."""


class PortError(TinyError):
    """The serial port cannot be opened, or has gone."""


class SilenceError(TinyError):
    """The device says nothing for too long."""


class ResetError(TinyError):
    """The device started again in the middle of an answer."""


class AnswerError(TinyError):
    """The answer is not what the protocol asks for."""
