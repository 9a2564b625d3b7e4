from typing import Literal

from optigpu.documents.facts import ModelFacts
from optigpu.documents.result import Environment
from optigpu.hardware.device_kinds import Ability, needs_capability, refusal
from optigpu.techniques.base import (
    EVERYWHERE,
    AttentionKernel,
    Expected,
    KernelTechnique,
    LoadOptions,
    Model,
    ModeOptions,
    Notes,
    Trial,
)
from optigpu.vocabulary import DeviceKind, UnsupportedError

FLASH_HEAD_SIZE = 256
"""The largest head that the flash kernels for CUDA take."""


class FusedAttention(KernelTechnique):
    """Attention through torch's scaled_dot_product_attention; which kernel ran is recorded.

    `kernel` forbids all others but one. torch's flash kernel is FlashAttention-2 on CUDA and an own one on CPUs, where
    there is no memory-efficient one. "math" is separate operators, the reference of the others. "flash_3" runs
    FlashAttention-3 in the place of torch's own flash kernel, on Hopper GPUs with the package flash-attn-3.
    """

    tasks = EVERYWHERE
    summary = "softmax(QK^T)V in one kernel that never stores the scores"
    citation = (
        "Dao et al., FlashAttention, 2022, arXiv:2205.14135; Shah et al., FlashAttention-3, 2024, "
        "arXiv:2407.08608"
    )
    expected = (
        Expected("literature", "memory grows linearly with the length instead of quadratically"),
        Expected("aim", "no change for short sequences"),
    )
    compared_with = ("eager_attention",)
    later = ("kernel",)
    trials = (
        Trial(),
        Trial({"kernel": "math"}),
        Trial({"kernel": "memory_efficient"}, devices=(DeviceKind.CUDA,), error_bound=0.02),
        Trial({"kernel": "flash"}, beside=("bf16",), devices=(DeviceKind.CUDA,), error_bound=0.1),
    )

    name: Literal["fused_attention"] = "fused_attention"
    kernel: AttentionKernel = "auto"

    def check(self, environment: Environment, device: DeviceKind, model: ModelFacts | None) -> str | None:
        if device is DeviceKind.CPU and self.kernel == "memory_efficient":
            return "torch has no memory-efficient attention kernel for CPUs; set kernel to flash or math."
        if device is DeviceKind.CPU and self.kernel == "flash_3":
            return "FlashAttention-3 needs a Hopper GPU; set kernel to flash or math on a CPU."
        if device is DeviceKind.CPU or self.kernel == "auto":
            return None
        asked = f"fused_attention with the {self.kernel} kernel"
        absent = refusal(device, Ability.ATTENTION_KERNELS, asked, "set kernel to auto")
        if absent or not self.kernel.startswith("flash"):
            return absent
        if model and model.head_size > FLASH_HEAD_SIZE:
            return (
                f"Flash attention needs a head size of at most {FLASH_HEAD_SIZE}; this model has {model.head_size}. "
                "Set kernel to memory_efficient or math."
            )
        if self.kernel == "flash_3":
            # Why FlashAttention-3 cannot run on the first GPU, or None.
            reason = needs_capability(environment, (9, 0), "FlashAttention-3 kernels")
            capability = None if reason else environment.gpus(DeviceKind.CUDA)[0].compute_capability
            if reason or capability in (None, "9.0"):
                return reason
            return (
                f"FlashAttention-3 needs a Hopper GPU (compute capability 9.0), and this one has {capability}; set "
                "kernel to flash."
            )
        return needs_capability(environment, (8, 0), "Flash attention kernels")

    def load(self, options: LoadOptions) -> LoadOptions:
        return options.but(attention="sdpa")

    def execution(self, options: ModeOptions) -> ModeOptions:
        return options.but(attention_kernel=self.kernel)

    def modules(self, model: Model, notes: Notes) -> None:
        """Puts FlashAttention-3 in the place of torch's own kernel, for this process, where it is asked for.

        Raises UnsupportedError when this torch does not know it, or its package is missing.
        """
        if self.kernel == "flash_3":
            from torch.nn import attention

            activate = getattr(attention, "activate_flash_attention_impl", None)
            if activate is None:
                raise UnsupportedError(
                    "This torch does not offer FlashAttention-3; upgrade it, or set kernel to flash."
                )
            try:
                activate("FA3")
            except (ImportError, RuntimeError, ValueError) as error:
                raise UnsupportedError(
                    f"FlashAttention-3 cannot be loaded here ({error}); install flash-attn-3 from PyTorch's own "
                    "index of wheels, or set kernel to flash."
                ) from error
            notes.record(flash_attention="FA3")
