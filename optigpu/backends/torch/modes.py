"""The contexts of forward passes: an autograd mode, and optionally autocast and one attention kernel."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from optigpu.backends.torch.attention import only_kernel
from optigpu.hardware.device_kinds import torch_name
from optigpu.techniques.base import ModeOptions
from optigpu.vocabulary import DeviceKind

Mode = Callable[[], AbstractContextManager[None]]
"""Makes the context of forward passes; called once for each `with`."""


def mode_of(options: ModeOptions, device: DeviceKind) -> Mode:
    """The mode that a stack asks for. A technique of one test or a whole request may run within one `with` of it."""
    autograd = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": torch.enable_grad}

    @contextmanager
    def mode() -> Iterator[None]:
        dtype = getattr(torch, options.autocast) if options.autocast else None
        with (
            autograd[options.autograd](),
            torch.autocast(torch_name(device), dtype=dtype, enabled=dtype is not None),
            only_kernel(options.attention_kernel),
        ):
            yield

    return mode


def within(mode: Mode, steps: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The same steps, each made in the mode, which is left before the caller gets to see it."""
    while True:
        with mode():
            made = next(steps, None)
        if made is None:
            return
        yield made
