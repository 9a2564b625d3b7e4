"""Drawing numbers without a trace in torch's random state."""

from contextlib import AbstractContextManager

import torch


def forked_random(device: torch.device) -> AbstractContextManager[None]:
    """Leaves the random state of the CPU and of `device` as it was."""
    return torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type)
