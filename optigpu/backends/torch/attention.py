"""Which attention kernels really ran: the names in a profile, taken apart from what is timed."""

import re
from collections.abc import Callable
from typing import Any

from optigpu.vocabulary import DeviceKind

_KERNEL = re.compile(r"scaled_dot_product|flash_fwd|fmha|attention|softmax", re.IGNORECASE)
_WRAPPERS = {"aten::scaled_dot_product_attention", "aten::softmax"}
"""Operators that only choose one of the others."""


def attention_kernels(run: Callable[[], Any], device: DeviceKind) -> list[str]:
    """Names of the attention operators and device kernels that `run` executes, sorted.

    Within compiled code only what Inductor left as an operator call is visible.
    """
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device is DeviceKind.CUDA:
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        run()
    names = {event.key for event in profiler.key_averages()}
    return sorted(name for name in names if _KERNEL.search(name) and name not in _WRAPPERS)
