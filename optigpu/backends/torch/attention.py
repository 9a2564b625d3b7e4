"""The contexts of forward passes: autograd, autocast and attention kernels; and which of these ran, by a profile."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from optigpu.hardware.device_kinds import KINDS, torch_name
from optigpu.techniques.base import AttentionKernel, ModeOptions
from optigpu.vocabulary import DeviceKind, UnsupportedError

_KERNEL = re.compile(r"scaled_dot_product|flash_fwd|flash_attn|fmha|attention|softmax", re.IGNORECASE)
_WRAPPERS = {"aten::scaled_dot_product_attention", "aten::softmax"}
"""Operators that only dispatch to one of the others."""
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "flash_3": SDPBackend.FLASH_ATTENTION,
    "memory_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""torch's names of the kernels that may be asked for; FlashAttention-3 takes the place of its own flash kernel."""
_OPERATORS = {
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash",
    "aten::_scaled_dot_product_efficient_attention": "memory_efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "flash_attn_3::fwd": "flash_3",
}
"""The name of each kernel in a profile. flash_3 runs within torch's flash operator."""
_NONE_LEFT = ("No available kernel", "No viable backend")
"""torch's message if all of its available kernels are forbidden."""


def activities_of(device: DeviceKind) -> list[ProfilerActivity]:
    """What torch's profiler records there: operators, and the kernels of a GPU where it sees them."""
    activity = KINDS[device].activity
    return [ProfilerActivity.CPU, *([getattr(ProfilerActivity, activity)] if activity else [])]


def attention_kernels(run: Callable[[], object], device: DeviceKind) -> list[str]:
    """Names of the attention operators and device kernels that `run` executes, sorted."""
    with profile(activities=activities_of(device)) as profiler:
        run()
    return attention_names({event.key for event in profiler.key_averages()})


def attention_names(names: Collection[str]) -> list[str]:
    """Those of attention operators and kernels, of all names in a profile, sorted."""
    return sorted(name for name in names if _KERNEL.search(name) and name not in _WRAPPERS)


@contextmanager
def only_kernel(kernel: AttentionKernel) -> Iterator[None]:
    """Has scaled_dot_product_attention run one kernel alone, also in what is compiled meanwhile; "auto" allows all.

    Raises UnsupportedError when that one cannot run. torch's cache of compiled code does not know which kernels are
    allowed (2.13), so a tag distinguishes code that is compiled here.
    """
    if kernel == "auto":
        yield
        return
    tag = f"{torch.compiler.config.cache_key_tag}+{kernel}"
    refusal = (
        f"torch cannot run its {kernel} attention kernel for this model's dtype, heads and mask (on CUDA flash takes "
        "float16 or bfloat16 and no mask, which a static cache makes); ask fused_attention for another one."
    )
    with (
        one_of_kernels([_BACKENDS[kernel]], refusal),
        torch.compiler.config.patch(cache_key_tag=tag),  # type: ignore[attr-defined]
    ):
        yield


@contextmanager
def one_of_kernels(kernels: list[SDPBackend], refusal: str) -> Iterator[None]:
    """Has scaled_dot_product_attention run one of these. Raises UnsupportedError(refusal) when none of them can run."""
    try:
        with sdpa_kernel(kernels):
            yield
    except RuntimeError as error:
        if not any(words in str(error) for words in _NONE_LEFT):
            raise
        raise UnsupportedError(refusal) from error


def require_kernel(asked: AttentionKernel, names: Collection[str]) -> None:
    """Raises UnsupportedError when another kernel ran than was asked for, or none; `names`: of `attention_kernels`."""
    ran = {_OPERATORS[name] for name in names if name in _OPERATORS}
    if "flash_3" in ran:
        ran.discard("flash")
    if asked != "auto" and ran != {asked}:
        raise UnsupportedError(
            f"fused_attention asked for the {asked} kernel, but {' and '.join(sorted(ran)) or 'none'} ran; ask for "
            "another kernel or leave the choice to torch."
        )


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
