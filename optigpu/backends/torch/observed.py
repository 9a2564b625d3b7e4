"""What a run really did, from a profile that is taken apart from timed requests: attention kernels, the numbers that
matrices were multiplied in, and whether the device computed at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.profiler import profile

from optigpu.backends.torch.attention import activities_of, attention_names
from optigpu.hardware.device_kinds import KINDS
from optigpu.vocabulary import DeviceKind

_PRODUCTS = frozenset(
    {
        *(
            "aten::mm",
            "aten::addmm",
            "aten::bmm",
            "aten::baddbmm",
            "aten::mv",
            "aten::addmv",
            "aten::convolution",
        ),
        *(
            "aten::linear",
            "mkldnn::_linear_pointwise",
            "mkl::_mkl_linear",
            "aten::_scaled_dot_product_attention_math",
        ),
        *("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_efficient_attention"),
        *("aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_cudnn_attention"),
    }
)
"""Operators that multiply matrices. Kernels of our own and of other libraries are not among them."""
_LAUNCHING = frozenset({"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"})
"""Those of them that launch their kernels themselves on a GPU."""
_DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8_e4m3fn",
    "c10::Float8_e5m2": "float8_e5m2",
}
"""The profiler's names of floating-point dtypes, and torch's."""


@dataclass(frozen=True)
class Observed:
    """What one run did. `device_kernels` says whether a GPU computed; None on a CPU, and without a profile of it.

    `product_dtypes` are those of the operands of matrix products, sorted; empty where no operator of torch made any.
    """

    attention: list[str]
    product_dtypes: list[str]
    device_kernels: bool | None


def observed(run: Callable[[], object], device: DeviceKind) -> Observed:
    """Runs it once, slowly. Within compiled code only what Inductor left as an operator call is visible."""
    with profile(activities=activities_of(device), record_shapes=True) as profiler:
        run()
    results = profiler.profiler.kineto_results if profiler.profiler else None
    events = results.events() if results else []
    products = {
        _DTYPES.get(dtype) for event in events if event.name() in _PRODUCTS for dtype in event.dtypes()
    }
    names = {event.key for event in profiler.key_averages()}
    return Observed(
        attention=attention_names(names),
        product_dtypes=sorted(filter(None, products)),
        device_kernels=computed_there(
            any(event.device_type().name != "CPU" for event in events),
            [bool(event.kernels) for event in profiler.events() or [] if event.name in _LAUNCHING],
        )
        if KINDS[device].activity
        else None,
    )


def computed_there(ran_kernels: bool, products: Sequence[bool]) -> bool:
    """Whether a device computed that ran kernels, or none. products: for each matrix product whether it launched one.

    A model that falls back to the CPU still copies to the device and chooses tokens on it.
    """
    return ran_kernels and sum(products) >= len(products) / 2
