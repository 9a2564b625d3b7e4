"""A check of the loops that measure how fast a CPU is: what they copy arrives, and each of them ends."""

import torch

from optigpu.documents.selftest import Comparison
from optigpu.ops.kernel_check import Draw, KernelCheck
from optigpu.ops.rates.rates import PRODUCTS, SLICE_BYTES, WAYS, RateLoops
from optigpu.vocabulary import DeviceKind, ReplicateError

SLICES, PASSES, ROUNDS = 256, 3, 1000


def rate_loops(device: DeviceKind) -> Comparison:
    """The share of copied numbers that differ. Raises ReplicateError for a loop that takes no time."""
    loops = RateLoops(torch.get_num_threads())
    source = Draw(device)(SLICES * SLICE_BYTES // 4)
    wrong, times = 0.0, []
    for way in WAYS:
        target = torch.zeros_like(source)
        times += [loops.read_s(source, PASSES, way), loops.copy_s(target, source, PASSES, way)]
        wrong = max(wrong, float((target != source).double().mean()))
    known = [name for name in PRODUCTS if loops.operations(name)]
    times += [loops.multiply_s(name, ROUNDS) for name in known]
    if min(times) <= 0:
        raise ReplicateError("One of the loops took no time.")
    return Comparison(wrong, 0.0, "the copied numbers", ", ".join(known))


KERNELS = {"rate_loops": KernelCheck(rate_loops, devices=(DeviceKind.CPU,))}
